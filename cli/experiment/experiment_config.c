/* experiment_config.c - what an experiment is: prompts, sizes, variants; config.json, and whether a
 * later run asks for the same.
 * SPDX-License-Identifier: Apache-2.0 */
#include "experiment/experiment.h"
#include "core/json_reader.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MOST_VIDEOS 1000 /* their names, 000 to 999, sort as their numbers do */

/* ---------------------------------------------------------------- prompts and variants */

/* The built-in prompts from the `first` one on. */
static int built_in(cli_prompts *out, int64_t first, int64_t count, int tiny, const char *what)
{
    if (first + count > CLI_PROMPTS)
        return cli_fail("%s: %lld prompts for calibration and %lld for the videos are more than "
                        "the %d built-in ones; give files (--prompts, "
                        "--eval-prompts)",
                        what, (long long)first, (long long)count, CLI_PROMPTS);
    const int status = cli_prompts_get(out, NULL, NULL, first + count, tiny, what);
    if (status) return status;
    for (int64_t i = 0; i < first; i++) free(out->line[i]);
    memmove(out->line, out->line + first, (size_t)count * sizeof *out->line);
    out->count = count;
    return CLI_OK;
}

static int get_prompts(experiment *e, const char *what)
{
    const int tiny = clip_is_tiny(&e->maker);
    char *end;
    const long count = strtol(e->eval_prompts, &end, 10);
    int status = CLI_OK;
    /* Videos show prompts the masks have not seen, also where the masks came from elsewhere. */
    const int64_t seen = e->masks[0] && !e->prompts_file ? e->num_prompts : 0;
    if (e->masks[0] && !e->skip_calibrate)
        status = cli_prompts_get(&e->calibration, NULL, e->prompts_file, e->num_prompts, tiny,
                                 what);
    if (status) return status;
    if (*end || end == e->eval_prompts) {
        status = cli_prompts_get(&e->evaluation, NULL, e->eval_prompts, 0, tiny, what);
        if (!status && e->evaluation.count > MOST_VIDEOS)
            status = cli_fail("%s: '%s' holds %lld prompts, an experiment takes up to %d", what,
                              e->eval_prompts, (long long)e->evaluation.count, MOST_VIDEOS);
        return status;
    }
    if (count < 1) {
        cli_fail("%s: --eval-prompts was given %ld, expected at least 1, or a file", what, count);
        return CLI_USAGE;
    }
    return built_in(&e->evaluation, seen, count, tiny, what);
}

static void add_variant(experiment *e, int method, double budget)
{
    experiment_variant *v = &e->variant[e->variants++];
    char number[32], name[32];
    v->method = method;
    v->budget = budget;
    experiment_number(number, budget);
    if (method == METHOD_DENSE)
        snprintf(v->name, sizeof v->name, "dense");
    else if (method == METHOD_CACHED)
        snprintf(v->name, sizeof v->name, "b%s", number);
    else
        snprintf(v->name, sizeof v->name, "%s-b%s", cli_name(name, METHODS, method), number);
}

int experiment_resolve(experiment *e, const char *what)
{
    static const int methods[] = { METHOD_CACHED, METHOD_ENTROPY, METHOD_RF_V2, METHOD_ADA_BSA };
    clip_request_resolve(&e->clip, &e->maker);
    add_variant(e, METHOD_DENSE, 1);
    for (int m = 0; m < e->methods.count; m++)
        for (int b = 0; b < e->budgets.count; b++)
            add_variant(e, methods[e->methods.whole[m]], e->budgets.real[b]);
    const int status = get_prompts(e, what);
    return status ? status
                  : cli_model_weights(e->weights_hash, e->maker.folder, ESA_PART_ALL, what);
}

/* ---------------------------------------------------------------- config.json */

static void json_lines(cli_json *json, const char *key, const cli_prompts *prompts)
{
    cli_json_open(json, key, '[');
    for (int64_t i = 0; i < prompts->count; i++) cli_json_text(json, NULL, prompts->line[i]);
    cli_json_close(json);
}

static void json_list(cli_json *json, const char *key, const cli_list *list, int whole)
{
    cli_json_open(json, key, '[');
    for (int i = 0; i < list->count; i++) {
        if (whole)
            cli_json_int(json, NULL, list->whole[i]);
        else
            cli_json_real(json, NULL, list->real[i]);
    }
    cli_json_close(json);
}

static void json_settings(cli_json *json, const experiment *e)
{
    const clip_request *c = &e->clip;
    const esa_model_info *info = &e->maker.info;
    char name[32];
    cli_json_open(json, "settings", '{');
    cli_json_text(json, "model", info->name);
    cli_json_text(json, "config_hash", info->config_hash);
    cli_json_text(json, "weights_hash", e->weights_hash);
    cli_json_int(json, "frames", c->frames);
    cli_json_int(json, "height", c->height);
    cli_json_int(json, "width", c->width);
    cli_json_int(json, "steps", c->steps);
    cli_json_int(json, "seed", c->seed);
    cli_json_real(json, "guidance", c->guidance);
    cli_json_text(json, "negative_prompt", c->negative);
    cli_json_text(json, "scheduler", cli_name(name, "model|unipc|unipc-0.36|euler", c->scheduler));
    cli_json_real(json, "flow_shift", c->shift);
    cli_json_open(json, "methods", '[');
    for (int i = 0; i < e->methods.count; i++)
        cli_json_text(json, NULL, cli_name(name, EXPERIMENT_METHODS, (int)e->methods.whole[i]));
    cli_json_close(json);
    json_list(json, "budgets", &e->budgets, 0);
    cli_json_text(json, "tail", cli_name(name, CLI_TAILS, c->tail));
    cli_json_text(json, "order", c->order < 0 ? "default" : cli_name(name, CLI_ORDERS, c->order));
    json_list(json, "window", &c->window, 1);
    cli_json_text(json, "block", c->block);
    cli_json_int(json, "samples", c->samples);
    cli_json_real(json, "cdf", c->cdf);
    cli_json_int(json, "refresh", c->refresh);
    cli_json_text(json, "step_map", c->step_map ? "nearest" : "exact");
    cli_json_real(json, "warmup", c->warmup);
    cli_json_bool(json, "dense_first_layer", (int)c->dense_first);
    json_list(json, "dense_layers", &c->dense_layers, 1);
    cli_json_text(json, "masks", c->masks);
    json_lines(json, "calibration_prompts", &e->calibration);
    json_lines(json, "evaluation_prompts", &e->evaluation);
    cli_json_text(json, "lpips_net", e->net < 0 ? NULL : cli_name(name, EVALUATE_NETS, e->net));
    cli_json_text(json, "lpips_weights", e->lpips_weights);
    cli_json_close(json);
}

/* ---------------------------------------------------------------- the same settings? */

static void show(char out[80], const cli_value *v)
{
    if (!v)
        snprintf(out, 80, "nothing");
    else if (v->type == CLI_JSON_NUMBER)
        snprintf(out, 80, "%g", v->number);
    else if (v->type == CLI_JSON_BOOL)
        snprintf(out, 80, "%s", v->number != 0 ? "true" : "false");
    else if (v->type == CLI_JSON_TEXT)
        snprintf(out, 80, "'%.70s'", v->text);
    else if (v->type == CLI_JSON_ARRAY) {
        char entry[80];
        size_t used = (size_t)snprintf(out, 80, "[");
        for (const cli_value *e = v->child; e && used < 60; e = e->next) {
            show(entry, e);
            used += (size_t)snprintf(out + used, 80 - used, "%.16s%s", entry, e->next ? ", " : "");
        }
        if (used < 78) snprintf(out + used, 80 - used, "]");
    } else
        snprintf(out, 80, "nothing");
}

static int equal(const cli_value *a, const cli_value *b)
{
    if (!a || !b || a->type != b->type || a->count != b->count || a->number != b->number)
        return a == b;
    if (a->type == CLI_JSON_TEXT && strcmp(a->text, b->text) != 0) return 0;
    for (a = a->child, b = b->child; a; a = a->next, b = b->next)
        if (!equal(a, b)) return 0;
    return 1;
}

/* Settings of a run before against those of this one. */
static int compare(const experiment *e, const cli_value *old, const cli_value *now,
                   const char *what)
{
    for (const cli_value *v = now->child; v; v = v->next) {
        char before[80], asked[80];
        const cli_value *then = cli_value_at(old, v->key);
        if (equal(then, v)) continue;
        /* Whoever says that the masks are there need not say how they were made. */
        if (e->skip_calibrate && strcmp(v->key, "calibration_prompts") == 0) continue;
        if (strcmp(v->key, "weights_hash") == 0) {
            if (!then) continue; /* begun by an esa that did not look */
            return cli_fail("%s: '%s' was begun with other weights than those that are in '%s' "
                            "now; give another --tag, or remove the folder",
                            what, e->folder, e->maker.folder);
        }
        show(before, then);
        show(asked, v);
        return cli_fail("%s: '%s' was begun with %s %s, now %s is asked for; give another --tag, "
                        "or remove the folder",
                        what, e->folder, v->key, before, asked);
    }
    return CLI_OK;
}

int experiment_config(const experiment *e, const char *what, int write)
{
    char path[EXPERIMENT_PATH], error[160];
    struct stat about;
    size_t bytes = 0;
    experiment_path(e, path, "config.json");
    const int begun = stat(path, &about) == 0;
    if (begun == write) return CLI_OK; /* compared before the first clip; nothing to compare */
    cli_json *json = cli_json_new();
    cli_json_int(json, "format", EXPERIMENT_FORMAT);
    cli_json_text(json, "tag", e->tag);
    cli_json_text(json, "command", e->command);
    cli_machine_json(json, e->maker.ctx, NULL);
    json_settings(json, e);
    if (!begun) return experiment_save(e, json, "config.json", what);
    char *text = cli_json_take(json, &bytes);
    cli_value *now = text ? cli_value_parse(text, bytes, error) : NULL,
              *old = now ? cli_value_load(path, NULL, what) : NULL;
    int status = CLI_FAILED;
    if (!now)
        cli_fail("%s: out of memory", what);
    else if (old && cli_value_number(old, "format") != EXPERIMENT_FORMAT)
        cli_fail("%s: '%s' is of another format than this esa writes; give another --tag", what,
                 path);
    else if (old)
        status = compare(e, cli_value_at(old, "settings"), cli_value_at(now, "settings"), what);
    cli_value_free(old);
    cli_value_free(now);
    free(text);
    return status;
}
