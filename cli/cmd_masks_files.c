/* cmd_masks_files.c - `esa masks derive | merge | convert`: mask files made from mask files, from
 * recordings and from FA4's exchange files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/cli.h"

#include <string.h>
#include <esa/esa_session.h>
#include <esa/esa_tensors.h>

#define IMPORTANCE "none|u8|f16" /* in the order of ESA_IMPORTANCE_* */

/* Checks the number of files (expected 0: any) and that --out was given, and makes a context. */
static int start(esa_ctx **ctx, const char *path, int words, int expected, const char *what,
                 const char *out)
{
    if (words < 1 || (expected && words != expected))
        return cli_usage("%s: %d files were given, expected %s", path, words, what);
    if (!out) return cli_usage("%s: --out FILE is required", path);
    return cli_ctx_new(ctx, 0);
}

/* Reports the end of the work, and frees ctx and file (may be NULL). */
static int finish(esa_ctx *ctx, esa_mask_file *file, esa_status status, const char *path,
                  const char *out)
{
    if (!status) printf("wrote %s\n", out);
    const int failed = status ? cli_fail_esa(ctx, status, path) : CLI_OK;
    esa_mask_file_free(file);
    esa_ctx_free(ctx);
    return failed;
}

int cmd_masks_derive(int argc, char **argv)
{
    esa_ctx *ctx;
    esa_mask_file *file = NULL;
    esa_mask_file_info info = { .struct_size = sizeof info };
    esa_mask_build build = esa_mask_build_default();
    cli_list budgets = { 0 };
    const char *out = NULL;
    int importance = -1, words = 0, done;
    const cli_option options[] = {
        { "--budgets", CLI_REALS, &budgets, "X,...", 0, 1, 0,
          "fractions of key blocks to prebuild masks for (those of the file)" },
        { "--importance", CLI_CHOICE, &importance, IMPORTANCE, 0, 0, 0,
          "how the importance is stored (as in the file)" },
        { "--out", CLI_OUTPUT, &out, "FILE", 0, 0, 0, "the new mask file; required" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa masks derive", "FILE --out FILE [options]",
                             "Rewrites a mask file with other budgets, derived from the stored "
                             "importance, or with a smaller importance.",
                             options, argc, argv, &words, &done);
    if (!status && !done) status = start(&ctx, "masks derive", words, 1, "1 mask file", out);
    if (status || done) return status;
    esa_status s = esa_mask_file_open(ctx, &file, argv[0]);
    if (!s) s = esa_mask_file_get_info(file, &info);
    if (!s) {
        build.importance = importance >= 0 ? importance : info.importance;
        if (!budgets.count)
            for (; budgets.count < info.budget_count; budgets.count++)
                budgets.real[budgets.count] = info.budget_permille[budgets.count] / 1000.0;
        build.budgets = budgets.real;
        build.budget_count = budgets.count;
        s = esa_mask_file_derive(ctx, out, file, &build);
    }
    return finish(ctx, file, s, "masks derive", out);
}

/* 1 if the file is a recording of errors, 0 for any other file: the library reports what is wrong.
 */
static int holds_errors(esa_ctx *ctx, const char *path)
{
    esa_tensors *file = NULL;
    const char *selector = NULL;
    if (!esa_tensors_open(ctx, &file, path)) selector = esa_tensors_metadata(file, "selector");
    const int errors = selector && strcmp(selector, "error") == 0;
    esa_tensors_free(file);
    return errors;
}

typedef struct merging {
    esa_mask_build build;
    cli_list budgets, works;
    const char *out, *weights;
    int recording, has_budgets, has_works;
} merging;

static esa_status merge(esa_ctx *ctx, merging *m, const char *const *files, int count)
{
    esa_work_plan *plan = NULL;
    if (m->recording) return esa_recording_merge(ctx, m->out, files, count);
    const cli_list *const amounts = holds_errors(ctx, files[0]) ? &m->works : &m->budgets;
    m->build.budgets = amounts->real;
    m->build.budget_count = amounts->count;
    esa_status status = m->weights ? esa_work_plan_open(ctx, &plan, m->weights) : ESA_OK;
    m->build.plan = plan;
    if (!status) status = esa_mask_file_build(ctx, m->out, files, count, &m->build);
    esa_work_plan_free(plan);
    return status;
}

/* Refuses an option of the other kind of recording. */
static int check_kind(esa_ctx *ctx, const merging *m, const char *path)
{
    const int errors = holds_errors(ctx, path);
    if (m->recording) return CLI_OK;
    if (errors && m->has_budgets)
        return cli_usage(
            "masks merge: '%s' holds error scores, so masks are built for total works: "
            "give --work, not --budgets",
            path);
    if (!errors && (m->has_works || m->weights || m->build.exact_rows >= 0))
        return cli_usage(
            "masks merge: --work, --weights and --exact-rows need recordings of errors (`esa "
            "calibrate --method error`), which '%s' is not",
            path);
    return CLI_OK;
}

int cmd_masks_merge(int argc, char **argv)
{
    esa_ctx *ctx;
    merging m = { .build = esa_mask_build_default(),
                  .budgets = { 3, { 0.7, 0.5, 0.3 }, { 0 } },
                  .works = cli_preset_works(1, ESA_CARRY_OFF),
                  .has_budgets = cli_given(argc, argv, "--budgets"),
                  .has_works = cli_given(argc, argv, "--work") };
    int words = 0, done;
    const cli_option options[] = {
        { "--budgets", CLI_REALS, &m.budgets, "X,...", 0, 1, 0,
          "fractions of key blocks to prebuild masks for (0.7,0.5,0.3)" },
        { "--work", CLI_REALS, &m.works, "X,...", 0.01, 1, 0,
          "recordings of errors: total works to build masks for (0.57,0.44,0.3)" },
        { "--weights", CLI_TEXT, &m.weights, "PLAN", 0, 0, 0,
          "recordings of errors: a work plan that says how much each layer and step matters (all "
          "alike)" },
        { "--exact-rows", CLI_INT32, &m.build.exact_rows, "N", 0, ESA_MAX_EXACT_ROWS, 0,
          "recordings of errors: queries of each block that are computed exactly and correct the "
          "others; the work includes them (2)" },
        { "--importance", CLI_CHOICE, &m.build.importance, IMPORTANCE, 0, 0, 0,
          "how the importance is stored (u8)" },
        { "--dense-first-layer", CLI_INT32, &m.build.dense_first_layer, "0|1", 0, 1, 0,
          "1: layer 0 runs dense and is not stored (1; recordings of errors: 0)" },
        { "--warmup-frac", CLI_REAL, &m.build.warmup_frac, "X", 0, 1, 0,
          "fraction of the steps that run dense first and are not stored (0.2; recordings of "
          "errors: 0)" },
        { "--store-dense", CLI_FLAG, &m.build.store_dense, NULL, 0, 0, 0,
          "also store the layers and steps that run dense (off)" },
        { "--steps", CLI_INT32, &m.build.steps, "N", 1, 65535, 0,
          "denoising steps the file is for (as recorded)" },
        { "--recording", CLI_FLAG, &m.recording, NULL, 0, 0, 0,
          "write one summed recording instead of a mask file (off)" },
        { "--out", CLI_OUTPUT, &m.out, "FILE", 0, 0, 0,
          "the mask file or, with --recording, the recording; required" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa masks merge", "RECORDING... --out FILE [options]",
                             "Adds up recordings of one run (shards, prompts) and writes a mask "
                             "file. Any order and any split give the same bits.",
                             options, argc, argv, &words, &done);
    if (!status && !done)
        status = start(&ctx, "masks merge", words, 0, "at least 1 recording", m.out);
    if (status || done) return status;
    status = check_kind(ctx, &m, argv[0]);
    if (status) {
        esa_ctx_free(ctx);
        return status;
    }
    return finish(ctx, NULL, merge(ctx, &m, (const char *const *)argv, words), "masks merge",
                  m.out);
}

/* ---------------------------------------------------------------- convert */

typedef struct conversion {
    const char *out, *block, *model;
    int from, to;
    double budget;
    cli_list tokens, grid, window;
    esa_mask_info info; /* what an exchange file does not say: tokens, blocks, layout */
} conversion;

/* Refuses options that would change nothing. given[i]: option i of from_only was given. */
static int check(const conversion *c, const int *given, const char *const *from_only, int budget)
{
    const char *idle = NULL;
    for (int i = 7; i >= 0; i--)
        if (given[i] && (c->to >= 0 || (i < 6 && !c->tokens.count))) idle = from_only[i];
    if ((c->from < 0) == (c->to < 0))
        return cli_usage("masks convert: give one of --to fa4 and --from fa4");
    if (c->to >= 0 && idle)
        return cli_usage("masks convert: %s goes with --from fa4; a mask file describes itself",
                         idle);
    if (c->from >= 0 && budget)
        return cli_usage("masks convert: --budget goes with --to fa4; the exchange holds one "
                         "budget");
    if (idle)
        return cli_usage("masks convert: %s goes with --tokens, which describes a file from "
                         "another program",
                         idle);
    if (c->window.count && c->info.layout.order != ESA_ORDER_TILE3D)
        return cli_usage("masks convert: --window goes with --order tile3d");
    if (c->tokens.count > 2)
        return cli_usage("masks convert: --tokens was given %d numbers, expected N or Nq,Nk",
                         c->tokens.count);
    return CLI_OK;
}

int cmd_masks_convert(int argc, char **argv)
{
    conversion c = { .block = "256x128", .from = -1, .to = -1, .budget = 0.5 };
    esa_layout *l = &c.info.layout;
    int words = 0, done, given[8];
    const cli_option options[] = {
        { "--to", CLI_CHOICE, &c.to, "fa4", 0, 0, 0,
          "write full_block_cnt and full_block_idx from a mask file" },
        { "--from", CLI_CHOICE, &c.from, "fa4", 0, 0, 0,
          "make a mask file from full_block_cnt and full_block_idx" },
        { "--budget", CLI_REAL, &c.budget, "X", 0, 1, 0,
          "--to: budget of the masks to write (0.5)" },
        { "--tokens", CLI_INTS, &c.tokens, "N|Nq,Nk", 1, 1e9, 0,
          "--from: sequence lengths (those in the file)" },
        { "--block", CLI_TEXT, &c.block, "QxK", 0, 0, 0,
          "--from: tokens per query and key block (256x128)" },
        { "--grid", CLI_INTS, &c.grid, "t,h,w", 1, 65535, 3,
          "--from: video tokens: frames, height, width (no grid)" },
        { "--order", CLI_CHOICE, &l->order, CLI_ORDERS, 0, 0, 0, "--from: token order (raster)" },
        { "--window", CLI_INTS, &c.window, "t,h,w", 1, 4096, 3,
          "--from: box of order tile3d, in tokens (2,8,8)" },
        { "--text-front", CLI_INT32, &l->text_front_q, "N", 0, 1e9, 0,
          "--from: text tokens before the video (0)" },
        { "--text-back", CLI_INT32, &l->text_back_q, "N", 0, 1e9, 0,
          "--from: text tokens after the video (0)" },
        { "--model", CLI_TEXT, &c.model, "NAME", 0, 0, 0,
          "--from: name of the model to store (none)" },
        { "--out", CLI_OUTPUT, &c.out, "FILE", 0, 0, 0, "the new file; required" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    /* the first six go with --tokens */
    static const char *const from_only[] = { "--block",      "--grid",      "--order",  "--window",
                                             "--text-front", "--text-back", "--tokens", "--model" };
    esa_ctx *ctx;
    *l = esa_layout_default();
    for (int i = 0; i < 8; i++) given[i] = cli_given(argc, argv, from_only[i]);
    const int has_budget = cli_given(argc, argv, "--budget");
    int status = cli_options("esa masks convert", "FILE --to fa4|--from fa4 --out FILE [options]",
                             "Converts mask files to and from FA4's full_block_cnt and "
                             "full_block_idx (safetensors).",
                             options, argc, argv, &words, &done);
    if (!status && !done) status = check(&c, given, from_only, has_budget);
    if (!status && !done) status = cli_block_parse(c.block, &c.info.block_q, &c.info.block_k);
    if (!status && !done) status = start(&ctx, "masks convert", words, 1, "1 file", c.out);
    if (status || done) return status;
    esa_mask_file *file = NULL;
    esa_status s;
    if (c.from >= 0) {
        c.info.struct_size = sizeof c.info;
        c.info.Nq = c.tokens.whole[0];
        c.info.Nk = c.tokens.whole[c.tokens.count == 2];
        cli_list_copy(l->window, &c.window);
        cli_list_copy(l->grid_q, &c.grid);
        s = esa_mask_file_import_fa4(ctx, c.out, argv[0], c.tokens.count ? &c.info : NULL, c.model);
    } else {
        s = esa_mask_file_open(ctx, &file, argv[0]);
        if (!s) s = esa_mask_file_export_fa4(ctx, c.out, file, c.budget);
    }
    return finish(ctx, file, s, "masks convert", c.out);
}
