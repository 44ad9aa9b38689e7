/* cog_cases.h - the CogVideoX transformers and decoders that are compared with diffusers, on any
 * device; the tables of tools/golden/cog.py.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_COG_CASES_H
#define ESA_TESTS_MODEL_COG_CASES_H

#include "model/golden.h"
#include "model/cog_folder.h"
#include "model/dit/cog_dit.h"
#include "model/vae/cog_vae.h"
#include "nn/ops.h"

typedef struct cog_case {
    const char *name;
    esa_cog_config config;
    int32_t latent[3];
    double t;
} cog_case;

#define COG_CONFIG(H, D, L, IN, OUT, P, TEXT, TIME, ROWS, SH, SW, BIAS, ROTARY, EPS)               \
    { .heads = H,                                                                                  \
      .head_dim = D,                                                                               \
      .layers = L,                                                                                 \
      .in_channels = IN,                                                                           \
      .out_channels = OUT,                                                                         \
      .patch = P,                                                                                  \
      .text_dim = TEXT,                                                                            \
      .time_dim = TIME,                                                                            \
      .max_text = ROWS,                                                                            \
      .sample_h = SH,                                                                              \
      .sample_w = SW,                                                                              \
      .attention_bias = BIAS,                                                                      \
      .patch_bias = BIAS,                                                                          \
      .rotary = ROTARY,                                                                            \
      .eps = EPS }

static const cog_case cog_cases[] = {
    { "two", COG_CONFIG(2, 16, 2, 4, 4, 2, 12, 8, 10, 12, 18, 1, 0, 1e-5), { 3, 12, 10 }, 417 },
    { "five", COG_CONFIG(2, 64, 3, 16, 16, 2, 24, 32, 26, 12, 18, 1, 1, 1e-5), { 5, 24, 28 }, 999 },
    { "bare", COG_CONFIG(3, 32, 1, 3, 5, 1, 10, 6, 7, 15, 9, 0, 1, 1e-3), { 4, 5, 6 }, 1 },
};
#define COG_CASES ((int32_t)(sizeof cog_cases / sizeof cog_cases[0]))

static const esa_cog_vae_config cog_four = { .levels = 4,
                                             .width = { 8, 16, 16, 24 },
                                             .z_dim = 6,
                                             .layers = 1,
                                             .groups = 4,
                                             .factor_t = 4,
                                             .scaling = 0.7 };
static const esa_cog_vae_config cog_three = { .levels = 3,
                                              .width = { 12, 8, 16 },
                                              .z_dim = 4,
                                              .layers = 2,
                                              .groups = 2,
                                              .factor_t = 2,
                                              .scaling = 1.15258426 };
typedef struct cog_clip {
    const char *name;
    const esa_cog_vae_config *config;
    int32_t latent[3], tile;
} cog_clip;
static const cog_clip cog_clips[] = {
    { "one", &cog_four, { 1, 3, 4 }, 0 },        { "even", &cog_four, { 4, 3, 4 }, 0 },
    { "odd", &cog_four, { 5, 4, 3 }, 0 },        { "three", &cog_three, { 3, 5, 4 }, 0 },
    { "tiled", &cog_three, { 1, 32, 33 }, 120 },
};
#define COG_CLIPS ((int32_t)(sizeof cog_clips / sizeof cog_clips[0]))

/* An opened part of a case. */
typedef struct cog_bench {
    esa_ctx *ctx;
    esa_nn nn;
    esa_part_env env;
    wan_folder folder;
    esa_cog_dit *dit;
    esa_cog_vae *vae;
    float *x, *out, *text; /* host memory */
    int64_t in_count, out_count;
    int64_t frames;         /* of a decoder's clip */
    int32_t ticks, stop_at; /* stop_at: the tick that cancels; 0: none */
} cog_bench;

static inline void cog_ok(cog_bench *b, esa_status status)
{
    if (status != ESA_OK) print_error("%s: %s\n", esa_status_name(status), esa_ctx_error(b->ctx));
    assert_int_equal(status, ESA_OK);
}

static inline int32_t cog_tick(void *user, int64_t done, int64_t total)
{
    cog_bench *b = user;
    assert_true(done >= 1 && done <= total);
    return ++b->ticks == b->stop_at;
}

static inline void cog_begin(cog_bench *b, int32_t threads, int32_t device)
{
    memset(b, 0, sizeof *b);
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&b->ctx, &p), ESA_OK);
    esa_nn_init(&b->nn, b->ctx);
    cog_ok(b, esa_nn_use(&b->nn, device));
}

static inline float *cog_floats(int64_t count, const char *case_name, const char *what, float scale)
{
    char name[64];
    float *data = malloc((size_t)count * 4);
    assert_non_null(data);
    snprintf(name, sizeof name, "%s.%s", case_name, what);
    fill_tensor(data, count, name, scale, 0);
    return data;
}

/* threads, device: ESA_DEVICE_*; linear: 0 or ESA_DTYPE_F8. */
static inline void cog_open_dit(cog_bench *b, const cog_case *c, int32_t threads, int32_t device,
                                int32_t linear)
{
    esa_cog_config config;
    cog_begin(b, threads, device);
    b->folder = cog_folder_make(b->ctx, "transformer", cog_transformer_shapes(&c->config));
    cog_write_config(scratch_path(&b->folder.part, "config.json"), &c->config);
    cog_ok(b, esa_config_cog(b->ctx, &config, scratch_path(&b->folder.part, "config.json")));
    b->env = (esa_part_env){ .nn = &b->nn,
                             .folder = b->folder.top.dir,
                             .linear = linear,
                             .tick = cog_tick,
                             .tick_user = b };
    cog_ok(b, esa_cog_dit_open(&b->env, &b->dit, &config));
    const int64_t volume = (int64_t)c->latent[0] * c->latent[1] * c->latent[2];
    b->in_count = volume * config.in_channels;
    b->out_count = volume * config.out_channels;
    b->x = cog_floats(b->in_count, c->name, "latents", 2.0f);
    b->text = cog_floats((int64_t)config.max_text * config.text_dim, c->name, "text", 1.0f);
    b->out = malloc((size_t)b->out_count * 4);
    assert_non_null(b->out);
}

static inline void cog_close(cog_bench *b)
{
    esa_cog_dit_free(b->dit);
    esa_cog_vae_free(b->vae);
    assert_int_equal(b->nn.held, b->nn.scratch_bytes); /* the parts freed everything */
    esa_nn_close(&b->nn);
    wan_folder_remove(&b->folder);
    esa_ctx_free(b->ctx);
    free(b->x);
    free(b->out);
    free(b->text);
}

/* One forward as step 0 of 1. params gives mode and select of the session; the caller frees it. */
static inline esa_session *cog_forward(cog_bench *b, const cog_case *c, esa_session_params *params)
{
    esa_session *session = NULL;
    esa_view x = esa_view_of(NULL, ESA_DTYPE_F32, b->nn.be->device, 1, b->in_count),
             v = esa_view_of(NULL, ESA_DTYPE_F32, b->nn.be->device, 1, b->out_count);
    params->select.layout.text_front_q = c->config.max_text;
    cog_ok(b, esa_cog_dit_begin(b->dit, c->latent, &params->select.layout, params->select.selector,
                                params->select.mode, 1));
    cog_ok(b, esa_cog_dit_text(b->dit, 0, b->text, c->config.max_text));
    params->layers = c->config.layers;
    params->steps = 1;
    params->warmup_frac = 0;
    cog_ok(b, esa_session_create(b->ctx, &session, params));
    cog_ok(b, esa_session_begin(session));
    cog_ok(b, esa_session_step(session, 0, 0));
    cog_ok(b, esa_nn_alloc(&b->nn, &x.data, b->in_count * 4, "x"));
    cog_ok(b, esa_nn_alloc(&b->nn, &v.data, b->out_count * 4, "v"));
    cog_ok(b, esa_nn_write(&b->nn, &x, b->x));
    cog_ok(b, esa_cog_dit_forward(b->dit, session, 0, v.data, x.data, c->t));
    cog_ok(b, esa_nn_read(&b->nn, b->out, &v));
    esa_nn_free(&b->nn, x.data, b->in_count * 4);
    esa_nn_free(&b->nn, v.data, b->out_count * 4);
    return session;
}

static inline esa_session_params cog_dense(int32_t order)
{
    esa_session_params p = esa_session_params_default();
    p.mode = ESA_SESSION_DENSE;
    p.select.layout.order = order;
    return p;
}

static inline void cog_open_vae(cog_bench *b, const cog_clip *c, int32_t threads, int32_t device)
{
    esa_cog_vae_config config;
    cog_begin(b, threads, device);
    b->folder = cog_folder_make(b->ctx, "vae", cog_decoder_shapes(c->config));
    cog_write_vae_config(scratch_path(&b->folder.part, "config.json"), c->config);
    cog_ok(b, esa_config_cog_vae(b->ctx, &config, scratch_path(&b->folder.part, "config.json")));
    b->env = (esa_part_env){
        .nn = &b->nn, .folder = b->folder.top.dir, .tick = cog_tick, .tick_user = b
    };
    cog_ok(b, esa_cog_vae_open(&b->env, &b->vae, &config));
    int32_t size[3];
    esa_cog_vae_size(&config, c->latent, size);
    b->in_count = (int64_t)config.z_dim * c->latent[0] * c->latent[1] * c->latent[2];
    b->frames = size[0];
    b->out_count = (int64_t)size[0] * size[1] * size[2] * 3;
    b->x = cog_floats(b->in_count, c->name, "latents", 2.0f);
    b->out = malloc((size_t)b->out_count * 4);
    assert_non_null(b->out);
}

static inline esa_status cog_keep_frame(void *user, int64_t frame, const float *rgb)
{
    cog_bench *b = user;
    const int64_t n = b->out_count / b->frames;
    memcpy(b->out + frame * n, rgb, (size_t)n * 4);
    return ESA_OK;
}

/* Decodes to b->out, or to bytes if they are not NULL. */
static inline esa_status cog_decode(cog_bench *b, const cog_clip *c, uint8_t *bytes)
{
    void *x = NULL;
    cog_ok(b, esa_nn_alloc(&b->nn, &x, b->in_count * 4, "x"));
    cog_ok(b, esa_nn_upload(&b->nn, x, b->x, b->in_count * 4));
    const esa_status status = bytes ? esa_cog_vae_frames(b->vae, x, c->latent, c->tile, bytes)
                                    : esa_cog_vae_decode(b->vae, x, c->latent, c->tile,
                                                         cog_keep_frame, b);
    esa_nn_free(&b->nn, x, b->in_count * 4);
    return status;
}

#endif
