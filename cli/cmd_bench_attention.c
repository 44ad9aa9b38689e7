/* cmd_bench_attention.c - `esa bench attention`: dense and sparse attention next to sgemm.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Without options it measures the calls that `esa generate` makes without options: the error
 * selector with the settings that the library recommends, at the works of the presets. One round
 * runs sgemm (2048^3, the machine's CBLAS with as many threads) and then every row of the table
 * once, so that disturbances affect all of them. The table shows best and median over the rounds.
 * The FLOP of a row are 4 * pairs * D, where pairs counts the query-key pairs of the kept blocks
 * over all heads (4 Nq Nk D H when dense). Random masks are made before the rounds; the other
 * selectors are timed separately from attention, and so are adaptive orders. Every row has its own
 * ctx, so that its memory can be measured. On a GPU there is no sgemm. There, a time is the mean
 * over as many calls as fill GPU_SECONDS, because the clock can be read only when the GPU has
 * finished. */
#include "core/case_bench.h"
#include "core/data.h"
#include "core/folders.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <esa/esa_session.h>

enum { GEMM = 2048, USUAL_STEPS = 50 };
enum { ORDER, SELECT, ATTEND, PARTS }; /* the calls of a row, in this order */
#define GPU_SECONDS 0.02

typedef struct bench_row {
    int dtype, selector, tail, order; /* ESA_*; dense rows: selector FULL */
    int32_t exact_rows;
    double asked, density;
    int dense;
    int64_t pairs, peak_bytes;
    esa_ctx *ctx;
    esa_plan *plan;
    esa_mask *mask;         /* NULL: dense */
    double *seconds[PARTS]; /* [rounds] */
    const char *kernel;
    int64_t repeats[PARTS]; /* calls per time on a GPU */
} bench_row;

typedef struct bench {
    cli_shape shape;
    cli_list densities, selectors, tails, dtypes;
    int own_tails;            /* 1: --tail was not given */
    esa_select_params select; /* common to all rows: blocks, groups, layout, seed, cdf_threshold */
    int64_t threads, rounds;
    int64_t samples, fine; /* 0: the selector's own */
    int64_t exact_rows;    /* -1: none */
    int eight;             /* 1: precision 8 */
    int causal, device;    /* ESA_DEVICE_* */
    esa_ctx *gpu;          /* owns the tensors; NULL on the CPU */
    esa_device_info gpu_info;
    esa_tensor q[3], k[3], v[3], o[3]; /* per dtype; data NULL if unused */
    bench_row *rows;
    int row_count;
    cli_blas blas;
    float *gemm;          /* three GEMM x GEMM matrices */
    double *gemm_seconds; /* [rounds] */
} bench;

/* Sorts times in place. */
static void best_median(double *times, int64_t n, double *best, double *median)
{
    *median = measure_median(times, n);
    *best = times[0];
}

/* 1 if a call is part of the row. A random mask is given and dense needs none, so neither selects;
 * adaptive orders are made, other orders are given. */
static int has(const bench_row *r, int part)
{
    if (part == ATTEND) return 1;
    if (r->dense || cli_selector_has(r->selector, ESA_TRAIT_BLIND)) return 0;
    return part == SELECT || r->order == ESA_ORDER_ADAPTIVE;
}

static double gemm_once(bench *b)
{
    float *x = b->gemm;
    const size_t one = (size_t)GEMM * GEMM;
    const double start = cli_seconds();
    /* row major, no transpose */
    b->blas.sgemm(101, 111, 111, GEMM, GEMM, GEMM, 1.0f, x, GEMM, x + one, GEMM, 0.0f, x + 2 * one,
                  GEMM);
    return cli_seconds() - start;
}

static esa_status call(const bench *b, const bench_row *r, int part)
{
    const esa_tensor *q = &b->q[r->dtype], *k = &b->k[r->dtype], *v = &b->v[r->dtype];
    if (part == ORDER) return esa_plan_order(r->plan, r->mask, q, k, NULL);
    if (part == SELECT) return esa_plan_select_qkv(r->plan, r->mask, q, k, v, NULL);
    return esa_plan_attention(r->plan, r->mask, q, k, v, &b->o[r->dtype], NULL, NULL);
}

/* Seconds per call of `repeats` calls on the GPU. */
static esa_status gpu_repeat(const bench *b, const bench_row *r, int part, int64_t repeats,
                             double *seconds)
{
    esa_status status = esa_device_sync(r->ctx);
    const double start = cli_seconds();
    for (int64_t i = 0; i < repeats && !status; i++) status = call(b, r, part);
    if (!status) status = esa_device_sync(r->ctx);
    *seconds = (cli_seconds() - start) / (double)repeats;
    return status;
}

/* The same for as many calls as fill GPU_SECONDS; the first time their number is found. */
static esa_status gpu_time(const bench *b, bench_row *r, int part, double *seconds)
{
    esa_status status = ESA_OK;
    if (!r->repeats[part]) {
        r->repeats[part] = 1;
        status = gpu_repeat(b, r, part, 1, seconds); /* the first call grows the scratch */
        if (!status) status = gpu_repeat(b, r, part, 3, seconds);
        const double fill = GPU_SECONDS / *seconds;
        if (!status && fill > 1) r->repeats[part] = fill < 10000 ? (int64_t)fill + 1 : 10000;
    }
    return !status ? gpu_repeat(b, r, part, r->repeats[part], seconds) : status;
}

/* The calls of a row, once. seconds[part] is NaN for calls it does not have. */
static esa_status row_once(const bench *b, bench_row *r, double seconds[PARTS])
{
    esa_status status = ESA_OK;
    for (int part = 0; part < PARTS && !status; part++) {
        seconds[part] = NAN;
        if (!has(r, part)) continue;
        if (b->device == ESA_DEVICE_CUDA) {
            status = gpu_time(b, r, part, &seconds[part]);
        } else {
            const double start = cli_seconds();
            status = call(b, r, part);
            seconds[part] = cli_seconds() - start;
        }
    }
    return status;
}

static int row_open(bench *b, bench_row *r)
{
    const esa_tensor *q = &b->q[r->dtype], *k = &b->k[r->dtype];
    esa_shapes shapes = esa_shapes_default();
    esa_attention_params attention = esa_attention_params_default();
    esa_select_params select = esa_select_params_default(r->selector);
    double ignored[PARTS];
    if (cli_ctx_new(&r->ctx, b->threads)) return CLI_FAILED;
    shapes.dtype = r->dtype;
    shapes.device = b->device;
    shapes.B = b->shape.B;
    shapes.Hq = shapes.Hkv = b->shape.H;
    shapes.Nq = shapes.Nk = b->shape.N;
    shapes.D = b->shape.D;
    attention.tail = r->tail;
    attention.exact_rows = r->exact_rows;
    attention.precision = b->eight ? 8 : 16;
    attention.causal = select.causal = b->causal;
    select.budget = r->asked;
    select.block_q = b->select.block_q;
    select.block_k = b->select.block_k;
    select.cdf_threshold = b->select.cdf_threshold;
    select.seed = b->select.seed;
    select.layout = b->select.layout;
    select.layout.order = r->order;
    select.tail = r->tail;
    select.group_q = b->select.group_q;
    select.group_k = b->select.group_k;
    if (b->samples) select.samples = (int32_t)b->samples;
    if (b->fine) select.fine = (int32_t)b->fine;
    esa_status status = esa_plan_create(r->ctx, &r->plan, &shapes, r->dense ? NULL : &select,
                                        &attention);
    if (!status && !r->dense) status = esa_mask_create(r->plan, &r->mask);
    if (!status && !has(r, SELECT) && !r->dense) status = call(b, r, SELECT);
    /* The first call grows the arena and touches its pages; it is not counted. */
    if (!status) status = row_once(b, r, ignored);
    if (status) return cli_fail_esa(r->ctx, status, "bench attention");
    r->density = 1.0;
    r->kernel = esa_plan_kernel(r->plan, r->mask, q, k, &b->v[r->dtype], &b->o[r->dtype]);
    if (r->mask) {
        esa_mask_info info;
        info.struct_size = sizeof info;
        status = esa_mask_get_info(r->mask, &info);
        if (status) return cli_fail_esa(r->ctx, status, "bench attention");
        r->density = info.density;
    }
    int64_t held;
    if (b->device == ESA_DEVICE_CUDA)
        esa_device_memory(r->ctx, &held, &r->peak_bytes);
    else
        esa_ctx_memory(r->ctx, &held, &r->peak_bytes);
    r->pairs = measure_pairs(r->mask, q, k, b->causal, NULL);
    if (r->pairs < 0) return cli_fail("bench attention: out of memory");
    return CLI_OK;
}

/* What was not given: a selector that weighs tails has the order and the tail that the library
 * recommends for a model run; the others have no tail and their own order. */
static void row_settings(const bench *b, bench_row *r, int tail)
{
    const esa_session_params best = esa_session_params_recommended(ESA_SESSION_ONLINE, r->selector,
                                                                   b->shape.N);
    const int weighs = cli_selector_has(r->selector, ESA_TRAIT_WEIGHS_TAIL);
    r->tail = r->dense ? ESA_TAIL_NONE : weighs && b->own_tails ? best.attention.tail : tail;
    r->order = weighs && b->select.layout.order == ESA_ORDER_DEFAULT ? best.select.layout.order
                                                                     : b->select.layout.order;
    r->exact_rows = r->dense || b->exact_rows < 0 ? 0 : (int32_t)b->exact_rows;
}

/* Rows per dtype: one dense row if --density has 1, then densities x selectors x tails. */
static int rows_new(bench *b)
{
    const int most = b->dtypes.count * b->densities.count * b->selectors.count * b->tails.count;
    b->rows = calloc((size_t)most, sizeof *b->rows);
    if (!b->rows) return cli_fail("bench attention: out of memory");
    for (int t = 0; t < b->dtypes.count; t++)
        for (int d = 0; d < b->densities.count; d++) {
            const int dense = b->densities.real[d] >= 1.0;
            for (int s = 0; s < (dense ? 1 : b->selectors.count); s++)
                for (int tail = 0; tail < (dense ? 1 : b->tails.count); tail++) {
                    bench_row *r = &b->rows[b->row_count++];
                    r->dtype = (int)b->dtypes.whole[t];
                    r->asked = b->densities.real[d];
                    r->dense = dense;
                    r->selector = dense ? ESA_SELECT_FULL : (int)b->selectors.whole[s];
                    row_settings(b, r, (int)b->tails.whole[tail]);
                    for (int part = 0; part < PARTS; part++) {
                        r->seconds[part] = calloc((size_t)b->rounds, sizeof *r->seconds[part]);
                        if (!r->seconds[part]) return cli_fail("bench attention: out of memory");
                    }
                }
        }
    return CLI_OK;
}

static int data_new(bench *b)
{
    const cli_shape *s = &b->shape;
    for (int t = 0; t < b->dtypes.count; t++) {
        const int dtype = (int)b->dtypes.whole[t];
        esa_tensor *all[] = { &b->q[dtype], &b->k[dtype], &b->v[dtype], &b->o[dtype] };
        for (int i = 0; i < 4; i++) {
            if (all[i]->data) continue; /* the dtype was named twice */
            *all[i] = data_tensor_new(dtype, s->B, s->H, s->N, s->D);
            if (!all[i]->data) return CLI_FAILED;
            /* never zeros: pages must be real */
            data_tensor_random(all[i], b->select.seed + (uint64_t)i + 1, 1.0);
            if (b->device != ESA_DEVICE_CUDA) continue;
            esa_tensor host = *all[i];
            *all[i] = data_tensor_to_gpu(b->gpu, &host);
            data_tensor_free(&host);
            if (!all[i]->data) return CLI_FAILED;
        }
    }
    if (b->blas.handle) {
        esa_tensor fill = data_tensor_new(ESA_DTYPE_F32, 1, 3, GEMM, GEMM);
        if (!fill.data) return CLI_FAILED;
        data_tensor_random(&fill, b->select.seed, 1.0);
        b->gemm = fill.data;
    }
    b->gemm_seconds = calloc((size_t)b->rounds, sizeof *b->gemm_seconds);
    return b->gemm_seconds ? CLI_OK : cli_fail("bench attention: out of memory");
}

/* Speed of a small dense call in FLOP/s, to estimate the time of the whole run. */
static double quick_flops(const bench *b)
{
    enum { N = 1024 };
    const int64_t H = 4, D = b->shape.D;
    esa_ctx *ctx;
    if (cli_ctx_new(&ctx, b->threads)) return NAN;
    esa_tensor t[4];
    double best = NAN;
    int ready = 1;
    for (int i = 0; i < 4; i++) {
        t[i] = data_tensor_new(ESA_DTYPE_F32, 1, H, N, D);
        ready = ready && t[i].data;
        if (t[i].data) data_tensor_random(&t[i], (uint64_t)i + 1, 1.0);
    }
    for (int i = 0; ready && i < 3; i++) {
        const double start = cli_seconds();
        if (esa_attention(ctx, &t[0], &t[1], &t[2], &t[3], NULL, NULL)) break;
        const double speed = 4.0 * N * N * (double)(D * H) / (cli_seconds() - start);
        if (!(speed <= best)) best = speed;
    }
    for (int i = 0; i < 4; i++) data_tensor_free(&t[i]);
    esa_ctx_free(ctx);
    return best;
}

static void announce(const bench *b)
{
    double work = 0;
    if (b->device == ESA_DEVICE_CUDA) return;
    for (int i = 0; i < b->row_count; i++) work += b->rows[i].asked;
    work *= 4.0 * (double)b->shape.B * (double)b->shape.H * (double)b->shape.N *
            (double)b->shape.N * (double)b->shape.D * (b->causal ? 0.5 : 1.0);
    const double seconds = work * (double)(b->rounds + 2) / quick_flops(b);
    if (seconds > 20)
        fprintf(stderr, "about %.0f %s for %lld rounds (fewer: --rounds)\n",
                seconds < 120 ? seconds : seconds / 60, seconds < 120 ? "seconds" : "minutes",
                (long long)b->rounds);
}

static int run_rounds(bench *b)
{
    for (int i = 0; i < b->row_count; i++) {
        const int failed = row_open(b, &b->rows[i]);
        if (failed) return failed;
        cli_progress("warm-up", i + 1, b->row_count);
    }
    if (b->gemm) gemm_once(b);
    for (int64_t round = 0; round < b->rounds; round++) {
        if (b->gemm) b->gemm_seconds[round] = gemm_once(b);
        for (int i = 0; i < b->row_count; i++) {
            bench_row *r = &b->rows[i];
            double seconds[PARTS];
            const esa_status status = row_once(b, r, seconds);
            for (int part = 0; part < PARTS; part++) r->seconds[part][round] = seconds[part];
            if (status) return cli_fail_esa(r->ctx, status, "bench attention");
        }
        cli_progress("round", round + 1, b->rounds);
    }
    cli_progress_end();
    return CLI_OK;
}

/* One row of the table and of the JSON; dense: best seconds of its dense row. */
static void report_row(bench *b, bench_row *r, cli_table *table, cli_json *json, double gemm,
                       double dense)
{
    char dtype[32], selector[32], tail[32], by[32];
    double best, median, select = NAN, order = NAN, ignored;
    best_median(r->seconds[ATTEND], b->rounds, &best, &median);
    if (has(r, SELECT)) best_median(r->seconds[SELECT], b->rounds, &select, &ignored);
    if (has(r, ORDER)) best_median(r->seconds[ORDER], b->rounds, &order, &ignored);
    const double gflops = 4e-9 * (double)r->pairs * (double)b->shape.D / best,
                 faster = dense / best;
    const int digits = b->gpu ? 3 : 2;
    cli_name(dtype, CLI_DTYPES, r->dtype);
    cli_name(tail, CLI_TAILS, r->tail);
    cli_name(selector, CLI_SELECTORS, r->selector);
    if (r->dense) strcpy(selector, "dense");
    cli_row(table, "%s|%s|%s|%.3g|%.4f|%.*f|%.*f|%.1f|%.3f|%.2f|%.3f|%.*f|%.*f|%.1f", dtype,
            selector, tail, r->asked, r->density, digits, 1e3 * best, digits, 1e3 * median, gflops,
            gflops / gemm, faster, faster * r->density, digits, 1e3 * select, digits, 1e3 * order,
            1e-6 * (double)r->peak_bytes);
    cli_json_open(json, NULL, '{');
    cli_json_fields(
        json,
        "shape %s dtype %s kernel %s precision %d selector %s tail %s order %s exact_rows %d "
        "density_asked %g density %g "
        "seconds %g seconds_median %g gflops %g of_sgemm %g speedup_vs_dense %g "
        "select_seconds %g order_seconds %g peak_extra_bytes %ld",
        b->shape.name, dtype, r->kernel, b->eight ? 8 : 16, selector, tail,
        r->dense || r->order == ESA_ORDER_DEFAULT ? NULL : cli_name(by, CLI_ORDERS, r->order),
        r->exact_rows, r->asked, r->density, best, median, gflops, gflops / gemm, faster, select,
        order, r->peak_bytes);
    cli_json_close(json);
}

/* The table on stdout and the same as JSON. */
static int report(bench *b, const char *json_path, const char *command)
{
    const double work = 2e-9 * GEMM * GEMM * (double)GEMM;
    double gemm = NAN, gemm_median = NAN, dense[3] = { NAN, NAN, NAN }, ignored;
    if (b->gemm) best_median(b->gemm_seconds, b->rounds, &gemm, &gemm_median);
    gemm = work / gemm;
    gemm_median = work / gemm_median;
    cli_table *table = cli_table_new(14, 3);
    cli_row(table, "dtype|selector|tail|asked|density|best ms|median ms|GFLOP/s|of sgemm|speedup|"
                   "x density|select ms|order ms|extra MB");
    cli_json *json = cli_json_new();
    cli_machine_json(json, b->rows[0].ctx, b->blas.handle ? b->blas.name : NULL);
    if (b->gpu) cli_gpu_json(json, "gpu", &b->gpu_info);
    cli_json_fields(json, "command %s rounds %ld sgemm_gflops %g sgemm_gflops_median %g", command,
                    b->rounds, gemm, gemm_median);
    cli_json_open(json, "rows", '[');
    for (int i = 0; i < b->row_count; i++) /* dense first: the other rows refer to it */
        if (b->rows[i].dense)
            best_median(b->rows[i].seconds[ATTEND], b->rounds, &dense[b->rows[i].dtype], &ignored);
    for (int i = 0; i < b->row_count; i++)
        report_row(b, &b->rows[i], table, json, gemm, dense[b->rows[i].dtype]);
    printf("shape %s = B %lld, H %lld, N %lld, D %lld%s; %lld rounds, best/best\n", b->shape.name,
           (long long)b->shape.B, (long long)b->shape.H, (long long)b->shape.N,
           (long long)b->shape.D, b->causal ? ", causal" : "", (long long)b->rounds);
    if (b->gpu) {
        cli_gpu_print(stdout, &b->gpu_info);
        printf("kernel of the first row: %s; the clock is read after the GPU has finished\n\n",
               b->rows[0].kernel);
    } else {
        cli_machine_print(stdout, b->rows[0].ctx);
        if (b->gemm)
            printf("sgemm 2048^3 with %s%s: best %.1f, median %.1f GFLOP/s\n\n", b->blas.name,
                   b->blas.threads_set ? "" : " (its thread count could not be set)", gemm,
                   gemm_median);
        else
            printf("no CBLAS found: sgemm not measured\n\n");
    }
    cli_table_print(table, stdout);
    return cli_json_save(json, json_path);
}

static void bench_free(bench *b)
{
    for (int i = 0; i < b->row_count; i++) {
        bench_row *r = &b->rows[i];
        esa_mask_free(r->mask);
        esa_plan_free(r->plan);
        esa_ctx_free(r->ctx);
        for (int part = 0; part < PARTS; part++) free(r->seconds[part]);
    }
    free(b->rows);
    for (int t = 0; t < 3; t++) {
        esa_tensor *all[] = { &b->q[t], &b->k[t], &b->v[t], &b->o[t] };
        for (int i = 0; i < 4; i++) {
            if (b->device == ESA_DEVICE_CUDA)
                data_tensor_free_gpu(b->gpu, all[i]);
            else
                data_tensor_free(all[i]);
        }
    }
    esa_ctx_free(b->gpu);
    free(b->gemm);
    free(b->gemm_seconds);
    cli_blas_close(&b->blas);
}

/* A grid brings text rules and orders with it; random masks alone stay uniform rows. */
static void set_layout(bench *b, const cli_list *grid, int32_t front, int32_t back)
{
    const int only_random = b->selectors.count == 1 &&
                            cli_selector_has(b->selectors.whole[0], ESA_TRAIT_BLIND);
    esa_layout *l = &b->select.layout;
    if (only_random && !grid->count && l->order == ESA_ORDER_DEFAULT && front < 0 && back < 0)
        return;
    memcpy(l->grid_q, b->shape.grid, sizeof l->grid_q);
    cli_list_copy(l->grid_q, grid);
    l->text_front_q = front >= 0 ? front : grid->count ? 0 : b->shape.text_front;
    l->text_back_q = back >= 0 ? back : grid->count ? 0 : b->shape.text_back;
}

/* What no row can do is told before the first one runs. */
static int check_rows(const bench *b)
{
    int status = CLI_OK;
    for (int s = 0; s < b->selectors.count && !status; s++) {
        const int selector = (int)b->selectors.whole[s];
        for (int t = 0; t < b->tails.count && !status; t++)
            status = cli_selector_takes(selector, b->select.layout.order, (int)b->tails.whole[t],
                                        "bench attention");
        if (!status && b->causal && !cli_selector_has(selector, ESA_TRAIT_CAUSAL))
            status = cli_usage("bench attention: --selector %s does not take --causal: it chooses "
                               "for bidirectional attention",
                               esa_selector_name(selector));
    }
    return status;
}

/* Reads --score-groups, which at least one row must use. */
static int read_groups(bench *b, const char *text)
{
    int used = 0;
    for (int s = 0; s < b->selectors.count; s++)
        used |= cli_selector_has(b->selectors.whole[s], ESA_TRAIT_WEIGHS_TAIL);
    if (!used) return cli_usage("bench attention: " CLI_SCORE_GROUPS " needs --selector error");
    return cli_groups_parse(text, &b->select.group_q, &b->select.group_k);
}

static int run(bench *b, const char *json_path, const char *command)
{
    int status;
    if (b->device == ESA_DEVICE_CUDA) {
        status = cli_ctx_gpu(&b->gpu, &b->gpu_info, 0, "bench attention");
    } else {
        esa_ctx *probe;
        if ((status = cli_ctx_new(&probe, b->threads)) != 0) return status;
        cli_blas_open(&b->blas, esa_ctx_threads(probe)); /* sgemm gets as many threads */
        esa_ctx_free(probe);
    }
    if (!status) status = data_new(b);
    if (!status) status = rows_new(b);
    if (!status) announce(b);
    if (!status) status = run_rounds(b);
    if (!status) status = report(b, json_path, command);
    bench_free(b);
    return status;
}

int cmd_bench_attention(int argc, char **argv)
{
    const cli_list works = cli_preset_works(USUAL_STEPS, ESA_CARRY_AUTO);
    bench b = { .densities = { 1, { 1 }, { 0 } },
                .selectors = { 1, { 0 }, { ESA_SELECT_ERROR } },
                .tails = { 1, { 0 }, { 0 } },
                .dtypes = { 1, { 0 }, { ESA_DTYPE_F32 } },
                .select = esa_select_params_default(ESA_SELECT_RANDOM),
                .exact_rows = -1,
                .rounds = 15 };
    cli_list grid = { 0 }, window = { 0 };
    b.select.seed = 1;
    const char *shape = "1,4,4096,128", *block = NULL, *groups = NULL, *json_path = NULL,
               *cases = NULL;
    int32_t front = -1, back = -1;
    int done;
    char names[512], command[1024] = "esa bench attention", about[640], densities[256];
    cli_shape_list(names, sizeof names);
    const int selectors = cli_given(argc, argv, "--selector");
    b.own_tails = !cli_given(argc, argv, "--tail");
    int used = snprintf(
        densities, sizeof densities,
        "fractions of key blocks to keep; 1 is dense, the baseline; error with tail "
        "levels: the cost of blocks and means together (1");
    for (int i = 0; i < works.count; i++) {
        b.densities.real[b.densities.count++] = works.real[i];
        used += snprintf(densities + used, sizeof densities - (size_t)used, ",%g", works.real[i]);
    }
    snprintf(densities + used, sizeof densities - (size_t)used, ", as the presets in %d steps)",
             USUAL_STEPS);
    snprintf(about, sizeof about,
             "Times dense and block-sparse attention, on the CPU together with sgemm.\n"
             "Shapes by name: %s.",
             names);
    const cli_option options[] = {
        { "--shape", CLI_TEXT, &shape, "NAME|B,H,N,D", 0, 0, 0,
          "a model's attention call, or any shape (1,4,4096,128)" },
        { "--device", CLI_CHOICE, &b.device, CLI_DEVICES, 0, 0, 0,
          "cuda: GPU 0, through libesa_cuda (cpu)" },
        { "--case", CLI_TEXT, &cases, "GLOB,...", 0, 0, 0,
          "times calls of the tests by name instead; list prints the names (none)" },
        { "--density", CLI_REALS, &b.densities, "X,...", 0, 1, 0, densities },
        { "--selector", CLI_CHOICES, &b.selectors, CLI_SELECTORS, 0, 0, 0,
          "one or more, with commas; making random masks is not timed (error; with --causal: "
          "random)" },
        { "--tail", CLI_CHOICES, &b.tails, CLI_TAILS, 0, 0, 0,
          "one or more, with commas (none; error: levels)" },
        { "--exact-rows", CLI_INT, &b.exact_rows, "N", 0, ESA_MAX_EXACT_ROWS, 0,
          "queries per query block that are computed exactly and correct the others (0)" },
        { "--precision", CLI_CHOICE, &b.eight, "16|8", 0, 0, 0,
          "bits of the two products; the kernel's name says what ran (16)" },
        { "--dtype", CLI_CHOICES, &b.dtypes, CLI_DTYPES, 0, 0, 0,
          "one or more, with commas (f32)" },
        { "--block", CLI_TEXT, &block, "QxK", 0, 0, 0,
          "query x key tokens of a block, multiples of 16 up to 256 (entropy 256x128, others "
          "128x128; error up to 8192 keys: 64x64)" },
        { "--samples", CLI_INT, &b.samples, "N", 1, 256, 0,
          "entropy: queries scored per block (4)" },
        { "--fine", CLI_INT, &b.fine, "N", 2, 16, 0,
          "error with tail levels: means per block on the fine level, 2, 4, 8 or 16 (8; short "
          "blocks: 4)" },
        { CLI_SCORE_GROUPS, CLI_TEXT, &groups, "QxK", 0, 0, 0, CLI_SCORE_GROUPS_HELP },
        { "--cdf", CLI_REAL, &b.select.cdf_threshold, "X", 0, 1, 0,
          "ada_bsa: cumulative mass to keep; 1 turns the rule off (1)" },
        { "--order", CLI_CHOICE, &b.select.layout.order, CLI_ORDERS, 0, 0, 0,
          "token order; adaptive is for error, and its making is timed (the selector's own; error: "
          "adaptive)" },
        { "--grid", CLI_INTS, &grid, "t,h,w", 1, 65535, 3,
          "video tokens: frames, height, width (the shape's)" },
        { "--window", CLI_INTS, &window, "t,h,w", 1, 4096, 3,
          "box of order tile3d, in tokens (2,8,8)" },
        { "--text-front", CLI_INT32, &front, "N", 0, 1e9, 0,
          "text tokens before the video (the shape's)" },
        { "--text-back", CLI_INT32, &back, "N", 0, 1e9, 0,
          "text tokens after the video (the shape's)" },
        { "--causal", CLI_FLAG, &b.causal, NULL, 0, 0, 0,
          "query i sees key j only if j <= i (off)" },
        { "--threads", CLI_INT, &b.threads, "N", 0, ESA_MAX_THREADS, 0,
          "CPU threads; 0: one per core (0)" },
        { "--rounds", CLI_INT, &b.rounds, "N", 1, 100000, 0, "timed rounds (15)" },
        { "--seed", CLI_INT, &b.select.seed, "N", 0, 1e15, 0, "seed of data and random masks (1)" },
        { "--json", CLI_OUTPUT, &json_path, "FILE", 0, 0, 0, "also write the table as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    for (int i = 0; i < argc; i++) { /* published numbers carry their command */
        const size_t used = strlen(command);
        snprintf(command + used, sizeof command - used, " %s", argv[i]);
    }
    int status = cli_options("esa bench attention", "[options]", about, options, argc, argv, NULL,
                             &done);
    if (status || done) return status;
    if (cases)
        return case_bench(cases, argc, argv,
                          &(case_bench_params){ b.device, b.threads, b.rounds, b.select.seed });
    if (!selectors && b.causal) b.selectors.whole[0] = ESA_SELECT_RANDOM;
    status = cli_shape_parse(&b.shape, shape);
    if (!status && block) status = cli_block_parse(block, &b.select.block_q, &b.select.block_k);
    if (!status && groups) status = read_groups(&b, groups);
    if (!status && window.count && b.select.layout.order != ESA_ORDER_TILE3D)
        status = cli_usage("bench attention: --window needs --order tile3d");
    if (!status) status = check_rows(&b);
    if (status) return status;
    cli_list_copy(b.select.layout.window, &window);
    set_layout(&b, &grid, front, back);
    return run(&b, json_path, command);
}
