/* esa.h - sparse attention for video diffusion transformers.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The shortest use (examples/00_one_call.c has the whole program):
 *
 *     esa_ctx *ctx;
 *     esa_mask *mask;
 *     esa_select_params sel = esa_select_params_default(ESA_SELECT_ENTROPY);
 *     esa_ctx_create(&ctx, NULL);
 *     esa_select(ctx, &mask, &q, &k, &sel);            // choose the key blocks that matter
 *     esa_attention(ctx, &q, &k, &v, &o, mask, NULL);  // compute only those
 *     esa_mask_free(mask);
 *     esa_ctx_free(ctx);
 *
 * Letters:
 *   B         batch size
 *   Hq, Hkv   query heads, key/value heads (H where both are the same)
 *   Nq, Nk    query tokens, key tokens
 *   D         head dimension
 *   Bq x Bk   block size in tokens
 *   nq, nk    number of query and key blocks: ceil(Nq/Bq), ceil(Nk/Bk)
 *
 * Terms:
 *   budget    the requested fraction of key blocks to keep (1 - sparsity)
 *   density   the fraction of key blocks a mask really keeps
 *   selector  the rule that chooses the blocks
 *   order     a permutation of the tokens that puts similar tokens into one block
 *   tail      an approximation of the skipped blocks
 *
 * Rules for every call:
 *  - It returns ESA_OK (0) or a negative esa_status. After a failure, esa_ctx_error(ctx) returns a
 *    message that says what was given and what was expected. An object that the call should have
 *    returned is NULL, and nothing leaks. Calls on a mask alone (esa_mask_get_info, esa_mask_to_*)
 *    have no ctx and leave no message.
 *  - The library never prints, exits or aborts, and it has no mutable global state.
 *  - Views (esa_tensor) never own memory. The caller keeps q, k, v and o alive until the call
 *    returns (CPU), or until the stream has finished the work (CUDA).
 *  - A ctx takes one call at a time. A second concurrent call returns ESA_ERR_STATE and leaves no
 *    message. Different contexts are independent.
 *  - fork(): in a child process every call that takes a ctx of the parent, or a plan or session
 *    made on it, returns ESA_ERR_STATE. Freeing works there, except of masks on a GPU.
 *  - A filled mask does not change, unless a call of a plan fills or orders it again, or
 *    esa_mask_set_orders changes it; threads and contexts may share it. A GPU may fill a mask after
 *    the call has returned: a caller who uses the mask on another stream must synchronise the two
 *    streams.
 *  - The same inputs on the same backend and ISA level give the same bits for any number of
 *    threads.
 *  - A public struct starts with struct_size and has fixed-width fields only. Its *_default()
 *    function fills it. Reserved fields must stay zero. A NULL params pointer means the defaults,
 *    unless the comment of the call says otherwise.
 *  - The free functions accept NULL.
 *  - Numbers in parentheses after a field are its default.
 *
 * Numerics: inputs and outputs are f32, f16 or bf16; sums are accumulated in f32.
 *  - A row with no visible key gives output 0 and LSE -inf.
 *  - A score of -inf counts as an absent key.
 *  - NaN or a score of +inf gives NaN in the output of its own row and changes no other row.
 *  - NaN or infinity in v spreads to every row that computes its block, even if causality hides
 *    that key from the row. With a tail it also spreads to every row that uses the block's mean.
 *  - Exact rows see every key, so NaN in v reaches them. If their errors are not finite, the other
 *    rows are not corrected.
 *  - A centroid tail uses the mean query of a query block, so NaN in one query spreads to all rows
 *    of its block.
 *  - In 8 bits NaN and infinity also spread from k to every row that computes its block or uses a
 *    mean of it. Rows that do not see it may change within the error of the rounding.
 *  - Values above 65504 round to infinity in f16, as in IEEE 754. */
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

/* Status codes. The numbers are part of the ABI and never change. */
typedef int32_t esa_status;
enum {
    ESA_OK = 0,
    ESA_ERR_ARGUMENT = -1,    /* a null pointer, or a value out of range */
    ESA_ERR_SHAPE = -2,       /* views, plan and mask do not fit each other */
    ESA_ERR_DTYPE = -3,       /* this call does not take this dtype */
    ESA_ERR_UNSUPPORTED = -4, /* valid, but this library or device cannot do it */
    ESA_ERR_MEMORY = -5,      /* an allocation failed */
    ESA_ERR_DEVICE = -6,      /* no such device, no plugin, or the device reported an error */
    ESA_ERR_IO = -7,          /* the operating system refused a read or a write */
    ESA_ERR_FORMAT = -8,      /* a file is damaged, or not of the expected kind */
    ESA_ERR_MISMATCH = -9,    /* a valid file or mask for another model, shape or step count */
    ESA_ERR_STATE = -10,      /* a call out of order, or two calls on one ctx at a time */
    ESA_ERR_VERSION = -11,    /* this library does not know this struct_size or file version */
    ESA_ERR_POLICY = -12,     /* strict session: this call would have run dense */
    ESA_ERR_INTERNAL = -13    /* a bug in the library; please report it */
};

enum { ESA_DTYPE_F32 = 0, ESA_DTYPE_F16 = 1, ESA_DTYPE_BF16 = 2 };
enum { ESA_DEVICE_CPU = 0, ESA_DEVICE_CUDA = 1 };

/* Selectors. */
enum {
    ESA_SELECT_FULL = 0,    /* keeps every block */
    ESA_SELECT_ENTROPY = 1, /* scores sampled queries; splits the budget between heads by entropy */
    ESA_SELECT_RF_V2 = 2,   /* scores block means; protects the first frame */
    ESA_SELECT_ADA_BSA = 3, /* scores groups of 8 tokens; can also cut by cumulative mass */
    ESA_SELECT_RANDOM = 4,  /* keeps random blocks of each row; for benchmarks */
    ESA_SELECT_ERROR = 5    /* keeps the blocks that the tail would get most wrong; reads v */
};

/* How closely a selector follows the original implementation it comes from. */
enum {
    ESA_MODE_FIXED = 0,       /* the rules a user expects */
    ESA_MODE_COMPAT = 1,      /* the original's rules, quirks included, in fp32 and double */
    ESA_MODE_COMPAT_ROUND = 2 /* also rounds to the input dtype where the original does (f32 input
                               * counts as f16) */
};

/* Releases of MindIE-SD that rf_v2 can follow in a compat mode; see esa_select_params.release. */
enum { ESA_RELEASE_30 = 30, ESA_RELEASE_31 = 31 };

/* Token orders; see esa_layout. */
enum {
    ESA_ORDER_DEFAULT = -1,
    ESA_ORDER_RASTER = 0,
    ESA_ORDER_TILE = 1,
    ESA_ORDER_TILE3D = 2,
    ESA_ORDER_HILBERT = 3,
    ESA_ORDER_ADAPTIVE = 4 /* made from q and k, for each head its own; needs ESA_SELECT_ERROR */
};

/* What replaces the skipped blocks of a row. */
enum {
    ESA_TAIL_NONE = 0,     /* nothing: skipped blocks count as absent */
    ESA_TAIL_POOLED = 1,   /* each skipped block's mean key and value, scored by the row's query */
    ESA_TAIL_CENTROID = 2, /* the same means, scored once by the query block's mean query */
    ESA_TAIL_LEVELS = 3 /* as POOLED, but blocks on the mask's fine level have several means each */
};

#define ESA_MAX_HEAD_DIM    256   /* largest D */
#define ESA_MAX_BLOCKS      65535 /* largest nq and nk: block indices are uint16 */
#define ESA_MAX_THREADS     256
#define ESA_MAX_EXACT_ROWS  16   /* largest esa_attention_params.exact_rows */
#define ESA_SHORT_TOKENS    8192 /* sequences up to this length use ESA_SHORT_BLOCK */
#define ESA_SHORT_BLOCK     64   /* block size for short sequences: error selector, model runs */
#define ESA_WORKSPACE_ALIGN 64   /* workspace pointers must be multiples of this */
#define ESA_MAX_SPANS       8    /* most clips of one sequence, esa_layout.span */

/* ---------------------------------------------------------------- context */

typedef struct esa_ctx esa_ctx;
typedef struct esa_plan esa_plan;
typedef struct esa_mask esa_mask;

enum { ESA_LOG_ERROR = 0, ESA_LOG_WARNING = 1, ESA_LOG_INFO = 2, ESA_LOG_DEBUG = 3 };

/* ISA levels of the CPU backend. $ESA_CPU names them in small letters: ref, ..., neonbf16. */
enum {
    ESA_CPU_BEST = 0,
    ESA_CPU_REF = 1,
    ESA_CPU_AVX2 = 2,
    ESA_CPU_AVX512 = 3,
    ESA_CPU_AVX512BF16 = 4,
    ESA_CPU_NEON = 5,
    ESA_CPU_AMX = 6,
    ESA_CPU_NEONBF16 = 7
};

typedef struct esa_ctx_params {
    uint32_t struct_size;
    int32_t threads; /* 1 .. ESA_MAX_THREADS; 0: one per CPU that affinity and quotas allow (0) */
    /* Allocator. Set both functions, or leave both NULL for the C library's. alloc returns memory
     * aligned to 64 bytes, or NULL. */
    void *(*alloc)(void *user, uint64_t bytes);
    void (*dealloc)(void *user, void *ptr, uint64_t bytes);
    void *alloc_user;
    /* Receives log lines, on the calling thread only. NULL: silent. */
    void (*log)(void *user, int32_t level, const char *text);
    void *log_user;
    void *cuda_stream;   /* cudaStream_t for CUDA calls; NULL: the default stream (NULL) */
    int32_t cuda_device; /* ordinal of the GPU for CUDA calls (0) */
    int32_t cpu_level; /* ESA_CPU_*; BEST: $ESA_CPU, else the fastest. One it lacks fails (BEST) */
    int64_t reserved[4];
} esa_ctx_params;

ESA_API esa_ctx_params esa_ctx_params_default(void);

/* On success the caller owns *ctx and frees it with esa_ctx_free. Its threads sleep when idle. If
 * the system refuses some of them, the ctx works with the others and logs a warning.
 * On failure *ctx is NULL, so there is no message. The status is one of:
 *
 *   ESA_ERR_ARGUMENT     ctx is NULL, a params field is out of range, or only one of alloc and
 *                        dealloc is set
 *   ESA_ERR_VERSION      unknown struct_size
 *   ESA_ERR_UNSUPPORTED  this machine lacks cpu_level or the level in $ESA_CPU, or the name in
 *                        $ESA_CPU is unknown
 *   ESA_ERR_MEMORY       out of memory */
ESA_API esa_status esa_ctx_create(esa_ctx **ctx, const esa_ctx_params *params);
ESA_API void esa_ctx_free(esa_ctx *ctx);

/* Message of the last failed call on ctx, or "". Owned by ctx; valid until its next call. */
ESA_API const char *esa_ctx_error(const esa_ctx *ctx);

/* Name of a status code, for example "ESA_ERR_SHAPE". Never NULL. */
ESA_API const char *esa_status_name(esa_status status);
ESA_API int32_t esa_ctx_threads(const esa_ctx *ctx);
/* What made the threads fewer than asked for, or than the CPUs; "" if nothing did. Owned by ctx. */
ESA_API const char *esa_ctx_limit(const esa_ctx *ctx);

/* Name of the CPU kernel set in use, for example "avx2". Static storage. */
ESA_API const char *esa_ctx_cpu(const esa_ctx *ctx);

/* held_bytes: scratch memory that the ctx keeps between calls (its arena). peak_bytes: the most it
 * ever kept. Either pointer may be NULL. Plans, masks and sessions are not counted. */
ESA_API void esa_ctx_memory(const esa_ctx *ctx, int64_t *held_bytes, int64_t *peak_bytes);

/* Frees the arena, on the CPU and on the GPU. Later calls allocate it again. */
ESA_API void esa_ctx_trim(esa_ctx *ctx);

/* Sets the stream for the following CUDA calls of this ctx, its plans and its sessions. Calls share
 * scratch memory and masks, so a change waits for the previous stream, which must still exist.
 * Setting the same stream again costs nothing. */
ESA_API esa_status esa_ctx_set_stream(esa_ctx *ctx, void *cuda_stream);

ESA_API const char *esa_version(void); /* for example "0.1.0" */
ESA_API int32_t esa_api_version(void); /* ESA_API_VERSION of the loaded library */

/* The version and a hash of the sources, for example "0.1.0-1f2e3d4c5b6a". Static storage.
 * libesa_video, the CUDA plugin and the Python package work only with a libesa of the same
 * build. */
ESA_API const char *esa_build_id(void);

/* Sizes of the public structs, indexed by ESA_ABI_*. A binding compares them when it loads. */
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
    ESA_ABI_WORK_PLAN_INFO,
    ESA_ABI_WORK_COSTS,
    ESA_ABI_STEP_CHANGE,
    ESA_ABI_CARRY,
    ESA_ABI_COUNT
};
ESA_API const uint32_t *esa_abi(void); /* ESA_ABI_COUNT entries, static storage */

/* ---------------------------------------------------------------- views */

/* A strided view of a B x H x N x D tensor. It never owns memory. BNSD and BSND differ only in
 * their strides. */
typedef struct esa_tensor {
    uint32_t struct_size;
    int32_t dtype;        /* ESA_DTYPE_* */
    int32_t device;       /* ESA_DEVICE_* */
    int32_t device_index; /* CUDA: ordinal of the GPU; CPU: ignored */
    void *data;
    int64_t dim[4]; /* B, H, N, D, always in this order */
    /* In elements. stride[3] must be 1. Batch and head strides may be 0 to broadcast, but not
     * in o. */
    int64_t stride[4];
} esa_tensor;

/* Contiguous views on the CPU: memory order b, h, n, d (BNSD) or b, n, h, d (BSND). For a GPU, set
 * device and device_index afterwards. */
ESA_API esa_tensor esa_tensor_bnsd(void *data, int32_t dtype, int64_t B, int64_t H, int64_t N,
                                   int64_t D);
ESA_API esa_tensor esa_tensor_bsnd(void *data, int32_t dtype, int64_t B, int64_t H, int64_t N,
                                   int64_t D);

/* ---------------------------------------------------------------- GPUs */

/* The plugin libesa_cuda.so does the CUDA work. The library loads it on first GPU use from
 * $ESA_CUDA_LIB if that is set (an absolute path), else from the folder that holds libesa (or the
 * program, if libesa is linked into it), and from nowhere else.
 *
 * If the plugin is missing, does not match, or finds no GPU, calls with CUDA views return
 * ESA_ERR_DEVICE with a message. CPU calls keep working.
 *
 * A ctx uses one GPU (esa_ctx_params.cuda_device) and one stream (cuda_stream). device_index of a
 * view must be the ordinal of that GPU.
 *
 * A GPU refuses two things a CPU accepts (ESA_ERR_UNSUPPORTED): views whose data is not aligned to
 * the element size, and the entropy selector in ESA_MODE_COMPAT_ROUND.
 *
 * $ESA_CUDA=sm80, sm89 or sm90a lowers the choice of kernels. */
typedef struct esa_device_info {
    uint32_t struct_size;
    int32_t ordinal;
    int32_t major, minor; /* compute capability */
    int32_t multiprocessors;
    int32_t driver, runtime; /* CUDA versions as CUDA counts them: 13000 is 13.0 */
    int32_t reserved0;
    int64_t memory, free_memory; /* bytes */
    char name[64];
    char kernels[16]; /* attention kernels for this GPU: "sm90a", "sm89" or "sm80" */
    char plugin[16];  /* version of libesa_cuda */
    int64_t reserved[4];
} esa_device_info;

/* Number of GPUs. Without a plugin, a driver or a GPU: *count is 0, the status is ESA_ERR_DEVICE
 * and the message says why. */
ESA_API esa_status esa_device_count(esa_ctx *ctx, int32_t *count);

/* Describes the GPU of this ctx. The caller sets info->struct_size to sizeof *info before the
 * call. */
ESA_API esa_status esa_device_get_info(esa_ctx *ctx, esa_device_info *info);

/* Writes the version and path of the library of matrix products that networks use on the GPU of
 * this ctx (cuBLASLt) to text, which has room for bytes. Attention does not need the library. Fails
 * with ESA_ERR_DEVICE and a message that says how to get the library if it is not found. */
ESA_API esa_status esa_device_library(esa_ctx *ctx, char *text, int32_t bytes);

/* Memory on the GPU of this ctx, for callers that do not call CUDA themselves. Views may use any
 * device pointer. The caller frees the memory before the ctx. bytes may be 0.
 *
 * Copies are ordered with the stream of the ctx. esa_device_upload may return before the copy has
 * finished, but the caller may change src as soon as it returns. esa_device_download and
 * esa_device_sync wait. */
ESA_API esa_status esa_device_alloc(esa_ctx *ctx, void **ptr, int64_t bytes);
ESA_API void esa_device_free(esa_ctx *ctx, void *ptr);
ESA_API esa_status esa_device_upload(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);
ESA_API esa_status esa_device_download(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);
ESA_API esa_status esa_device_sync(esa_ctx *ctx);

/* held_bytes: GPU memory that the ctx keeps between calls (esa_ctx_trim frees it). peak_bytes: the
 * most it ever kept. Either pointer may be NULL. */
ESA_API void esa_device_memory(const esa_ctx *ctx, int64_t *held_bytes, int64_t *peak_bytes);

/* ---------------------------------------------------------------- layout */

/* The layout says which tokens a sequence holds and in which order. A sequence is
 *
 *     [text front][video tokens, t*h*w][text back]
 *
 * An order permutes the video tokens so that a block holds similar tokens:
 *
 *     raster   as given: frame, row, column
 *     tile     8x8 tiles inside each frame (the rule of rf_v2)
 *     tile3d   boxes of window[t, h, w]
 *     hilbert  a generalised Hilbert curve; takes any size
 *     adaptive each head has its own order, made from its q and k: see esa_plan_order
 *
 * The sequence has up to four segments: [text front][frame 0, if protected][other frames]
 * [text back]. An order moves tokens only inside a segment (for compat modes see esa_order). Blocks
 * are cut from the permuted sequence without padding.
 *
 * A grid of zeros means no grid: only raster is possible, and no frame is protected. If the k side
 * is all zero and Nk = Nq, it takes the grid and text of the q side. Causal attention needs raster
 * or order_applied.
 *
 * A sequence may also hold several clips, with other tokens (context) before, between and after
 * them: then span lists the clips, and grids and text are zero. Queries and keys are the same
 * tokens. The ordered sequence is
 *
 *     [clip 0][context up to a multiple of span_align][clip 1] ... [last clip][remaining context]
 *
 * so that no block holds tokens of two clips; even raster moves tokens. Blocks with context are
 * kept whole, and so is frame 0 of every clip if it is protected. A sequence with too little
 * context between its clips is refused (ESA_ERR_SHAPE), and so are the adaptive order, causal
 * attention, kv_len and mask files together with clips. */
typedef struct esa_span {
    int32_t start;   /* first token */
    int32_t grid[3]; /* t, h, w */
} esa_span;

typedef struct esa_layout {
    uint32_t struct_size;
    int32_t order;               /* ESA_ORDER_*. DEFAULT: tile for rf_v2 with a grid, else raster */
    int32_t order_applied;       /* 1: q, k, v and o are already in that order; 0: the library
                                  * permutes them (0) */
    int32_t protect_first_frame; /* 1: every row and column of frame 0 is kept; -1: 1 for rf_v2,
                                  * else 0 (-1). Ignored without a grid, and for t = 1 in
                                  * ESA_MODE_FIXED. */
    int32_t window[3];           /* tile3d: t, h, w, each >= 1 (2, 8, 8) */
    int32_t grid_q[3];           /* t, h, w of the video tokens on the query side */
    int32_t text_front_q, text_back_q; /* text tokens before and after the video tokens */
    int32_t grid_k[3];                 /* the same for the key side */
    int32_t text_front_k, text_back_k;
    int32_t span_count; /* clips; 0: one video, given by grid and text (0) */
    int32_t span_align; /* 0: the least multiple of both block sizes; esa_order: 128 (0) */
    esa_span span[ESA_MAX_SPANS]; /* ascending, without overlap */
    int32_t reserved[6];
} esa_layout;

ESA_API esa_layout esa_layout_default(void);

/* Fills perm[N] with the order of one side (0: q, 1: k). Position p of the ordered sequence holds
 * token perm[p] of the given sequence. N must equal text + t*h*w; for raster without a grid it may
 * be any number.
 *
 * This call knows no selector, so ESA_ORDER_DEFAULT means raster and protect_first_frame -1 means
 * 0. For rf_v2 set both (its own defaults are tile and 1). mode matters for tile only:
 * ESA_MODE_COMPAT keeps frame 0 in raster order unless h and w are multiples of 8, and moves the
 * text from the front to the back. */
ESA_API esa_status esa_order(esa_ctx *ctx, int32_t *perm, int64_t N, const esa_layout *layout,
                             int32_t side, int32_t mode);

/* ---------------------------------------------------------------- selection */

typedef struct esa_select_params {
    uint32_t struct_size;
    int32_t selector;         /* ESA_SELECT_* */
    int32_t mode;             /* ESA_MODE_* (FIXED) */
    int32_t block_q, block_k; /* 16 .. 256 in steps of 16; 0: the selector's default, 256x128 for
                               * entropy and 128x128 for the others; error: 64x64 up to
                               * ESA_SHORT_TOKENS keys (0) */
    int32_t samples;          /* entropy: queries scored per query block, 1 .. 256 (4) */
    double budget;            /* fraction of key blocks to keep, 0 .. 1; for error with LEVELS see
                               * esa_select_qkv (0.5) */
    double cdf_threshold;     /* ada_bsa: cumulative mass to keep; >= 1 turns the rule off (1.0) */
    double scale;             /* factor of q k^T; 0: D^-0.5 (0) */
    int32_t keep_sink;        /* ada_bsa: 1 always keeps the first key block (1) */
    int32_t keep_recent;      /* ada_bsa: 1 always keeps the last key block a row sees (1) */
    int32_t causal;           /* 1: query i sees key j only if j <= i + Nk - Nq (0) */
    int32_t branch;           /* random: guidance branch, mixed into the seed (0) */
    uint64_t seed;            /* random: seed (0) */
    /* Key lengths, int32[B] on the device of the tensors; NULL: Nk. Keys at and beyond the length
     * do not exist. The caller keeps the array alive; every call reads it. If the library applies
     * an order (order_applied 0), a length may only cut text at the end.
     * The CPU checks the values. A GPU cannot check them without waiting. It clamps values to
     * 0 .. Nk, and the caller must make sure that no length cuts tokens that an order moves. */
    const int32_t *kv_len;
    esa_layout layout;
    int32_t group_q, group_k; /* error: queries and keys per scored mean, 1, 2, 4, 8 or 16;
                               * smaller is more exact and slower; 0: chosen by block size (0) */
    int32_t tail;             /* error: the tail that will stand in for skipped blocks,
                               * ESA_TAIL_NONE, POOLED or LEVELS (POOLED) */
    int32_t fine;             /* error with LEVELS: means per block on the fine level, 2, 4, 8 or
                               * 16; 0: 8 if block_k is a multiple of 32 and at least 64, else 4,
                               * unless group_k asks for another (0) */
    int32_t release;          /* rf_v2 in a compat mode: ESA_RELEASE_30, which pools text apart, or
                               * ESA_RELEASE_31; 0: the newest (0) */
    int32_t reserved0;
    int64_t reserved[1];
} esa_select_params;

ESA_API esa_select_params esa_select_params_default(int32_t selector);

/* Runs a selector on q and k. On success the caller owns *mask and frees it with esa_mask_free.
 * On failure *mask is NULL. The error selector reads v too: give it to esa_select_qkv. */
ESA_API esa_status esa_select(esa_ctx *ctx, esa_mask **mask, const esa_tensor *q,
                              const esa_tensor *k, const esa_select_params *params);

/* The same for every selector; v may be NULL unless the selector is ESA_SELECT_ERROR.
 *
 * The error selector estimates, for every query block and key block, the squared error of the
 * output if the tail stands in for the key block. It keeps the blocks with the largest errors, with
 * one threshold for all heads and rows of a batch entry. Every row keeps at least one block.
 * The choice is the best one for the tail in params->tail, so attention with the mask normally uses
 * the same tail. Any other tail runs too, on the same exact blocks; without LEVELS a block on the
 * fine level counts as skipped. Causal attention and compat modes are refused.
 *
 *     budget with tail NONE or POOLED   the fraction of key blocks to keep, as for the others
 *     budget with tail LEVELS           the cost of exact blocks, fine means and block means
 *                                       together, as a fraction of dense attention
 *
 * With LEVELS a block is computed exactly, replaced by `fine` means (each of block_k / fine
 * tokens), or replaced by one mean: whatever gives the least total error at that cost.
 *
 * With ESA_ORDER_ADAPTIVE the call also makes the order (esa_plan_order), and the mask holds it. */
ESA_API esa_status esa_select_qkv(esa_ctx *ctx, esa_mask **mask, const esa_tensor *q,
                                  const esa_tensor *k, const esa_tensor *v,
                                  const esa_select_params *params);

/* ---------------------------------------------------------------- attention */

typedef struct esa_attention_params {
    uint32_t struct_size;
    int32_t tail;   /* ESA_TAIL_* (NONE) */
    int32_t causal; /* as in esa_select_params: aligned at the bottom right (0) */
    /* Queries of each query block that are computed exactly, 0 .. ESA_MAX_EXACT_ROWS (0). Not with
     * causal. Dense calls ignore it. */
    int32_t exact_rows;
    double scale;          /* factor of q k^T; 0: D^-0.5 (0) */
    const int32_t *kv_len; /* as in esa_select_params */
    const esa_tensor *lse; /* esa_attention only: receives the log-sum-exp, an f32 view of shape
                            * B, Hq, Nq, 1; may be NULL */
    /* Bits of the products q k^T and P v: 16, 8, or 0 for 16 (0). docs/precision.md has the
     * arithmetic of 8 bits. If there is no 8-bit kernel for a call, it runs in 16 bits;
     * esa_plan_kernel names the kernel. Exact rows always run in 16 bits. */
    int32_t precision;
    int32_t reserved0;
    int64_t reserved[3];
} esa_attention_params;

ESA_API esa_attention_params esa_attention_params_default(void);

/* o = softmax(scale q k^T over the kept blocks [+ tail]) v. mask NULL: dense.
 *
 * With exact_rows = R, R queries of every query block, evenly spaced in the order of the mask, get
 * dense attention: their rows of o and lse are exact. The other rows of the block get the mean
 * error of the R rows (exact - sparse) added to o. The mean is shrunk by max(0, 1 - noise /
 * |mean|^2); the noise is the expected squared error of the mean, from the spread of the R errors.
 * With R = 1 it is not shrunk. The lse of the other rows stays that of the kept blocks and the
 * tail. A block of at most R queries is exact altogether. This costs R / block_q of a dense call.
 *
 * Hq must be a multiple of Hkv; query head h reads key/value head h / (Hq/Hkv). A mask has Hq heads
 * and B or 1 batch entries. o must not overlap q, k or v.
 *
 * On failure o is unchanged. If a GPU fails while it computes, o is undefined and a later call
 * reports the error. */
ESA_API esa_status esa_attention(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                                 const esa_tensor *v, const esa_tensor *o, const esa_mask *mask,
                                 const esa_attention_params *params);

/* ---------------------------------------------------------------- plans */

/* A plan makes every decision once per shape. Its calls then only execute. */
typedef struct esa_shapes {
    uint32_t struct_size;
    int32_t dtype; /* ESA_DTYPE_* of q, k, v and o */
    int32_t device, device_index;
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int64_t reserved[4];
} esa_shapes;

ESA_API esa_shapes esa_shapes_default(void);

/* On success the caller owns *plan and frees it with esa_plan_free. On failure *plan is NULL.
 *
 * The plan keeps ctx, which must outlive it. It copies the params, but keeps their kv_len pointer,
 * which must be the same in select and attention. select NULL: the plan only runs attention, dense
 * or with masks of any block size. */
ESA_API esa_status esa_plan_create(esa_ctx *ctx, esa_plan **plan, const esa_shapes *shapes,
                                   const esa_select_params *select,
                                   const esa_attention_params *attention);
ESA_API void esa_plan_free(esa_plan *plan);

/* Bytes of scratch (ws) that any call of the plan needs, on the device of the plan and aligned to
 * ESA_WORKSPACE_ALIGN. */
ESA_API esa_status esa_plan_workspace(const esa_plan *plan, int64_t *bytes);

/* Makes an empty mask that esa_plan_select of this plan can fill. The caller owns *mask; on failure
 * it is NULL. The mask may outlive plan and ctx. */
ESA_API esa_status esa_mask_create(const esa_plan *plan, esa_mask **mask);

/* The calls of a plan: esa_plan_select and esa_plan_select_qkv select into mask, esa_plan_order
 * makes its adaptive order, and esa_plan_attention computes o. They neither allocate nor
 * synchronise, except that with ws NULL they use the arena of the ctx, which may have to grow.
 *
 * On a GPU:
 *  - Masks must be in GPU memory. esa_mask_create and esa_select make them there;
 *    esa_mask_to_device copies them there.
 *  - esa_plan_select refuses a mask that was made for another order, if that order moves tokens
 *    (ESA_ERR_MISMATCH).
 *  - A plan without a selector takes only masks that need no permutation (raster, or
 *    order_applied).
 *  - Calls captured into a CUDA graph need a workspace. With ws NULL the first call may allocate,
 *    and a later larger call or esa_ctx_trim frees the memory that the graph uses. */
ESA_API esa_status esa_plan_select(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                                   const esa_tensor *k, void *ws);
/* esa_plan_select for selectors that read v; see esa_select_qkv. */
ESA_API esa_status esa_plan_select_qkv(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                                       const esa_tensor *k, const esa_tensor *v, void *ws);

/* Makes the adaptive order of mask from q and k. The layout of the plan must say
 * ESA_ORDER_ADAPTIVE. Selections into mask and attention with it then use this order, until the
 * next call changes it. The call empties the mask, because its blocks belonged to the order it had.
 * esa_plan_select_qkv returns ESA_ERR_STATE if the mask has no order yet.
 *
 * The order starts from Hilbert order (raster without a grid). It cuts the video tokens of a head
 * into halves across their principal direction, again and again, until a piece is one block, and
 * then on to groups of 8 tokens. Keys are compared by the logits that the head's queries give them,
 * and queries by the logits that the head's keys give them. Text and a protected frame keep their
 * places. Every (batch entry, head) has its own order. */
ESA_API esa_status esa_plan_order(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                                  const esa_tensor *k, void *ws);
ESA_API esa_status esa_plan_attention(const esa_plan *plan, const esa_mask *mask,
                                      const esa_tensor *q, const esa_tensor *k, const esa_tensor *v,
                                      const esa_tensor *o, const esa_tensor *lse, void *ws);

/* Name of the kernel set that esa_plan_attention would run with this mask and these views:
 * "avx512", "sm90a", "sm80", "simt" and so on. Static storage. Returns "" if the arguments do not
 * fit; esa_ctx_error says why. */
ESA_API const char *esa_plan_kernel(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                                    const esa_tensor *k, const esa_tensor *v, const esa_tensor *o);

/* ---------------------------------------------------------------- masks */

typedef struct esa_mask_info {
    uint32_t struct_size;
    int32_t block_q, block_k;
    int32_t device; /* ESA_DEVICE_* */
    int64_t B, H, Nq, Nk, nq, nk;
    double density_asked; /* the budget the mask was made for; NaN if unknown */
    double density;       /* kept blocks / existing blocks, over all rows. A block exists if it is
                           * within kv_len and causality. */
    int64_t kept;         /* number of kept blocks */
    int32_t selector;     /* ESA_SELECT_* that made the mask; -1: the caller made it */
    int32_t mode;         /* ESA_MODE_* */
    int32_t runnable; /* 0: a compat mask with blocks that no kernel runs; attention refuses it */
    int32_t fine;     /* means per block on the fine level; 0: the mask has no fine level */
    esa_layout layout;
    int64_t fine_blocks; /* blocks on the fine level, which kept and density do not count */
    int64_t reserved[3];
} esa_mask_info;

ESA_API void esa_mask_free(esa_mask *mask);

/* The caller sets info->struct_size to sizeof *info before the call. For a mask on a GPU, this call
 * and the esa_mask_to_* conversions wait until the mask is filled. */
ESA_API esa_status esa_mask_get_info(const esa_mask *mask, esa_mask_info *info);

/* Copies a filled mask, with the permutations of its order, to the CPU or to the GPU of the ctx
 * (device: ESA_DEVICE_*). The caller owns *copy; on failure it is NULL. esa_attention takes CPU
 * masks for CUDA views too, but makes this copy in every call. */
ESA_API esa_status esa_mask_to_device(esa_ctx *ctx, esa_mask **copy, const esa_mask *mask,
                                      int32_t device);

/* Masks made by the caller. info gives block_q, block_k, B, H, Nq, Nk, layout and, for levels,
 * fine; its other fields are ignored. The data is copied. The caller owns *mask; on failure it is
 * NULL.
 *
 *   lists  count int32[B,H,nq]; index int32[B,H,nq,cap]: the first count entries of a row,
 *          ascending and < nk
 *   bits   uint8[B,H,nq,ceil(nk/8)]: block j is bit j%8 of byte j/8; bits from nk on must be 0
 *   fa4    full_block_cnt int32[B,H,nq]; full_block_idx int32[B,H,nq,nk]; entries after the count
 *          are ignored
 *   levels uint8[B,H,nq,nk]: 0 exact, 1 fine (needs info.fine), 2 neither */
ESA_API esa_status esa_mask_from_lists(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                                       const int32_t *count, const int32_t *index, int64_t cap);
ESA_API esa_status esa_mask_from_bits(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                                      const uint8_t *bits);
ESA_API esa_status esa_mask_from_fa4(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                                     const int32_t *full_block_cnt, const int32_t *full_block_idx);

ESA_API esa_status esa_mask_from_levels(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                                        const uint8_t *level);

/* Gives a CPU mask with ESA_ORDER_ADAPTIVE its orders: perm_q int32[B,H,Nq] and perm_k
 * int32[B,Hkv,Nk], position -> token, copied. H must be a multiple of Hkv. Each row must be a
 * permutation that keeps tokens in their segments. */
ESA_API esa_status esa_mask_set_orders(esa_ctx *ctx, esa_mask *mask, const int32_t *perm_q,
                                       const int32_t *perm_k, int64_t Hkv);
/* Copies the adaptive orders of a mask to the caller's arrays, in the same shapes. *Hkv receives
 * the heads of perm_k. Any pointer may be NULL. ESA_ERR_STATE: the mask has no such order. */
ESA_API esa_status esa_mask_get_orders(const esa_mask *mask, int32_t *perm_q, int32_t *perm_k,
                                       int64_t *Hkv);

/* Write a mask into the caller's arrays, in the formats above. Lists, bits and fa4 hold the exact
 * blocks only. Entries of index and full_block_idx after the count are set to 0. If cap is less
 * than the largest count, esa_mask_to_lists returns ESA_ERR_ARGUMENT and writes nothing. */
ESA_API esa_status esa_mask_to_lists(const esa_mask *mask, int32_t *count, int32_t *index,
                                     int64_t cap);
ESA_API esa_status esa_mask_to_bits(const esa_mask *mask, uint8_t *bits);
ESA_API esa_status esa_mask_to_fa4(const esa_mask *mask, int32_t *full_block_cnt,
                                   int32_t *full_block_idx);
ESA_API esa_status esa_mask_to_levels(const esa_mask *mask, uint8_t *level);

/* ---------------------------------------------------------------- experimental */

/* These calls may change in any release. Define ESA_EXPERIMENTAL to see them. */
#ifdef ESA_EXPERIMENTAL
/* Block importance as the entropy selector computes it: out f32[B,H,nq,nk] in host memory, also for
 * CUDA views. Every row sums to 1; blocks beyond kv_len are 0. entropy f64[B,H] receives the
 * normalised entropies; it may be NULL. */
ESA_API esa_status esa_importance(esa_ctx *ctx, float *out, double *entropy, const esa_tensor *q,
                                  const esa_tensor *k, const esa_select_params *params);

/* Error scores as the error selector computes them: out f32[levels,B,H,nq,nk] in host memory, also
 * for CUDA views. levels is 2 with tail LEVELS (one mean, then fine means), else 1. Blocks that a
 * row does not see are 0. */
ESA_API esa_status esa_errors(esa_ctx *ctx, float *out, const esa_tensor *q, const esa_tensor *k,
                              const esa_tensor *v, const esa_select_params *params);

/* Share of the true attention mass that mask keeps, per head: mass f64[B,H]. It is the mean over
 * every row_step-th query of the ordered sequence (1: all queries). causal, kv_len and scale come
 * from params. Needs O(N D) memory. CPU only. */
ESA_API esa_status esa_mask_mass(esa_ctx *ctx, double *mass, const esa_mask *mask,
                                 const esa_tensor *q, const esa_tensor *k,
                                 const esa_attention_params *params, int32_t row_step);

/* Splits a budget between H heads by their normalised entropies (water-filling, then largest
 * remainder): count int32[H] receives the blocks each head keeps per row. */
ESA_API esa_status esa_entropy_budgets(esa_ctx *ctx, int32_t *count, const double *entropy,
                                       int64_t H, int64_t nk, double budget);

#endif

#ifdef __cplusplus
}
#endif

#endif
