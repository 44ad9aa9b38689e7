/* vae_kind.h - what a family's VAE consists of, and what all of them have: layers and weights
 * (vae.c), and the way of frames from the last convolution to the caller (vae_out.c).
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_VAE_KIND_H
#define ESA_MODEL_VAE_KIND_H

#include "model/vae/vae.h"
#include "nn/ops.h"

/* Kinds of rows (weights/rows.h). Each states one layer, with a weight and a bias. */
enum {
    ESA_VAE_CONV,   /* an esa_conv; a matrix is a convolution over the channels of one pixel */
    ESA_VAE_UP2,    /* the same; its input is doubled in height and width */
    ESA_VAE_HALF,   /* only the lower half of the output channels is used */
    ESA_VAE_HALVES, /* two esa_conv, each of one half of the output channels */
    ESA_VAE_NORM,   /* two float *: weight and bias of a norm, of the first side of the shape */
    ESA_VAE_GAMMA   /* one float *: NAME.gamma */
};

typedef struct esa_vae_layer {
    esa_weight weight, bias;
    int32_t kind;
    void *at; /* where its weights go */
} esa_vae_layer;
typedef struct esa_vae_layers esa_vae_layers;

struct esa_vae {
    esa_part part;
    const esa_vae_kind *kind;
    esa_nn *nn;
    /* set by kind->make */
    const void *config; /* the kind's copy */
    int32_t z_dim, factor_t, factor_s;
    int32_t encoder;          /* 1: the encoder's tensors were stated too */
    const double *std, *mean; /* [z_dim]: how the decoder scales latents; std NULL: by factor */
    double factor;
    esa_vae_layers *layers; /* owned */
    esa_status status;      /* the first failure of esa_vae_rows */
    /* set by load */
    float *vectors;       /* all norms, then scale and shift, on the device */
    float *scale, *shift; /* latents * scale + shift is what the decoder takes; [z_dim] each */
    int64_t vector_bytes;
    int64_t parameters; /* of the tensors in use */
    int64_t bytes;      /* that loading has allocated */
};

/* States the layers of rows, with their places in *base. */
void esa_vae_rows(esa_vae *vae, const esa_row *rows, int32_t count, void *base,
                  const esa_sizes *sizes, const char *prefix_format, ...)
    __attribute__((format(printf, 6, 7)));

/* Latents [z_dim][frames][height][width] that lie in larger planes, with the pitches row, frame and
 * channel in floats. */
typedef struct esa_vae_cut {
    const float *latents; /* on the device */
    int64_t frames, height, width;
    int64_t row, frame, channel;
    int64_t tick_base, tick_total; /* the units that env's tick reports */
    int32_t clamp;                 /* 1: clamps to [-1, 1]; 0 for tiles, which are blended first */
    uint8_t *bytes; /* where the frames go as bytes, in host memory; NULL: to a sink */
} esa_vae_cut;

struct esa_vae_kind {
    int64_t bytes;      /* of the kind's struct, which begins with an esa_vae */
    int32_t tile_unit;  /* a tile has a multiple of so many latents on a side */
    int32_t overlap[2]; /* tiles overlap by this share of their height and width, in latents */
    void (*size)(const void *config, const int32_t latent[3], int32_t size[3]);
    /* Copies the config, fills in what an esa_vae must know, makes arrays (esa_part_array) and
     * states the layers. */
    esa_status (*make)(esa_vae *vae, const void *config);
    /* Decodes a cut. */
    esa_status (*cut)(esa_vae *vae, const esa_vae_cut *cut, esa_vae_sink sink, void *user);
    /* The device memory that this needs. bytes: 1 if frames become bytes. */
    int64_t (*cut_bytes)(const esa_vae *vae, int64_t frames, int64_t height, int64_t width,
                         int32_t bytes);
    /* Instead of both, for a VAE that cuts and blends in its own way: as those of vae.h. */
    esa_status (*decode)(esa_vae *vae, const float *latents, const int32_t latent[3], int32_t tile,
                         esa_vae_sink sink, void *user);
    int64_t (*decode_bytes)(const esa_vae *vae, const int32_t latent[3], int32_t tile);
};

/* ---------------------------------------------------------------- vae_out.c */

/* The error of a frame with a pixel that is not a number. */
esa_status esa_vae_nan(esa_ctx *ctx, int64_t frame);

/* Where the frames of a cut go. */
typedef struct esa_vae_out {
    esa_nn *nn;
    int64_t frames, pixels; /* the number of frames; elements of one */
    float *rgb;             /* one frame on the device; the last convolution writes it */
    int32_t *wrong;         /* [frames]: 1 if a pixel of the frame is not a number */
    uint8_t *bytes, *host;  /* [frames][pixels]: on the device, in host memory; NULL: to sink */
    float *seen;            /* room for pixels in host memory; NULL if rgb is there */
    int32_t clamp;
    esa_vae_sink sink;
    void *user;
    int64_t frame; /* the next one */
} esa_vae_out;

esa_vae_out esa_vae_out_of(esa_nn *nn, const esa_vae_cut *cut, int64_t frames, int64_t pixels,
                           esa_vae_sink sink, void *user);
/* Places rgb, wrong and bytes; only counts if carve->base is NULL. */
void esa_vae_out_place(esa_vae_out *out, esa_carve *carve);
/* Makes room in host memory before the frames, and frees it after them. */
esa_status esa_vae_out_begin(esa_vae_out *out);
void esa_vae_out_free(esa_vae_out *out);
/* Gives the frame in rgb to the sink, or keeps its bytes. */
esa_status esa_vae_out_give(esa_vae_out *out);
/* Brings the bytes of all frames to the host. */
esa_status esa_vae_out_end(esa_vae_out *out);

#endif
