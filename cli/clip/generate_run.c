/* generate_run.c - the work of `esa generate`: model, prompts, videos, comparison, files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/generate.h"
#include "clip/video_list.h"
#include "core/folders.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PATH_SIZE   4200
#define WORK_MARGIN 1.02 /* more work than this times what was asked for is worth a line */

typedef struct job {
    const generate_options *o;
    clip_maker maker;
    cli_json *json;
    cli_table *table;
    const char *ending;                 /* format of files in --output-dir */
    int64_t frames;                     /* per video */
    const char *dense_out, *beside_out; /* checked paths; NULL: -dense in the video's name, none */
    int64_t made;                       /* prompts whose videos are written */
    int told;                           /* 1: a line about the work was printed */
    char *carry;                        /* the line about carry of the first video; NULL: none */
} job;

static const char what[] = "generate";

/* ---------------------------------------------------------------- where videos go */

static esa_save_params save_params(const job *j)
{
    esa_save_params p = j->maker.video.save_params_default();
    p.quality = (int32_t)j->o->quality;
    p.fps = j->o->fps;
    return p;
}

/* Checks, before any work, that a video can be saved at path, and copies path to target with a '/'
 * after an existing folder. CLI_FAILED after a message. */
static int target_of(const job *j, char *target, size_t size, const char *path)
{
    struct stat about;
    const esa_save_params p = save_params(j);
    const size_t n = strlen(path);
    if (n == 0 || n + 2 > size)
        return cli_fail("%s: a name of %zu bytes cannot be written", what, n);
    const int exists = stat(path, &about) == 0, folder = exists && S_ISDIR(about.st_mode);
    snprintf(target, size, "%s%s", path, folder && path[n - 1] != '/' ? "/" : "");
    if (exists && !folder && !S_ISREG(about.st_mode))
        return cli_fail("%s: '%s' is not a regular file and cannot be replaced", what, path);
    if (video_format(target) == VIDEO_MP4 && !cli_video_mp4())
        return cli_fail("%s: '%s' cannot be written: this build has no FFmpeg (libavformat-dev, "
                        "libavcodec-dev); .y4m, .npy, .safetensors and folders of PNG work",
                        what, path);
    const esa_status checked = j->maker.video.frames_save_check(j->maker.ctx, target, j->frames,
                                                                &p);
    return checked ? cli_fail_esa(j->maker.ctx, checked, what) : cli_folder_ready(target, what);
}

/* The dense video of path: given, or a.mp4 -> a-dense.mp4, frames/ -> frames-dense/ */
static void dense_name(char *out, size_t size, const char *given, const char *path)
{
    const size_t n = strlen(path);
    const char *end = path[n - 1] == '/' ? path + n - 1 : strrchr(path, '.');
    if (given)
        snprintf(out, size, "%s", given);
    else
        snprintf(out, size, "%.*s-dense%s", (int)(end - path), path, end);
}

/* ---------------------------------------------------------------- one video */

/* The line about an interruption: only this file knows what is whole on disk. */
static int make(job *j, clip_pair *pair, const clip_request *request, int64_t clips_left)
{
    const int status = clip_pair_make(&j->maker, pair, request, j->o->compare, clips_left);
    if (status == CLIP_INTERRUPTED && j->made)
        cli_fail("%s: interrupted; %lld before this one %s whole", what, (long long)j->made,
                 j->made == 1 ? "is" : "are");
    else if (status == CLIP_INTERRUPTED)
        cli_fail("%s: interrupted, nothing was written", what);
    return status;
}

static int save(job *j, const esa_frames *frames, const char *path)
{
    return clip_save(&j->maker, frames, path, j->o->quality, j->o->fps);
}

/* "0.437 (asked 0.44)"; only realised if no work was asked for */
static void work_cell(cli_table *table, const esa_session_stats *s)
{
    if (isfinite(s->work_asked))
        cli_cell(table, "%.3f (asked %.4g)", s->work, s->work_asked);
    else
        cli_cell(table, "%.3f", s->work);
}

/* dense NULL: this is the dense video */
static void table_row(job *j, const char *method, const char *path, const clip_record *record,
                      const clip_record *dense, const esa_metrics *m)
{
    const esa_generate_stats *s = &record->stats;
    if (!j->table) {
        j->table = cli_table_new(j->maker.lpips ? 10 : 9, 2);
        cli_row(j->table, "video|method|time|s/step|speedup|density|work|PSNR|SSIM");
        if (j->maker.lpips) cli_cell(j->table, "LPIPS");
    }
    cli_cell(j->table, "%s", path);
    cli_row(j->table, "%s|%.1f s|%.2f", method, s->seconds, s->denoise_seconds / s->steps);
    if (!dense) {
        cli_row(j->table, "-|1|1|-|-");
        if (j->maker.lpips) cli_cell(j->table, "-");
        return;
    }
    cli_row(j->table, "%.2fx|%.3f", dense->stats.denoise_seconds / s->denoise_seconds,
            clip_density(record));
    work_cell(j->table, &s->session);
    cli_row(j->table, "%.2f dB|%.4f", m->psnr, m->ssim);
    if (j->maker.lpips) cli_cell(j->table, "%.4f", m->lpips);
}

/* Keeps what is said about carry below the table: it is the same for all videos. */
static void keep_carry(job *j, const clip_record *record)
{
    size_t bytes;
    FILE *memory = j->carry ? NULL : open_memstream(&j->carry, &bytes);
    if (!memory) return;
    clip_carry_print(memory, record);
    fclose(memory);
}

static void report(job *j, const char *prompt, int64_t seed, const char *path,
                   const char *dense_path, const clip_pair *pair)
{
    const clip_record *record = &pair->record, *dense = &pair->dense_record;
    const esa_metrics *metrics = &pair->metrics;
    const generate_options *o = j->o;
    const esa_generate_stats *s = &record->stats;
    char method[32];
    cli_name(method, METHODS, o->clip.method);
    cli_json_open(j->json, NULL, '{');
    cli_json_fields(j->json,
                    "prompt %s seed %ld frames %d height %d width %d steps %d tokens %d method %s "
                    "file %s",
                    prompt, seed, s->frames, s->height, s->width, s->steps, s->tokens, method,
                    path);
    clip_record_json(j->json, record);
    if (s->session.work > WORK_MARGIN * s->session.work_asked && !j->told++)
        fprintf(
            stderr,
            "%s: work %.3f was asked for, but %.3f was spent: %sblocks are whole, and every row "
            "keeps at least one, which counts in short videos\n",
            what, s->session.work_asked, s->session.work,
            s->session.anchor_calls ? "anchors run dense, " : "");
    if (o->compare) {
        cli_json_fields(j->json, "speedup %g psnr %g ssim %g lpips %g psnr_min %g ssim_min %g",
                        clip_pair_speedup(pair), metrics->psnr, metrics->ssim, metrics->lpips,
                        metrics->psnr_min, metrics->ssim_min);
        cli_json_open(j->json, "dense", '{');
        cli_json_fields(j->json, "method %s file %s", "dense", dense_path);
        clip_record_json(j->json, dense);
        cli_json_close(j->json);
        table_row(j, "dense", dense_path, dense, NULL, NULL);
        table_row(j, method, path, record, dense, metrics);
        keep_carry(j, record);
    } else {
        printf("%s: %d frame%s of %d x %d, %d step%s, seed %lld, %s", path, s->frames,
               s->frames > 1 ? "s" : "", s->width, s->height, s->steps, s->steps > 1 ? "s" : "",
               (long long)seed, method);
        if (s->session.sparse_calls)
            printf(" at density %.3f, attention work %.3f", s->session.density, s->session.work);
        if (s->session.sparse_calls && isfinite(s->session.work_asked))
            printf(" (asked %.4g)", s->session.work_asked);
        const int anchors = clip_anchor_steps(NULL, record);
        if (anchors) printf(", %d anchor%s", anchors, anchors > 1 ? "s" : "");
        if (s->session.eight_calls)
            printf(", %lld of %lld calls in 8 bits", (long long)s->session.eight_calls,
                   (long long)s->session.calls);
        if (s->computed_steps < s->steps) printf(", %d steps computed", s->computed_steps);
        const int64_t peak = s->device_peak_bytes ? s->device_peak_bytes : s->peak_bytes;
        printf("; %.1f s (text %.1f, denoising %.1f, decoding %.1f), peak %.0f MB%s\n", s->seconds,
               s->text_seconds, s->denoise_seconds, s->decode_seconds, 1e-6 * (double)peak,
               s->device_peak_bytes ? " on the GPU" : "");
        fflush(stdout);
    }
    cli_json_close(j->json);
}

/* One prompt: the video, and before it the dense one to compare with. Files are written after both
 * are made. */
static int one_prompt(job *j, const char *prompt, int64_t seed, const char *path,
                      int64_t clips_left)
{
    const generate_options *o = j->o;
    char dense_path[PATH_SIZE] = "";
    clip_pair pair;
    clip_request r = o->clip;
    r.p.prompt = prompt;
    r.p.seed = (uint64_t)seed;
    if (o->compare) dense_name(dense_path, sizeof dense_path, j->dense_out, path);
    int status = make(j, &pair, &r, clips_left);
    if (!status && o->compare) status = save(j, pair.dense, dense_path);
    if (!status) status = save(j, pair.frames, path);
    if (!status && j->beside_out)
        status = clip_save_beside(&j->maker, pair.dense, pair.frames, j->beside_out, o->quality,
                                  o->fps);
    j->made += !status;
    if (!status) report(j, r.p.prompt_embeds ? NULL : prompt, seed, path, dense_path, &pair);
    clip_pair_free(&j->maker, &pair);
    return status;
}

/* ---------------------------------------------------------------- all videos */

/* The kept fraction that every sparse call was asked for; NaN if a work was asked for instead. */
static double budget_of(const clip_request *r)
{
    if (r->method == METHOD_DENSE) return 1;
    return clip_wants_work(r) ? (double)NAN : r->p.session.select.budget;
}

/* --out, or what stands for it */
static int one_video(job *j, const char *prompt)
{
    const generate_options *o = j->o;
    char path[PATH_SIZE], target[PATH_SIZE], dense[PATH_SIZE], other[PATH_SIZE];
    snprintf(path, sizeof path, "out%s", j->ending);
    int status = target_of(j, target, sizeof target, o->out ? o->out : path);
    if (!status && o->compare) {
        dense_name(path, sizeof path, o->dense_out, target);
        status = target_of(j, dense, sizeof dense, path);
        j->dense_out = dense;
    }
    if (!status && o->beside_out) {
        status = target_of(j, other, sizeof other, o->beside_out);
        j->beside_out = other;
    }
    return status ? status : one_prompt(j, prompt, o->seeds.whole[0], target, 0);
}

/* --output-dir */
static int many_videos(job *j, const cli_prompts *prompts)
{
    const generate_options *o = j->o;
    char path[PATH_SIZE], target[PATH_SIZE + 32], number[32] = "";
    const int64_t total = prompts->count * o->seeds.count;
    int status = CLI_OK;
    for (int64_t i = 0; i < total && !status; i++) {
        const long long prompt = i / o->seeds.count, seed = o->seeds.whole[i % o->seeds.count];
        if (o->seeds.count > 1) snprintf(number, sizeof number, "-s%lld", seed);
        if (snprintf(path, sizeof path, "%s/%03lld%s%s", o->output_dir, prompt, number,
                     j->ending) >= (int)sizeof path)
            status = cli_fail("%s: the name of the folder is too long", what);
        if (!status) status = target_of(j, target, sizeof target, path);
        if (!status) status = one_prompt(j, prompts->line[prompt], seed, target, total - i - 1);
    }
    return status;
}

static int all_videos(job *j, const cli_prompts *prompts)
{
    const generate_options *o = j->o;
    const char *const files[] = { o->clip.p.save_embeds, o->clip.p.save_latents, o->json };
    size_t kept = 0;
    clip_request r = o->clip;
    int status = clip_resolve(&j->maker, &r);
    if (status) return status;
    j->frames = r.p.frames;
    cli_json_fields(j->json, "guidance %g budget %g", r.p.guidance, budget_of(&o->clip));
    cli_json_open(j->json, "videos", '[');
    if (o->output_dir) status = cli_make_folders(o->output_dir, &kept, what);
    if (status) return status;
    for (int i = 0; i < 3 && !status; i++) /* they may lie in the new folder */
        status = cli_file_ready(files[i], what);
    if (!status) status = o->output_dir ? many_videos(j, prompts) : one_video(j, prompts->line[0]);
    cli_json_close(j->json);
    clip_maker_json(j->json, &j->maker); /* weights find their places when a video begins */
    /* finished videos stay, and their folder with them */
    if (status && o->output_dir) cli_unmake_folders(o->output_dir, kept);
    return status;
}

static void report_line(void *user, const char *line)
{
    (void)user;
    printf("%s\n", line);
}

static int with_model(job *j)
{
    const generate_options *o = j->o;
    cli_prompts prompts;
    int status = cli_prompts_get(&prompts, o->clip.p.prompt_embeds ? "" : o->clip.p.prompt,
                                 o->prompts_file, o->num_prompts, clip_is_tiny(&j->maker), what);
    if (status) return status;
    if (prompts.count > 1 && !o->output_dir)
        status = cli_usage("%s: %lld prompts need --output-dir DIR", what,
                           (long long)prompts.count);
    j->json = cli_json_new();
    cli_machine_json(j->json, j->maker.ctx, NULL);
    const clip_opening *open = &o->clip.open;
    const cli_texts *const loras[2] = { &open->lora, &open->lora_2 };
    cli_json_fields(j->json,
                    "model %s transformer %s transformer_2 %s image %s config_hash %s seed %ld",
                    j->maker.info.name, open->transformer, open->transformer_2, o->clip.p.image,
                    j->maker.info.config_hash, o->seeds.whole[0]);
    for (int k = 0; k < 2; k++) {
        cli_json_open(j->json, k ? "lora_2" : "lora", '[');
        for (int i = 0; i < loras[k]->count; i++) cli_json_text(j->json, NULL, loras[k]->text[i]);
        cli_json_close(j->json);
    }
    if (!status) status = all_videos(j, &prompts);
    if (j->table) { /* also after a failure: the videos in it are whole */
        cli_table_print(j->table, stdout);
        printf("\ntime: everything; speedup: of the denoising steps; density: kept key blocks "
               "where attention is sparse;\n"
               "work: attention of the whole video as a share of dense, everything counted;\n"
               "PSNR, SSIM%s: against the dense video.\n%s",
               j->maker.lpips ? ", LPIPS" : "", j->carry ? j->carry : "");
    }
    const int saved = cli_json_save(j->json, status ? NULL : o->json);
    cli_prompts_free(&prompts);
    return status ? status : saved;
}

int generate_run(const generate_options *o)
{
    job j = { .o = o, .ending = cli_video_mp4() ? ".mp4" : ".y4m" };
    clip_opening opening = o->clip.open;
    opening.report = o->clip.open.check ? report_line : NULL;
    if (o->clip.p.prompt_embeds) opening.parts = ESA_PART_ALL & ~ESA_PART_TEXT;
    int status = clip_request_check(&o->clip, what);
    if (status) return status;
    status = clip_open(&j.maker, &opening, what);
    if (!status && opening.check_file)
        printf("%s: every name and shape is right; --transformer takes this file\n",
               opening.check_file);
    else if (!status && opening.check)
        printf("%s: all files are there, every name and shape is as the configuration says\n",
               j.maker.folder);
    else if (!status)
        status = with_model(&j);
    clip_close(&j.maker);
    free(j.carry);
    return status;
}
