/* lora.h - LoRA files: which tensors of a part they change, and by how much.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A LoRA adds scale * alpha / rank * up down to a weight, with up [out, rank] and down [rank, in].
 * Without an alpha the factor is scale alone. Files may also hold whole differences of a tensor
 * (.diff) or of a bias (.diff_b, .lora_B.bias).
 *
 * Names are <prefix><module><end>. The module has its name in diffusers or in a layout that the
 * model's files may have (weights.h), with dots or (kohya) with underscores:
 *
 *   diffusers, PEFT  transformer.blocks.0.attn1.to_q.lora_A.weight  (and lora_B)
 *   kohya            lora_unet_blocks_0_self_attn_q.lora_down.weight  (lora_up, alpha)
 *   ComfyUI          diffusion_model.blocks.0.self_attn.q.lora_A.weight  (or lora_down; alpha)
 *
 * A change of a module that holds several tensors of diffusers is one of each: down is theirs
 * together, and each takes its rows of up. Changes are added in f32 while a tensor is loaded
 * (weights_merge.c), in the order of the files. */
#ifndef ESA_MODEL_LORA_H
#define ESA_MODEL_LORA_H

#include "model/weights/weights.h"

/* A change of one wanted tensor. */
struct esa_place;
typedef struct esa_delta {
    const esa_tensors *file;
    const struct esa_place *place; /* where its rows lie in up, or in the whole difference */
    const esa_st_entry *down, *up; /* up NULL: down is a whole difference */
    int32_t whole;                 /* 1: the file calls it one */
    const esa_st_entry *alpha;     /* NULL: none */
    float factor;
    struct esa_delta *next; /* the next change of the same tensor; NULL: none */
} esa_delta;

/* The LoRA files of a part. */
typedef struct esa_loras {
    esa_tensors *file[ESA_LORA_MOST]; /* [count] */
    int32_t count;
    const esa_lora *list; /* the caller's */
    /* set by esa_lora_match */
    esa_delta *delta;        /* [deltas of count * wanted] */
    struct esa_place *place; /* [places of room], modules by name */
    char (*key)[200];        /* [places of room] their names */
    int64_t deltas, wanted, places, room;
} esa_loras;

/* Opens LoRA files that change the part's weights. Call it before esa_weights_check, which compares
 * their names and shapes; list must live until then. */
esa_status esa_weights_lora(esa_weights *w, const esa_lora *list, int32_t count);

/* For weights.c, which calls it when it knows whose names the weight files have. Finds the wanted
 * tensor of each change. Fails with ESA_ERR_MISMATCH; the message has the first names that do not
 * fit. */
esa_status esa_lora_match(esa_weights *w, void (*report)(void *user, const char *line), void *user);
void esa_lora_close(esa_weights *w);

/* In weights_merge.c. Writes rows first .. first+rows-1 of a tensor and its changes to dst, as F32,
 * F16, BF16 or Q8_0, with all threads. esa_weights_rows says how many rows a tensor has. */
struct esa_wanted;
esa_status esa_weights_merge(esa_weights *w, const struct esa_wanted *e, void *dst, int32_t dtype,
                             int64_t first, int64_t rows);

#endif
