/* esa.h - sparse attention for video diffusion transformers: contexts, views, masks, plans,
 * attention.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The shortest use (see examples/00_one_call.c):
 *
 *     esa_ctx *ctx;  esa_mask *mask;
 *     esa_select_params sel = esa_select_params_default(ESA_SELECT_ENTROPY);
 *     esa_ctx_create(&ctx, NULL);
 *     esa_select(ctx, &mask, &q, &k, &sel);                      // decide which key blocks matter
 *     esa_attention(ctx, &q, &k, &v, &o, mask, NULL);            // compute only those
 *     esa_mask_free(mask);  esa_ctx_free(ctx);
 *
 * Letters: B batch, H heads (Hq query heads, Hkv key/value heads), N tokens (Nq, Nk), D head
 * dimension, Bq x Bk block size, nq = ceil(Nq/Bq), nk = ceil(Nk/Bk). density = budget = kept
 * fraction of key blocks.
 *
 * Rules that hold for every call:
 *  - Returns ESA_OK (0) or a pinned negative esa_status. After a failure esa_ctx_error(ctx) holds
 * one sentence that says what was given and what was expected; outputs that are objects are set to
 * NULL, nothing is leaked. The library never prints, exits, aborts, or keeps mutable global state.
 *  - Views (esa_tensor) never own memory. The caller keeps q, k, v, o alive for the duration of the
 * call (CPU) or until the stream has passed it (CUDA).
 *  - A ctx takes one call at a time (a second concurrent call returns ESA_ERR_STATE); different ctx
 * are independent. A filled mask is immutable and may be shared between threads and contexts (on a
 * GPU: once the stream that fills it has come that far, which is for the caller to arrange where
 * streams differ).
 *  - Same inputs, same backend, same ISA level: same bits, whatever the number of threads.
 *  - Public structs start with struct_size, hold fixed-width fields only, and are filled by their
 * *_default() function; reserved fields must stay zero. A NULL params pointer means the defaults.
 *  - free functions accept NULL.
 *
 * Numerics: inputs and outputs f32, f16 or bf16, accumulation in f32. A row with no visible key
 * gives output 0 and LSE -inf. A score of -inf counts as an absent key. NaN, or a score of +inf, in
 * a row gives NaN in that row's output and touches no other row; NaN or infinity in a value (v)
 * reaches every row that computes its block, also rows that causality hides it from, and with a
 * tail every row for which the block's mean stands in. A centroid tail is made from the mean query
 * of a query block: NaN in one of its queries reaches all of them. Rounding to f16 goes to infinity
 * above 65504 as IEEE says. */
#ifndef ESA_ESA_H
#define ESA_ESA_H

#include <stdint.h>
#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ESA_API __attribute__((visibility("default")))
#else
#define ESA_API
#endif

/* ---------------------------------------------------------------- constants */

/* Status codes; the numbers are part of the ABI and never change. */
typedef int32_t esa_status;
enum {
    ESA_OK = 0,
    ESA_ERR_ARGUMENT = -1,    /* a null pointer, or a value out of its range */
    ESA_ERR_SHAPE = -2,       /* views, plan and mask do not fit each other */
    ESA_ERR_DTYPE = -3,       /* a dtype this call does not take */
    ESA_ERR_UNSUPPORTED = -4, /* well formed, but no kernel does it */
    ESA_ERR_MEMORY = -5,      /* an allocation failed */
    ESA_ERR_DEVICE = -6,      /* no such device, no plugin, or the device reported an error */
    ESA_ERR_IO = -7,          /* the operating system refused a read or a write */
    ESA_ERR_FORMAT = -8,      /* a file is not what it claims to be */
    /* a valid file or mask, made for another model, shape or step count */
    ESA_ERR_MISMATCH = -9,
    ESA_ERR_STATE = -10,   /* a call out of order, or two calls on one ctx at a time */
    ESA_ERR_VERSION = -11, /* struct_size or file version this library does not know */
    ESA_ERR_POLICY = -12,  /* strict session: this call would have run dense */
    ESA_ERR_INTERNAL = -13 /* a broken promise inside the library; please report it */
};

enum { ESA_DTYPE_F32 = 0, ESA_DTYPE_F16 = 1, ESA_DTYPE_BF16 = 2 };
enum { ESA_DEVICE_CPU = 0, ESA_DEVICE_CUDA = 1 };

/* Selectors. FULL keeps everything; RANDOM keeps uniformly random blocks of each row
 * (benchmarks). */
enum {
    ESA_SELECT_FULL = 0,
    ESA_SELECT_ENTROPY = 1,
    ESA_SELECT_RF_V2 = 2,
    ESA_SELECT_ADA_BSA = 3,
    ESA_SELECT_RANDOM = 4
};
/* FIXED: the rules a user expects. COMPAT: the originals' rules, quirks included, in fp32/double.
 * COMPAT_ROUND: their rounding points to the input dtype as well (f32 input counts as f16). */
enum { ESA_MODE_FIXED = 0, ESA_MODE_COMPAT = 1, ESA_MODE_COMPAT_ROUND = 2 };
enum {
    ESA_ORDER_DEFAULT = -1,
    ESA_ORDER_RASTER = 0,
    ESA_ORDER_TILE = 1,
    ESA_ORDER_TILE3D = 2,
    ESA_ORDER_HILBERT = 3
};
enum { ESA_TAIL_NONE = 0, ESA_TAIL_POOLED = 1, ESA_TAIL_CENTROID = 2 };

#define ESA_MAX_HEAD_DIM    256   /* largest D */
#define ESA_MAX_BLOCKS      65535 /* largest nq and nk: block indices are uint16 */
#define ESA_MAX_THREADS     256
#define ESA_WORKSPACE_ALIGN 64 /* workspace pointers must be multiples of this */

/* ---------------------------------------------------------------- context */

typedef struct esa_ctx esa_ctx;
typedef struct esa_plan esa_plan;
typedef struct esa_mask esa_mask;

enum { ESA_LOG_ERROR = 0, ESA_LOG_WARNING = 1, ESA_LOG_INFO = 2, ESA_LOG_DEBUG = 3 };

typedef struct esa_ctx_params {
    uint32_t struct_size;
    int32_t threads; /* 0: one per CPU this process may run on; else 1 .. ESA_MAX_THREADS */
    /* NULL: the C library. Must return 64-byte aligned memory, or NULL */
    void *(*alloc)(void *user, uint64_t bytes);
    void (*dealloc)(void *user, void *ptr, uint64_t bytes); /* set both or neither */
    void *alloc_user;
    /* NULL: silent. Called from the calling thread only */
    void (*log)(void *user, int32_t level, const char *text);
    void *log_user;
    void *cuda_stream;   /* cudaStream_t for CUDA calls; NULL: the default stream */
    int32_t cuda_device; /* ordinal used by CUDA calls */
    /* 0: best this CPU has (or $ESA_CPU); else an ESA_CPU_* level, which may only lower it */
    int32_t cpu_level;
    int64_t reserved[4];
} esa_ctx_params;

/* ISA levels of the CPU backend, as $ESA_CPU names them: ref, avx2, avx512, avx512bf16, neon. */
enum {
    ESA_CPU_BEST = 0,
    ESA_CPU_REF = 1,
    ESA_CPU_AVX2 = 2,
    ESA_CPU_AVX512 = 3,
    ESA_CPU_AVX512BF16 = 4,
    ESA_CPU_NEON = 5
};

ESA_API esa_ctx_params esa_ctx_params_default(void);
/* On success *ctx is owned by the caller, to be given to esa_ctx_free. Threads sleep when idle. On
 * failure *ctx is NULL and there is no ctx to hold a sentence: ESA_ERR_ARGUMENT (threads, allocator
 * or cpu_level out of range), ESA_ERR_VERSION (struct_size), ESA_ERR_UNSUPPORTED (this machine
 * lacks the asked cpu_level, or $ESA_CPU names an unknown or missing one), ESA_ERR_MEMORY. */
ESA_API esa_status esa_ctx_create(esa_ctx **ctx, const esa_ctx_params *params);
ESA_API void esa_ctx_free(esa_ctx *ctx);
/* The sentence of the last failed call on ctx ("" if none). Owned by ctx, valid until its next
 * call. */
ESA_API const char *esa_ctx_error(const esa_ctx *ctx);
/* Name of a status code, e.g. "ESA_ERR_SHAPE"; never NULL. */
ESA_API const char *esa_status_name(esa_status status);
ESA_API int32_t esa_ctx_threads(const esa_ctx *ctx);
/* Name of the CPU kernel set in use ("avx2", ...). Static storage. */
ESA_API const char *esa_ctx_cpu(const esa_ctx *ctx);
/* Bytes the ctx keeps between calls (its arena), and the most it and its calls ever held at
 * once. */
ESA_API void esa_ctx_memory(const esa_ctx *ctx, int64_t *held_bytes, int64_t *peak_bytes);
/* Gives the arena back to the allocator. */
ESA_API void esa_ctx_trim(esa_ctx *ctx);
/* The stream of the CUDA calls that follow, sessions and plans of this ctx included. Scratch memory
 * and masks are shared with the calls before, so a change waits for the stream until now (which
 * must still exist); the same stream again costs nothing. */
ESA_API esa_status esa_ctx_set_stream(esa_ctx *ctx, void *cuda_stream);
ESA_API const char *esa_version(void); /* "0.1.0" */
ESA_API int32_t esa_api_version(void); /* ESA_API_VERSION of the library in use */
/* Sizes of all public structs in the order of ESA_ABI_*; a binding compares them at import. */
enum {
    ESA_ABI_CTX_PARAMS = 0,
    ESA_ABI_TENSOR,
    ESA_ABI_LAYOUT,
    ESA_ABI_SELECT_PARAMS,
    ESA_ABI_ATTENTION_PARAMS,
    ESA_ABI_SHAPES,
    ESA_ABI_MASK_INFO,
    ESA_ABI_SESSION_PARAMS,
    ESA_ABI_SESSION_STATS,
    ESA_ABI_MASK_FILE_INFO,
    ESA_ABI_TENSOR_INFO,
    ESA_ABI_DEVICE_INFO,
    ESA_ABI_COUNT
};
ESA_API const uint32_t *esa_abi(void); /* ESA_ABI_COUNT entries, static storage */

/* ---------------------------------------------------------------- views */

/* A strided view of a B x H x N x D tensor; never owns. BNSD and BSND differ in strides only. */
typedef struct esa_tensor {
    uint32_t struct_size;
    int32_t dtype;  /* ESA_DTYPE_* */
    int32_t device; /* ESA_DEVICE_* */
    int32_t device_index;
    void *data;
    int64_t dim[4]; /* B, H, N, D, always in this order */
    /* in elements; stride[3] must be 1; batch and head strides may be 0 to broadcast (not in o) */
    int64_t stride[4];
} esa_tensor;

/* Contiguous views: memory order b,h,n,d (BNSD) or b,n,h,d (BSND). */
ESA_API esa_tensor esa_tensor_bnsd(void *data, int32_t dtype, int64_t B, int64_t H, int64_t N,
                                   int64_t D);
ESA_API esa_tensor esa_tensor_bsnd(void *data, int32_t dtype, int64_t B, int64_t H, int64_t N,
                                   int64_t D);

/* ---------------------------------------------------------------- GPUs */

/* CUDA work runs in the plugin libesa_cuda.so, which is opened at the first use of a GPU: the file
 * $ESA_CUDA_LIB if set, else the one in the folder libesa itself lies in (the program's, where
 * libesa is linked into it), nowhere else. Where it is missing, does not fit, or finds no GPU,
 * calls with CUDA views return ESA_ERR_DEVICE and a sentence; everything on the CPU goes on
 * working. Two things the CPU does are refused there (ESA_ERR_UNSUPPORTED): views that do not start
 * at a multiple of their element size, and the entropy selector in COMPAT_ROUND. A ctx works on one
 * GPU (esa_ctx_params.cuda_device) and one stream (cuda_stream); views must carry that ordinal.
 * $ESA_CUDA=sm80 or sm90a lowers the choice of kernels. */
typedef struct esa_device_info {
    uint32_t struct_size;
    int32_t ordinal, major, minor; /* compute capability */
    int32_t multiprocessors;
    int32_t driver, runtime; /* as CUDA counts: 13000 is 13.0 */
    int32_t reserved0;
    int64_t memory, free_memory; /* bytes */
    char name[64];
    char kernels[16]; /* attention kernels it gets: "sm90a" or "sm80" */
    char plugin[16];  /* version of libesa_cuda */
    int64_t reserved[4];
} esa_device_info;

/* Number of GPUs (0 and ESA_ERR_DEVICE with the reason if there is no plugin, driver or GPU). */
ESA_API esa_status esa_device_count(esa_ctx *ctx, int32_t *count);
/* About the GPU of this ctx. */
ESA_API esa_status esa_device_get_info(esa_ctx *ctx, esa_device_info *info);
/* Memory on the GPU of this ctx, for callers that do not use CUDA themselves; any device pointer
 * will do for views. The caller frees before the ctx. Copies are ordered with the ctx's stream;
 * upload may return before the copy is done, but src may change by then; download and sync wait.
 * bytes 0 is allowed. */
ESA_API esa_status esa_device_alloc(esa_ctx *ctx, void **ptr, int64_t bytes);
ESA_API void esa_device_free(esa_ctx *ctx, void *ptr);
ESA_API esa_status esa_device_upload(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);
ESA_API esa_status esa_device_download(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);
ESA_API esa_status esa_device_sync(esa_ctx *ctx);
/* Bytes of GPU memory the ctx keeps between calls (esa_ctx_trim gives them back), and the most it
 * ever kept. */
ESA_API void esa_device_memory(const esa_ctx *ctx, int64_t *held_bytes, int64_t *peak_bytes);

/* ---------------------------------------------------------------- layout: how tokens lie in the
 * sequence */

/* A sequence is [text front][video tokens, t*h*w][text back]. An order permutes video tokens so
 * that blocks become homogeneous; it works within the segments [text front][frame 0 if
 * protected][other frames][text back], never across them, and blocks are cut on the resulting
 * sequence without padding. raster   as given (f, y, x)             tile     8x8 tiles inside each
 * frame (the rf_v2 rule) tile3d   boxes of window[t,h,w]         hilbert  a generalised Hilbert
 * curve, any size A grid of zeros means no grid: only raster is possible, nothing is protected. If
 * the k side is all zero and Nk = Nq it takes the q side's grid and text. Causal attention needs
 * raster, or order_applied. */
typedef struct esa_layout {
    uint32_t struct_size;
    int32_t order; /* ESA_ORDER_*; DEFAULT: tile for rf_v2 with a grid, raster otherwise */
    /* 1: q, k, v and o already stand in that order; 0: the library gathers and scatters */
    int32_t order_applied;
    /* 1: frame 0's rows and columns are kept whole; 0: not; -1: 1 for rf_v2, else 0. Has no
     * effect without a grid, and in fixed mode for t = 1 */
    int32_t protect_first_frame;
    int32_t window[3]; /* tile3d: t, h, w, each >= 1 */
    int32_t grid_q[3]; /* t, h, w of the query side's video tokens */
    int32_t text_front_q, text_back_q;
    int32_t grid_k[3];
    int32_t text_front_k, text_back_k;
    int32_t reserved[8];
} esa_layout;

ESA_API esa_layout esa_layout_default(void);
/* Fills perm[N] with the order of one side (0: q, 1: k): position p of the ordered sequence holds
 * token perm[p] of the sequence as given. N must equal text + t*h*w (any N for raster without a
 * grid). Here no selector is known: order DEFAULT counts as raster and protect_first_frame -1 as 0;
 * for rf_v2, whose own defaults are tile and 1, set both. mode matters for tile: COMPAT keeps frame
 * 0 raster unless h and w are multiples of 8, and moves text from front to back. */
ESA_API esa_status esa_order(esa_ctx *ctx, int32_t *perm, int64_t N, const esa_layout *layout,
                             int32_t side, int32_t mode);

/* ---------------------------------------------------------------- selection */

typedef struct esa_select_params {
    uint32_t struct_size;
    int32_t selector; /* ESA_SELECT_* */
    int32_t mode;     /* ESA_MODE_* */
    /* 0: the selector's default (entropy 256x128, others 128x128); else 16..256, multiples of
     * 16. ada_bsa needs multiples of 8 groups: the same rule */
    int32_t block_q, block_k;
    int32_t samples;                /* entropy: queries scored per query block, 1 .. 256 (4) */
    double budget;                  /* kept fraction of key blocks, 0 .. 1 (0.5); 1 - sparsity */
    double cdf_threshold;           /* ada_bsa; >= 1 disables the CDF rule (1.0) */
    double scale;                   /* 0: D^-0.5 */
    int32_t keep_sink, keep_recent; /* ada_bsa (1, 1) */
    int32_t causal;                 /* 1: key j is visible to query i iff j <= i + Nk - Nq */
    int32_t branch;                 /* seeds RANDOM together with seed; otherwise unused */
    uint64_t seed;                  /* RANDOM */
    /* int32[B] on the tensors' device, or NULL = Nk: keys beyond it do not exist. Read at every
     * call; the caller keeps it alive. Under an order that is not yet applied it may only cut
     * text at the end. On the CPU its values are checked; on a GPU nobody can look without
     * waiting: values outside 0 .. Nk count as the nearer end, and cutting into tokens that an
     * order moves is the caller's mistake */
    const int32_t *kv_len;
    esa_layout layout;
    int64_t reserved[4];
} esa_select_params;

ESA_API esa_select_params esa_select_params_default(int32_t selector);

/* Runs a selector on q and k and returns a filled mask the caller frees. *mask is NULL on
 * failure. */
ESA_API esa_status esa_select(esa_ctx *ctx, esa_mask **mask, const esa_tensor *q,
                              const esa_tensor *k, const esa_select_params *params);

/* ---------------------------------------------------------------- attention */

typedef struct esa_attention_params {
    uint32_t struct_size;
    int32_t tail;   /* ESA_TAIL_*: what stands in for skipped blocks (NONE) */
    int32_t causal; /* bottom-right aligned, see esa_select_params.causal */
    int32_t reserved0;
    double scale;          /* 0: D^-0.5 */
    const int32_t *kv_len; /* as in esa_select_params */
    /* one-call tier: f32 view B,Hq,Nq,1 that receives the log-sum-exp, or NULL */
    const esa_tensor *lse;
    int64_t reserved[4];
} esa_attention_params;

ESA_API esa_attention_params esa_attention_params_default(void);

/* o = softmax(scale q k^T over the kept blocks [+ tail]) v. mask NULL: dense. Hq must be a multiple
 * of Hkv (query head h reads kv head h / (Hq/Hkv)); a mask has Hq heads and B or 1 batch entries. o
 * may not overlap q, k or v. On failure o is unchanged; a GPU that breaks down while it computes
 * leaves it undefined, and a later call says so. */
ESA_API esa_status esa_attention(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                                 const esa_tensor *v, const esa_tensor *o, const esa_mask *mask,
                                 const esa_attention_params *params);

/* ---------------------------------------------------------------- plan tier: decide once per
 * shape, then execute */

typedef struct esa_shapes {
    uint32_t struct_size;
    int32_t dtype; /* of q, k, v and o */
    int32_t device, device_index;
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int64_t reserved[4];
} esa_shapes;

ESA_API esa_shapes esa_shapes_default(void);
/* A plan keeps a pointer to ctx, which must outlive it; params are copied (kv_len pointers are kept
 * and must agree). select NULL: the plan only runs attention with masks of any block size, or
 * dense. */
ESA_API esa_status esa_plan_create(esa_ctx *ctx, esa_plan **plan, const esa_shapes *shapes,
                                   const esa_select_params *select,
                                   const esa_attention_params *attention);
ESA_API void esa_plan_free(esa_plan *plan);
/* Bytes of scratch that select and attention need, aligned to ESA_WORKSPACE_ALIGN, on the plan's
 * device. */
ESA_API esa_status esa_plan_workspace(const esa_plan *plan, int64_t *bytes);
/* An empty mask with room for the plan's result; owned by the caller. */
ESA_API esa_status esa_mask_create(const esa_plan *plan, esa_mask **mask);
/* Below this line nothing allocates or synchronises. ws NULL: the ctx's own arena (which may grow
 * at the first call). */
ESA_API esa_status esa_plan_select(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                                   const esa_tensor *k, void *ws);
ESA_API esa_status esa_plan_attention(const esa_plan *plan, const esa_mask *mask,
                                      const esa_tensor *q, const esa_tensor *k, const esa_tensor *v,
                                      const esa_tensor *o, const esa_tensor *lse, void *ws);
/* On a GPU: masks must lie there (esa_mask_create and esa_select put them there, esa_mask_to_device
 * copies); a plan without a selector takes masks whose tokens need no gathering (raster, or
 * order_applied). Pass a workspace to calls captured into a CUDA graph: with ws NULL the first call
 * may allocate, and a larger call or esa_ctx_trim later takes away the memory that the graph
 * uses. */
/* Name of the kernel set that esa_plan_attention with this mask and these views would run
 * ("avx512", "sm90a", "sm80", "simt"); static storage, "" if the arguments do not fit
 * (esa_ctx_error says why). */
ESA_API const char *esa_plan_kernel(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                                    const esa_tensor *k, const esa_tensor *v, const esa_tensor *o);

/* ---------------------------------------------------------------- masks */

typedef struct esa_mask_info {
    uint32_t struct_size;
    int32_t block_q, block_k;
    int32_t device;
    int64_t B, H, Nq, Nk, nq, nk;
    double density_asked; /* as in the params that made it; NaN where unknown */
    /* kept / existing blocks, over all rows (existing: within kv_len and causal) */
    double density;
    int64_t kept;           /* number of kept blocks */
    int32_t selector, mode; /* who made it; selector -1: given by the caller */
    /* 0: a compat mask whose blocks are not the kernel's; attention refuses it */
    int32_t runnable;
    int32_t reserved0;
    esa_layout layout;
    int64_t reserved[4];
} esa_mask_info;

ESA_API void esa_mask_free(esa_mask *mask);
/* For a mask on a GPU this waits for the work that fills it; so do the esa_mask_to_*
 * conversions. */
ESA_API esa_status esa_mask_get_info(const esa_mask *mask, esa_mask_info *info);
/* A copy of a filled mask on the CPU or on the ctx's GPU (device ESA_DEVICE_*), with the order's
 * permutations beside it. One-call esa_attention takes CPU masks for CUDA views too, at the price
 * of this copy in every call. */
ESA_API esa_status esa_mask_to_device(esa_ctx *ctx, esa_mask **copy, const esa_mask *mask,
                                      int32_t device);

/* Masks given by the caller. info gives block_q, block_k, B, H, Nq, Nk and layout; the rest is
 * ignored. The data is copied. lists   count int32[B,H,nq]; index int32[B,H,nq,cap], the first
 * count entries ascending and < nk bits    uint8[B,H,nq,ceil(nk/8)], bit j is byte j/8, bit j%8;
 * bits at or above nk must be 0 fa4     full_block_cnt int32[B,H,nq], full_block_idx
 * int32[B,H,nq,nk] (what lies after the count is ignored) */
ESA_API esa_status esa_mask_from_lists(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                                       const int32_t *count, const int32_t *index, int64_t cap);
ESA_API esa_status esa_mask_from_bits(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                                      const uint8_t *bits);
ESA_API esa_status esa_mask_from_fa4(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                                     const int32_t *full_block_cnt, const int32_t *full_block_idx);
/* Out of a mask, into the caller's arrays. Entries of index and full_block_idx past the count are
 * set to 0. cap < the largest count: ESA_ERR_ARGUMENT and nothing is written. */
ESA_API esa_status esa_mask_to_lists(const esa_mask *mask, int32_t *count, int32_t *index,
                                     int64_t cap);
ESA_API esa_status esa_mask_to_bits(const esa_mask *mask, uint8_t *bits);
ESA_API esa_status esa_mask_to_fa4(const esa_mask *mask, int32_t *full_block_cnt,
                                   int32_t *full_block_idx);

#ifdef __cplusplus
}
#endif

/* ---------------------------------------------------------------- experimental: may change between
 * any two releases */
#ifdef ESA_EXPERIMENTAL
#ifdef __cplusplus
extern "C" {
#endif

/* Block importance of the entropy selector: out f32[B,H,nq,nk] (host, also for CUDA views), every
 * row sums to 1 (0 beyond kv_len). entropy, if not NULL, receives f64[B,H]: the normalised
 * entropies. */
ESA_API esa_status esa_importance(esa_ctx *ctx, float *out, double *entropy, const esa_tensor *q,
                                  const esa_tensor *k, const esa_select_params *params);
/* Share of the true attention mass that mask keeps, mean over the sampled queries (row_step: every
 * n-th query of the ordered sequence; 1 = all), per head: mass f64[B,H]. O(N D) memory. causal,
 * kv_len and scale as in params. On the CPU only. */
ESA_API esa_status esa_mask_mass(esa_ctx *ctx, double *mass, const esa_mask *mask,
                                 const esa_tensor *q, const esa_tensor *k,
                                 const esa_attention_params *params, int32_t row_step);
/* Entropy budgets by themselves: block counts k_h for H heads from normalised entropies (spec:
 * water-filling and largest remainder); count int32[H]. */
ESA_API esa_status esa_entropy_budgets(esa_ctx *ctx, int32_t *count, const double *entropy,
                                       int64_t H, int64_t nk, double budget);

#ifdef __cplusplus
}
#endif
#endif

#endif
