/* esa_session.h - sessions (one model run: which call runs dense, online, cached or recorded) and
 * mask files.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A session is told layer, step and guidance branch and decides what each self-attention call does:
 *
 *     esa_session_begin(s);                                   // a new video
 *     for each step, for each branch:
 *         esa_session_step(s, step, branch);
 *         for each layer: esa_session_attention(s, layer, ESA_CALL_SELF, &q, &k, &v, &o, NULL);
 *
 * Dense by policy: warm-up steps (the first ceil(warmup_frac * steps - 1e-9)), layer 0 with
 * dense_first_layer, listed dense layers, sequences under min_tokens, cross-attention, mode DENSE
 * and mode RECORD. Anything else that would run dense is ESA_ERR_POLICY in a strict session, and
 * counted as a fallback otherwise.
 *
 * Structs the library fills (stats, infos) carry struct_size in: set it to sizeof before the call,
 * or the answer is ESA_ERR_VERSION. */
#ifndef ESA_SESSION_H
#define ESA_SESSION_H

#include "esa.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esa_session esa_session;
typedef struct esa_mask_file esa_mask_file;

enum {
    ESA_SESSION_DENSE = 0,
    ESA_SESSION_ONLINE = 1,
    ESA_SESSION_CACHED = 2,
    ESA_SESSION_RECORD = 3
};
enum { ESA_CALL_SELF = 0, ESA_CALL_CROSS = 1 };
/* NEAREST: step i of T' uses the group of floor(i*T/T') */
enum { ESA_STEP_MAP_EXACT = 0, ESA_STEP_MAP_NEAREST = 1 };

typedef struct esa_session_params {
    uint32_t struct_size;
    int32_t mode;              /* ESA_SESSION_* (ONLINE) */
    int32_t layers, steps;     /* required, >= 1 */
    int32_t branches;          /* guidance branches, >= 1 (1) */
    int32_t strict;            /* 1: dense instead of sparse is an error (1) */
    int32_t dense_first_layer; /* (1) */
    /* ONLINE: a mask is made at every n-th sparse step of its (layer, branch), reused between
     * (1) */
    int32_t refresh_every;
    double warmup_frac;          /* 0 .. 1 (0.2) */
    int64_t min_tokens;          /* calls with fewer query tokens run dense (0) */
    const int32_t *dense_layers; /* further dense layers; copied */
    int32_t dense_layer_count;
    int32_t step_map; /* CACHED: ESA_STEP_MAP_* (EXACT) */
    /* NULL, or the model's name: recorded; a mask file that names another one is refused */
    const char *model;
    const char *config_hash; /* NULL, or a hash of the model's configuration: likewise */
    /* CACHED: where masks come from; borrowed, must outlive the session and share its ctx */
    esa_mask_file *masks;
    /* RECORD: step groups G, 0 = steps; step i belongs to group floor(i*G/steps) */
    int32_t record_groups;
    int32_t record_per_branch; /* RECORD: 1 keeps branches apart (0: averaged) */
    /* ONLINE: all of it. CACHED: budget; layout.order_applied; what else the layout says (grid,
     * text, order, window, protection) must be what the file says. RECORD: selector must be
     * ENTROPY; samples, blocks, layout. kv_len is ignored */
    esa_select_params select;
    /* lse and kv_len are ignored here: they come with the call. CACHED: causal must be the
     * file's */
    esa_attention_params attention;
    /* sequence parallelism: each call has heads first_head and following of total_heads (0, 0:
     * all). CACHED: that part of each mask is used. ONLINE entropy: the budget is shared among
     * the call's heads. RECORD: refused */
    int32_t first_head, total_heads;
    int64_t reserved[3];
} esa_session_params;

ESA_API esa_session_params esa_session_params_default(void);
/* The settings we recommend for a model run. This is the only place that holds the product's
 * default rules: `esa generate` and `esa.apply` start from here, and so should an engine. What
 * esa_session_params_default leaves plain becomes:
 *     order    Hilbert, whose compact blocks are worth 3 to 5 dB; rf_v2: tile, its own rule;
 *              CACHED: ESA_ORDER_DEFAULT, because the mask file brings its order
 *     blocks   64x64 up to ESA_SHORT_TOKENS tokens; beyond, 0: the selector's own sizes
 *     tail     pooled; none for DENSE and RECORD, which skip no block
 * Warm-up (0.2), dense first layer (1), budget (0.5) and all else are the plain defaults.
 * mode is ESA_SESSION_*; selector is ESA_SELECT_*, read for ONLINE only (the others take ENTROPY);
 * tokens is the length of self-attention, or 0 for the selector's own blocks at any length.
 * Hilbert and tile need a grid and no causal attention: set ESA_ORDER_DEFAULT otherwise. */
#define ESA_SHORT_TOKENS 16384
ESA_API esa_session_params esa_session_params_recommended(int32_t mode, int32_t selector,
                                                          int64_t tokens);
/* ctx is kept and must outlive the session. On failure *session is NULL. */
ESA_API esa_status esa_session_create(esa_ctx *ctx, esa_session **session,
                                      const esa_session_params *params);
ESA_API void esa_session_free(esa_session *session);
/* Starts a new video: step counters, masks kept for reuse and per-cell statistics restart;
 * recordings go on. In RECORD mode it also counts one more prompt. */
ESA_API esa_status esa_session_begin(esa_session *session);
ESA_API esa_status esa_session_step(esa_session *session, int32_t step, int32_t branch);
/* Key lengths of the following ESA_CALL_SELF calls, int32[B] as in esa_attention_params.kv_len, or
 * NULL = all keys. Borrowed: read at every call until replaced. Recorded importance is 0 beyond
 * them. Cleared by esa_session_begin. With refresh_every > 1 other lengths mean another mask; on a
 * GPU, where nobody can read them without waiting, another array does. */
ESA_API esa_status esa_session_set_kv_len(esa_session *session, const int32_t *kv_len);
/* One attention call of the model; kind ESA_CALL_*. lse may be NULL. On failure o is unchanged. */
ESA_API esa_status esa_session_attention(esa_session *session, int32_t layer, int32_t kind,
                                         const esa_tensor *q, const esa_tensor *k,
                                         const esa_tensor *v, const esa_tensor *o,
                                         const esa_tensor *lse);

/* What ran. Times in seconds; mass is the share of attention mass the mask kept as estimated by the
 * selector's own importance (NaN where the selector has none, and for masks made on a GPU, where
 * the importance stays). */
typedef struct esa_session_stats {
    uint32_t struct_size;
    int32_t reserved0;
    int64_t calls, dense_calls, sparse_calls, fallback_calls, masks_made, masks_loaded;
    double density_asked, density; /* means over sparse calls; NaN when there were none */
    double mass;
    double select_seconds, attention_seconds;
    int64_t device_bytes; /* masks held on a device */
    char kernel[32];      /* kernel set of the last call, e.g. "avx2" */
    int64_t reserved[4];
} esa_session_stats;

/* Totals of the current video (layer = step = -1), or one layer (step = -1), one step (layer = -1),
 * or one cell. Waits for a GPU that has calls of this session still to run. */
ESA_API esa_status esa_session_get_stats(const esa_session *session, esa_session_stats *stats,
                                         int32_t layer, int32_t step);
/* Realised density per query head, mean over the same calls, into density f64[heads]: -1 as above.
 * NaN where no call ran sparse, and for calls on a GPU, which does not tell heads apart.
 * ESA_ERR_ARGUMENT if the model has another number of heads. */
ESA_API esa_status esa_session_get_heads(const esa_session *session, double *density, int64_t heads,
                                         int32_t layer, int32_t step);

/* ---------------------------------------------------------------- recordings
 * A recording file holds the raw integer sums (round(p * 2^24), so order, resume and merge cannot
 * change a bit), the prompts counted and everything a mask file needs to know. Written to a
 * temporary name and renamed. */
ESA_API esa_status esa_session_save_recording(esa_session *session, const char *path);
/* Adds the sums of a recording made with the same settings to this RECORD session (resume). On
 * failure nothing is added. */
ESA_API esa_status esa_session_load_recording(esa_session *session, const char *path);

/* ---------------------------------------------------------------- mask files (DESIGN: one
 * safetensors file) */

/* U8: a logarithm of 8 bits and two more in a tensor of their own (docs/mask-files.md). */
enum { ESA_IMPORTANCE_NONE = 0, ESA_IMPORTANCE_U8 = 1, ESA_IMPORTANCE_F16 = 2 };

typedef struct esa_mask_file_info {
    uint32_t struct_size;
    int32_t format_version;
    int32_t selector; /* ESA_SELECT_*, or -1: given by the caller */
    int32_t block_q, block_k;
    int32_t layers, steps, groups, branches; /* branches 1: averaged or single */
    int32_t importance;                      /* ESA_IMPORTANCE_* */
    int32_t prompts;                         /* prompts averaged */
    int32_t budget_count;                    /* prebuilt budgets, at most 16 */
    int32_t budget_permille[16];
    int32_t dense_first_layer; /* the rule by which layers and warm-up groups were left out */
    /* ESA_MODE_* and queries per block of the selector; 0 samples: unknown */
    int32_t mode, samples;
    int32_t stored_layers, stored_groups; /* how many of layers and groups are in the file */
    int32_t causal;                       /* 1: the masks list no key block of the future */
    double warmup_frac;
    int64_t H, Nq, Nk, nq, nk;
    int64_t file_bytes;
    esa_layout layout;
    char model[128];
    char config_hash[80];
    double scale; /* of the scores as the selection was asked for; 0: D^-0.5, or unknown */
    int64_t reserved[3];
} esa_mask_file_info;

/* Opens by mmap, checks every size before anything is used, recognises the format by content, never
 * by name. A file that is a recording, or something else, is refused with a sentence that says what
 * it is. Free with esa_mask_file_free. ctx is kept for error text and threads and must outlive the
 * file. */
ESA_API esa_status esa_mask_file_open(esa_ctx *ctx, esa_mask_file **file, const char *path);
/* The same over bytes in memory, which must outlive the object. */
ESA_API esa_status esa_mask_file_open_memory(esa_ctx *ctx, esa_mask_file **file, const void *bytes,
                                             int64_t size);
ESA_API void esa_mask_file_free(esa_mask_file *file);
ESA_API esa_status esa_mask_file_get_info(const esa_mask_file *file, esa_mask_file_info *info);
/* Makes sure masks for budget are at hand: prebuilt, or derived now from the stored importance (the
 * same bits). Budgets of mask files are whole per mille; others are rounded to the nearest. */
ESA_API esa_status esa_mask_file_require(esa_mask_file *file, double budget);
/* The mask of one cell, owned by the caller. step is mapped to its group; a cell that is not stored
 * (dense layer, warm-up) is ESA_ERR_STATE. Calls esa_mask_file_require. */
ESA_API esa_status esa_mask_file_get(esa_mask_file *file, esa_mask **mask, int32_t layer,
                                     int32_t step, int32_t branch, double budget);
/* 1 if the cell of layer and step is stored, 0 if not (dense layer, warm-up, out of range). */
ESA_API int32_t esa_mask_file_stored(const esa_mask_file *file, int32_t layer, int32_t step);
/* Per head of one cell, each array f64[H] or NULL: normalised entropy, kept share of the recorded
 * importance, realised density. NaN where the file does not know. Calls esa_mask_file_require. */
ESA_API esa_status esa_mask_file_heads(esa_mask_file *file, double *entropy, double *mass,
                                       double *density, int32_t layer, int32_t step, int32_t branch,
                                       double budget);
/* Decoded importance f32[H,nq,nk] of one cell into out. */
ESA_API esa_status esa_mask_file_importance(esa_mask_file *file, float *out, int32_t layer,
                                            int32_t step, int32_t branch);

typedef struct esa_mask_build { /* not part of the pinned ABI table: used by tools */
    uint32_t struct_size;
    int32_t importance; /* ESA_IMPORTANCE_* (U8) */
    const double *budgets;
    int32_t budget_count;      /* 0 .. 16; more than 0 if importance is NONE */
    int32_t store_dense;       /* 1: also layer 0 / warm-up groups (0) */
    int32_t dense_first_layer; /* (1) */
    /* steps the file will serve; 0: those recorded (0). Step i of them uses what was recorded in
     * step floor(i * recorded / steps). Not read by esa_mask_file_derive */
    int32_t steps;
    double warmup_frac; /* (0.2) */
    int64_t reserved[4];
} esa_mask_build;

ESA_API esa_mask_build esa_mask_build_default(void);
/* Sums one or more recordings (shards) into one recording; any order and any split give the same
 * bits. */
ESA_API esa_status esa_recording_merge(esa_ctx *ctx, const char *output,
                                       const char *const *recordings, int32_t count);
/* Sums one or more recordings (shards) of the same run and writes a mask file. Works cell by cell:
 * never the whole in memory. */
ESA_API esa_status esa_mask_file_build(esa_ctx *ctx, const char *output,
                                       const char *const *recordings, int32_t count,
                                       const esa_mask_build *build);
/* Rewrites a mask file with other budgets and/or another importance (F16 -> U8 -> NONE; never to
 * more than is stored). The stored layers and groups stay: store_dense, dense_first_layer and
 * warmup_frac of build are not read. Without importance in file only its prebuilt budgets can be
 * asked for. */
ESA_API esa_status esa_mask_file_derive(esa_ctx *ctx, const char *output, esa_mask_file *file,
                                        const esa_mask_build *build);
/* Saves one mask as a mask file of one layer and one step (as `esa masks select --out` does); B > 1
 * is kept as B branches. */
ESA_API esa_status esa_mask_file_save(esa_ctx *ctx, const char *output, const esa_mask *mask);
/* FA4's exchange: one safetensors file with full_block_cnt I32 [L,G,H,nq] and full_block_idx I32
 * [L,G,H,nq,nk] for one budget. */
ESA_API esa_status esa_mask_file_export_fa4(esa_ctx *ctx, const char *output, esa_mask_file *file,
                                            double budget);
/* The other way; budget is written down as the realised density, in per mille. model may be NULL.
 * info (Nq, Nk, block_q, block_k, layout) describes files from elsewhere; a file of ours describes
 * itself: info may be NULL, and it and model must agree if given. */
ESA_API esa_status esa_mask_file_import_fa4(esa_ctx *ctx, const char *output, const char *input,
                                            const esa_mask_info *info, const char *model);

#ifdef __cplusplus
}
#endif
#endif
