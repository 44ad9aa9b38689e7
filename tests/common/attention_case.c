/* attention_case.c - see attention_case.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* setenv */
#include "common/attention_case.h"
#include "base/half.h"
#include "ctx/ctx.h"
#include "base/rng.h"
#include "common/bf16_emulated.h"
#include "common/naive.h"
#include "common/on_gpu.h"
#include "cpu/cpu.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct prepared {
    guarded memory[5]; /* q, k, v, o, lse */
    esa_tensor t[5];
    uint8_t *keep; /* [B][Hq][nq][nk] or NULL */
    int32_t *perm_q, *perm_k;
    esa_mask *mask;
    esa_ctx *ctx;
    naive_case naive;
} prepared;

int find_test_levels(int32_t *level, int *native)
{
    int n = 0;
    if (on_gpu()) {
        level[n++] = GPU_BEST;
        if (!getenv("ESA_CUDA") && !on_stand_in()) level[n++] = GPU_SM80;
        return *native = n;
    }
    for (int32_t l = ESA_CPU_REF; l <= ESA_CPU_NEON; l++)
        if (esa_cpu_kernels_get(l)) level[n++] = l;
    *native = n;
    if (bf16_emulated()) level[n++] = CPU_BF16_EMULATED;
    return n;
}

esa_ctx *level_ctx(int32_t level, int32_t threads)
{
    esa_ctx *ctx = NULL;
    esa_ctx_params cp = esa_ctx_params_default();
    cp.threads = threads;
    if (level < CPU_BF16_EMULATED) cp.cpu_level = level;
    if (level == CPU_BF16_EMULATED) cp.cpu_level = ESA_CPU_AVX512;
    assert_int_equal(esa_ctx_create(&ctx, &cp), ESA_OK);
    if (level == CPU_BF16_EMULATED) ctx->kern = bf16_emulated();
    if (level == CPU_SM80 || level == CPU_SM89) {
        static esa_cpu_kernels tables[2];
        esa_cpu_kernels *table = &tables[level - CPU_SM80];
        *table = *ctx->kern;
        table->eight_f16 = level == CPU_SM80;
        table->eight_steps = 1;
        ctx->kern = table;
    }
    if (level == GPU_SM80) { /* read when the GPU is opened, which is at its first use: now */
        int32_t count;
        esa_device_info info = { .struct_size = sizeof info };
        setenv("ESA_CUDA", "sm80", 1);
        assert_int_equal(esa_device_count(ctx, &count), ESA_OK);
        assert_int_equal(esa_device_get_info(ctx, &info), ESA_OK);
        assert_string_equal(info.kernels, "sm80");
        unsetenv("ESA_CUDA");
    }
    return ctx;
}

static void prepare_view(prepared *p, int i, const attention_case *c, int32_t dtype, int64_t H,
                         int64_t N, int64_t D)
{
    static const int64_t pads[] = { 1, 2, 3, 1, 0 };
    const int64_t row = D + c->pad * pads[i], bsnd = c->bsnd == 2 ? i == 0 || i == 2 : c->bsnd;
    const int64_t size = esa_dtype_size(dtype);
    /* GPUs read whole elements only */
    p->memory[i] = guard_alloc(c->B * H * N * row * size, i == 4                    ? 0
                                                          : on_gpu() && c->misalign ? size
                                                                                    : c->misalign);
    p->t[i] = bsnd ? esa_tensor_bsnd(p->memory[i].data, dtype, c->B, H, N, row)
                   : esa_tensor_bnsd(p->memory[i].data, dtype, c->B, H, N, row);
    p->t[i].dim[3] = D;
}

static void shift_and_stretch(const prepared *p, const attention_case *c)
{
    for (int i = 0; i < 3; i++) {
        const esa_tensor *t = &p->t[i];
        for (int64_t b = 0; b < c->B; b++)
            for (int64_t h = 0; h < t->dim[1]; h++)
                for (int64_t n = 0; n < t->dim[2]; n++)
                    for (int64_t d = 0; d < c->D; d++) {
                        const int64_t at = b * t->stride[0] + h * t->stride[1] + n * t->stride[2] +
                                           d;
                        float x = esa_load_f32(t->data, at, c->dtype);
                        if (i < 2 && c->outliers && d % c->outliers == 0) x *= 8.0f;
                        /* Another centre in every channel, of either sign. */
                        if (i > 0) x += (float)(c->offset * (double)((d * 5 + i) % 7 - 3) / 3.0);
                        esa_store_f32(t->data, at, c->dtype, x);
                    }
    }
}

static void make_keys_equal(const prepared *p, const attention_case *c)
{
    for (int i = 1; i <= 2; i++) {
        const esa_tensor *t = &p->t[i];
        const int64_t size = esa_dtype_size(c->dtype);
        for (int64_t b = 0; b < c->B; b++)
            for (int64_t h = 0; h < c->Hkv; h++)
                for (int64_t n = 0; n < c->Nk; n++) {
                    const int64_t from = n / c->block_k * c->block_k;
                    char *base = (char *)t->data + (b * t->stride[0] + h * t->stride[1]) * size;
                    memmove(base + n * t->stride[2] * size, base + from * t->stride[2] * size,
                            (size_t)(c->D * size));
                }
    }
}

/* A random mask, as flags (naive.h) and as an object. */
static void prepare_mask(prepared *p, const attention_case *c, esa_mask_info *info)
{
    const int64_t nq = (c->Nq + info->block_q - 1) / info->block_q,
                  nk = (c->Nk + info->block_k - 1) / info->block_k,
                  mask_B = c->broadcast ? 1 : c->B, cells = mask_B * c->Hq * nq * nk;
    p->keep = calloc((size_t)(c->B * c->Hq * nq), (size_t)nk);
    uint8_t *level = malloc((size_t)cells);
    /* The kept blocks are the same with and without a fine level. */
    esa_rng r = { test_seed() + 77 }, r_fine = { test_seed() + 78 };
    for (int64_t i = 0; i < cells; i++) {
        const int32_t fine = c->fine && (double)esa_rng_unit(&r_fine) < c->refined;
        p->keep[i] = (double)esa_rng_unit(&r) < c->density ? 1 : fine ? 2 : 0;
        level[i] = (uint8_t)(p->keep[i] == 1 ? 0 : p->keep[i] == 2 ? 1 : 2);
    }
    for (int64_t b = mask_B; b < c->B; b++) memcpy(p->keep + b * cells, p->keep, (size_t)cells);
    info->B = mask_B;
    info->fine = c->fine;
    const esa_status status = esa_mask_from_levels(p->ctx, &p->mask, info, level);
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(p->ctx));
    free(level);
}

/* Random orders for all heads of a side. Text stays where it is. */
static int32_t *random_orders(const attention_case *c, int64_t heads, int64_t N, uint64_t seed)
{
    const int64_t first = c->text_front, n = N - c->text_front - c->text_back;
    int32_t *perm = malloc(sizeof(int32_t) * (size_t)(heads * N));
    esa_rng r = { seed };
    for (int64_t h = 0; h < heads; h++) {
        int32_t *order = perm + h * N;
        for (int64_t i = 0; i < N; i++) order[i] = (int32_t)i;
        for (int64_t i = n - 1; i > 0; i--) {
            const int64_t j = (int64_t)((double)esa_rng_unit(&r) * (double)(i + 1));
            const int32_t other = order[first + j];
            order[first + j] = order[first + i];
            order[first + i] = other;
        }
    }
    return perm;
}

static void prepare_orders(prepared *p, const attention_case *c)
{
    const int64_t mask_B = c->broadcast ? 1 : c->B;
    p->perm_q = random_orders(c, mask_B * c->Hq, c->Nq, test_seed() + 5);
    p->perm_k = random_orders(c, mask_B * c->Hkv, c->Nk, test_seed() + 6);
    const esa_status status = esa_mask_set_orders(p->ctx, p->mask, p->perm_q, p->perm_k, c->Hkv);
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(p->ctx));
}

static void prepare(prepared *p, const attention_case *c, int32_t level, int32_t threads)
{
    memset(p, 0, sizeof *p);
    prepare_view(p, 0, c, c->dtype, c->Hq, c->Nq, c->D);
    prepare_view(p, 1, c, c->dtype, c->Hkv, c->Nk, c->D);
    prepare_view(p, 2, c, c->dtype, c->Hkv, c->Nk, c->D);
    prepare_view(p, 3, c, c->dtype, c->Hq, c->Nq, c->D);
    prepare_view(p, 4, c, ESA_DTYPE_F32, c->Hq, c->Nq, 1);
    for (int i = 0; i < 3; i++)
        tensor_fill(&p->t[i], test_seed() * 3 + (uint64_t)i, c->range > 0 ? c->range : 1.5);
    if (c->offset != 0.0 || c->outliers) shift_and_stretch(p, c);
    if (c->equal_keys) make_keys_equal(p, c);
    p->ctx = level_ctx(level, threads);

    esa_mask_info info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    info.block_q = c->block_q ? c->block_q : 128;
    info.block_k = c->block_k ? c->block_k : 128;
    info.B = c->B;
    info.H = c->Hq;
    info.Nq = c->Nq;
    info.Nk = c->Nk;
    info.layout = esa_layout_default();
    info.layout.order = c->order;
    for (int i = 0; i < 3; i++) {
        info.layout.grid_q[i] = info.layout.grid_k[i] = c->grid[i];
        info.layout.window[i] = 4;
    }
    info.layout.text_front_q = info.layout.text_front_k = c->text_front;
    info.layout.text_back_q = info.layout.text_back_k = c->text_back;
    if (c->density >= 0.0) {
        prepare_mask(p, c, &info);
        if (c->order == ESA_ORDER_ADAPTIVE)
            prepare_orders(p, c);
        else if (c->order > ESA_ORDER_RASTER) {
            p->perm_q = malloc(sizeof(int32_t) * (size_t)c->Nq);
            p->perm_k = malloc(sizeof(int32_t) * (size_t)c->Nk);
            assert_int_equal(esa_order(p->ctx, p->perm_q, c->Nq, &info.layout, 0, ESA_MODE_FIXED),
                             ESA_OK);
            assert_int_equal(esa_order(p->ctx, p->perm_k, c->Nk, &info.layout, 1, ESA_MODE_FIXED),
                             ESA_OK);
        }
    }
    p->naive = (naive_case){ c->B,         c->Hq,     c->Hkv,       c->Nq,
                             c->Nk,        c->D,      c->dtype,     info.block_q,
                             info.block_k, c->causal, c->tail,      1.0 / sqrt((double)c->D),
                             &p->t[0],     &p->t[1],  &p->t[2],     c->kv_len,
                             p->keep,      p->perm_q, p->perm_k,    { 0, 0 },
                             { 0, 0 },     c->fine,   c->exact_rows };
    if (c->order == ESA_ORDER_ADAPTIVE) {
        p->naive.perm_q_stride[0] = c->broadcast ? 0 : c->Hq * c->Nq;
        p->naive.perm_k_stride[0] = c->broadcast ? 0 : c->Hkv * c->Nk;
        p->naive.perm_q_stride[1] = c->Nq;
        p->naive.perm_k_stride[1] = c->Nk;
    }
}

static void release(prepared *p)
{
    for (int i = 0; i < 5; i++) guard_free(&p->memory[i]);
    free(p->keep);
    free(p->perm_q);
    free(p->perm_k);
    esa_mask_free(p->mask);
    esa_ctx_free(p->ctx);
}

/* lse: NULL, or the view that receives it. */
static esa_status run(prepared *p, const attention_case *c, const esa_tensor *lse)
{
    esa_attention_params ap = esa_attention_params_default();
    ap.causal = c->causal;
    ap.tail = c->tail;
    ap.kv_len = c->kv_len;
    ap.exact_rows = c->exact_rows;
    ap.precision = c->precision;
    ap.lse = lse;
    return esa_attention(p->ctx, &p->t[0], &p->t[1], &p->t[2], &p->t[3], p->mask, &ap);
}

/* What the textbook says of a case; the same for every level. */
typedef struct expected {
    double *out, *lse, *same;
    int64_t rows, n;
} expected;

/* Where the first wrong element lies, and how many rows hold one: the shape of the damage says
 * which part of a kernel is wrong. */
static void first_mismatch(const double *got, const expected *e, const attention_case *c,
                           double bound)
{
    int64_t rows = 0, first = -1, column = 0;
    for (int64_t i = 0; i < e->rows; i++)
        for (int64_t d = 0; d < c->D; d++)
            if (!(fabs(got[i * c->D + d] - e->out[i * c->D + d]) <= bound)) {
                if (first < 0) {
                    first = i;
                    column = d;
                }
                rows++;
                break;
            }
    if (first >= 0)
        printf("    %lld of %lld rows wrong, the first: b %lld h %lld n %lld d %lld is %.6g, "
               "expected %.6g\n",
               (long long)rows, (long long)e->rows, (long long)(first / c->Nq / c->Hq),
               (long long)(first / c->Nq % c->Hq), (long long)(first % c->Nq), (long long)column,
               got[first * c->D + column], e->out[first * c->D + column]);
}

static int wrong_cases; /* of the running test */

int no_wrong_case(void **state)
{
    (void)state;
    const int wrong = wrong_cases;
    if (wrong) printf("%d wrong\n", wrong);
    wrong_cases = 0;
    return wrong ? -1 : 0;
}

static void describe(const attention_case *c, const prepared *p, int32_t level, const char *verdict)
{
    printf("%s B %lld Hq %lld Hkv %lld Nq %lld Nk %lld D %lld dtype %d blocks %dx%d density %g "
           "causal %d tail %d fine %d (%g) order %d broadcast %d exact rows %d bsnd %d pad %d "
           "misalign %d kv_len %d level %d: ",
           verdict, (long long)c->B, (long long)c->Hq, (long long)c->Hkv, (long long)c->Nq,
           (long long)c->Nk, (long long)c->D, c->dtype, p->naive.block_q, p->naive.block_k,
           c->density, c->causal, c->tail, c->fine, c->refined, c->order, c->broadcast,
           c->exact_rows, c->bsnd, c->pad, c->misalign, c->kv_len ? (int)c->kv_len[0] : -1, level);
}

/* Largest difference of the LSE and the largest LSE; an empty row on one side only, or one with an
 * output where none is expected (exact rows give it one), counts as infinite. */
static double lse_difference(const expected *e, const double *got, const double *got_lse, int64_t D,
                             double *top)
{
    double worst = 0.0;
    *top = 1.0;
    for (int64_t i = 0; i < e->rows; i++) {
        double difference = fabs(e->lse[i] - got_lse[i]);
        if (e->lse[i] == -INFINITY || got_lse[i] == -INFINITY) {
            difference = e->lse[i] == got_lse[i] ? 0.0 : INFINITY;
            for (int64_t d = 0; d < D; d++)
                if (e->out[i * D + d] == 0.0 && got[i * D + d] != 0.0) difference = INFINITY;
        } else {
            *top = fmax(*top, fabs(e->lse[i]));
        }
        if (!(difference <= worst)) worst = isnan(difference) ? INFINITY : difference;
    }
    return worst;
}

/* with_lse: 0 asks for the output alone, for which GPUs may have other kernels. */
static void check_run(const attention_case *c, const expected *e, int32_t level, int32_t threads,
                      int with_lse)
{
    prepared p;
    prepare(&p, c, level, threads);
    const esa_status status = run(&p, c, with_lse ? &p.t[4] : NULL);
    if (status) {
        describe(c, &p, level, "WRONG");
        printf("%s: %s\n", esa_status_name(status), esa_ctx_error(p.ctx));
        wrong_cases++;
        release(&p);
        return;
    }
    for (int i = 0; i < 5; i++) assert_true(guard_check(&p.memory[i]));
    double *got = malloc((size_t)e->n * 8), *got_lse = malloc((size_t)e->rows * 8), lse_top;
    tensor_to_double(got, &p.t[3]);
    tensor_to_double(got_lse, &p.t[4]);
    const double unit = c->dtype == ESA_DTYPE_F32   ? 0x1p-23
                        : c->dtype == ESA_DTYPE_F16 ? 0x1p-10
                                                    : 0x1p-7;
    /* Twice the naive same-precision error, plus two ulp of the largest output: where the naive one
     * happens to be exact (one key, equal values) a correctly rounded result may still differ by an
     * ulp. */
    const double bound = 2.0 * max_error(e->same, e->out, e->n) +
                         2.0 * unit * max_magnitude(e->out, e->n),
                 error = max_error(got, e->out, e->n);
    const double lse_error = with_lse ? lse_difference(e, got, got_lse, c->D, &lse_top) : 0.0;
    /* The LSE is a f32 of size lse_top whose score carries D roundings; the bf16 set rounds pooled
     * means to 2^-9. */
    const double lse_bound = with_lse ? (double)(c->D + 16) * 0x1p-23 * lse_top +
                                            (c->dtype != ESA_DTYPE_F32 && c->tail ? 0x1p-7 : 0.0)
                                      : 0.0;
    const int right = error <= bound && lse_error <= lse_bound;
    if (!right || getenv("ESA_TEST_VERBOSE")) {
        describe(c, &p, level, right ? "ok" : "WRONG");
        printf("error %.3g bound %.3g, lse %.3g bound %.3g\n", error, bound, lse_error, lse_bound);
    }
    if (!right) {
        first_mismatch(got, e, c, bound);
        wrong_cases++;
    }
    free(got);
    free(got_lse);
    release(&p);
}

static void check_level(const attention_case *c, const expected *e, int32_t level, int32_t threads)
{
    check_run(c, e, level, threads, 1);
    if (on_gpu() && !on_stand_in()) check_run(c, e, level, threads, 0);
}

void check_attention(const attention_case *c, const int32_t *level, int levels, int32_t threads)
{
    expected e;
    e.rows = c->B * c->Hq * c->Nq;
    e.n = e.rows * c->D;
    e.out = malloc((size_t)e.n * 8);
    e.same = malloc((size_t)e.n * 8);
    e.lse = malloc((size_t)e.rows * 8);
    prepared p;
    prepare(&p, c, level[0], 1);
    naive_attention(e.out, e.lse, &p.naive);
    naive_attention_same(e.same, &p.naive);
    release(&p);
    for (int i = 0; i < levels; i++) check_level(c, &e, level[i], threads);
    free(e.out);
    free(e.same);
    free(e.lse);
}

double attention_error(const attention_case *c, int32_t level, int32_t threads, double *lse)
{
    expected e = { .rows = c->B * c->Hq * c->Nq };
    e.n = e.rows * c->D;
    e.out = malloc((size_t)e.n * 8);
    e.lse = malloc((size_t)e.rows * 8);
    double *got = malloc((size_t)e.n * 8), *got_lse = malloc((size_t)e.rows * 8), top;
    prepared p;
    prepare(&p, c, level, threads);
    naive_attention(e.out, e.lse, &p.naive);
    const esa_status status = run(&p, c, &p.t[4]);
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(p.ctx));
    for (int i = 0; i < 5; i++) assert_true(guard_check(&p.memory[i]));
    tensor_to_double(got, &p.t[3]);
    tensor_to_double(got_lse, &p.t[4]);
    double wrong = 0.0, all = 0.0;
    for (int64_t i = 0; i < e.n; i++) {
        wrong += (got[i] - e.out[i]) * (got[i] - e.out[i]);
        all += e.out[i] * e.out[i];
    }
    *lse = lse_difference(&e, got, got_lse, c->D, &top);
    if (getenv("ESA_TEST_VERBOSE")) {
        describe(c, &p, level, "");
        printf("relative error %.4f, lse %.4f\n", all > 0.0 ? sqrt(wrong / all) : 0.0, *lse);
    }
    release(&p);
    free(got);
    free(got_lse);
    free(e.out);
    free(e.lse);
    return all > 0.0 ? sqrt(wrong / all) : wrong > 0.0 ? (double)INFINITY : 0.0;
}

void *attention_bits(const attention_case *c, int32_t level, int32_t threads, int64_t *bytes)
{
    prepared p;
    prepare(&p, c, level, threads);
    assert_int_equal(run(&p, c, &p.t[4]), ESA_OK);
    *bytes = p.memory[3].bytes + p.memory[4].bytes;
    char *copy = malloc((size_t)*bytes);
    memcpy(copy, p.memory[3].data, (size_t)p.memory[3].bytes);
    memcpy(copy + p.memory[3].bytes, p.memory[4].data, (size_t)p.memory[4].bytes);
    release(&p);
    return copy;
}
