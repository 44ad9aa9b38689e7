/* case_bench.c - times the calls of tests/cases/attention.def: `esa bench attention --case`.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A case gives shapes, dtype, mask, tail, order, lengths, exact rows, bits and carry. Its views are
 * contiguous here, and its mask and orders are random. */
#include "core/case_bench.h"
#include "core/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <esa/esa_carry.h>
#include "cases/attention.h"
#include "cases/match.h"

enum { GPU_CALLS = 20 }; /* per time on a GPU, whose clock can be read only at the end */

/* One case, ready to run. `gpu` owns what lies on the GPU; NULL: nothing does. */
typedef struct ready {
    const attention_case *c;
    esa_ctx *ctx, *gpu;
    esa_plan *plan;
    esa_mask *mask;
    esa_tensor t[4]; /* q, k, v, o */
    esa_carry carry;
    void *carried, *lengths; /* on the GPU if there is one */
} ready;

/* Memory for the call, with these contents; NULL after a message. */
static void *place(const ready *r, const void *contents, int64_t bytes)
{
    void *to = NULL;
    if (r->gpu) {
        if (!esa_device_alloc(r->gpu, &to, bytes) &&
            !esa_device_upload(r->gpu, to, contents, bytes))
            return to;
        esa_device_free(r->gpu, to);
        cli_fail("bench attention: %s", esa_ctx_error(r->gpu));
        return NULL;
    }
    to = aligned_alloc(ESA_WORKSPACE_ALIGN, (size_t)(bytes + ESA_WORKSPACE_ALIGN - 1) /
                                                ESA_WORKSPACE_ALIGN * ESA_WORKSPACE_ALIGN);
    if (to)
        memcpy(to, contents, (size_t)bytes);
    else
        cli_fail("bench attention: out of memory");
    return to;
}

static int make_tensors(ready *r, uint64_t seed)
{
    const attention_case *c = r->c;
    for (int i = 0; i < 4; i++) {
        const int64_t H = i % 3 ? c->Hkv : c->Hq, N = i % 3 ? c->Nk : c->Nq;
        esa_tensor host = data_tensor_new(c->dtype, c->B, H, N, c->D);
        if (!host.data) return CLI_FAILED;
        data_tensor_random(&host, seed + (uint64_t)i, 1.0);
        r->t[i] = r->gpu ? data_tensor_to_gpu(r->gpu, &host) : host;
        if (r->gpu) data_tensor_free(&host);
        if (!r->t[i].data) return CLI_FAILED;
    }
    return CLI_OK;
}

/* Random orders of all heads of a side; text stays where it is. */
static int32_t *random_orders(const attention_case *c, int64_t heads, int64_t N, data_rng *rng)
{
    const int64_t first = c->text_front, n = N - c->text_front - c->text_back;
    int32_t *perm = malloc((size_t)(heads * N) * sizeof *perm);
    for (int64_t i = 0; perm && i < heads * N; i++) perm[i] = (int32_t)(i % N);
    for (int64_t h = 0; perm && h < heads; h++)
        for (int64_t i = n - 1; i > 0; i--) {
            int32_t *order = perm + h * N + first;
            const int64_t j = (int64_t)(data_unit(rng) * (double)(i + 1));
            const int32_t other = order[j];
            order[j] = order[i];
            order[i] = other;
        }
    return perm;
}

static esa_status set_orders(ready *r, esa_mask *mask, int64_t B, data_rng *rng)
{
    const attention_case *c = r->c;
    int32_t *q = random_orders(c, B * c->Hq, c->Nq, rng),
            *k = random_orders(c, B * c->Hkv, c->Nk, rng);
    const esa_status status = q && k ? esa_mask_set_orders(r->ctx, mask, q, k, c->Hkv)
                                     : ESA_ERR_MEMORY;
    free(q);
    free(k);
    return status;
}

static esa_status make_mask(ready *r, uint64_t seed)
{
    const attention_case *c = r->c;
    esa_mask_info info = { .struct_size = sizeof info,
                           .block_q = c->block_q ? c->block_q : 128,
                           .block_k = c->block_k ? c->block_k : 128,
                           .B = c->broadcast ? 1 : c->B,
                           .H = c->Hq,
                           .Nq = c->Nq,
                           .Nk = c->Nk,
                           .fine = c->fine,
                           .layout = esa_layout_default() };
    info.layout.order = c->order;
    for (int i = 0; i < 3; i++) {
        info.layout.grid_q[i] = info.layout.grid_k[i] = c->grid[i];
        info.layout.window[i] = 4;
    }
    info.layout.text_front_q = info.layout.text_front_k = c->text_front;
    info.layout.text_back_q = info.layout.text_back_k = c->text_back;
    const int64_t cells = info.B * c->Hq * ((c->Nq + info.block_q - 1) / info.block_q) *
                          ((c->Nk + info.block_k - 1) / info.block_k);
    uint8_t *level = malloc((size_t)cells);
    if (!level) return ESA_ERR_MEMORY;
    data_rng rng = { seed };
    for (int64_t i = 0; i < cells; i++) {
        const int fine = c->fine && data_unit(&rng) < c->refined;
        level[i] = (uint8_t)(data_unit(&rng) < c->density ? 0 : fine ? 1 : 2);
    }
    esa_mask *host = NULL;
    esa_status status = esa_mask_from_levels(r->ctx, &host, &info, level);
    free(level);
    if (!status && c->order == ESA_ORDER_ADAPTIVE) status = set_orders(r, host, info.B, &rng);
    if (!status && r->gpu) status = esa_mask_to_device(r->ctx, &r->mask, host, ESA_DEVICE_CUDA);
    if (r->gpu || status)
        esa_mask_free(host);
    else
        r->mask = host;
    return status;
}

static esa_status make_plan(ready *r)
{
    const attention_case *c = r->c;
    esa_shapes shapes = esa_shapes_default();
    esa_attention_params p = esa_attention_params_default();
    shapes.dtype = c->dtype;
    shapes.device = r->gpu ? ESA_DEVICE_CUDA : ESA_DEVICE_CPU;
    shapes.B = c->B;
    shapes.Hq = c->Hq;
    shapes.Hkv = c->Hkv;
    shapes.Nq = c->Nq;
    shapes.Nk = c->Nk;
    shapes.D = c->D;
    p.causal = c->causal;
    p.tail = c->tail;
    p.exact_rows = c->exact_rows;
    p.precision = c->precision;
    p.kv_len = r->lengths;
    return esa_plan_create(r->ctx, &r->plan, &shapes, NULL, &p);
}

/* A carried difference of 0. */
static int make_carry(ready *r)
{
    const attention_case *c = r->c;
    const int64_t B = c->carry_shared == 1 ? 1 : c->B,
                  bytes = esa_carry_bytes(c->carry_format, B, c->Hq, c->Nq, c->D);
    void *zero = calloc(1, (size_t)bytes);
    r->carried = zero ? place(r, zero, bytes) : NULL;
    free(zero);
    r->carry = esa_carry_view(r->carried, c->carry_format, B, c->Hq, c->Nq, c->D);
    r->carry.device = r->gpu ? ESA_DEVICE_CUDA : ESA_DEVICE_CPU;
    return r->carried ? CLI_OK : CLI_FAILED;
}

static int ready_open(ready *r, int64_t threads, uint64_t seed)
{
    const attention_case *c = r->c;
    if (cli_ctx_new(&r->ctx, threads) || make_tensors(r, seed)) return CLI_FAILED;
    if (c->carry && make_carry(r)) return CLI_FAILED;
    if (c->kv_len && !(r->lengths = place(r, c->kv_len, c->B * 4))) return CLI_FAILED;
    esa_status status = make_plan(r);
    if (!status && c->density >= 0.0) status = make_mask(r, seed);
    return cli_status(r->ctx, status, "bench attention");
}

static void ready_close(ready *r)
{
    esa_mask_free(r->mask);
    esa_plan_free(r->plan);
    for (int i = 0; i < 4; i++) {
        if (r->gpu)
            data_tensor_free_gpu(r->gpu, &r->t[i]);
        else
            data_tensor_free(&r->t[i]);
    }
    void *const owned[] = { r->carried, r->lengths };
    for (int i = 0; i < 2; i++) {
        if (r->gpu)
            esa_device_free(r->gpu, owned[i]);
        else
            free(owned[i]);
    }
    esa_ctx_free(r->ctx);
}

static esa_status call(const ready *r)
{
    const esa_tensor *t = r->t;
    if (r->c->carry)
        return esa_plan_attention_carry(
            r->plan, r->mask, &t[0], &t[1], &t[2], &t[3], NULL, &r->carry,
            r->c->carry == CASE_ADD ? ESA_CARRY_ADD : ESA_CARRY_MAKE, NULL);
    return esa_plan_attention(r->plan, r->mask, &t[0], &t[1], &t[2], &t[3], NULL, NULL);
}

/* Seconds of one call. */
static esa_status time_call(const ready *r, double *seconds)
{
    const int calls = r->gpu ? GPU_CALLS : 1;
    esa_status status = r->gpu ? esa_device_sync(r->ctx) : ESA_OK;
    const double start = cli_seconds();
    for (int i = 0; i < calls && !status; i++) status = call(r);
    if (r->gpu && !status) status = esa_device_sync(r->ctx);
    *seconds = (cli_seconds() - start) / calls;
    return status;
}

/* A row of the table. */
static int time_case(const ready *r, const char *name, int64_t rounds, double *seconds,
                     cli_table *table)
{
    double first, median;
    esa_status status = time_call(r, &first); /* grows the scratch memory; not counted */
    for (int64_t i = 0; i < rounds && !status; i++) status = time_call(r, &seconds[i]);
    esa_mask_info info = { .struct_size = sizeof info, .density = 1.0 };
    if (!status && r->mask) status = esa_mask_get_info(r->mask, &info);
    if (status) return cli_fail_esa(r->ctx, status, name);
    const int64_t pairs = measure_pairs(r->mask, &r->t[0], &r->t[1], r->c->causal, NULL);
    if (pairs < 0) return cli_fail("bench attention: out of memory");
    median = measure_median(seconds, rounds);
    cli_row(table, "%s|%s|%.4f|%.4f|%.4f|%.1f", name,
            esa_plan_kernel(r->plan, r->mask, &r->t[0], &r->t[1], &r->t[2], &r->t[3]), info.density,
            1e3 * seconds[0], 1e3 * median, 4e-9 * (double)pairs * (double)r->c->D / seconds[0]);
    return CLI_OK;
}

/* The case decides all else, so other options are refused. */
static int check_options(int argc, char **argv)
{
    static const char *const known[] = { "--case", "--device", "--threads", "--rounds", "--seed" };
    for (int i = 0; i < argc; i++) {
        const size_t length = strcspn(argv[i], "=");
        int fits = strncmp(argv[i], "--", 2) != 0;
        for (int k = 0; k < 5 && !fits; k++)
            fits = strlen(known[k]) == length && !strncmp(argv[i], known[k], length);
        if (!fits)
            return cli_usage("bench attention: --case decides what %s would; it takes --device, "
                             "--threads, --rounds and --seed",
                             argv[i]);
    }
    return CLI_OK;
}

/* Prints the names that match, if print is 1; returns their number. */
static int count_cases(const char *globs, int print)
{
    int found = 0;
    for (case_walk w = { 0 }; case_next(&w);)
        if (case_matches(w.name, globs)) {
            found++;
            if (print) printf("%s\n", w.name);
        }
    return found;
}

int case_bench(const char *globs, int argc, char **argv, const case_bench_params *p)
{
    esa_device_info info;
    esa_ctx *gpu = NULL;
    int status = check_options(argc, argv);
    if (status) return status;
    if (!strcmp(globs, "list")) return count_cases("*", 1) ? CLI_OK : CLI_FAILED;
    if (!count_cases(globs, 0))
        return cli_usage("bench attention: no case matches '%s' (--case list names them)", globs);
    if (p->device == ESA_DEVICE_CUDA) status = cli_ctx_gpu(&gpu, &info, 0, "bench attention");
    if (status) return status;
    double *seconds = calloc((size_t)p->rounds, sizeof *seconds);
    if (!seconds) status = cli_fail("bench attention: out of memory");
    cli_table *table = cli_table_new(6, 2);
    cli_row(table, "case|kernel|density|best ms|median ms|GFLOP/s");
    for (case_walk w = { 0 }; !status && case_next(&w);) {
        if (!case_matches(w.name, globs)) continue;
        ready r = { .c = &w.c, .gpu = gpu };
        status = ready_open(&r, p->threads, p->seed);
        if (!status) status = time_case(&r, w.name, p->rounds, seconds, table);
        ready_close(&r);
    }
    cli_table_print(table, stdout);
    free(seconds);
    esa_ctx_free(gpu);
    return status;
}
