/* test_resize.c - scaling of pictures. The numbers are those of Pillow 13 (columns first in all of
 * these cases); tests/python/test_wan_i2v.py compares whole pictures through the engine.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <stdlib.h>
#include "media/resize.h"

static esa_ctx *ctx;

/* The same picture as in the script below. */
static void fill(uint8_t *rgb, int64_t count)
{
    for (int64_t i = 0; i < count; i++) rgb[i] = (uint8_t)((i * i * 31 + i * 7) % 251);
}

typedef struct resize_case {
    int64_t from[2], to[2]; /* height, width */
    int32_t filter;
    uint64_t sum; /* of byte i times i + 1 */
} resize_case;

/* numpy: a = ((i * i * 31 + i * 7) % 251).astype(uint8).reshape(h, w, 3) with i = arange(h * w *
 * 3); b = Image.fromarray(a).resize((W, H), filter); sum((arange(b.size) + 1) * b.ravel()) */
static const resize_case cases[] = {
    { { 12, 9 }, { 12, 9 }, ESA_RESIZE_BICUBIC, 6327988 },
    { { 12, 9 }, { 12, 9 }, ESA_RESIZE_LANCZOS, 6327988 },
    { { 40, 30 }, { 20, 15 }, ESA_RESIZE_BICUBIC, 49347636 },
    { { 40, 30 }, { 20, 15 }, ESA_RESIZE_LANCZOS, 49354920 },
    { { 40, 30 }, { 16, 12 }, ESA_RESIZE_BICUBIC, 20224710 },
    { { 40, 30 }, { 16, 12 }, ESA_RESIZE_LANCZOS, 20225847 },
    { { 7, 5 }, { 21, 15 }, ESA_RESIZE_BICUBIC, 63562608 },
    { { 7, 5 }, { 21, 15 }, ESA_RESIZE_LANCZOS, 63486737 },
    { { 33, 47 }, { 40, 11 }, ESA_RESIZE_BICUBIC, 106695792 },
    { { 33, 47 }, { 40, 11 }, ESA_RESIZE_LANCZOS, 106708034 },
    { { 64, 48 }, { 64, 7 }, ESA_RESIZE_BICUBIC, 110238749 },
    { { 64, 48 }, { 64, 7 }, ESA_RESIZE_LANCZOS, 110218101 },
    { { 50, 41 }, { 13, 9 }, ESA_RESIZE_BICUBIC, 7548904 },
    { { 50, 41 }, { 13, 9 }, ESA_RESIZE_LANCZOS, 7551644 },
};

static void sums(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const resize_case *c = &cases[i];
        const int64_t in = c->from[0] * c->from[1] * 3, out = c->to[0] * c->to[1] * 3;
        uint8_t *a = malloc((size_t)in), *b = malloc((size_t)out);
        assert_true(a && b);
        fill(a, in);
        assert_int_equal(
            esa_resize(ctx, b, c->to[0], c->to[1], a, c->from[0], c->from[1], c->filter), ESA_OK);
        uint64_t sum = 0;
        for (int64_t k = 0; k < out; k++) sum += (uint64_t)(k + 1) * b[k];
        if (sum != c->sum) print_error("case %zu: %llu\n", i, (unsigned long long)sum);
        assert_true(sum == c->sum);
        free(a);
        free(b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(sums) };
    if (esa_ctx_create(&ctx, NULL)) return 1;
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    esa_ctx_free(ctx);
    return failed;
}
