/* wan_image.h - what Wan's models of image to video make from a picture, as diffusers does.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_WAN_IMAGE_H
#define ESA_MODEL_WAN_IMAGE_H

#include "model/vae/vae.h"
#include "model/vision/clip_vision.h"

typedef struct esa_wan_picture {
    const uint8_t *rgb; /* [height][width][3] */
    int32_t height, width;
} esa_wan_picture;

/* The states of the image encoder, which is opened for that. The shorter side is scaled to the
 * encoder's, then the middle is cut out. */
esa_status esa_wan_image_states(const esa_part_env *env, const esa_clip_vision_config *config,
                                const esa_wan_picture *picture, esa_image *image);
/* A mask [factor_t][t][h][w], 1 in the first frame of latents, and behind it the latents of a video
 * of the picture and zeros. */
esa_status esa_wan_image_condition(const esa_part_env *env, esa_vae *vae,
                                   const esa_wan_vae_config *config, const esa_wan_picture *picture,
                                   const int32_t latent[3], esa_image *image);

#endif
