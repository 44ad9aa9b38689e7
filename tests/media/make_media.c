/* make_media.c - turns raw RGB from a file into a video, for check_media.py: make_media RAW FRAMES
 * HEIGHT WIDTH FPS OUT
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <esa/esa_video.h>

int main(int argc, char **argv)
{
    if (argc != 7) return 2;
    const int32_t count = atoi(argv[2]), height = atoi(argv[3]), width = atoi(argv[4]);
    const size_t bytes = (size_t)count * (size_t)height * (size_t)width * 3;
    uint8_t *rgb = malloc(bytes);
    FILE *file = fopen(argv[1], "rb");
    if (!rgb || !file || fread(rgb, 1, bytes, file) != bytes) return 2;
    fclose(file);
    esa_ctx *ctx = NULL;
    esa_frames *frames = NULL;
    if (esa_ctx_create(&ctx, NULL) != ESA_OK) return 2;
    esa_status status = esa_frames_create(ctx, &frames, rgb, count, height, width, atof(argv[5]));
    if (status == ESA_OK) status = esa_frames_save(ctx, frames, argv[6], NULL);
    if (status != ESA_OK) fprintf(stderr, "%s\n", esa_ctx_error(ctx));
    esa_frames_free(frames);
    esa_ctx_free(ctx);
    free(rgb);
    return status == ESA_OK ? 0 : 1;
}
