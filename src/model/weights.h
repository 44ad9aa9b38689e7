/* weights.h - the tensors of one model part: asked for by name and shape, checked all together,
 then held.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A part states once what it wants; the same statement checks the file and binds the views:
 *
 *     esa_weights *w;
 *     esa_weights_open(ctx, &w, "…/transformer", "diffusion_pytorch_model", "transformer");
 *     esa_weights_want(w, &dit->patch.weight, 0, 5, (int64_t[]){d, 16, 1, 2, 2},
 "patch_embedding.weight");
 *     esa_weights_want(w, &block->q.bias,     0, 1, (int64_t[]){d}, "blocks.%d.attn1.to_q.bias",
 i);
 // missing, extra, other shapes: by name; nothing has been read yet
 *     esa_weights_check(w, report, user);
 *     esa_weights_load(w, ESA_HOLD_AUTO);           // fills every view that was asked for
 *
 * Files: STEM.safetensors, or STEM.safetensors.index.json and the shards it names. F32, F16 and
 BF16 are taken. Shards are
 * mapped; a half-downloaded shard is refused by its header. Views stay valid until
 esa_weights_free. */
#ifndef ESA_MODEL_WEIGHTS_H
#define ESA_MODEL_WEIGHTS_H

#include "esa/esa_video.h"
#include "io/safetensors.h"
#include "nn/nn.h"

typedef struct esa_weights esa_weights;

enum {
    /* is held in f32 whatever the rest is (Wan's time embedder, tables, norms); rank 1 always is */
    ESA_WANT_F32 = 1,
    ESA_WANT_OPTIONAL = 2 /* may be missing: the view's data is then NULL */
};

/* folder/STEM*; part is what sentences call it. ctx is kept and must outlive this. */
esa_status esa_weights_open(esa_ctx *ctx, esa_weights **w, const char *folder, const char *stem,
                            const char *part);
/* One file in memory, which must outlive this (fuzzing). */
esa_status esa_weights_open_memory(esa_ctx *ctx, esa_weights **w, const void *bytes, int64_t size,
                                   const char *part);
void esa_weights_free(esa_weights *w);

/* Notes a tensor; view may be NULL (checked, never loaded). The first failure (memory, a name
 * longer than 159 bytes) is kept and returned by esa_weights_check, so calls need no checking one
 * by one. */
void esa_weights_want(esa_weights *w, esa_weight *view, int32_t flags, int32_t rank,
                      const int64_t *dim, const char *name_format, ...)
    __attribute__((format(printf, 6, 7)));
/* Tensors whose names start with prefix may be in the file: neither checked nor loaded (an encoder
 * that is not run). */
void esa_weights_ignore(esa_weights *w, const char *prefix);

/* Compares everything. ESA_ERR_MISMATCH and a sentence with the numbers and the first names; each
 * one goes to report (may be NULL). */
esa_status esa_weights_check(esa_weights *w, void (*report)(void *user, const char *line),
                             void *user);
/* Who is asked between tensors while they are loaded (bytes done of all), and may end it by a
 * return other than 0: part.h's tick. NULL: nobody. */
void esa_weights_watch(esa_weights *w, int32_t (*tick)(void *user, int64_t done, int64_t total),
                       void *user);
/* Fills the views; hold is an ESA_HOLD_*. Needs a check that passed. ESA_ERR_STATE "cancelled"
 * where tick said so. */
esa_status esa_weights_load(esa_weights *w, int32_t hold);

int64_t esa_weights_parameters(const esa_weights *w); /* elements of the tensors asked for */
/* Memory held by copies, and bytes of files mapped. */
void esa_weights_memory(const esa_weights *w, int64_t *held, int64_t *mapped);

#endif
