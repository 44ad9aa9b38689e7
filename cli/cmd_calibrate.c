/* cmd_calibrate.c - `esa calibrate`: dense runs over a few prompts, importance recorded at every
 * layer and step, masks for each budget.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Recordings are integer sums (docs/mask-files.md), so it does not matter in which order, in how
 * many runs and on how many machines the prompts are recorded: the mask file is the same, bit for
 * bit. docs/calibrate.md is the manual. */
#include "clip/calibrate.h"
#include "core/folders.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char what[] = "calibrate";

typedef struct job {
    calibrate_options *o;
    clip_maker maker;
    calibrate_size size;
    calibrate_work work;
    cli_prompts prompts; /* all of them; a shard takes every shard_count-th */
    int64_t count;       /* of this run */
    char *settings;
    double seconds, select_seconds; /* of the prompts recorded now */
    int64_t recorded;               /* prompts recorded now */
} job;

static int64_t prompt_of(const job *j, int64_t i)
{
    return j->o->shard_count ? j->o->shard_index + i * j->o->shard_count : i;
}

/* ---------------------------------------------------------------- settings */

/* Everything the recorded bits depend on, as text: two runs with the same text may be one. */
static int make_settings(job *j)
{
    const calibrate_options *o = j->o;
    const clip_request *r = &o->clip;
    char name[32];
    size_t bytes;
    char weights[32];
    const int status = cli_model_weights(weights, j->maker.folder,
                                         ESA_PART_TRANSFORMER | ESA_PART_TEXT, what);
    if (status) return status;
    cli_json *json = cli_json_new();
    cli_json_text(json, "format", "esa.calibration");
    cli_json_int(json, "version", 1);
    cli_json_text(json, "model", j->maker.info.name);
    cli_json_text(json, "config_hash", j->maker.info.config_hash);
    cli_json_text(json, "weights_hash", weights);
    cli_json_text(json, "folder", j->maker.folder);
    cli_json_int(json, "frames", r->frames);
    cli_json_int(json, "height", r->height);
    cli_json_int(json, "width", r->width);
    cli_json_int(json, "recorded_steps", r->steps);
    cli_json_int(json, "step_groups", r->record_groups ? r->record_groups : r->steps);
    cli_json_bool(json, "per_branch", r->per_branch);
    cli_json_real(json, "guidance", r->guidance);
    cli_json_text(json, "negative_prompt", r->negative);
    cli_json_int(json, "scheduler", r->scheduler);
    cli_json_real(json, "flow_shift", r->shift);
    cli_json_text(json, "order", cli_name(name, CLI_ORDERS, clip_order(r)));
    cli_json_open(json, "window", '[');
    for (int i = 0; i < r->window.count; i++) cli_json_int(json, NULL, r->window.whole[i]);
    cli_json_close(json);
    cli_json_text(json, "block", clip_block(r, &j->maker.info));
    cli_json_int(json, "samples", r->samples);
    cli_json_open(json, "dense_layers", '[');
    for (int i = 0; i < r->dense_layers.count; i++)
        cli_json_int(json, NULL, r->dense_layers.whole[i]);
    cli_json_close(json);
    cli_json_int(json, "seed", o->seed);
    cli_json_int(json, "shard", o->shard_index);
    cli_json_int(json, "shards", o->shard_count);
    cli_json_open(json, "prompts", '[');
    for (int64_t i = 0; i < j->count; i++)
        cli_json_text(json, NULL, j->prompts.line[prompt_of(j, i)]);
    cli_json_close(json);
    j->settings = cli_json_take(json, &bytes);
    return j->settings ? CLI_OK : cli_fail("%s: out of memory", what);
}

/* ---------------------------------------------------------------- recording */

static int record_prompts(job *j)
{
    clip_request r = j->o->clip;
    char path[CALIBRATE_PATH + 32], label[64];
    for (int64_t i = j->work.done; i < j->count; i++) {
        clip_record record;
        calibrate_recording(path, &j->work, i / j->size.prompts_per_recording);
        snprintf(label, sizeof label, "prompt %lld/%lld", (long long)i + 1, (long long)j->count);
        r.prompt = j->prompts.line[prompt_of(j, i)];
        r.seed = j->o->seed + prompt_of(j, i);
        r.record = path;
        const int status = clip_make(&j->maker, NULL, &record, &r, label, j->count - i - 1, 0);
        if (status == CLIP_INTERRUPTED)
            cli_fail("%s: interrupted; %lld of %lld prompts are recorded in '%s', the same command "
                     "goes on from there",
                     what, (long long)i, (long long)j->count, j->work.folder);
        if (status) return status;
        j->recorded++;
        j->seconds += record.stats.seconds;
        j->select_seconds += record.stats.session.select_seconds;
        clip_record_free(&record);
    }
    return CLI_OK;
}

/* ---------------------------------------------------------------- results */

static void build_settings(esa_mask_build *b, const calibrate_options *o)
{
    *b = esa_mask_build_default();
    b->importance = o->importance;
    b->budgets = o->budgets.real;
    b->budget_count = o->budgets.count;
    b->store_dense = o->store_dense;
    b->dense_first_layer = (int32_t)o->clip.dense_first;
    b->warmup_frac = o->clip.warmup;
    b->steps = o->record_steps ? (int32_t)o->record_steps : 0;
}

static int move(const char *from, const char *to)
{
    return rename(from, to) == 0
               ? CLI_OK
               : cli_fail("%s: '%s' cannot be written: %s", what, to, strerror(errno));
}

/* The settings go first, the recording that says "finished" last. */
static int finish_shard(job *j)
{
    char from[CALIBRATE_PATH + 32], to[CALIBRATE_PATH + 64];
    calibrate_shard_file(to, &j->work, -1);
    int status = cli_write_file(to, j->settings, strlen(j->settings));
    for (int64_t i = j->size.recordings - 1; i >= 0 && !status; i--) {
        calibrate_recording(from, &j->work, i);
        calibrate_shard_file(to, &j->work, i);
        status = move(from, to);
    }
    return status;
}

/* Made in the work folder, so that a run killed meanwhile leaves nothing elsewhere, then moved.
 * What is behind a link is replaced where it is. */
static int finish_masks(job *j)
{
    char path[CALIBRATE_PATH + 32],
        (*name)[CALIBRATE_PATH + 32] = calloc((size_t)j->size.recordings, sizeof *name);
    const char **names = calloc((size_t)j->size.recordings, sizeof *names);
    struct stat about;
    esa_mask_build build;
    int status = name && names ? CLI_OK : cli_fail("%s: out of memory", what);
    for (int64_t i = 0; i < j->size.recordings && !status; i++) {
        calibrate_recording(name[i], &j->work, i);
        names[i] = name[i];
    }
    const int linked = lstat(j->work.target, &about) == 0 && S_ISLNK(about.st_mode);
    snprintf(path, sizeof path, "%s/masks", j->work.folder);
    build_settings(&build, j->o);
    if (!status) {
        const esa_status built = esa_mask_file_build(j->maker.ctx, linked ? j->work.target : path,
                                                     names, (int32_t)j->size.recordings, &build);
        if (built != ESA_OK) status = cli_fail_esa(j->maker.ctx, built, what);
    }
    if (!status && !linked) status = move(path, j->work.target);
    if (!status && j->o->keep_recording) {
        snprintf(path, sizeof path, "%s.recording", j->work.target);
        const esa_status merged = esa_recording_merge(j->maker.ctx, path, names,
                                                      (int32_t)j->size.recordings);
        if (merged != ESA_OK) status = cli_fail_esa(j->maker.ctx, merged, what);
    }
    free(name);
    free(names);
    return status;
}

/* Means over all cells and heads of one budget. */
static esa_status budget_means(esa_mask_file *file, const esa_mask_file_info *info, double budget,
                               double *mass, double *density, double *entropy)
{
    double *heads = calloc((size_t)info->H * 3, sizeof *heads);
    int64_t cells = 0;
    esa_status status = heads ? ESA_OK : ESA_ERR_MEMORY;
    *mass = *density = *entropy = 0;
    for (int32_t b = 0; b < info->branches; b++)
        for (int32_t l = 0; l < info->layers; l++)
            for (int32_t t = 0; t < info->steps && status == ESA_OK; t++) {
                if (!esa_mask_file_stored(file, l, t)) continue;
                status = esa_mask_file_heads(file, heads, heads + info->H, heads + 2 * info->H, l,
                                             t, b, budget);
                for (int64_t h = 0; h < info->H; h++) {
                    *entropy += heads[h] / (double)info->H;
                    *mass += heads[info->H + h] / (double)info->H;
                    *density += heads[2 * info->H + h] / (double)info->H;
                }
                cells++;
            }
    free(heads);
    *entropy /= (double)cells;
    *mass /= (double)cells;
    *density /= (double)cells;
    return status;
}

static void json_result(job *j, const esa_mask_file_info *info, cli_json *json)
{
    const clip_request *r = &j->o->clip;
    cli_machine_json(json, j->maker.ctx, NULL);
    cli_json_text(json, "model", j->maker.info.name);
    cli_json_text(json, "config_hash", j->maker.info.config_hash);
    cli_json_text(json, "file", j->work.target);
    cli_json_int(json, "frames", r->frames);
    cli_json_int(json, "height", r->height);
    cli_json_int(json, "width", r->width);
    cli_json_int(json, "steps",
                 info                 ? info->steps
                 : j->o->record_steps ? j->o->record_steps
                                      : r->steps);
    cli_json_int(json, "recorded_steps", r->steps);
    cli_json_int(json, "step_groups", r->record_groups ? r->record_groups : r->steps);
    cli_json_int(json, "samples", r->samples);
    cli_json_int(json, "tokens", j->size.tokens);
    cli_json_int(json, "prompts", j->count);
    cli_json_int(json, "prompts_recorded_now", j->recorded);
    cli_json_real(json, "seconds", j->seconds);
    cli_json_real(json, "seconds_per_prompt",
                  j->recorded ? j->seconds / (double)j->recorded : (double)NAN);
    cli_json_real(json, "record_seconds", j->select_seconds);
    cli_json_int(json, "bytes",
                 info ? info->file_bytes : j->size.recordings * j->size.recording_bytes);
}

static int describe_masks(job *j)
{
    static const char *const head[] = { "budget", "density", "kept mass" };
    esa_ctx *ctx = j->maker.ctx;
    esa_mask_file *file = NULL;
    esa_mask_file_info info = { .struct_size = sizeof info };
    cli_json *json = cli_json_new();
    cli_table *table = cli_table_new(3, 0);
    esa_status status = esa_mask_file_open(ctx, &file, j->work.target);
    if (status == ESA_OK) status = esa_mask_file_get_info(file, &info);
    json_result(j, &info, json);
    cli_json_open(json, "budgets", '[');
    for (int i = 0; i < 3; i++) cli_cell(table, "%s", head[i]);
    double entropy = NAN;
    for (int32_t b = 0; status == ESA_OK && b < info.budget_count; b++) {
        double mass, density;
        const double budget = info.budget_permille[b] / 1000.0;
        status = budget_means(file, &info, budget, &mass, &density, &entropy);
        cli_cell(table, "%g", budget);
        cli_cell(table, "%.3f", density);
        cli_cell(table, "%.1f %%", 100 * mass);
        cli_json_open(json, NULL, '{');
        cli_json_real(json, "budget", budget);
        cli_json_real(json, "density", density);
        cli_json_real(json, "kept_mass", mass);
        cli_json_close(json);
    }
    cli_json_close(json);
    cli_json_real(json, "entropy", entropy);
    esa_mask_file_free(file);
    if (status != ESA_OK) {
        cli_json_save(json, NULL);
        cli_table_print(table, stderr);
        return cli_fail_esa(ctx, status, what);
    }
    cli_table_print(table, stdout);
    printf("\n%s: %.2f MB, %lld prompts, %d steps in %d groups, %d of %d layers; mean entropy of a "
           "head %.3f\n",
           j->work.target, 1e-6 * (double)info.file_bytes, (long long)j->count, (int)info.steps,
           (int)info.groups, (int)info.stored_layers, (int)info.layers, entropy);
    return cli_json_save(json, j->o->json);
}

/* What joins the shards, with the options that make the same file as one run. */
static int describe_shard(job *j)
{
    const calibrate_options *o = j->o;
    char name[32];
    printf("%s: %s, %lld prompts; when all %d shards are there:\n  esa masks merge "
           "'%s'.shard-*-of-%d*.recording --out '%s' --budgets ",
           j->work.target, j->work.complete ? "complete already" : "complete", (long long)j->count,
           o->shard_count, o->output, o->shard_count, o->output);
    for (int i = 0; i < o->budgets.count; i++) printf("%s%g", i ? "," : "", o->budgets.real[i]);
    printf(" --importance %s --warmup-frac %g --dense-first-layer %lld%s",
           cli_name(name, "none|u8|f16", o->importance), o->clip.warmup,
           (long long)o->clip.dense_first, o->store_dense ? " --store-dense" : "");
    if (o->record_steps) printf(" --steps %lld", (long long)o->record_steps);
    printf("\n");
    if (!o->json) return CLI_OK;
    cli_json *json = cli_json_new();
    json_result(j, NULL, json);
    return cli_json_save(json, o->json);
}

/* ---------------------------------------------------------------- the command */

static int with_model(job *j)
{
    calibrate_options *o = j->o;
    char folder[CALIBRATE_PATH];
    clip_request_resolve(&o->clip, &j->maker);
    if (o->record_steps && o->record_steps == o->clip.steps) o->record_steps = 0;
    if (o->record_steps) { /* the runs have fewer steps than the file will serve */
        const int64_t served = o->clip.steps;
        o->clip.steps = o->record_steps;
        o->record_steps = served;
        if (o->clip.steps > served)
            return cli_fail("%s: --record-steps %lld are more than the %lld steps of --steps", what,
                            (long long)o->clip.steps, (long long)served);
    }
    if (o->clip.record_groups > o->clip.steps)
        return cli_fail("%s: --step-groups %lld are more than the %lld steps that are recorded",
                        what, (long long)o->clip.record_groups, (long long)o->clip.steps);
    const int64_t served = o->record_steps ? o->record_steps : o->clip.steps;
    if (!o->store_dense && ceil(o->clip.warmup * (double)served - 1e-9) >= (double)served)
        return cli_fail("%s: with --warmup %g all %lld steps run dense, nothing would be stored",
                        what, o->clip.warmup, (long long)served);
    int status = cli_prompts_get(&j->prompts, NULL, o->prompts_file, o->num_prompts,
                                 clip_is_tiny(&j->maker), what);
    if (status) return status;
    j->count = o->shard_count
                   ? (j->prompts.count - o->shard_index + o->shard_count - 1) / o->shard_count
                   : j->prompts.count;
    if (j->count < 1)
        return cli_fail("%s: shard %d of %d has no prompt, there are %lld", what, o->shard_index,
                        o->shard_count, (long long)j->prompts.count);
    status = calibrate_measure(&j->size, o, &j->maker.info, j->count);
    if (!status) status = make_settings(j);
    if (!status) status = calibrate_work_open(&j->work, o, j->settings, &j->size);
    /* it may lie beside the masks, in a folder that was just made */
    if (!status) status = cli_file_ready(o->json, what);
    if (!status && !j->work.complete) {
        snprintf(folder, sizeof folder, "%s", j->work.folder);
        status = calibrate_announce(&j->size, o, &j->maker.info, j->count, j->work.done, folder,
                                    j->work.bytes);
        if (!status) status = record_prompts(j);
        if (!status) status = o->shard_count ? finish_shard(j) : finish_masks(j);
        if (!status) calibrate_work_remove(&j->work);
    }
    if (!status) status = o->shard_count ? describe_shard(j) : describe_masks(j);
    return status;
}

static int usage(const char *sentence)
{
    cli_fail("%s: %s", what, sentence);
    return CLI_USAGE;
}

int cmd_calibrate(int argc, char **argv)
{
    calibrate_options o = { .clip = clip_request_default(),
                            .num_prompts = 5,
                            .importance = ESA_IMPORTANCE_U8,
                            .budgets = { 3, { 0.7, 0.5, 0.3 }, { 0 } } };
    cli_option table[CLIP_MAX_OPTIONS];
    int done;
    const cli_option own[] = {
        { "--model", CLI_TEXT, &o.model, "FOLDER|NAME", 0, 0, 0,
          "a diffusers folder, or wan-tiny, wan-t2v-1.3b, wan-t2v-14b (wan-tiny)" },
        { "--output", CLI_TEXT, &o.output, "FILE", 0, 0, 0,
          "the mask file; folders on the way are made; required" },
        { "--prompts", CLI_TEXT, &o.prompts_file, "FILE", 0, 0, 0, "one prompt per line" },
        { "--num-prompts", CLI_INT, &o.num_prompts, "N", 1, CLI_PROMPTS, 0,
          "the first N built-in prompts (5)" },
        { "--seed", CLI_INT, &o.seed, "N", 0, 9e15, 0,
          "of the noise: prompt i begins with seed N + i (0)" },
        { "--budgets", CLI_REALS, &o.budgets, "X,...", 0, 1, 0,
          "kept fractions of key blocks to prebuild (0.7,0.5,0.3)" },
        { "--importance", CLI_CHOICE, &o.importance, "none|u8|f16", 0, 0, 0,
          "how it is stored; other budgets are derived from it (u8)" },
        { "--record-steps", CLI_INT, &o.record_steps, "N", 1, 10000, 0,
          "run fewer steps than --steps; the file serves --steps" },
        { "--step-groups", CLI_INT, &o.clip.record_groups, "N", 1, 10000, 0,
          "average the steps within N groups: smaller file" },
        { "--per-branch", CLI_FLAG, &o.clip.per_branch, NULL, 0, 0, 0,
          "prompt and negative prompt apart (averaged)" },
        { "--store-dense", CLI_FLAG, &o.store_dense, NULL, 0, 0, 0,
          "also store what runs dense: first layer and warm-up" },
        { "--shard", CLI_TEXT, &o.shard, "i/n", 0, 0, 0,
          "record the i-th part of the prompts (from 0); `esa masks merge` joins them" },
        { "--keep-recording", CLI_FLAG, &o.keep_recording, NULL, 0, 0, 0,
          "also write FILE.recording, the raw sums" },
        { "--restart", CLI_FLAG, &o.restart, NULL, 0, 0, 0,
          "throw away what an interrupted run has recorded" },
        { "--hold", CLI_CHOICE, &o.hold, "auto|file|f32|bf16", 0, 0, 0,
          "how weights are held in memory (auto)" },
        { "--threads", CLI_INT, &o.threads, "N", 0, ESA_MAX_THREADS, 0, "0: one per core (0)" },
        { "--json", CLI_TEXT, &o.json, "FILE", 0, 0, 0,
          "also write sizes, times and budgets as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    const int texts = (cli_given(argc, argv, "--prompts") != 0) +
                      (cli_given(argc, argv, "--num-prompts") != 0);
    int status = cli_options("esa calibrate", "--output FILE [options]",
                             "Runs a few prompts dense, records which key blocks matter in every "
                             "layer and step, and writes masks for each budget.\n"
                             "The same command goes on where an interrupted one was.",
                             clip_options(table, own,
                                          CLIP_OPTIONS_SIZE | CLIP_OPTIONS_NOISE |
                                              CLIP_OPTIONS_DENSE | CLIP_OPTIONS_BLOCKS,
                                          &o.clip),
                             argc, argv, NULL, &done);
    if (status || done) return status;
    if (!o.output || !o.output[0]) return usage("--output FILE is required");
    if (texts > 1)
        return usage("--prompts and --num-prompts are two ways to say one thing; give one");
    if (o.shard && o.keep_recording)
        return usage("a shard is a recording already: --keep-recording goes without --shard");
    if (o.shard && (status = cli_shard(o.shard, &o.shard_index, &o.shard_count, what)) != 0)
        return status;
    for (int i = 0; i < o.budgets.count; i++) /* mask files know budgets in per mille */
        for (int k = 0; k < i; k++)
            if (lround(1000 * o.budgets.real[i]) == lround(1000 * o.budgets.real[k]))
                return usage("--budgets names a budget twice (in per mille)");
    if ((status = clip_request_check(&o.clip, what)) != 0) return status;
    job j = { .o = &o, .work = { .lock = -1, .kept = (size_t)-1 } };
    o.clip.method = METHOD_RECORD;
    o.clip.latents_only = 1;
    const size_t room = sizeof j.work.target;
    const int length = o.shard_count ? snprintf(j.work.target, room, "%s.shard-%d-of-%d.recording",
                                                o.output, o.shard_index, o.shard_count)
                                     : snprintf(j.work.target, room, "%s", o.output);
    if (length >= (int)room)
        return cli_fail("%s: a name of %zu bytes cannot be written", what, strlen(o.output));
    const clip_opening opening = { .threads = o.threads,
                                   .hold = o.hold,
                                   .parts = ESA_PART_TRANSFORMER | ESA_PART_TEXT };
    status = clip_open(&j.maker, o.model, &opening, what);
    if (!status) status = with_model(&j);
    calibrate_work_close(&j.work);
    clip_close(&j.maker);
    cli_prompts_free(&j.prompts);
    free(j.settings);
    return status;
}
