/* report_masks.c - a mask file as JSON for the page: density, entropy and kept mass of every cell
 * and head, and the mask bits.
 * SPDX-License-Identifier: Apache-2.0 */
#include "report/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <esa/esa_session.h>

/* Which layers and step groups a file stores, and which of them the page shows as pictures. */
typedef struct axes {
    int32_t *layers, *groups; /* [layer_count], [group_count] */
    int32_t *first, *last;    /* [groups of the file]: first and last step of a group */
    int layer_count, group_count;
    int32_t *shown_layers, *shown_groups;
    int shown_layer_count, shown_group_count;
} axes;

static void axes_free(axes *a)
{
    free(a->layers);
    free(a->groups);
    free(a->first);
    free(a->last);
    free(a->shown_layers);
    free(a->shown_groups);
}

/* The group of a step, as docs/mask-files.md defines it. */
static int32_t group_of(const esa_mask_file_info *i, int32_t step)
{
    return (int32_t)((int64_t)step * i->groups / i->steps);
}

static int axes_find(axes *a, const esa_mask_file *file, const esa_mask_file_info *i)
{
    a->layers = calloc((size_t)i->layers, sizeof *a->layers);
    a->shown_layers = calloc((size_t)i->layers, sizeof *a->shown_layers);
    a->groups = calloc((size_t)i->groups, sizeof *a->groups);
    a->shown_groups = calloc((size_t)i->groups, sizeof *a->shown_groups);
    a->first = calloc((size_t)i->groups, sizeof *a->first);
    a->last = calloc((size_t)i->groups, sizeof *a->last);
    if (!a->layers || !a->groups || !a->first || !a->last || !a->shown_layers || !a->shown_groups)
        return cli_fail(REPORT_WHAT ": out of memory");
    for (int32_t s = i->steps - 1; s >= 0; s--) a->first[group_of(i, s)] = s;
    for (int32_t s = 0; s < i->steps; s++) a->last[group_of(i, s)] = s;
    for (int32_t layer = 0; layer < i->layers; layer++) {
        int stored = 0;
        for (int32_t g = 0; g < i->groups && !stored; g++)
            stored = esa_mask_file_stored(file, layer, a->last[g]);
        if (stored) a->layers[a->layer_count++] = layer;
    }
    for (int32_t g = 0; g < i->groups && a->layer_count; g++)
        if (esa_mask_file_stored(file, a->layers[0], a->last[g])) a->groups[a->group_count++] = g;
    return CLI_OK;
}

/* Picks count of all evenly, including both ends. */
static int thin(int32_t *out, const int32_t *all, int total, int count)
{
    if (count > total) count = total;
    if (count < 1) count = 1;
    for (int k = 0; k < count; k++)
        out[k] = all[count == 1 ? total / 2 : (int)((int64_t)k * (total - 1) / (count - 1))];
    return count;
}

/* Drops steps first, because they look alike, then layers. */
static void axes_show(axes *a, int64_t cell_bytes, int64_t limit)
{
    const int64_t cells = cell_bytes > 0 && limit / cell_bytes > 1 ? limit / cell_bytes : 1;
    int layers = a->layer_count, groups = a->group_count;
    while ((int64_t)layers * groups > cells && groups > 4) groups--;
    while ((int64_t)layers * groups > cells && layers > 1) layers--;
    while ((int64_t)layers * groups > cells && groups > 1) groups--;
    a->shown_layer_count = thin(a->shown_layers, a->layers, a->layer_count, layers);
    a->shown_group_count = thin(a->shown_groups, a->groups, a->group_count, groups);
}

/* Four digits are enough for colours and keep the page small. */
static void figures(cli_json *json, const double *x, int64_t n)
{
    cli_json_open(json, NULL, '[');
    for (int64_t h = 0; h < n; h++)
        cli_json_real(json, NULL, isfinite(x[h]) ? round(x[h] * 1e4) / 1e4 : NAN);
    cli_json_close(json);
}

enum { ENTROPY = 0, MASS = 1, DENSITY = 2, FIGURES = 3 };

/* Fills x[FIGURES][branch][layer][group][head] with the figures at one budget. */
static esa_status measure(double *x, int64_t plane, esa_mask_file *file,
                          const esa_mask_file_info *i, const axes *a, double budget)
{
    const int64_t cells = plane / i->H;
    esa_status s = ESA_OK;
    for (int64_t c = 0; c < cells && !s; c++) {
        const int64_t g = c % a->group_count, layer = c / a->group_count % a->layer_count,
                      branch = c / a->group_count / a->layer_count;
        double *at = x + c * i->H;
        s = esa_mask_file_heads(file, at, at + MASS * plane, at + DENSITY * plane, a->layers[layer],
                                a->last[a->groups[g]], (int32_t)branch, budget);
    }
    return s;
}

/* Adds one figure as [branch][layer][group][head]. */
static void table(cli_json *json, const char *key, const double *x, const esa_mask_file_info *i,
                  const axes *a)
{
    cli_json_open(json, key, '[');
    for (int32_t b = 0; b < i->branches; b++) {
        cli_json_open(json, NULL, '[');
        for (int layer = 0; layer < a->layer_count; layer++) {
            cli_json_open(json, NULL, '[');
            for (int g = 0; g < a->group_count; g++, x += i->H) figures(json, x, i->H);
            cli_json_close(json);
        }
        cli_json_close(json);
    }
    cli_json_close(json);
}

static esa_status bits(cli_json *json, esa_mask_file *file, const esa_mask_file_info *i,
                       const axes *a, double budget)
{
    const size_t bytes = (size_t)(i->H * i->nq * ((i->nk + 7) / 8));
    const size_t all = bytes * (size_t)i->branches * (size_t)a->shown_layer_count *
                       (size_t)a->shown_group_count;
    uint8_t *cells = malloc(all ? all : 1);
    report_text text = { 0 };
    esa_status s = cells ? ESA_OK : ESA_ERR_MEMORY;
    size_t at = 0;
    for (int32_t b = 0; b < i->branches && !s; b++)
        for (int layer = 0; layer < a->shown_layer_count && !s; layer++)
            for (int g = 0; g < a->shown_group_count && !s; g++, at += bytes) {
                esa_mask *mask = NULL;
                s = esa_mask_file_get(file, &mask, a->shown_layers[layer],
                                      a->last[a->shown_groups[g]], b, budget);
                if (!s) s = esa_mask_to_bits(mask, cells + at);
                esa_mask_free(mask);
            }
    if (!s) {
        report_base64(&text, cells, all);
        if (text.failed)
            s = ESA_ERR_MEMORY;
        else
            cli_json_text(json, "bits", text.text ? text.text : "");
    }
    report_text_free(&text);
    free(cells);
    return s;
}

static void describe(cli_json *json, const char *path, const esa_mask_file_info *i, const axes *a)
{
    const char *slash = strrchr(path, '/');
    char order[32], text[400];
    cli_name(order, CLI_ORDERS, i->layout.order);
    cli_json_text(json, "name", slash ? slash + 1 : path);
    snprintf(text, sizeof text,
             "%s: %lld query × %lld key blocks of %d × %d tokens, order %s, %d prompt%s averaged, "
             "%.1f MB.",
             i->model[0] ? i->model : "no model named", (long long)i->nq, (long long)i->nk,
             (int)i->block_q, (int)i->block_k, order, (int)i->prompts, i->prompts == 1 ? "" : "s",
             1e-6 * (double)i->file_bytes);
    cli_json_text(json, "about", text);
    if (a->shown_layer_count < a->layer_count || a->shown_group_count < a->group_count) {
        snprintf(text, sizeof text,
                 "The file is large: pictures of %d of %d layers and %d of %d step groups are in "
                 "this page (--mask-mb raises that).",
                 a->shown_layer_count, a->layer_count, a->shown_group_count, a->group_count);
        cli_json_text(json, "note", text);
    }
    cli_json_fields(json,
                    "layer_count %d heads %ld branches %d nq %ld nk %ld block_q %d block_k %d "
                    "tokens_q %ld tokens_k %ld",
                    i->layers, i->H, i->branches, i->nq, i->nk, i->block_q, i->block_k, i->Nq,
                    i->Nk);
    cli_json_ints(json, "grid", i->layout.grid_q, 3);
    cli_json_int(json, "text_front", i->layout.text_front_q);
    /* Raster and tile keep the tokens of a frame together; the other orders mix frames. */
    cli_json_bool(json, "frames_lie_together",
                  i->layout.grid_q[0] > 1 &&
                      (i->layout.order == ESA_ORDER_RASTER || i->layout.order == ESA_ORDER_TILE) &&
                      i->Nq == i->Nk);
    cli_json_ints(json, "layers", a->layers, a->layer_count);
    cli_json_ints(json, "groups", a->groups, a->group_count);
    cli_json_ints(json, "shown_layers", a->shown_layers, a->shown_layer_count);
    cli_json_ints(json, "shown_groups", a->shown_groups, a->shown_group_count);
    cli_json_open(json, "group_steps", '[');
    for (int g = 0; g < i->groups; g++) {
        const int32_t ends[2] = { a->first[g], a->last[g] };
        cli_json_ints(json, NULL, ends, 2);
    }
    cli_json_close(json);
}

/* Without prebuilt budgets, the page shows the default of every command. */
static int budgets_of(double *budget, const esa_mask_file_info *i)
{
    if (i->budget_count == 0) budget[0] = 0.5;
    for (int b = 0; b < i->budget_count; b++) budget[b] = i->budget_permille[b] / 1000.0;
    return i->budget_count ? i->budget_count : 1;
}

static int file_json(cli_json *json, esa_ctx *ctx, esa_mask_file *file, const esa_mask_file_info *i,
                     axes *a, const char *path, int64_t limit)
{
    double budget[16];
    const int budgets = budgets_of(budget, i);
    int status = axes_find(a, file, i);
    if (status) return status;
    if (a->layer_count == 0 || a->group_count == 0)
        return cli_fail(REPORT_WHAT ": '%s' holds no masks: every layer and step in it runs dense",
                        path);
    axes_show(a, i->H * i->nq * ((i->nk + 7) / 8) * i->branches * budgets, limit);
    cli_json_open(json, NULL, '{');
    describe(json, path, i, a);
    const int64_t plane = (int64_t)i->branches * a->layer_count * a->group_count * i->H;
    double *x = calloc((size_t)plane, FIGURES * sizeof *x);
    esa_status s = x ? ESA_OK : ESA_ERR_MEMORY;
    cli_json_open(json, "budgets", '[');
    for (int b = 0; b < budgets && !s; b++) {
        s = measure(x, plane, file, i, a, budget[b]);
        cli_json_open(json, NULL, '{');
        cli_json_real(json, "budget", budget[b]);
        table(json, "density", x + DENSITY * plane, i, a);
        table(json, "mass", x + MASS * plane, i, a);
        if (!s) s = bits(json, file, i, a, budget[b]);
        cli_json_close(json);
    }
    cli_json_close(json);
    /* The same at every budget; unknown without importance. */
    if (!s && isfinite(x[ENTROPY * plane])) table(json, "entropy", x + ENTROPY * plane, i, a);
    free(x);
    cli_json_close(json);
    return cli_status(ctx, s, REPORT_WHAT);
}

int report_masks_json(cli_json *json, esa_ctx *ctx, const char *path, int64_t limit)
{
    esa_mask_file *file = NULL;
    esa_mask_file_info info = { .struct_size = sizeof info };
    axes a = { 0 };
    esa_status s = esa_mask_file_open(ctx, &file, path);
    if (!s) s = esa_mask_file_get_info(file, &info);
    const int status = !s ? file_json(json, ctx, file, &info, &a, path, limit)
                          : cli_fail_esa(ctx, s, REPORT_WHAT);
    axes_free(&a);
    esa_mask_file_free(file);
    return status;
}
