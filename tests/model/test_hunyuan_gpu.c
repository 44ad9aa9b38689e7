/* test_hunyuan_gpu.c - the parts of HunyuanVideo on a GPU: at most 1.2 times as far from f64 as
 * diffusers and transformers in bf16; weights in F8, and copied while they are used.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/hunyuan_dit.h"
#include "model/hunyuan_cases.h"
#include "model/text/causal.h"
#include "model/vae/hunyuan_vae.h"

#define MOST 1.2 /* of diffusers' own error in bf16 */

/* The root mean square of the error over that of the golden, for the elements that it has. */
static double distance(const esa_tensors *golden, const char *name, const float *got, int64_t count)
{
    int64_t n;
    const int64_t every = atoll(esa_tensors_metadata(golden, "every"));
    const float *want = golden_find(golden, name, &n);
    double error = 0, size = 0;
    assert_int_equal(n, (count + every - 1) / every);
    for (int64_t i = 0; i < n; i++) {
        error += pow((double)got[i * every] - (double)want[i], 2);
        size += pow((double)want[i], 2);
    }
    return sqrt(error / size);
}

static void check(const esa_tensors *golden, const char *name, const float *got, int64_t count,
                  double most)
{
    char full[96];
    int64_t one;
    snprintf(full, sizeof full, "%s.bf16", name);
    const double theirs = (double)golden_find(golden, full, &one)[0],
                 ours = distance(golden, name, got, count);
    print_message("%s: %.4f, in bf16 with torch %.4f\n", name, ours, theirs);
    assert_true(ours <= most * theirs);
}

static void text_encoders(void **unused)
{
    (void)unused;
    for (int32_t i = 0; i < 3; i++) {
        const hunyuan_text_case *c = &hunyuan_texts[i];
        const int64_t d = c->config.d, n = c->tokens * d;
        const int32_t clip = c->config.kind == ESA_CAUSAL_CLIP;
        hunyuan_bench b;
        hunyuan_begin(&b, 2, ESA_DEVICE_CUDA);
        wan_folder f = hunyuan_folder(b.ctx, c->name, "text_encoder", "model.safetensors");
        esa_tensors *golden = golden_open(b.ctx, "hunyuan.safetensors");
        int32_t ids[256];
        char full[64];
        snprintf(full, sizeof full, "%s.ids", c->name);
        for (int64_t k = 0; k < c->tokens; k++)
            ids[k] = (int32_t)(((double)fill_unit(fill_name(full), k) + 1) / 2 *
                               (c->config.vocab - 1));
        if (clip) ids[c->tokens - 1] = c->config.eos;
        float *out = malloc((size_t)n * 4);
        esa_causal *e;
        b.env.folder = f.top.dir;
        hunyuan_ok(&b, esa_causal_open(&b.env, &e, &c->config, "text_encoder"));
        hunyuan_ok(&b, esa_causal_encode(e, out, ids, c->tokens));
        /* a few elements of one vector are no measure of a mean: they are only near */
        check(golden, c->name, clip ? out + n - d : out, clip ? d : n,
              n > 1000 && !clip ? MOST : 3);
        esa_causal_free(e);
        free(out);
        esa_tensors_free(golden);
        wan_folder_remove(&f);
        hunyuan_end(&b);
    }
}

/* linear: ESA_DTYPE_BF16 or F8; limit: bytes of device memory beside the workspace of products, 0:
 * no limit. */
static void run_dit(const hunyuan_dit_case *c, int32_t linear, int64_t limit, double most)
{
    hunyuan_bench b;
    hunyuan_begin(&b, 2, ESA_DEVICE_CUDA);
    wan_folder f = hunyuan_folder(b.ctx, c->name, "transformer",
                                  "diffusion_pytorch_model.safetensors");
    esa_tensors *golden = golden_open(b.ctx, "hunyuan.safetensors");
    esa_hunyuan_dit *dit;
    esa_session *s = NULL;
    const int64_t volume = (int64_t)c->latent[0] * c->latent[1] * c->latent[2],
                  in = volume * c->config.in_channels, out = volume * c->config.out_channels;
    float *x = malloc((size_t)in * 4), *v = malloc((size_t)out * 4),
          *text = malloc((size_t)(c->rows * c->config.text_dim) * 4),
          *pooled = malloc((size_t)c->config.pooled_dim * 4);
    char name[64];
    snprintf(name, sizeof name, "%s.latents", c->name);
    fill_tensor(x, in, name, 2.0f, 0);
    snprintf(name, sizeof name, "%s.text", c->name);
    fill_tensor(text, c->rows * c->config.text_dim, name, 1.0f, 0);
    snprintf(name, sizeof name, "%s.pooled", c->name);
    fill_tensor(pooled, c->config.pooled_dim, name, 1.0f, 0);
    b.env.folder = f.top.dir;
    b.env.linear = linear;
    /* a sixteenth of a limit is the driver's share */
    if (limit) b.env.limit = limit + b.nn.be->products->workspace(b.ctx) * 16 / 15;
    hunyuan_ok(&b, esa_hunyuan_dit_open(&b.env, &dit, &c->config));
    esa_session_params p = esa_session_params_default();
    p.mode = ESA_SESSION_DENSE;
    p.layers = c->config.doubles + c->config.singles;
    p.steps = 1;
    p.select.layout.text_back_q = (int32_t)c->rows;
    hunyuan_ok(&b, esa_hunyuan_dit_begin(dit, c->latent, &p.select.layout, p.select.selector,
                                         p.select.mode, 1));
    esa_store_plan plan;
    esa_store_get_plan(esa_hunyuan_dit_store(dit), &plan);
    if (limit) {
        print_message("%d of %d blocks stay\n", (int)plan.resident, p.layers);
        assert_true(plan.resident < p.layers && plan.streamed_bytes > 0);
    }
    const esa_text t = { .data = text, .pooled = pooled, .rows = c->rows, .valid = c->valid };
    hunyuan_ok(&b, esa_hunyuan_dit_text(dit, 0, &t));
    esa_view on_x = esa_view_of(NULL, ESA_DTYPE_F32, ESA_DEVICE_CUDA, 1, in),
             on_v = esa_view_of(NULL, ESA_DTYPE_F32, ESA_DEVICE_CUDA, 1, out);
    hunyuan_ok(&b, esa_nn_alloc(&b.nn, &on_x.data, in * 4, "x"));
    hunyuan_ok(&b, esa_nn_alloc(&b.nn, &on_v.data, out * 4, "v"));
    hunyuan_ok(&b, esa_nn_write(&b.nn, &on_x, x));
    hunyuan_ok(&b, esa_session_create(b.ctx, &s, &p));
    hunyuan_ok(&b, esa_session_begin(s));
    for (int32_t again = 0; again < 2; again++) { /* copied weights come back in their order */
        hunyuan_ok(&b, esa_session_step(s, 0, 0));
        const esa_dit_call call = {
            .session = s, .v = on_v.data, .x = on_x.data, .t = c->t, .guidance = c->guidance
        };
        hunyuan_ok(&b, esa_hunyuan_dit_forward(dit, &call));
        hunyuan_ok(&b, esa_nn_read(&b.nn, v, &on_v));
        snprintf(name, sizeof name, "%s.output", c->name);
        check(golden, name, v, out, most);
    }
    esa_session_free(s);
    esa_hunyuan_dit_free(dit);
    esa_nn_free(&b.nn, on_x.data, in * 4);
    esa_nn_free(&b.nn, on_v.data, out * 4);
    esa_tensors_free(golden);
    wan_folder_remove(&f);
    free(x);
    free(v);
    free(text);
    free(pooled);
    hunyuan_end(&b);
}

static void transformer(void **unused)
{
    (void)unused;
    run_dit(&hunyuan_dits[0], ESA_DTYPE_BF16, 0, 2); /* a few elements */
    run_dit(&hunyuan_dits[1], ESA_DTYPE_BF16, 0, MOST);
    run_dit(&hunyuan_dits[2], ESA_DTYPE_BF16, 0, 2);
    run_dit(&hunyuan_dits[1], ESA_DTYPE_F8, 0, 5); /* E4M3 has 4 bits less than BF16; 2.7 is seen */
    run_dit(&hunyuan_dits[1], ESA_DTYPE_BF16, INT64_C(20) << 20, MOST);
}

typedef struct clip_sink {
    float *clip;
    int64_t pixels;
} clip_sink;

static esa_status keep(void *user, int64_t frame, const float *rgb)
{
    const clip_sink *s = user;
    for (int64_t i = 0; i < s->pixels; i++)
        s->clip[frame * s->pixels + i] = fmaxf(-1.0f, fminf(1.0f, rgb[i]));
    return ESA_OK;
}

static void decoder(void **unused)
{
    (void)unused;
    for (int32_t i = 1; i < 6; i += 2) { /* short, in tiles, with three levels and a last piece */
        const hunyuan_vae_case *c = &hunyuan_vaes[i];
        hunyuan_bench b;
        int32_t size[3];
        esa_hunyuan_vae *vae;
        hunyuan_begin(&b, 2, ESA_DEVICE_CUDA);
        wan_folder f = hunyuan_folder(b.ctx, c->key, "vae", "diffusion_pytorch_model.safetensors");
        esa_tensors *golden = golden_open(b.ctx, "hunyuan.safetensors");
        b.env.folder = f.top.dir;
        hunyuan_ok(&b, esa_hunyuan_vae_open(&b.env, &vae, &c->config));
        const int64_t n = (int64_t)c->config.z_dim * c->latent[0] * c->latent[1] * c->latent[2];
        float *z = malloc((size_t)n * 4);
        char name[64];
        snprintf(name, sizeof name, "%s.latents", c->name);
        fill_tensor(z, n, name, 2.0f, 0);
        esa_view on = esa_view_of(NULL, ESA_DTYPE_F32, ESA_DEVICE_CUDA, 1, n);
        hunyuan_ok(&b, esa_nn_alloc(&b.nn, &on.data, n * 4, "latents"));
        hunyuan_ok(&b, esa_nn_write(&b.nn, &on, z));
        esa_hunyuan_vae_size(&c->config, c->latent, size);
        clip_sink s = { .pixels = (int64_t)size[1] * size[2] * 3 };
        s.clip = malloc((size_t)(size[0] * s.pixels) * 4);
        hunyuan_ok(&b, esa_hunyuan_vae_decode(vae, on.data, c->latent, c->tile, keep, &s));
        check(golden, c->name, s.clip, size[0] * s.pixels, MOST);
        free(s.clip);
        free(z);
        esa_nn_free(&b.nn, on.data, n * 4);
        esa_hunyuan_vae_free(vae);
        esa_tensors_free(golden);
        wan_folder_remove(&f);
        hunyuan_end(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(text_encoders),
                                        cmocka_unit_test(transformer), cmocka_unit_test(decoder) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
