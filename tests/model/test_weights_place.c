/* test_weights_place.c - tensors that lie otherwise in a file are split and put in order while they
 * are loaded into host memory: every type, with scales and with a LoRA. Files that do not fit.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/place_cases.h"

static esa_ctx *ctx;

static void must(esa_status status)
{
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(ctx));
}

static void expect(esa_status got, const char *words)
{
    if (got != ESA_ERR_MISMATCH || !strstr(esa_ctx_error(ctx), words))
        fail_msg("%s: %s\n(expected '%s')", esa_status_name(got), esa_ctx_error(ctx), words);
}

/* Compares every element; near: with the LoRA, which adds in another order. */
static void compare(const part *p, const place_case c[PLACE_WANTED], int32_t hold, int32_t near)
{
    for (int32_t i = 0; i < PLACE_WANTED; i++) {
        const int64_t count = c[i].rows * (i % 2 ? 1 : PLACE_COLS);
        float *got = malloc((size_t)count * 4);
        assert_non_null(got);
        esa_weight_to_f32(got, &c[i].view, 0, count);
        for (int64_t k = 0; k < count; k++) {
            float want = place_value(p, &c[i], k, i % 2);
            if (near) want += place_change(&c[i], k, i % 2);
            if (!near) want = esa_round_to(want, c[i].view.dtype);
            /* bf16 rounds by 2^-9; sums in another order by a few units of 2^-24 */
            const float some = hold == ESA_HOLD_F32 || i % 2 ? 1e-6f : 0x1p-8f;
            const float most = near ? some * (2 + fabsf(want)) : 0;
            if (!(fabsf(got[k] - want) <= most))
                fail_msg("%s[%d] is %g instead of %g", c[i].name, (int)k, (double)got[k],
                         (double)want);
        }
        free(got);
    }
}

static void loads(void **state)
{
    (void)state;
    static const int32_t types[] = { ESA_FILE_F32, ESA_FILE_F16, ESA_FILE_BF16, ESA_FILE_F8_E4M3 },
                         holds[] = { ESA_HOLD_FILE, ESA_HOLD_F32, ESA_HOLD_BF16 };
    for (int32_t n = 0; n < 4 * 3 * 2; n++) {
        const int32_t hold = holds[n / 4 % 3], near = n / 12;
        static part p;
        place_case c[PLACE_WANTED];
        esa_weights *w;
        place_part(&p, types[n % 4]);
        part_write(&p, ctx);
        place_wanted(c);
        must(esa_weights_open_file(ctx, &w, scratch_path(&p.folder, "part.safetensors"), "part"));
        char path[640];
        snprintf(path, sizeof path, "%s", scratch_path(&p.folder, "lora.safetensors"));
        place_write_lora(&p, ctx, path);
        const esa_lora lora = { .file = path, .scale = 1 };
        if (near) must(esa_weights_lora(w, &lora, 1));
        place_want(c, w, 0);
        must(esa_weights_check(w, NULL, NULL));
        assert_int_equal(esa_weights_parameters(w), (44 + 12 + 24 + 5) * (PLACE_COLS + 1));
        must(esa_weights_load(w, hold, 0));
        compare(&p, c, hold, near);
        /* Rows that follow one another need no memory of their own. */
        int64_t held, mapped;
        esa_weights_memory(w, &held, &mapped);
        if (hold == ESA_HOLD_FILE && !near && types[n % 4] == ESA_FILE_BF16)
            assert_true(held < 2 * (12 + 24) * PLACE_COLS + 4 * (44 + 12 + 24 + 5) + 1);
        esa_weights_free(w);
        scratch_remove(&p.folder);
    }
}

/* Blocks of a GGUF file lie along the rows, so rows are split as they are. */
static void blocks(void **state)
{
    (void)state;
    static part p;
    static uint8_t bytes[PLACE_FILE][44 * 34];
    static float values[PLACE_FILE][44 * PLACE_COLS];
    gguf_tensor_file list[PLACE_FILE];
    scratch dir = scratch_make();
    place_part(&p, ESA_FILE_F32);
    for (int32_t i = 0; i < PLACE_FILE; i++) {
        const part_tensor *t = &p.tensor[i];
        list[i] = (gguf_tensor_file){ .rank = t->rank,
                                      .dim = { t->dim[0], t->dim[1] },
                                      .dtype = i % 2 ? ESA_FILE_F32 : ESA_BLOCKS_Q8_0,
                                      .data = i % 2 ? (void *)values[i] : (void *)bytes[i] };
        snprintf(list[i].name, sizeof list[i].name, "%s", t->name);
        for (int64_t k = 0; k < part_count(t); k++) values[i][k] = part_value(&p, t, k);
        for (int64_t k = 0; i % 2 == 0 && k < part_count(t); k++) {
            bytes[i][k / 32 * 34] = (uint8_t)(0x13 + k / 32 % 5); /* d is a small half */
            bytes[i][k / 32 * 34 + 1] = 0x20;
            bytes[i][k / 32 * 34 + 2 + k % 32] = (uint8_t)(k * 29 % 251);
        }
        if (i % 2 == 0) {
            const esa_weight view = { .data = bytes[i],
                                      .dtype = ESA_BLOCKS_Q8_0,
                                      .rank = 2,
                                      .dim = { t->dim[0], PLACE_COLS } };
            esa_weight_to_f32(values[i], &view, 0, part_count(t));
        }
    }
    gguf_file_write(scratch_path(&dir, "x.gguf"), list, PLACE_FILE);
    for (int32_t hold = ESA_HOLD_FILE; hold <= ESA_HOLD_F32; hold++) {
        place_case c[PLACE_WANTED];
        esa_weights *w;
        place_wanted(c);
        must(esa_weights_open_file(ctx, &w, scratch_path(&dir, "x.gguf"), "part"));
        place_want(c, w, 0);
        must(esa_weights_check(w, NULL, NULL));
        must(esa_weights_load(w, hold, 0));
        for (int32_t i = 0; i < PLACE_WANTED; i++) {
            const int64_t cols = i % 2 ? 1 : PLACE_COLS, count = c[i].rows * cols;
            float got[20 * PLACE_COLS];
            if (i % 2 == 0)
                assert_int_equal(c[i].view.dtype,
                                 hold == ESA_HOLD_F32 ? ESA_DTYPE_F32 : ESA_BLOCKS_Q8_0);
            esa_weight_to_f32(got, &c[i].view, 0, count);
            for (int64_t k = 0; k < count; k++)
                assert_true(got[k] ==
                            values[c[i].file][place_row(&c[i], k / cols) * cols + k % cols]);
        }
        esa_weights_free(w);
    }
    /* A vector is not split inside a block. */
    list[1].dtype = ESA_BLOCKS_Q8_0;
    list[1].dim[0] = 64;
    list[1].data = bytes[0];
    gguf_file_write(scratch_path(&dir, "y.gguf"), list, PLACE_FILE);
    place_case c[PLACE_WANTED];
    esa_weights *w;
    place_wanted(c);
    c[7].rows += 20; /* the bias has 64 numbers */
    must(esa_weights_open_file(ctx, &w, scratch_path(&dir, "y.gguf"), "part"));
    place_want(c, w, 0);
    expect(esa_weights_check(w, NULL, NULL), "1 with a type other than");
    esa_weights_free(w);
    scratch_remove(&dir);
}

/* ---------------------------------------------------------------- files that do not fit */

static esa_status check(part *p, const char *lora)
{
    place_case c[PLACE_WANTED];
    esa_weights *w;
    const esa_lora one = { .file = lora, .scale = 1 };
    place_wanted(c);
    must(esa_weights_open_file(ctx, &w, scratch_path(&p->folder, "part.safetensors"), "part"));
    if (lora) must(esa_weights_lora(w, &one, 1));
    place_want(c, w, 0);
    const esa_status status = esa_weights_check(w, NULL, NULL);
    esa_weights_free(w);
    return status;
}

/* Replaces words of the same length behind a name in the file's header. */
static void patch(part *p, const char *name, const char *old, const char *new)
{
    size_t size;
    uint8_t *bytes = scratch_read(scratch_path(&p->folder, "part.safetensors"), &size);
    char *tensor = strstr((char *)bytes + 8, name), *at = tensor ? strstr(tensor, old) : NULL;
    assert_non_null(at);
    memcpy(at, new, strlen(old));
    scratch_write(scratch_path(&p->folder, "part.safetensors"), bytes, size);
    free(bytes);
}

static void faults(void **state)
{
    (void)state;
    static const char *const says[] = {
        "1 missing (layers.0.fused.bias)",
        "1 with the wrong shape (layers.0.fused.weight [45,32] instead of [44,32])",
        "1 with the wrong shape (final.1.weight [11,32] instead of [12,32])",
        "1 not expected (misspelt)",
        "1 with a type other than F32, F16, BF16, F8_E4M3 (both.0.weight I32)",
        ("1 with the wrong shape (layers.0.fused.scale_weight expected one number, or one for each "
         "row)"),
    };
    for (int32_t n = 0; n < 6; n++) {
        static part p;
        place_part(&p, n == 5 ? ESA_FILE_F8_E4M3 : ESA_FILE_F32);
        if (n == 0 || n == 3) snprintf(p.tensor[1].name, sizeof p.tensor[1].name, "misspelt");
        if (n == 1) p.tensor[0].dim[0] = 45;
        if (n == 2) p.tensor[2].dim[0] = 11;
        part_write(&p, ctx);
        if (n == 4) patch(&p, "both.0.weight", "F32", "I32");
        if (n == 5) patch(&p, "fused.scale_weight", "F32", "F16");
        if (n == 5) patch(&p, "fused.scale_weight", "[44]", "[88]");
        expect(check(&p, NULL), says[n]);
        scratch_remove(&p.folder);
    }
}

/* A LoRA of a module that holds several tensors is refused once, not once for each. */
static void lora_faults(void **state)
{
    (void)state;
    static part p, other;
    char path[640];
    place_part(&p, ESA_FILE_F32);
    part_write(&p, ctx);
    other = p;
    snprintf(path, sizeof path, "%s", scratch_path(&p.folder, "lora.safetensors"));
    other.tensor[0].dim[0] = 43;
    place_write_lora(&other, ctx, path);
    expect(check(&p, path),
           "1 with the wrong shape or type (diffusion_model.layers.0.fused.lora_down.weight)");
    other = p;
    snprintf(other.tensor[0].name, sizeof other.tensor[0].name, "layers.0.fussd.weight");
    place_write_lora(&other, ctx, path);
    expect(check(&p, path), "2 of tensors that the model does not have "
                            "(diffusion_model.layers.0.fussd.lora_down.weight, "
                            "diffusion_model.layers.0.fussd.lora_up.weight)");
    other = p;
    snprintf(other.tensor[6].name, sizeof other.tensor[6].name, "blocks.0.k.weight");
    other.tensor[6].dim[0] = 8;
    place_write_lora(&other, ctx, path);
    expect(check(&p, path), "(twice)");
    scratch_remove(&p.folder);
}

/* Sides of 0 in a header: tensors, scales and LoRAs are refused, and nothing is divided by them. */
static void sides_of_zero(void **state)
{
    (void)state;
    static part p, other;
    char path[640];
    place_part(&p, ESA_FILE_F32);
    for (int32_t i = 0; i < PLACE_FILE; i++) {
        other = p;
        other.tensor[i].dim[0] = 0;
        part_write(&other, ctx);
        expect(check(&other, NULL), "1 with the wrong shape (");
        scratch_remove(&other.folder);
    }
    place_part(&p, ESA_FILE_F8_E4M3);
    part_write(&p, ctx);
    snprintf(path, sizeof path, "%s", scratch_path(&p.folder, "lora.safetensors"));
    for (int32_t kind = 0; kind < 3; kind++) {
        const char *const name[2] = { "diffusion_model.layers.0.fused.lora_down.weight",
                                      "diffusion_model.layers.0.fused.lora_up.weight" };
        const int64_t down[2] = { kind == 1 ? 3 : 0, kind == 1 ? 0 : PLACE_COLS },
                      up[2] = { kind == 2 ? 0 : 44, kind == 1 ? 3 : 0 };
        static const float x[44 * 3];
        esa_tensors_writer *w = NULL;
        must(esa_tensors_writer_create(ctx, &w, path));
        must(esa_tensors_writer_declare(w, name[0], ESA_FILE_F32, 2, down));
        must(esa_tensors_writer_declare(w, name[1], ESA_FILE_F32, 2, up));
        must(esa_tensors_writer_data(w, x, 4 * down[0] * down[1]));
        must(esa_tensors_writer_data(w, x, 4 * up[0] * up[1]));
        must(esa_tensors_writer_finish(w));
        esa_tensors_writer_free(w);
        expect(check(&p, path), "1 with the wrong shape or type (");
    }
    scratch_remove(&p.folder);
}

int main(void)
{
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 2;
    if (esa_ctx_create(&ctx, &p) != ESA_OK) return 1;
    const struct CMUnitTest tests[] = { cmocka_unit_test(loads), cmocka_unit_test(blocks),
                                        cmocka_unit_test(faults), cmocka_unit_test(lora_faults),
                                        cmocka_unit_test(sides_of_zero) };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    esa_ctx_free(ctx);
    return failed;
}
