/* conv.c - convolutions over channels-last planes, frame by frame. A 3-D convolution gets one
 * pointer for each frame of its kernel.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A task is a patch of output pixels times one block of output channels. Its sums stay in a small
 * buffer of the worker, while the weights of the block are read in slices that fit the first-level
 * cache. Bias and residual are added when the sums are stored. */
#include "nn/nn.h"

#include <string.h>
#include "nn/conv_half.h"

#define PATCH      128 /* output pixels per task: how often each slice of weights is used */
/* the same, if the weights of a block are larger than WIDE_BYTES and leave the second-level cache
 */
#define PATCH_WIDE 512
#define WIDE_BYTES (INT64_C(512) << 10)
#define SLICE      192 /* rows of weights in a slice: 36 KB for 48 channels */

/* Block b of the output channels. Vectors are distributed evenly over the blocks. */
typedef struct conv_block {
    int64_t first, count, offset;
    int32_t vectors;
} conv_block;

static conv_block block_of(const esa_conv *c, int32_t b)
{
    const int32_t vectors = (int32_t)esa_ceil_div(c->cout, c->lanes), base = vectors / c->blocks,
                  extra = vectors % c->blocks;
    const int32_t before = b * base + (b < extra ? b : extra);
    conv_block out = { .first = (int64_t)before * c->lanes, .vectors = base + (b < extra) };
    out.count = esa_min64((int64_t)out.vectors * c->lanes, c->cout - out.first);
    out.offset = (int64_t)before * c->lanes * c->rows * c->run;
    return out;
}

/* 1 if tap k of three falls on the low-resolution pixel `tap` (0 or 1) of a phase: nearest
 * neighbours share a source pixel. */
static int32_t folded(int32_t phase, int32_t tap, int32_t k)
{
    return phase ? (tap ? k == 2 : k < 2) : (tap ? k > 0 : k == 0);
}

static float tap_of(const esa_conv *c, const float *w, int32_t phase, int64_t row, int64_t k,
                    int64_t co)
{
    const int64_t dx = k / c->cin, ci = k % c->cin;
    const float *at = w + (co * c->cin + ci) * c->kt * c->kh * c->kw;
    if (!c->up2) return at[row * c->kw + dx];
    float sum = 0;
    at += row / 2 * 9; /* the frame */
    for (int32_t y = 0; y < 3; y++)
        for (int32_t x = 0; x < 3; x++)
            if (folded(phase >> 1, (int32_t)(row % 2), y) && folded(phase & 1, (int32_t)dx, x))
                sum += at[y * 3 + x];
    return sum;
}

/* Packs the f32 weights block by block. */
static void pack_blocks(esa_conv *c, const float *source, int64_t phase_floats)
{
    for (int32_t phase = 0; phase < (c->up2 ? 4 : 1); phase++)
        for (int32_t b = 0; b < c->blocks; b++) {
            const conv_block block = block_of(c, b);
            const int64_t width = (int64_t)block.vectors * c->lanes;
            float *to = c->packed + phase * phase_floats + block.offset;
            for (int64_t row = 0; row < c->rows; row++)
                for (int64_t k = 0; k < c->run; k++, to += width)
                    for (int64_t i = 0; i < width; i++)
                        to[i] = i < block.count ? tap_of(c, source, phase, row, k, block.first + i)
                                                : 0.0f;
        }
}

esa_status esa_nn_conv_pack(esa_nn *nn, esa_conv *c, const esa_weight *w, const esa_weight *bias,
                            int32_t up2)
{
    const esa_conv_leaf *leaf = esa_conv_leaf_get(nn->ctx->kern->level);
    *c = (esa_conv){ .cout = (int32_t)w->dim[0],
                     .cin = (int32_t)w->dim[1],
                     .up2 = up2,
                     .kt = 1,
                     .lanes = leaf->lanes };
    if (w->rank == 5) c->kt = (int32_t)w->dim[2];
    c->kh = (int32_t)w->dim[w->rank - 2];
    c->kw = (int32_t)w->dim[w->rank - 1];
    c->rows = c->kt * (up2 ? 2 : c->kh);
    c->run = (int64_t)(up2 ? 2 : c->kw) * c->cin;
    c->half = esa_conv_half_pays(nn, c);
    const int64_t vectors = esa_ceil_div(c->cout, c->lanes), count = esa_weight_count(w);
    c->blocks = (int32_t)esa_ceil_div(vectors, ESA_CONV_VECTORS);
    const int64_t phase_floats = vectors * c->lanes * c->rows * c->run, phases = up2 ? 4 : 1,
                  bytes = c->half ? esa_conv_half_bytes(nn, c) : 4 * phases * phase_floats;
    c->bytes = bytes + 4 * c->cout;
    void *source = NULL;
    ESA_TRY(esa_nn_scratch(nn, &source, 4 * (count + ESA_CPU_MAX_NR * c->run)));
    ESA_TRY(esa_nn_alloc(nn, (void **)&c->packed, c->bytes, "the weights of a convolution"));
    esa_weight_to_f32(source, w, 0, count);
    if (c->half)
        esa_conv_half_pack(nn, c, source, tap_of, (float *)source + count);
    else
        pack_blocks(c, source, phase_floats);
    c->bias = (float *)((char *)c->packed + bytes);
    if (bias && bias->data)
        esa_weight_to_f32(c->bias, bias, 0, c->cout);
    else
        memset(c->bias, 0, (size_t)(4 * c->cout));
    return ESA_OK;
}

void esa_nn_conv_free(esa_nn *nn, esa_conv *c)
{
    esa_nn_free(nn, c->packed, c->bytes);
    *c = (esa_conv){ 0 };
}

typedef struct conv_job {
    const esa_conv *c;
    const esa_conv_leaf *leaf;
    float *y, *acc; /* acc: the sums of a patch, for each worker */
    const float *const *x;
    const float *residual;
    int64_t y_row, x_row, residual_row, height, width;
    int64_t patch_h, patch_w, across; /* size of a patch, patches side by side */
    int64_t acc_floats, phase_floats;
    int32_t phases;
} conv_job;

/* Computes the sums of one patch: acc[ph][pw][lanes of the block]. The window of output pixel (r,
 * q) begins at input pixel (r + top, q + left). */
static void patch_sums(const conv_job *j, float *acc, const float *w, int32_t vectors, int64_t r,
                       int64_t q, int64_t ph, int64_t pw, int64_t top, int64_t left)
{
    const esa_conv *c = j->c;
    const int64_t width = (int64_t)vectors * c->lanes, rows_per_frame = c->rows / c->kt;
    const int64_t slices = esa_ceil_div(c->run, SLICE), slice = esa_ceil_div(c->run, slices);
    int32_t add = 0;
    for (int64_t row = 0; row < c->rows; row++) {
        const float *frame = j->x[row / rows_per_frame];
        if (!frame) continue;
        const float *from = frame + (r + top + row % rows_per_frame) * j->x_row +
                            (q + left) * c->cin;
        for (int64_t k = 0; k < c->run; k += slice) {
            const int64_t n = esa_min64(slice, c->run - k);
            const float *weights = w + (row * c->run + k) * width;
            for (int64_t i = 0; i < ph; i++)
                for (int64_t p = 0; p < pw; p += j->leaf->pixels)
                    j->leaf->tile(acc + (i * pw + p) * width, from + i * j->x_row + p * c->cin + k,
                                  c->cin, n, weights, vectors,
                                  (int32_t)esa_min64(j->leaf->pixels, pw - p), add);
            add = 1;
        }
    }
    if (!add) memset(acc, 0, (size_t)(4 * ph * pw * width));
}

static void conv_item(void *arg, int64_t item, int32_t worker)
{
    const conv_job *j = arg;
    const esa_conv *c = j->c;
    const conv_block block = block_of(c, (int32_t)(item % c->blocks));
    item /= c->blocks;
    const int32_t phase = (int32_t)(item % j->phases);
    item /= j->phases;
    const int64_t r = item / j->across * j->patch_h, q = item % j->across * j->patch_w;
    const int64_t ph = esa_min64(j->patch_h, j->height - r),
                  pw = esa_min64(j->patch_w, j->width - q);
    const int64_t up = c->up2 ? 2 : 1, dy = phase >> 1, dx = phase & 1;
    float *acc = j->acc + worker * j->acc_floats;
    patch_sums(j, acc, c->packed + phase * j->phase_floats + block.offset, block.vectors, r, q, ph,
               pw, c->up2 ? dy - 1 : -(c->kh / 2), c->up2 ? dx - 1 : -(c->kw / 2));
    const float *bias = c->bias + block.first;
    for (int64_t i = 0; i < ph; i++)
        for (int64_t p = 0; p < pw; p++) {
            const float *sum = acc + (i * pw + p) * block.vectors * c->lanes;
            const int64_t pixel = (up * (q + p) + dx) * c->cout + block.first,
                          line = up * (r + i) + dy;
            float *y = j->y + line * j->y_row + pixel;
            if (j->residual) {
                const float *residual = j->residual + line * j->residual_row + pixel;
                for (int64_t o = 0; o < block.count; o++) y[o] = residual[o] + (sum[o] + bias[o]);
            } else {
                for (int64_t o = 0; o < block.count; o++) y[o] = sum[o] + bias[o];
            }
        }
}

esa_status esa_nn_conv(esa_nn *nn, const esa_conv *c, float *y, int64_t y_row,
                       const float *const *x, int64_t x_row, int64_t height, int64_t width,
                       const float *residual, int64_t residual_row)
{
    if (c->half)
        return esa_conv_half_run(nn, c, y, y_row, x, x_row, height, width, residual, residual_row);
    conv_job j = { .c = c,
                   .leaf = esa_conv_leaf_get(nn->ctx->kern->level),
                   .y = y,
                   .x = x,
                   .residual = residual,
                   .y_row = y_row,
                   .x_row = x_row,
                   .residual_row = residual_row,
                   .height = height,
                   .width = width,
                   .phases = c->up2 ? 4 : 1 };
    const int64_t block_width = (int64_t)ESA_CONV_VECTORS * c->lanes;
    const int64_t patch = 4 * block_width * c->rows * c->run > WIDE_BYTES ? PATCH_WIDE : PATCH;
    j.patch_w = esa_min64(width, patch);
    j.patch_h = esa_min64(height, patch / j.patch_w);
    j.across = esa_ceil_div(width, j.patch_w);
    j.acc_floats = patch * block_width;
    j.phase_floats = esa_ceil_div(c->cout, c->lanes) * c->lanes * c->rows * c->run;
    ESA_TRY(
        esa_nn_scratch(nn, (void **)&j.acc, 4 * j.acc_floats * esa_pool_threads(nn->ctx->pool)));
    const double start = esa_nn_now();
    esa_pool_run(nn->ctx->pool, conv_item, &j,
                 esa_ceil_div(height, j.patch_h) * j.across * j.phases * c->blocks);
    nn->seconds[ESA_NN_CONV] += esa_nn_now() - start;
    return ESA_OK;
}
