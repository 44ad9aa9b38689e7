/* cmd_export.c - `esa export`: converts videos. Tensors, frames and latents become MP4; MP4 becomes
 * frames or tensors.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "clip/clip.h"
#include "core/folders.h"
#include "clip/video_list.h"

#define PATH_SIZE 4200
#define CODECS    "auto|h264|hevc|av1|mpeg4|lossless" /* ESA_CODEC_* */
#define PIXELS    "u8|f32|f16"                        /* ESA_PIXELS_* */
#define FORMATS   "mp4|y4m|png|safetensors|npy"

static const char what[] = "export";

typedef struct job {
    const char *out, *output_dir, *vae, *json_path, *asked; /* asked: --device */
    int dtype;                                              /* ESA_COMPUTE_* */
    cli_device device;
    int to, codec, pixels;
    int64_t quality, tile, threads;
    double fps;
    cli_video video;
    esa_ctx *ctx;
    esa_model *model; /* its VAE; NULL until latents need it */
    cli_json *json;
    int64_t written;
} job;

/* ---------------------------------------------------------------- names */

static int same_file(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Where a video goes: --out, or its stem with another ending in --output-dir or beside it. */
static int target_of(const job *j, char *target, size_t size, const video_entry *e)
{
    char folder[PATH_SIZE], format[32];
    int n;
    struct stat about;
    if (j->out) {
        const int is_folder = stat(j->out, &about) == 0 && S_ISDIR(about.st_mode) &&
                              j->out[strlen(j->out) - 1] != '/';
        n = snprintf(target, size, "%s%s", j->out, is_folder ? "/" : "");
    } else {
        if (j->output_dir)
            snprintf(folder, sizeof folder, "%s", j->output_dir);
        else
            cli_folder_of(folder, sizeof folder, e->path);
        cli_name(format, FORMATS, j->to);
        const int png = strcmp(format, "png") == 0;
        const int here = strcmp(folder, ".") == 0;
        n = snprintf(target, size, "%s%s%s%s%s", here ? "" : folder, here ? "" : "/", e->stem,
                     png ? "/" : ".", png ? "" : format);
    }
    return n > 0 && n < (int)size ? CLI_OK
                                  : cli_fail("%s: a name of %d bytes is too long", what, n);
}

/* ---------------------------------------------------------------- latents */

/* The folder of the model: --vae may name its vae folder too. */
static int model_folder(const job *j, char *folder, size_t size)
{
    char path[PATH_SIZE + 64], above[PATH_SIZE];
    snprintf(path, sizeof path, "%s/model_index.json", j->vae);
    if (access(path, F_OK) != 0) {
        cli_folder_of(above, sizeof above, j->vae);
        snprintf(path, sizeof path, "%s/config.json", j->vae);
        const int is_part = access(path, F_OK) == 0;
        snprintf(path, sizeof path, "%s/model_index.json", above);
        if (is_part && access(path, F_OK) == 0) return cli_model_find(folder, size, above, what);
    }
    return cli_model_find(folder, size, j->vae, what);
}

static int decode(job *j, esa_frames **frames, const video_entry *e)
{
    char folder[PATH_SIZE];
    if (!j->vae)
        return cli_usage("%s: '%s' holds latents; --vae FOLDER names the model that decodes them",
                         what, e->path);
    if (!j->model) {
        const int status = model_folder(j, folder, sizeof folder);
        if (status) return status;
        esa_model_params p = j->video.model_params_default();
        p.compute = j->dtype;
        p.parts = ESA_PART_VAE;
        p.device = j->device.device;
        const esa_status opened = j->video.model_open(j->ctx, &j->model, folder, &p);
        if (opened) return cli_fail_esa(j->ctx, opened, what);
    }
    esa_decode_params p = j->video.decode_params_default();
    clip_watch watch = { .label = e->stem, .stage = -1 };
    p.latents = e->path;
    p.vae_tile = (int32_t)j->tile;
    p.progress = clip_progress;
    p.progress_user = &watch;
    const esa_status status = j->video.decode(j->model, frames, &p);
    cli_progress_end();
    if (!status) return CLI_OK;
    return clip_interrupted() ? CLIP_INTERRUPTED : cli_fail_esa(j->ctx, status, what);
}

/* ---------------------------------------------------------------- one video */

static int load(job *j, esa_frames **frames, const video_entry *e)
{
    if (e->latents) return decode(j, frames, e);
    esa_load_params p = j->video.load_params_default();
    p.fps = j->fps;
    return cli_status(j->ctx, j->video.frames_load(j->ctx, frames, e->path, &p), what);
}

/* frames NULL: only checks, before any work, that a video can be saved there. */
static int save(job *j, const esa_frames *frames, const char *target)
{
    esa_save_params p = j->video.save_params_default();
    p.fps = j->fps;
    p.quality = (int32_t)j->quality;
    p.codec = j->codec;
    p.pixels = j->pixels;
    return cli_status(j->ctx,
                      frames ? j->video.frames_save(j->ctx, frames, target, &p)
                             : j->video.frames_save_check(j->ctx, target, 1, &p),
                      what);
}

static void report(job *j, const video_entry *e, const char *target, const esa_frames *frames)
{
    esa_frames_info info = { .struct_size = sizeof info };
    struct stat about;
    j->video.frames_get_info(frames, &info);
    const double fps = j->fps > 0 ? j->fps : info.fps;
    const int is_file = stat(target, &about) == 0 && S_ISREG(about.st_mode);
    printf("%s -> %s: %d frames of %d x %d at %.4g a second", e->path, target, info.frames,
           info.width, info.height, fps);
    if (is_file) printf(", %.1f KB", (double)about.st_size / 1000);
    printf("\n");
    cli_json_open(j->json, NULL, '{');
    cli_json_fields(j->json, "input %s output %s latents %i frames %d height %d width %d fps %g",
                    e->path, target, e->latents, info.frames, info.height, info.width, fps);
    if (is_file)
        cli_json_int(j->json, "bytes", about.st_size);
    else
        cli_json_text(j->json, "bytes", NULL);
    cli_json_close(j->json);
    j->written++;
}

static int export_one(job *j, const video_entry *e, int in_folder)
{
    char target[PATH_SIZE];
    esa_frames *frames = NULL;
    size_t kept = 0;
    int status = target_of(j, target, sizeof target, e);
    if (status) return status;
    if (same_file(target, e->path)) {
        if (in_folder) {
            printf("%s has that format already\n", e->path);
            return CLI_OK;
        }
        return cli_fail(
            "%s: '%s' would be written over itself; give --out, --output-dir or another --to", what,
            e->path);
    }
    if (clip_interrupted()) return CLIP_INTERRUPTED;
    status = save(j, NULL, target);
    if (!status) status = cli_make_folder_of(target, &kept, what);
    if (status) return status;
    status = load(j, &frames, e);
    if (!status) status = save(j, frames, target);
    if (!status) report(j, e, target, frames);
    j->video.frames_free(frames);
    if (status) {
        char folder[PATH_SIZE];
        cli_folder_of(folder, sizeof folder, target);
        cli_unmake_folders(folder, kept);
    }
    return status;
}

/* ---------------------------------------------------------------- all videos */

static int export_path(job *j, const char *path)
{
    video_list list = { 0 };
    struct stat about;
    const int is_folder = stat(path, &about) == 0 && S_ISDIR(about.st_mode);
    int status = video_list_get(&list, &j->video, j->ctx, path, !is_folder || j->vae, what);
    int64_t videos = 0;
    for (int64_t i = 0; i < list.count; i++)
        videos += !i || strcmp(list.entry[i].stem, list.entry[i - 1].stem) != 0;
    if (!status && j->out && videos > 1)
        status = cli_usage("%s: '%s' holds %lld videos, --out names one; give --output-dir DIR",
                           what, path, (long long)videos);
    for (int64_t i = 0; i < list.count && !status; i++) {
        /* the same video in a lossier format */
        if (i && strcmp(list.entry[i].stem, list.entry[i - 1].stem) == 0) continue;
        status = export_one(j, &list.entry[i], list.folder);
    }
    video_list_free(&list);
    return status;
}

static int run(job *j, int words, char **argv)
{
    int status = cli_video_open(&j->video, what);
    if (!status && j->vae) status = cli_device_choose(&j->device, j->asked, what);
    if (!status) status = cli_ctx_on(&j->ctx, j->threads, j->device.ordinal);
    if (status) return status;
    clip_catch_signals();
    j->json = cli_json_new();
    cli_machine_json(j->json, j->ctx, NULL);
    cli_json_open(j->json, "files", '[');
    for (int i = 0; i < words && !status; i++) status = export_path(j, argv[i]);
    if (status == CLIP_INTERRUPTED)
        cli_fail("%s: interrupted; %lld files are whole, the next was not written", what,
                 (long long)j->written);
    const int saved = cli_json_save(j->json, status ? NULL : j->json_path);
    j->video.model_free(j->model);
    esa_ctx_free(j->ctx);
    return status ? status : saved;
}

int cmd_export(int argc, char **argv)
{
    job j = { .to = 0 };
    int words = 0, done;
    const int form_given = cli_given(argc, argv, "--to");
    const cli_option options[] = {
        { "--out", CLI_TEXT, &j.out, "PATH", 0, 0, 0,
          "x.mp4, x.y4m, x.safetensors, x.npy, x.png (one frame), or a folder of PNG: x/" },
        { "--output-dir", CLI_TEXT, &j.output_dir, "DIR", 0, 0, 0,
          "folder for several videos, each under its own name (beside the original)" },
        { "--to", CLI_CHOICE, &j.to, FORMATS, 0, 0, 0, "format, if --out does not name it (mp4)" },
        { "--fps", CLI_REAL, &j.fps, "X", 0.01, 1000, 0,
          "frames per second (the video's own, or 16)" },
        { "--quality", CLI_INT, &j.quality, "N", 1, 100, 0,
          "quality of MP4; higher is better (75)" },
        { "--codec", CLI_CHOICE, &j.codec, CODECS, 0, 0, 0,
          "codec of MP4; lossless is H.264 of RGB (auto: h264, else mpeg4)" },
        { "--dtype", CLI_CHOICE, &j.pixels, PIXELS, 0, 0, 0,
          "type of tensors: bytes, or numbers in [0, 1] (u8)" },
        { "--vae", CLI_TEXT, &j.vae, "FOLDER|NAME", 0, 0, 0,
          "the model that decodes latents; needed for files of `esa generate --save-latents`" },
        { "--vae-dtype", CLI_CHOICE, &j.dtype, CLIP_DTYPES, 0, 0, 0,
          "CPU: type of the decoder's convolutions; default is f32, auto is bf16 where the "
          "processor gains from it (default)" },
        { "--vae-tile", CLI_INT, &j.tile, "N", 0, 16384, 0,
          "decode in tiles of N pixels, to save memory; 0: whole frames if they fit (0)" },
        { "--device", CLI_TEXT, &j.asked, CLI_DEVICE_NAMES, 0, 0, 0,
          "where the VAE runs; auto: the first GPU if there is one that can (auto)" },
        { "--threads", CLI_INT, &j.threads, "N", 0, ESA_MAX_THREADS, 0,
          "CPU threads; 0: one per core (0)" },
        { "--json", CLI_OUTPUT, &j.json_path, "FILE", 0, 0, 0, "also write what was made as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa export",
                             "VIDEO|FOLDER ... [--out PATH | --output-dir DIR] [options]",
                             "Converts videos: tensors [frames, height, width, 3], folders of PNG, "
                             "Y4M and latents to MP4, "
                             "and MP4 to\nframes or tensors. A folder stands for the videos in it.",
                             options, argc, argv, &words, &done);
    if (status || done) return status;
    if (words == 0)
        return cli_usage("export: no video was given; 'esa export --help' lists the options");
    if (j.out && j.output_dir)
        return cli_usage(
            "export: --out names one video, --output-dir a folder for several; give one");
    if (j.out && words > 1)
        return cli_usage("export: --out names one video; several need --output-dir DIR");
    if (j.out && form_given)
        return cli_usage("export: the ending of --out names the format; leave out --to");
    if (j.out && !j.out[0]) return cli_usage("export: --out names no file");
    struct stat about;
    const int is_folder = j.out && (j.out[strlen(j.out) - 1] == '/' ||
                                    (stat(j.out, &about) == 0 && S_ISDIR(about.st_mode)));
    if (j.out && !is_folder && video_format(j.out) > VIDEO_MP4) /* the others are only read */
        return cli_usage("export: --out must end in .mp4, .y4m, .safetensors, .npy, .png, or in / "
                         "for a folder of PNG");
    return run(&j, words, argv);
}
