/* cmd_masks_info.c - `esa masks info`: describes a mask file and the figures of one of its cells.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <esa/esa_session.h>

static const char importance_names[] = "none|u8|f16";

/* work[budgets]: what the masks of each budget cost. */
static void describe(const esa_mask_file_info *i, const char *path, const double *work,
                     cli_json *json)
{
    char tail[32], selector[32], order[32], importance[32], mode[32], budgets[160] = "";
    size_t used = 0;
    cli_name(importance, importance_names, i->importance);
    cli_name(order, CLI_ORDERS, i->layout.order);
    cli_name(mode, CLI_MODES, i->mode);
    if (i->selector < 0)
        strcpy(selector, "given by the caller");
    else
        cli_name(selector, CLI_SELECTORS, i->selector);
    cli_json_fields(json,
                    "file %s bytes %ld format_version %d model %s config_hash %s selector %s "
                    "mode %s causal %i layers %d steps %d groups %d branches %d stored_layers %d "
                    "stored_groups %d heads %ld Nq %ld Nk %ld nq %ld nk %ld block_q %d block_k %d "
                    "order %s",
                    path, i->file_bytes, i->format_version, i->model[0] ? i->model : NULL,
                    i->config_hash[0] ? i->config_hash : NULL, i->selector < 0 ? NULL : selector,
                    mode, i->causal, i->layers, i->steps, i->groups, i->branches, i->stored_layers,
                    i->stored_groups, i->H, i->Nq, i->Nk, i->nq, i->nk, i->block_q, i->block_k,
                    order);
    cli_json_ints(json, "grid", i->layout.grid_q, 3);
    cli_json_fields(json,
                    "text_front %d text_back %d importance %s prompts %d warmup_frac %g "
                    "dense_first_layer %i",
                    i->layout.text_front_q, i->layout.text_back_q, importance, i->prompts,
                    i->warmup_frac, i->dense_first_layer);
    cli_json_open(json, "budgets", '[');
    for (int b = 0; b < i->budget_count; b++) {
        cli_json_real(json, NULL, i->budget_permille[b] / 1000.0);
        if (used < sizeof budgets)
            used += (size_t)snprintf(budgets + used, sizeof budgets - used, "%s%g", b ? ", " : "",
                                     i->budget_permille[b] / 1000.0);
    }
    cli_json_close(json);
    cli_json_reals(json, "works", work, i->budget_count);
    cli_name(tail, CLI_TAILS, i->tail);
    const int levels = cli_selector_has(i->selector, ESA_TRAIT_WEIGHS_TAIL) || i->fine;
    cli_json_fields(json, "tail %s fine %d exact_rows %d group_q %d group_k %d",
                    levels ? tail : NULL, i->fine, i->exact_rows, i->group_q, i->group_k);
    printf("file        %s, %.2f MB, format %d\n", path, 1e-6 * (double)i->file_bytes,
           (int)i->format_version);
    printf("model       %s%s%s%s\n", i->model[0] ? i->model : "not named",
           i->config_hash[0] ? " (" : "", i->config_hash, i->config_hash[0] ? ")" : "");
    printf("selector    %s, mode %s%s, blocks %dx%d, %d prompts averaged\n", selector, mode,
           i->causal ? ", causal" : "", (int)i->block_q, (int)i->block_k, (int)i->prompts);
    printf("run         %d layers, %d steps in %d groups, %d branches, %lld heads\n",
           (int)i->layers, (int)i->steps, (int)i->groups, (int)i->branches, (long long)i->H);
    printf("stored      %d layers, %d groups (warm-up %g of the steps, first layer %s)\n",
           (int)i->stored_layers, (int)i->stored_groups, i->warmup_frac,
           i->dense_first_layer ? "dense" : "sparse");
    printf("tokens      Nq %lld, Nk %lld: %lld x %lld blocks; order %s, grid %d x %d x %d, text %d "
           "in front, %d behind\n",
           (long long)i->Nq, (long long)i->Nk, (long long)i->nq, (long long)i->nk, order,
           (int)i->layout.grid_q[0], (int)i->layout.grid_q[1], (int)i->layout.grid_q[2],
           (int)i->layout.text_front_q, (int)i->layout.text_back_q);
    printf("importance  %s\n", importance);
    if (levels) printf("tail        %s, %d fine means per block\n", tail, (int)i->fine);
    if (levels) printf("exact rows  %d per query block\n", (int)i->exact_rows);
    if (i->group_q)
        printf("scores      of means of %d queries and %d keys\n", (int)i->group_q,
               (int)i->group_k);
    printf("%s%s\n",
           cli_selector_has(i->selector, ESA_TRAIT_WEIGHS_TAIL) ? "works       " : "budgets     ",
           budgets[0] ? budgets : "none prebuilt");
    if (!i->budget_count) return;
    printf("counted    ");
    for (int b = 0; b < i->budget_count; b++) printf("%s%.4f", b ? ", " : " ", work[b]);
    printf(" of dense attention, means, exact rows and dense calls included\n");
}

/* Entropy, kept mass and density per head of one cell: figures[3][H]. */
static void print_cell(const double *figures, int64_t H, cli_json *json)
{
    cli_table *table = cli_table_new(4, 0);
    cli_row(table, "head|entropy|kept mass|density");
    cli_json_open(json, "heads_of_cell", '[');
    for (int64_t h = 0; h < H; h++) {
        cli_row(table, "%lld|%.4f|%.4f|%.4f", (long long)h, figures[h], figures[H + h],
                figures[2 * H + h]);
        cli_json_open(json, NULL, '{');
        cli_json_fields(json, "entropy %g kept_mass %g density %g", figures[h], figures[H + h],
                        figures[2 * H + h]);
        cli_json_close(json);
    }
    cli_json_close(json);
    cli_table_print(table, stdout);
}

int cmd_masks_info(int argc, char **argv)
{
    const char *json_path = NULL;
    int64_t layer = -1, step = -1, branch = 0;
    double budget = 0.5;
    int words = 0, done;
    const cli_option options[] = {
        { "--layer", CLI_INT, &layer, "N", 0, 1e6, 0,
          "layer of a cell whose figures per head are shown; goes with --step" },
        { "--step", CLI_INT, &step, "N", 0, 1e6, 0,
          "denoising step of that cell; goes with --layer" },
        { "--branch", CLI_INT, &branch, "N", 0, 1e3, 0, "guidance branch of the cell (0)" },
        { "--budget", CLI_REAL, &budget, "X", 0, 1, 0,
          "budget of the cell (the first prebuilt one, else 0.5)" },
        { "--json", CLI_OUTPUT, &json_path, "FILE", 0, 0, 0, "also write what is printed as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    const int has_budget = cli_given(argc, argv, "--budget");
    int status = cli_options("esa masks info", "FILE [options]", "Describes a mask file.", options,
                             argc, argv, &words, &done);
    if (status || done) return status;
    if (words != 1) return cli_usage("masks info: %d files were given, expected 1", words);
    if ((layer < 0) != (step < 0)) return cli_usage("masks info: --layer and --step go together");
    esa_ctx *ctx;
    esa_mask_file *file = NULL;
    esa_mask_file_info info;
    info.struct_size = sizeof info;
    if ((status = cli_ctx_new(&ctx, 0)) != 0) return status;
    cli_json *json = cli_json_new();
    esa_status s = esa_mask_file_open(ctx, &file, argv[0]);
    if (!s) s = esa_mask_file_get_info(file, &info);
    /* The cell is read before anything is printed: a call that fails prints its message alone. */
    double *figures = NULL, work[16] = { 0 }, density = NAN;
    for (int b = 0; !s && b < info.budget_count; b++)
        s = esa_mask_file_work(file, &work[b], info.budget_permille[b] / 1000.0);
    if (!s && layer >= 0) {
        if (!has_budget && info.budget_count > 0) budget = info.budget_permille[0] / 1000.0;
        figures = calloc((size_t)info.H * 3, sizeof *figures);
        s = figures ? esa_mask_file_heads(file, figures, figures + info.H, figures + 2 * info.H,
                                          (int32_t)layer, (int32_t)step, (int32_t)branch, budget)
                    : ESA_ERR_MEMORY;
        if (!s)
            s = esa_mask_file_density(file, &density, (int32_t)layer, (int32_t)step,
                                      (int32_t)branch, budget);
    }
    if (s)
        status = cli_fail_esa(ctx, s, "masks info");
    else
        describe(&info, argv[0], work, json);
    if (!s && figures) {
        printf("\nlayer %lld, step %lld, branch %lld, budget %g (of this cell: %.4f)\n",
               (long long)layer, (long long)step, (long long)branch, budget, density);
        cli_json_real(json, "density_of_cell", density);
        print_cell(figures, info.H, json);
    }
    free(figures);
    const int saved = cli_json_save(json, status ? NULL : json_path);
    esa_mask_file_free(file);
    esa_ctx_free(ctx);
    return status ? status : saved;
}
