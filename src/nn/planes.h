/* planes.h - the operations on planes for every device, part of the table of ops.h; filled by
 * cpu_planes.c and device_planes.c.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Planes are channels last (base/nn_args.h), in the type ops->dtype and in the memory of the device
 * of nn. */
#ifndef ESA_NN_PLANES_H
#define ESA_NN_PLANES_H

#include "nn/nn.h"

typedef struct esa_nn_planes {
    /* As esa_nn_conv_pack, for this device; esa_nn_conv_free frees the result. The weight and the
     * bias are in host memory. May allocate and wait. */
    esa_status (*conv_pack)(esa_nn *nn, esa_conv *conv, const esa_weight *w, const esa_weight *bias,
                            int32_t up2);
    /* As esa_nn_conv. args has everything that conv does not say: y to y_dtype, but dtype. */
    esa_status (*conv)(esa_nn *nn, const esa_conv *conv, const esa_plane_conv_args *args);
    esa_status (*pixel_norm)(esa_nn *nn, const esa_plane_norm_args *args);
    esa_status (*group_norm)(esa_nn *nn, const esa_plane_group_args *args);
    esa_status (*border)(esa_nn *nn, const esa_plane_border_args *args);
    esa_status (*from_latents)(esa_nn *nn, const esa_plane_latent_args *args);
    esa_status (*to_bytes)(esa_nn *nn, const esa_plane_bytes_args *args);
    /* Sets bytes to 0. */
    esa_status (*zero)(esa_nn *nn, void *ptr, int64_t bytes);
} esa_nn_planes;

/* to_bytes in host memory, for any device; returns 1 if some x is NaN. */
int32_t esa_nn_pixel_bytes(uint8_t *bytes, const float *x, int64_t count);

extern const esa_nn_planes esa_nn_cpu_planes, esa_nn_device_planes;

#endif
