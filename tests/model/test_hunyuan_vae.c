/* test_hunyuan_vae.c - the VAE decoder against diffusers, whole and in tiles; announced memory;
 * threads, cancelling, wrong files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/hunyuan_cases.h"
#include "model/vae/hunyuan_vae.h"

typedef struct vae_run {
    hunyuan_bench b;
    wan_folder folder;
    esa_hunyuan_vae *vae;
    float *clip;
    int64_t pixels, frames, count;
    int32_t ticks, stop_at;
    int64_t total;
} vae_run;

static int32_t tick(void *user, int64_t done, int64_t total)
{
    vae_run *r = user;
    assert_true(done >= 1 && done <= total);
    r->total = total;
    return ++r->ticks == r->stop_at;
}

static void run_open(vae_run *r, const hunyuan_vae_case *c, int32_t threads)
{
    memset(r, 0, sizeof *r);
    hunyuan_begin(&r->b, threads, ESA_DEVICE_CPU);
    r->folder = hunyuan_folder(r->b.ctx, c->key, "vae", "diffusion_pytorch_model.safetensors");
    r->b.env.folder = r->folder.top.dir;
    r->b.env.tick = tick;
    r->b.env.tick_user = r;
    hunyuan_ok(&r->b, esa_hunyuan_vae_open(&r->b.env, &r->vae, &c->config));
}

static void run_close(vae_run *r)
{
    esa_hunyuan_vae_free(r->vae);
    wan_folder_remove(&r->folder);
    hunyuan_end(&r->b);
    free(r->clip);
}

static esa_status keep(void *user, int64_t frame, const float *rgb)
{
    vae_run *r = user;
    assert_int_equal(frame, r->frames++);
    for (int64_t i = 0; i < r->pixels; i++)
        r->clip[frame * r->pixels + i] = fmaxf(-1.0f, fminf(1.0f, rgb[i]));
    return ESA_OK;
}

/* bytes: where the frames go as bytes; NULL: to the clip. */
static esa_status decode(vae_run *r, const hunyuan_vae_case *c, uint8_t *bytes)
{
    int32_t size[3];
    const int64_t n = (int64_t)c->config.z_dim * c->latent[0] * c->latent[1] * c->latent[2];
    float *z = malloc((size_t)n * 4);
    char name[64];
    snprintf(name, sizeof name, "%s.latents", c->name);
    fill_tensor(z, n, name, 2.0f, 0);
    esa_hunyuan_vae_size(&c->config, c->latent, size);
    r->pixels = (int64_t)size[1] * size[2] * 3;
    r->count = size[0] * r->pixels;
    r->frames = r->ticks = 0;
    free(r->clip);
    r->clip = malloc((size_t)r->count * 4);
    const esa_status status = bytes
                                  ? esa_hunyuan_vae_frames(r->vae, z, c->latent, c->tile, bytes)
                                  : esa_hunyuan_vae_decode(r->vae, z, c->latent, c->tile, keep, r);
    if (!status && !bytes) assert_int_equal(r->frames, size[0]);
    free(z);
    return status;
}

static void matches_diffusers(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof hunyuan_vaes / sizeof hunyuan_vaes[0]; i++) {
        const hunyuan_vae_case *c = &hunyuan_vaes[i];
        vae_run r;
        run_open(&r, c, 2);
        const int64_t held = r.b.nn.held - r.b.nn.scratch_bytes;
        r.b.nn.peak = 0;
        hunyuan_ok(&r.b, decode(&r, c, NULL));
        assert_int_equal(r.ticks, r.total);
        esa_tensors *golden = golden_open(r.b.ctx, "hunyuan.safetensors");
        print_message("%s: %.2e\n", c->name, hunyuan_compare(golden, c->name, r.clip, r.count));
        esa_tensors_free(golden);
        /* it takes what it announced, and the scratch of single operations */
        const int64_t said = esa_hunyuan_vae_bytes(r.vae, c->latent, c->tile);
        assert_int_equal(r.b.nn.held - r.b.nn.scratch_bytes, held);
        assert_true(r.b.nn.peak <= held + said + r.b.nn.scratch_bytes);
        assert_true(r.b.nn.peak >= held + said);
        run_close(&r);
    }
}

static void bytes_and_threads(void **unused)
{
    (void)unused;
    const hunyuan_vae_case *c = &hunyuan_vaes[1];
    vae_run one, three;
    run_open(&one, c, 1);
    run_open(&three, c, 3);
    hunyuan_ok(&one.b, decode(&one, c, NULL));
    hunyuan_ok(&three.b, decode(&three, c, NULL));
    assert_memory_equal(one.clip, three.clip, (size_t)one.count * 4);
    uint8_t *bytes = malloc((size_t)one.count);
    hunyuan_ok(&three.b, decode(&three, c, bytes));
    for (int64_t i = 0; i < one.count; i++)
        assert_int_equal(bytes[i], lrintf((one.clip[i] * 0.5f + 0.5f) * 255.0f));
    free(bytes);
    run_close(&one);
    run_close(&three);
}

static void refuses_and_stops(void **unused)
{
    (void)unused;
    hunyuan_vae_case c = hunyuan_vaes[2];
    vae_run r;
    run_open(&r, &c, 1);
    c.tile = 40;
    assert_refused(r.b.ctx, decode(&r, &c, NULL), ESA_ERR_ARGUMENT, "40 pixels", "32", NULL);
    c.tile = 0;
    const int64_t held = r.b.nn.held - r.b.nn.scratch_bytes;
    r.stop_at = 2;
    assert_int_equal(decode(&r, &c, NULL), ESA_ERR_STATE);
    assert_int_equal(r.b.nn.held - r.b.nn.scratch_bytes, held);
    esa_hunyuan_vae_config other = c.config;
    other.res_blocks = 2;
    assert_refused(r.b.ctx, esa_hunyuan_vae_check(&r.b.env, &other), ESA_ERR_MISMATCH,
                   "decoder.up_blocks.0.resnets.2", NULL);
    other = c.config;
    other.attention = 0;
    assert_refused(r.b.ctx, esa_hunyuan_vae_check(&r.b.env, &other), ESA_ERR_MISMATCH,
                   "decoder.mid_block.attentions.0", NULL);
    run_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(matches_diffusers),
                                        cmocka_unit_test(bytes_and_threads),
                                        cmocka_unit_test(refuses_and_stops) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
