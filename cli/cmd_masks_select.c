/* cmd_masks_select.c - `esa masks select`: a selector on q and k from safetensors files; rows as
 * hex, or a mask file.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/cli.h"

#include <stdlib.h>
#include <string.h>
#include <esa/esa_tensors.h>
#include <esa/esa_session.h>

/* A q or k tensor: a view into the file, or into copy where the file's data is not aligned for its
 * type. */
typedef struct source {
    esa_tensors *file;
    void *copy;
    esa_tensor view;
} source;

static void source_free(source *s)
{
    free(s->copy);
    esa_tensors_free(s->file);
}

/* side: "q" or "k"; name NULL: the only tensor of the file, or the one named as the side. */
static int source_open(esa_ctx *ctx, source *s, const char *path, const char *side,
                       const char *name)
{
    esa_tensor_info info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    esa_status status = esa_tensors_open(ctx, &s->file, path);
    if (status != ESA_OK) return cli_fail_esa(ctx, status, "masks select");
    const int64_t count = esa_tensors_count(s->file);
    if (name) {
        if (esa_tensors_find(s->file, name, &info) != ESA_OK)
            return cli_fail("masks select: '%s' has no tensor named '%s' (it holds %lld tensors)",
                            path, name, (long long)count);
    } else if (count == 1) {
        status = esa_tensors_at(s->file, 0, &info);
        if (status != ESA_OK) return cli_fail_esa(ctx, status, "masks select");
    } else if (esa_tensors_find(s->file, side, &info) != ESA_OK)
        return cli_fail("masks select: '%s' holds %lld tensors and none is named '%s'; --tensor "
                        "says which to take",
                        path, (long long)count, side);
    if (info.rank != 4)
        return cli_fail("masks select: tensor '%s' of '%s' has %d dimensions, expected 4: B,H,N,D",
                        info.name, path, (int)info.rank);
    if (info.dtype != ESA_FILE_F32 && info.dtype != ESA_FILE_F16 && info.dtype != ESA_FILE_BF16)
        return cli_fail("masks select: tensor '%s' of '%s' is neither F32, F16 nor BF16", info.name,
                        path);
    /* A view takes a plain pointer because outputs use it too; selection only reads. */
    void *data = (void *)(uintptr_t)info.data;
    if ((uintptr_t)data % (info.dtype == ESA_FILE_F32 ? 4 : 2) != 0) {
        s->copy = malloc((size_t)info.bytes);
        if (!s->copy)
            return cli_fail("masks select: out of memory for %lld bytes of '%s'",
                            (long long)info.bytes, path);
        data = memcpy(s->copy, info.data, (size_t)info.bytes);
    }
    s->view = esa_tensor_bnsd(data, info.dtype, info.dim[0], info.dim[1], info.dim[2], info.dim[3]);
    return CLI_OK;
}

/* One line per (batch, head, query block): "b h i hex", bit j of the number set where key block j
 * is kept. */
static int print_rows(const esa_mask *mask)
{
    static const char digit[] = "0123456789abcdef";
    esa_mask_info info;
    info.struct_size = sizeof info;
    if (esa_mask_get_info(mask, &info) != ESA_OK)
        return cli_fail("masks select: the mask cannot be described");
    const int64_t width = (info.nk + 7) / 8, rows = info.B * info.H * info.nq;
    uint8_t *bits = malloc((size_t)(rows * width));
    char *line = malloc((size_t)(2 * width + 1));
    if (!bits || !line || esa_mask_to_bits(mask, bits) != ESA_OK) {
        free(bits);
        free(line);
        return cli_fail("masks select: out of memory");
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t n = 0;
        for (int64_t j = 2 * width - 1; j >= 0; j--) {
            const int nibble = bits[r * width + j / 2] >> (j % 2 * 4) & 15;
            if (nibble || n || j == 0) line[n++] = digit[nibble];
        }
        line[n] = 0;
        printf("%lld %lld %lld %s\n", (long long)(r / info.nq / info.H),
               (long long)(r / info.nq % info.H), (long long)(r % info.nq), line);
    }
    free(bits);
    free(line);
    return fflush(stdout) == 0 ? CLI_OK : cli_fail("masks select: cannot write to standard output");
}

static int save(esa_ctx *ctx, const esa_mask *mask, const char *out)
{
    esa_mask_info info;
    info.struct_size = sizeof info;
    esa_status status = esa_mask_file_save(ctx, out, mask);
    if (status != ESA_OK) return cli_fail_esa(ctx, status, "masks select");
    status = esa_mask_get_info(mask, &info);
    if (status != ESA_OK) return cli_fail_esa(ctx, status, "masks select");
    printf("%s: %lld x %lld x %lld rows of %lld key blocks, density asked %.4f, realised %.4f\n",
           out, (long long)info.B, (long long)info.H, (long long)info.nq, (long long)info.nk,
           info.density_asked, info.density);
    return CLI_OK;
}

int cmd_masks_select(int argc, char **argv)
{
    const char *q_path = NULL, *k_path = NULL, *tensor = NULL, *block = NULL, *out = NULL;
    int selector = ESA_SELECT_ENTROPY, mode = ESA_MODE_FIXED, order = ESA_ORDER_DEFAULT, causal = 0,
        applied = 0, done;
    int64_t sink = 1, recent = 1, protect = -1, samples = 4, front = 0, back = 0, front_k = -1,
            back_k = -1, seed = 0, threads = 0;
    double budget = 0.5, sparsity = 0.5, cdf = 1.0, scale = 0;
    cli_list grid = { 0, { 0 }, { 0 } }, grid_k = { 0, { 0 }, { 0 } }, window = { 0, { 0 }, { 0 } };
    const cli_option options[] = {
        { "--q", CLI_TEXT, &q_path, "FILE", 0, 0, 0,
          "safetensors file with the queries [B,H,Nq,D]; required" },
        { "--k", CLI_TEXT, &k_path, "FILE", 0, 0, 0, "the keys [B,Hkv,Nk,D]; required" },
        { "--tensor", CLI_TEXT, &tensor, "NAME", 0, 0, 0,
          "tensor in both files (the only one, or q and k)" },
        { "--selector", CLI_CHOICE, &selector, CLI_SELECTORS, 0, 0, 0, "(entropy)" },
        { "--budget", CLI_REAL, &budget, "X", 0, 1, 0, "kept fraction of key blocks (0.5)" },
        { "--sparsity", CLI_REAL, &sparsity, "X", 0, 1, 0, "1 - budget, instead of it" },
        { "--mode", CLI_CHOICE, &mode, CLI_MODES, 0, 0, 0, "(fixed)" },
        { "--block", CLI_TEXT, &block, "QxK", 0, 0, 0,
          "block size (entropy 256x128, others 128x128)" },
        { "--samples", CLI_INT, &samples, "N", 1, 256, 0, "entropy: queries scored per block (4)" },
        { "--cdf", CLI_REAL, &cdf, "X", 0, 1, 0, "ada_bsa: CDF threshold (1: off)" },
        { "--keep-sink", CLI_INT, &sink, "0|1", 0, 1, 0, "ada_bsa: keep the first key block (1)" },
        { "--keep-recent", CLI_INT, &recent, "0|1", 0, 1, 0,
          "ada_bsa: keep the most recent one (1)" },
        { "--causal", CLI_FLAG, &causal, NULL, 0, 0, 0,
          "key j is visible to query i iff j <= i + Nk - Nq" },
        { "--scale", CLI_REAL, &scale, "X", 0, 1e30, 0, "of the scores (D^-0.5)" },
        { "--order", CLI_CHOICE, &order, CLI_ORDERS, 0, 0, 0,
          "token order (tile for rf_v2 with a grid, else raster)" },
        { "--order-applied", CLI_FLAG, &applied, NULL, 0, 0, 0,
          "the tensors already stand in that order" },
        { "--window", CLI_INTS, &window, "t,h,w", 1, 4096, 3, "box of order tile3d" },
        { "--grid", CLI_INTS, &grid, "t,h,w", 1, 65535, 3,
          "video tokens of the queries (and keys)" },
        { "--grid-k", CLI_INTS, &grid_k, "t,h,w", 1, 65535, 3,
          "video tokens of the keys, if others" },
        { "--text-front", CLI_INT, &front, "N", 0, 1e9, 0, "text tokens before the video (0)" },
        { "--text-back", CLI_INT, &back, "N", 0, 1e9, 0, "text tokens behind the video (0)" },
        { "--text-front-k", CLI_INT, &front_k, "N", 0, 1e9, 0,
          "text tokens before the keys' video, if others" },
        { "--text-back-k", CLI_INT, &back_k, "N", 0, 1e9, 0,
          "text tokens behind the keys' video, if others" },
        { "--protect-first-frame", CLI_INT, &protect, "0|1", 0, 1, 0,
          "keep frame 0's rows and columns whole (1 for rf_v2, else 0)" },
        { "--seed", CLI_INT, &seed, "N", 0, 1e15, 0, "of the selector random (0)" },
        { "--threads", CLI_INT, &threads, "N", 0, ESA_MAX_THREADS, 0, "0: one per core (0)" },
        { "--out", CLI_OUTPUT, &out, "FILE", 0, 0, 0, "save a mask file instead of printing rows" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    const int has_budget = cli_given(argc, argv, "--budget"),
              has_sparsity = cli_given(argc, argv, "--sparsity");
    int status = cli_options(
        "esa masks select", "--q FILE --k FILE [options]",
        "Runs a selector and prints one line per (batch, head, query block): b h i hex,\n"
        "bit j of the number being set where key block j is kept.",
        options, argc, argv, NULL, &done);
    if (status || done) return status;
    if (!q_path || !k_path)
        return cli_usage("masks select: %s is required", q_path ? "--k FILE" : "--q FILE");
    if (has_budget && has_sparsity)
        return cli_usage("masks select: --sparsity is 1 - budget: give --budget or --sparsity");

    esa_select_params p = esa_select_params_default(selector);
    if (block && (status = cli_block_parse(block, &p.block_q, &p.block_k)) != 0) return status;
    p.mode = mode;
    p.budget = has_sparsity ? 1.0 - sparsity : budget;
    p.samples = (int32_t)samples;
    p.cdf_threshold = cdf;
    p.keep_sink = (int32_t)sink;
    p.keep_recent = (int32_t)recent;
    p.causal = causal;
    p.scale = scale;
    p.seed = (uint64_t)seed;
    p.layout.order = order;
    p.layout.order_applied = applied;
    p.layout.protect_first_frame = (int32_t)protect;
    for (int i = 0; i < 3; i++) {
        if (window.count) p.layout.window[i] = (int32_t)window.whole[i];
        if (grid.count) p.layout.grid_q[i] = (int32_t)grid.whole[i];
        if (grid_k.count) p.layout.grid_k[i] = (int32_t)grid_k.whole[i];
    }
    p.layout.text_front_q = (int32_t)front;
    p.layout.text_back_q = (int32_t)back;
    if (grid_k.count || front_k >= 0 || back_k >= 0) {
        p.layout.text_front_k = (int32_t)(front_k >= 0 ? front_k : front);
        p.layout.text_back_k = (int32_t)(back_k >= 0 ? back_k : back);
        if (!grid_k.count) memcpy(p.layout.grid_k, p.layout.grid_q, sizeof p.layout.grid_k);
    }

    esa_ctx *ctx;
    if ((status = cli_ctx_new(&ctx, threads)) != 0) return status;
    source q = { 0 }, k = { 0 };
    esa_mask *mask = NULL;
    status = source_open(ctx, &q, q_path, "q", tensor);
    if (!status) status = source_open(ctx, &k, k_path, "k", tensor);
    if (!status) {
        const esa_status chosen = esa_select(ctx, &mask, &q.view, &k.view, &p);
        if (chosen != ESA_OK) status = cli_fail_esa(ctx, chosen, "masks select");
    }
    if (!status) status = out ? save(ctx, mask, out) : print_rows(mask);
    esa_mask_free(mask);
    source_free(&q);
    source_free(&k);
    esa_ctx_free(ctx);
    return status;
}
