/* cmd_bench_quality.c - `esa bench quality`: kept mass and output error per head kind, selector,
 * order, density and tail.
 * SPDX-License-Identifier: Apache-2.0
 *
 * All four kinds are heads of one call, so that entropy can share its budget over heads. The
 * numbers depend only on the seed and on the rounding of the kernel set; nothing is timed. */
#define _POSIX_C_SOURCE 200809L /* open_memstream */
#define ESA_EXPERIMENTAL
#include "core/data.h"

#include <stdlib.h>
#include <string.h>

typedef struct quality {
    synth_case c;
    cli_list selectors, orders, densities, tails;
} quality;

typedef struct mask_case {
    int selector, order;
    double density;
    esa_mask *mask;
    double mass[SYNTH_KINDS];
    int64_t pairs[SYNTH_KINDS];
} mask_case;

/* tail: what the error selector chooses for; the others do not look at it. */
static esa_status make_mask(quality *u, mask_case *m, int tail)
{
    const esa_attention_params attention = esa_attention_params_default();
    esa_select_params select = esa_select_params_default(m->selector);
    select.budget = m->density;
    select.seed = u->c.seed;
    select.tail = tail;
    select.layout.order = m->order;
    memcpy(select.layout.grid_q, u->c.grid, sizeof u->c.grid);
    esa_mask_free(m->mask);
    esa_status status = esa_select_qkv(u->c.ctx, &m->mask, &u->c.q, &u->c.k, &u->c.v, &select);
    /* Every 5th query of the ordered sequence: 5 is prime to block sizes and tile widths, so every
     * place of a block is sampled. */
    if (!status)
        status = esa_mask_mass(u->c.ctx, m->mass, m->mask, &u->c.q, &u->c.k, &attention, 5);
    if (!status && measure_pairs(m->mask, &u->c.q, &u->c.k, 0, m->pairs) < 0)
        status = ESA_ERR_MEMORY;
    return status;
}

/* All tails with one mask, or one for each tail where the selector weighs it. */
static int run_mask(quality *u, FILE *csv, int selector, int order, double density)
{
    char names[4][32];
    mask_case m = { .selector = selector, .order = order, .density = density };
    esa_attention_params attention = esa_attention_params_default();
    esa_status status = ESA_OK;
    for (int t = 0; !status && t < u->tails.count; t++) {
        attention.tail = (int32_t)u->tails.whole[t];
        if (!m.mask || cli_selector_has(selector, ESA_TRAIT_WEIGHS_TAIL))
            status = make_mask(u, &m, attention.tail);
        if (!status)
            status = esa_attention(u->c.ctx, &u->c.q, &u->c.k, &u->c.v, &u->c.o, m.mask,
                                   &attention);
        for (int h = 0; !status && h < SYNTH_KINDS; h++)
            fprintf(csv, "%s,%s,%s,%.2f,%.4f,%s,%.4f,%.4f\n", cli_name(names[0], SYNTH_NAMES, h),
                    cli_name(names[1], CLI_SELECTORS, selector),
                    cli_name(names[2], CLI_ORDERS, order), density,
                    (double)m.pairs[h] / ((double)u->c.q.dim[2] * (double)u->c.k.dim[2]),
                    cli_name(names[3], CLI_TAILS, attention.tail), m.mass[h],
                    measure_error(&u->c.o, &u->c.ref, h));
    }
    esa_mask_free(m.mask);
    return cli_status(u->c.ctx, status, "bench quality");
}

static int run_all(quality *u, FILE *csv)
{
    const int64_t total = (int64_t)u->selectors.count * u->orders.count * u->densities.count;
    int64_t done = 0;
    const esa_status status = esa_attention(u->c.ctx, &u->c.q, &u->c.k, &u->c.v, &u->c.ref, NULL,
                                            NULL);
    if (status) return cli_fail_esa(u->c.ctx, status, "bench quality");
    fprintf(csv, "head,selector,order,density_asked,density,tail,kept_mass,output_error\n");
    for (int s = 0; s < u->selectors.count; s++)
        for (int o = 0; o < u->orders.count; o++)
            for (int d = 0; d < u->densities.count; d++) {
                const int failed = run_mask(u, csv, (int)u->selectors.whole[s],
                                            (int)u->orders.whole[o], u->densities.real[d]);
                if (failed) return failed;
                cli_progress("quality", ++done, total);
            }
    cli_progress_end();
    return CLI_OK;
}

/* What cannot be run is told before the first case. */
static int check_cases(const quality *u)
{
    int status = CLI_OK;
    for (int s = 0; s < u->selectors.count; s++)
        for (int o = 0; o < u->orders.count; o++)
            for (int t = 0; t < u->tails.count && !status; t++)
                status = cli_selector_takes((int)u->selectors.whole[s], (int)u->orders.whole[o],
                                            (int)u->tails.whole[t], "bench quality");
    return status;
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
    const int tails = cli_given(argc, argv, "--tail");
    const cli_option options[] = {
        { "--out", CLI_OUTPUT, &out, "FILE", 0, 0, 0, "the CSV file (standard output)" },
        { "--selector", CLI_CHOICES, &u.selectors, CLI_SELECTORS, 0, 0, 0,
          "one or more, with commas (entropy,rf_v2,ada_bsa,random)" },
        { "--density", CLI_REALS, &u.densities, "X,...", 0, 1, 0,
          "fractions of key blocks to keep; error with tail levels: the cost of blocks and means "
          "together (0.5,0.3,0.2,0.1)" },
        { "--tail", CLI_CHOICES, &u.tails, CLI_TAILS, 0, 0, 0,
          "one or more, with commas (none,pooled,centroid; with error: none,pooled,levels)" },
        { "--order", CLI_CHOICES, &u.orders, CLI_ORDERS, 0, 0, 0,
          "one or more, with commas; adaptive is for error (raster,tile,tile3d,hilbert)" },
        { "--grid", CLI_INTS, &grid, "t,h,w", 1, 4096, 3,
          "video tokens: frames, height, width (21,16,24)" },
        { "--dim", CLI_INT, &dim, "D", 16, ESA_MAX_HEAD_DIM, 0, "head dimension, even (64)" },
        { "--seed", CLI_INT, &seed, "N", 0, 1e15, 0, "seed of the synthetic heads (1)" },
        { "--threads", CLI_INT, &threads, "N", 0, ESA_MAX_THREADS, 0,
          "CPU threads; 0: one per core (0)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa bench quality", "[--out FILE] [options]",
                             "Kept attention mass and output error on synthetic heads (local, "
                             "temporal, sink, diffuse), as CSV.",
                             options, argc, argv, NULL, &done);
    if (status || done) return status;
    for (int s = 0; s < u.selectors.count && !tails; s++)
        if (!cli_selector_has(u.selectors.whole[s], ESA_TRAIT_CENTROID))
            u.tails.whole[2] = ESA_TAIL_LEVELS;
    if ((status = check_cases(&u)) != 0) return status;
    char *csv = NULL;
    size_t bytes = 0;
    FILE *memory = NULL;
    status = synth_open(&u.c, &grid, SYNTH_KINDS, dim, seed, threads, "bench quality");
    if (!status && !(memory = open_memstream(&csv, &bytes)))
        status = cli_fail("bench quality: out of memory");
    if (!status) status = run_all(&u, memory);
    if (memory && fclose(memory) != 0 && !status) status = cli_fail("bench quality: out of memory");
    if (!status) status = cli_write_file(out ? out : "/dev/stdout", csv, bytes);
    free(csv);
    synth_close(&u.c);
    return status;
}
