/* vae_file.h - the file of a VAE: names its tensors, compares, loads and packs them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A family walks over its layers once, for the check and for loading:
 *     esa_vae_walk_begin          opens the file
 *     esa_vae_want_conv, ...      one call for each layer
 *     esa_vae_walk_end            compares names and shapes, loads the layers, closes the file */
#ifndef ESA_MODEL_VAE_FILE_H
#define ESA_MODEL_VAE_FILE_H

#include "model/part.h"
#include "nn/ops.h"

/* What an open VAE holds beside its convolutions. */
typedef struct esa_vae_held {
    float *vectors;       /* all norms, then scale and shift, on the device */
    float *scale, *shift; /* latents * scale + shift is what the decoder takes; [z_dim] each */
    int64_t vector_bytes;
    int64_t parameters; /* of the tensors in use */
    int64_t bytes;      /* that loading has allocated */
} esa_vae_held;
void esa_vae_held_free(esa_nn *nn, esa_vae_held *held);

/* One layer of the file, and where its weights go: a convolution, or the vectors of a norm. */
typedef struct esa_vae_layer {
    esa_weight weight, bias;
    esa_conv *conv;
    esa_conv *second;  /* gets the upper half of the output channels; NULL: none */
    int32_t half;      /* 1: only the lower half of the output channels is used */
    int32_t up2;       /* 1: its input is doubled in height and width */
    float **vector[2]; /* weight, bias; the bias may be NULL */
    int64_t channels;  /* of the vectors; 0: a convolution */
} esa_vae_layer;

typedef struct esa_vae_walk {
    const esa_part_env *env;
    esa_weights *w;
    esa_vae_layer *layer; /* [most] */
    int64_t count, most;
    int64_t held;    /* bytes in use before */
    int32_t encoder; /* 1: the encoder's tensors are wanted too; the family sets it */
} esa_vae_walk;

/* Opens vae/ in the model's folder, or random weights. most: at least the number of layers. */
esa_status esa_vae_walk_begin(esa_vae_walk *k, const esa_part_env *env, int64_t most);
/* layer: conv, and second, half or up2. dim [rank]: shape of the weight; a matrix is a convolution
 * over the channels of one pixel. */
void esa_vae_want_conv(esa_vae_walk *k, esa_vae_layer layer, int32_t rank, const int64_t *dim,
                       const char *name);
/* A norm with name.weight and name.bias. */
void esa_vae_want_norm(esa_vae_walk *k, float **weight, float **bias, int64_t channels,
                       const char *name);
/* A norm with name.gamma, a tensor [channels] with dimensions of 1 up to rank. */
void esa_vae_want_gamma(esa_vae_walk *k, float **gamma, int64_t channels, int32_t rank,
                        const char *name);
/* How the decoder scales latents: by std and mean [z_dim], or by factor alone if std is NULL. */
typedef struct esa_vae_stats {
    int32_t z_dim;
    const double *std, *mean;
    double factor;
} esa_vae_stats;
/* Fills in the layers and held, on the device of env->nn; held NULL: only checks. If it fails, the
 * caller frees held and the convolutions. Call it only if esa_vae_walk_begin has succeeded. */
esa_status esa_vae_walk_end(esa_vae_walk *k, esa_vae_held *held, const esa_vae_stats *stats);

#endif
