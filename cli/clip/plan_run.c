/* plan_run.c - the clips of a work plan, and the plan that follows from them.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/plan.h"
#include "core/folders.h"

#include <esa/esa_tensors.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char what[] = "calibrate";

static const double densities[PLAN_POINTS] = { 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8 };
enum { ALONE = 4 }; /* the density of layers and steps that are sparse alone: its point */
static const double all_works[PLAN_WORKS] = { 0.12, 0.16, 0.22, 0.3, 0.4, 0.55, 0.7, 0.85 };

typedef struct job {
    const plan_options *o;
    clip_request base; /* resolved */
    clip_maker maker;
    cli_prompts prompts; /* measured ones, more of the quality curve, then those held out */
    int64_t measured, curve, held_out;
    plan_state state;
    int32_t layers, steps, layer_groups, step_groups;
    int32_t anchors; /* of the clips with the plan; 0: they do not carry */
    int64_t left;    /* clips after this one */
    double *numbers; /* the arrays below */
    /* sigma [T]; errors [L][T][K], of one prompt, and without carry [L][T]; [L][T] */
    double *sigma, *error, *one, *plain, *weight, *density;
    double by_layer[64], by_step[64];
    int32_t levels; /* works of the quality curve */
    double works[PLAN_WORKS], psnr[PLAN_WORKS], spread[PLAN_WORKS];
} job;

/* ---------------------------------------------------------------- clips */

static clip_request request_of(const job *j, int64_t prompt)
{
    clip_request r = j->base;
    r.p.prompt = j->prompts.line[prompt];
    r.p.seed = j->base.p.seed + (uint64_t)prompt;
    r.p.decode = 0;
    return r;
}

static int make(job *j, esa_frames **frames, clip_record *record, const clip_request *r,
                const char *label)
{
    const int status = clip_make(&j->maker, frames, record, r, label, j->left, 0);
    if (j->left > 0) j->left--;
    if (status == CLIP_INTERRUPTED)
        cli_fail("%s: interrupted; what was measured is in '%s', the same command continues", what,
                 j->state.folder);
    return status;
}

static void latents_path(const job *j, char path[PLAN_PATH + 64], int64_t prompt)
{
    char name[48];
    snprintf(name, sizeof name, "dense-%lld.safetensors", (long long)prompt);
    plan_state_path(path, &j->state, name);
}

/* Mean squared difference of two files of latents. */
static int compare_latents(job *j, const char *a, const char *b, double *mse)
{
    esa_tensors *file[2] = { NULL, NULL };
    esa_tensor_info t[2] = { { .struct_size = sizeof t[0] }, { .struct_size = sizeof t[0] } };
    esa_status status = esa_tensors_open(j->maker.ctx, &file[0], a);
    if (!status) status = esa_tensors_open(j->maker.ctx, &file[1], b);
    for (int i = 0; i < 2 && !status; i++) status = esa_tensors_at(file[i], 0, &t[i]);
    int failed = cli_status(j->maker.ctx, status, what);
    if (!failed && (t[0].dtype != ESA_FILE_F32 || t[0].bytes != t[1].bytes || t[0].bytes < 4))
        failed = cli_fail("%s: '%s' and '%s' hold latents of other sizes", what, a, b);
    double sum = 0;
    for (int64_t i = 0; !failed && i < t[0].bytes / 4; i++) {
        float x, y;
        memcpy(&x, (const char *)t[0].data + 4 * i, 4);
        memcpy(&y, (const char *)t[1].data + 4 * i, 4);
        sum += ((double)x - (double)y) * ((double)x - (double)y);
    }
    if (!failed) *mse = sum / (double)(t[0].bytes / 4);
    esa_tensors_free(file[0]);
    esa_tensors_free(file[1]);
    return failed;
}

/* ---------------------------------------------------------------- the dense clip and its errors */

/* One measurement of errors. Those of the plan are those that a run leaves, with what it carries.
 * Beside them, the errors without carry are what groups that are sparse alone show: alone, the
 * first sparse step of a layer would be an anchor, and move nothing. */
typedef struct reading {
    job *j;
    int32_t points;
    esa_status status;
} reading;

static void read_errors(void *user, const esa_session *session)
{
    reading *r = user;
    job *j = r->j;
    r->status = esa_session_get_sigma(session, j->sigma, j->steps);
    for (int32_t i = 0; i < j->layers * j->steps && !r->status; i++)
        r->status = esa_session_get_probe(session, j->one + (int64_t)i * r->points, r->points,
                                          i / j->steps, i % j->steps);
}

/* A clip without carry. */
static void without_carry(clip_request *r)
{
    r->carry = "off";
    r->carry_format = ESA_CARRY_E4M3;
}

/* The dense clip of a prompt, and its errors. plain 1: without carry, at one density. */
static int probe(job *j, int64_t prompt, int plain)
{
    char name[48], path[PLAN_PATH + 64], label[64];
    reading r = { j, plain ? 1 : PLAN_POINTS, ESA_ERR_STATE };
    const int64_t cells = (int64_t)j->layers * j->steps;
    snprintf(name, sizeof name, "%s %lld", plain ? "plain" : "probe", (long long)prompt);
    latents_path(j, path, prompt);
    const int known = plan_state_get(&j->state, name, j->one, cells * r.points) &&
                      plan_state_get(&j->state, "sigma", j->sigma, j->steps) &&
                      !cli_is_missing(path);
    if (!known) {
        clip_request q = request_of(j, prompt);
        q.method = METHOD_PROBE;
        if (plain) without_carry(&q);
        q.p.session.probe = plain ? &densities[ALONE] : densities;
        q.p.session.probe_count = r.points;
        q.p.save_latents = path;
        q.p.denoised = read_errors;
        q.p.denoised_user = &r;
        snprintf(label, sizeof label, "errors of prompt %lld/%lld", (long long)prompt + 1,
                 (long long)j->measured);
        int status = make(j, NULL, NULL, &q, label);
        if (!status) status = cli_status(j->maker.ctx, r.status, what);
        if (!status) status = plan_state_put(&j->state, "sigma", j->sigma, j->steps);
        if (!status) status = plan_state_put(&j->state, name, j->one, cells * r.points);
        if (status) return status;
    }
    for (int64_t i = 0; i < cells * PLAN_POINTS && !plain; i++)
        j->error[i] += j->one[i] / (double)j->measured;
    for (int64_t i = 0; i < cells; i++) /* what groups alone are compared with */
        if (plain || !j->anchors)
            j->plain[i] += j->one[plain ? i : i * PLAN_POINTS + ALONE] / (double)j->measured;
    return CLI_OK;
}

/* ---------------------------------------------------------------- groups that are sparse alone */

/* axis 0: layers, 1: steps. */
static int alone(job *j, int64_t prompt, int axis, int32_t group)
{
    const int32_t groups = axis ? j->step_groups : j->layer_groups,
                  count = axis ? j->steps : j->layers;
    char name[64], dense[PLAN_PATH + 64], path[PLAN_PATH + 64], label[96];
    double mse = 0;
    snprintf(name, sizeof name, "%s %d of %d, prompt %lld", axis ? "steps" : "layers", group,
             groups, (long long)prompt);
    if (!plan_state_get(&j->state, name, &mse, 1)) {
        for (int32_t i = 0; i < j->layers * j->steps; i++) {
            const int64_t at = axis ? i % j->steps : i / j->steps;
            j->density[i] = at * groups / count == group ? densities[ALONE] : 1;
        }
        clip_request q = request_of(j, prompt);
        without_carry(&q);
        q.p.session.density = j->density;
        latents_path(j, dense, prompt);
        plan_state_path(path, &j->state, "alone.safetensors");
        q.p.save_latents = path;
        snprintf(label, sizeof label, "%s group %d/%d, prompt %lld/%lld", axis ? "step" : "layer",
                 group + 1, groups, (long long)prompt + 1, (long long)j->measured);
        int status = make(j, NULL, NULL, &q, label);
        if (!status) status = compare_latents(j, dense, path, &mse);
        if (!status) status = plan_state_put(&j->state, name, &mse, 1);
        if (status) return status;
    }
    (axis ? j->by_step : j->by_layer)[group] += mse / (double)j->measured;
    return CLI_OK;
}

/* ---------------------------------------------------------------- the plan */

static int make_plan(job *j, esa_work_plan **plan)
{
    const esa_session_params *s = &j->base.p.session;
    esa_work_plan_info info = { .struct_size = sizeof info,
                                .layers = j->layers,
                                .steps = j->steps,
                                .points = PLAN_POINTS,
                                .prompts = (int32_t)j->measured,
                                .selector = s->select.selector,
                                .order = s->select.layout.order,
                                .tail = s->attention.tail,
                                .block_q = s->select.block_q,
                                .block_k = s->select.block_k,
                                .anchors = j->anchors };
    snprintf(info.model, sizeof info.model, "%s", j->maker.info.name);
    snprintf(info.config_hash, sizeof info.config_hash, "%s", j->maker.info.config_hash);
    esa_status status = esa_work_fit(j->maker.ctx, j->weight, j->layers, j->steps, j->plain,
                                     j->layer_groups, j->by_layer, j->step_groups, j->by_step);
    if (!status)
        status = esa_work_plan_create(j->maker.ctx, plan, &info, j->sigma, densities, j->error,
                                      j->weight);
    return cli_status(j->maker.ctx, status, what);
}

/* ---------------------------------------------------------------- quality */

/* One clip with the plan at a work: PSNR of its frames against the dense ones. Held-out prompts
 * have no dense latents yet. */
static int rate(job *j, const char *plan, double work, int64_t prompt, double *psnr)
{
    char name[64], path[PLAN_PATH + 64];
    esa_frames *dense = NULL, *frames = NULL;
    esa_metrics m;
    snprintf(name, sizeof name, "work %.6f, prompt %lld", work, (long long)prompt);
    if (plan_state_get(&j->state, name, psnr, 1)) return CLI_OK;
    latents_path(j, path, prompt);
    clip_request q = request_of(j, prompt);
    int status = CLI_OK;
    if (cli_is_missing(path)) {
        clip_request d = clip_dense(&q);
        d.p.save_latents = path;
        status = make(j, NULL, NULL, &d, "dense");
    }
    if (!status) {
        esa_decode_params p = j->maker.video.decode_params_default();
        p.latents = path;
        status = cli_status(j->maker.ctx, j->maker.video.decode(j->maker.model, &dense, &p), what);
    }
    q.p.decode = 1;
    q.p.plan = plan;
    q.p.session.work = work;
    if (!status) status = make(j, &frames, NULL, &q, name);
    if (!status) status = clip_compare(&j->maker, &m, dense, frames);
    if (!status) {
        *psnr = isinf(m.psnr) ? 100 : m.psnr; /* equal frames */
        status = plan_state_put(&j->state, name, psnr, 1);
    }
    j->maker.video.frames_free(frames);
    j->maker.video.frames_free(dense);
    return status;
}

/* Mean and standard deviation over prompts first .. first + count - 1. */
static int rate_all(job *j, const char *plan, double work, int64_t first, int64_t count,
                    double *mean, double *spread)
{
    double sum = 0, squares = 0;
    for (int64_t i = first; i < first + count; i++) {
        double psnr;
        const int status = rate(j, plan, work, i, &psnr);
        if (status) return status;
        sum += psnr;
        squares += psnr * psnr;
    }
    *mean = sum / (double)count;
    const double variance = squares / (double)count - *mean * *mean;
    *spread = count > 1 && variance > 0 ? sqrt(variance * (double)count / (double)(count - 1)) : 0;
    return CLI_OK;
}

static int quality_curve(job *j, esa_work_plan *plan)
{
    char path[PLAN_PATH + 64];
    plan_state_path(path, &j->state, "plan.safetensors");
    int status = cli_status(j->maker.ctx, esa_work_plan_save(plan, path), what);
    for (int i = 0; i < j->levels && !status; i++)
        status = rate_all(j, path, j->works[i], 0, j->curve, &j->psnr[i], &j->spread[i]);
    if (status) return status;
    return cli_status(j->maker.ctx,
                      esa_work_plan_set_quality(plan, j->levels, j->works, j->psnr, j->spread),
                      what);
}

/* The work that --quality or --speedup asks for; 0: neither was given. */
static int wanted_work(job *j, const esa_work_plan *plan, double *work)
{
    *work = j->o->speedup > 0 ? 1 / j->o->speedup : 0;
    if (!(j->o->quality > 0)) return CLI_OK;
    return cli_status(j->maker.ctx, esa_work_plan_reach(plan, j->o->quality, work), what);
}

/* ---------------------------------------------------------------- results */

static int report(job *j, const esa_work_plan *plan, double work, double expected, double reached,
                  double spread)
{
    cli_table *table = cli_table_new(3, 0);
    cli_row(table, "work|PSNR|spread");
    for (int i = 0; i < j->levels; i++)
        cli_row(table, "%.2f|%.2f dB|%.2f", j->works[i], j->psnr[i], j->spread[i]);
    cli_table_print(table, stdout);
    char carry[64] = "without carry";
    if (j->anchors)
        snprintf(carry, sizeof carry, "%d anchor%s", j->anchors, j->anchors > 1 ? "s" : "");
    printf("\n%s: %lld prompt%s, %d layers, %d steps, %s; PSNR against dense, spread between "
           "prompts\n",
           j->o->output, (long long)j->curve, j->curve > 1 ? "s" : "", j->layers, j->steps, carry);
    if (work > 0)
        printf("work %.3f: expected %.2f dB, reached %.2f dB on %lld held-out prompt%s (spread "
               "%.2f)\n",
               work, expected, reached, (long long)j->held_out, j->held_out > 1 ? "s" : "", spread);
    cli_json *json = cli_json_new();
    cli_machine_json(json, j->maker.ctx, NULL);
    clip_maker_json(json, &j->maker);
    cli_json_fields(json,
                    "plan %s model %s config_hash %s layers %d steps %d prompts %ld anchors %d",
                    j->o->output, j->maker.info.name, j->maker.info.config_hash, j->layers,
                    j->steps, j->measured, j->anchors);
    cli_json_reals(json, "work", j->works, j->levels);
    cli_json_reals(json, "psnr", j->psnr, j->levels);
    cli_json_reals(json, "spread", j->spread, j->levels);
    cli_json_open(json, "check", '{');
    cli_json_fields(json, "work %g expected %g reached %g prompts %ld", work > 0 ? work : NAN,
                    expected, reached, work > 0 ? j->held_out : 0);
    cli_json_close(json);
    (void)plan;
    return cli_json_save(json, j->o->json);
}

static int finish(job *j, esa_work_plan *plan)
{
    char path[PLAN_PATH + 64];
    double work = 0, expected = NAN, reached = NAN, spread = NAN;
    int status = quality_curve(j, plan);
    if (!status) status = wanted_work(j, plan, &work);
    plan_state_path(path, &j->state, "plan.safetensors");
    if (!status && work > 0) {
        /* outside of the curve nothing is expected */
        if (esa_work_plan_expect(plan, work, &expected, NULL)) expected = NAN;
        status = rate_all(j, path, work, j->curve, j->held_out, &reached, &spread);
    }
    if (!status) status = cli_status(j->maker.ctx, esa_work_plan_save(plan, j->o->output), what);
    if (!status) status = report(j, plan, work, expected, reached, spread);
    if (!status) plan_state_remove(&j->state);
    return status;
}

/* ---------------------------------------------------------------- the run */

/* Everything the numbers depend on, as text. */
static char *settings_of(const job *j)
{
    const esa_generate_params *p = &j->base.p;
    const esa_session_params *s = &p->session;
    char weights[32], carry[CLIP_CARRY_TEXT];
    size_t bytes;
    if (cli_model_weights(weights, j->maker.folder, ESA_PART_ALL, what)) return NULL;
    cli_json *json = cli_json_new();
    cli_json_fields(json,
                    "model %s weights %s frames %d height %d width %d steps %d guidance %g "
                    "negative_prompt %s scheduler %d flow_shift %g seed %ld",
                    j->maker.info.name, weights, p->frames, p->height, p->width, p->steps,
                    p->guidance, p->negative_prompt, p->scheduler, p->flow_shift, (int64_t)p->seed);
    clip_noise_json(json, &j->base);
    cli_json_fields(
        json,
        "order %d tail %d exact_rows %d block_q %d block_k %d refresh %d order_every %d share %d "
        "warmup %g first_layer %d groups %ld prompts %ld group_q %d group_k %d",
        s->select.layout.order, s->attention.tail, s->attention.exact_rows, s->select.block_q,
        s->select.block_k, s->refresh_every, s->order_every, s->share_branches, s->warmup_frac,
        s->dense_first_layer, j->o->groups, j->measured, s->select.group_q, s->select.group_k);
    clip_carry_name(carry, &j->base.anchors);
    cli_json_fields(json, "carry %s carry_format %d", carry, s->carry_format);
    cli_json_open(json, "lines", '[');
    for (int64_t i = 0; i < j->prompts.count; i++) cli_json_text(json, NULL, j->prompts.line[i]);
    cli_json_close(json);
    cli_json_compact(json);
    return cli_json_take(json, &bytes);
}

static int set_prompts(job *j)
{
    const plan_options *o = j->o;
    const int64_t curve = o->curve_prompts > o->num_prompts ? o->curve_prompts : o->num_prompts,
                  wanted = curve + o->held_out;
    const int status = cli_prompts_get(&j->prompts, NULL, o->prompts_file,
                                       wanted < CLI_PROMPTS ? wanted : CLI_PROMPTS,
                                       clip_is_tiny(&j->maker), what);
    if (status) return status;
    if (j->prompts.count < wanted)
        return cli_fail("%s: there are %lld prompts, but %lld are measured and %lld held out: give "
                        "more with --prompts, or fewer with --num-prompts, --curve-prompts and "
                        "--held-out",
                        what, (long long)j->prompts.count, (long long)curve,
                        (long long)o->held_out);
    j->measured = o->num_prompts;
    j->curve = curve;
    j->held_out = o->held_out;
    return CLI_OK;
}

static int reserve(job *j)
{
    const size_t cells = (size_t)j->layers * (size_t)j->steps;
    j->numbers = calloc((size_t)j->steps + cells * (2 * PLAN_POINTS + 3), sizeof *j->numbers);
    if (!j->numbers) return cli_fail("%s: out of memory", what);
    j->sigma = j->numbers;
    j->error = j->sigma + j->steps;
    j->one = j->error + cells * PLAN_POINTS;
    j->weight = j->one + cells * PLAN_POINTS;
    j->density = j->weight + cells;
    j->plain = j->density + cells;
    return CLI_OK;
}

/* ---------------------------------------------------------------- works that can be reached */

/* What sparse calls of the clips cost, at densities that the plan will know. */
static int costs_of(const job *j, esa_work_costs *costs)
{
    const esa_generate_params *p = &j->base.p;
    const esa_model_info *m = &j->maker.info;
    esa_shapes shapes = esa_shapes_default();
    shapes.B = 1;
    shapes.Hq = shapes.Hkv = m->heads;
    shapes.Nq = shapes.Nk = j->base.tokens;
    shapes.D = m->head_dim;
    costs->struct_size = sizeof *costs;
    const esa_status status = esa_session_costs(j->maker.ctx, costs, &p->session, &shapes);
    if (costs->floor < densities[0]) costs->floor = densities[0];
    if (j->anchors && m->boundary > 0 && j->anchors < j->steps) { /* one more where it changes */
        costs->carry = j->anchors + 1;
        costs->anchors = NULL;
        costs->anchor_count = 0;
    }
    return cli_status(j->maker.ctx, status, what);
}

/* The least work of a clip; *reached receives 1 if it is not above work. */
static int least_work(job *j, const esa_work_costs *costs, double work, int *reached, double *least)
{
    const esa_session_params *s = &j->base.p.session;
    const int32_t T = j->steps, cells = j->layers * T, warmup = esa_warmup_steps(s->warmup_frac, T);
    uint8_t *dense = calloc((size_t)cells, 1);
    if (!dense) return cli_fail("%s: out of memory", what);
    for (int32_t i = 0; i < cells; i++) {
        dense[i] = i % T < warmup || (s->dense_first_layer && i < T);
        for (int k = 0; k < j->base.dense_layers.count; k++)
            dense[i] |= i / T == j->base.dense_layers.whole[k];
    }
    /* the uniform rule: what is least does not depend on the plan */
    const esa_status status = esa_work_plan_solve(j->maker.ctx, NULL, j->density, j->layers, T,
                                                  NULL, dense, work, costs, least);
    free(dense);
    *reached = !status;
    return status == ESA_ERR_ARGUMENT ? CLI_OK : cli_status(j->maker.ctx, status, what);
}

/* Leaves out works that clips of this size cannot reach. */
static int choose_works(job *j)
{
    esa_work_costs costs;
    double least = 0;
    int reached = 0, status = costs_of(j, &costs);
    char left_out[PLAN_WORKS * 8] = "";
    const char *parts = j->anchors ? "anchors, masks, orders" : "masks, orders, exact rows";
    for (int i = 0; i < PLAN_WORKS && !status; i++) {
        const size_t used = strlen(left_out);
        status = least_work(j, &costs, all_works[i], &reached, &least);
        if (reached)
            j->works[j->levels++] = all_works[i];
        else
            snprintf(left_out + used, sizeof left_out - used, " %g", all_works[i]);
    }
    if (!status && j->o->speedup > 0)
        status = least_work(j, &costs, 1 / j->o->speedup, &reached, &least);
    if (status) return status;
    if (!j->levels || (j->o->speedup > 0 && !reached))
        return cli_fail("%s: %lld tokens and %d steps: %s and the blocks that every row keeps take "
                        "%.3f of dense attention, so work %g cannot be reached; more frames, more "
                        "steps or --order hilbert cost less",
                        what, (long long)j->base.tokens, j->steps, parts, least,
                        j->levels ? 1 / j->o->speedup : all_works[PLAN_WORKS - 1]);
    if (left_out[0])
        fprintf(stderr,
                "%s: leaves out work%s, which %lld tokens and %d steps cannot reach: %s and the "
                "blocks that every row keeps take more\n",
                what, left_out, (long long)j->base.tokens, j->steps, parts);
    return CLI_OK;
}

static int measure(job *j)
{
    int status = CLI_OK;
    const int64_t each = 1 + (j->anchors > 0) + j->layer_groups + j->step_groups;
    const int checks = j->o->quality > 0 || j->o->speedup > 0;
    j->left = each * j->measured + j->curve - j->measured + j->levels * j->curve +
              (checks ? 2 * j->held_out : 0) - 1;
    fprintf(stderr,
            "%s: %lld clips: errors, %d groups of layers and %d groups of steps for %lld prompts, "
            "%d works for %lld\n",
            what, (long long)j->left + 1, j->layer_groups, j->step_groups, (long long)j->measured,
            j->levels, (long long)j->curve);
    for (int64_t i = 0; i < j->measured && !status; i++) {
        status = probe(j, i, 0);
        if (!status && j->anchors) status = probe(j, i, 1);
        for (int32_t g = 0; g < j->layer_groups && !status; g++) status = alone(j, i, 0, g);
        for (int32_t g = 0; g < j->step_groups && !status; g++) status = alone(j, i, 1, g);
    }
    return status;
}

static int with_model(job *j)
{
    esa_work_plan *plan = NULL;
    int status = clip_resolve(&j->maker, &j->base);
    j->layers = j->maker.info.layers;
    j->steps = j->base.p.steps;
    j->anchors = clip_anchor_count(&j->base);
    j->layer_groups = (int32_t)(j->o->groups < j->layers ? j->o->groups : j->layers);
    j->step_groups = (int32_t)(j->o->groups < j->steps ? j->o->groups : j->steps);
    if (!status) status = set_prompts(j);
    if (!status) status = reserve(j);
    if (!status) status = choose_works(j);
    if (!status) status = cli_make_folder_of(j->o->output, NULL, what);
    if (!status) status = cli_file_ready(j->o->output, what);
    if (!status) status = cli_file_ready(j->o->json, what);
    char *settings = status ? NULL : settings_of(j);
    if (!status && !settings) return CLI_FAILED;
    if (!status) status = plan_state_open(&j->state, j->o->output, settings, j->o->restart);
    if (!status) status = measure(j);
    if (!status) status = make_plan(j, &plan);
    if (!status) status = finish(j, plan);
    esa_work_plan_free(plan);
    return status;
}

int plan_run(const plan_options *o)
{
    job j = { .o = o, .base = o->clip };
    j.base.method = METHOD_ERROR;
    int status = clip_request_check(&j.base, what);
    if (status) return status;
    status = clip_open(&j.maker, &j.base.open, what);
    if (!status) status = with_model(&j);
    if (j.state.runs) plan_state_close(&j.state);
    clip_close(&j.maker);
    cli_prompts_free(&j.prompts);
    free(j.numbers);
    return status;
}
