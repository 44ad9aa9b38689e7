/* synth.c - synthetic q, k, v that look like heads of a video transformer. The same seed gives the
 * same numbers.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Tokens lie on a grid t x h x w. As in the models, q and k are vectors turned by a rotary
 * embedding, whose pairs are divided among the three axes with frequencies 10000^(-f/F). A constant
 * vector with energy a_f^2 in pair f then scores sum_f a_f^2 cos(w_f (p_i - p_j)): energy in the
 * fast pairs of an axis makes attention local along that axis. Added to it:
 *
 *   content   plane waves that drift over the frames, in the slow pairs, which hardly turn. Tokens
 *             that show the same thing attract each other anywhere. The strength varies smoothly.
 *   sinks     a few patches whose keys carry a direction, in the slowest pair, that all queries
 *             look for
 *   noise     independent per token, about 0.4 in the logits
 *
 * Strengths are logits (after the scale D^-0.5) at distance 0. The four kinds of heads:
 *
 *   local     sharp along all axes: a neighbourhood in space and time
 *   temporal  sharp in space, flat in time: the same place in every frame
 *   sink      most mass on the sink patches, the rest weakly local
 *   diffuse   weak everywhere, mostly content: mass spread over the whole video
 *
 * Values drift smoothly too, each channel with its own waves, plus noise: neighbours have similar
 * values, as in real videos. */
#include "core/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WAVES     3 /* plane waves per content or value channel */
#define TURN      6.283185307179586
#define MAX_PAIRS (ESA_MAX_HEAD_DIM / 2)

typedef struct strengths {
    double axis[3], content, sink;
} strengths; /* axis: t, h, w */

static const strengths kinds[SYNTH_KINDS] = {
    { { 3.0, 4.0, 4.0 }, 1.0, 0.0 },
    { { 0.4, 5.5, 5.5 }, 1.2, 0.0 },
    { { 0.5, 1.5, 1.5 }, 0.8, 7.0 },
    { { 0.4, 0.8, 0.8 }, 2.0, 0.0 },
};

typedef struct wave {
    double kt, ky, kx, phase;
} wave;

/* A wave 6 .. 40 tokens long, whose pattern moves by (vy, vx) tokens per frame. */
static wave wave_new(data_rng *rng, double vy, double vx)
{
    const double length = 6.0 * pow(40.0 / 6.0, data_unit(rng)), angle = TURN * data_unit(rng);
    wave w;
    w.ky = TURN / length * sin(angle);
    w.kx = TURN / length * cos(angle);
    w.kt = -(w.ky * vy + w.kx * vx);
    w.phase = TURN * data_unit(rng);
    return w;
}

/* The sum of WAVES waves at a token, scaled to variance 1. */
static double field(const wave *w, double t, double y, double x)
{
    double sum = 0;
    for (int i = 0; i < WAVES; i++)
        sum += cos(w[i].kt * t + w[i].ky * y + w[i].kx * x + w[i].phase);
    return sum * sqrt(2.0 / WAVES);
}

typedef struct pair {
    int axis;
    double speed, energy;
    int slow;
} pair;

/* Divides the pairs among t, h, w. The strength of an axis goes to its pairs with w_f >= 0.15, most
 * of it to the fastest. */
static void pairs_new(pair *p, int count, const strengths *s)
{
    const int each = count / 3, share[3] = { count - 2 * each, each, each };
    for (int axis = 0, at = 0; axis < 3; at += share[axis], axis++) {
        double sum = 0;
        for (int f = 0; f < share[axis]; f++) {
            pair *one = &p[at + f];
            one->axis = axis;
            one->speed = pow(10000.0, -(double)f / share[axis]);
            one->slow = one->speed < 0.02;
            one->energy = one->speed >= 0.15 ? sqrt(one->speed) : 0.0;
            sum += one->energy;
        }
        for (int f = 0; f < share[axis]; f++) p[at + f].energy *= s->axis[axis] / sum;
    }
}

/* 1 inside one of four patches of 4 x 8 tokens spread over the video; the first is in frame 0. */
static int is_sink(const int32_t g[3], int t, int y, int x)
{
    for (int i = 0; i < 4; i++)
        if (t == i * g[0] / 4 && y / 4 == (2 * i + 1) * (g[1] / 4) / 8 &&
            x / 8 == (7 - 2 * i) * (g[2] / 8) / 8)
            return 1;
    return 0;
}

static void fill_head(float *q, float *k, float *v, const int32_t g[3], int D, int kind,
                      data_rng *rng)
{
    const strengths *s = &kinds[kind];
    const int P = D / 2;
    pair p[MAX_PAIRS];
    wave content[ESA_MAX_HEAD_DIM][WAVES], value[ESA_MAX_HEAD_DIM][WAVES], contrast[WAVES];
    double offset[ESA_MAX_HEAD_DIM];
    int slow = 0;
    const double vy = 1.5 * (data_unit(rng) - 0.5), vx = 3.0 * (data_unit(rng) - 0.5),
                 root = sqrt((double)D);
    pairs_new(p, P, s);
    for (int f = 0; f < P; f++) slow += p[f].slow;
    for (int d = 0; d < D; d++) {
        offset[d] = 0.5 * data_normal(rng);
        for (int i = 0; i < WAVES; i++) {
            content[d][i] = wave_new(rng, vy, vx);
            value[d][i] = wave_new(rng, vy, vx);
        }
    }
    for (int i = 0; i < WAVES; i++) contrast[i] = wave_new(rng, vy, vx);
    /* Noise of the logits: |q| = root of the whole strength times D^0.5, and 0.4 = |q| noise
     * D^-0.5. */
    const double whole = s->axis[0] + s->axis[1] + s->axis[2] + s->content + s->sink;
    const double noise = 0.4 * root / sqrt(whole * root);
    const double look = sqrt(s->sink * root); /* split evenly over query and key */
    int64_t n = 0;
    for (int t = 0; t < g[0]; t++)
        for (int y = 0; y < g[1]; y++)
            for (int x = 0; x < g[2]; x++, n++) {
                const double place[3] = { t, y, x };
                const double strong = s->content * root *
                                      (1.0 + 0.5 * tanh(field(contrast, t, y, x)));
                const double gain = slow ? sqrt(strong / (2.0 * slow)) : 0.0;
                const int sink = is_sink(g, t, y, x);
                for (int f = 0; f < P; f++) {
                    const double base = sqrt(p[f].energy * root),
                                 angle = p[f].speed * place[p[f].axis];
                    double re = base, im = 0, kre, kim;
                    if (p[f].slow) {
                        re += gain * field(content[2 * f], t, y, x);
                        im += gain * field(content[2 * f + 1], t, y, x);
                    }
                    kre = re;
                    kim = im;
                    if (f == P - 1) {
                        im += look;
                        kim += sink ? look : 0.0;
                    }
                    const double c = cos(angle), d = sin(angle);
                    q[n * D + 2 * f] = (float)(c * re - d * im + noise * data_normal(rng));
                    q[n * D + 2 * f + 1] = (float)(d * re + c * im + noise * data_normal(rng));
                    k[n * D + 2 * f] = (float)(c * kre - d * kim + noise * data_normal(rng));
                    k[n * D + 2 * f + 1] = (float)(d * kre + c * kim + noise * data_normal(rng));
                }
                for (int d = 0; d < D; d++)
                    v[n * D + d] = (float)(offset[d] + field(value[d], t, y, x) +
                                           0.3 * data_normal(rng));
            }
}

void synth_fill(esa_tensor *q, esa_tensor *k, esa_tensor *v, const int32_t grid[3], uint64_t seed)
{
    const int64_t H = q->dim[1], N = q->dim[2], D = q->dim[3];
    for (int64_t h = 0; h < H; h++) {
        data_rng rng = { seed * 0x9e3779b97f4a7c15u + (uint64_t)h * 0xd1342543de82ef95u + 1 };
        fill_head((float *)q->data + h * N * D, (float *)k->data + h * N * D,
                  (float *)v->data + h * N * D, grid, (int)D, (int)(h % SYNTH_KINDS), &rng);
    }
}

int synth_open(synth_case *c, const cli_list *grid, int64_t heads, int64_t dim, int64_t seed,
               int64_t threads, const char *what)
{
    esa_tensor *const all[] = { &c->q, &c->k, &c->v, &c->o, &c->ref };
    memset(c, 0, sizeof *c);
    if (dim % 2)
        return cli_usage("%s: --dim was given %lld, expected an even number", what, (long long)dim);
    c->seed = (uint64_t)seed;
    cli_list_copy(c->grid, grid);
    const int status = cli_ctx_new(&c->ctx, threads);
    if (status) return status;
    for (int i = 0; i < 5; i++) {
        *all[i] = data_tensor_new(ESA_DTYPE_F32, 1, heads,
                                  grid->whole[0] * grid->whole[1] * grid->whole[2], dim);
        if (!all[i]->data) return CLI_FAILED;
    }
    synth_fill(&c->q, &c->k, &c->v, c->grid, c->seed);
    return CLI_OK;
}

void synth_close(synth_case *c)
{
    esa_tensor *const all[] = { &c->q, &c->k, &c->v, &c->o, &c->ref };
    for (int i = 0; i < 5; i++) data_tensor_free(all[i]);
    esa_ctx_free(c->ctx);
}
