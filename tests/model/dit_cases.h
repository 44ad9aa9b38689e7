/* dit_cases.h - the transformers that are compared with diffusers; the same table as in
 * tools/golden/wan_dit.py.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_DIT_CASES_H
#define ESA_TESTS_MODEL_DIT_CASES_H

#include "model/dit/wan_dit.h"
#include "model/host_bf16.h"
#include "model/wan_folder.h"

typedef struct dit_case {
    const char *name;
    esa_wan_config config;
    int32_t latent[3];
    int64_t text_rows, text_valid;
    double t;
} dit_case;

#define DIT_CONFIG(H, D, L, F, IN, OUT, TEXT, FREQ, MAX, NORM, P0, P1, P2)                         \
    { .heads = H,                                                                                  \
      .head_dim = D,                                                                               \
      .layers = L,                                                                                 \
      .ffn = F,                                                                                    \
      .in_channels = IN,                                                                           \
      .out_channels = OUT,                                                                         \
      .patch = { P0, P1, P2 },                                                                     \
      .text_dim = TEXT,                                                                            \
      .freq_dim = FREQ,                                                                            \
      .rope_max = MAX,                                                                             \
      .cross_norm = NORM,                                                                          \
      .eps = 1e-6 }

static const dit_case dit_cases[] = {
    { "tiny", DIT_CONFIG(2, 12, 2, 32, 4, 4, 16, 256, 32, 1, 1, 2, 2), { 2, 16, 16 }, 12, 12, 417 },
    { "mini1280",
      DIT_CONFIG(2, 128, 2, 512, 16, 16, 64, 256, 1024, 1, 1, 2, 2),
      { 5, 32, 32 },
      40,
      17,
      999 },
    { "mini1650",
      DIT_CONFIG(2, 128, 2, 512, 16, 16, 64, 256, 1024, 1, 1, 2, 2),
      { 5, 30, 44 },
      40,
      39,
      57 },
    { "wan-tiny",
      DIT_CONFIG(4, 64, 8, 512, 16, 16, 192, 256, 1024, 1, 1, 2, 2),
      { 5, 16, 24 },
      512,
      23,
      750 },
    { "nonorm", DIT_CONFIG(3, 20, 1, 48, 3, 5, 10, 32, 1024, 0, 2, 1, 2), { 4, 6, 10 }, 7, 7, 1 },
};

/* An opened transformer of a case, its inputs, and an inner ctx. */
typedef struct dit_bench {
    esa_ctx *ctx;
    esa_nn nn;
    esa_wan_dit *dit;
    wan_folder folder;
    float *x, *v, *text; /* host memory */
    esa_view on_x, on_v; /* x and v on the device of nn */
    int64_t in_count, out_count, tokens;
} dit_bench;

static inline void dit_ok(dit_bench *b, esa_status status)
{
    if (status != ESA_OK) print_error("%s: %s\n", esa_status_name(status), esa_ctx_error(b->ctx));
    assert_int_equal(status, ESA_OK);
}

/* device: ESA_DEVICE_*, or ON_HOST_BF16. */
static inline void dit_open_on(dit_bench *b, const dit_case *c, int32_t hold, int32_t threads,
                               int32_t device)
{
    memset(b, 0, sizeof *b);
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&b->ctx, &p), ESA_OK);
    esa_nn_init(&b->nn, b->ctx);
    dit_ok(b, use_device(&b->nn, device));
    b->folder = wan_folder_make();
    wan_folder_fill(&b->folder, b->ctx, &c->config);
    esa_wan_config config;
    dit_ok(b, esa_config_wan(b->ctx, &config, scratch_path(&b->folder.part, "config.json")));
    const esa_part_env env = { .nn = &b->nn, .folder = b->folder.top.dir, .hold = hold };
    dit_ok(b, esa_wan_dit_open(&env, &b->dit, &config));
    const int64_t volume = (int64_t)c->latent[0] * c->latent[1] * c->latent[2];
    b->in_count = volume * config.in_channels;
    b->out_count = volume * config.out_channels;
    b->tokens = volume / (config.patch[0] * config.patch[1] * config.patch[2]);
    b->x = malloc((size_t)b->in_count * 4);
    b->v = malloc((size_t)b->out_count * 4);
    b->text = malloc((size_t)(c->text_rows * config.text_dim) * 4);
    assert_true(b->x && b->v && b->text);
    char name[64];
    snprintf(name, sizeof name, "%s.latents", c->name);
    fill_tensor(b->x, b->in_count, name, 2.0f, 0);
    snprintf(name, sizeof name, "%s.text", c->name);
    fill_tensor(b->text, c->text_rows * config.text_dim, name, 1.0f, 0);
    memset(b->text + c->text_valid * config.text_dim, 0,
           (size_t)((c->text_rows - c->text_valid) * config.text_dim) * 4);
    b->on_x = esa_view_of(NULL, ESA_DTYPE_F32, device_of(device), 1, b->in_count);
    b->on_v = esa_view_of(NULL, ESA_DTYPE_F32, device_of(device), 1, b->out_count);
    dit_ok(b, esa_nn_alloc(&b->nn, &b->on_x.data, b->in_count * 4, "x"));
    dit_ok(b, esa_nn_alloc(&b->nn, &b->on_v.data, b->out_count * 4, "v"));
}

static inline void dit_open(dit_bench *b, const dit_case *c, int32_t hold, int32_t threads)
{
    dit_open_on(b, c, hold, threads, ESA_DEVICE_CPU);
}

/* One forward as step 0 of 1. params gives mode and select of the session; the rest is filled in
 * here. The caller frees the session. */
static inline esa_session *dit_forward(dit_bench *b, const dit_case *c, esa_session_params *params)
{
    esa_session *session = NULL;
    dit_ok(b, esa_wan_dit_begin(b->dit, c->latent, &params->select.layout, params->select.selector,
                                params->select.mode, 1));
    dit_ok(b, esa_wan_dit_text(b->dit, 0, b->text, c->text_rows));
    params->layers = c->config.layers;
    params->steps = 1;
    params->warmup_frac = 0;
    dit_ok(b, esa_session_create(b->ctx, &session, params));
    dit_ok(b, esa_session_begin(session));
    dit_ok(b, esa_session_step(session, 0, 0));
    dit_ok(b, esa_nn_write(&b->nn, &b->on_x, b->x));
    dit_ok(b, esa_wan_dit_forward(b->dit, session, 0, b->on_v.data, b->on_x.data, c->t));
    dit_ok(b, esa_nn_read(&b->nn, b->v, &b->on_v));
    return session;
}

static inline void dit_close(dit_bench *b)
{
    esa_wan_dit_free(b->dit);
    esa_nn_free(&b->nn, b->on_x.data, b->in_count * 4);
    esa_nn_free(&b->nn, b->on_v.data, b->out_count * 4);
    assert_int_equal(b->nn.held, b->nn.scratch_bytes); /* the parts freed everything */
    esa_nn_close(&b->nn);
    wan_folder_remove(&b->folder);
    esa_ctx_free(b->ctx);
    free(b->x);
    free(b->v);
    free(b->text);
}

#endif
