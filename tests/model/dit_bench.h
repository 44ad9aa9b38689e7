/* dit_bench.h - an opened transformer of any family on any device, its inputs, and one forward.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_DIT_BENCH_H
#define ESA_TESTS_MODEL_DIT_BENCH_H

#include "model/dit/dit_kind.h"
#include "model/golden.h"
#include "model/host_bf16.h"
#include "model/open_part.h"
#include "model/wan_folder.h"

/* The inputs of a case: made-up tensors NAME.latents, NAME.text and NAME.pooled. */
typedef struct dit_inputs {
    const char *name;
    const int32_t *latent;
    int64_t rows, valid; /* of the text; the others are zeros */
    int64_t text_dim, pooled_dim;
    double t, guidance;
} dit_inputs;

typedef struct dit_bench {
    esa_ctx *ctx;
    esa_nn nn;
    esa_part_env env;
    wan_folder folder;
    dit_inputs in;
    esa_dit *dit;
    float *x, *v, *text, *pooled; /* host memory */
    esa_view on_x, on_v;          /* x and v on the device of nn */
    int64_t in_count, out_count, tokens;
    int32_t ticks, stop_at; /* stop_at: the tick that cancels; 0: none */
} dit_bench;

static inline void dit_ok(dit_bench *b, esa_status status)
{
    if (status != ESA_OK) print_error("%s: %s\n", esa_status_name(status), esa_ctx_error(b->ctx));
    assert_int_equal(status, ESA_OK);
}

static inline int32_t dit_tick(void *user, int64_t done, int64_t total)
{
    dit_bench *b = user;
    assert_true(done >= 1 && done <= total);
    return ++b->ticks == b->stop_at;
}

/* A ctx and operations. device: ESA_DEVICE_*, or ON_HOST_BF16. */
static inline void dit_start(dit_bench *b, int32_t threads, int32_t device)
{
    memset(b, 0, sizeof *b);
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&b->ctx, &p), ESA_OK);
    esa_nn_init(&b->nn, b->ctx);
    dit_ok(b, use_device(&b->nn, device));
    b->env = (esa_part_env){ .nn = &b->nn, .tick = dit_tick, .tick_user = b };
}

static inline float *dit_filled(const dit_bench *b, const char *what, int64_t count, float scale)
{
    char name[64];
    float *data = malloc((size_t)count * 4 + 4);
    assert_non_null(data);
    snprintf(name, sizeof name, "%s.%s", b->in.name, what);
    fill_tensor(data, count, name, scale, 0);
    return data;
}

/* Opens the transformer of b->folder, and makes its inputs. */
static inline void dit_open_with(dit_bench *b, const dit_inputs *in, const esa_dit_kind *kind,
                                 const void *config)
{
    b->env.folder = b->folder.top.dir;
    dit_ok(b, open_dit(&b->env, &b->dit, kind, config));
    const esa_dit *d = b->dit;
    const int64_t volume = (int64_t)in->latent[0] * in->latent[1] * in->latent[2];
    b->in = *in;
    b->in_count = volume * d->in_channels;
    b->out_count = volume * d->out_channels;
    b->tokens = volume / (d->patch[0] * d->patch[1] * d->patch[2]);
    b->x = dit_filled(b, "latents", b->in_count, 2.0f);
    b->text = dit_filled(b, "text", in->rows * in->text_dim, 1.0f);
    b->pooled = dit_filled(b, "pooled", in->pooled_dim, 1.0f);
    b->v = malloc((size_t)b->out_count * 4);
    assert_non_null(b->v);
    const int32_t device = b->nn.be->device;
    b->on_x = esa_view_of(NULL, ESA_DTYPE_F32, device, 1, b->in_count);
    b->on_v = esa_view_of(NULL, ESA_DTYPE_F32, device, 1, b->out_count);
    dit_ok(b, esa_nn_alloc(&b->nn, &b->on_x.data, b->in_count * 4, "x"));
    dit_ok(b, esa_nn_alloc(&b->nn, &b->on_v.data, b->out_count * 4, "v"));
}

/* One forward as step 0 of 1. params gives mode and select of the session; the rest is filled in
 * here. The caller frees the session. */
static inline esa_session *dit_run(dit_bench *b, esa_session_params *params)
{
    esa_session *session = NULL;
    const esa_text text = {
        .data = b->text, .pooled = b->pooled, .rows = b->in.rows, .valid = b->in.valid
    };
    esa_layout *layout = &params->select.layout;
    const int32_t place = b->dit->kind->text_place;
    if (place == ESA_TEXT_FRONT) layout->text_front_q = (int32_t)b->in.rows;
    if (place == ESA_TEXT_BACK) layout->text_back_q = (int32_t)b->in.rows;
    dit_ok(b, esa_dit_begin(b->dit, b->in.latent, layout, params->select.selector,
                            params->select.mode, 1));
    dit_ok(b, esa_dit_text(b->dit, 0, &text));
    params->layers = b->dit->blocks;
    params->steps = 1;
    params->warmup_frac = 0;
    dit_ok(b, esa_session_create(b->ctx, &session, params));
    dit_ok(b, esa_session_begin(session));
    dit_ok(b, esa_session_step(session, 0, 0));
    dit_ok(b, esa_nn_write(&b->nn, &b->on_x, b->x));
    const esa_dit_call call = { .session = session,
                                .v = b->on_v.data,
                                .x = b->on_x.data,
                                .t = b->in.t,
                                .guidance = b->in.guidance };
    dit_ok(b, esa_dit_forward(b->dit, &call));
    dit_ok(b, esa_nn_read(&b->nn, b->v, &b->on_v));
    return session;
}

static inline void dit_close(dit_bench *b)
{
    esa_dit_free(b->dit);
    esa_nn_free(&b->nn, b->on_x.data, b->in_count * 4);
    esa_nn_free(&b->nn, b->on_v.data, b->out_count * 4);
    assert_int_equal(b->nn.held, b->nn.scratch_bytes); /* the parts freed everything */
    esa_nn_close(&b->nn);
    wan_folder_remove(&b->folder);
    esa_ctx_free(b->ctx);
    free(b->x);
    free(b->v);
    free(b->text);
    free(b->pooled);
}

static inline esa_session_params dense(int32_t order)
{
    esa_session_params p = esa_session_params_default();
    p.mode = ESA_SESSION_DENSE;
    p.select.layout.order = order;
    return p;
}

/* ---------------------------------------------------------------- blocks */

enum { MOST_BLOCKS = 16 };

/* The hidden states of one run. */
typedef struct states {
    float *block[MOST_BLOCKS + 1]; /* [rows * d]; the first is the input of block 0 */
    int64_t count;
    int32_t seen;
} states;

static inline void keep_states(void *user, int32_t block, const float *hidden, int64_t rows,
                               int64_t d)
{
    states *s = user;
    assert_int_equal(block + 1, s->seen);
    s->count = rows * d;
    s->block[s->seen] = malloc((size_t)s->count * 4);
    assert_non_null(s->block[s->seen]);
    memcpy(s->block[s->seen++], hidden, (size_t)s->count * 4);
}

static inline void states_free(states *s)
{
    for (int32_t i = 0; i < s->seen; i++) free(s->block[i]);
}

/* The root mean square of the difference over that of want. */
static inline double distance(const float *got, const float *want, int64_t count)
{
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        const double e = (double)got[i] - (double)want[i];
        difference += e * e;
        size += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / size);
}

/* Runs two opened benches, of which the second is in bf16. Every block and the output may be off by
 * 1.2 times what diffusers loses, which the golden has under this name. */
static inline void compare_blocks(dit_bench b[2], int32_t order, const char *golden,
                                  const char *name)
{
    states s[2] = { { .seen = 0 }, { .seen = 0 } };
    int64_t count;
    int32_t wrong = 0;
    for (int32_t i = 0; i < 2; i++) {
        esa_session_params p = dense(order);
        esa_dit_set_watch(b[i].dit, keep_states, &s[i]);
        esa_session_free(dit_run(&b[i], &p));
        assert_int_equal(s[i].seen, b[i].dit->blocks + 1);
    }
    esa_tensors *file = golden_open(b[0].ctx, golden);
    const float *allowed = golden_find(file, name, &count);
    assert_int_equal(count, b[0].dit->blocks + 2);
    print_message("%s, order %d:", name, order);
    for (int32_t i = 0; i < count; i++) {
        const double e = i + 1 < count ? distance(s[1].block[i], s[0].block[i], s[0].count)
                                       : distance(b[1].v, b[0].v, b[0].out_count);
        print_message(" %.2e (%.2f)", e, e / (double)allowed[i]);
        wrong += !(e <= 1.2 * (double)allowed[i]);
    }
    print_message("\n");
    assert_int_equal(wrong, 0);
    esa_tensors_free(file);
    for (int32_t i = 0; i < 2; i++) states_free(&s[i]);
}

#endif
