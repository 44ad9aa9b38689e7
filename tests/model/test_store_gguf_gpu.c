/* test_store_gguf_gpu.c - blocks of a GGUF file on the GPU: the same bytes as a file that holds
 * their values in f32.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/store_kit.h"
#include "model/gguf_file.h"

enum { KINDS = 3 }; /* linear in bf16, linear in f8, wanted in f32 */

/* Bytes and scales of every tensor as the store holds them. */
static void look(const char *path, const gguf_tensor_file *list, int32_t kind,
                 uint8_t *data[GGUF_TYPES], int64_t bytes[GGUF_TYPES])
{
    part_tensor t[GGUF_TYPES];
    esa_weights *w;
    esa_store *s;
    must(esa_weights_open_file(ctx, &w, path, "part"));
    for (int32_t i = 0; i < GGUF_TYPES; i++) {
        t[i] = (part_tensor){ .rank = 2, .dim = { list[i].dim[0], list[i].dim[1] } };
        esa_weights_want(w, &t[i].view, kind == 2 ? ESA_WANT_F32 : ESA_WANT_F8, 2, list[i].dim,
                         "%s", list[i].name);
    }
    must(esa_weights_check(w, NULL, NULL));
    const esa_store_settings settings = { .linear = kind == 1 ? ESA_DTYPE_F8 : ESA_DTYPE_BF16 };
    must(esa_store_open(&nn, &s, w, &settings));
    for (int32_t i = 0; i < GGUF_TYPES; i++) {
        assert_int_equal(t[i].view.dtype, kind == 0   ? ESA_DTYPE_BF16
                                          : kind == 1 ? ESA_DTYPE_F8
                                                      : ESA_DTYPE_F32);
        data[i] = read_view(&t[i], &bytes[i]);
    }
    esa_store_free(s);
    esa_weights_free(w);
}

static void same_as_values(void **state)
{
    (void)state;
    esa_tensors *golden = golden_open(ctx, "gguf_blocks.safetensors");
    gguf_tensor_file list[GGUF_TYPES], plain[GGUF_TYPES];
    const float *values[GGUF_TYPES];
    scratch dir = scratch_make();
    char blocks[640], f32[640];
    snprintf(blocks, sizeof blocks, "%s", scratch_path(&dir, "blocks.gguf"));
    snprintf(f32, sizeof f32, "%s", scratch_path(&dir, "f32.gguf"));
    gguf_golden(golden, list, values);
    memcpy(plain, list, sizeof plain);
    for (int32_t i = 0; i < GGUF_TYPES; i++) {
        plain[i].dtype = ESA_FILE_F32;
        plain[i].data = values[i];
    }
    gguf_file_write(blocks, list, GGUF_TYPES);
    gguf_file_write(f32, plain, GGUF_TYPES);
    for (int32_t kind = 0; kind < KINDS; kind++) {
        uint8_t *got[GGUF_TYPES], *want[GGUF_TYPES];
        int64_t got_bytes[GGUF_TYPES], want_bytes[GGUF_TYPES];
        look(blocks, list, kind, got, got_bytes);
        look(f32, plain, kind, want, want_bytes);
        for (int32_t i = 0; i < GGUF_TYPES; i++) {
            assert_int_equal(got_bytes[i], want_bytes[i]);
            assert_memory_equal(got[i], want[i], (size_t)want_bytes[i]);
            for (int64_t n = 0; kind != 1 && n < list[i].dim[0] * 256; n++) {
                const int32_t dtype = kind == 0 ? ESA_DTYPE_BF16 : ESA_DTYPE_F32;
                assert_true(esa_load_f32(got[i], n, dtype) == esa_round_to(values[i][n], dtype));
            }
            free(got[i]);
            free(want[i]);
        }
    }
    esa_tensors_free(golden);
    scratch_remove(&dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(same_as_values) };
    return cmocka_run_group_tests(tests, begin, end);
}
