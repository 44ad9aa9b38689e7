/* cmd_demo.c - `esa demo`: dense attention against every selector, with and without a tail, on
 * synthetic heads.
 * SPDX-License-Identifier: Apache-2.0 */
#define ESA_EXPERIMENTAL
#include "core/data.h"

#include <math.h>
#include <stdlib.h>

typedef struct demo {
    synth_case c;
    int64_t rounds;
    int order; /* ESA_ORDER_* */
} demo;

typedef struct demo_row {
    double asked, density, mass, error, select_seconds, seconds;
} demo_row;

/* The order of a selector. Adaptive orders are for error, and they are its own. */
static int order_of(const demo *d, int selector)
{
    if (cli_selector_has(selector, ESA_TRAIT_ADAPTIVE))
        return d->order == ESA_ORDER_DEFAULT ? ESA_ORDER_ADAPTIVE : d->order;
    return d->order == ESA_ORDER_ADAPTIVE ? ESA_ORDER_DEFAULT : d->order;
}

/* The best of all rounds for one selector and tail. CLI_OK, or CLI_FAILED after a message. */
static int run_row(demo *d, demo_row *row, int selector, int tail)
{
    esa_select_params select = esa_select_params_default(selector);
    esa_attention_params attention = esa_attention_params_default();
    const int64_t H = d->c.q.dim[1];
    esa_mask *mask = NULL;
    esa_status status = ESA_OK;
    select.budget = row->asked;
    select.seed = d->c.seed;
    select.tail = tail;
    select.layout.order = order_of(d, selector);
    for (int i = 0; i < 3; i++) select.layout.grid_q[i] = d->c.grid[i];
    attention.tail = tail;
    row->select_seconds = row->seconds = INFINITY;
    for (int64_t r = 0; r < d->rounds; r++) {
        esa_mask_free(mask);
        const double start = cli_seconds();
        status = esa_select_qkv(d->c.ctx, &mask, &d->c.q, &d->c.k, &d->c.v, &select);
        const double chosen = cli_seconds();
        if (!status)
            status = esa_attention(d->c.ctx, &d->c.q, &d->c.k, &d->c.v, &d->c.o, mask, &attention);
        const double end = cli_seconds();
        if (status) break;
        if (chosen - start < row->select_seconds) row->select_seconds = chosen - start;
        if (end - start < row->seconds) row->seconds = end - start;
    }
    esa_mask_info info = { .struct_size = sizeof info };
    double *mass = calloc((size_t)H, sizeof *mass);
    if (!mass) status = ESA_ERR_MEMORY;
    if (!status) status = esa_mask_get_info(mask, &info);
    if (!status) status = esa_mask_mass(d->c.ctx, mass, mask, &d->c.q, &d->c.k, &attention, 7);
    row->density = info.density;
    row->mass = row->error = 0;
    for (int64_t h = 0; !status && h < H; h++) {
        row->mass += mass[h] / (double)H;
        row->error += measure_error(&d->c.o, &d->c.ref, h) / (double)H;
    }
    free(mass);
    esa_mask_free(mask);
    return cli_status(d->c.ctx, status, "demo");
}

static void add_row(cli_table *table, cli_json *json, const char *selector, const char *tail,
                    const demo_row *row, double dense_seconds)
{
    const double speedup = dense_seconds / row->seconds;
    cli_row(table, "%s|%s|%.2f|%.3f|%.1f %%|%.2f %%|%.0f ms|%.2fx", selector, tail, row->asked,
            row->density, 100 * row->mass, 100 * row->error, 1e3 * row->seconds, speedup);
    cli_json_open(json, NULL, '{');
    cli_json_fields(json,
                    "selector %s tail %s density_asked %g density %g kept_mass %g output_error %g "
                    "seconds %g select_seconds %g speedup_vs_dense %g",
                    selector, tail, row->asked, row->density, row->mass, row->error, row->seconds,
                    row->select_seconds, speedup);
    cli_json_close(json);
}

static int run_demo(demo *d, const cli_list *budgets, const char *json_path)
{
    static const int selectors[] = { ESA_SELECT_ENTROPY, ESA_SELECT_RF_V2, ESA_SELECT_ADA_BSA,
                                     ESA_SELECT_ERROR, ESA_SELECT_RANDOM };
    enum { CASES = 2 * sizeof selectors / sizeof selectors[0] };
    const int64_t total = 1 + (int64_t)budgets->count * CASES;
    int64_t done = 0;
    demo_row dense = { 1, 1, 1, 0, 0, INFINITY };
    cli_progress("demo", 0, total);
    for (int64_t r = 0; r < d->rounds + 1; r++) { /* the first call also grows the arena */
        const double start = cli_seconds();
        const esa_status status = esa_attention(d->c.ctx, &d->c.q, &d->c.k, &d->c.v, &d->c.ref,
                                                NULL, NULL);
        const double seconds = cli_seconds() - start;
        if (status) return cli_fail_esa(d->c.ctx, status, "demo");
        if (seconds < dense.seconds) dense.seconds = seconds;
    }
    cli_progress("demo", ++done, total);

    cli_table *table = cli_table_new(8, 2);
    cli_json *json = cli_json_new();
    cli_row(table, "selector|tail|asked|density|kept mass|output error|time|speedup");
    cli_machine_json(json, d->c.ctx, NULL);
    cli_json_open(json, "rows", '[');
    add_row(table, json, "dense", "none", &dense, dense.seconds);
    for (int b = 0; b < budgets->count; b++)
        for (int i = 0; i < CASES; i++) {
            char name[32];
            const int selector = selectors[i / 2],
                      levels = cli_selector_has(selector, ESA_TRAIT_WEIGHS_TAIL),
                      tail = i % 2 == 0 ? levels ? ESA_TAIL_POOLED : ESA_TAIL_NONE
                             : levels   ? ESA_TAIL_LEVELS
                                        : ESA_TAIL_POOLED;
            demo_row row = { .asked = budgets->real[b] };
            if (run_row(d, &row, selector, tail)) {
                cli_table_print(table, stdout);
                cli_json_save(json, NULL);
                return CLI_FAILED;
            }
            add_row(table, json, esa_selector_name(selector), cli_name(name, CLI_TAILS, tail), &row,
                    dense.seconds);
            cli_progress("demo", ++done, total);
        }
    cli_progress_end();
    cli_table_print(table, stdout);
    printf("\nkept mass: share of the true attention the mask keeps; output error: |o - dense| / "
           "|dense|; both means over heads.\n"
           "time: order, selection and attention together, best of %lld; tail pooled: the mean key "
           "and value of a skipped block stand in for it;\n"
           "tail levels: some skipped blocks have several means, and the budget pays for all "
           "means too.\n",
           (long long)d->rounds);
    return cli_json_save(json, json_path);
}

int cmd_demo(int argc, char **argv)
{
    cli_list budgets = { 2, { 0.5, 0.2 }, { 0 } }, grid = { 3, { 0 }, { 21, 15, 26 } };
    int64_t heads = 4, dim = 128, threads = 0, seed = 1, rounds = 3;
    const char *json_path = NULL;
    int order = -1, done;
    const cli_option options[] = {
        { "--budget", CLI_REALS, &budgets, "X,...", 0, 1, 0,
          "fractions of key blocks to keep (0.5,0.2)" },
        { "--grid", CLI_INTS, &grid, "t,h,w", 1, 4096, 3,
          "video tokens: frames, height, width (21,15,26)" },
        { "--heads", CLI_INT, &heads, "N", 1, 256, 0,
          "number of heads: local, temporal, sink, diffuse in turn (4)" },
        { "--dim", CLI_INT, &dim, "D", 16, ESA_MAX_HEAD_DIM, 0, "head dimension, even (128)" },
        { "--order", CLI_CHOICE, &order, CLI_ORDERS, 0, 0, 0,
          "token order; adaptive: error alone takes it (each selector's own; error: adaptive)" },
        { "--rounds", CLI_INT, &rounds, "N", 1, 1000, 0, "timed rounds; the best counts (3)" },
        { "--threads", CLI_INT, &threads, "N", 0, ESA_MAX_THREADS, 0,
          "CPU threads; 0: one per core (0)" },
        { "--seed", CLI_INT, &seed, "N", 0, 1e15, 0, "seed of the synthetic heads (1)" },
        { "--json", CLI_OUTPUT, &json_path, "FILE", 0, 0, 0, "also write the table as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options(
        "esa demo", "[options]",
        "Dense attention against every selector on synthetic video-like heads.", options, argc,
        argv, NULL, &done);
    if (status || done) return status;
    demo d = { .rounds = rounds, .order = order };
    status = synth_open(&d.c, &grid, heads, dim, seed, threads, "demo");
    if (!status) {
        printf("Synthetic video of %d x %d x %d = %lld tokens, %lld heads of %lld (local, "
               "temporal, sink, diffuse), f32\n",
               d.c.grid[0], d.c.grid[1], d.c.grid[2], (long long)d.c.q.dim[2], (long long)heads,
               (long long)dim);
        cli_machine_print(stdout, d.c.ctx);
        printf("\n");
        fflush(stdout);
        status = run_demo(&d, &budgets, json_path);
    }
    synth_close(&d.c);
    return status;
}
