/* cmd_masks_select.c - `esa masks select`: runs a selector on q, k and v from safetensors files.
 * Prints the rows as hex, or writes a mask file.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/cli.h"

#include <stdlib.h>
#include <string.h>
#include <esa/esa_tensors.h>
#include <esa/esa_session.h>

static const char what[] = "masks select";

typedef struct request {
    const char *q, *k, *v, *tensor, *out; /* v NULL: the selector does not read it */
    esa_select_params params;
    int64_t seed, threads;
} request;

/* A q, k or v tensor: a view into the file, or into copy if the file does not align its data. */
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

/* side is "q", "k" or "v". name NULL takes the only tensor of the file, or the one called side. */
static int source_open(esa_ctx *ctx, source *s, const char *path, const char *side,
                       const char *name)
{
    esa_tensor_info info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    esa_status status = esa_tensors_open(ctx, &s->file, path);
    if (status) return cli_fail_esa(ctx, status, what);
    const int64_t count = esa_tensors_count(s->file);
    if (name) {
        if (esa_tensors_find(s->file, name, &info))
            return cli_fail("%s: '%s' has no tensor named '%s' (it holds %lld tensors)", what, path,
                            name, (long long)count);
    } else if (count == 1) {
        status = esa_tensors_at(s->file, 0, &info);
        if (status) return cli_fail_esa(ctx, status, what);
    } else if (esa_tensors_find(s->file, side, &info))
        return cli_fail("%s: '%s' holds %lld tensors and none is named '%s'; --tensor "
                        "says which to take",
                        what, path, (long long)count, side);
    if (info.rank != 4)
        return cli_fail("%s: tensor '%s' of '%s' has %d dimensions, expected 4: B,H,N,D", what,
                        info.name, path, (int)info.rank);
    if (info.dtype != ESA_FILE_F32 && info.dtype != ESA_FILE_F16 && info.dtype != ESA_FILE_BF16)
        return cli_fail("%s: tensor '%s' of '%s' is neither F32, F16 nor BF16", what, info.name,
                        path);
    /* A view takes a plain pointer because outputs use it too; selection only reads. */
    void *data = (void *)(uintptr_t)info.data;
    if ((uintptr_t)data % (info.dtype == ESA_FILE_F32 ? 4 : 2) != 0) {
        s->copy = malloc((size_t)info.bytes);
        if (!s->copy)
            return cli_fail("%s: out of memory for %lld bytes of '%s'", what, (long long)info.bytes,
                            path);
        data = memcpy(s->copy, info.data, (size_t)info.bytes);
    }
    s->view = esa_tensor_bnsd(data, info.dtype, info.dim[0], info.dim[1], info.dim[2], info.dim[3]);
    return CLI_OK;
}

/* Writes bits as one number in hex, which line has room for. */
static void hex(char *line, const uint8_t *bits, int64_t width)
{
    static const char digit[] = "0123456789abcdef";
    int64_t n = 0;
    for (int64_t j = 2 * width - 1; j >= 0; j--) {
        const int nibble = bits[j / 2] >> (j % 2 * 4) & 15;
        if (nibble || n || j == 0) line[n++] = digit[nibble];
    }
    line[n] = 0;
}

/* Sets the bits of the fine blocks. 0 when out of memory. */
static int fine_bits(const esa_mask *mask, const esa_mask_info *info, uint8_t *bits)
{
    const int64_t rows = info->B * info->H * info->nq, nk = info->nk, width = (nk + 7) / 8;
    uint8_t *level = malloc((size_t)(rows * nk));
    const int made = level && !esa_mask_to_levels(mask, level);
    memset(bits, 0, (size_t)(rows * width));
    for (int64_t i = 0; made && i < rows * nk; i++)
        if (level[i] == 1) bits[i / nk * width + i % nk / 8] |= (uint8_t)(1 << i % nk % 8);
    free(level);
    return made;
}

/* Prints a line per (batch, head, query block): "b h i hex". Bit j of the number is set if key
 * block j is kept. A mask with levels has a second number for its fine blocks. */
static int print_rows(const esa_mask *mask)
{
    esa_mask_info info;
    info.struct_size = sizeof info;
    if (esa_mask_get_info(mask, &info)) return cli_fail("%s: the mask cannot be described", what);
    const int64_t width = (info.nk + 7) / 8, rows = info.B * info.H * info.nq;
    uint8_t *bits = malloc((size_t)(2 * rows * width)), *fine = bits ? bits + rows * width : NULL;
    char *line = malloc((size_t)(2 * width + 1));
    if (!bits || !line || esa_mask_to_bits(mask, bits) ||
        (info.fine && !fine_bits(mask, &info, fine))) {
        free(bits);
        free(line);
        return cli_fail("%s: out of memory", what);
    }
    for (int64_t r = 0; r < rows; r++) {
        hex(line, bits + r * width, width);
        printf("%lld %lld %lld %s", (long long)(r / info.nq / info.H),
               (long long)(r / info.nq % info.H), (long long)(r % info.nq), line);
        if (info.fine) {
            hex(line, fine + r * width, width);
            printf(" %s", line);
        }
        printf("\n");
    }
    free(bits);
    free(line);
    return fflush(stdout) == 0 ? CLI_OK : cli_fail("%s: cannot write to standard output", what);
}

static int save(esa_ctx *ctx, const esa_mask *mask, const char *out)
{
    esa_mask_info info;
    info.struct_size = sizeof info;
    esa_status status = esa_mask_file_save(ctx, out, mask);
    if (status) return cli_fail_esa(ctx, status, what);
    status = esa_mask_get_info(mask, &info);
    if (status) return cli_fail_esa(ctx, status, what);
    printf("%s: %lld x %lld x %lld rows of %lld key blocks, density asked %.4f, realised %.4f\n",
           out, (long long)info.B, (long long)info.H, (long long)info.nq, (long long)info.nk,
           info.density_asked, info.density);
    return CLI_OK;
}

/* Reads the options. *done: --help was printed. */
static int parse(request *r, int argc, char **argv, int *done)
{
    esa_select_params *p = &r->params;
    esa_layout *l = &p->layout;
    const char *block = NULL, *groups = NULL;
    double sparsity = 0.5;
    int32_t front_k = -1, back_k = -1, release = 1;
    cli_list grid = { 0 }, grid_k = { 0 }, window = { 0 };
    const cli_option options[] = {
        { "--q", CLI_TEXT, &r->q, "FILE", 0, 0, 0,
          "safetensors file with the queries [B,H,Nq,D]; required" },
        { "--k", CLI_TEXT, &r->k, "FILE", 0, 0, 0,
          "safetensors file with the keys [B,Hkv,Nk,D]; required" },
        { "--v", CLI_TEXT, &r->v, "FILE", 0, 0, 0,
          "error: safetensors file with the values [B,Hkv,Nk,D]" },
        { "--tensor", CLI_TEXT, &r->tensor, "NAME", 0, 0, 0,
          "name of the tensor in all files (the only tensor, else q, k and v)" },
        { "--selector", CLI_CHOICE, &p->selector, CLI_SELECTORS, 0, 0, 0,
          "how key blocks are chosen (entropy)" },
        { "--budget", CLI_REAL, &p->budget, "X", 0, 1, 0,
          "fraction of key blocks to keep; with tail levels: the cost of blocks and means together "
          "(0.5)" },
        { "--sparsity", CLI_REAL, &sparsity, "X", 0, 1, 0,
          "instead of --budget: 1 - budget (0.5)" },
        { "--mode", CLI_CHOICE, &p->mode, CLI_MODES, 0, 0, 0,
          "compat follows the original implementations, compat-round also rounds like them "
          "(fixed)" },
        { "--release", CLI_CHOICE, &release, "3.0|3.1", 0, 0, 0,
          "rf_v2 in a compat mode: the release of MindIE-SD to follow; 3.0 pools text apart "
          "(3.1)" },
        { "--block", CLI_TEXT, &block, "QxK", 0, 0, 0,
          "query x key tokens of a block, multiples of 16 up to 256 (entropy 256x128, others "
          "128x128; error up to 8192 keys: 64x64)" },
        { "--samples", CLI_INT32, &p->samples, "N", 1, 256, 0,
          "entropy: queries scored per block (4)" },
        { "--tail", CLI_CHOICE, &p->tail, CLI_TAILS, 0, 0, 0,
          "error: what will replace skipped blocks, none, pooled or levels (pooled)" },
        { "--fine", CLI_INT32, &p->fine, "N", 2, 16, 0,
          "error with tail levels: means per block on the fine level, 2, 4, 8 or 16 (8; short "
          "blocks: 4)" },
        { CLI_SCORE_GROUPS, CLI_TEXT, &groups, "QxK", 0, 0, 0, CLI_SCORE_GROUPS_HELP },
        { "--cdf", CLI_REAL, &p->cdf_threshold, "X", 0, 1, 0,
          "ada_bsa: cumulative mass to keep; 1 turns the rule off (1)" },
        { "--keep-sink", CLI_INT32, &p->keep_sink, "0|1", 0, 1, 0,
          "ada_bsa: 1 keeps the first key block (1)" },
        { "--keep-recent", CLI_INT32, &p->keep_recent, "0|1", 0, 1, 0,
          "ada_bsa: 1 keeps the last key block a row sees (1)" },
        { "--causal", CLI_FLAG, &p->causal, NULL, 0, 0, 0,
          "query i sees key j only if j <= i + Nk - Nq (off)" },
        { "--scale", CLI_REAL, &p->scale, "X", 0, 1e30, 0, "factor of q k^T; 0: D^-0.5 (0)" },
        { "--order", CLI_CHOICE, &l->order, CLI_ORDERS, 0, 0, 0,
          "token order; adaptive is for error (tile for rf_v2 with a grid, else raster)" },
        { "--order-applied", CLI_FLAG, &l->order_applied, NULL, 0, 0, 0,
          "the tensors are already in that order (off)" },
        { "--window", CLI_INTS, &window, "t,h,w", 1, 4096, 3,
          "box of order tile3d, in tokens (2,8,8)" },
        { "--grid", CLI_INTS, &grid, "t,h,w", 1, 65535, 3,
          "video tokens of queries and keys: frames, height, width (no grid)" },
        { "--grid-k", CLI_INTS, &grid_k, "t,h,w", 1, 65535, 3,
          "video tokens of the keys (as --grid)" },
        { "--text-front", CLI_INT32, &l->text_front_q, "N", 0, 1e9, 0,
          "text tokens before the video (0)" },
        { "--text-back", CLI_INT32, &l->text_back_q, "N", 0, 1e9, 0,
          "text tokens after the video (0)" },
        { "--text-front-k", CLI_INT32, &front_k, "N", 0, 1e9, 0,
          "text tokens before the video in the keys (as --text-front)" },
        { "--text-back-k", CLI_INT32, &back_k, "N", 0, 1e9, 0,
          "text tokens after the video in the keys (as --text-back)" },
        { "--protect-first-frame", CLI_INT32, &l->protect_first_frame, "0|1", 0, 1, 0,
          "1 keeps all rows and columns of frame 0 (1 for rf_v2, else 0)" },
        { "--seed", CLI_INT, &r->seed, "N", 0, 1e15, 0, "random: seed of the masks (0)" },
        { "--threads", CLI_INT, &r->threads, "N", 0, ESA_MAX_THREADS, 0,
          "CPU threads; 0: one per core (0)" },
        { "--out", CLI_OUTPUT, &r->out, "FILE", 0, 0, 0,
          "write a mask file instead of printing rows" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    const int has_budget = cli_given(argc, argv, "--budget"),
              has_sparsity = cli_given(argc, argv, "--sparsity"),
              has_tail = cli_given(argc, argv, "--tail"),
              has_fine = cli_given(argc, argv, "--fine");
    const int status = cli_options(
        "esa masks select", "--q FILE --k FILE [options]",
        "Runs a selector and prints one line per (batch, head, query block): b h i hex.\n"
        "Bit j of the number is set if key block j is kept. With tail levels a second number\n"
        "has the blocks on the fine level.",
        options, argc, argv, NULL, done);
    if (status || *done) return status;
    if (!r->q || !r->k)
        return cli_usage("%s: %s is required", what, r->q ? "--k FILE" : "--q FILE");
    if (cli_selector_has(p->selector, ESA_TRAIT_READS_V) && !r->v)
        return cli_usage("%s: --selector %s reads the values: --v FILE is required", what,
                         esa_selector_name(p->selector));
    if (!cli_selector_has(p->selector, ESA_TRAIT_WEIGHS_TAIL) &&
        (r->v || has_tail || has_fine || groups))
        return cli_usage("%s: %s needs --selector error", what,
                         r->v       ? "--v"
                         : has_tail ? "--tail"
                         : has_fine ? "--fine"
                                    : CLI_SCORE_GROUPS);
    if (groups && cli_groups_parse(groups, &p->group_q, &p->group_k)) return CLI_USAGE;
    if (has_fine && p->tail != ESA_TAIL_LEVELS)
        return cli_usage("%s: --fine needs --tail levels", what);
    if (cli_selector_takes(p->selector, l->order, has_tail ? p->tail : -1, what)) return CLI_USAGE;
    if (has_budget && has_sparsity)
        return cli_usage("%s: --sparsity is 1 - budget: give --budget or --sparsity", what);
    if (has_sparsity) p->budget = 1.0 - sparsity;
    p->release = release ? ESA_RELEASE_31 : ESA_RELEASE_30;
    p->seed = (uint64_t)r->seed;
    cli_list_copy(l->window, &window);
    cli_list_copy(l->grid_q, &grid);
    if (grid_k.count || front_k >= 0 || back_k >= 0) {
        l->text_front_k = front_k >= 0 ? front_k : l->text_front_q;
        l->text_back_k = back_k >= 0 ? back_k : l->text_back_q;
        memcpy(l->grid_k, l->grid_q, sizeof l->grid_k);
        cli_list_copy(l->grid_k, &grid_k);
    }
    return block ? cli_block_parse(block, &p->block_q, &p->block_k) : CLI_OK;
}

int cmd_masks_select(int argc, char **argv)
{
    request r = { .params = esa_select_params_default(ESA_SELECT_ENTROPY) };
    int done, status = parse(&r, argc, argv, &done);
    if (status || done) return status;
    esa_ctx *ctx;
    if ((status = cli_ctx_new(&ctx, r.threads)) != 0) return status;
    source q = { 0 }, k = { 0 }, v = { 0 };
    esa_mask *mask = NULL;
    status = source_open(ctx, &q, r.q, "q", r.tensor);
    if (!status) status = source_open(ctx, &k, r.k, "k", r.tensor);
    if (!status && r.v) status = source_open(ctx, &v, r.v, "v", r.tensor);
    if (!status) {
        const esa_status chosen = esa_select_qkv(ctx, &mask, &q.view, &k.view, r.v ? &v.view : NULL,
                                                 &r.params);
        if (chosen) status = cli_fail_esa(ctx, chosen, what);
    }
    if (!status) status = r.out ? save(ctx, mask, r.out) : print_rows(mask);
    esa_mask_free(mask);
    source_free(&q);
    source_free(&k);
    source_free(&v);
    esa_ctx_free(ctx);
    return status;
}
