/* test_blocks.c - types with blocks become f32 with the bits of the gguf package of Python.
 * SPDX-License-Identifier: Apache-2.0
 *
 * tools/golden/gguf_blocks.py makes the numbers. tests/nn/check_gguf.py makes them anew, with
 * another seed and more blocks, and runs this program on them. */
#include "model/golden.h"
#include <time.h>
#include "common/one_ctx.h"
#include "nn/blocks.h"
#include "nn/nn.h"

static const struct {
    const char *name;
    int32_t dtype;
} types[] = {
    { "F16", ESA_DTYPE_F16 },    { "BF16", ESA_DTYPE_BF16 },  { "Q8_0", ESA_BLOCKS_Q8_0 },
    { "Q4_K", ESA_BLOCKS_Q4_K }, { "Q5_K", ESA_BLOCKS_Q5_K }, { "Q6_K", ESA_BLOCKS_Q6_K },
};
enum { TYPES = sizeof types / sizeof types[0] };

typedef struct case_of {
    esa_tensor_info blocks;
    const float *values;
    int64_t count;
} case_of;

static case_of find(const esa_tensors *file, int i)
{
    case_of c = { .blocks = { .struct_size = sizeof c.blocks } };
    char name[32];
    snprintf(name, sizeof name, "%s.blocks", types[i].name);
    assert_int_equal(esa_tensors_find(file, name, &c.blocks), ESA_OK);
    snprintf(name, sizeof name, "%s.values", types[i].name);
    c.values = golden_find(file, name, &c.count);
    const int64_t block = esa_blocks_elements(types[i].dtype);
    assert_true(c.count >= 512);
    assert_int_equal(c.blocks.bytes,
                     block ? c.count / block * esa_blocks_bytes(types[i].dtype) : 2 * c.count);
    return c;
}

/* Whole tensors, at any alignment of the blocks. */
static void same_bits(void **state)
{
    (void)state;
    esa_tensors *file = golden_open(ctx, "gguf_blocks.safetensors");
    for (int i = 0; i < TYPES; i++) {
        const case_of c = find(file, i);
        for (int shift = 0; shift < 4; shift++) {
            uint8_t *at = malloc((size_t)c.blocks.bytes + 4);
            float *got = malloc((size_t)c.count * 4);
            assert_true(at && got);
            memcpy(at + shift, c.blocks.data, (size_t)c.blocks.bytes);
            const esa_weight w = {
                .data = at + shift, .dtype = types[i].dtype, .rank = 1, .dim = { c.count }
            };
            esa_weight_to_f32(got, &w, 0, c.count);
            for (int64_t n = 0; n < c.count; n++)
                if (memcmp(&got[n], &c.values[n], 4) != 0)
                    fail_msg("%s: element %lld is %a, expected %a", types[i].name, (long long)n,
                             (double)got[n], (double)c.values[n]);
            free(at);
            free(got);
        }
    }
    esa_tensors_free(file);
}

/* Any piece of a tensor is that piece of the whole, and nothing beside it is written. */
static void pieces(void **state)
{
    (void)state;
    esa_tensors *file = golden_open(ctx, "gguf_blocks.safetensors");
    static const int64_t first[] = { 0, 1, 31, 32, 33, 255, 256, 300 },
                         count[] = { 0, 1, 2, 31, 32, 200, 212 };
    for (int i = 0; i < TYPES; i++) {
        const case_of c = find(file, i);
        const esa_weight w = {
            .data = c.blocks.data, .dtype = types[i].dtype, .rank = 1, .dim = { c.count }
        };
        for (size_t a = 0; a < sizeof first / sizeof *first; a++)
            for (size_t b = 0; b < sizeof count / sizeof *count; b++) {
                float got[216];
                for (int n = 0; n < 216; n++) got[n] = 12345.0f;
                esa_weight_to_f32(got + 1, &w, first[a], count[b]);
                assert_memory_equal(got + 1, c.values + first[a], (size_t)(4 * count[b]));
                assert_true(got[0] == 12345.0f && got[1 + count[b]] == 12345.0f);
            }
    }
    esa_tensors_free(file);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Not a test of speed: prints what one thread expands. */
static void rates(void **state)
{
    (void)state;
    const int64_t count = INT64_C(1) << 20;
    float *out = malloc((size_t)count * 4);
    uint8_t *blocks = calloc(1, (size_t)count * 2);
    assert_true(out && blocks);
    for (int i = 0; i < TYPES; i++) {
        const esa_weight w = {
            .data = blocks, .dtype = types[i].dtype, .rank = 1, .dim = { count }
        };
        double best = 1e9;
        for (int n = 0; n < 4; n++) {
            const double begin = now();
            esa_weight_to_f32(out, &w, 0, count);
            best = fmin(best, now() - begin);
        }
        assert_true(out[0] == 0.0f && out[count - 1] == 0.0f);
        print_message("%-4s %.2f billion elements per second\n", types[i].name,
                      1e-9 * (double)count / best);
    }
    free(out);
    free(blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),
        cmocka_unit_test(pieces),
        cmocka_unit_test(rates),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
