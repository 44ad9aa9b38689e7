/* clip_pair.c - a clip and the dense one that it is compared with; saving clips.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/clip.h"

#include <math.h>
#include <string.h>

/* The dense clip of a request. Embeddings and latents are written with the clip itself, and
 * previews and progress of the two follow one another. */
static clip_request dense_of(const clip_request *request)
{
    clip_request r = clip_dense(request);
    r.p.save_embeds = r.p.save_latents = NULL;
    return r;
}

int clip_pair_make(clip_maker *maker, clip_pair *pair, const clip_request *request, int compare,
                   int64_t clips_left)
{
    char method[32];
    int status = CLI_OK;
    memset(pair, 0, sizeof *pair);
    cli_name(method, METHODS, request->method);
    if (compare) {
        const clip_request dense = dense_of(request);
        clips_left *= 2;
        status = clip_make(maker, &pair->dense, &pair->dense_record, &dense, "dense",
                           clips_left + 1, 0);
    }
    if (!status)
        status = clip_make(maker, &pair->frames, &pair->record, request, method, clips_left, 0);
    if (!status && compare) status = clip_compare(maker, &pair->metrics, pair->dense, pair->frames);
    return status;
}

void clip_pair_free(const clip_maker *maker, clip_pair *pair)
{
    if (pair->frames) maker->video.frames_free(pair->frames);
    if (pair->dense) maker->video.frames_free(pair->dense);
    clip_record_free(&pair->record);
    clip_record_free(&pair->dense_record);
    memset(pair, 0, sizeof *pair);
}

double clip_pair_speedup(const clip_pair *pair)
{
    if (!pair->dense) return (double)NAN;
    return pair->dense_record.stats.denoise_seconds / pair->record.stats.denoise_seconds;
}

int clip_save(clip_maker *maker, const esa_frames *frames, const char *path, int64_t quality,
              double fps)
{
    esa_save_params p = maker->video.save_params_default();
    p.quality = (int32_t)quality;
    p.fps = fps;
    const esa_status status = maker->video.frames_save(maker->ctx, frames, path, &p);
    return cli_status(maker->ctx, status, maker->what);
}

int clip_save_beside(clip_maker *maker, const esa_frames *left, const esa_frames *right,
                     const char *path, int64_t quality, double fps)
{
    esa_frames *both;
    const esa_status status = maker->video.frames_beside(maker->ctx, &both, left, right);
    if (status) return cli_fail_esa(maker->ctx, status, maker->what);
    const int saved = clip_save(maker, both, path, quality, fps);
    maker->video.frames_free(both);
    return saved;
}
