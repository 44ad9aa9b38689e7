/* cuda.h - the interface between libesa and the plugin libesa_cuda: one entry function that returns
 * one table of C functions.
 * SPDX-License-Identifier: Apache-2.0
 *
 * libesa loads the plugin at run time and calls esa_cuda_entry. The plugin exports nothing else and
 * has no undefined esa_ symbols. Both sides are built from this header; esa_cuda_host carries the
 * sizes to check that.
 *
 * Every function returns an esa_status and leaves a message in the device object
 * (esa_cuda_table.error) or in the text it was given. No function aborts, prints, or leaves a CUDA
 * error behind for the caller's next call. "stream" is a cudaStream_t; NULL is the default stream.
 *
 * attention, attention_both, exact_take, exact_mend, select, importance, from_importance, the mask
 * conversions and the operations of networks only enqueue work. They do not allocate, synchronise
 * or read host memory after they return, so a CUDA graph can capture them. Every function restores
 * the caller's current device. */
#ifndef ESA_CUDA_CUDA_H
#define ESA_CUDA_CUDA_H

#include "base/args.h"
#include "base/nn_args.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ESA_CUDA_ABI        7
#define ESA_CUDA_ENTRY_NAME "esa_cuda_entry"

/* One GPU as one ctx sees it: properties, kernel level, last error. */
typedef struct esa_cuda_device esa_cuda_device;

typedef struct esa_cuda_host { /* how libesa was built; the plugin refuses anything else */
    /* 64 bits, so that there is no gap before the pointer, whatever their number */
    uint64_t struct_size;
    uint64_t attn_args_size, select_args_size, mask_size, info_size, table_size;
    uint64_t norm_args_size, qk_args_size, act_args_size;
    uint64_t patch_args_size, step_args_size, figures_args_size;
    uint64_t product_args_size, biased_args_size, convert_args_size;
    uint64_t plane_conv_args_size, plane_norm_args_size;
    uint64_t plane_latent_args_size, plane_bytes_args_size;
    uint64_t plane_group_args_size, plane_border_args_size;
    const char *build; /* esa_build_id() */
} esa_cuda_host;

typedef struct esa_cuda_info {
    int32_t ordinal, major, minor, multiprocessors;
    int32_t driver, runtime;     /* CUDA versions as CUDA counts them: 13000 is 13.0 */
    int64_t memory, free_memory; /* bytes */
    char name[64];
    char kernels[16]; /* attention kernels for this GPU: "sm90a", "sm89" or "sm80" */
} esa_cuda_info;

/* A mask in device memory. */
typedef struct esa_cuda_mask {
    int32_t *count;  /* [B][Hq][nq] */
    uint16_t *index; /* [B][Hq][nq][cap], ascending; undefined after the count */
    /* The fine level, lists as above; null if the mask has none. */
    int32_t *fine_count;
    uint16_t *fine_index;
    /* [3]: existing blocks (within kv_len and causality) over all rows; kept blocks; blocks on the
     * fine level. */
    int64_t *facts;
    int64_t B, H, nq, nk, cap;
} esa_cuda_mask;

/* The operations of networks on rows; base/nn_args.h has their arguments. */
typedef struct esa_cuda_rows {
    esa_status (*norm)(esa_cuda_device *dev, const esa_norm_args *args, void *stream);
    esa_status (*qk)(esa_cuda_device *dev, const esa_qk_args *args, void *stream);
    esa_status (*act)(esa_cuda_device *dev, const esa_act_args *args, void *stream);
} esa_cuda_rows;

/* Matrix products. prepare allocates and waits; the contents of x, its scales and y are lost.
 * library: *name is the version and path of the library, valid until close. */
typedef struct esa_cuda_products {
    esa_status (*library)(esa_cuda_device *dev, const char **name);
    esa_status (*prepare)(esa_cuda_device *dev, const esa_product_args *args, void *stream);
    int64_t (*workspace)(const esa_cuda_device *dev);
    esa_status (*product)(esa_cuda_device *dev, const esa_product_args *args, void *ws,
                          void *stream);
} esa_cuda_products;

/* Attention with biases. */
typedef struct esa_cuda_biased {
    esa_status (*attention)(esa_cuda_device *dev, const esa_biased_args *args, void *stream);
} esa_cuda_biased;

/* Planes of decoders. conv_bytes reads the sizes of the kernel only. weight: f32
 * [cout][cin][kt][kh][kw] on the device. */
typedef struct esa_cuda_planes {
    int64_t (*conv_bytes)(const esa_cuda_device *dev, const esa_plane_conv_args *args);
    esa_status (*conv_pack)(esa_cuda_device *dev, void *packed, const esa_plane_conv_args *args,
                            const float *weight, void *stream);
    esa_status (*conv)(esa_cuda_device *dev, const esa_plane_conv_args *args, void *stream);
    esa_status (*pixel_norm)(esa_cuda_device *dev, const esa_plane_norm_args *args, void *stream);
    esa_status (*group_norm)(esa_cuda_device *dev, const esa_plane_group_args *args, void *stream);
    esa_status (*border)(esa_cuda_device *dev, const esa_plane_border_args *args, void *stream);
    esa_status (*from_latents)(esa_cuda_device *dev, const esa_plane_latent_args *args,
                               void *stream);
    esa_status (*to_bytes)(esa_cuda_device *dev, const esa_plane_bytes_args *args, void *stream);
    esa_status (*zero)(esa_cuda_device *dev, void *ptr, int64_t bytes, void *stream);
} esa_cuda_planes;

/* Patches, timestep, guidance and the scheduler. */
typedef struct esa_cuda_latents {
    esa_status (*patches)(esa_cuda_device *dev, const esa_patch_args *args, void *stream);
    /* e[rows][cols] = table[rows][cols] + add[cols] */
    esa_status (*modulate)(esa_cuda_device *dev, float *e, const float *table, const float *add,
                           int64_t rows, int64_t cols, void *stream);
    /* v = negative + scale (v - negative) */
    esa_status (*guide)(esa_cuda_device *dev, float *v, const float *negative, float scale,
                        int64_t count, void *stream);
    esa_status (*step)(esa_cuda_device *dev, const esa_step_args *args, void *stream);
    esa_status (*figures)(esa_cuda_device *dev, const esa_figures_args *args, void *stream);
} esa_cuda_latents;

/* Copies between host and GPU beside the work, as backend/engine.h describes them. Lanes from
 * ESA_CUDA_CARRY_LANE on have a stream of their own. landed waits. */
enum { ESA_CUDA_CARRY_LANE = 4, ESA_CUDA_LANES = 7 };
typedef struct esa_cuda_transfer {
    esa_status (*pin)(esa_cuda_device *dev, void **ptr, int64_t bytes);
    void (*unpin)(esa_cuda_device *dev, void *ptr);
    esa_status (*fetch)(esa_cuda_device *dev, int32_t lane, void *dst, const void *src,
                        int64_t bytes);
    esa_status (*store)(esa_cuda_device *dev, int32_t lane, void *dst, const void *src,
                        int64_t bytes, void *stream);
    esa_status (*arrive)(esa_cuda_device *dev, int32_t lane, void *stream);
    esa_status (*used)(esa_cuda_device *dev, int32_t lane, void *stream);
    esa_status (*landed)(esa_cuda_device *dev, int32_t lane);
    esa_status (*convert)(esa_cuda_device *dev, const esa_convert_args *args, void *stream);
} esa_cuda_transfer;

typedef struct esa_cuda_table {
    uint32_t struct_size, abi;
    const char *version; /* version of the plugin */

    /* Number of GPUs. ESA_ERR_DEVICE and a message if there is no driver or it is too old. */
    esa_status (*devices)(int32_t *count, char *error, int32_t error_bytes);
    /* level NULL or "": the best level of this GPU. "sm80", "sm89" or "sm90a" lowers it;
     * ESA_ERR_UNSUPPORTED for other names and for a level above the GPU's. On success the caller
     * owns *dev and gives it to close. On failure *dev is NULL and error holds a message. */
    esa_status (*open)(esa_cuda_device **dev, int32_t ordinal, const char *level, char *error,
                       int32_t error_bytes);
    void (*close)(esa_cuda_device *dev);
    const char *(*error)(const esa_cuda_device *dev);
    esa_status (*info)(esa_cuda_device *dev, esa_cuda_info *info);

    /* Memory. release takes the ordinal instead of the device object, because a mask may outlive
     * its ctx. upload: src may be pageable and may change after the call. download and sync wait
     * for the stream; download with stream NULL waits for the whole device. */
    esa_status (*alloc)(esa_cuda_device *dev, void **ptr, int64_t bytes);
    void (*release)(int32_t ordinal, void *ptr);
    esa_status (*upload)(esa_cuda_device *dev, void *dst, const void *src, int64_t bytes,
                         void *stream);
    esa_status (*download)(int32_t ordinal, void *dst, const void *src, int64_t bytes,
                           void *stream);
    /* Device to device. */
    esa_status (*copy)(esa_cuda_device *dev, void *dst, const void *src, int64_t bytes,
                       void *stream);
    esa_status (*sync)(esa_cuda_device *dev, void *stream);
    /* Marks on a stream, for timing. elapsed: seconds between two recorded marks; waits
     * for the second. */
    esa_status (*mark_create)(esa_cuda_device *dev, void **mark);
    void (*mark_release)(int32_t ordinal, void *mark);
    esa_status (*mark_record)(esa_cuda_device *dev, void *mark, void *stream);
    esa_status (*mark_elapsed)(esa_cuda_device *dev, double *seconds, void *from, void *to);

    /* Attention. workspace: bytes for any views of these sizes. It reads only sizes, dtype, tail,
     * causal, blocks, fine, scale, and whether count, kv_len, perm_q and perm_k are NULL. kernel:
     * the kernel that would run ("sm90a", "sm80", "simt", ...). */
    int64_t (*attention_workspace)(const esa_cuda_device *dev, const esa_attn_args *args);
    esa_status (*attention)(esa_cuda_device *dev, const esa_attn_args *args, void *ws,
                            void *stream);
    esa_attn_kernel (*attention_kernel)(const esa_cuda_device *dev, const esa_attn_args *args);
    /* Two calls that do not depend on one another, with a workspace each. They may run at the same
     * time; work on the stream that follows waits for both. */
    esa_status (*attention_both)(esa_cuda_device *dev, const esa_attn_args *first, void *first_ws,
                                 const esa_attn_args *second, void *second_ws, void *stream);

    /* Exact rows: args->exact_rows = R rows of every query block. exact_take copies these rows of q
     * to rows [B][Hq][nq*R][D], contiguous. exact_mend gets their exact output o [B][Hq][nq*R][D]
     * and lse [B][Hq][nq*R] (read only if args->lse is set), and changes args->o and args->lse as
     * rules/exact_rows.h says. */
    esa_status (*exact_take)(esa_cuda_device *dev, const esa_attn_args *args, void *rows,
                             void *stream);
    esa_status (*exact_mend)(esa_cuda_device *dev, const esa_attn_args *args, const void *o,
                             const float *lse, void *stream);

    /* Selection fills count, index and facts of mask. importance: out
     * f32[B][Hq][nq][nk] and entropy f64[B][Hq] or NULL, both on the device, for
     * params.selector = ENTROPY. from_importance: the second half of the entropy
     * selector. All three use the same workspace. */
    int64_t (*select_workspace)(const esa_cuda_device *dev, const esa_select_args *args);
    esa_status (*select)(esa_cuda_device *dev, const esa_select_args *args,
                         const esa_cuda_mask *mask, void *ws, void *stream);
    esa_status (*importance)(esa_cuda_device *dev, const esa_select_args *args, float *out,
                             double *entropy, void *ws, void *stream);
    esa_status (*from_importance)(esa_cuda_device *dev, const esa_select_args *args,
                                  const esa_cuda_mask *mask, const float *importance, void *ws,
                                  void *stream);

    /* Error scores out f32[levels][B][Hq][nq][nk] on the device, for params.selector = ERROR;
     * levels is 2 with tail LEVELS, else 1. The same workspace as select. */
    esa_status (*errors)(esa_cuda_device *dev, const esa_select_args *args, float *out, void *ws,
                         void *stream);

    /* Adaptive orders: perm_q [B][Hq][Nq] and perm_k [B][Hkv][Nk] from q and k. args->perm_q and
     * args->perm_k: the orders to start from. */
    int64_t (*order_workspace)(const esa_cuda_device *dev, const esa_select_args *args);
    esa_status (*order)(esa_cuda_device *dev, const esa_select_args *args, int32_t *perm_q,
                        int32_t *perm_k, void *ws, void *stream);

    /* Stored masks: bits [B][H][nq][ceil(nk/8)]; block j is bit j%8 of byte j/8. Bits from
     * nk on are ignored when read and 0 when written. fine: the same for the fine level, null if
     * the mask has none. bits_to_lists sets facts[1] and facts[2] and leaves facts[0] alone. */
    esa_status (*bits_to_lists)(esa_cuda_device *dev, const esa_cuda_mask *mask,
                                const uint8_t *bits, const uint8_t *fine, void *stream);
    esa_status (*lists_to_bits)(esa_cuda_device *dev, const esa_cuda_mask *mask, uint8_t *bits,
                                uint8_t *fine, void *stream);

    /* Groups of operations of networks, each complete. */
    const esa_cuda_rows *rows;
    const esa_cuda_products *products;
    const esa_cuda_latents *latents;
    const esa_cuda_biased *biased;
    const esa_cuda_planes *planes;
    const esa_cuda_transfer *transfer;
} esa_cuda_table;

/* The sizes as this file is compiled, for both sides of the comparison. */
ESA_INLINE esa_cuda_host esa_cuda_host_of(const char *build)
{
    esa_cuda_host host = { sizeof(esa_cuda_host),         sizeof(esa_attn_args),
                           sizeof(esa_select_args),       sizeof(esa_cuda_mask),
                           sizeof(esa_cuda_info),         sizeof(esa_cuda_table),
                           sizeof(esa_norm_args),         sizeof(esa_qk_args),
                           sizeof(esa_act_args),          sizeof(esa_patch_args),
                           sizeof(esa_step_args),         sizeof(esa_figures_args),
                           sizeof(esa_product_args),      sizeof(esa_biased_args),
                           sizeof(esa_convert_args),      sizeof(esa_plane_conv_args),
                           sizeof(esa_plane_norm_args),   sizeof(esa_plane_latent_args),
                           sizeof(esa_plane_bytes_args),  sizeof(esa_plane_group_args),
                           sizeof(esa_plane_border_args), build };
    return host;
}

/* The only exported symbol of the plugin. abi: ESA_CUDA_ABI of the caller. Returns NULL if abi or
 * host do not match; error then says why. */
const esa_cuda_table *esa_cuda_entry(uint32_t abi, const esa_cuda_host *host, char *error,
                                     int32_t error_bytes);
typedef const esa_cuda_table *esa_cuda_entry_fn(uint32_t abi, const esa_cuda_host *host,
                                                char *error, int32_t error_bytes);

#ifdef __cplusplus
}
#endif
#endif
