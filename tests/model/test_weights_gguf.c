/* test_weights_gguf.c - weights in one file that the caller names: GGUF with every type, and the
 * names of Wan's authors in GGUF and safetensors.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/gguf_file.h"
#include "model/dit_cases.h"

static esa_ctx *ctx;
static esa_nn nn;

typedef struct lines {
    char all[4000];
} lines;

static void note(void *user, const char *line)
{
    lines *l = user;
    const size_t used = strlen(l->all);
    snprintf(l->all + used, sizeof l->all - used, "%s\n", line);
}

static void expect(esa_status got, esa_status want, const char *words)
{
    if (got != want || !strstr(esa_ctx_error(ctx), words))
        fail_msg("%s: %s\n(expected '%s')", esa_status_name(got), esa_ctx_error(ctx), words);
}

/* ---------------------------------------------------------------- values */

/* Blocks are held as they are, or become f32 or bf16; all with the golden values. */
static void holds(void **state)
{
    (void)state;
    esa_tensors *golden = golden_open(ctx, "gguf_blocks.safetensors");
    gguf_tensor_file list[GGUF_TYPES];
    const float *values[GGUF_TYPES];
    scratch dir = scratch_make();
    gguf_golden(golden, list, values);
    gguf_file_write(scratch_path(&dir, "x.gguf"), list, GGUF_TYPES);
    static const int32_t hold[] = { ESA_HOLD_FILE, ESA_HOLD_F32, ESA_HOLD_BF16, ESA_HOLD_AUTO };
    for (int32_t k = 0; k < 4; k++) {
        esa_weights *w;
        esa_weight view[GGUF_TYPES];
        int64_t held, mapped;
        assert_int_equal(esa_weights_open_file(ctx, &w, scratch_path(&dir, "x.gguf"), "part"),
                         ESA_OK);
        for (int32_t i = 0; i < GGUF_TYPES; i++)
            esa_weights_want(w, &view[i], 0, 2, list[i].dim, "%s", list[i].name);
        assert_int_equal(esa_weights_check(w, NULL, NULL), ESA_OK);
        assert_int_equal(esa_weights_load(w, hold[k], 0), ESA_OK);
        for (int32_t i = 0; i < GGUF_TYPES; i++) {
            const int64_t count = list[i].dim[0] * 256;
            float *got = malloc((size_t)count * 4);
            assert_non_null(got);
            assert_int_equal(view[i].dtype, hold[k] == ESA_HOLD_FILE   ? list[i].dtype
                                            : hold[k] == ESA_HOLD_BF16 ? ESA_DTYPE_BF16
                                                                       : ESA_DTYPE_F32);
            esa_weight_to_f32(got, &view[i], 0, count);
            for (int64_t n = 0; n < count; n++)
                assert_true(got[n] == esa_round_to(values[i][n], hold[k] == ESA_HOLD_BF16
                                                                     ? ESA_DTYPE_BF16
                                                                     : ESA_DTYPE_F32));
            free(got);
        }
        esa_weights_memory(w, &held, &mapped);
        assert_int_equal(held == 0, hold[k] == ESA_HOLD_FILE);
        assert_int_equal(mapped > 0, hold[k] == ESA_HOLD_FILE);
        esa_weights_free(w);
    }
    esa_tensors_free(golden);
    scratch_remove(&dir);
}

/* A product with a weight in blocks equals the product with the same weight in f32. */
static void products(void **state)
{
    (void)state;
    enum { OUT = 37, IN = 512, ROWS = 3 };
    static uint8_t blocks[OUT * IN / 32 * 34];
    static float x[ROWS * IN], wide[OUT * IN], want[ROWS * OUT], got[ROWS * OUT];
    const int64_t elements = OUT * IN;
    for (int64_t i = 0; i < elements; i++) {
        blocks[i / 32 * 34] = 0x13; /* d is a small half */
        blocks[i / 32 * 34 + 1] = 0x20;
        blocks[i / 32 * 34 + 2 + i % 32] = (uint8_t)(i * 29 % 251);
    }
    for (int64_t i = 0; i < ROWS * IN; i++) x[i] = fill_unit(3, i);
    esa_weight w = { .data = blocks, .dtype = ESA_BLOCKS_Q8_0, .rank = 2, .dim = { OUT, IN } };
    esa_weight_to_f32(wide, &w, 0, elements);
    const esa_weight plain = { .data = wide, .rank = 2, .dim = { OUT, IN } };
    const esa_view in = esa_view_of(x, ESA_DTYPE_F32, ESA_DEVICE_CPU, ROWS, IN),
                   y[2] = { esa_view_of(want, ESA_DTYPE_F32, ESA_DEVICE_CPU, ROWS, OUT),
                            esa_view_of(got, ESA_DTYPE_F32, ESA_DEVICE_CPU, ROWS, OUT) };
    assert_int_equal(esa_nn_linear(&nn, &y[0], &in, &plain, NULL, NULL), ESA_OK);
    assert_int_equal(esa_nn_linear(&nn, &y[1], &in, &w, NULL, NULL), ESA_OK);
    assert_memory_equal(got, want, sizeof want);
    assert_true(fabsf(want[0]) > 0);
}

/* ---------------------------------------------------------------- names and shapes */

/* The name that Wan's authors gave a tensor; written a second time, not taken from the engine. */
static void original_name(char *out, size_t size, const char *name)
{
    static const char *const pairs[][2] = {
        { "condition_embedder.time_embedder.linear_1.", "time_embedding.0." },
        { "condition_embedder.time_embedder.linear_2.", "time_embedding.2." },
        { "condition_embedder.time_proj.", "time_projection.1." },
        { "condition_embedder.text_embedder.linear_1.", "text_embedding.0." },
        { "condition_embedder.text_embedder.linear_2.", "text_embedding.2." },
        { "proj_out.", "head.head." },
        { ".scale_shift_table", ".modulation" },
        { "scale_shift_table", "head.modulation" },
        { "attn1.to_out.0.", "self_attn.o." },
        { "attn2.to_out.0.", "cross_attn.o." },
        { "attn1.to_", "self_attn." },
        { "attn2.to_", "cross_attn." },
        { "attn1.", "self_attn." },
        { "attn2.", "cross_attn." },
        { "norm2.", "norm3." },
        { "ffn.net.0.proj.", "ffn.0." },
        { "ffn.net.2.", "ffn.2." },
    };
    snprintf(out, size, "%s", name);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const char *at = strstr(name, pairs[i][0]);
        if (!at) continue;
        snprintf(out, size, "%.*s%s%s", (int)(at - name), name, pairs[i][1],
                 at + strlen(pairs[i][0]));
        return;
    }
}

static esa_status check(const char *path, const esa_wan_config *config, lines *l)
{
    const esa_part_env env = { .nn = &nn,
                               .folder = "nowhere",
                               .transformer = path,
                               .report = l ? note : NULL,
                               .report_user = l };
    return check_dit(&env, &esa_wan_dit_kind, config);
}

/* The tensors of a Wan model as a converter writes them: matrices of blocks in Q4_K. */
static gguf_tensor_file *converted(const esa_wan_config *config, int64_t *count)
{
    wan_shapes s = wan_transformer_shapes(config);
    gguf_tensor_file *list = calloc((size_t)s.count, sizeof *list);
    assert_non_null(list);
    for (int64_t i = 0; i < s.count; i++) {
        original_name(list[i].name, sizeof list[i].name, s.list[i].name);
        list[i].rank = s.list[i].rank;
        memcpy(list[i].dim, s.list[i].dim, sizeof list[i].dim);
        const int32_t matrix = list[i].rank == 2 && strncmp(list[i].name, "blocks.", 7) == 0;
        list[i].dtype = matrix ? ESA_BLOCKS_Q4_K : ESA_FILE_F32;
    }
    *count = s.count;
    free(s.list);
    return list;
}

/* Files of the published sizes, which take no disk space. */
static void true_names(void **state)
{
    (void)state;
    static const esa_wan_config model[2] = {
        DIT_CONFIG(12, 128, 30, 8960, 16, 16, 4096, 256, 1024, 1, 1, 2, 2),
        DIT_CONFIG(40, 128, 40, 13824, 16, 16, 4096, 256, 1024, 1, 1, 2, 2),
    };
    scratch dir = scratch_make();
    for (int32_t m = 0; m < 2; m++) {
        int64_t count;
        gguf_tensor_file *list = converted(&model[m], &count);
        char path[640];
        snprintf(path, sizeof path, "%s", scratch_path(&dir, "wan.gguf"));
        gguf_file_write(path, list, count);
        lines l = { "" };
        if (check(path, &model[m], &l)) fail_msg("%s", esa_ctx_error(ctx));
        assert_non_null(strstr(l.all, "wan.gguf is GGUF (architecture wan): "));
        assert_non_null(strstr(l.all, m ? "400 Q4_K; names of the original Wan\n"
                                        : "300 Q4_K; names of the original Wan\n"));
        /* one missing, one renamed, one reshaped */
        gguf_file_write(path, list, count - 1);
        expect(check(path, &model[m], NULL), ESA_ERR_MISMATCH, "1 missing (head.modulation)");
        gguf_tensor_file *t = &list[count / 2];
        char kept[192];
        snprintf(kept, sizeof kept, "%s", t->name);
        snprintf(t->name, sizeof t->name, "misspelt");
        gguf_file_write(path, list, count);
        expect(check(path, &model[m], NULL), ESA_ERR_MISMATCH, kept);
        assert_non_null(strstr(esa_ctx_error(ctx), "1 not expected (misspelt)"));
        snprintf(t->name, sizeof t->name, "%s", kept);
        t->dim[t->rank - 1] += 256;
        gguf_file_write(path, list, count);
        expect(check(path, &model[m], NULL), ESA_ERR_MISMATCH, "1 with the wrong shape (blocks.");
        free(list);
    }
    scratch_remove(&dir);
}

/* Single safetensors files in the original layout, with and without the prefix of ComfyUI. */
static void original_files(void **state)
{
    (void)state;
    const esa_wan_config *config = &dit_cases[0].config;
    static const char *const prefix[] = { "", "model.diffusion_model.", "diffusion_model." };
    scratch dir = scratch_make();
    char path[640];
    snprintf(path, sizeof path, "%s", scratch_path(&dir, "wan.safetensors"));
    wan_shapes s = wan_transformer_shapes(config);
    wan_write_holes(path, s.list, s.count, "F32", 4);
    lines l = { "" };
    assert_int_equal(check(path, config, &l), ESA_OK);
    assert_non_null(strstr(l.all, "is safetensors: "));
    assert_non_null(strstr(l.all, "; names of diffusers\n"));
    for (int32_t p = 0; p < 3; p++) {
        wan_shapes o = wan_transformer_shapes(config);
        for (int64_t i = 0; i < o.count; i++) {
            char name[128];
            original_name(name, sizeof name, s.list[i].name);
            snprintf(o.list[i].name, sizeof o.list[i].name, "%s%s", prefix[p], name);
        }
        shapes_add(&o, 1, 3, 0, 0, 0, 0, "first_stage_model.other");
        wan_write_holes(path, o.list, o.count - !p, "BF16", 2);
        l = (lines){ "" };
        if (check(path, config, &l)) fail_msg("%s", esa_ctx_error(ctx));
        assert_non_null(strstr(l.all, p == 1 ? "the original Wan behind model.diffusion_model.\n"
                                             : "names of the original Wan"));
        wan_write_holes(path, o.list, o.count - 2, "BF16", 2);
        char words[80];
        snprintf(words, sizeof words, "1 missing (%shead.modulation)", prefix[p]);
        expect(check(path, config, NULL), ESA_ERR_MISMATCH, words);
        free(o.list);
    }
    free(s.list);
    expect(check(scratch_path(&dir, "none.gguf"), config, NULL), ESA_ERR_IO, "none.gguf");
    scratch_write(path, "GGUF", 4);
    expect(check(path, config, NULL), ESA_ERR_FORMAT, "the file ends at byte 4");
    scratch_write(path, "", 0);
    expect(check(path, config, NULL), ESA_ERR_FORMAT, "is empty");
    scratch_remove(&dir);
}

int main(void)
{
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 2;
    if (esa_ctx_create(&ctx, &p) != ESA_OK) return 1;
    esa_nn_init(&nn, ctx);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(holds),
        cmocka_unit_test(products),
        cmocka_unit_test(true_names),
        cmocka_unit_test(original_files),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    esa_nn_close(&nn);
    esa_ctx_free(ctx);
    return failed;
}
