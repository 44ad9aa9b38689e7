/* 06_ggml.c - esa as a custom operation of a ggml graph, in place of ggml_flash_attn_ext.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Before: 05_engine.c. docs/hosts.md explains it and says how to build it with a real ggml; in
 * the tests of esa it runs on a stand-in with ggml's names. The graph here is one attention, of
 * which the program checks the output; in a model it is one node among many. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ggml.h>
#include <ggml-cpu.h>
#include <esa/esa_session.h>

/* ---- the operation. Every thread of ggml calls it (whatever n_tasks says), so every thread takes
 * some heads. A ctx takes one call at a time: each head has its own, with one thread, and its own
 * session. The output does not depend on the number of threads. */
typedef struct sparse_head {
    esa_ctx *ctx;
    esa_session *session;
    esa_status status; /* of the last call: an operation of ggml cannot return it */
} sparse_head;

typedef struct sparse_model sparse_model;
typedef struct sparse_layer {
    sparse_model *model;
    int32_t layer;
} sparse_layer; /* what ggml carries to the operation; lives as long as the model */

struct sparse_model {
    int32_t heads;
    sparse_head *head;   /* [heads] */
    sparse_layer *layer; /* [params.layers] */
};

static void sparse_close(sparse_model *m)
{
    for (int32_t h = 0; m->head && h < m->heads; h++) {
        esa_session_free(m->head[h].session);
        esa_ctx_free(m->head[h].ctx);
    }
    free(m->head);
    free(m->layer);
}

/* Once per model. 0, or -1 after a message; the caller closes m in both cases. */
static int sparse_open(sparse_model *m, int32_t heads, const esa_session_params *params)
{
    esa_ctx_params one = esa_ctx_params_default();
    one.threads = 1;
    m->heads = heads;
    m->head = calloc((size_t)heads, sizeof *m->head);
    m->layer = calloc((size_t)params->layers, sizeof *m->layer);
    if (!m->head || !m->layer) return -1;
    for (int32_t i = 0; i < params->layers; i++) m->layer[i] = (sparse_layer){ m, i };
    for (int32_t h = 0; h < heads; h++) {
        sparse_head *head = &m->head[h];
        if (esa_ctx_create(&head->ctx, &one)) return -1;
        if (!esa_session_create(head->ctx, &head->session, params) &&
            !esa_session_begin(head->session))
            continue;
        fprintf(stderr, "esa: %s\n", esa_ctx_error(head->ctx));
        return -1;
    }
    return 0;
}

/* Before the graph of a step is computed. branch 1: the negative prompt, if params.branches is 2.
 */
static int sparse_step(sparse_model *m, int32_t step, int32_t branch)
{
    for (int32_t h = 0; h < m->heads; h++)
        if (esa_session_step(m->head[h].session, step, branch)) return -1;
    return 0;
}

/* After the graph was computed: 0, or -1 after a message. */
static int sparse_check(const sparse_model *m)
{
    for (int32_t h = 0; h < m->heads; h++)
        if (m->head[h].status) {
            fprintf(stderr, "esa, head %d: %s\n", (int)h, esa_ctx_error(m->head[h].ctx));
            return -1;
        }
    return 0;
}

/* One head of a tensor, as B x 1 x tokens x D. heads and tokens are the axes that hold them. */
static esa_tensor head_of(const struct ggml_tensor *t, int64_t head, int heads, int tokens)
{
    const size_t size = ggml_type_size(t->type);
    const int32_t dtype = t->type == GGML_TYPE_F32   ? ESA_DTYPE_F32
                          : t->type == GGML_TYPE_F16 ? ESA_DTYPE_F16
                                                     : ESA_DTYPE_BF16;
    esa_tensor view = esa_tensor_bnsd((char *)t->data + (size_t)head * t->nb[heads], dtype,
                                      t->ne[3], 1, t->ne[tokens], t->ne[0]);
    view.stride[0] = (int64_t)(t->nb[3] / size);
    view.stride[2] = (int64_t)(t->nb[tokens] / size);
    return view;
}

static void sparse_compute(struct ggml_tensor *dst, int ith, int nth, void *user)
{
    const sparse_layer *l = user;
    const struct ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2];
    for (int32_t h = ith; h < l->model->heads; h += nth) {
        sparse_head *head = &l->model->head[h];
        const int64_t kv = h / (q->ne[2] / k->ne[2]); /* groups of query heads share a key head */
        const esa_tensor tq = head_of(q, h, 2, 1), tk = head_of(k, kv, 2, 1),
                         tv = head_of(v, kv, 2, 1), to = head_of(dst, h, 1, 2);
        head->status = esa_session_attention(head->session, l->layer, ESA_CALL_SELF, &tq, &tk, &tv,
                                             &to, NULL);
    }
}

/* Takes q [D, Nq, H, B], k and v [D, Nk, Hkv, B], returns [D, H, Nq, B]: the shapes of
 * ggml_flash_attn_ext with scale 1/sqrt(D) and without a mask. The types of q, k and v are one of
 * f32, f16, bf16; views whose first axis is dense will do. */
static struct ggml_tensor *sparse_attention(struct ggml_context *ctx, sparse_model *m, int layer,
                                            struct ggml_tensor *q, struct ggml_tensor *k,
                                            struct ggml_tensor *v)
{
    struct ggml_tensor *args[] = { q, k, v };
    return ggml_custom_4d(ctx, q->type, q->ne[0], q->ne[2], q->ne[1], q->ne[3], args, 3,
                          sparse_compute, GGML_N_TASKS_MAX, &m->layer[layer]);
}

/* ---- the checks: a graph with one attention, on tokens that resemble their neighbours */
enum { H = 4, HKV = 2, T = 4, Y = 16, X = 16, N = T * Y * X, D = 32, BLOCK = 32, STEPS = 2 };
enum { BLOCKS = (N + BLOCK - 1) / BLOCK, WIDTH = (BLOCKS + 7) / 8 };

/* A tensor as a projection leaves it, [D, heads, N], seen as [D, N, heads]. */
static struct ggml_tensor *input(struct ggml_context *ctx, int heads, unsigned seed)
{
    struct ggml_tensor *tensor = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, D, heads, N, 1);
    float *data = tensor->data;
    unsigned s = seed;
    for (int i = 0; i < N * heads * D; i++) {
        const int n = i / (heads * D), t = n / (Y * X), y = n / X % Y, x = n % X, d = i % D;
        const int axis = d % 3 == 0 ? 3 * t : d % 3 == 1 ? y : x;
        s = s * 1664525u + 1013904223u;
        data[i] = 1.5f * cosf((float)(axis * (1 + d / 6)) * 0.1f) +
                  0.3f * (float)((int)(s >> 24) - 128) / 128.0f;
    }
    return ggml_permute(ctx, tensor, 0, 2, 1, 3);
}

/* Relative error of o [D, H, N] against attention in double over the blocks in bits
 * [H][BLOCKS][WIDTH]; NULL: all. q, k and v are as input makes them. */
static double error_of(const struct ggml_tensor *o, const uint8_t *bits)
{
    static double score[N];
    const float *q = o->src[0]->data, *k = o->src[1]->data, *v = o->src[2]->data, *got = o->data;
    double top_error = 0, bottom = 0;
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) {
            const uint8_t *row = bits ? bits + (h * BLOCKS + i / BLOCK) * WIDTH : NULL;
            const int g = h / (H / HKV);
            double top = -INFINITY, sum = 0;
            for (int j = 0; j < N; j++) {
                score[j] = -INFINITY;
                if (row && !(row[j / BLOCK / 8] >> (j / BLOCK % 8) & 1)) continue;
                double dot = 0;
                for (int d = 0; d < D; d++)
                    dot += (double)q[(i * H + h) * D + d] * k[(j * HKV + g) * D + d];
                score[j] = dot / sqrt(D);
                top = fmax(top, score[j]);
            }
            for (int j = 0; j < N; j++) sum += score[j] = exp(score[j] - top);
            for (int d = 0; d < D; d++) {
                double mean = 0;
                for (int j = 0; j < N; j++) mean += score[j] * v[(j * HKV + g) * D + d];
                mean /= sum;
                top_error += (got[(i * H + h) * D + d] - mean) * (got[(i * H + h) * D + d] - mean);
                bottom += mean * mean;
            }
        }
    return sqrt(top_error / bottom);
}

/* The mask of every head, as its session makes it. */
static int read_masks(sparse_model *m, const esa_select_params *select,
                      const struct ggml_tensor *out, uint8_t *bits)
{
    for (int32_t h = 0; h < m->heads; h++) {
        const esa_tensor tq = head_of(out->src[0], h, 2, 1),
                         tk = head_of(out->src[1], h / (H / HKV), 2, 1);
        esa_mask *mask;
        if (esa_select(m->head[h].ctx, &mask, &tq, &tk, select)) return -1;
        const esa_status status = esa_mask_to_bits(mask, bits + h * BLOCKS * WIDTH);
        esa_mask_free(mask);
        if (status) return -1;
    }
    return 0;
}

/* Computes a graph per step and returns the error of the last; -1: a call failed. masked 1: against
 * dense attention behind esa's masks. out [D, H, N] receives the output. */
static double run(const esa_session_params *params, int threads, int masked, float *out)
{
    static uint8_t bits[H * BLOCKS * WIDTH];
    sparse_model m = { 0 };
    struct ggml_context *ctx = ggml_init((struct ggml_init_params){ .mem_size = 16 << 20 });
    struct ggml_tensor *q = input(ctx, H, 1), *k = input(ctx, HKV, 2), *v = input(ctx, HKV, 3), *o;
    int good = !sparse_open(&m, H, params);
    for (int step = 0; good && step < STEPS; step++) {
        struct ggml_cgraph *graph = ggml_new_graph(ctx);
        o = sparse_attention(ctx, &m, 0, q, k, v);
        ggml_build_forward_expand(graph, o);
        good = !sparse_step(&m, step, 0) &&
               ggml_graph_compute_with_ctx(ctx, graph, threads) == GGML_STATUS_SUCCESS &&
               !sparse_check(&m);
    }
    if (good && masked) good = !read_masks(&m, &params->select, o, bits);
    if (good) memcpy(out, o->data, N * H * D * sizeof *out);
    const double error = good ? error_of(o, masked ? bits : NULL) : -1;
    sparse_close(&m);
    ggml_free(ctx);
    return error;
}

int main(void)
{
    static float one[N * H * D], three[N * H * D];
    /* The settings of 05_engine.c. */
    esa_session_params params = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ERROR,
                                                               N);
    params.layers = 1;
    params.steps = STEPS;
    params.work = esa_preset_work_for(ESA_PRESET_BALANCED, params.steps, params.carry,
                                      params.branches);
    params.work_or_least = 1;
    params.select.layout.grid_q[0] = T;
    params.select.layout.grid_q[1] = Y;
    params.select.layout.grid_q[2] = X;
    const double recommended = run(&params, 1, 0, one);
    const int same = run(&params, 3, 0, three) >= 0 && !memcmp(one, three, sizeof one);

    /* Every block kept, then half of them and nothing in place of the others. */
    esa_session_params plain = esa_session_params_default();
    plain.layers = 1;
    plain.steps = STEPS;
    plain.warmup_frac = 0;
    plain.dense_first_layer = 0;
    plain.select = esa_select_params_default(ESA_SELECT_ADA_BSA);
    plain.select.block_q = plain.select.block_k = BLOCK;
    plain.select.budget = 1;
    const double full = run(&plain, 2, 0, one);
    plain.select.budget = 0.5;
    const double half = run(&plain, 2, 1, one);
    printf("recommended: relative error %.2g against dense, %s with 1 and 3 threads\n"
           "every block: %.2g against dense; half: %.2g against its mask\n",
           recommended, same ? "the same bits" : "DIFFERENT", full, half);
    /* esa sums in f32, so a few units of 2^-24 are all that may differ. */
    return same && recommended >= 0 && recommended < 0.1 && full >= 0 && full < 2e-6 && half >= 0 &&
                   half < 2e-6
               ? 0
               : 1;
}
