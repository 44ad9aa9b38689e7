/* weights.h - the tensors of one model part: requested by name and shape, checked together, then
 * loaded.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A part states once what it needs. The same statement checks the file and fills the views:
 *
 *     esa_weights *w;
 *     esa_weights_open(ctx, &w, ".../transformer", "diffusion_pytorch_model", "transformer");
 *     esa_weights_want(w, &dit->patch.weight, 0, 5, (int64_t[]){d, 16, 1, 2, 2}, "patch.weight");
 *     esa_weights_want(w, &block->q.bias, 0, 1, (int64_t[]){d}, "blocks.%d.to_q.bias", i);
 *     esa_weights_check(w, report, user);  // names what is missing, extra or has the wrong shape
 *     esa_weights_load(w, ESA_HOLD_AUTO);  // fills every view
 *
 * Files: STEM.safetensors, or STEM.safetensors.index.json and the shards it names, with tensors of
 * F32, F16, BF16 or E4M3 (weights_f8.c); or one file that the caller names, safetensors or GGUF.
 * Shards are mapped; a shard that is shorter than its header says is refused. Views stay valid
 * until esa_weights_free.
 *
 * A GGUF file may also have tensors of Q8_0, Q4_K, Q5_K and Q6_K (base/blocks.h). ESA_HOLD_FILE,
 * and ESA_HOLD_AUTO for parts that are not small, hold them as they are in the file; products
 * expand them piece by piece. A store on a device expands them while it loads. Leading dimensions
 * of 1 do not count when a GGUF file is compared, because its writers drop them.
 *
 * Names: parts want the names of diffusers. Files in the layout of a model's authors or of ComfyUI
 * have others; a part gives tables of those (esa_weights_naming). */
#ifndef ESA_MODEL_WEIGHTS_H
#define ESA_MODEL_WEIGHTS_H

#include "esa/esa_video.h"
#include "io/safetensors.h"
#include "nn/nn.h"

typedef struct esa_weights esa_weights;

enum {
    /* always held in f32 (Wan's time embedder, tables, norms); tensors of rank 1 always are */
    ESA_WANT_F32 = 1,
    ESA_WANT_OPTIONAL = 2, /* may be missing; the view's data is then NULL */
    /* for a store (store.h): follows the tensor wanted before it, with nothing between */
    ESA_WANT_JOIN = 4,
    ESA_WANT_F8 = 8,      /* for a store: may be held in F8 */
    ESA_WANT_HOST = 16,   /* for a store: stays in host memory, as esa_weights_load holds it */
    ESA_WANT_PRODUCT = 32 /* of a linear layer alone: host memory may hold it packed */
};

/* Opens the files folder/STEM*. part is its name in messages. The object keeps ctx, which must
 * outlive it. */
esa_status esa_weights_open(esa_ctx *ctx, esa_weights **w, const char *folder, const char *stem,
                            const char *part);
/* The same for root/folder: root is the model's folder, folder that of the part. */
esa_status esa_weights_open_part(esa_ctx *ctx, esa_weights **w, const char *root,
                                 const char *folder, const char *stem, const char *part);
/* Opens one file: GGUF if it begins so, else safetensors. */
esa_status esa_weights_open_file(esa_ctx *ctx, esa_weights **w, const char *path, const char *part);
/* Opens one file in memory, of either kind, which must outlive the object; for fuzzing. */
esa_status esa_weights_open_memory(esa_ctx *ctx, esa_weights **w, const void *bytes, int64_t size,
                                   const char *part);
/* Opens no file: every wanted tensor is there, with random numbers. Matrices have the standard
 * deviation 0.02, vectors whose names end in norm*.weight are 1, other vectors 0.02. For
 * measurements of true shapes without a checkpoint. */
esa_status esa_weights_open_random(esa_ctx *ctx, esa_weights **w, const char *part);
void esa_weights_free(esa_weights *w);

/* Names in another layout. In a rule, # stands for digits, and a rule holds for names that begin
 * with `ours`, up to their end or a dot. Names without a rule are the same in both layouts.
 *
 * Their layout may differ: one of their tensors can concatenate several of ours, or have rows in
 * another order. Digits behind @ say how. Ours is then cut into as many equal runs of rows
 * as there are digits, and a digit is the number of a run in theirs:
 *
 *     { "to_q", "qkv@0" }, { "to_k", "qkv@1" }, { "to_v", "qkv@2" }    three in one
 *     { "scale_shift", "shift_scale@10" }                              two halves change places
 *     { "a", "ab@02" }, { "b", "ab@13" }                               halves of both alternate
 */
typedef struct esa_naming_rule {
    const char *ours, *theirs;
} esa_naming_rule;
typedef struct esa_naming {
    const char *name;   /* for reports */
    const char *marker; /* a tensor that only files in this layout have */
    const esa_naming_rule *rule;
    int32_t rules;
    const struct esa_naming *next; /* another layout that files may have; NULL: none */
} esa_naming;
/* Allows this layout, and those that follow in naming->next. Files are in a layout if they have its
 * marker, with or without one of the prefixes of ComfyUI in front (model.diffusion_model. or
 * diffusion_model.); with a prefix, tensors without it do not belong to the part. Messages then use
 * the names of the files. naming must outlive the object. */
void esa_weights_naming(esa_weights *w, const esa_naming *naming);

/* The group of the tensors that are wanted from now on, for a store; 0 at first. */
void esa_weights_group(esa_weights *w, int32_t group);
/* Requests a tensor. With view NULL it is checked but not loaded. The first failure (memory, a name
 * longer than 159 bytes) is kept and returned by esa_weights_check, so callers need not check each
 * call. */
void esa_weights_want(esa_weights *w, esa_weight *view, int32_t flags, int32_t rank,
                      const int64_t *dim, const char *name_format, ...)
    __attribute__((format(printf, 6, 7)));
/* Allows tensors whose names start with prefix (behind that of ComfyUI, if they have one), for
 * example of an encoder that is not used. They are neither checked nor loaded. */
void esa_weights_ignore(esa_weights *w, const char *prefix);

/* Compares everything. Fails with ESA_ERR_MISMATCH and a message with the counts and the first
 * names. report gets a line for each finding; it may be NULL. */
esa_status esa_weights_check(esa_weights *w, void (*report)(void *user, const char *line),
                             void *user);
/* Sets the function that is called between tensors while they are loaded, with the bytes done and
 * the total; may be NULL. A return value other than 0 stops loading (see tick in part.h). */
void esa_weights_watch(esa_weights *w, int32_t (*tick)(void *user, int64_t done, int64_t total),
                       void *user);
/* Fills the views after a successful check; hold is an ESA_HOLD_*. Tensors wanted with
 * ESA_WANT_PRODUCT that are held in f32 are packed for products (nn/product.h), and with bf16 those
 * that are held in bf16 too; with ESA_HOLD_FILE no tensor is packed that lies mapped. bf16 1:
 * ESA_HOLD_AUTO holds a small part's products in bf16. Fails with ESA_ERR_STATE "cancelled" if tick
 * stops it. */
esa_status esa_weights_load(esa_weights *w, int32_t hold, int32_t bf16);

int64_t esa_weights_parameters(const esa_weights *w); /* elements of the requested tensors */
/* Bytes held in copies, and bytes of mapped files. */
void esa_weights_memory(const esa_weights *w, int64_t *held, int64_t *mapped);

#endif
