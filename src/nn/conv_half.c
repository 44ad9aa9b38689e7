/* conv_half.c - see conv_half.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A task is a patch of output pixels. The window of input pixels that it needs is rounded to bf16
 * once, for all output channels. Then each kernel row is a product whose rows are the pixels: the
 * run of a pixel begins cin elements after that of its neighbour, so the kernel reads the window in
 * place. Channels of the output lie along the vectors. Sums are f32. */
#include "nn/conv_half.h"

#include <string.h>
#include "nn/leaf.h"
#include "nn/product.h"

#define PATCH_W 64 /* output pixels of a patch */
#define PATCH_H 4

static const esa_cpu_kernels *set_of(const esa_nn *nn) { return nn->ctx->kern->bf16; }

int32_t esa_conv_half_pays(const esa_nn *nn, const esa_conv *c)
{
    /* A panel that is half empty takes as long as the f32 kernel; pairs need an even run. */
    return nn->bf16 && c->cout > set_of(nn)->nr / 2 && c->run % 2 == 0;
}

/* Bytes of a kernel row of one panel. */
static int64_t row_bytes(const esa_cpu_kernels *kern, const esa_conv *c)
{
    return esa_k_pack_bytes(kern, kern->nr, c->run);
}

int64_t esa_conv_half_bytes(const esa_nn *nn, const esa_conv *c)
{
    const esa_cpu_kernels *kern = set_of(nn);
    return (c->up2 ? 4 : 1) * esa_ceil_div(c->cout, kern->nr) * c->rows * row_bytes(kern, c);
}

void esa_conv_half_pack(esa_nn *nn, esa_conv *c, const float *w, esa_conv_tap_fn tap, float *room)
{
    const esa_cpu_kernels *kern = set_of(nn);
    char *to = (char *)c->packed;
    for (int32_t phase = 0; phase < (c->up2 ? 4 : 1); phase++)
        for (int64_t first = 0; first < c->cout; first += kern->nr) {
            const int64_t n = esa_min64(kern->nr, c->cout - first);
            for (int64_t row = 0; row < c->rows; row++, to += row_bytes(kern, c)) {
                for (int64_t i = 0; i < n; i++)
                    for (int64_t k = 0; k < c->run; k++)
                        room[i * c->run + k] = tap(c, w, phase, row, k, first + i);
                kern->panel_q(to, room, ESA_DTYPE_F32, c->run, NULL, n, c->run, 1.0f);
            }
        }
}

typedef struct half_job {
    const esa_conv *c;
    const esa_cpu_kernels *kern;
    const esa_nn_leaf *leaf;
    float *y;
    const float *const *x;
    const float *residual;
    int64_t y_row, x_row, residual_row, height, width;
    int64_t patch_h, patch_w, across;
    int64_t sums;  /* floats of the sums of a patch and a panel */
    int64_t slice; /* terms of a kernel row that are multiplied at once */
    int64_t line;  /* elements of a row of the window, with what the kernels read behind it */
    char *room;    /* of the workers: sums twice, then the window */
    int64_t room_bytes;
    int32_t phases;
} half_job;

/* A patch: rows r .., columns q .. of the output at low resolution. */
typedef struct half_patch {
    int64_t r, q, h, w;
    int32_t phase;
} half_patch;

/* Rounds the window of a patch: [kt][rows][line], rows = h + kernel rows of a frame - 1. */
static void round_window(const half_job *j, uint16_t *window, const half_patch *p, int64_t rows)
{
    const esa_conv *c = j->c;
    const int64_t taps = c->run / c->cin, count = (p->w + taps - 1) * c->cin,
                  top = c->up2 ? (p->phase >> 1) - 1 : -(c->kh / 2),
                  left = c->up2 ? (p->phase & 1) - 1 : -(c->kw / 2);
    for (int64_t t = 0; t < c->kt; t++) {
        if (!j->x[t]) continue;
        const float *from = j->x[t] + (p->r + top) * j->x_row + (p->q + left) * c->cin;
        for (int64_t i = 0; i < rows; i++) {
            uint16_t *to = window + (t * rows + i) * j->line;
            j->leaf->to_bf16(to, from + i * j->x_row, count);
            memset(to + count, 0, (size_t)(j->line - count) * 2);
        }
    }
}

/* Writes the sums s[h * w][nr] of output channels first .. */
static void finish_patch(const half_job *j, float *s, const half_patch *p, int64_t first)
{
    const esa_conv *c = j->c;
    const int64_t nr = j->kern->nr, up = c->up2 ? 2 : 1, dy = p->phase >> 1, dx = p->phase & 1;
    for (int64_t i = 0; i < p->h; i++, s += p->w * nr) {
        const int64_t line = up * (p->r + i) + dy, pixel = (up * p->q + dx) * c->cout + first;
        const esa_finish_args f = { .y = j->y + line * j->y_row + pixel,
                                    .dtype = ESA_DTYPE_F32,
                                    .ldy = up * c->cout,
                                    .x = s,
                                    .ldx = nr,
                                    .rows = p->w,
                                    .n = esa_min64(nr, c->cout - first),
                                    .bias = c->bias + first,
                                    .residual = j->residual
                                                    ? j->residual + line * j->residual_row + pixel
                                                    : NULL,
                                    .residual_ld = up * c->cout };
        j->leaf->finish(&f);
    }
}

static void half_item(void *arg, int64_t item, int32_t worker)
{
    const half_job *j = arg;
    const esa_conv *c = j->c;
    const esa_cpu_kernels *kern = j->kern;
    const int64_t nr = kern->nr, bytes = row_bytes(kern, c), depth = esa_pad_depth(kern, c->run),
                  panels = esa_ceil_div(c->cout, nr), per_frame = c->rows / c->kt;
    half_patch p = { .phase = (int32_t)(item % j->phases) };
    item /= j->phases;
    p.r = item / j->across * j->patch_h;
    p.q = item % j->across * j->patch_w;
    p.h = esa_min64(j->patch_h, j->height - p.r);
    p.w = esa_min64(j->patch_w, j->width - p.q);
    const int64_t pixels = p.h * p.w, rows = p.h + per_frame - 1;
    float *s = (float *)(j->room + worker * j->room_bytes), *more = s + j->sums;
    uint16_t *window = (uint16_t *)(more + j->sums);
    round_window(j, window, &p, rows);
    const char *w = (const char *)c->packed + p.phase * panels * c->rows * bytes;
    esa_kernels_begin(kern);
    for (int64_t first = 0; first < c->cout; first += nr) {
        int32_t add = 0;
        for (int64_t row = 0; row < c->rows; row++, w += bytes) {
            const int64_t t = row / per_frame;
            if (!j->x[t]) continue;
            const uint16_t *x = window + (t * rows + row % per_frame) * j->line;
            for (int64_t k = 0; k < depth; k += j->slice, add = 1) {
                for (int64_t i = 0; i < p.h; i++)
                    kern->kq((add ? more : s) + i * p.w * nr, w + 2 * k * nr, x + i * j->line + k,
                             c->cin, p.w, esa_min64(j->slice, depth - k), 1.0f);
                if (add) j->leaf->add(s, more, pixels * nr);
            }
        }
        if (!add) memset(s, 0, (size_t)(4 * pixels * nr));
        finish_patch(j, s, &p, first);
    }
    esa_kernels_end(kern);
}

esa_status esa_conv_half_run(esa_nn *nn, const esa_conv *c, float *y, int64_t y_row,
                             const float *const *x, int64_t x_row, int64_t height, int64_t width,
                             const float *residual, int64_t residual_row)
{
    half_job j = { .c = c,
                   .kern = set_of(nn),
                   .leaf = esa_nn_leaf_get(nn->ctx->kern->level),
                   .y = y,
                   .x = x,
                   .residual = residual,
                   .y_row = y_row,
                   .x_row = x_row,
                   .residual_row = residual_row,
                   .height = height,
                   .width = width,
                   .phases = c->up2 ? 4 : 1 };
    void *room;
    j.patch_w = esa_min64(width, PATCH_W);
    j.patch_h = esa_min64(height, PATCH_H);
    j.across = esa_ceil_div(width, j.patch_w);
    const int64_t taps = c->run / c->cin, per_frame = c->rows / c->kt;
    j.line = (j.patch_w + taps - 1) * c->cin + esa_pad_depth(j.kern, c->run) - c->run;
    /* What a kernel writes behind a row of pixels is overwritten by the next row. */
    j.sums = (j.patch_h * j.patch_w + ESA_PANEL_ROWS) * j.kern->nr;
    j.slice = esa_panel_slice(j.kern, esa_pad_depth(j.kern, c->run));
    const int64_t window = c->kt * (j.patch_h + per_frame - 1) * j.line * 2;
    j.room_bytes = esa_ceil_div(8 * j.sums + window, 64) * 64;
    ESA_TRY(esa_nn_scratch(nn, &room, j.room_bytes * esa_pool_threads(nn->ctx->pool)));
    j.room = room;
    const double start = esa_nn_now();
    esa_pool_run(nn->ctx->pool, half_item, &j,
                 esa_ceil_div(height, j.patch_h) * j.across * j.phases);
    nn->seconds[ESA_NN_CONV] += esa_nn_now() - start;
    return ESA_OK;
}
