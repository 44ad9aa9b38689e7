/* cuda.h - the seam between libesa and the plugin libesa_cuda: one entry function, one table of C
 * functions.
 * SPDX-License-Identifier: Apache-2.0
 *
 * libesa opens the plugin at run time and calls esa_cuda_entry; the plugin has no undefined esa_
 * symbols and exports nothing else. Both sides are built from this header, and the sizes in
 * esa_cuda_host prove it.
 *
 * Every function returns an esa_status and leaves one sentence in the device object
 * (esa_cuda_table.error) or in the text it was given. Nothing aborts, prints, or leaves a CUDA
 * error behind for the caller's next call. "stream" is a cudaStream_t (NULL: the default stream).
 * attention, select, importance, from_importance and the mask conversions only enqueue: no
 * allocation, no synchronisation, no host memory read after return, so they can be captured into a
 * CUDA graph. The caller's current device is restored before every return. */
#ifndef ESA_CUDA_CUDA_H
#define ESA_CUDA_CUDA_H

#include "base/args.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ESA_CUDA_ABI        1
#define ESA_CUDA_ENTRY_NAME "esa_cuda_entry"

/* one GPU as one ctx sees it: properties, kernel level, last error */
typedef struct esa_cuda_device esa_cuda_device;

typedef struct esa_cuda_host { /* what libesa was built with; the plugin refuses anything else */
    uint32_t struct_size;
    uint32_t attn_args_size, select_args_size, mask_size, info_size, table_size;
    const char *version; /* esa_version() */
} esa_cuda_host;

typedef struct esa_cuda_info {
    int32_t ordinal, major, minor, multiprocessors;
    int32_t driver, runtime;     /* as CUDA counts: 13000 is 13.0 */
    int64_t memory, free_memory; /* bytes */
    char name[64];
    char kernels[16]; /* "sm90a" or "sm80": the attention kernels this GPU gets */
} esa_cuda_info;

/* A mask in device memory. */
typedef struct esa_cuda_mask {
    int32_t *count;  /* [B][Hq][nq] */
    uint16_t *index; /* [B][Hq][nq][cap], ascending; past the count undefined */
    /* [2]: blocks that exist (within kv_len and causal) over all rows; blocks kept */
    int64_t *facts;
    int64_t B, H, nq, nk, cap;
} esa_cuda_mask;

typedef struct esa_cuda_table {
    uint32_t struct_size, abi;
    const char *version; /* of the plugin */

    /* Number of GPUs; ESA_ERR_DEVICE and a sentence where there is no driver, or one too old. */
    esa_status (*devices)(int32_t *count, char *error, int32_t error_bytes);
    /* level: NULL or "": the best for this GPU; "sm80" or "sm90a" lowers it (ESA_ERR_UNSUPPORTED
     * for other names, and for a level above the GPU's). On success *dev is owned by the caller, to
     * be given to close. On failure *dev is NULL and error holds a sentence. */
    esa_status (*open)(esa_cuda_device **dev, int32_t ordinal, const char *level, char *error,
                       int32_t error_bytes);
    void (*close)(esa_cuda_device *dev);
    const char *(*error)(const esa_cuda_device *dev);
    esa_status (*info)(esa_cuda_device *dev, esa_cuda_info *info);

    /* Memory. release takes the ordinal, not the device object: masks may outlive the ctx that made
     * them. upload: src may be pageable and may change once the call returns. download and sync
     * wait for the stream; download with stream NULL for the whole device. */
    esa_status (*alloc)(esa_cuda_device *dev, void **ptr, int64_t bytes);
    void (*release)(int32_t ordinal, void *ptr);
    esa_status (*upload)(esa_cuda_device *dev, void *dst, const void *src, int64_t bytes,
                         void *stream);
    esa_status (*download)(int32_t ordinal, void *dst, const void *src, int64_t bytes,
                           void *stream);
    /* device to device */
    esa_status (*copy)(esa_cuda_device *dev, void *dst, const void *src, int64_t bytes,
                       void *stream);
    esa_status (*sync)(esa_cuda_device *dev, void *stream);
    /* Marks on a stream, for timing. elapsed: seconds between two recorded marks; waits for the
     * second. */
    esa_status (*mark_create)(esa_cuda_device *dev, void **mark);
    void (*mark_release)(int32_t ordinal, void *mark);
    esa_status (*mark_record)(esa_cuda_device *dev, void *mark, void *stream);
    esa_status (*mark_elapsed)(esa_cuda_device *dev, double *seconds, void *from, void *to);

    /* Attention. workspace: bytes for any views of these sizes (of args only sizes, dtype, tail,
     * causal, blocks, scale, whether count, kv_len, perm_q and perm_k are NULL count). kernel: the
     * name of what would run ("sm90a", "sm80", "simt"), static storage. */
    int64_t (*attention_workspace)(const esa_cuda_device *dev, const esa_attn_args *args);
    esa_status (*attention)(esa_cuda_device *dev, const esa_attn_args *args, void *ws,
                            void *stream);
    const char *(*attention_kernel)(const esa_cuda_device *dev, const esa_attn_args *args);

    /* Selection: mask->count, index and facts are filled. importance: out f32[B][Hq][nq][nk],
     * entropy f64[B][Hq] or NULL, both on the device, for params.selector = ENTROPY.
     * from_importance: the second half of the entropy selector. One workspace serves all. */
    int64_t (*select_workspace)(const esa_cuda_device *dev, const esa_select_args *args);
    esa_status (*select)(esa_cuda_device *dev, const esa_select_args *args,
                         const esa_cuda_mask *mask, void *ws, void *stream);
    esa_status (*importance)(esa_cuda_device *dev, const esa_select_args *args, float *out,
                             double *entropy, void *ws, void *stream);
    esa_status (*from_importance)(esa_cuda_device *dev, const esa_select_args *args,
                                  const esa_cuda_mask *mask, const float *importance, void *ws,
                                  void *stream);

    /* Masks at rest: bits [B][H][nq][ceil(nk/8)], bit j is byte j/8, bit j%8; bits at or above nk
     * are ignored and written as 0. bits_to_lists sets facts[1] and leaves facts[0] alone. */
    esa_status (*bits_to_lists)(esa_cuda_device *dev, const esa_cuda_mask *mask,
                                const uint8_t *bits, void *stream);
    esa_status (*lists_to_bits)(esa_cuda_device *dev, const esa_cuda_mask *mask, uint8_t *bits,
                                void *stream);
} esa_cuda_table;

/* The plugin's only exported symbol. abi: ESA_CUDA_ABI of the caller. NULL if abi or host do not
 * fit; then error says how. */
const esa_cuda_table *esa_cuda_entry(uint32_t abi, const esa_cuda_host *host, char *error,
                                     int32_t error_bytes);
typedef const esa_cuda_table *esa_cuda_entry_fn(uint32_t abi, const esa_cuda_host *host,
                                                char *error, int32_t error_bytes);

#ifdef __cplusplus
}
#endif
#endif
