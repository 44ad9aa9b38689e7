/* hunyuan_cases.h - the parts of HunyuanVideo that are compared with diffusers and transformers;
 * the same tables as in tools/golden/hunyuan.py, which also gives the names and shapes of weights.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_HUNYUAN_CASES_H
#define ESA_TESTS_MODEL_HUNYUAN_CASES_H

#include "model/dit_bench.h"
#include "model/vae_bench.h"
#include "model/config/config.h"

/* ---------------------------------------------------------------- the tables */

typedef struct hunyuan_dit_case {
    const char *name;
    esa_hunyuan_config config;
    int32_t latent[3];
    int64_t rows, valid;
    double t, guidance;
} hunyuan_dit_case;

#define HUNYUAN_CONFIG(H, D, F, DOUBLE, SINGLE, REFINE, IN, OUT, PT, P, TEXT, POOLED, GUIDE, A0,   \
                       A1, A2, THETA)                                                              \
    { .heads = H,                                                                                  \
      .head_dim = D,                                                                               \
      .ffn = F,                                                                                    \
      .doubles = DOUBLE,                                                                           \
      .singles = SINGLE,                                                                           \
      .refiners = REFINE,                                                                          \
      .in_channels = IN,                                                                           \
      .out_channels = OUT,                                                                         \
      .patch = { PT, P, P },                                                                       \
      .text_dim = TEXT,                                                                            \
      .pooled_dim = POOLED,                                                                        \
      .guidance = GUIDE,                                                                           \
      .axis = { A0, A1, A2 },                                                                      \
      .theta = THETA }

static const hunyuan_dit_case hunyuan_dits[] = {
    { "dit.tiny",
      HUNYUAN_CONFIG(2, 10, 80, 1, 1, 1, 4, 4, 1, 1, 16, 8, 1, 2, 4, 4, 256),
      { 1, 6, 8 },
      12,
      12,
      417.25,
      6 },
    { "dit.mini",
      HUNYUAN_CONFIG(2, 128, 1024, 2, 2, 2, 16, 16, 1, 2, 48, 24, 1, 16, 56, 56, 256),
      { 5, 16, 22 },
      64,
      40,
      999,
      6 },
    { "dit.plain",
      HUNYUAN_CONFIG(3, 20, 120, 1, 2, 2, 3, 5, 2, 2, 10, 6, 0, 4, 8, 8, 100),
      { 4, 6, 10 },
      9,
      1,
      57.5,
      1 },
};

typedef struct hunyuan_text_case {
    const char *name;
    esa_causal_config config;
    int64_t tokens;
} hunyuan_text_case;

static const hunyuan_text_case hunyuan_texts[] = {
    { "llama.mini", { ESA_CAUSAL_LLAMA, 99, 32, 4, 2, 8, 4, 37, 2, 0, 0, 1e-6, 500000 }, 9 },
    { "llama.wide", { ESA_CAUSAL_LLAMA, 64, 48, 6, 2, 16, 3, 64, 2, 0, 0, 1e-5, 10000 }, 150 },
    { "clip.mini", { ESA_CAUSAL_CLIP, 99, 32, 4, 4, 8, 3, 37, 0, 20, 98, 1e-5, 0 }, 9 },
};

typedef struct hunyuan_vae_case {
    const char *name, *key;
    esa_hunyuan_vae_config config;
    int32_t latent[3], tile;
} hunyuan_vae_case;

#define HUNYUAN_VAE                                                                                \
    "vae4", { 4, 4, 1, 4, { 8, 8, 16, 16 }, 1, 4, 8, 0.476986 }
#define HUNYUAN_THREE                                                                              \
    "vae3", { 5, 3, 2, 3, { 6, 12, 18 }, 1, 4, 4, 0.7 }
static const hunyuan_vae_case hunyuan_vaes[] = {
    { "vae.one", HUNYUAN_VAE, { 1, 3, 4 }, 0 },     { "vae.short", HUNYUAN_VAE, { 3, 4, 3 }, 0 },
    { "vae.long", HUNYUAN_VAE, { 9, 3, 3 }, 0 },    { "vae.tiles", HUNYUAN_VAE, { 6, 9, 7 }, 32 },
    { "vae.three", HUNYUAN_THREE, { 4, 5, 6 }, 0 }, { "vae.late", HUNYUAN_THREE, { 7, 6, 11 }, 16 },
};

/* ---------------------------------------------------------------- folders */

/* The names and shapes that hunyuan_shapes.txt has under a key. */
static inline wan_shapes hunyuan_shapes(const char *key)
{
    const char *folder = getenv("ESA_TEST_GOLDEN");
    char path[600], line[512], first[64];
    wan_shapes s = { 0 };
    snprintf(path, sizeof path, "%s/hunyuan_shapes.txt",
             folder && *folder ? folder : "tests/golden");
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        wan_shape t = { .rank = 0 };
        int at = 0, used = 0;
        assert_int_equal(sscanf(line, "%63s %159s%n", first, t.name, &at), 2);
        if (strcmp(first, key) != 0) continue;
        long long size;
        while (t.rank < 5 && sscanf(line + at, "%lld%n", &size, &used) == 1) {
            t.dim[t.rank++] = size;
            at += used;
        }
        shapes_add(&s, t.rank, t.dim[0], t.dim[1], t.dim[2], t.dim[3], t.dim[4], t.name);
    }
    fclose(f);
    assert_true(s.count > 0);
    return s;
}

/* Makes DIR/part with made-up weights in one file. */
static inline wan_folder hunyuan_folder(esa_ctx *ctx, const char *key, const char *part,
                                        const char *file)
{
    wan_folder f = { .top = scratch_make() };
    snprintf(f.part.dir, sizeof f.part.dir, "%.200s/%s", f.top.dir, part);
    assert_int_equal(mkdir(f.part.dir, 0755), 0);
    wan_shapes s = hunyuan_shapes(key);
    esa_tensors_writer *w = NULL;
    assert_int_equal(esa_tensors_writer_create(ctx, &w, scratch_path(&f.part, file)), ESA_OK);
    for (int64_t i = 0; i < s.count; i++)
        assert_int_equal(esa_tensors_writer_declare(w, s.list[i].name, ESA_FILE_F32, s.list[i].rank,
                                                    s.list[i].dim),
                         ESA_OK);
    for (int64_t i = 0; i < s.count; i++) {
        const int64_t n = shape_count(&s.list[i]);
        float *data = malloc((size_t)n * 4);
        fill_weight(data, s.list[i].name, s.list[i].rank, s.list[i].dim);
        /* pixels in the middle of their range, as in the golden */
        for (int64_t k = 0; k < n && strcmp(s.list[i].name, "decoder.conv_out.conv.weight") == 0;
             k++)
            data[k] *= 0.25f;
        assert_int_equal(esa_tensors_writer_data(w, data, n * 4), ESA_OK);
        free(data);
    }
    assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
    esa_tensors_writer_free(w);
    free(s.list);
    return f;
}

/* ---------------------------------------------------------------- results */

/* Compares got[count] with a golden: at most 2.5e-5 of the scale, or as many times torch's own
 * error in f32 as that is of 1e-6, which a part of this size has. */
#define HUNYUAN_TOLERANCE 2.5e-5
static inline double hunyuan_compare(const esa_tensors *golden, const char *name, const float *got,
                                     int64_t count)
{
    char full[96];
    int64_t n, one;
    const int64_t every = atoll(esa_tensors_metadata(golden, "every"));
    snprintf(full, sizeof full, "%s.scale", name);
    const float scale = golden_find(golden, full, &one)[0];
    snprintf(full, sizeof full, "%s.f32", name);
    const double own = (double)golden_find(golden, full, &one)[0];
    const float *want = golden_find(golden, name, &n);
    assert_int_equal(n, (count + every - 1) / every);
    const double e = golden_error(got, every, want, n, (double)scale);
    if (!(e <= fmax(HUNYUAN_TOLERANCE, 25 * own)))
        print_error("%s is off by %.2e of the scale, torch's f32 by %.2e\n", name, e, own);
    assert_true(e <= fmax(HUNYUAN_TOLERANCE, 25 * own));
    return e;
}

static inline void hunyuan_open(dit_bench *b, const hunyuan_dit_case *c, int32_t threads,
                                int32_t device, int32_t linear, int64_t limit)
{
    const dit_inputs in = { .name = c->name,
                            .latent = c->latent,
                            .rows = c->rows,
                            .valid = c->valid,
                            .text_dim = c->config.text_dim,
                            .pooled_dim = c->config.pooled_dim,
                            .t = c->t,
                            .guidance = c->guidance };
    dit_start(b, threads, device);
    b->env.linear = linear;
    /* a sixteenth of a limit is the driver's share */
    if (limit) b->env.limit = limit + b->nn.be->products->workspace(b->ctx) * 16 / 15;
    b->folder = hunyuan_folder(b->ctx, c->name, "transformer",
                               "diffusion_pytorch_model.safetensors");
    dit_open_with(b, &in, &esa_hunyuan_dit_kind, &c->config);
}

static inline void hunyuan_open_vae(bench *b, const hunyuan_vae_case *c, int32_t threads,
                                    int32_t device)
{
    bench_start(b, threads, device);
    bench_made(b, hunyuan_folder(b->ctx, c->key, "vae", "diffusion_pytorch_model.safetensors"),
               &esa_hunyuan_vae_kind, &c->config);
}

/* A ctx and operations on a device. */
typedef struct hunyuan_bench {
    esa_ctx *ctx;
    esa_nn nn;
    esa_part_env env;
} hunyuan_bench;

static inline void hunyuan_ok(hunyuan_bench *b, esa_status status)
{
    if (status != ESA_OK) print_error("%s: %s\n", esa_status_name(status), esa_ctx_error(b->ctx));
    assert_int_equal(status, ESA_OK);
}

static inline void hunyuan_begin(hunyuan_bench *b, int32_t threads, int32_t device)
{
    memset(b, 0, sizeof *b);
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&b->ctx, &p), ESA_OK);
    esa_nn_init(&b->nn, b->ctx);
    hunyuan_ok(b, esa_nn_use(&b->nn, device));
    b->env = (esa_part_env){ .nn = &b->nn };
}

static inline void hunyuan_end(hunyuan_bench *b)
{
    assert_int_equal(b->nn.held, b->nn.scratch_bytes); /* the parts freed everything */
    esa_nn_close(&b->nn);
    esa_ctx_free(b->ctx);
}

#endif
