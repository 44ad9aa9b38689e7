/* cmd_masks_files.c - `esa masks derive | merge | convert`: mask files out of mask files,
 * recordings and FA4's exchange.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/cli.h"

#include <string.h>
#include <esa/esa_session.h>

#define IMPORTANCE "none|u8|f16" /* in the order of ESA_IMPORTANCE_* */

static int need(const char *path, int words, int expected, const char *what, const char *out)
{
    if (words < 1 || (expected && words != expected))
        return cli_usage("%s: %d files were given, expected %s", path, words, what);
    if (!out) return cli_usage("%s: --out FILE is required", path);
    return 0;
}

static int finish(esa_ctx *ctx, esa_status status, const char *what, const char *out)
{
    if (status != ESA_OK) return cli_fail_esa(ctx, status, what);
    printf("wrote %s\n", out);
    return CLI_OK;
}

int cmd_masks_derive(int argc, char **argv)
{
    cli_list budgets = { 0, { 0 }, { 0 } };
    const char *out = NULL;
    int importance = -1, words = 0, done;
    const cli_option options[] = {
        { "--budgets", CLI_REALS, &budgets, "X,...", 0, 1, 0,
          "budgets to prebuild (those of the file)" },
        { "--importance", CLI_CHOICE, &importance, IMPORTANCE, 0, 0, 0,
          "what to keep of the importance (as in the file)" },
        { "--out", CLI_OUTPUT, &out, "FILE", 0, 0, 0, "the new mask file; required" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa masks derive", "FILE --out FILE [options]",
                             "Rewrites a mask file with other budgets, derived from the stored "
                             "importance, or with less importance.",
                             options, argc, argv, &words, &done);
    if (status || done) return status;
    if ((status = need("masks derive", words, 1, "1 mask file", out)) != 0) return status;
    esa_ctx *ctx;
    esa_mask_file *file = NULL;
    esa_mask_file_info info;
    esa_mask_build build = esa_mask_build_default();
    info.struct_size = sizeof info;
    if ((status = cli_ctx_new(&ctx, 0)) != 0) return status;
    esa_status s = esa_mask_file_open(ctx, &file, argv[0]);
    if (s == ESA_OK) s = esa_mask_file_get_info(file, &info);
    if (s == ESA_OK) {
        build.importance = importance >= 0 ? importance : info.importance;
        if (!budgets.count)
            for (; budgets.count < info.budget_count; budgets.count++)
                budgets.real[budgets.count] = info.budget_permille[budgets.count] / 1000.0;
        build.budgets = budgets.real;
        build.budget_count = budgets.count;
        s = esa_mask_file_derive(ctx, out, file, &build);
    }
    status = finish(ctx, s, "masks derive", out);
    esa_mask_file_free(file);
    esa_ctx_free(ctx);
    return status;
}

int cmd_masks_merge(int argc, char **argv)
{
    cli_list budgets = { 3, { 0.7, 0.5, 0.3 }, { 0 } };
    const char *out = NULL;
    int importance = ESA_IMPORTANCE_U8, recording = 0, store_dense = 0, words = 0, done;
    int64_t first = 1, steps = 0;
    double warmup = 0.2;
    const cli_option options[] = {
        { "--budgets", CLI_REALS, &budgets, "X,...", 0, 1, 0, "budgets to prebuild (0.7,0.5,0.3)" },
        { "--importance", CLI_CHOICE, &importance, IMPORTANCE, 0, 0, 0,
          "how to store the importance (u8)" },
        { "--dense-first-layer", CLI_INT, &first, "0|1", 0, 1, 0,
          "layer 0 runs dense and is not stored (1)" },
        { "--warmup-frac", CLI_REAL, &warmup, "X", 0, 1, 0,
          "share of the steps that runs dense and is not stored (0.2)" },
        { "--store-dense", CLI_FLAG, &store_dense, NULL, 0, 0, 0,
          "store these layers and steps all the same" },
        { "--steps", CLI_INT, &steps, "N", 1, 65535, 0,
          "denoising steps the file will serve (those recorded)" },
        { "--recording", CLI_FLAG, &recording, NULL, 0, 0, 0,
          "write one summed recording instead of a mask file" },
        { "--out", CLI_OUTPUT, &out, "FILE", 0, 0, 0, "the mask file; required" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa masks merge", "RECORDING... --out FILE [options]",
                             "Sums recordings of one run (shards, prompts) and writes a mask file. "
                             "Order and split change no bit.",
                             options, argc, argv, &words, &done);
    if (status || done) return status;
    if ((status = need("masks merge", words, 0, "at least 1 recording", out)) != 0) return status;
    esa_ctx *ctx;
    esa_mask_build build = esa_mask_build_default();
    if ((status = cli_ctx_new(&ctx, 0)) != 0) return status;
    build.importance = importance;
    build.budgets = budgets.real;
    build.budget_count = budgets.count;
    build.store_dense = store_dense;
    build.dense_first_layer = (int32_t)first;
    build.warmup_frac = warmup;
    build.steps = (int32_t)steps;
    const esa_status s = recording ? esa_recording_merge(ctx, out, (const char *const *)argv, words)
                                   : esa_mask_file_build(ctx, out, (const char *const *)argv, words,
                                                         &build);
    status = finish(ctx, s, "masks merge", out);
    esa_ctx_free(ctx);
    return status;
}

/* What a mask file knows and the exchange does not: tokens, blocks, grid. Files that esa wrote
 * carry it; for others the library asks for it (tokens not given: no info). */
static int from_fa4(esa_ctx *ctx, const char *in, const char *out, const cli_list *tokens,
                    const char *block, const cli_list *grid, int order, const cli_list *window,
                    int64_t front, int64_t back, const char *model)
{
    esa_mask_info info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    info.layout = esa_layout_default();
    if (tokens->count > 2)
        return cli_usage("masks convert: --tokens was given %d numbers, expected N or Nq,Nk",
                         tokens->count);
    const int bad = cli_block_parse(block, &info.block_q, &info.block_k);
    if (bad) return bad;
    info.Nq = tokens->whole[0];
    info.Nk = tokens->count == 2 ? tokens->whole[1] : tokens->whole[0];
    info.layout.order = order;
    for (int i = 0; i < 3 && window->count; i++) info.layout.window[i] = (int32_t)window->whole[i];
    for (int i = 0; i < 3 && grid->count; i++) info.layout.grid_q[i] = (int32_t)grid->whole[i];
    info.layout.text_front_q = (int32_t)front;
    info.layout.text_back_q = (int32_t)back;
    return finish(ctx, esa_mask_file_import_fa4(ctx, out, in, tokens->count ? &info : NULL, model),
                  "masks convert", out);
}

int cmd_masks_convert(int argc, char **argv)
{
    cli_list tokens = { 0, { 0 }, { 0 } }, grid = { 0, { 0 }, { 0 } }, window = { 0, { 0 }, { 0 } };
    const char *out = NULL, *block = "256x128", *model = NULL;
    int from = -1, to = -1, order = ESA_ORDER_DEFAULT, words = 0, done;
    int64_t front = 0, back = 0;
    double budget = 0.5;
    const cli_option options[] = {
        { "--to", CLI_CHOICE, &to, "fa4", 0, 0, 0, "mask file -> full_block_cnt, full_block_idx" },
        { "--from", CLI_CHOICE, &from, "fa4", 0, 0, 0, "the other way" },
        { "--budget", CLI_REAL, &budget, "X", 0, 1, 0, "--to: which budget (0.5)" },
        { "--tokens", CLI_INTS, &tokens, "N|Nq,Nk", 1, 1e9, 0,
          "--from: sequence lengths, where the file does not say" },
        { "--block", CLI_TEXT, &block, "QxK", 0, 0, 0, "--from: block size (256x128)" },
        { "--grid", CLI_INTS, &grid, "t,h,w", 1, 65535, 3, "--from: video tokens" },
        { "--order", CLI_CHOICE, &order, CLI_ORDERS, 0, 0, 0, "--from: token order (raster)" },
        { "--window", CLI_INTS, &window, "t,h,w", 1, 4096, 3,
          "--from: box of order tile3d (2,8,8)" },
        { "--text-front", CLI_INT, &front, "N", 0, 1e9, 0,
          "--from: text tokens before the video (0)" },
        { "--text-back", CLI_INT, &back, "N", 0, 1e9, 0,
          "--from: text tokens behind the video (0)" },
        { "--model", CLI_TEXT, &model, "NAME", 0, 0, 0, "--from: model name to write down" },
        { "--out", CLI_OUTPUT, &out, "FILE", 0, 0, 0, "the new file; required" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    /* An option that would change nothing is a mistake of somebody's, and is said. The first six go
     * with --tokens. */
    static const char *const from_only[] = { "--block",      "--grid",      "--order",  "--window",
                                             "--text-front", "--text-back", "--tokens", "--model" };
    const char *idle_from = NULL, *idle_to = NULL;
    const int has_tokens = cli_given(argc, argv, "--tokens"),
              has_budget = cli_given(argc, argv, "--budget");
    for (int i = 0; i < 8; i++) {
        if (!cli_given(argc, argv, from_only[i])) continue;
        if (i < 6 && !has_tokens && !idle_from) idle_from = from_only[i];
        if (!idle_to) idle_to = from_only[i];
    }
    int status = cli_options(
        "esa masks convert", "FILE --to fa4|--from fa4 --out FILE [options]",
        "Converts mask files to and from FA4's full_block_cnt and full_block_idx (safetensors).",
        options, argc, argv, &words, &done);
    if (status || done) return status;
    if ((status = need("masks convert", words, 1, "1 file", out)) != 0) return status;
    if ((from < 0) == (to < 0))
        return cli_usage("masks convert: give one of --to fa4 and --from fa4");
    if (to >= 0 && idle_to)
        return cli_usage("masks convert: %s goes with --from fa4, a mask file describes itself",
                         idle_to);
    if (from >= 0 && has_budget)
        return cli_usage(
            "masks convert: --budget goes with --to fa4, the exchange holds one budget");
    if (from >= 0 && idle_from)
        return cli_usage(
            "masks convert: %s goes with --tokens, which describes a file from elsewhere",
            idle_from);
    if (window.count && order != ESA_ORDER_TILE3D)
        return cli_usage("masks convert: --window goes with --order tile3d");
    esa_ctx *ctx;
    if ((status = cli_ctx_new(&ctx, 0)) != 0) return status;
    if (from >= 0)
        status = from_fa4(ctx, argv[0], out, &tokens, block, &grid, order, &window, front, back,
                          model);
    else {
        esa_mask_file *file = NULL;
        esa_status s = esa_mask_file_open(ctx, &file, argv[0]);
        if (s == ESA_OK) s = esa_mask_file_export_fa4(ctx, out, file, budget);
        status = finish(ctx, s, "masks convert", out);
        esa_mask_file_free(file);
    }
    esa_ctx_free(ctx);
    return status;
}
