/* video_list.h - the videos a path stands for: one, or those of a folder. For `esa evaluate` and
 * `esa export`.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A folder's videos are its files with an ending of VIDEO_ENDINGS and its folders of PNG; of the
 * safetensors and NPY files those that hold a video. Everything else is ignored (metrics.json may
 * lie among them, masks and latents too), as are names that begin with a dot. A folder without any
 * such video but with PNG pictures is one video itself. */
#ifndef ESA_CLI_VIDEO_LIST_H
#define ESA_CLI_VIDEO_LIST_H

#include "clip/video.h"

/* What keeps every pixel stands first: where a video is there in several formats, the first
 * counts. */
enum {
    VIDEO_SAFETENSORS = 0,
    VIDEO_NPY,
    VIDEO_PNG,
    VIDEO_Y4M,
    VIDEO_MP4,
    VIDEO_MKV,
    VIDEO_WEBM,
    VIDEO_AVI,
    VIDEO_MOV,
    VIDEO_M4V,
    VIDEO_FORMATS,
    VIDEO_OTHER = VIDEO_FORMATS
};
#define VIDEO_ENDINGS ".safetensors|.npy|.png|.y4m|.mp4|.mkv|.webm|.avi|.mov|.m4v"

typedef struct video_entry {
    char *stem, *path; /* owned */
    int format;        /* VIDEO_* */
    int latents; /* 1: a safetensors file with `latents` and no video (asked for with latents 1) */
} video_entry;

typedef struct video_list {
    video_entry *entry; /* by stem, then format */
    int64_t count;
    int folder; /* 1: the path is a folder of videos */
} video_list;

/* VIDEO_* of a path's ending; VIDEO_OTHER if it has none of them. */
int video_format(const char *path);
/* latents 1: files of latents count too. CLI_FAILED after one sentence: nothing there, or no videos
 * in it. Free in any case. */
int video_list_get(video_list *list, const cli_video *video, esa_ctx *ctx, const char *path,
                   int latents, const char *what);
void video_list_free(video_list *list);

#endif
