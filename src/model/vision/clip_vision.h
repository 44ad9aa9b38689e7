/* clip_vision.h - CLIPVisionModel: states of an image, for models of image to video.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The image is cut into square patches; a class token stands in front of them. The result is the
 * state before the last layer, as Wan takes it (hidden_states[-2]), so that layer is not run. */
#ifndef ESA_MODEL_CLIP_VISION_H
#define ESA_MODEL_CLIP_VISION_H

#include "model/part/part.h"

typedef struct esa_clip_vision_config {
    int32_t d, heads, layers, ff;
    int32_t image, patch; /* sides in pixels */
    int32_t act;          /* ESA_ACT_GELU or ESA_ACT_QUICK_GELU */
    double eps;
} esa_clip_vision_config;

esa_status esa_config_clip_vision(esa_ctx *ctx, esa_clip_vision_config *config, const char *path);

esa_status esa_clip_vision_make(const esa_part_env *env, esa_part **encoder,
                                const esa_clip_vision_config *config);
/* Patches and the class token. */
int64_t esa_clip_vision_rows(const esa_clip_vision_config *config);
/* out [rows][d] in host memory, from rgb [image][image][3], f32 and normed, when it is loaded. */
esa_status esa_clip_vision_encode(esa_part *encoder, float *out, const float *rgb);

#endif
