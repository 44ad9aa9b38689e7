/* clip.c - one clip: the model, the settings, the call, and what was measured.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/clip.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---------------------------------------------------------------- the model */

/* The folder of the model, or the name of a shape with random weights. */
static int find_model(char *folder, size_t size, const clip_opening *o, const char *what)
{
    if (!o->random) return cli_model_find(folder, size, o->model, what);
    if (!o->model)
        return cli_usage("%s: --random-weights needs --model wan-1.3b-480p, wan-1.3b-720p, "
                         "wan-14b-480p, wan-14b-720p, cogvideox-2b, cogvideox-5b, hunyuan-544p or "
                         "hunyuan-720p",
                         what);
    snprintf(folder, size, "%s", o->model);
    return CLI_OK;
}

const char *clip_dtype(const clip_maker *m)
{
    return m->info.compute == ESA_COMPUTE_BF16 ? "bf16" : "f32";
}

void clip_maker_json(cli_json *json, const clip_maker *m)
{
    cli_device_json(json, &m->device);
    cli_json_fields(json, "dtype %s", clip_dtype(m));
    if (m->device.device != ESA_DEVICE_CUDA) return;
    cli_json_open(json, "memory", '{');
    cli_json_fields(json, "weights_bytes %ld resident_blocks %d blocks %d streamed_bytes %ld",
                    m->info.device_bytes, m->info.resident_blocks, m->info.layers,
                    m->info.streamed_bytes);
    cli_json_close(json);
}

int clip_lora(esa_lora *lora, char *name, size_t size, const char *text, const char *what)
{
    const char *colon = strrchr(text, ':');
    char *end = NULL;
    const int whole = access(text, F_OK) == 0;
    *lora = (esa_lora){ .file = name, .scale = 1 };
    if (colon && colon[1] && !whole) lora->scale = strtod(colon + 1, &end);
    const size_t length = end && *end == 0 ? (size_t)(colon - text) : strlen(text);
    if (!end || *end) lora->scale = 1;
    if (!isfinite(lora->scale) || length < 1 || length >= size)
        return cli_usage("%s: --lora was given '%s', expected FILE or FILE:SCALE", what, text);
    snprintf(name, size, "%.*s", (int)length, text);
    return CLI_OK;
}

int clip_open(clip_maker *m, const clip_opening *o, const char *what)
{
    char folder[4200];
    char lora_name[2][CLI_MAX_LIST][1024];
    esa_lora lora[2][CLI_MAX_LIST];
    const cli_texts *const loras[2] = { &o->lora, &o->lora_2 };
    int64_t limit = 0;
    memset(m, 0, sizeof *m);
    m->what = what;
    m->listen = o->listen;
    m->listen_user = o->listen_user;
    if (o->keep && o->linear == ESA_LINEAR_BF16)
        return cli_usage("%s: --keep names tensors that --linear fp8 leaves in bf16; give both",
                         what);
    int status = o->max_vram ? cli_size_parse(o->max_vram, &limit, "--max-vram", what) : CLI_OK;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < loras[k]->count && !status; i++)
            status = clip_lora(&lora[k][i], lora_name[k][i], sizeof lora_name[k][i],
                               loras[k]->text[i], what);
    if (!status) status = cli_video_open(&m->video, what);
    if (!status && o->check_file)
        snprintf(folder, sizeof folder, "%s", o->check_file);
    else if (!status)
        status = find_model(folder, sizeof folder, o, what);
    if (!status && !o->check) status = cli_device_choose(&m->device, o->device, what);
    if (!status) status = cli_ctx_on(&m->ctx, o->threads, m->device.ordinal);
    if (status) return status;
    if (m->device.device == ESA_DEVICE_CPU && (o->linear || limit))
        return cli_fail("%s: %s needs a GPU", what,
                        limit                             ? "--max-vram"
                        : o->linear == ESA_LINEAR_F8_FAST ? "--linear fp8-fast"
                                                          : "--linear fp8");
    clip_catch_signals();
    esa_status opened = o->lpips ? m->video.lpips_open(m->ctx, &m->lpips, o->lpips) : ESA_OK;
    if (opened) return cli_fail_esa(m->ctx, opened, m->what);
    esa_model_params p = m->video.model_params_default();
    p.transformer = o->transformer;
    p.lora = lora[0];
    p.lora_count = o->lora.count;
    p.transformer_2 = o->transformer_2;
    p.lora_2 = lora[1];
    p.lora_2_count = o->lora_2.count;
    p.hold = o->hold;
    p.device = m->device.device;
    p.linear = o->linear;
    p.compute = o->dtype;
    p.keep = o->keep;
    p.max_memory = limit;
    p.random = o->random;
    if (o->parts) p.parts = o->parts;
    p.report = o->report;
    clip_watch watch = { .label = "loading the model", .stage = -1, .done = -1 };
    p.progress = o->listen ? o->listen : clip_progress;
    p.progress_user = o->listen ? o->listen_user : &watch;
    opened = o->check_file ? m->video.model_check_file(m->ctx, o->check_file, &p)
             : o->check    ? m->video.model_check(m->ctx, folder, &p)
                           : m->video.model_open(m->ctx, &m->model, folder, &p);
    if (!o->listen) cli_progress_end();
    if (opened && clip_interrupted()) {
        cli_fail("%s: interrupted while the model was loaded", what);
        return CLIP_INTERRUPTED;
    }
    if (opened) return cli_fail_esa(m->ctx, opened, m->what);
    snprintf(m->folder, sizeof m->folder, "%s", folder);
    if (o->check) return CLI_OK;
    m->info.struct_size = sizeof m->info;
    opened = m->video.model_get_info(m->model, &m->info);
    return cli_status(m->ctx, opened, what);
}

void clip_close(clip_maker *m)
{
    if (m->model) m->video.model_free(m->model);
    if (m->lpips) m->video.lpips_free(m->lpips);
    esa_ctx_free(m->ctx);
    cli_video_close(&m->video);
    m->model = NULL;
    m->lpips = NULL;
    m->ctx = NULL;
}

int clip_is_tiny(const clip_maker *m) { return strcmp(m->info.name, "wan-tiny") == 0; }

/* ---------------------------------------------------------------- records */

void clip_record_free(clip_record *r)
{
    free(r->step_seconds);
    memset(r, 0, sizeof *r);
}

/* All arrays share one allocation. */
static int record_new(clip_record *r, int32_t steps, int32_t layers, int32_t heads)
{
    memset(r, 0, sizeof *r);
    const size_t count = 5 * (size_t)steps + (size_t)layers * (1 + (size_t)heads);
    r->step_seconds = malloc(count * sizeof *r->step_seconds);
    if (!r->step_seconds) return CLI_FAILED;
    for (size_t i = 0; i < count; i++) r->step_seconds[i] = NAN;
    r->step_select = r->step_seconds + steps;
    r->step_attention = r->step_select + steps;
    r->layer_density = r->step_attention + steps;
    r->head_density = r->layer_density + layers;
    r->step_anchors = r->head_density + (int64_t)layers * heads;
    r->step_age = r->step_anchors + steps;
    r->steps = steps;
    r->layers = layers;
    r->heads = heads;
    return CLI_OK;
}

double clip_step_mean(const clip_record *r, int with_warmup)
{
    double sum = 0;
    const int32_t first = with_warmup ? 0 : r->warmup;
    for (int32_t i = first; i < r->steps; i++) sum += r->step_seconds[i];
    return first < r->steps ? sum / (r->steps - first) : (double)NAN;
}

double clip_density(const clip_record *r)
{
    return r->stats.session.sparse_calls ? r->stats.session.density : 1;
}

void clip_record_json(cli_json *json, const clip_record *r)
{
    const esa_generate_stats *s = &r->stats;
    const esa_session_stats *t = &s->session;
    cli_json_fields(json,
                    "seconds %g text_seconds %g denoise_seconds %g attention_seconds %g "
                    "select_seconds %g gemm_seconds %g decode_seconds %g peak_bytes %ld "
                    "density_asked %g density %g kept_mass %g calls %ld sparse_calls %ld "
                    "eight_calls %ld kernel %s warmup_steps %d",
                    s->seconds, s->text_seconds, s->denoise_seconds, s->attention_seconds,
                    t->select_seconds, s->gemm_seconds, s->decode_seconds, s->peak_bytes,
                    t->density_asked, t->density, t->mass, t->calls, t->sparse_calls,
                    t->eight_calls, t->kernel, r->warmup);
    cli_json_open(json, "attention_work", '{');
    cli_json_fields(json, "asked %g realised %g", t->work_asked, t->work);
    cli_json_close(json);
    clip_carry_json(json, r);
    cli_json_int(json, "computed_steps", s->computed_steps);
    if (s->device_peak_bytes) cli_json_int(json, "device_peak_bytes", s->device_peak_bytes);
    cli_json_open(json, "work_seconds", '{');
    cli_json_fields(json,
                    "products %g attention %g selection %g cross_attention %g convolutions %g "
                    "other %g",
                    s->work_seconds[ESA_WORK_PRODUCTS], s->work_seconds[ESA_WORK_ATTENTION],
                    s->work_seconds[ESA_WORK_SELECTION], s->work_seconds[ESA_WORK_CROSS],
                    s->work_seconds[ESA_WORK_CONVOLUTIONS], s->work_seconds[ESA_WORK_OTHER]);
    cli_json_close(json);
    cli_json_reals(json, "step_seconds", r->step_seconds, r->steps);
    cli_json_reals(json, "step_select_seconds", r->step_select, r->steps);
    cli_json_reals(json, "step_attention_seconds", r->step_attention, r->steps);
    cli_json_reals(json, "layer_density", r->layer_density, r->layers);
    cli_json_open(json, "head_density", '[');
    for (int32_t l = 0; l < r->layers; l++)
        cli_json_reals(json, NULL, r->head_density + (int64_t)l * r->heads, r->heads);
    cli_json_close(json);
}

/* ---------------------------------------------------------------- making */

/* The callbacks of one call of esa_generate. */
typedef struct listener {
    clip_watch watch;
    const clip_maker *maker;
    clip_record *record; /* may be NULL */
    double last;         /* end of the last step */
} listener;

static int32_t on_progress(void *user, const esa_progress *p)
{
    listener *l = user;
    if (p->stage == ESA_STAGE_DENOISE && l->record) {
        const double now = cli_seconds();
        if (p->done != l->watch.done && p->done > 0 && p->done <= l->record->steps)
            l->record->step_seconds[p->done - 1] = now - l->last;
        if (p->done != l->watch.done || l->watch.stage != p->stage) l->last = now;
    }
    if (!l->maker->listen) return clip_progress(&l->watch, p);
    l->watch.stage = p->stage;
    l->watch.done = p->done;
    return clip_interrupted() || l->maker->listen(l->maker->listen_user, p);
}

/* Reads the session after the last step. */
static void on_denoised(void *user, const esa_session *session)
{
    clip_record *r = ((listener *)user)->record;
    esa_session_stats s = { .struct_size = sizeof s };
    for (int32_t i = 0; i < r->steps; i++) {
        if (esa_session_get_stats(session, &s, -1, i)) return;
        r->step_select[i] = s.select_seconds;
        r->step_attention[i] = s.attention_seconds;
        r->step_anchors[i] = (double)s.anchor_calls;
        r->step_age[i] = s.carry_age;
        if (s.sparse_calls == 0 && r->warmup == i) r->warmup++;
    }
    for (int32_t l = 0; l < r->layers; l++) {
        if (esa_session_get_stats(session, &s, l, -1)) return;
        r->layer_density[l] = s.density;
        if (esa_session_get_heads(session, r->head_density + (int64_t)l * r->heads, r->heads, l,
                                  -1))
            return;
    }
}

/* Where the memory of a GPU goes, before the first step of a clip. What was printed for an earlier
 * clip is not printed again. */
static void on_plan(void *user, const char *line)
{
    clip_maker *m = user;
    char known[200];
    const char *rate = strstr(line, " at "); /* is measured, and differs every time */
    snprintf(known, sizeof known, "%.*s", rate ? (int)(rate - line) : 199, line);
    if (strstr(m->said, known)) return;
    if (!m->listen) cli_progress_end();
    fprintf(stderr, "%s\n", line);
    if (strlen(m->said) + strlen(line) + 2 > sizeof m->said) m->said[0] = 0;
    const size_t used = strlen(m->said);
    snprintf(m->said + used, sizeof m->said - used, "%s\n", line);
}

/* The engine checks this too, but its message does not name the option. */
int clip_check_masks(const clip_maker *m, const clip_request *r)
{
    esa_mask_file *file = NULL;
    esa_mask_file_info info = { .struct_size = sizeof info };
    esa_status status = esa_mask_file_open(m->ctx, &file, r->p.masks);
    if (!status) status = esa_mask_file_get_info(file, &info);
    esa_mask_file_free(file);
    if (status) return cli_fail_esa(m->ctx, status, m->what);
    if (info.steps == r->p.steps || r->p.session.step_map != ESA_STEP_MAP_EXACT) return CLI_OK;
    return cli_fail("%s: '%s' was made for %d steps, this run has %d: --step-map nearest takes "
                    "for each step the masks of the step at the same noise level",
                    m->what, r->p.masks, (int)info.steps, (int)r->p.steps);
}

int clip_make(clip_maker *m, esa_frames **frames, clip_record *record, const clip_request *request,
              const char *label, int64_t clips_left, int quiet)
{
    esa_frames *none = NULL;
    clip_request r = *request;
    esa_generate_params *p = &r.p;
    int32_t dense_layer[CLI_MAX_LIST], layer16[CLI_MAX_LIST];
    listener l = { .watch = { .label = label,
                              .clips_left = clips_left,
                              .quiet = quiet,
                              .stage = -1,
                              .done = -1 },
                   .maker = m,
                   .record = record };
    if (frames) *frames = NULL;
    int status = clip_resolve(m, &r);
    if (!status && r.method == METHOD_CACHED) status = clip_check_masks(m, &r);
    if (!status && record && record_new(record, p->steps, m->info.layers, m->info.heads))
        status = cli_fail("%s: out of memory", m->what);
    if (status) return status;
    cli_list_copy(dense_layer, &r.dense_layers);
    p->session.dense_layers = dense_layer;
    p->session.dense_layer_count = r.dense_layers.count;
    cli_list_copy(layer16, &r.layers16);
    p->session.layers16 = layer16;
    p->session.layers16_count = r.layers16.count;
    if (p->prompt_embeds) p->prompt = NULL;
    esa_generate_stats stats = { .struct_size = sizeof stats };
    p->progress = on_progress;
    p->progress_user = &l;
    p->say = on_plan;
    p->say_user = m;
    if (record) {
        clip_carry_name(record->carry, &r.anchors);
        record->carry_format = r.carry_format;
        p->denoised = on_denoised;
        p->denoised_user = &l;
    }
    const esa_status made = m->video.generate(m->model, frames ? frames : &none, p, &stats);
    if (!m->listen) cli_progress_end();
    m->video.frames_free(none);
    if (!made) {
        m->video.model_get_info(m->model, &m->info); /* weights may have moved for this size */
        if (record) record->stats = stats;
        const int unsaid = m->device.device == ESA_DEVICE_CPU; /* else it is in the plan */
        if (unsaid && stats.vae_tile && !p->vae_tile && !m->tiled++)
            fprintf(stderr, "memory    whole frames do not fit: decoded in tiles of %d pixels\n",
                    (int)stats.vae_tile);
        /* nothing ran sparse, so there is no warm-up */
        if (record && stats.session.sparse_calls == 0) record->warmup = 0;
        return CLI_OK;
    }
    if (record) clip_record_free(record);
    return clip_interrupted() ? CLIP_INTERRUPTED : cli_fail_esa(m->ctx, made, m->what);
}

int clip_compare(clip_maker *m, esa_metrics *metrics, const esa_frames *reference,
                 const esa_frames *frames)
{
    memset(metrics, 0, sizeof *metrics);
    metrics->struct_size = sizeof *metrics;
    const esa_status status = m->video.frames_measure(m->ctx, metrics, NULL, reference, frames,
                                                      m->lpips, NULL, NULL);
    return cli_status(m->ctx, status, m->what);
}
