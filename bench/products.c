/* products.c - seconds of linear layers. bench/products.py puts torch beside it, in turns.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     build/bench/products [THREADS]        0: one per core (2)
 *
 * Reads lines from standard input and answers each with one line:
 *     shape ROWS IN OUT f32|bf16    makes inputs and packed weights of the type; "ok", or why not
 *     run                           computes the layer once; its seconds, and the processor's
 * Inputs and outputs have the type; the bias is f32. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "ctx/ctx.h"
#include "nn/product.h"

typedef struct layer {
    esa_view x, y;
    esa_weight w, bias;
    void *packed;
} layer;

static void drop(layer *l)
{
    free(l->x.data);
    free(l->y.data);
    free(l->packed);
    free((void *)(uintptr_t)l->bias.data);
    memset(l, 0, sizeof *l);
}

static void *room(int64_t bytes)
{
    const int64_t whole = esa_ceil_div(bytes, 4096) * 4096;
    void *p = aligned_alloc(4096, (size_t)whole);
    if (p) memset(p, 0, (size_t)whole);
    return p;
}

/* Small numbers that differ: time does not depend on them, but on denormals it would. */
static void fill(void *data, int32_t dtype, int64_t count)
{
    for (int64_t i = 0; i < count; i++) esa_store_f32(data, i, dtype, 0.01f * (float)(i % 97 - 48));
}

static int make(layer *l, esa_ctx *ctx, esa_nn *nn, const int64_t size[3], int32_t dtype)
{
    const int64_t rows = size[0], in = size[1], out = size[2];
    if (esa_nn_use_dtype(nn, dtype)) return 0;
    void *w = room(out * in * 4);
    l->x = esa_view_of(room(rows * in * esa_view_element(dtype)), dtype, ESA_DEVICE_CPU, rows, in);
    l->y = esa_view_of(room(rows * out * esa_view_element(dtype)), dtype, ESA_DEVICE_CPU, rows,
                       out);
    l->packed = room(esa_panels_bytes(ctx, dtype, out, in));
    l->w = (esa_weight){ .data = w, .dtype = ESA_DTYPE_F32, .rank = 2, .dim = { out, in } };
    l->bias = (esa_weight){ .data = room(out * 4), .rank = 1, .dim = { out } };
    const int made = w && l->bias.data && l->x.data && l->y.data && l->packed;
    if (made) {
        fill(w, ESA_DTYPE_F32, out * in);
        fill(l->x.data, dtype, rows * in);
        esa_panels_fill(ctx, dtype, l->packed, &l->w, 0, out);
        esa_panels_view(ctx, &l->w, dtype, l->packed);
    }
    free(w);
    return made;
}

static void answer(layer *l, esa_ctx *ctx, esa_nn *nn, const char *line)
{
    long long size[3];
    char type[8];
    if (sscanf(line, "shape %lld %lld %lld %7s", &size[0], &size[1], &size[2], type) == 4) {
        const int64_t s[3] = { size[0], size[1], size[2] };
        drop(l);
        puts(make(l, ctx, nn, s, strcmp(type, "bf16") == 0 ? ESA_DTYPE_BF16 : ESA_DTYPE_F32)
                 ? "ok"
                 : "out of memory, or a type that this processor does not have");
    } else if (strcmp(line, "run\n") == 0 && l->packed) {
        const double start = esa_nn_now();
        const clock_t used = clock();
        const esa_status status = esa_nn_linear(nn, &l->y, &l->x, &l->w, &l->bias, NULL);
        if (status)
            puts(esa_ctx_error(ctx));
        else
            printf("%.9f %.9f\n", esa_nn_now() - start, (double)(clock() - used) / CLOCKS_PER_SEC);
    } else {
        puts("expected shape ROWS IN OUT f32|bf16, or run after a shape");
    }
    fflush(stdout);
}

int main(int argc, char **argv)
{
    esa_ctx *ctx;
    esa_nn nn;
    layer l = { 0 };
    char line[128];
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = argc > 1 ? atoi(argv[1]) : 2;
    if (esa_ctx_create(&ctx, &p)) {
        fprintf(stderr, "products: no context with %s threads\n", argc > 1 ? argv[1] : "2");
        return 1;
    }
    esa_nn_init(&nn, ctx);
    while (fgets(line, sizeof line, stdin)) answer(&l, ctx, &nn, line);
    drop(&l);
    esa_nn_close(&nn);
    esa_ctx_free(ctx);
    return 0;
}
