/* lpips.h - LPIPS 0.1: distances between feature maps of AlexNet or VGG16, weighted per channel.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Pictures in [-1, 1] are shifted and scaled per channel. After five of the convolutions and their
 * ReLU, the feature vector f of every pixel is divided by |f| + 1e-10. The distance of a layer is
 * the mean over pixels of sum_c w_c (f_c - g_c)^2; LPIPS is the sum over the five layers. Values
 * are f32, sums over pixels f64.
 *
 * The file (tools/convert_lpips.py) has metadata format = esa-lpips-1 and net = alex | vgg. It
 * holds conv.I.weight [out, in, k, k] and conv.I.bias [out] in the order of the network, and
 * lin.J.weight [C] for the five layers. */
#ifndef ESA_METRIC_LPIPS_H
#define ESA_METRIC_LPIPS_H

#include "esa/esa_video.h"
#include "nn/nn.h"

#define ESA_LPIPS_CONVS 13
#define ESA_LPIPS_TAPS  5

/* pool: window of the pooling (stride 2) before the convolution, 0 for none; tap: 1 if its output
 * is compared */
typedef struct esa_lpips_layer {
    int16_t in, out, kernel, pool, tap;
} esa_lpips_layer;

typedef struct esa_lpips_net_kind {
    const char *name;
    int32_t convs;
    int32_t least;   /* smallest side of a picture, in pixels */
    int32_t stride4; /* 1: the first convolution has 11 x 11 taps, stride 4 and a border of 2 */
    esa_lpips_layer layer[ESA_LPIPS_CONVS];
} esa_lpips_net_kind;

struct esa_lpips {
    esa_ctx *ctx;
    esa_nn nn;
    const esa_lpips_net_kind *kind;
    esa_conv conv[ESA_LPIPS_CONVS];
    float *lin[ESA_LPIPS_TAPS]; /* inside block */
    void *block;
    int64_t block_bytes;
    float *plane; /* activations, kept between pictures */
    int64_t plane_bytes;
};

/* lpips.c: the distance between two pictures [height][width][3] with sides of at least kind->least.
 * One call at a time; does not take the guard of ctx. */
esa_status esa_lpips_distance(esa_lpips *lpips, double *distance, const uint8_t *a,
                              const uint8_t *b, int64_t height, int64_t width);

#endif
