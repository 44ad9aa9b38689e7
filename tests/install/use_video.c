/* use_video.c - a program outside the tree that uses an installed libesa_video: a grey picture,
 * compared with itself and written.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#include <esa/esa_video.h>

int main(int argc, char **argv)
{
    static uint8_t rgb[16 * 16 * 3];
    esa_ctx *ctx;
    esa_frames *frames;
    esa_metrics metrics = { .struct_size = sizeof metrics };
    memset(rgb, 128, sizeof rgb);
    if (argc != 2 || esa_ctx_create(&ctx, NULL) != ESA_OK) return 1;
    esa_status status = esa_frames_create(ctx, &frames, rgb, 1, 16, 16, 16);
    if (status == ESA_OK) status = esa_frames_compare(ctx, &metrics, frames, frames);
    if (status == ESA_OK) status = esa_frames_save(ctx, frames, argv[1], NULL);
    esa_model *model;
    const esa_status refused = esa_model_open(ctx, &model, "/nonexistent", NULL);
    printf("esa_video: %s, SSIM %g; %s\n", esa_status_name(status), metrics.ssim,
           esa_ctx_error(ctx));
    esa_frames_free(frames);
    esa_ctx_free(ctx);
    return status == ESA_OK && metrics.ssim == 1.0 && refused == ESA_ERR_IO && model == NULL ? 0
                                                                                             : 1;
}
