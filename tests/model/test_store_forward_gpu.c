/* test_store_forward_gpu.c - weights on the GPU in use: random ones, E4M3 files, and a transformer
 * whose blocks are copied.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_TEST_TIMES=1 also prints how fast weights are loaded and copied. */
#include "model/store_kit.h"
#include "model/dit_cases.h"
#include "model/dit/dit.h"

/* ---------------------------------------------------------------- random weights */

/* The same numbers on the device and on the host, whatever the type; norms are 1. */
static void random_weights(void **state)
{
    (void)state;
    esa_nn host;
    part p, q;
    esa_weights *w[2];
    esa_store *s[2];
    const esa_store_settings settings = { .hold = ESA_HOLD_F32 };
    esa_nn_init(&host, ctx);
    for (int i = 0; i < 2; i++) {
        part *one = i ? &q : &p;
        part_make(one, -1);
        must(esa_weights_open_random(ctx, &w[i], "part"));
        part_want(one, w[i]);
        must(esa_weights_check(w[i], NULL, NULL));
        must(esa_store_open(i ? &host : &nn, &s[i], w[i], &settings));
    }
    double squares = 0;
    int64_t count = 0;
    for (int32_t i = 0; i < p.count; i++) {
        const part_tensor *t = &p.tensor[i], *u = &q.tensor[i];
        int64_t bytes;
        if (t->flags & ESA_WANT_HOST) continue;
        uint8_t *data = read_view(t, &bytes);
        assert_int_equal(u->view.dtype, ESA_DTYPE_F32);
        for (int64_t k = 0; k < part_count(t); k++) {
            const float x = ((const float *)u->view.data)[k];
            assert_true(esa_load_f32(data, k, t->view.dtype) == esa_round_to(x, t->view.dtype));
            if (strstr(t->name, "norm.weight"))
                assert_true(x == 1);
            else
                squares += (double)x * (double)x;
            count += !strstr(t->name, "norm.weight");
        }
        free(data);
    }
    assert_true(fabs(sqrt(squares / (double)count) - 0.02) < 0.001);
    assert_memory_not_equal(q.tensor[3].view.data, q.tensor[4].view.data, 400);
    for (int i = 0; i < 2; i++) {
        esa_store_plan plan;
        esa_store_get_plan(s[i], &plan);
        assert_int_equal(plan.groups, i ? 0 : PART_BLOCKS);
        must(esa_store_begin(s[i], 1));
        must(esa_store_end(s[i], 1));
        must(esa_store_fit(s[i], 0));
        esa_store_free(s[i]);
        esa_weights_free(w[i]);
    }
    esa_nn_close(&host);
}

/* ---------------------------------------------------------------- E4M3 files elsewhere */

/* On the CPU their values are there too; wrong scales are refused by name. */
static void f8_files(void **state)
{
    (void)state;
    part p;
    esa_nn host;
    esa_nn_init(&host, ctx);
    part_make(&p, ESA_FILE_F8_E4M3);
    part_write(&p, ctx);
    esa_weights *w;
    must(esa_weights_open(ctx, &w, p.folder.dir, "part", "part"));
    part_want(&p, w);
    must(esa_weights_check(w, NULL, NULL));
    must(esa_weights_load(w, ESA_HOLD_F32, 0));
    for (int32_t i = 0; i < p.count; i++)
        for (int64_t k = 0; k < part_count(&p.tensor[i]); k++)
            assert_true(((const float *)p.tensor[i].view.data)[k] ==
                        part_value(&p, &p.tensor[i], k));
    esa_weights_free(w);
    esa_nn_close(&host);
    scratch_remove(&p.folder);
    /* a scale of a tensor in BF16, one of the wrong length, and a scale of activations in BF16 */
    static const char *const called[3] = { "a.weight_scale", "a.weight_scale", "a.input_scale" };
    for (int n = 0; n < 3; n++) {
        scratch folder = scratch_make();
        esa_tensors_writer *out = NULL;
        const int64_t dim[2] = { 4, 2 }, scales = n == 1 ? 3 : 1;
        const float zeros[8] = { 0 };
        must(esa_tensors_writer_create(ctx, &out, scratch_path(&folder, "part.safetensors")));
        must(esa_tensors_writer_declare(out, "a.weight", n == 1 ? ESA_FILE_F8_E4M3 : ESA_FILE_BF16,
                                        2, dim));
        must(esa_tensors_writer_declare(out, called[n], ESA_FILE_F32, 1, &scales));
        must(esa_tensors_writer_data(out, zeros, n == 1 ? 8 : 16));
        must(esa_tensors_writer_data(out, zeros, 4 * scales));
        must(esa_tensors_writer_finish(out));
        esa_tensors_writer_free(out);
        esa_weight view;
        must(esa_weights_open(ctx, &w, folder.dir, "part", "part"));
        esa_weights_want(w, &view, 0, 2, dim, "a.weight");
        refused(esa_weights_check(w, NULL, NULL), ESA_ERR_MISMATCH, called[n]);
        esa_weights_free(w);
        scratch_remove(&folder);
    }
}

/* ---------------------------------------------------------------- a whole transformer */

/* Opens the transformer of a bench again, with linear layers of another type, or a limit. */
static void reopen(dit_bench *b, const dit_case *c, int32_t linear, int64_t limit)
{
    const esa_part_env env = {
        .nn = &b->nn, .folder = b->folder.top.dir, .linear = linear, .limit = limit
    };
    esa_dit_free(b->dit);
    b->dit = NULL;
    dit_ok(b, open_dit(&env, &b->dit, &esa_wan_dit_kind, &c->config));
}

/* The output of wan-tiny's case, bit for bit, with weights that stay and with ever less memory, in
 * BF16 and F8. F8 has 3 bits of mantissa: rounding is off by 2.6 % on average, weights and inputs
 * together by 3.7 %, and residuals dilute it. */
static void transformer(void **state)
{
    (void)state;
    const dit_case *c = &dit_cases[3];
    dit_bench b;
    float *want[2];
    esa_session_params params = esa_session_params_default();
    params.mode = ESA_SESSION_DENSE;
    dit_open_on(&b, c, ESA_HOLD_F32, 2, ESA_DEVICE_CUDA);
    for (int f8 = 0; f8 < 2; f8++) {
        if (f8) reopen(&b, c, ESA_DTYPE_F8, 0);
        esa_session_free(dit_run(&b, &params));
        want[f8] = malloc((size_t)b.out_count * 4);
        memcpy(want[f8], b.v, (size_t)b.out_count * 4);
        esa_store_plan plan;
        esa_store_get_plan(esa_dit_store(b.dit), &plan);
        assert_int_equal(plan.f8, f8 ? 8 * (c->config.layers - 2) : 0);
        const int64_t total = plan.resident_bytes;
        for (int percent = 85; percent >= 50; percent -= 35) {
            dit_ok(&b, esa_store_fit(esa_dit_store(b.dit), total * percent / 100));
            esa_store_get_plan(esa_dit_store(b.dit), &plan);
            print_message("%s, %d %%: %lld of %lld blocks stay\n", f8 ? "F8" : "BF16", percent,
                          (long long)plan.resident, (long long)plan.groups);
            assert_true(plan.resident < plan.groups);
            memset(b.v, 0, (size_t)b.out_count * 4);
            esa_session_free(dit_run(&b, &params));
            assert_memory_equal(b.v, want[f8], (size_t)b.out_count * 4);
        }
    }
    const double error = distance(want[1], want[0], b.out_count);
    print_message("F8 against BF16: %.4f\n", error);
    assert_true(error > 0 && error < 0.04);
    free(want[0]);
    free(want[1]);
    dit_close(&b);
}

/* A limit for all memory: blocks leave when a video begins, as many as its size asks for. */
static void limited(void **state)
{
    (void)state;
    const dit_case *c = &dit_cases[3];
    dit_bench b;
    esa_store_plan plan;
    esa_session_params params = esa_session_params_default();
    params.mode = ESA_SESSION_DENSE;
    dit_open_on(&b, c, ESA_HOLD_F32, 2, ESA_DEVICE_CUDA);
    esa_session_free(dit_run(&b, &params));
    float *want = malloc((size_t)b.out_count * 4);
    memcpy(want, b.v, (size_t)b.out_count * 4);
    const int64_t workspace = b.nn.be->products->workspace(b.ctx);
    esa_store_get_plan(esa_dit_store(b.dit), &plan);
    assert_int_equal(plan.resident, c->config.layers);
    /* as much again as the weights, the workspace of products, and the driver's share */
    const int64_t limit = (2 * plan.resident_bytes + workspace) * 16 / 15;
    reopen(&b, c, ESA_DTYPE_BF16, limit);
    esa_store_get_plan(esa_dit_store(b.dit), &plan);
    assert_int_equal(plan.resident, c->config.layers); /* nothing else is there yet */
    int64_t stayed = c->config.layers;
    for (int32_t frames = 1; frames <= 64; frames *= 2) {
        const int32_t latent[3] = { frames, c->latent[1], c->latent[2] };
        esa_layout layout = params.select.layout;
        const esa_status status = esa_dit_begin(b.dit, latent, &layout, params.select.selector,
                                                params.select.mode, 1);
        if (status) { /* the activations alone are too large */
            assert_int_equal(status, ESA_ERR_MEMORY);
            assert_non_null(strstr(esa_ctx_error(b.ctx), "at least"));
            break;
        }
        esa_store_get_plan(esa_dit_store(b.dit), &plan);
        print_message("%d frames: %lld of %lld blocks stay, %lld of %lld bytes\n", frames,
                      (long long)plan.resident, (long long)plan.groups, (long long)b.nn.held,
                      (long long)limit);
        assert_true(plan.resident <= stayed);
        assert_true(b.nn.held <= limit);
        stayed = plan.resident;
    }
    assert_true(stayed < c->config.layers);
    esa_session_free(dit_run(&b, &params)); /* a smaller one again */
    assert_memory_equal(b.v, want, (size_t)b.out_count * 4);
    assert_true(b.nn.held <= limit);
    free(want);
    dit_close(&b);
}

/* begin leaves what the decoder needs later. Blocks that left for a text encoder come back when the
 * next video begins, and a clear alone brings none back. */
static void room_stays(void **state)
{
    (void)state;
    const dit_case *c = &dit_cases[3];
    const int32_t latent[3] = { c->latent[0], c->latent[1], c->latent[2] };
    dit_bench b;
    esa_store_plan all, left, now;
    dit_open_on(&b, c, ESA_HOLD_F32, 2, ESA_DEVICE_CUDA);
    const int64_t workspace = b.nn.be->products->workspace(b.ctx);
    esa_store_get_plan(esa_dit_store(b.dit), &all);
    const int64_t limit = (8 * all.resident_bytes + workspace) * 16 / 15;
    reopen(&b, c, ESA_DTYPE_BF16, limit);
    /* the decoder takes all but two thirds of the weights' bytes */
    const esa_dit_room room = { .scratch = workspace,
                                .after = limit / 16 * 15 - workspace - all.resident_bytes * 2 / 3 };
    for (int32_t i = 0; i < 2; i++) {
        esa_layout layout = esa_session_params_default().select.layout;
        esa_dit_set_room(b.dit, &room);
        dit_ok(&b, esa_dit_begin(b.dit, latent, &layout, ESA_SELECT_ENTROPY, ESA_MODE_FIXED, 1));
        esa_store_get_plan(esa_dit_store(b.dit), i ? &now : &left);
        if (i) break;
        assert_in_range(left.resident, 0, left.groups - 1);
        esa_dit_end(b.dit);
        dit_ok(&b, esa_store_give(esa_dit_store(b.dit), all.resident_bytes / 4));
        esa_store_get_plan(esa_dit_store(b.dit), &now);
        assert_true(now.resident < left.resident);
        const int64_t given = now.resident;
        dit_ok(&b, esa_store_clear(esa_dit_store(b.dit), 1 << 20, 0));
        esa_store_get_plan(esa_dit_store(b.dit), &now);
        assert_int_equal(now.resident, given);
        dit_ok(&b,
               esa_store_give(esa_dit_store(b.dit), INT64_C(1) << 40)); /* the least that works */
        esa_store_get_plan(esa_dit_store(b.dit), &now);
        assert_true(now.resident == 0 && now.lanes == 1);
    }
    assert_int_equal(now.resident, left.resident);
    assert_int_equal(now.resident_bytes + now.lane_bytes, left.resident_bytes + left.lane_bytes);
    dit_close(&b);
}

/* ---------------------------------------------------------------- times */

enum { LARGE_BLOCKS = 12, LARGE_TENSORS = 5, LARGE_ROWS = 13824, LARGE_COLS = 5120 };

/* Blocks of five matrices, 0.7 GB each in BF16, as in Wan 14B. */
static void want_large(esa_weights *w, esa_weight *view)
{
    for (int32_t i = 0; i < LARGE_BLOCKS; i++)
        for (int32_t k = 0; k < LARGE_TENSORS; k++) {
            esa_weights_group(w, 1 + i);
            esa_weights_want(w, &view[i * LARGE_TENSORS + k], ESA_WANT_F8, 2,
                             (int64_t[]){ LARGE_ROWS, LARGE_COLS }, "blocks.%d.m%d.weight", i, k);
        }
}

static void write_large(scratch *folder, int32_t file)
{
    const int64_t dim[2] = { LARGE_ROWS, LARGE_COLS },
                  bytes = dim[0] * dim[1] * esa_dtype_size(file);
    uint16_t *data = malloc((size_t)bytes);
    for (int64_t i = 0; i < bytes / 2; i++) /* small numbers in any of the types */
        data[i] = (uint16_t)(0x3c00 + i * 7 % 64);
    esa_tensors_writer *w = NULL;
    must(esa_tensors_writer_create(ctx, &w, scratch_path(folder, "part.safetensors")));
    for (int32_t pass = 0; pass < 2; pass++)
        for (int32_t i = 0; i < LARGE_BLOCKS * LARGE_TENSORS; i++) {
            char name[64];
            snprintf(name, sizeof name, "blocks.%d.m%d.weight", i / LARGE_TENSORS,
                     i % LARGE_TENSORS);
            must(pass ? esa_tensors_writer_data(w, data, bytes)
                      : esa_tensors_writer_declare(w, name, file, 2, dim));
        }
    must(esa_tensors_writer_finish(w));
    esa_tensors_writer_free(w);
    free(data);
}

/* Opens a store of the large part and prints how long that took; folder NULL: random weights. */
static esa_store *open_large(scratch *folder, esa_weights **w, esa_weight *view, int32_t linear,
                             int64_t limit, const char *what)
{
    esa_store *s = NULL;
    const esa_store_settings settings = { .linear = linear, .limit = limit };
    must(folder ? esa_weights_open(ctx, w, folder->dir, "part", "part")
                : esa_weights_open_random(ctx, w, "part"));
    want_large(*w, view);
    must(esa_weights_check(*w, NULL, NULL));
    const double start = esa_nn_now();
    must(esa_store_open(&nn, &s, *w, &settings));
    must(esa_device_sync(ctx));
    const double seconds = esa_nn_now() - start;
    print_message("%-32s %.2f s", what, seconds);
    if (folder) {
        size_t length = 0;
        struct stat info;
        if (stat(scratch_path(folder, "part.safetensors"), &info) == 0)
            length = (size_t)info.st_size;
        print_message(", %.1f GB of file, %.1f GB/s", 1e-9 * (double)length,
                      1e-9 * (double)length / seconds);
    }
    print_message("\n");
    return s;
}

static void print_line(void *user, const char *line)
{
    (void)user;
    print_message("%s\n", line);
}

/* ESA_TEST_TIMES=1: loading from a file in the cache, and copies without work between them. Needs
 * 17 GB of disk, 30 GB of host memory and 10 GB on the GPU. */
static void times(void **state)
{
    static const int32_t file[] = { ESA_FILE_F32, ESA_FILE_BF16 };
    static esa_weight view[LARGE_BLOCKS * LARGE_TENSORS];
    (void)state;
    if (!getenv("ESA_TEST_TIMES") || stand_in) return;
    for (int i = 0; i < 2; i++) {
        scratch folder = scratch_make();
        write_large(&folder, file[i]);
        for (int f8 = 0; f8 < 2; f8++) {
            char what[64];
            esa_weights *w;
            snprintf(what, sizeof what, "%s to %s", i ? "BF16" : "F32", f8 ? "F8" : "BF16");
            esa_store_free(
                open_large(&folder, &w, view, f8 ? ESA_DTYPE_F8 : ESA_DTYPE_BF16, 0, what));
            esa_weights_free(w);
        }
        scratch_remove(&folder);
    }
    esa_weights *w;
    esa_store *s = open_large(NULL, &w, view, ESA_DTYPE_BF16, INT64_C(4) << 30, "random, 4 GiB");
    esa_store_plan plan;
    esa_store_get_plan(s, &plan);
    esa_store_describe(s, print_line, NULL);
    for (int n = 0; n < 3; n++) {
        const double start = esa_nn_now();
        for (int32_t g = 1; g <= LARGE_BLOCKS; g++) {
            must(esa_store_begin(s, g));
            must(esa_store_end(s, g));
        }
        must(esa_device_sync(ctx));
        const double seconds = esa_nn_now() - start;
        print_message("a forward without work: %.3f s, %.1f GB/s\n", seconds,
                      1e-9 * (double)plan.streamed_bytes / seconds);
    }
    esa_store_free(s);
    esa_weights_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f8_files), cmocka_unit_test(random_weights), cmocka_unit_test(transformer),
        cmocka_unit_test(limited),  cmocka_unit_test(room_stays),     cmocka_unit_test(times),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
