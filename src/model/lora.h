/* lora.h - LoRA files: which tensors of a part they change, and by how much.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A LoRA changes a weight W by scale * alpha / rank * up down, with up [out, rank] and down
 * [rank, in]; without an alpha the factor is scale alone. Files of ComfyUI may also hold whole
 * differences of a tensor (.diff) or of a bias (.diff_b, .lora_B.bias).
 *
 * Names are <prefix><module><end>. The module has the name of diffusers or that of the model's
 * authors, with dots or (kohya) with underscores:
 *
 *   diffusers, PEFT  transformer.blocks.0.attn1.to_q.lora_A.weight  (and lora_B)
 *   kohya            lora_unet_blocks_0_self_attn_q.lora_down.weight  (lora_up, alpha)
 *   ComfyUI          diffusion_model.blocks.0.self_attn.q.lora_A.weight  (or lora_down; alpha)
 *
 * Changes are added in f32 while a tensor is loaded (weights_merge.c), in the order of the files.
 */
#ifndef ESA_MODEL_LORA_H
#define ESA_MODEL_LORA_H

#include "model/weights.h"

/* A change of one wanted tensor. */
typedef struct esa_delta {
    const esa_tensors *file;
    const esa_st_entry *down, *up; /* up NULL: down has the shape of the tensor */
    const esa_st_entry *alpha;     /* NULL: none */
    float factor;
    struct esa_delta *next; /* the next change of the same tensor; NULL: none */
} esa_delta;

/* The LoRA files of a part. */
typedef struct esa_loras {
    esa_tensors *file[ESA_LORA_MOST]; /* [count] */
    int32_t count;
    const esa_lora *list; /* the caller's */
    esa_delta *delta;     /* [deltas] */
    int64_t deltas;
} esa_loras;

/* Lets the part's weights be changed by these files, which are opened. Call it before the check,
 * which compares their names and shapes. list must live until then. */
esa_status esa_weights_lora(esa_weights *w, const esa_lora *list, int32_t count);

/* For weights.c. Finds the wanted tensor of each change; after the names of the files are set.
 * Fails with ESA_ERR_MISMATCH and the first names that do not fit. */
esa_status esa_lora_match(esa_weights *w, void (*report)(void *user, const char *line), void *user);
void esa_lora_close(esa_weights *w);

/* weights_merge.c. Writes rows first .. first+rows-1 of a tensor with its changes to dst, in F32,
 * F16, BF16 or Q8_0, with all threads. Rows are those of esa_weights_rows. */
struct esa_wanted;
esa_status esa_weights_merge(esa_weights *w, const struct esa_wanted *e, void *dst, int32_t dtype,
                             int64_t first, int64_t rows);

#endif
