/* lpips_open.c - describes the two networks and reads their weights from a file.
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctx/engine_door.h"
#include "metric/lpips.h"

#include <stdio.h>
#include <string.h>
#include "io/safetensors.h"

static const esa_lpips_net_kind kinds[] = {
    { "alex",
      5,
      31,
      1,
      { { 3, 64, 11, 0, 1 },
        { 64, 192, 5, 3, 1 },
        { 192, 384, 3, 3, 1 },
        { 384, 256, 3, 0, 1 },
        { 256, 256, 3, 0, 1 } } },
    { "vgg",
      13,
      16,
      0,
      { { 3, 64, 3, 0, 0 },
        { 64, 64, 3, 0, 1 },
        { 64, 128, 3, 2, 0 },
        { 128, 128, 3, 0, 1 },
        { 128, 256, 3, 2, 0 },
        { 256, 256, 3, 0, 0 },
        { 256, 256, 3, 0, 1 },
        { 256, 512, 3, 2, 0 },
        { 512, 512, 3, 0, 0 },
        { 512, 512, 3, 0, 1 },
        { 512, 512, 3, 2, 0 },
        { 512, 512, 3, 0, 0 },
        { 512, 512, 3, 0, 1 } } },
};

static esa_status find(const esa_tensors *file, esa_weight *w, int32_t rank, const int64_t *dim,
                       const char *what, int32_t i, const char *part)
{
    char name[48];
    snprintf(name, sizeof name, "%s.%d.%s", what, i, part);
    const esa_st_entry *e = esa_st_find(file, name);
    if (!e) return esa_fail(file->ctx, ESA_ERR_MISMATCH, "%s has no tensor %s", file->label, name);
    int same = e->rank == rank;
    for (int32_t d = 0; d < rank && same; d++) same = e->dim[d] == dim[d];
    if (!same ||
        (e->dtype != ESA_FILE_F32 && e->dtype != ESA_FILE_F16 && e->dtype != ESA_FILE_BF16))
        return esa_fail(file->ctx, ESA_ERR_MISMATCH,
                        "%s: tensor %s has the wrong shape or type, expected %lld elements of F32, "
                        "F16 or BF16",
                        file->label, name,
                        (long long)(rank == 1 ? dim[0] : dim[0] * dim[1] * dim[2] * dim[3]));
    *w = (esa_weight){ .data = esa_st_data(file, e), .dtype = e->dtype, .rank = rank };
    memcpy(w->dim, dim, (size_t)rank * sizeof *dim);
    return ESA_OK;
}

/* Rewrites 11 x 11 taps of stride 4 over pixels as 3 x 3 taps of stride 1 over cells of 4 x 4
 * pixels: [out][48][3][3], channel (dy * 4 + dx) * 3 + c. */
static void fold_stride(float *to, const esa_weight *w)
{
    float taps[3 * 11 * 11];
    for (int64_t o = 0; o < w->dim[0]; o++) {
        esa_weight_to_f32(taps, w, o * 363, 363);
        for (int64_t i = 0; i < 48; i++)
            for (int64_t k = 0; k < 9; k++) {
                const int64_t y = 4 * (k / 3) + i / 12, x = 4 * (k % 3) + i / 3 % 4;
                *to++ = y < 11 && x < 11 ? taps[(i % 3 * 11 + y) * 11 + x] : 0;
            }
    }
}

static esa_status pack(esa_lpips *l, int32_t i, const esa_weight *w, const esa_weight *bias)
{
    if (i || !l->kind->stride4) return esa_nn_conv_pack(&l->nn, &l->conv[i], w, bias, 0);
    const int64_t bytes = w->dim[0] * 48 * 9 * 4;
    void *folded;
    ESA_TRY(esa_nn_alloc(&l->nn, &folded, bytes, "the weights of LPIPS"));
    fold_stride(folded, w);
    const esa_weight cells = {
        .data = folded, .dtype = ESA_DTYPE_F32, .rank = 4, .dim = { w->dim[0], 48, 3, 3 }
    };
    const esa_status status = esa_nn_conv_pack(&l->nn, &l->conv[i], &cells, bias, 0);
    esa_nn_free(&l->nn, folded, bytes);
    return status;
}

static esa_status find_kind(esa_lpips *l, const esa_tensors *file)
{
    const char *format = esa_st_metadata(file, "format"), *net = esa_st_metadata(file, "net");
    if (!format || strcmp(format, "esa-lpips-1") != 0)
        return esa_fail(l->ctx, ESA_ERR_FORMAT,
                        "%s does not hold LPIPS weights (tools/convert_lpips.py makes them)",
                        file->label);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (net && strcmp(net, kinds[i].name) == 0) l->kind = &kinds[i];
    if (!l->kind)
        return esa_fail(l->ctx, ESA_ERR_FORMAT,
                        "%s names the network '%.20s', expected alex or vgg", file->label,
                        net ? net : "");
    return ESA_OK;
}

static esa_status load(esa_lpips *l, const esa_tensors *file)
{
    ESA_TRY(find_kind(l, file));
    for (int32_t i = 0; i < l->kind->convs; i++)
        l->block_bytes += l->kind->layer[i].tap * l->kind->layer[i].out * 4;
    ESA_TRY(esa_nn_alloc(&l->nn, &l->block, l->block_bytes, "the weights of LPIPS"));
    float *at = l->block;
    int32_t taps = 0;
    for (int32_t i = 0; i < l->kind->convs; i++) {
        const esa_lpips_layer *layer = &l->kind->layer[i];
        const int64_t dim[4] = { layer->out, layer->in, layer->kernel, layer->kernel };
        esa_weight w, bias, lin;
        ESA_TRY(find(file, &w, 4, dim, "conv", i, "weight"));
        ESA_TRY(find(file, &bias, 1, dim, "conv", i, "bias"));
        ESA_TRY(pack(l, i, &w, &bias));
        if (!layer->tap) continue;
        ESA_TRY(find(file, &lin, 1, dim, "lin", taps, "weight"));
        l->lin[taps++] = at;
        esa_weight_to_f32(at, &lin, 0, layer->out);
        at += layer->out;
    }
    return ESA_OK;
}

static esa_status open_file(esa_ctx *ctx, esa_lpips **lpips, const char *path)
{
    esa_tensors *file;
    ESA_TRY(esa_st_open(ctx, &file, path));
    esa_status status = ESA_OK;
    esa_lpips *l = esa_mem_zalloc(&ctx->mem, sizeof *l);
    if (!l)
        status = esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while opening %.200s", path);
    else {
        l->ctx = ctx;
        esa_nn_init(&l->nn, ctx);
        status = load(l, file);
    }
    esa_st_close(file);
    if (status)
        esa_lpips_free(l);
    else
        *lpips = l;
    return status;
}

esa_status esa_lpips_open(esa_ctx *ctx, esa_lpips **lpips, const char *path)
{
    if (lpips) *lpips = NULL;
    ESA_TRY(esa_engine_enter(ctx));
    const esa_status status = lpips ? open_file(ctx, lpips, path)
                                    : esa_fail(ctx, ESA_ERR_ARGUMENT, "lpips is NULL");
    esa_ctx_leave(ctx);
    return status;
}

void esa_lpips_free(esa_lpips *l)
{
    if (!l) return;
    for (int i = 0; i < ESA_LPIPS_CONVS; i++) esa_nn_conv_free(&l->nn, &l->conv[i]);
    esa_nn_free(&l->nn, l->block, l->block_bytes);
    esa_nn_free(&l->nn, l->plane, l->plane_bytes);
    esa_nn_close(&l->nn);
    const esa_allocator mem = l->ctx->mem;
    esa_mem_free(&mem, l, sizeof *l);
}

const char *esa_lpips_net(const esa_lpips *l) { return l ? l->kind->name : ""; }
int32_t esa_lpips_least(const esa_lpips *l) { return l ? l->kind->least : 0; }
