/* generate_run.c - the work of `esa generate`: model, prompts, videos, comparison, files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "generate.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_SIZE 4200

typedef struct job {
    const generate_options *o;
    cli_video video;
    esa_ctx *ctx;
    esa_model *model;
    esa_model_info info;
    cli_json *json;
    cli_table *table;
    const char *ending;             /* of files in --output-dir */
} job;

static const char what[] = "generate";

/* ---------------------------------------------------------------- where videos go */

static int ends_with(const char *path, const char *ending)
{
    const size_t n = strlen(path), m = strlen(ending);
    return n > m && strcasecmp(path + n - m, ending) == 0;
}

/* The folder a path lies in must be there and writable: better said now than after the work. */
static int folder_of(char *folder, size_t size, const char *path)
{
    snprintf(folder, size, "%s", path);
    size_t n = strlen(folder);
    while (n > 1 && folder[n - 1] == '/') folder[--n] = 0;
    char *slash = strrchr(folder, '/');
    if (!slash) snprintf(folder, size, ".");
    else slash[slash == folder] = 0;
    struct stat about;
    if (stat(folder, &about) != 0) return cli_fail("%s: '%s' cannot be written: %s: %s", what, path, folder, strerror(errno));
    if (!S_ISDIR(about.st_mode)) return cli_fail("%s: '%s' cannot be written: %s is no folder", what, path, folder);
    if (access(folder, W_OK | X_OK) != 0) return cli_fail("%s: '%s' cannot be written: %s: %s", what, path, folder, strerror(errno));
    return CLI_OK;
}

int generate_target(char *target, size_t size, const char *path)
{
    struct stat about;
    char folder[PATH_SIZE];
    const size_t n = strlen(path);
    if (n == 0 || n + 2 > size) return cli_fail("%s: a name of %zu bytes cannot be written", what, n);
    const int exists = stat(path, &about) == 0, why = errno;
    snprintf(target, size, "%s%s", path, exists && S_ISDIR(about.st_mode) && path[n - 1] != '/' ? "/" : "");
    const int is_folder = target[strlen(target) - 1] == '/', mp4 = ends_with(target, ".mp4");
    /* With a slash behind it a file is not found at all: ENOTDIR. */
    const int file_as_folder = is_folder && (exists ? !S_ISDIR(about.st_mode) : why == ENOTDIR);
    if (file_as_folder) return cli_fail("%s: '%s' is a file, it cannot become a folder of pictures", what, path);
    if (!is_folder && !mp4 && !ends_with(target, ".y4m") && !ends_with(target, ".png"))
        return cli_fail("%s: '%s' has no ending that names a format: expected .mp4, .y4m, or a folder of PNG (a name that ends in /)", what,
                        path);
    if (mp4 && !cli_video_mp4())
        return cli_fail("%s: '%s' cannot be written: this build has no FFmpeg (libavformat-dev, libavcodec-dev); .y4m and folders of PNG work",
                        what, path);
    if (exists && !S_ISDIR(about.st_mode) && !S_ISREG(about.st_mode))
        return cli_fail("%s: '%s' is no regular file, it cannot be replaced", what, path);
    return folder_of(folder, sizeof folder, target);
}

/* a.mp4 -> a-dense.mp4, frames/ -> frames-dense/ */
static void dense_name(char *out, size_t size, const char *path)
{
    const size_t n = strlen(path);
    if (path[n - 1] == '/') snprintf(out, size, "%.*s-dense/", (int)(n - 1), path);
    else {
        const char *dot = strrchr(path, '.');
        snprintf(out, size, "%.*s-dense%s", (int)(dot - path), path, dot);
    }
}

/* ---------------------------------------------------------------- settings */

static int fill_params(const job *j, esa_generate_params *p, const char *prompt)
{
    const generate_options *o = j->o;
    static const int selectors[] = { ESA_SELECT_FULL, ESA_SELECT_ENTROPY, ESA_SELECT_RF_V2, ESA_SELECT_ADA_BSA, ESA_SELECT_ENTROPY };
    *p = j->video.generate_params();
    p->frames = (int32_t)o->frames;
    p->height = (int32_t)o->height;
    p->width = (int32_t)o->width;
    p->steps = (int32_t)o->steps;
    p->scheduler = o->scheduler;
    p->seed = (uint64_t)o->seed;
    p->guidance = o->guidance;
    p->flow_shift = o->shift;
    p->prompt = o->prompt_embeds ? NULL : prompt;
    p->negative_prompt = o->negative;
    p->prompt_embeds = o->prompt_embeds;
    p->save_embeds = o->save_embeds;
    p->latents = o->latents;
    p->save_latents = o->save_latents;
    p->masks = o->masks;
    p->vae_tile = (int32_t)o->vae_tile;
    esa_session_params *s = &p->session;
    s->mode = o->method == METHOD_DENSE ? ESA_SESSION_DENSE : o->method == METHOD_CACHED ? ESA_SESSION_CACHED : ESA_SESSION_ONLINE;
    s->warmup_frac = o->warmup;
    s->dense_first_layer = (int32_t)o->dense_first;
    s->refresh_every = (int32_t)o->refresh;
    s->step_map = o->step_map;
    s->select = esa_select_params_default(selectors[o->method]);
    s->select.budget = o->budget;
    s->select.samples = (int32_t)o->samples;
    s->select.cdf_threshold = o->cdf;
    s->select.layout.order = o->order;
    for (int i = 0; i < 3 && o->window.count; i++) s->select.layout.window[i] = (int32_t)o->window.whole[i];
    s->attention.tail = o->tail;
    /* Small blocks: the sequences a CPU can afford are short, and its kernels do not mind. */
    s->select.block_q = s->select.block_k = 64;
    return o->block ? cli_block_parse(o->block, &s->select.block_q, &s->select.block_k) : CLI_OK;
}

/* ---------------------------------------------------------------- one video */

static int make(job *j, esa_frames **frames, esa_generate_stats *stats, const esa_generate_params *params, const char *label)
{
    esa_generate_params p = *params;
    generate_watch watch = { .label = label, .stage = -1 };
    memset(stats, 0, sizeof *stats);
    stats->struct_size = sizeof *stats;
    p.progress = generate_progress;
    p.progress_user = &watch;
    const esa_status status = j->video.generate(j->model, frames, &p, stats);
    cli_progress_end();
    if (status == ESA_OK) return CLI_OK;
    if (!generate_interrupted()) return cli_fail_esa(j->ctx, status, what);
    cli_fail("%s: interrupted, nothing was written", what);
    return 130;
}

static int save(job *j, const esa_frames *frames, const char *path)
{
    esa_save_params p = j->video.save_params();
    p.quality = (int32_t)j->o->quality;
    p.fps = j->o->fps;
    const esa_status status = j->video.frames_save(j->ctx, frames, path, &p);
    return status == ESA_OK ? CLI_OK : cli_fail_esa(j->ctx, status, what);
}

static void json_video(job *j, const char *method, const char *path, const esa_generate_stats *s)
{
    cli_json *json = j->json;
    cli_json_text(json, "method", method);
    cli_json_text(json, "file", path);
    cli_json_real(json, "seconds", s->seconds);
    cli_json_real(json, "text_seconds", s->text_seconds);
    cli_json_real(json, "denoise_seconds", s->denoise_seconds);
    cli_json_real(json, "attention_seconds", s->attention_seconds);
    cli_json_real(json, "select_seconds", s->session.select_seconds);
    cli_json_real(json, "gemm_seconds", s->gemm_seconds);
    cli_json_real(json, "decode_seconds", s->decode_seconds);
    cli_json_int(json, "peak_bytes", s->peak_bytes);
    cli_json_real(json, "density_asked", s->session.density_asked);
    cli_json_real(json, "density", s->session.density);
    cli_json_real(json, "kept_mass", s->session.mass);
    cli_json_int(json, "calls", s->session.calls);
    cli_json_int(json, "sparse_calls", s->session.sparse_calls);
    cli_json_text(json, "kernel", s->session.kernel);
}

static void table_row(job *j, const char *method, const char *path, const esa_generate_stats *s, const esa_generate_stats *dense,
                      const esa_metrics *m)
{
    static const char *const head[] = { "video", "method", "time", "s/step", "speedup", "density", "PSNR", "SSIM" };
    if (!j->table) {
        j->table = cli_table_new(8, 2);
        for (int i = 0; i < 8; i++) cli_cell(j->table, "%s", head[i]);
    }
    cli_table *t = j->table;
    cli_cell(t, "%s", path);
    cli_cell(t, "%s", method);
    cli_cell(t, "%.1f s", s->seconds);
    cli_cell(t, "%.2f", s->steps ? s->denoise_seconds / s->steps : 0.0);
    if (dense) cli_cell(t, "%.2fx", dense->denoise_seconds / s->denoise_seconds);
    else cli_cell(t, "-");
    if (s->session.sparse_calls) cli_cell(t, "%.3f", s->session.density);
    else cli_cell(t, "1");
    if (!m) {
        cli_cell(t, "-");
        cli_cell(t, "-");
        return;
    }
    if (isinf(m->psnr)) cli_cell(t, "equal");
    else cli_cell(t, "%.2f dB", m->psnr);
    cli_cell(t, "%.4f", m->ssim);
}

static int beside(job *j, const esa_frames *left, const esa_frames *right, const char *path)
{
    esa_frames *both;
    const esa_status status = j->video.frames_beside(j->ctx, &both, left, right);
    if (status != ESA_OK) return cli_fail_esa(j->ctx, status, what);
    const int saved = save(j, both, path);
    j->video.frames_free(both);
    return saved;
}

/* One prompt: the video, and the dense one first where it is asked for. Files are written when everything is made. */
static int one_prompt(job *j, const char *prompt, const char *path)
{
    const generate_options *o = j->o;
    char dense_path[PATH_SIZE], method[32];
    esa_frames *frames = NULL, *dense = NULL;
    esa_generate_stats stats, dense_stats;
    esa_metrics metrics = { .struct_size = sizeof metrics };
    esa_generate_params p;
    int status = fill_params(j, &p, prompt);
    if (status) return status;
    cli_name(method, METHODS, o->method);
    if (o->compare) {
        if (o->dense_out) snprintf(dense_path, sizeof dense_path, "%s", o->dense_out);
        else dense_name(dense_path, sizeof dense_path, path);
        esa_generate_params d = p;
        d.session.mode = ESA_SESSION_DENSE;
        d.save_embeds = d.save_latents = NULL;
        status = make(j, &dense, &dense_stats, &d, "dense");
    }
    if (!status) status = make(j, &frames, &stats, &p, method);
    if (!status && o->compare) {
        const esa_status compared = j->video.compare(j->ctx, &metrics, dense, frames);
        if (compared != ESA_OK) status = cli_fail_esa(j->ctx, compared, what);
    }
    if (!status && o->compare) status = save(j, dense, dense_path);
    if (!status) status = save(j, frames, path);
    if (!status && o->beside_out) status = beside(j, dense, frames, o->beside_out);
    if (!status) {
        cli_json_open(j->json, NULL, '{');
        cli_json_text(j->json, "prompt", o->prompt_embeds ? NULL : prompt);
        cli_json_int(j->json, "frames", stats.frames);
        cli_json_int(j->json, "height", stats.height);
        cli_json_int(j->json, "width", stats.width);
        cli_json_int(j->json, "steps", stats.steps);
        cli_json_int(j->json, "tokens", stats.tokens);
        json_video(j, method, path, &stats);
        if (o->compare) {
            cli_json_real(j->json, "speedup", dense_stats.denoise_seconds / stats.denoise_seconds);
            cli_json_real(j->json, "psnr", metrics.psnr);
            cli_json_real(j->json, "ssim", metrics.ssim);
            cli_json_real(j->json, "psnr_min", metrics.psnr_min);
            cli_json_real(j->json, "ssim_min", metrics.ssim_min);
            cli_json_open(j->json, "dense", '{');
            json_video(j, "dense", dense_path, &dense_stats);
            cli_json_close(j->json);
            table_row(j, "dense", dense_path, &dense_stats, NULL, NULL);
            table_row(j, method, path, &stats, &dense_stats, &metrics);
        } else {
            printf("%s: %d frame%s of %d x %d, %d step%s, seed %lld, %s", path, stats.frames, stats.frames > 1 ? "s" : "", stats.width, stats.height,
                   stats.steps, stats.steps > 1 ? "s" : "", (long long)o->seed, method);
            if (stats.session.sparse_calls) printf(" at density %.3f", stats.session.density);
            printf("; %.1f s (text %.1f, denoising %.1f, decoding %.1f), peak %.0f MB\n", stats.seconds, stats.text_seconds,
                   stats.denoise_seconds, stats.decode_seconds, 1e-6 * (double)stats.peak_bytes);
            fflush(stdout);
        }
        cli_json_close(j->json);
    }
    j->video.frames_free(frames);
    j->video.frames_free(dense);
    return status;
}

/* ---------------------------------------------------------------- all videos */

static int all_prompts(job *j, const cli_prompts *prompts)
{
    const generate_options *o = j->o;
    char path[PATH_SIZE], target[PATH_SIZE + 32], other[PATH_SIZE];
    const char *const files[] = { o->save_embeds, o->save_latents, o->json };
    int made_folder = 0, status = CLI_OK;
    for (int i = 0; i < 3; i++)             /* one that is there may be a pipe or a terminal: its folder says nothing */
        if (files[i] && access(files[i], F_OK) != 0 && (status = folder_of(other, sizeof other, files[i])) != 0) return status;
    if (!o->output_dir) {
        status = generate_target(target, sizeof target, o->out ? o->out : cli_video_mp4() ? "out.mp4" : "out.y4m");
        if (!status && o->dense_out) status = generate_target(other, sizeof other, o->dense_out);
        if (!status && o->beside_out) status = generate_target(other, sizeof other, o->beside_out);
        return status ? status : one_prompt(j, prompts->line[0], target);
    }
    if (mkdir(o->output_dir, 0777) == 0) made_folder = 1;
    else if (errno != EEXIST) return cli_fail("%s: the folder '%s' cannot be made: %s", what, o->output_dir, strerror(errno));
    for (int64_t i = 0; i < prompts->count && !status; i++) {
        if (snprintf(path, sizeof path, "%s/%03lld%s", o->output_dir, (long long)i, j->ending) >= (int)sizeof path)
            status = cli_fail("%s: the name of the folder is too long", what);
        if (!status) status = generate_target(target, sizeof target, path);
        if (!status) status = one_prompt(j, prompts->line[i], target);
    }
    if (status && made_folder) rmdir(o->output_dir);       /* fails where finished videos stand in it: they are whole and stay */
    return status;
}

static void report_line(void *user, const char *line)
{
    (void)user;
    printf("%s\n", line);
}

static int open_failed(job *j, esa_status status)
{
    const char *family = status == ESA_ERR_UNSUPPORTED ? cli_model_family(esa_ctx_error(j->ctx)) : NULL;
    if (family)
        return cli_fail("%s: the engine does not run %s yet; diffusers with esa.apply(pipe, esa.EsaConfig(budget=0.5)) in Python does", what,
                        family);
    return cli_fail_esa(j->ctx, status, what);
}

static int with_model(job *j, const char *folder)
{
    const generate_options *o = j->o;
    cli_prompts prompts;
    esa_model_params mp = j->video.model_params();
    mp.hold = o->hold;
    if (o->prompt_embeds) mp.parts &= ~ESA_PART_TEXT;
    if (o->check) mp.report = report_line;
    esa_status opened = o->check ? j->video.model_check(j->ctx, folder, &mp) : j->video.model_open(j->ctx, &j->model, folder, &mp);
    if (opened != ESA_OK) return open_failed(j, opened);
    if (o->check) {
        printf("%s: all files are there, every name and shape is as the configuration says\n", folder);
        return CLI_OK;
    }
    j->info.struct_size = sizeof j->info;
    opened = j->video.model_info(j->model, &j->info);
    if (opened != ESA_OK) return cli_fail_esa(j->ctx, opened, what);
    const int tiny = strcmp(j->info.name, "wan-tiny") == 0;
    int status = cli_prompts_get(&prompts, o->prompt_embeds ? "" : o->prompt, o->prompts_file, o->num_prompts, tiny, what);
    if (status) return status;
    if (prompts.count > 1 && !o->output_dir) {
        cli_fail("%s: %lld prompts need --output-dir DIR", what, (long long)prompts.count);
        status = CLI_USAGE;
    }
    j->json = cli_json_new();
    cli_machine_json(j->json, j->ctx, NULL);
    cli_json_text(j->json, "model", j->info.name);
    cli_json_text(j->json, "config_hash", j->info.config_hash);
    cli_json_int(j->json, "seed", o->seed);
    cli_json_real(j->json, "guidance", isnan(o->guidance) ? j->info.guidance : o->guidance);
    cli_json_real(j->json, "budget", o->budget);
    cli_json_open(j->json, "videos", '[');
    if (!status) status = all_prompts(j, &prompts);
    if (j->table) {                                     /* also after a failure: the videos in it are whole */
        cli_table_print(j->table, stdout);
        printf("\ntime: everything; speedup: of the denoising steps; density: kept key blocks where attention is sparse;\n"
               "PSNR, SSIM: against the dense video.\n");
    }
    const int saved = cli_json_save(j->json, status ? NULL : o->json);
    cli_prompts_free(&prompts);
    return status ? status : saved;
}

int generate_run(const generate_options *o)
{
    char folder[PATH_SIZE];
    job j = { .o = o, .ending = cli_video_mp4() ? ".mp4" : ".y4m" };
    int32_t bq, bk;
    int status = o->block ? cli_block_parse(o->block, &bq, &bk) : CLI_OK;
    if (!status) status = cli_video_open(&j.video, what);
    if (!status) status = cli_model_find(folder, sizeof folder, o->model, what);
    if (status) { cli_video_close(&j.video); return status; }
    status = cli_ctx_new(&j.ctx, o->threads);
    if (!status) {
        generate_catch_signals();
        status = with_model(&j, folder);
        j.video.model_free(j.model);
        esa_ctx_free(j.ctx);
    }
    cli_video_close(&j.video);
    return status;
}
