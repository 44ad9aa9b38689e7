/* calibrate_run.c - a calibration: dense runs over a few prompts, importance or error scores
 * recorded at every layer and step, masks for each budget or work.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Recordings are integer sums (docs/mask-files.md): the order of the prompts and the number of runs
 * and machines do not change a bit of the mask file. docs/masks.md is the manual. */
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
    int64_t count;       /* prompts of this run */
    int64_t served;      /* steps the mask file serves; p.steps are recorded */
    char *settings;
    esa_work_plan *plan; /* --weights; NULL: none */
    int64_t recorded;    /* prompts recorded by this process, and the time they took */
    double seconds, select_seconds;
} job;

static int64_t prompt_of(const job *j, int64_t i)
{
    return j->o->shard_count ? j->o->shard_index + i * j->o->shard_count : i;
}

/* ---------------------------------------------------------------- settings */

/* Everything the recorded bits depend on, as text: runs with the same text can be continued. */
static int make_settings(job *j)
{
    const calibrate_options *o = j->o;
    const clip_request *r = &o->clip;
    const esa_session_params *session = &r->p.session;
    char name[32], weights[32], block[32];
    size_t bytes;
    const int status = cli_model_weights(weights, j->maker.folder, r->open.parts, what);
    if (status) return status;
    snprintf(block, sizeof block, "%dx%d", session->select.block_q, session->select.block_k);
    cli_json *json = cli_json_new();
    cli_json_fields(json,
                    "format %s version %d model %s config_hash %s weights_hash %s folder %s "
                    "frames %d height %d width %d recorded_steps %d step_groups %ld per_branch %i "
                    "guidance %g negative_prompt %s scheduler %d flow_shift %g order %s dtype %s",
                    CALIBRATE_FORMAT, 1, j->maker.info.name, j->maker.info.config_hash, weights,
                    j->maker.folder, r->p.frames, r->p.height, r->p.width, r->p.steps,
                    calibrate_groups(r), session->record_per_branch, r->p.guidance,
                    r->p.negative_prompt, r->p.scheduler, r->p.flow_shift,
                    cli_name(name, CLI_ORDERS, session->select.layout.order),
                    clip_dtype(&j->maker));
    clip_noise_json(json, r);
    cli_json_reals(json, "window", r->window.real, r->window.count);
    cli_json_fields(json, "block %s", block);
    if (o->method == CALIBRATE_ERROR)
        cli_json_fields(json, "method %s group_q %d group_k %d fine %d", "error",
                        session->select.group_q, session->select.group_k, session->select.fine);
    else
        cli_json_fields(json, "samples %d", session->select.samples);
    cli_json_reals(json, "dense_layers", r->dense_layers.real, r->dense_layers.count);
    cli_json_fields(json, "seed %ld shard %d shards %d", (int64_t)r->p.seed, o->shard_index,
                    o->shard_count);
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
        r.p.prompt = j->prompts.line[prompt_of(j, i)];
        r.p.seed = j->o->clip.p.seed + (uint64_t)prompt_of(j, i);
        r.p.record = path;
        const int status = clip_make(&j->maker, NULL, &record, &r, label, j->count - i - 1, 0);
        if (status == CLIP_INTERRUPTED)
            cli_fail("%s: interrupted; %lld of %lld prompts are recorded in '%s', the same command "
                     "continues",
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

/* The settings go first, the recording that says "finished" last. */
static int finish_shard(job *j)
{
    char from[CALIBRATE_PATH + 32], to[CALIBRATE_PATH + 64];
    calibrate_shard_file(to, &j->work, -1);
    int status = cli_write_file(to, j->settings, strlen(j->settings));
    for (int64_t i = j->size.recordings - 1; i >= 0 && !status; i--) {
        calibrate_recording(from, &j->work, i);
        calibrate_shard_file(to, &j->work, i);
        status = cli_move_file(from, to, what);
    }
    return status;
}

/* Made in the work folder and then moved: a run killed meanwhile leaves nothing elsewhere. A file
 * behind a link is replaced where it is. */
static int finish_masks(job *j)
{
    char path[CALIBRATE_PATH + 32],
        (*name)[CALIBRATE_PATH + 32] = calloc((size_t)j->size.recordings, sizeof *name);
    const char **names = calloc((size_t)j->size.recordings, sizeof *names);
    const calibrate_options *o = j->o;
    struct stat about;
    esa_mask_build build = esa_mask_build_default();
    const cli_list *const amounts = o->method == CALIBRATE_ERROR ? &o->works : &o->budgets;
    build.importance = o->importance;
    build.budgets = amounts->real;
    build.budget_count = amounts->count;
    build.plan = j->plan;
    build.exact_rows = o->exact_rows;
    build.store_dense = o->store_dense;
    build.dense_first_layer = o->clip.p.session.dense_first_layer;
    build.warmup_frac = o->clip.p.session.warmup_frac;
    build.steps = (int32_t)j->served;
    int status = name && names ? CLI_OK : cli_fail("%s: out of memory", what);
    for (int64_t i = 0; i < j->size.recordings && !status; i++) {
        calibrate_recording(name[i], &j->work, i);
        names[i] = name[i];
    }
    const int linked = lstat(j->work.target, &about) == 0 && S_ISLNK(about.st_mode);
    snprintf(path, sizeof path, "%s/masks", j->work.folder);
    if (!status) {
        const esa_status built = esa_mask_file_build(j->maker.ctx, linked ? j->work.target : path,
                                                     names, (int32_t)j->size.recordings, &build);
        if (built) status = cli_fail_esa(j->maker.ctx, built, what);
    }
    if (!status && !linked) status = cli_move_file(path, j->work.target, what);
    if (!status && j->o->keep_recording) {
        snprintf(path, sizeof path, "%s.recording", j->work.target);
        const esa_status merged = esa_recording_merge(j->maker.ctx, path, names,
                                                      (int32_t)j->size.recordings);
        if (merged) status = cli_fail_esa(j->maker.ctx, merged, what);
    }
    free(name);
    free(names);
    return status;
}

/* Means over all cells and heads of one budget: entropy, kept mass, density. */
static esa_status budget_means(esa_mask_file *file, const esa_mask_file_info *info, double budget,
                               double mean[3])
{
    double *heads = calloc((size_t)info->H * 3, sizeof *heads);
    int64_t cells = 0;
    esa_status status = heads ? ESA_OK : ESA_ERR_MEMORY;
    memset(mean, 0, 3 * sizeof *mean);
    for (int32_t b = 0; b < info->branches; b++)
        for (int32_t l = 0; l < info->layers; l++)
            for (int32_t t = 0; t < info->steps && !status; t++) {
                if (!esa_mask_file_stored(file, l, t)) continue;
                status = esa_mask_file_heads(file, heads, heads + info->H, heads + 2 * info->H, l,
                                             t, b, budget);
                for (int64_t h = 0; h < 3 * info->H; h++)
                    mean[h / info->H] += heads[h] / (double)info->H;
                cells++;
            }
    free(heads);
    for (int i = 0; i < 3; i++) mean[i] /= (double)cells;
    return status;
}

static void json_result(job *j, const esa_mask_file_info *info, cli_json *json)
{
    const clip_request *r = &j->o->clip;
    cli_machine_json(json, j->maker.ctx, NULL);
    clip_maker_json(json, &j->maker);
    cli_json_fields(json,
                    "model %s config_hash %s file %s frames %d height %d width %d steps %ld "
                    "recorded_steps %d step_groups %ld samples %d tokens %ld prompts %ld "
                    "prompts_recorded_now %ld seconds %g seconds_per_prompt %g record_seconds %g "
                    "bytes %ld",
                    j->maker.info.name, j->maker.info.config_hash, j->work.target, r->p.frames,
                    r->p.height, r->p.width, info ? info->steps : j->served, r->p.steps,
                    calibrate_groups(r), r->p.session.select.samples, r->tokens, j->count,
                    j->recorded, j->seconds,
                    j->recorded ? j->seconds / (double)j->recorded : (double)NAN, j->select_seconds,
                    info ? info->file_bytes : j->size.recordings * j->size.recording_bytes);
}

static int describe_masks(job *j)
{
    esa_ctx *ctx = j->maker.ctx;
    esa_mask_file *file = NULL;
    esa_mask_file_info info = { .struct_size = sizeof info };
    cli_json *json = cli_json_new();
    cli_table *table = cli_table_new(j->o->method == CALIBRATE_ERROR ? 4 : 3, 0);
    esa_status status = esa_mask_file_open(ctx, &file, j->work.target);
    if (!status) status = esa_mask_file_get_info(file, &info);
    json_result(j, &info, json);
    cli_json_open(json, j->o->method == CALIBRATE_ERROR ? "works" : "budgets", '[');
    const int errors = j->o->method == CALIBRATE_ERROR;
    cli_row(table, errors ? "work|counted|density|error removed" : "budget|density|kept mass");
    double mean[3] = { NAN, NAN, NAN };
    for (int32_t b = 0; !status && b < info.budget_count; b++) {
        const double budget = info.budget_permille[b] / 1000.0;
        double work = NAN;
        status = budget_means(file, &info, budget, mean);
        if (!status && errors) status = esa_mask_file_work(file, &work, budget);
        if (errors)
            cli_row(table, "%g|%.4f|%.3f|%.1f %%", budget, work, mean[2], 100 * mean[1]);
        else
            cli_row(table, "%g|%.3f|%.1f %%", budget, mean[2], 100 * mean[1]);
        cli_json_open(json, NULL, '{');
        if (errors)
            cli_json_fields(json, "work %g counted %g density %g error_removed %g", budget, work,
                            mean[2], mean[1]);
        else
            cli_json_fields(json, "budget %g density %g kept_mass %g", budget, mean[2], mean[1]);
        cli_json_close(json);
    }
    cli_json_close(json);
    if (!errors) cli_json_real(json, "entropy", mean[0]);
    if (errors) cli_json_fields(json, "exact_rows %d", info.exact_rows);
    esa_mask_file_free(file);
    if (status) {
        cli_json_save(json, NULL);
        cli_table_print(table, stderr);
        return cli_fail_esa(ctx, status, what);
    }
    cli_table_print(table, stdout);
    printf("\n%s: %.2f MB, %lld prompts, %d steps in %d groups, %d of %d layers", j->work.target,
           1e-6 * (double)info.file_bytes, (long long)j->count, (int)info.steps, (int)info.groups,
           (int)info.stored_layers, (int)info.layers);
    if (!errors) printf("; mean entropy of a head %.3f", mean[0]);
    if (errors) printf("; %d exact rows per query block", (int)info.exact_rows);
    printf("\n");
    return cli_json_save(json, j->o->json);
}

/* Prints the command that joins the shards into the file one run would have made. */
static int describe_shard(job *j)
{
    const calibrate_options *o = j->o;
    const int errors = o->method == CALIBRATE_ERROR;
    const cli_list *const amounts = errors ? &o->works : &o->budgets;
    char name[32];
    printf("%s: %s, %lld prompts; when all %d shards are there:\n  esa masks merge ",
           j->work.target, j->work.complete ? "complete already" : "complete", (long long)j->count,
           o->shard_count);
    cli_put_word(stdout, o->output);
    printf(".shard-*-of-%d.*recording --out ", o->shard_count);
    cli_put_word(stdout, o->output);
    printf(" %s ", errors ? "--work" : "--budgets");
    for (int i = 0; i < amounts->count; i++) printf("%s%g", i ? "," : "", amounts->real[i]);
    if (!errors) printf(" --importance %s", cli_name(name, "none|u8|f16", o->importance));
    if (o->weights) {
        printf(" --weights ");
        cli_put_word(stdout, o->weights);
    }
    if (o->exact_rows >= 0) printf(" --exact-rows %d", (int)o->exact_rows);
    printf(" --warmup-frac %g --dense-first-layer %d%s", o->clip.p.session.warmup_frac,
           o->clip.p.session.dense_first_layer, o->store_dense ? " --store-dense" : "");
    if (j->served != o->clip.p.steps) printf(" --steps %lld", (long long)j->served);
    printf("\n");
    if (!o->json) return CLI_OK;
    cli_json *json = cli_json_new();
    json_result(j, NULL, json);
    return cli_json_save(json, o->json);
}

/* ---------------------------------------------------------------- the run */

/* --record-steps runs fewer steps than the file serves. */
static int set_steps(job *j)
{
    const calibrate_options *o = j->o;
    esa_generate_params *p = &j->o->clip.p;
    j->served = p->steps;
    if (o->record_steps) p->steps = o->record_steps;
    if (p->steps > j->served)
        return cli_fail("%s: --record-steps %d is more than the %lld steps of --steps", what,
                        p->steps, (long long)j->served);
    if (p->session.record_groups > p->steps)
        return cli_fail("%s: --step-groups %d is more than the %d steps that are recorded", what,
                        p->session.record_groups, p->steps);
    const double sparse = (double)j->served -
                          ceil(p->session.warmup_frac * (double)j->served - 1e-9);
    if (!o->store_dense && sparse <= 0)
        return cli_fail("%s: with --warmup %g all %lld steps run dense and no mask is stored", what,
                        p->session.warmup_frac, (long long)j->served);
    return CLI_OK;
}

static int set_prompts(job *j)
{
    const calibrate_options *o = j->o;
    const int status = cli_prompts_get(&j->prompts, NULL, o->prompts_file, o->num_prompts,
                                       clip_is_tiny(&j->maker), what);
    if (status) return status;
    j->count = j->prompts.count;
    if (o->shard_count)
        j->count = (j->count - o->shard_index + o->shard_count - 1) / o->shard_count;
    if (j->count >= 1) return CLI_OK;
    return cli_fail("%s: shard %d of %d has no prompt, there are %lld", what, o->shard_index,
                    o->shard_count, (long long)j->prompts.count);
}

static int with_model(job *j)
{
    calibrate_options *o = j->o;
    int status = clip_resolve(&j->maker, &o->clip);
    if (!status && o->weights)
        status = cli_status(j->maker.ctx, esa_work_plan_open(j->maker.ctx, &j->plan, o->weights),
                            what);
    if (!status) status = set_steps(j);
    if (!status) status = set_prompts(j);
    if (!status) status = calibrate_measure(&j->size, o, &j->maker.info, j->count);
    if (!status) status = make_settings(j);
    if (!status) status = calibrate_work_open(&j->work, o, j->settings, &j->size);
    /* it may lie beside the masks, in a folder that was just made */
    if (!status) status = cli_file_ready(o->json, what);
    if (!status && !j->work.complete) {
        status = calibrate_announce(&j->size, o, &j->maker.info, j->count, &j->work);
        if (!status) status = record_prompts(j);
        if (!status) status = o->shard_count ? finish_shard(j) : finish_masks(j);
        if (!status) calibrate_work_remove(&j->work);
    }
    if (!status) status = o->shard_count ? describe_shard(j) : describe_masks(j);
    return status;
}

calibrate_options calibrate_options_default(void)
{
    return (calibrate_options){ .clip = clip_request_default(),
                                .num_prompts = 5,
                                .importance = ESA_IMPORTANCE_U8,
                                .budgets = { 3, { 0.7, 0.5, 0.3 }, { 0 } },
                                .works = cli_preset_works(1, ESA_CARRY_OFF),
                                .exact_rows = -1 };
}

int calibrate_run(const calibrate_options *options)
{
    calibrate_options o = *options;
    job j = { .o = &o, .work = { .lock = -1, .kept = (size_t)-1 } };
    o.clip.method = o.method == CALIBRATE_ERROR ? METHOD_RECORD_ERROR : METHOD_RECORD;
    o.clip.p.decode = 0;
    const size_t room = sizeof j.work.target;
    const int length = o.shard_count ? snprintf(j.work.target, room, "%s.shard-%d-of-%d.recording",
                                                o.output, o.shard_index, o.shard_count)
                                     : snprintf(j.work.target, room, "%s", o.output);
    if (length >= (int)room)
        return cli_fail("%s: a name of %zu bytes cannot be written", what, strlen(o.output));
    o.clip.open.parts = ESA_PART_TRANSFORMER | ESA_PART_TEXT;
    if (o.clip.p.image) o.clip.open.parts |= ESA_PART_VAE; /* it encodes the picture */
    int status = clip_open(&j.maker, &o.clip.open, what);
    if (!status) status = with_model(&j);
    calibrate_work_close(&j.work);
    esa_work_plan_free(j.plan);
    clip_close(&j.maker);
    cli_prompts_free(&j.prompts);
    free(j.settings);
    return status;
}
