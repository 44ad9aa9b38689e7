/* experiment_config.c - the settings of an experiment: prompts, sizes, variants. config.json keeps
 * them; a later run must ask for the same.
 * SPDX-License-Identifier: Apache-2.0 */
#include "experiment/experiment.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_VIDEOS 1000 /* their names, 000 to 999, sort as their numbers do */

/* ---------------------------------------------------------------- prompts and variants */

/* Takes count built-in prompts from number `first` on. */
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
    /* Videos use prompts that the calibration has not seen, also with masks of another run. */
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
    if (count < 1)
        return cli_usage("%s: --eval-prompts was given %ld, expected at least 1, or a file", what,
                         count);
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

void experiment_variants(experiment *e)
{
    add_variant(e, METHOD_DENSE, 1);
    for (int m = 0; m < e->methods.count; m++)
        for (int b = 0; b < e->budgets.count; b++)
            add_variant(e, clip_method(EXPERIMENT_METHODS, e->methods.whole[m]),
                        e->budgets.real[b]);
}

int experiment_resolve(experiment *e, const char *what)
{
    int status = clip_resolve(&e->maker, &e->clip);
    if (status) return status;
    experiment_variants(e);
    status = get_prompts(e, what);
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

/* 1 if a method has other defaults than the others. */
static int defaults_differ(const experiment *e)
{
    for (int i = 0; i < e->methods.count; i++)
        if (clip_method_has(clip_method(EXPERIMENT_METHODS, e->methods.whole[i]), ESA_TRAIT_SPENDS))
            return 1;
    return 0;
}

static void json_given(cli_json *json, const char *key, int32_t value)
{
    if (value < 0)
        cli_json_text(json, key, NULL);
    else
        cli_json_int(json, key, value);
}

static void json_schedule(cli_json *json, const char *key, int32_t every)
{
    if (every == CLIP_RECOMMENDED || every == ESA_REFRESH_EARLY)
        cli_json_text(json, key, every == ESA_REFRESH_EARLY ? "early" : NULL);
    else
        cli_json_int(json, key, every);
}

/* Settings whose default depends on the method: the value that was given, else the default that all
 * methods share. null: each method has its own. */
static void json_defaults(cli_json *json, const experiment *e)
{
    const clip_request *c = &e->clip;
    const esa_session_params *s = &c->p.session; /* resolved as for entropy */
    const int differ = defaults_differ(e);
    const int first = differ ? c->dense_first_layer : s->dense_first_layer;
    json_schedule(json, "refresh", differ ? c->refresh_every : s->refresh_every);
    cli_json_real(json, "warmup", differ ? c->warmup : s->warmup_frac);
    if (first < 0)
        cli_json_text(json, "dense_first_layer", NULL);
    else
        cli_json_bool(json, "dense_first_layer", first);
    json_given(json, "exact_rows", c->exact_rows);
    json_schedule(json, "order_every", c->order_every);
    json_given(json, "share_branches", c->share_branches);
    cli_json_text(json, "score_groups", c->score_groups);
}

/* Carry: "default" if nothing was given and some method carries by itself; null: no method does. */
static void json_carry(cli_json *json, const experiment *e)
{
    const clip_request *c = &e->clip;
    char name[CLIP_CARRY_TEXT], format[32];
    int carries = 0;
    for (int i = 0; i < e->methods.count; i++) {
        clip_request one = *c;
        one.method = clip_method(EXPERIMENT_METHODS, e->methods.whole[i]);
        carries |= clip_anchors_of(&one).carry != ESA_CARRY_OFF;
    }
    const clip_anchors given = clip_anchors_of(c); /* resolved as for entropy */
    clip_carry_name(name, &given);
    cli_json_text(json, "carry", !carries ? NULL : c->carry ? name : "default");
    cli_json_text(json, "carry_format",
                  carries ? cli_name(format, CLIP_CARRY_FORMATS, c->carry_format) : NULL);
}

static const char *tail_name(char buffer[32], const experiment *e)
{
    const clip_request *c = &e->clip;
    if (c->tail < 0 && defaults_differ(e)) return "default";
    return cli_name(buffer, CLI_TAILS, c->tail < 0 ? c->p.session.attention.tail : c->tail);
}

static void json_settings(cli_json *json, const experiment *e)
{
    const clip_request *c = &e->clip;
    const esa_session_params *s = &c->p.session;
    const esa_model_info *info = &e->maker.info;
    char name[32], order[32], tail[32];
    cli_json_open(json, "settings", '{');
    cli_json_fields(json,
                    "model %s config_hash %s weights_hash %s frames %d height %d width %d "
                    "steps %d seed %ld guidance %g negative_prompt %s scheduler %s flow_shift %g",
                    info->name, info->config_hash, e->weights_hash, c->p.frames, c->p.height,
                    c->p.width, c->p.steps, (int64_t)c->p.seed, c->p.guidance, c->p.negative_prompt,
                    cli_name(name, CLIP_SCHEDULERS, c->p.scheduler), c->p.flow_shift);
    clip_noise_json(json, c);
    cli_json_open(json, "methods", '[');
    for (int i = 0; i < e->methods.count; i++)
        cli_json_text(json, NULL, cli_name(name, EXPERIMENT_METHODS, (int)e->methods.whole[i]));
    cli_json_close(json);
    cli_json_reals(json, "budgets", e->budgets.real, e->budgets.count);
    cli_json_fields(json, "tail %s order %s", tail_name(tail, e),
                    c->order < 0 ? "default" : cli_name(order, CLI_ORDERS, c->order));
    cli_json_reals(json, "window", c->window.real, c->window.count);
    cli_json_fields(json, "block %s samples %d cdf %g step_map %s", c->block, s->select.samples,
                    s->select.cdf_threshold, s->step_map ? "nearest" : "exact");
    json_defaults(json, e);
    json_carry(json, e);
    cli_json_reals(json, "dense_layers", c->dense_layers.real, c->dense_layers.count);
    if (c->eight) { /* else missing, as in runs of an older esa */
        cli_json_fields(json, "precision %d steps16_first %d steps16_last %d", 8, c->steps16_first,
                        c->steps16_last);
        cli_json_reals(json, "layers16", c->layers16.real, c->layers16.count);
    } else {
        cli_json_text(json, "precision", NULL);
    }
    cli_json_text(json, "masks", c->p.masks);
    json_lines(json, "calibration_prompts", &e->calibration);
    json_lines(json, "evaluation_prompts", &e->evaluation);
    cli_json_fields(json, "lpips_net %s lpips_weights %s",
                    e->net < 0 ? NULL : cli_name(name, EVALUATE_NETS, e->net), e->lpips_weights);
    cli_json_close(json);
}

/* ---------------------------------------------------------------- the same settings? */

/* A setting for the message: at most 79 characters of its JSON. */
static void show(char out[80], const json_t *v)
{
    char *text = v && !json_is_null(v) ? json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9))
                                       : NULL;
    if (json_is_number(v))
        snprintf(out, 80, "%.9g", json_number_value(v)); /* 5, not 5.0 */
    else
        snprintf(out, 80, "%.79s", text ? text : "nothing");
    free(text);
}

/* Compares the settings of an earlier run with those of this one. */
static int compare(const experiment *e, const json_t *old, json_t *now, const char *what)
{
    const char *key;
    json_t *v;
    json_object_foreach(now, key, v)
    {
        char before[80], asked[80];
        json_t *then = json_object_get(old, key);
        if (json_equal(then, v)) continue;
        if (!then && json_is_null(v)) continue; /* begun by an older esa, and not asked for now */
        /* With --skip-calibrate the command need not say how the masks were made. */
        if (e->skip_calibrate && strcmp(key, "calibration_prompts") == 0) continue;
        if (strcmp(key, "weights_hash") == 0) {
            if (!then) continue; /* begun by an older esa, which did not write it */
            return cli_fail("%s: '%s' was begun with other weights than those now in '%s'; give "
                            "another --tag, or remove the folder",
                            what, e->folder, e->maker.folder);
        }
        show(before, then);
        show(asked, v);
        return cli_fail("%s: '%s' was begun with %s %s, but this command asks for %s; give another "
                        "--tag, or remove the folder",
                        what, e->folder, key, before, asked);
    }
    return CLI_OK;
}

cli_json *experiment_about(const experiment *e)
{
    cli_json *json = cli_json_new();
    cli_json_fields(json, "format %d tag %s command %s", EXPERIMENT_FORMAT, e->tag, e->command);
    cli_machine_json(json, e->maker.ctx, NULL);
    return json;
}

int experiment_config(const experiment *e, const char *what, int write)
{
    char path[EXPERIMENT_PATH];
    experiment_path(e, path, "config.json");
    /* write: the file was compared before; compare: there is no file */
    if (cli_is_missing(path) != write) return CLI_OK;
    cli_json *json = experiment_about(e);
    json_settings(json, e);
    return experiment_agree(e, json, what);
}

int experiment_agree(const experiment *e, cli_json *json, const char *what)
{
    char path[EXPERIMENT_PATH];
    size_t bytes = 0;
    experiment_path(e, path, "config.json");
    if (cli_is_missing(path)) return experiment_save(e, json, "config.json", what);
    char *text = cli_json_take(json, &bytes);
    /* all numbers as reals: 5 equals 5.0 */
    json_t *now = text ? json_loadb(text, bytes, JSON_DECODE_INT_AS_REAL, NULL) : NULL,
           *old = now ? cli_json_load(path, NULL, JSON_DECODE_INT_AS_REAL, what) : NULL;
    int status = CLI_FAILED;
    if (!now)
        cli_fail("%s: out of memory", what);
    else if (old && cli_json_number(old, "format") != EXPERIMENT_FORMAT)
        cli_fail("%s: '%s' has another format than this esa writes; give another --tag", what,
                 path);
    else if (old)
        status = compare(e, cli_json_at(old, "settings"), cli_json_at(now, "settings"), what);
    json_decref(old);
    json_decref(now);
    free(text);
    return status;
}
