/* session_gpu.h - what a session keeps on the GPU: masks of a file as bits, and figures that are
 * only known once the GPU has run.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A call on a GPU only enqueues, so its realised density and its times are not known when it
 * returns. They wait in a list of pending figures and are booked when the list is full or when
 * somebody asks for statistics; both wait for the GPU. */
#ifndef ESA_SESSION_SESSION_GPU_H
#define ESA_SESSION_SESSION_GPU_H

#include "attn/attn.h"

struct esa_session_cell;

#define ESA_SESSION_PENDING 256

typedef struct esa_session_pending {
    struct esa_session_cell *cell;
    /* 1: density comes from the facts, and the time between the first two marks is selection */
    int32_t sparse;
} esa_session_pending;

typedef struct esa_session_gpu {
    esa_ctx *ctx;
    /* CACHED: bits of all groups of one stored layer and branch; NULL: not needed yet */
    uint8_t **chunk;
    int64_t chunks, chunk_bytes;
    int64_t bytes;  /* of masks held on the GPU */
    int64_t *facts; /* [ESA_SESSION_PENDING][2] on the GPU; NULL until the first call */
    void *mark[ESA_SESSION_PENDING][3]; /* before selection, between, after attention */
    esa_session_pending pending[ESA_SESSION_PENDING];
    int32_t used;
} esa_session_gpu;

void esa_session_gpu_free(esa_session_gpu *gpu);

/* The bits of a cell of a mask file, on the GPU: the cell's layer is uploaded when first needed.
 * host: bits of all cells. ctx is not entered; sentences are in ctx. */
esa_status esa_session_gpu_cell(esa_session_gpu *gpu, const uint8_t **bits, const uint8_t *host,
                                int64_t cell, int64_t cells, int64_t groups, int64_t cell_bytes);
/* Bits into the mask's lists; the mask's lists into bits, its facts into facts[2] on the GPU. */
esa_status esa_session_gpu_expand(esa_session_gpu *gpu, esa_mask *mask, const uint8_t *bits);
esa_status esa_session_gpu_rest(esa_session_gpu *gpu, const esa_mask *mask, uint8_t *bits,
                                int64_t *facts);
/* Device memory for a mask at rest; counted in bytes. free accepts NULL. */
esa_status esa_session_gpu_alloc(esa_session_gpu *gpu, uint8_t **bits, int64_t bytes);
void esa_session_gpu_release(esa_session_gpu *gpu, uint8_t *bits, int64_t bytes);

/* The figures of one call: begin before selection, between when selection is enqueued, end after
 * attention (facts: of the mask, on the GPU; NULL: dense). A call that fails in between just begins
 * anew. */
esa_status esa_session_gpu_begin(esa_session_gpu *gpu);
esa_status esa_session_gpu_between(esa_session_gpu *gpu);
esa_status esa_session_gpu_end(esa_session_gpu *gpu, struct esa_session_cell *cell,
                               const int64_t *facts);
/* Books everything pending; waits for the GPU. */
esa_status esa_session_gpu_settle(esa_session_gpu *gpu);
/* Drops everything pending without booking it. */
void esa_session_gpu_forget(esa_session_gpu *gpu);

#endif
