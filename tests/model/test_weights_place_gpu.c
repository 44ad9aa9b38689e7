/* test_weights_place_gpu.c - tensors that lie otherwise in a file are split and put in order on
 * their way to the GPU: every type, with scales, blocks and a LoRA.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/store_kit.h"
#include "model/place_cases.h"

enum { PLAIN, LORA, BLOCKS, KINDS };

/* Q8_0 with the scale 2^-7, so that a block has the values code / 128. */
static uint8_t q8[PLACE_FILE][44 * 34];

static float code(const part_tensor *t, int64_t i)
{
    return floorf(127 * fill_unit(fill_name(t->name), i)) / 128;
}

static void write_blocks(part *p)
{
    static float bias[PLACE_FILE][44];
    gguf_tensor_file list[PLACE_FILE];
    p->folder = scratch_make();
    for (int32_t i = 0; i < PLACE_FILE; i++) {
        const part_tensor *t = &p->tensor[i];
        list[i] = (gguf_tensor_file){ .rank = t->rank, .dim = { t->dim[0], t->dim[1] } };
        snprintf(list[i].name, sizeof list[i].name, "%s", t->name);
        list[i].dtype = i % 2 ? ESA_FILE_F32 : ESA_BLOCKS_Q8_0;
        list[i].data = i % 2 ? (void *)bias[i] : (void *)q8[i];
        for (int64_t k = 0; k < part_count(t); k++) {
            uint8_t *block = q8[i] + k / 32 * 34;
            const uint16_t scale = esa_f32_to_f16(1.0f / 128);
            if (i % 2) {
                bias[i][k] = part_value(p, t, k);
                continue;
            }
            memcpy(block, &scale, 2);
            block[2 + k % 32] = (uint8_t)(int8_t)(128 * code(t, k));
        }
    }
    gguf_file_write(scratch_path(&p->folder, "part.safetensors"), list, PLACE_FILE);
}

static float wanted(const part *p, const place_case *c, int64_t i, int32_t bias, int32_t kind)
{
    if (kind == BLOCKS && !bias)
        return code(&p->tensor[c->file],
                    place_row(c, i / PLACE_COLS) * PLACE_COLS + i % PLACE_COLS);
    return place_value(p, c, i, bias) + (kind == LORA ? place_change(c, i, bias) : 0);
}

static void compare(const part *p, const place_case *c, int32_t bias, int32_t kind)
{
    const int64_t cols = bias ? 1 : PLACE_COLS, count = c->rows * cols;
    const part_tensor t = { .rank = 2 - bias, .dim = { c->rows, cols }, .view = c->view };
    const int32_t f8 = c->view.dtype == ESA_DTYPE_F8;
    int64_t bytes;
    uint8_t *data = read_view(&t, &bytes);
    for (int64_t i = 0; i < count; i++) {
        const float want = wanted(p, c, i, bias, kind);
        float scale = 1;
        if (f8) memcpy(&scale, data + count + 4 * (i / cols), 4);
        const float got = f8 ? scale * esa_f8_to_f32(data[i])
                             : esa_load_f32(data, i, c->view.dtype);
        /* E4M3 in the file stays as it is. Else E4M3 rounds by 2^-4 and bf16 by 2^-9; the sums of
         * a LoRA may round to the neighbour. */
        const int32_t as_is = p->tensor[c->file].file == ESA_FILE_F8_E4M3;
        const float most = f8 && !(as_is && kind == PLAIN)
                               ? 1.001f * (0x1p-4f * fabsf(want) + 0x1p-10f * scale)
                           : kind == LORA ? 0x1p-8f * (2 + fabsf(want))
                                          : 0;
        const float exact = f8 ? want : esa_round_to(want, c->view.dtype);
        if (!(fabsf(got - exact) <= most))
            fail_msg("%s[%d] is %g instead of %g", c->name, (int)i, (double)got, (double)exact);
    }
    free(data);
}

static void loads(void **state)
{
    (void)state;
    static const int32_t types[] = { ESA_FILE_F32, ESA_FILE_F16, ESA_FILE_BF16, ESA_FILE_F8_E4M3 };
    for (int32_t n = 0; n < 4 * 2 * KINDS; n++) {
        const int32_t kind = n / 8, linear = n / 4 % 2 ? ESA_DTYPE_F8 : ESA_DTYPE_BF16;
        if (kind == BLOCKS && n % 4) continue;
        static part p;
        place_case c[PLACE_WANTED];
        esa_weights *w;
        esa_store *s;
        place_part(&p, types[n % 4]);
        if (kind == BLOCKS)
            write_blocks(&p);
        else
            part_write(&p, ctx);
        place_wanted(c);
        must(esa_weights_open_file(ctx, &w, scratch_path(&p.folder, "part.safetensors"), "part"));
        char path[640];
        snprintf(path, sizeof path, "%s", scratch_path(&p.folder, "lora.safetensors"));
        place_write_lora(&p, ctx, path);
        const esa_lora lora = { .file = path, .scale = 1 };
        if (kind == LORA) must(esa_weights_lora(w, &lora, 1));
        place_want(c, w, ESA_WANT_F8);
        must(esa_weights_check(w, NULL, NULL));
        const esa_store_settings settings = { .linear = linear };
        must(esa_store_open(&nn, &s, w, &settings));
        for (int32_t i = 0; i < PLACE_WANTED; i++) {
            assert_int_equal(c[i].view.dtype, i % 2 ? ESA_DTYPE_BF16 : linear);
            compare(&p, &c[i], i % 2, kind);
        }
        esa_store_free(s);
        esa_weights_free(w);
        scratch_remove(&p.folder);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(loads) };
    return cmocka_run_group_tests(tests, begin, end);
}
