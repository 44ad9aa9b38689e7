/* test_weights.c - weight folders as on the hub, folders with faults, and the memory held after
 * loading.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/golden.h"
#include "model/dit_cases.h"

static esa_ctx *ctx;
static esa_nn nn;

/* The published sizes of Wan2.1-T2V. */
static const esa_wan_config wan_1_3b = DIT_CONFIG(12, 128, 30, 8960, 16, 16, 4096, 256, 1024, 1, 1,
                                                  2, 2);
static const esa_wan_config wan_14b = DIT_CONFIG(40, 128, 40, 13824, 16, 16, 4096, 256, 1024, 1, 1,
                                                 2, 2);

typedef struct lines {
    int32_t count;
    char last[600], all[4000];
} lines;

static void note(void *user, const char *line)
{
    lines *l = user;
    l->count++;
    snprintf(l->last, sizeof l->last, "%s", line);
    const size_t used = strlen(l->all);
    snprintf(l->all + used, sizeof l->all - used, "%s\n", line);
}

static void write_text(const char *path, const char *text)
{
    scratch_write(path, text, strlen(text));
}

/* Shards of at most `most` bytes of f32 holes, and their index. */
static int32_t write_sharded(wan_folder *f, const wan_shapes *s, int64_t most)
{
    int32_t shards = 0;
    int64_t bytes = 0;
    for (int64_t i = 0; i < s->count; i++) {
        const int64_t n = 4 * shape_count(&s->list[i]);
        if (i == 0 || bytes + n > most) {
            shards++;
            bytes = 0;
        }
        bytes += n;
    }
    FILE *index = fopen(scratch_path(&f->part, "diffusion_pytorch_model.safetensors.index.json"),
                        "w");
    assert_non_null(index);
    fprintf(index, "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {");
    int64_t first = 0;
    for (int32_t k = 1; k <= shards; k++) {
        char name[96];
        int64_t end = first;
        snprintf(name, sizeof name, "diffusion_pytorch_model-%05d-of-%05d.safetensors", k, shards);
        for (bytes = 0;
             end < s->count && (end == first || bytes + 4 * shape_count(&s->list[end]) <= most);
             end++) {
            bytes += 4 * shape_count(&s->list[end]);
            fprintf(index, "%s\"%s\": \"%s\"", end ? ", " : "", s->list[end].name, name);
        }
        wan_write_holes(scratch_path(&f->part, name), s->list + first, end - first, "F32", 4);
        first = end;
    }
    fprintf(index, "}}");
    fclose(index);
    assert_int_equal(first, s->count);
    return shards;
}

static esa_status check_folder(wan_folder *f, lines *l)
{
    esa_wan_config c;
    const esa_status status = esa_config_wan(ctx, &c, scratch_path(&f->part, "config.json"));
    if (status != ESA_OK) return status;
    const esa_part_env env = {
        .nn = &nn, .folder = f->top.dir, .report = l ? note : NULL, .report_user = l
    };
    return check_dit(&env, &esa_wan_dit_kind, &c);
}

/* 57 GB that take no disk space: 12 shards of 5 GB for the 14B, as on the hub. */
static void hub_folders(void **state)
{
    (void)state;
    static const struct {
        const esa_wan_config *config;
        int32_t shards;
        int64_t tensors, parameters;
    } model[] = { { &wan_1_3b, 2, 825, INT64_C(1418996800) },
                  { &wan_14b, 12, 1095, INT64_C(14288491584) } };
    for (int32_t i = 0; i < 2; i++) {
        wan_folder f = wan_folder_make();
        wan_write_config(scratch_path(&f.part, "config.json"), model[i].config);
        wan_shapes s = wan_transformer_shapes(model[i].config);
        assert_int_equal(s.count, model[i].tensors);
        const int32_t shards = write_sharded(&f, &s, INT64_C(5000000000));
        lines l = { 0 };
        const esa_status status = check_folder(&f, &l);
        if (status != ESA_OK) print_error("%s\n", esa_ctx_error(ctx));
        assert_int_equal(status, ESA_OK);
        assert_int_equal(l.count, 1);
        char want[96];
        snprintf(want, sizeof want, "%lld tensors, %lld parameters", (long long)model[i].tensors,
                 (long long)model[i].parameters);
        print_message("%s\n", l.last);
        assert_non_null(strstr(l.last, want));
        /* the cuts depend on the order of names */
        assert_true(abs(shards - model[i].shards) <= 1);
        free(s.list);
        wan_folder_remove(&f);
    }
}

/* A good single-file folder of the tiny case; returns its shapes. */
static wan_shapes good_folder(wan_folder *f)
{
    *f = wan_folder_make();
    wan_write_config(scratch_path(&f->part, "config.json"), &dit_cases[0].config);
    return wan_transformer_shapes(&dit_cases[0].config);
}

static const char *const single = "diffusion_pytorch_model.safetensors";

static void expect(esa_status got, esa_status want, const char *words)
{
    if (got != want || !strstr(esa_ctx_error(ctx), words))
        print_error("%s: %s\n(expected '%s')\n", esa_status_name(got), esa_ctx_error(ctx), words);
    assert_int_equal(got, want);
    assert_non_null(strstr(esa_ctx_error(ctx), words));
    assert_null(strchr(esa_ctx_error(ctx), '\n'));
}

static void missing_extra_shape(void **state)
{
    (void)state;
    wan_folder f;
    wan_shapes s = good_folder(&f);
    wan_write_holes(scratch_path(&f.part, single), s.list, s.count, "F32", 4);
    assert_int_equal(check_folder(&f, NULL), ESA_OK);
    /* one missing */
    wan_write_holes(scratch_path(&f.part, single), s.list, s.count - 1, "F32", 4);
    expect(check_folder(&f, NULL), ESA_ERR_MISMATCH, "1 missing (scale_shift_table)");
    /* one more */
    shapes_add(&s, 1, 3, 0, 0, 0, 0, "blocks.7.surprise");
    wan_write_holes(scratch_path(&f.part, single), s.list, s.count, "F32", 4);
    expect(check_folder(&f, NULL), ESA_ERR_MISMATCH, "1 not expected (blocks.7.surprise)");
    /* all three kinds, and every one reported by name */
    s.list[2].dim[1] += 1;
    snprintf(s.list[5].name, sizeof s.list[5].name, "misspelt");
    lines l = { 0 };
    wan_write_holes(scratch_path(&f.part, single), s.list, s.count, "F32", 4);
    expect(check_folder(&f, &l), ESA_ERR_MISMATCH,
           "1 missing (condition_embedder.time_embedder.linear_2.bias); 1 with the wrong shape "
           "(condition_embedder.time_embedder.linear_1.weight [24,257] instead of [24,256]); 2 not "
           "expected (");
    assert_int_equal(l.count, 4);
    assert_non_null(strstr(l.all, "misspelt was not expected\n"));
    /* a rank */
    s.list[2].dim[1] -= 1;
    s.list[3].rank = 2;
    s.list[3].dim[1] = 1;
    wan_write_holes(scratch_path(&f.part, single), s.list, s.count, "F32", 4);
    expect(check_folder(&f, NULL), ESA_ERR_MISMATCH, "[24,1] instead of [24]");
    free(s.list);
    /* a type */
    s = wan_transformer_shapes(&dit_cases[0].config);
    wan_write_holes(scratch_path(&f.part, single), s.list, s.count, "F64", 8);
    expect(check_folder(&f, NULL), ESA_ERR_MISMATCH, "with a type other than F32, F16, BF16");
    free(s.list);
    wan_folder_remove(&f);
}

static void broken_files(void **state)
{
    (void)state;
    wan_folder f;
    wan_shapes s = good_folder(&f);
    expect(check_folder(&f, NULL), ESA_ERR_IO,
           "holds neither diffusion_pytorch_model.safetensors nor its .index.json");
    /* a download that stopped: the header is complete, the data is not */
    wan_write_holes(scratch_path(&f.part, single), s.list, s.count, "F32", 4);
    struct stat st;
    assert_int_equal(stat(scratch_path(&f.part, single), &st), 0);
    assert_int_equal(truncate(scratch_path(&f.part, single), st.st_size / 2), 0);
    expect(check_folder(&f, NULL), ESA_ERR_FORMAT, single);
    assert_int_equal(truncate(scratch_path(&f.part, single), 100), 0);
    expect(check_folder(&f, NULL), ESA_ERR_FORMAT, single);
    assert_int_equal(truncate(scratch_path(&f.part, single), 0), 0);
    expect(check_folder(&f, NULL), ESA_ERR_FORMAT, "is empty");
    unlink(scratch_path(&f.part, single));
    /* shards */
    const int32_t shards = write_sharded(&f, &s, 20000);
    assert_true(shards > 2);
    assert_int_equal(check_folder(&f, NULL), ESA_OK);
    char second[96];
    snprintf(second, sizeof second, "diffusion_pytorch_model-00002-of-%05d.safetensors", shards);
    assert_int_equal(stat(scratch_path(&f.part, second), &st), 0);
    assert_int_equal(truncate(scratch_path(&f.part, second), st.st_size - 1), 0);
    expect(check_folder(&f, NULL), ESA_ERR_FORMAT, second);
    /* a shard with other tensors than the index says */
    wan_write_holes(scratch_path(&f.part, second), s.list, 1, "F32", 4);
    expect(check_folder(&f, NULL), ESA_ERR_MISMATCH, "the index says that");
    unlink(scratch_path(&f.part, second));
    expect(check_folder(&f, NULL), ESA_ERR_IO, "No such file");
    const char *index = "diffusion_pytorch_model.safetensors.index.json";
    static const struct {
        const char *text, *words;
        esa_status status;
    } bad[] = {
        { "{}", "weight_map is missing or empty", ESA_ERR_FORMAT },
        { "{\"weight_map\": {}}", "weight_map is missing or empty", ESA_ERR_FORMAT },
        { "{\"weight_map\": {\"a\": \"../x.safetensors\"}}",
          "expected a .safetensors file of the same folder", ESA_ERR_FORMAT },
        { "{\"weight_map\": {\"a\": 3}}", "expected a .safetensors file of the same folder",
          ESA_ERR_FORMAT },
        { "{\"weight_map\": {\"a\": \"x.bin\"}}", "expected a .safetensors file of the same folder",
          ESA_ERR_FORMAT },
        { "[]", "is not a JSON object", ESA_ERR_FORMAT },
        { "{\"weight_map\"", "is not JSON", ESA_ERR_FORMAT },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_text(scratch_path(&f.part, index), bad[i].text);
        expect(check_folder(&f, NULL), bad[i].status, bad[i].words);
    }
    /* the same tensor in two files */
    wan_write_holes(scratch_path(&f.part, "a.safetensors"), s.list, 2, "F32", 4);
    wan_write_holes(scratch_path(&f.part, "b.safetensors"), s.list + 1, s.count - 1, "F32", 4);
    write_text(scratch_path(&f.part, index),
               "{\"weight_map\": {\"patch_embedding.weight\": \"a.safetensors\", "
               "\"proj_out.bias\": \"b.safetensors\"}}");
    expect(check_folder(&f, NULL), ESA_ERR_FORMAT, "patch_embedding.bias is in");
    free(s.list);
    wan_folder_remove(&f);
}

/* Numbers survive: f16 and bf16 files as f32 exactly, f32 as bf16 rounded to nearest even. */
static void conversions(void **state)
{
    (void)state;
    enum { N = 70000 };
    static float value[N];
    static uint16_t half[2][N];
    for (int32_t i = 0; i < N; i++) {
        half[0][i] = (uint16_t)i;
        half[1][i] = (uint16_t)i;
        value[i] = fill_unit(7, i) * 3;
    }
    scratch dir = scratch_make();
    esa_tensors_writer *w = NULL;
    assert_int_equal(esa_tensors_writer_create(ctx, &w, scratch_path(&dir, "model.safetensors")),
                     ESA_OK);
    const int64_t dim[2] = { N / 100, 100 };
    static const char *const name[] = { "f32", "f16", "bf16" };
    for (int32_t i = 0; i < 3; i++)
        assert_int_equal(esa_tensors_writer_declare(w, name[i], i, 2, dim), ESA_OK);
    assert_int_equal(esa_tensors_writer_data(w, value, sizeof value), ESA_OK);
    assert_int_equal(esa_tensors_writer_data(w, half, sizeof half), ESA_OK);
    assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
    esa_tensors_writer_free(w);
    static const int32_t hold[] = { ESA_HOLD_F32, ESA_HOLD_BF16, ESA_HOLD_FILE };
    for (int32_t k = 0; k < 3; k++) {
        esa_weights *weights = NULL;
        esa_weight view[3];
        assert_int_equal(esa_weights_open(ctx, &weights, dir.dir, "model", "part"), ESA_OK);
        for (int32_t i = 0; i < 3; i++)
            esa_weights_want(weights, &view[i], 0, 2, dim, "%s", name[i]);
        assert_int_equal(esa_weights_load(weights, hold[k], 0), ESA_ERR_STATE);
        assert_int_equal(esa_weights_check(weights, NULL, NULL), ESA_OK);
        assert_int_equal(esa_weights_load(weights, hold[k], 0), ESA_OK);
        float *got = malloc(sizeof value);
        assert_non_null(got);
        for (int32_t i = 0; i < 3; i++) {
            assert_int_equal(view[i].dtype, hold[k] == ESA_HOLD_F32    ? ESA_DTYPE_F32
                                            : hold[k] == ESA_HOLD_BF16 ? ESA_DTYPE_BF16
                                                                       : i);
            esa_weight_to_f32(got, &view[i], 0, N);
            for (int32_t n = 0; n < N; n++) {
                float want = i == 0   ? value[n]
                             : i == 1 ? esa_f16_to_f32(half[0][n])
                                      : esa_bf16_to_f32(half[1][n]);
                if (hold[k] == ESA_HOLD_BF16) want = esa_bf16_to_f32(esa_f32_to_bf16(want));
                if (isnan(want))
                    assert_true(isnan(got[n]));
                else
                    assert_true(memcmp(&want, &got[n], 4) == 0);
            }
        }
        int64_t held, mapped;
        esa_weights_memory(weights, &held, &mapped);
        assert_int_equal(held, hold[k] == ESA_HOLD_F32    ? 2 * 4 * N
                               : hold[k] == ESA_HOLD_BF16 ? 2 * 2 * N
                                                          : 0);
        free(got);
        esa_weights_free(weights);
    }
    scratch_remove(&dir);
}

/* Resident kilobytes now and at most. */
static int64_t status_kb(const char *key)
{
    FILE *f = fopen("/proc/self/status", "r");
    char line[200];
    int64_t kb = -1;
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) kb = atoll(line + strlen(key));
    if (f) fclose(f);
    return kb;
}

/* A file of 256 MB becomes 128 MB of bf16. File and copy are never in memory together: the peak
 * grows by less than 160 MB. One thread, because each holds a few pieces at a time. */
static void one_copy(void **state)
{
    (void)state;
    esa_ctx *alone = NULL;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1;
    assert_int_equal(esa_ctx_create(&alone, &p), ESA_OK);
    scratch dir = scratch_make();
    wan_shape big = { .name = "big", .rank = 2, .dim = { 8192, 8192 } };
    wan_write_holes(scratch_path(&dir, "model.safetensors"), &big, 1, "F32", 4);
    FILE *reset = fopen("/proc/self/clear_refs", "w"); /* 5 resets the peak */
    if (reset) {
        fputs("5", reset);
        fclose(reset);
    }
    const int64_t before = status_kb("VmRSS:");
    esa_weights *weights = NULL;
    esa_weight view;
    assert_int_equal(esa_weights_open(alone, &weights, dir.dir, "model", "part"), ESA_OK);
    esa_weights_want(weights, &view, 0, 2, big.dim, "big");
    assert_int_equal(esa_weights_check(weights, NULL, NULL), ESA_OK);
    assert_int_equal(esa_weights_load(weights, ESA_HOLD_BF16, 0), ESA_OK);
    const int64_t peak = status_kb("VmHWM:");
    print_message("resident: %lld MB before, %lld MB at most\n", (long long)before / 1024,
                  (long long)peak / 1024);
    if (before > 0 && peak > 0 && reset) assert_true(peak - before < 160 * 1024);
    int64_t held, mapped;
    esa_weights_memory(weights, &held, &mapped);
    assert_int_equal(mapped, 0);
    assert_int_equal(held, INT64_C(8192) * 8192 * 2);
    esa_weights_free(weights);
    esa_ctx_free(alone);
    scratch_remove(&dir);
}

int main(void)
{
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 2;
    if (esa_ctx_create(&ctx, &p) != ESA_OK) return 1;
    esa_nn_init(&nn, ctx);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hub_folders),  cmocka_unit_test(missing_extra_shape),
        cmocka_unit_test(broken_files), cmocka_unit_test(conversions),
        cmocka_unit_test(one_copy),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    esa_nn_close(&nn);
    esa_ctx_free(ctx);
    return failed;
}
