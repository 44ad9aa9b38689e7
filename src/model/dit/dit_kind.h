/* dit_kind.h - what a family's transformer consists of, and what all of them have: the struct that
 * each begins with (dit.c, dit_begin.c) and the parts that they share (dit_parts.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Letters: N tokens of the video, R rows of text in self-attention, S = R + N, d = heads *
 * head_dim, P = patch volume, C channels. Weights and activations are in the memory of nn's device.
 */
#ifndef ESA_MODEL_DIT_KIND_H
#define ESA_MODEL_DIT_KIND_H

#include "model/dit/dit.h"
#include "nn/ops.h"

#define ESA_DIT_BRANCHES 16 /* most texts of a video */

struct esa_dit {
    esa_part part;
    const esa_dit_kind *kind;
    esa_nn *nn;
    /* set by kind->make */
    int32_t heads, head_dim, blocks;
    int32_t in_channels, out_channels, patch[3];
    esa_sizes sizes; /* for rows; d, c, o, v (P), t, h, w are filled in before */
    int64_t d;

    int32_t room_known; /* 1: given is what esa_dit_set_room got */
    esa_dit_room given;
    esa_dit_watch watch;
    void *watch_user;

    /* for one video */
    int32_t latent[3], grid[3];
    int64_t tokens, text_rows, rows; /* N, R, S */
    int32_t branches;
    uint32_t texts; /* bit b: branch b has its text */
    void *room;     /* one block for what follows, and for what kind->place takes */
    int64_t room_bytes;
    int32_t *perm;                /* [N] position -> token of the grid; NULL: identity */
    float *cos, *sin;             /* [turned][head_dim/2], in sequence order; NULL: no rotation */
    int64_t turned;               /* rows of cos and sin */
    int64_t host_floats;          /* floats that kind->positions needs in host memory */
    esa_view x;                   /* [S][d] the residual stream */
    esa_view a;                   /* [S][d] normed input of a layer */
    esa_view patch_in, patch_out; /* [N][P * C] in the same memory */
    /* esa_dit_place_layers */
    esa_view o;      /* [S][d] output of attention */
    esa_view qkv[3]; /* [S][d] each */
    esa_view flat;   /* [S][d] the product of a layer after attention */
    esa_view more;   /* [S][d] room beside flat while that is in use */
    esa_view hidden; /* [S or fewer][ffn] */
};

struct esa_dit_kind {
    int64_t bytes; /* of the kind's struct, which begins with an esa_dit */
    int64_t config_bytes;
    int32_t text_place;    /* ESA_TEXT_* */
    int32_t channel_first; /* 1: a patch is (channel, t, h, w); 0: (t, h, w, channel) */
    const esa_naming *naming;
    const char *const *ignored; /* prefixes of tensors that are not used, ends with NULL; or NULL */
    const esa_row *rows;        /* outside of the blocks: offsets in the kind's struct */
    int32_t row_count;
    /* As esa_dit_recognise. */
    int32_t (*recognise)(esa_weights *w, void *config, char *line, size_t bytes);
    /* Copies the config, fills in what an esa_dit must know of it, makes arrays (esa_part_array)
     * and sets dit->sizes. */
    esa_status (*make)(esa_dit *dit, const void *config);
    /* States the tensors outside of the blocks that rows cannot, because they are in arrays. NULL:
     * there are none. */
    void (*want)(esa_dit *dit);
    /* States the tensors of block i; sizes.without leaves F8 out where it costs most. */
    void (*want_block)(esa_dit *dit, int32_t i);

    /* Fails for latents that are wrong in another way than esa_dit_layout finds; NULL: none are. */
    esa_status (*check)(const esa_dit *dit, const int32_t latent[3]);
    /* Places what the kind needs beside x, a and patches; rotations by esa_dit_place_turns. */
    void (*place)(esa_dit *dit, esa_carve *carve);
    /* Writes positions in the order perm [N] (NULL: identity). host: [host_floats]. */
    esa_status (*positions)(esa_dit *dit, float *host, const int32_t *perm);
    /* Bytes of the text of all branches, which text will allocate. */
    int64_t (*text_bytes)(const esa_dit *dit, int32_t branches);
    /* As those of dit.h. text_rows NULL: all rows; image NULL: there is none. */
    int64_t (*text_rows)(const esa_dit *dit, const esa_text *text);
    esa_status (*text)(esa_dit *dit, int32_t branch, const esa_text *text);
    esa_status (*image)(esa_dit *dit, const esa_image *image);
    /* Frees what text and image made, and forgets the video. NULL: nothing to do. */
    void (*end)(esa_dit *dit);

    /* The forward: from latents to x and the modulation; one block, between begin and end of its
     * weights; from x to v. */
    esa_status (*before)(esa_dit *dit, const esa_dit_call *call);
    esa_status (*block)(esa_dit *dit, const esa_dit_call *call, int32_t i);
    esa_status (*after)(esa_dit *dit, const esa_dit_call *call);
    /* Calls every layer of block i once with the sizes of this video (esa_dit_measure). */
    esa_status (*prepare)(esa_dit *dit, int32_t i);
};

/* ---------------------------------------------------------------- dit_parts.c */

/* cos and sin for so many rows. */
void esa_dit_place_turns(esa_dit *dit, esa_carve *carve, int64_t rows);
/* o, q, k, v, flat, more and hidden, in as little memory as the device allows. */
void esa_dit_place_layers(esa_dit *dit, esa_carve *carve, int64_t ffn);
/* Copies cos and sin, one behind the other in host memory, to the device. */
esa_status esa_dit_write_turns(esa_dit *dit, const float *host);
/* Rows of the video of a matrix [S][..], and of the text. */
esa_view esa_dit_video(const esa_dit *dit, const esa_view *v);
esa_view esa_dit_words(const esa_dit *dit, const esa_view *v);

/* Latents become patches (gather 1) or the other way round (0). */
esa_status esa_dit_patches(esa_dit *dit, const esa_view *rows, float *latent, int32_t channels,
                           int32_t gather);
/* patch_in = the patches of x. */
esa_status esa_dit_gather(esa_dit *dit, const float *x);
/* *in = x as input of the layer l: x itself, or a copy in room if the layer takes another type. */
esa_status esa_dit_input(esa_nn *nn, esa_view *in, const esa_view *x, const esa_view *room,
                         const esa_linear *l);
/* Self-attention of one layer. qkv [3] and o: [rows][heads * head_dim]. q, k and v are lost. *o,
 * the room for the output, becomes its view, which may have another type. */
esa_status esa_dit_attend(esa_dit *dit, esa_session *session, int32_t layer, const esa_view qkv[3],
                          esa_view *o);
/* Measures the products of block i for this video's sizes, if *done is 0 and the device can. first:
 * a layer of the block. Between begin and end of the block; x keeps its contents only if
 * kind->prepare does not write it. */
esa_status esa_dit_measure(esa_dit *dit, int32_t i, const esa_linear *first, int32_t *done);

#endif
