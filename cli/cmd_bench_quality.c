/* cmd_bench_quality.c - `esa bench quality`: kept mass and output error per head kind, selector,
 * order, density and tail.
 * SPDX-License-Identifier: Apache-2.0
 *
 * All four kinds run as heads of one call, so that selectors which share a budget over heads
 * (entropy) can do so. The numbers depend on the seed and on the rounding of the kernel set only;
 * nothing is timed. */
#define ESA_EXPERIMENTAL
#include "core/data.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

typedef struct text {
    char *bytes;
    size_t used, room;
    int failed;
} text;

__attribute__((format(printf, 2, 3))) static void add(text *t, const char *format, ...)
{
    if (t->room - t->used < 512) {
        char *grown = realloc(t->bytes, 2 * t->room + 4096);
        if (!grown) {
            t->failed = 1;
            return;
        }
        t->bytes = grown;
        t->room = 2 * t->room + 4096;
    }
    va_list args;
    va_start(args, format);
    t->used += (size_t)vsnprintf(t->bytes + t->used, t->room - t->used, format, args);
    va_end(args);
}

typedef struct quality {
    esa_ctx *ctx;
    esa_tensor q, k, v, o, ref;
    int32_t grid[3];
    uint64_t seed;
    cli_list selectors, orders, densities, tails;
} quality;

/* One mask, all tails. */
static int run_mask(quality *u, text *csv, int selector, int order, double density)
{
    char names[4][32];
    double mass[SYNTH_KINDS];
    int64_t pairs[SYNTH_KINDS];
    esa_mask *mask = NULL;
    esa_select_params select = esa_select_params_default(selector);
    esa_attention_params attention = esa_attention_params_default();
    select.budget = density;
    select.seed = u->seed;
    select.layout.order = order;
    memcpy(select.layout.grid_q, u->grid, sizeof u->grid);
    esa_status status = esa_select(u->ctx, &mask, &u->q, &u->k, &select);
    /* Every 5th query of the ordered sequence: prime to block sizes and tile widths, so all places
     * of a block are met. */
    if (status == ESA_OK) status = esa_mask_mass(u->ctx, mass, mask, &u->q, &u->k, &attention, 5);
    if (status == ESA_OK && measure_pairs(mask, &u->q, &u->k, 0, pairs) < 0)
        status = ESA_ERR_MEMORY;
    for (int t = 0; status == ESA_OK && t < u->tails.count; t++) {
        attention.tail = (int32_t)u->tails.whole[t];
        status = esa_attention(u->ctx, &u->q, &u->k, &u->v, &u->o, mask, &attention);
        for (int h = 0; status == ESA_OK && h < SYNTH_KINDS; h++)
            add(csv, "%s,%s,%s,%.2f,%.4f,%s,%.4f,%.4f\n", cli_name(names[0], SYNTH_NAMES, h),
                cli_name(names[1], CLI_SELECTORS, selector), cli_name(names[2], CLI_ORDERS, order),
                density, (double)pairs[h] / ((double)u->q.dim[2] * (double)u->k.dim[2]),
                cli_name(names[3], CLI_TAILS, attention.tail), mass[h],
                measure_error(&u->o, &u->ref, h));
    }
    esa_mask_free(mask);
    return status == ESA_OK ? CLI_OK : cli_fail_esa(u->ctx, status, "bench quality");
}

static int run_all(quality *u, text *csv)
{
    const int64_t total = (int64_t)u->selectors.count * u->orders.count * u->densities.count;
    int64_t done = 0;
    synth_fill(&u->q, &u->k, &u->v, u->grid, u->seed);
    const esa_status status = esa_attention(u->ctx, &u->q, &u->k, &u->v, &u->ref, NULL, NULL);
    if (status != ESA_OK) return cli_fail_esa(u->ctx, status, "bench quality");
    add(csv, "head,selector,order,density_asked,density,tail,kept_mass,output_error\n");
    for (int s = 0; s < u->selectors.count; s++)
        for (int o = 0; o < u->orders.count; o++)
            for (int d = 0; d < u->densities.count; d++) {
                const int failed = run_mask(u, csv, (int)u->selectors.whole[s],
                                            (int)u->orders.whole[o], u->densities.real[d]);
                if (failed) return failed;
                cli_progress("quality", ++done, total);
            }
    cli_progress_end();
    return csv->failed ? cli_fail("bench quality: out of memory") : CLI_OK;
}

int cmd_bench_quality(int argc, char **argv)
{
    quality u = { .selectors = { 4,
                                 { 0 },
                                 { ESA_SELECT_ENTROPY, ESA_SELECT_RF_V2, ESA_SELECT_ADA_BSA,
                                   ESA_SELECT_RANDOM } },
                  .orders = { 4, { 0 }, { 0, 1, 2, 3 } },
                  .densities = { 4, { 0.5, 0.3, 0.2, 0.1 }, { 0 } },
                  .tails = { 3, { 0 }, { 0, 1, 2 } } };
    cli_list grid = { 3, { 0 }, { 21, 16, 24 } };
    int64_t dim = 64, threads = 0, seed = 1;
    const char *out = NULL;
    int done;
    const cli_option options[] = {
        { "--out", CLI_OUTPUT, &out, "FILE", 0, 0, 0, "write the CSV here (standard output)" },
        { "--selector", CLI_CHOICES, &u.selectors, CLI_SELECTORS, 0, 0, 0,
          "any, with commas (entropy,rf_v2,ada_bsa,random)" },
        { "--density", CLI_REALS, &u.densities, "X,...", 0, 1, 0,
          "kept fractions of key blocks (0.5,0.3,0.2,0.1)" },
        { "--tail", CLI_CHOICES, &u.tails, CLI_TAILS, 0, 0, 0, "any, with commas (all)" },
        { "--order", CLI_CHOICES, &u.orders, CLI_ORDERS, 0, 0, 0, "any, with commas (all)" },
        { "--grid", CLI_INTS, &grid, "t,h,w", 1, 4096, 3, "video tokens (21,16,24)" },
        { "--dim", CLI_INT, &dim, "D", 16, ESA_MAX_HEAD_DIM, 0, "head dimension, even (64)" },
        { "--seed", CLI_INT, &seed, "N", 0, 1e15, 0, "of the synthetic heads (1)" },
        { "--threads", CLI_INT, &threads, "N", 0, ESA_MAX_THREADS, 0, "0: one per core (0)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa bench quality", "[--out FILE] [options]",
                             "Kept attention mass and output error on synthetic heads (local, "
                             "temporal, sink, diffuse), as CSV.",
                             options, argc, argv, NULL, &done);
    if (status || done) return status;
    if (dim % 2) {
        cli_fail("bench quality: --dim was given %lld, expected an even number", (long long)dim);
        return CLI_USAGE;
    }
    if ((status = cli_ctx_new(&u.ctx, threads)) != 0) return status;
    for (int i = 0; i < 3; i++) u.grid[i] = (int32_t)grid.whole[i];
    u.seed = (uint64_t)seed;
    esa_tensor *tensors[] = { &u.q, &u.k, &u.v, &u.o, &u.ref };
    for (int i = 0; i < 5 && status == CLI_OK; i++) {
        *tensors[i] = data_tensor_new(ESA_DTYPE_F32, 1, SYNTH_KINDS,
                                      grid.whole[0] * grid.whole[1] * grid.whole[2], dim);
        if (!tensors[i]->data) status = CLI_FAILED;
    }
    text csv = { 0 };
    if (status == CLI_OK) status = run_all(&u, &csv);
    if (status == CLI_OK)
        status = out ? cli_write_file(out, csv.bytes, csv.used)
                 : fwrite(csv.bytes, 1, csv.used, stdout) == csv.used
                     ? CLI_OK
                     : cli_fail("cannot write to standard output");
    free(csv.bytes);
    for (int i = 0; i < 5; i++) data_tensor_free(tensors[i]);
    esa_ctx_free(u.ctx);
    return status;
}
