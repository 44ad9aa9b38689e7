/* video_list.h - lists the videos of a path: one file, or those of a folder. For `esa evaluate` and
 * `esa export`.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The videos of a folder are its files with an ending of VIDEO_ENDINGS and its folders of PNG.
 * safetensors and NPY files count if they hold a video. Other files (metrics.json, masks, latents)
 * and names that begin with a dot are ignored. A folder with PNG pictures and no such video is one
 * video itself. */
#ifndef ESA_CLI_VIDEO_LIST_H
#define ESA_CLI_VIDEO_LIST_H

#include "clip/video.h"

/* Lossless formats come first: of a video in several formats the first one counts. */
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

/* VIDEO_* of a path's ending, else VIDEO_OTHER. */
int video_format(const char *path);
/* latents 1: files of latents count too. CLI_FAILED after a message if path does not exist or holds
 * no videos. Free in any case. */
int video_list_get(video_list *list, const cli_video *video, esa_ctx *ctx, const char *path,
                   int latents, const char *what);
void video_list_free(video_list *list);

#endif
