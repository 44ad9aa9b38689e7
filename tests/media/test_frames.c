/* test_frames.c - frames in memory: creating, describing, side by side. Files appear whole or not
 * at all, whichever allocation fails.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <signal.h>
#include <sys/resource.h>
#include "esa/esa_video.h"

static void create_and_describe(void **state)
{
    (void)state;
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 1);
    esa_frames *f = NULL;
    uint8_t rgb[2 * 2 * 3 * 3];
    for (size_t i = 0; i < sizeof rgb; i++) rgb[i] = (uint8_t)i;
    esa_frames_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_frames_create(ctx, &f, rgb, 2, 2, 3, 12.5), ESA_OK);
    assert_int_equal(esa_frames_get_info(f, &info), ESA_OK);
    assert_true(info.frames == 2 && info.height == 2 && info.width == 3 && info.fps == 12.5);
    assert_memory_equal(info.rgb, rgb, sizeof rgb);
    assert_true(info.rgb != rgb);
    info.struct_size = 0;
    assert_int_equal(esa_frames_get_info(f, &info), ESA_ERR_VERSION);
    assert_int_equal(esa_frames_get_info(NULL, &info), ESA_ERR_ARGUMENT);
    esa_frames_free(f);
    esa_frames_free(NULL);
    assert_refused(ctx, esa_frames_create(ctx, &f, NULL, 0, 2, 3, 16), ESA_ERR_ARGUMENT, "0 frames",
                   NULL);
    assert_null(f);
    assert_refused(ctx, esa_frames_create(ctx, &f, NULL, 1, -1, 3, 16), ESA_ERR_ARGUMENT, "-1",
                   NULL);
    assert_refused(ctx, esa_frames_create(ctx, &f, NULL, 1, 2, 100000, 16), ESA_ERR_ARGUMENT,
                   "100000", NULL);
    assert_refused(ctx, esa_frames_create(ctx, &f, NULL, 1, 2, 3, 0), ESA_ERR_ARGUMENT, "second",
                   NULL);
    for (int left = 0; left < 2; left++) {
        c.left = left;
        assert_refused(ctx, esa_frames_create(ctx, &f, NULL, 1, 2, 3, 16), ESA_ERR_MEMORY, "memory",
                       NULL);
    }
    esa_ctx_free(ctx);
    assert_int_equal(c.live, 0);
}

static void side_by_side(void **state)
{
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    esa_frames *a, *b, *other, *both;
    uint8_t left[2 * 2 * 1 * 3], right[2 * 2 * 2 * 3];
    for (size_t i = 0; i < sizeof left; i++) left[i] = (uint8_t)i;
    for (size_t i = 0; i < sizeof right; i++) right[i] = (uint8_t)(100 + i);
    assert_int_equal(esa_frames_create(ctx, &a, left, 2, 2, 1, 16), ESA_OK);
    assert_int_equal(esa_frames_create(ctx, &b, right, 2, 2, 2, 16), ESA_OK);
    assert_int_equal(esa_frames_create(ctx, &other, NULL, 1, 2, 2, 16), ESA_OK);
    assert_int_equal(esa_frames_beside(ctx, &both, a, b), ESA_OK);
    esa_frames_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_frames_get_info(both, &info), ESA_OK);
    assert_true(info.frames == 2 && info.height == 2 && info.width == 3);
    for (int row = 0; row < 4; row++) {
        assert_memory_equal(info.rgb + row * 9, left + row * 3, 3);
        assert_memory_equal(info.rgb + row * 9 + 3, right + row * 6, 6);
    }
    esa_frames_free(both);
    assert_refused(ctx, esa_frames_beside(ctx, &both, a, other), ESA_ERR_SHAPE, "2 frames",
                   "1 frames", NULL);
    assert_null(both);
    esa_frames_free(a);
    esa_frames_free(b);
    esa_frames_free(other);
    esa_ctx_free(ctx);
}

/* Every allocation of every writer fails once: one message, nothing on disk, nothing leaked.
 * FFmpeg's own allocations are not counted. */
static void out_of_memory(void **state)
{
    static const char *const names[] = { "a.y4m", "a.png", "a.mp4", "out/" };
    (void)state;
    scratch s = scratch_make();
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 1);
    esa_frames *f;
    assert_int_equal(esa_frames_create(ctx, &f, NULL, 1, 16, 16, 16), ESA_OK);
    for (int n = 0; n < 4; n++)
        for (int left = 0;; left++) {
            c.left = left;
            const esa_status status = esa_frames_save(ctx, f, scratch_path(&s, names[n]), NULL);
            if (status == ESA_OK || status == ESA_ERR_UNSUPPORTED) break;
            assert_refused(ctx, status, ESA_ERR_MEMORY, "memory", NULL);
            assert_int_equal(scratch_count(&s), n); /* only the files of earlier turns */
            assert_true(left < 20);
        }
    c.left = -1;
    unlink(scratch_path(&s, "out/00000.png"));
    rmdir(scratch_path(&s, "out"));
    esa_frames_free(f);
    esa_ctx_free(ctx);
    assert_int_equal(c.live, 0);
    scratch_remove(&s);
}

/* A file size limit behaves as a full disk does: the write fails in the middle. */
static void full_disk(void **state)
{
    static const char *const names[] = {
        "a.y4m", "a.png", "a.mp4", "out/", "a.npy", "a.safetensors"
    };
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    esa_frames *f;
    enum { SIDE = 64 };
    static uint8_t rgb[SIDE * SIDE * 3];
    for (size_t i = 0; i < sizeof rgb; i++) rgb[i] = (uint8_t)(i * 2654435761u >> 11);
    assert_int_equal(esa_frames_create(ctx, &f, rgb, 1, SIDE, SIDE, 16), ESA_OK);
    struct rlimit before, tight;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    tight = before;
    tight.rlim_cur = 500;
    signal(SIGXFSZ, SIG_IGN);
    scratch_write(scratch_path(&s, "a.y4m"), "older", 5);
    for (int n = 0; n < 6; n++) {
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
        const esa_status status = esa_frames_save(ctx, f, scratch_path(&s, names[n]), NULL);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        if (status == ESA_ERR_UNSUPPORTED) continue;
        assert_refused(ctx, status, ESA_ERR_IO, "cannot be written", NULL);
        assert_int_equal(scratch_count(&s), 1);
    }
    size_t size;
    uint8_t *older = scratch_read(scratch_path(&s, "a.y4m"), &size);
    assert_true(size == 5 && memcmp(older, "older", 5) == 0);
    free(older);
    esa_frames_free(f);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

static void wrong_settings(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    esa_frames *f;
    assert_int_equal(esa_frames_create(ctx, &f, NULL, 1, 16, 16, 16), ESA_OK);
    esa_save_params p = esa_save_params_default();
    const char *path = scratch_path(&s, "a.y4m");
    p.quality = 101;
    assert_refused(ctx, esa_frames_save(ctx, f, path, &p), ESA_ERR_ARGUMENT, "101", NULL);
    p.quality = 0;
    p.fps = -1;
    assert_refused(ctx, esa_frames_save(ctx, f, path, &p), ESA_ERR_ARGUMENT, "fps", NULL);
    p.fps = 0;
    p.struct_size = 3;
    assert_refused(ctx, esa_frames_save(ctx, f, path, &p), ESA_ERR_VERSION,
                   "esa_save_params has struct_size 3", NULL);
    assert_refused(ctx, esa_frames_save(ctx, NULL, path, NULL), ESA_ERR_ARGUMENT, "missing", NULL);
    assert_refused(ctx, esa_frames_save(ctx, f, "", NULL), ESA_ERR_ARGUMENT, "missing", NULL);
    assert_int_equal(scratch_count(&s), 0);
    esa_frames_free(f);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(create_and_describe), cmocka_unit_test(side_by_side),
        cmocka_unit_test(out_of_memory),       cmocka_unit_test(full_disk),
        cmocka_unit_test(wrong_settings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
