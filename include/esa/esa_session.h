/* esa_session.h - sessions and mask files.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A session serves one model. The caller names the layer, the step and the guidance branch; the
 * session decides whether each attention call runs dense, with a new mask (online), with a mask
 * from a file (cached), or dense with recording:
 *
 *     esa_session_begin(s);                                   // a new video
 *     for each step, for each branch:
 *         esa_session_step(s, step, branch);
 *         for each layer: esa_session_attention(s, layer, ESA_CALL_SELF, &q, &k, &v, &o, NULL);
 *
 * These calls run dense by policy: warm-up steps (esa_warmup_steps), layer 0 with
 * dense_first_layer, the layers in dense_layers, sequences shorter than min_tokens,
 * cross-attention, cells of density 1, and every call in the modes DENSE, RECORD and PROBE. If any
 * other call would run dense, a strict session returns ESA_ERR_POLICY; other sessions run it and
 * count a fallback.
 *
 * With carry (esa_session_params.carry) a layer measures at a few steps, the anchors, what its
 * sparse attention leaves out, and adds that to its sparse output at the steps that follow.
 *
 * A cell is one (layer, step group, branch). A recording and a mask file hold one entry per cell.
 *
 * The rules of esa.h hold here too. The caller sets struct_size of a struct that the library fills
 * (stats, infos) to its sizeof before the call; any other value returns ESA_ERR_VERSION. */
#ifndef ESA_SESSION_H
#define ESA_SESSION_H

#include "esa.h"
#include "esa_carry.h"
#include "esa_work.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esa_session esa_session;
typedef struct esa_mask_file esa_mask_file;

/* ---------------------------------------------------------------- sessions */

enum {
    ESA_SESSION_DENSE = 0,  /* every call runs dense */
    ESA_SESSION_ONLINE = 1, /* masks come from a selector during the run */
    ESA_SESSION_CACHED = 2, /* masks come from a mask file */
    /* Every call runs dense, and the importance of its blocks (selector ENTROPY) or their error
     * scores (selector ERROR) are recorded. */
    ESA_SESSION_RECORD = 3,
    /* Every call runs dense, and the error that it would have at some densities is measured. For
     * work plans. CPU only. */
    ESA_SESSION_PROBE = 4
};
enum { ESA_CALL_SELF = 0, ESA_CALL_CROSS = 1 };

/* How a run of T' steps uses a mask file of T steps. */
enum {
    ESA_STEP_MAP_EXACT = 0,  /* T' must equal T */
    ESA_STEP_MAP_NEAREST = 1 /* step i uses the group of step floor(i*T/T') */
};

typedef struct esa_session_params {
    uint32_t struct_size;
    int32_t mode;              /* ESA_SESSION_* (ONLINE) */
    int32_t layers, steps;     /* layers of the model, steps of the run, each >= 1; required */
    int32_t branches;          /* guidance branches, >= 1 (1) */
    int32_t strict;            /* 1: a call that falls back to dense is an error (1) */
    int32_t dense_first_layer; /* 1: layer 0 runs dense (1) */
    /* ONLINE: each (layer, branch) makes a mask at every n-th sparse step and reuses it in between;
     * 0: it makes one mask per video, at its first sparse step; or ESA_REFRESH_EARLY (1). A caller
     * may leave steps out: every n-th step counts the steps that really run, and EARLY makes a mask
     * at the first step that reaches or passes one of its steps. */
    int32_t refresh_every;
    double warmup_frac;          /* fraction of the steps that run dense first, 0 .. 1 (0.2) */
    int64_t min_tokens;          /* calls with fewer query tokens run dense (0) */
    const int32_t *dense_layers; /* more dense layers; copied */
    int32_t dense_layer_count;
    int32_t step_map; /* CACHED: ESA_STEP_MAP_* (EXACT) */
    /* Name of the model and hash of its configuration, or NULL. RECORD stores them. CACHED refuses
     * a mask file that holds other ones. */
    const char *model;
    const char *config_hash;
    /* CACHED: where the masks come from. Borrowed: must outlive the session and share its ctx. A
     * file from recordings of errors also says which calls run dense: its own warm-up and first
     * layer, in place of warmup_frac and dense_first_layer, and cells of density 1. Sparse calls
     * have the exact rows of the file, because its works include them: attention.exact_rows must
     * be 0 (as in the file) or the same number; any other returns ESA_ERR_MISMATCH. */
    esa_mask_file *masks;
    /* RECORD: number of step groups G; 0: one per step (0). Step i belongs to group
     * floor(i*G/steps). */
    int32_t record_groups;
    int32_t record_per_branch; /* RECORD: 1 keeps the branches apart, 0 averages them (0) */
    /* ONLINE and PROBE use every field but kv_len. CACHED uses budget and layout.order_applied; the
     * rest of the layout (grid, text, order, window, protection) must match the file. For a file
     * from recordings of errors the budget is a total work. RECORD takes selector ENTROPY and uses
     * samples, block sizes and layout, or ERROR and uses block sizes, layout, groups, tail and
     * fine; the order must not be adaptive. */
    esa_select_params select;
    /* lse and kv_len are ignored; each call brings its own. CACHED: causal must match the file.
     * exact_rows may be -1: two for selector ERROR without carry, else none. */
    esa_attention_params attention;
    /* Sequence parallelism: each call holds heads first_head and following of total_heads (0, 0:
     * all heads). CACHED uses that part of each mask. ONLINE entropy splits the budget between the
     * heads of the call. RECORD refuses it. */
    int32_t first_head, total_heads;
    /* ONLINE with ESA_ORDER_ADAPTIVE: orders are made anew at every n-th sparse step, as with
     * refresh_every; 0: once per video; or ESA_REFRESH_EARLY (1). A new order needs a new mask,
     * whatever refresh_every says. */
    int32_t order_every;
    /* ONLINE: 1: all branches use the masks and orders of the first branch that runs the layer at
     * the same step; 0: each branch has its own (0). */
    int32_t share_branches;
    /* ONLINE: how dense each layer and step runs; the first of these that is given.
     *
     *     density  f64[layers][steps], copied: the budget of each cell; 1: the cell runs dense
     *     work     the attention work of the whole video as a share of dense, everything counted
     *              (esa_work.h). 0: not given. The session solves for the densities at the first
     *              call that may run sparse.
     *     neither  select.budget for every cell
     *
     * CACHED with masks from recordings of errors: work picks the largest work of the file that is
     * not above it.
     *
     * A mask that is kept for several steps gets the mean density of those steps. Cells that the
     * rules above make dense stay dense, and their work counts. */
    const double *density;
    double work;
    const esa_work_plan *plan; /* for work; borrowed. NULL: the uniform rule (NULL) */
    const double *sigma;       /* for work: noise level of each step, f64[steps], falling, within
                                * 0 .. 1; copied. NULL: spaced as in the plan (NULL) */
    const double *probe;       /* PROBE: densities, copied */
    int32_t probe_count;       /* 1 .. ESA_WORK_MAX_POINTS in mode PROBE */
    /* If work is below the minimum of the run (short sequences, few steps): 1: use the minimum (see
     * the stats); 0: fail (0) */
    int32_t work_or_least;
    /* With attention.precision 8, some calls still run in 16 bits: those of the first steps16_first
     * and the last steps16_last steps, those of the layers in layers16 (copied), cross-attention,
     * and all calls in the modes RECORD and PROBE, because they measure. In the other modes dense
     * calls run in 8 bits too. */
    int32_t steps16_first, steps16_last; /* 0 .. steps (0) */
    int32_t layers16_count;
    /* For work: how many branches run at each step, 1 .. branches. They share the cost of masks and
     * orders if share_branches is 1. branches may be larger, for example if a second transformer
     * has branches of its own. 0: two, or one if branches is 1 (0) */
    int32_t step_branches;
    const int32_t *layers16;
    /* ONLINE, CACHED and PROBE: carried differences (esa_carry.h). At an anchor a layer makes its
     * mask and its order, runs dense and sparse, returns the dense output and keeps the difference
     * d. Its calls up to the next anchor use that mask and order and add d. So refresh_every and
     * order_every are not read, and a CACHED session changes masks at anchors only. With
     * share_branches, or with masks of a file that are the same for all branches, the first branch
     * of a step runs dense at an anchor, and the others add its d; else every branch keeps a d of
     * its own.
     *
     * The first sparse step of a layer is an anchor, whatever the list says, and so is its first
     * step with other shapes or key lengths. An anchor that is left out moves to the next step that
     * runs. d is dropped at esa_session_begin, and whenever its mask or its order is. PROBE keeps a
     * mask, an order and a d for every density, and measures calls that add d.
     *
     * carry: ESA_CARRY_OFF, ESA_CARRY_AUTO, or the number of anchors, 1 .. steps (OFF). The rule of
     * esa_carry_anchors places them. anchors: their steps, ascending; copied. They take the place
     * of the rule. Not with causal attention: ESA_ERR_UNSUPPORTED. */
    int32_t carry;
    int32_t anchor_count; /* 0: by the rule (0) */
    const int32_t *anchors;
    int32_t carry_format; /* ESA_CARRY_E4M3 or ESA_CARRY_BF16 (E4M3) */
    int32_t reserved0;
    /* Memory of d, reserved at the first call that carries, for all layers at once. Up to
     * carry_room bytes are device memory; -1: as much as there is (-1). The d of layers that do not
     * fit is kept in page-locked host memory and copied to the device beside the work of other
     * layers. If there is no room for it there either, a strict session fails with
     * ESA_ERR_MEMORY; in other sessions these layers run without carry. A CPU session has host
     * memory alone, and carry_room limits that.
     *
     * Device memory comes from carry_alloc(carry_user, bytes), which returns memory aligned to 256
     * bytes, or NULL if there is none; carry_free gives it back. Set both or neither; NULL: the
     * device's own functions (NULL). They are called inside calls of the session, so they must not
     * call esa with its ctx. */
    int64_t carry_room;
    void *(*carry_alloc)(void *user, int64_t bytes);
    void (*carry_free)(void *user, void *ptr, int64_t bytes);
    void *carry_user;
    int64_t reserved[2];
} esa_session_params;

/* Values of esa_session_params.carry beside a number of anchors. */
enum { ESA_CARRY_OFF = 0, ESA_CARRY_AUTO = -1 };

/* Writes the steps of the anchors of a run to anchors (room for `steps` entries; NULL: only counts)
 * and returns their number: `carry` of them, or as many as suit a run of so many steps for
 * ESA_CARRY_AUTO. Anchors are closer together early in a run, where attention changes most. 0 for
 * ESA_CARRY_OFF, for numbers that are not in 1 .. steps, and for AUTO in runs that are too short
 * to gain from carry.
 *
 * branches: the guidance branches of a step, as in esa_session_params.step_branches; 0: not known.
 * At an anchor one branch runs dense. Where there is no other one to share the difference, an
 * anchor costs twice as much, and AUTO begins at 20 steps instead of 6. */
ESA_API int32_t esa_carry_anchors(int32_t *anchors, int32_t carry, int32_t steps, int32_t branches);

/* For models with two transformers: adds `first`, the step at which the second one takes over, to
 * the `count` anchors of a run of `steps` steps (room for `steps` entries). Returns their number.
 * Differences of the first transformer are of no use to the second. The session makes that anchor
 * by itself if the second one has branches of its own, but a work is shared out right only if it is
 * in the list. Nothing changes if `first` is an anchor already or not within 0 .. steps - 1, and in
 * runs without anchors. */
ESA_API int32_t esa_carry_switch(int32_t *anchors, int32_t count, int32_t steps, int32_t first);

ESA_API esa_session_params esa_session_params_default(void);

/* The settings we recommend for a model run. This is the only place that holds the default rules:
 * `esa generate` and `esa.apply` start from here, and so should an engine. It changes
 * esa_session_params_default as follows:
 *
 *     order    Hilbert, whose compact blocks gain 3 to 5 dB over raster. rf_v2: tile, its own rule.
 *              CACHED: ESA_ORDER_DEFAULT, because the mask file brings its order.
 *     blocks   64x64 (ESA_SHORT_BLOCK) up to ESA_SHORT_TOKENS tokens; 0, the selector's own sizes,
 *              beyond
 *     tail     pooled; none for DENSE and RECORD, which skip no block; levels for CACHED, which is
 *              pooled for masks without a fine level
 *
 * For ESA_SELECT_ERROR it changes more: adaptive order, tail levels, no warm-up and no dense layer,
 * ESA_CARRY_AUTO, and masks and orders shared by the branches. To run without carry, set carry to
 * ESA_CARRY_OFF: then masks and orders are made early (ESA_REFRESH_EARLY), and sparse calls have
 * two exact rows per query block (attention.exact_rows -1). It does not set work: set it yourself,
 * for example to esa_preset_work_for(ESA_PRESET_BALANCED, steps, carry, branches), the default of
 * `esa generate` and `esa.apply`.
 * RECORD with ERROR has Hilbert order, because recorded masks need one order for all prompts. Where
 * select.group_q and group_k are 0, a recording scores groups of 2 queries and single keys at
 * blocks of 64, and groups of 4 queries and 4 keys at blocks of 128: scores that are recorded once
 * may cost more than those of a running model.
 *
 * For the other selectors, warm-up (0.2), dense first layer (1) and the rest keep their defaults.
 * The budget is 0.5 for all of them.
 *
 * mode is ESA_SESSION_*. selector is ESA_SELECT_*; ONLINE and PROBE read it, RECORD takes ERROR or
 * ENTROPY, the other modes take ENTROPY. tokens is the length of self-attention, or 0 for the
 * selector's own block sizes. Hilbert and tile need a grid and no causal attention; otherwise set
 * ESA_ORDER_DEFAULT. */
ESA_API esa_session_params esa_session_params_recommended(int32_t mode, int32_t selector,
                                                          int64_t tokens);

/* The default of layout.protect_first_frame in a model run: 1 if every row and column of frame 0 is
 * kept. given is 1 if the model got frame 0 as a picture (image to video). Then all selectors keep
 * it but error, which sees by itself what the frame is worth. Otherwise only rf_v2 keeps it. */
ESA_API int32_t esa_protects_first_frame(int32_t selector, int32_t given);

/* What a selector can do and what it needs, as bits. */
enum {
    ESA_TRAIT_READS_V = 1,     /* needs v: esa_select_qkv */
    ESA_TRAIT_BLIND = 2,       /* reads neither q nor k */
    ESA_TRAIT_WEIGHS_TAIL = 4, /* reads tail, fine, group_q and group_k of esa_select_params */
    ESA_TRAIT_ADAPTIVE = 8,    /* takes ESA_ORDER_ADAPTIVE */
    ESA_TRAIT_CENTROID = 16,   /* goes with ESA_TAIL_CENTROID; all go with the other tails */
    ESA_TRAIT_CAUSAL = 32,     /* takes causal attention */
    ESA_TRAIT_COMPAT = 64,     /* takes the compat modes */
    ESA_TRAIT_SPENDS = 128     /* where nothing else is said, a model run with it spends a work */
};
/* Name of a selector, for example "error"; NULL if there is none of this number. Numbers are
 * consecutive from 0. Static storage. */
ESA_API const char *esa_selector_name(int32_t selector);
/* ESA_TRAIT_* of a selector; 0 if there is none of this number. */
ESA_API int32_t esa_selector_traits(int32_t selector);

/* The steps that run dense first: ceil(warmup_frac * steps - 1e-9), within 0 .. steps. */
ESA_API int32_t esa_warmup_steps(double warmup_frac, int32_t steps);

/* Presets: the work of a whole video (params.work) for three aims. esa_preset_work_for gives it for
 * a run of so many steps with this carry (esa_session_params.carry) and so many branches at a step
 * (as in esa_carry_anchors). The fewer the steps, the more work the same closeness takes. Without
 * carry the works are 0.57, 0.44 and 0.30 for any number of steps; esa_preset_work returns these.
 * NaN for any other preset, and for steps below 1. Set work_or_least too, so that a short video
 * takes the least work that it can. */
enum { ESA_PRESET_FAITHFUL = 0, ESA_PRESET_BALANCED = 1, ESA_PRESET_FAST = 2 };
ESA_API double esa_preset_work_for(int32_t preset, int32_t steps, int32_t carry, int32_t branches);
ESA_API double esa_preset_work(int32_t preset);
/* The threshold of a step cache (esa_generate_params.cache) that costs such a preset at most 1 dB:
 * 0.02, 0.03 and 0.05. Presets do not turn it on. NaN for any other number. */
ESA_API double esa_preset_cache(int32_t preset);

/* On success the caller owns *session and frees it with esa_session_free. On failure *session is
 * NULL. params must not be NULL, because layers and steps have no default. The session keeps ctx,
 * which must outlive it. */
ESA_API esa_status esa_session_create(esa_ctx *ctx, esa_session **session,
                                      const esa_session_params *params);
ESA_API void esa_session_free(esa_session *session);

/* Starts a new video: resets the step, the masks kept for reuse, the key lengths and the
 * statistics. A RECORD session keeps its sums and counts one more prompt. */
ESA_API esa_status esa_session_begin(esa_session *session);

/* Sets the denoising step (0 .. steps - 1) and the guidance branch (0 .. branches - 1) of the
 * following attention calls. */
ESA_API esa_status esa_session_step(esa_session *session, int32_t step, int32_t branch);

/* Sets the key lengths for the following ESA_CALL_SELF calls: int32[B] as in
 * esa_attention_params.kv_len, or NULL for all keys. The array is borrowed; every call reads it
 * until it is replaced. esa_session_begin clears it. Recorded importance is 0 beyond the lengths.
 * If masks are kept, the session makes a new one when the lengths change. On a GPU it cannot
 * read them without waiting, so it makes a new mask when the pointer changes. */
ESA_API esa_status esa_session_set_kv_len(esa_session *session, const int32_t *kv_len);

/* Runs one attention call of the model. kind: ESA_CALL_*. lse may be NULL. On failure o is
 * unchanged; see esa_attention for errors of a GPU. */
ESA_API esa_status esa_session_attention(esa_session *session, int32_t layer, int32_t kind,
                                         const esa_tensor *q, const esa_tensor *k,
                                         const esa_tensor *v, const esa_tensor *o,
                                         const esa_tensor *lse);

/* Frees the memory that carried differences have on the device (on a CPU, in host memory), for what
 * comes after the last step of a video, such as its decoder. Later calls add no difference until
 * the next anchor makes one. Page-locked host memory stays, with the device memory that it needs.
 * Masks and statistics stay. */
ESA_API esa_status esa_session_trim(esa_session *session);

/* *costs = what sparse calls of an ONLINE session with these params pay when self-attention has
 * these shapes. With it, esa_work_plan_solve says before anything runs which densities a work
 * gives, or that no densities reach it. The caller sets costs->struct_size. */
ESA_API esa_status esa_session_costs(esa_ctx *ctx, esa_work_costs *costs,
                                     const esa_session_params *params, const esa_shapes *shapes);

typedef struct esa_session_stats {
    uint32_t struct_size;
    int32_t reserved0;
    int64_t calls, dense_calls, sparse_calls, fallback_calls, masks_made, masks_loaded;
    double density_asked, density; /* means over the sparse calls; NaN if there were none */
    /* Share of the attention mass that the masks kept, as the entropy selector or the mask file
     * estimates it. NaN if there is no estimate, as for masks made on a GPU. */
    double mass;
    double select_seconds, attention_seconds;
    int64_t device_bytes; /* GPU memory of the masks that the session keeps between calls */
    char kernel[32];      /* kernel set of the last call, for example "avx2" */
    /* Work of the self-attention calls as a share of dense attention, everything counted
     * (esa_work.h). NaN if there were none. */
    double work;
    double work_asked; /* work of the params; NaN if it was not given. work may be above it, because
                        * blocks are whole and every row keeps at least one */
    int64_t eight_calls; /* calls that ran in 8 bits, dense or sparse */
    /* Carry. anchor_calls: sparse calls that also ran dense, returned that output and made d.
     * carried_calls: sparse calls that added d. Without carry both are 0; sparse calls beyond both
     * had no d. */
    int64_t anchor_calls, carried_calls;
    double carry_age; /* mean number of steps between a carried call and its anchor; NaN if none */
    /* Memory of d now: on the device (on a CPU in host memory), and page-locked for a device. */
    int64_t carry_bytes, carry_host_bytes;
    int64_t reserved[1];
} esa_session_stats;

/* Statistics of the current video: all calls (layer -1, step -1), one layer (step -1), one step
 * (layer -1), or one layer and step. Waits for calls of this session that still run on a GPU. */
ESA_API esa_status esa_session_get_stats(const esa_session *session, esa_session_stats *stats,
                                         int32_t layer, int32_t step);

/* Mean density per query head over the calls that layer and step choose, as above: density
 * f64[heads]. NaN if none of them ran sparse, or all ran on a GPU, which does not count heads
 * separately. ESA_ERR_ARGUMENT if the model has another number of heads. */
ESA_API esa_status esa_session_get_heads(const esa_session *session, double *density, int64_t heads,
                                         int32_t layer, int32_t step);

/* Copies the noise levels of the params: sigma f64[steps]. ESA_ERR_STATE if they were not given. */
ESA_API esa_status esa_session_get_sigma(const esa_session *session, double *sigma, int32_t steps);

/* Mean squared error of a cell's output at each density of a PROBE session: error f64[count], where
 * count is the number of densities. NaN if the cell did not run. Adds up over videos; nothing
 * resets it. */
ESA_API esa_status esa_session_get_probe(const esa_session *session, double *error, int32_t count,
                                         int32_t layer, int32_t step);

/* ---------------------------------------------------------------- step cache */

/* These calls may change in any release. Define ESA_EXPERIMENTAL to see them. */
#ifdef ESA_EXPERIMENTAL
/* A model whose output changes slowly can use the output of an earlier step and leave the forward
 * out (docs/engine.md, "Step cache"). The session decides which steps; the caller keeps the
 * outputs:
 *
 *     esa_session_cache_begin(s, 0.05);                       // after esa_session_begin
 *     for each step: run the model, or use the kept outputs; fill in change;
 *                    esa_session_cache_next(s, &change, &skip);     // skip is of the next step
 *
 * Steps of the session's warm-up, the first tenth and the last step are never left out. All
 * guidance branches are left out together. Steps that are left out get no esa_session_step. */
typedef struct esa_step_change {
    uint32_t struct_size;
    int32_t step;     /* the step that has just ended */
    int32_t computed; /* 1: the model ran at it; 0: it used kept outputs */
    int32_t reserved0;
    /* Sums of magnitudes. x is the input of a step, v[b] the output of guidance branch b at the
     * last computed step; 0 for a branch that does not exist. */
    double x_change;    /* |x of the next step - x of this one| */
    double v_size[2];   /* |v[b]| */
    double v_change[2]; /* |v[b] - the v[b] that was computed before|; 0: there is none yet */
} esa_step_change;

/* Starts the cache for the video that esa_session_begin started, or starts it anew. threshold is
 * the expected change of the outputs, as a part of them, below which a step is left out; it must be
 * finite and above 0. ESA_ERR_STATE for RECORD and PROBE sessions, which need every step. */
ESA_API esa_status esa_session_cache_begin(esa_session *session, double threshold);
/* *skip = 1 if the step after change->step may be left out. Only v_size and v_change of computed
 * steps are read. ESA_ERR_STATE before esa_session_cache_begin. */
ESA_API esa_status esa_session_cache_next(esa_session *session, const esa_step_change *change,
                                          int32_t *skip);
#endif

/* ---------------------------------------------------------------- recordings */

/* Writes the recording of a RECORD session. The file holds sums of importance as integers
 * (round(p * 2^24)) or of error scores (round(min(e, 2^16) * 2^40)), the number of prompts and
 * everything a mask file needs. Integers make the sums exact, so prompts may be recorded, resumed
 * and merged in any order. The file is written under a temporary name and then renamed.
 * ESA_ERR_STATE if nothing is recorded yet. */
ESA_API esa_status esa_session_save_recording(esa_session *session, const char *path);

/* Adds the sums of a recording with the same settings to this RECORD session, to resume it. On
 * failure nothing is added. */
ESA_API esa_status esa_session_load_recording(esa_session *session, const char *path);

/* ---------------------------------------------------------------- mask files */

/* A mask file is one safetensors file; docs/mask-files.md describes the format. */

/* Importance stored in a mask file. U8 is an 8-bit logarithm, with two more bits in a tensor of
 * their own. */
enum { ESA_IMPORTANCE_NONE = 0, ESA_IMPORTANCE_U8 = 1, ESA_IMPORTANCE_F16 = 2 };

typedef struct esa_mask_file_info {
    uint32_t struct_size;
    int32_t format_version;
    int32_t selector; /* ESA_SELECT_*; -1: the caller made the masks */
    int32_t block_q, block_k;
    int32_t layers, steps, groups;
    int32_t branches;     /* 1: a single branch, or the average of all */
    int32_t importance;   /* ESA_IMPORTANCE_* */
    int32_t prompts;      /* number of prompts averaged */
    int32_t budget_count; /* number of prebuilt budgets, at most 16 */
    int32_t budget_permille[16];
    int32_t dense_first_layer; /* this and warmup_frac say which cells the file leaves out */
    int32_t mode;              /* ESA_MODE_* */
    int32_t samples;           /* queries scored per query block; 0: unknown */
    int32_t stored_layers, stored_groups; /* how many of layers and groups the file holds */
    int32_t causal;                       /* 1: the masks hold no future key block */
    double warmup_frac;
    int64_t H, Nq, Nk, nq, nk;
    int64_t file_bytes;
    esa_layout layout;
    char model[128];
    char config_hash[80];
    double scale; /* scale of the selection (esa_select_params); 0: D^-0.5, or unknown */
    /* Selector ERROR: the tail that the masks were made for, and the groups of the scores, as in
     * esa_select_params. */
    int32_t tail;
    int32_t fine; /* means per block on the fine level of the masks; 0: they have none */
    int32_t group_q, group_k;
    /* Files from recordings of errors: exact rows of each sparse call (esa_attention_params), which
     * the works include. Else 0. */
    int32_t exact_rows;
    int32_t reserved0;
} esa_mask_file_info;

/* Opens a mask file, by the rules for reading in esa_tensors.h, and checks every size before use.
 * The content decides the format, not the name; a recording or another kind of file is refused with
 * a message that says what it is.
 *
 * On success the caller owns *file and frees it with esa_mask_file_free. On failure *file is NULL.
 * The file keeps ctx for messages and threads; ctx must outlive it. */
ESA_API esa_status esa_mask_file_open(esa_ctx *ctx, esa_mask_file **file, const char *path);

/* The same for a file in memory. bytes must outlive the object. */
ESA_API esa_status esa_mask_file_open_memory(esa_ctx *ctx, esa_mask_file **file, const void *bytes,
                                             int64_t size);
ESA_API void esa_mask_file_free(esa_mask_file *file);
ESA_API esa_status esa_mask_file_get_info(const esa_mask_file *file, esa_mask_file_info *info);

/* Makes the masks for budget available: prebuilt ones, or masks derived now from the stored
 * importance (the same bits). Budgets of mask files are whole per mille; others are rounded to the
 * nearest. */
ESA_API esa_status esa_mask_file_require(esa_mask_file *file, double budget);

/* Returns the mask of one cell, owned by the caller. step is mapped to its group. Calls
 * esa_mask_file_require. ESA_ERR_STATE if the file does not store the cell (dense layer,
 * warm-up). */
ESA_API esa_status esa_mask_file_get(esa_mask_file *file, esa_mask **mask, int32_t layer,
                                     int32_t step, int32_t branch, double budget);

/* 1 if the file stores the cell of layer and step; 0 if not (dense layer, warm-up, out of
 * range). */
ESA_API int32_t esa_mask_file_stored(const esa_mask_file *file, int32_t layer, int32_t step);

/* Values per head of one cell: normalised entropy, the share of the recorded importance that the
 * mask keeps (of recorded errors: the share that it removes), and density. Each array is f64[H] or
 * NULL. NaN where the file does not know. Calls esa_mask_file_require. */
ESA_API esa_status esa_mask_file_heads(esa_mask_file *file, double *entropy, double *mass,
                                       double *density, int32_t layer, int32_t step, int32_t branch,
                                       double budget);

/* *density = the budget of one cell, which differs between cells in files from recordings of
 * errors; 1: the cell runs dense. Calls esa_mask_file_require. */
ESA_API esa_status esa_mask_file_density(esa_mask_file *file, double *density, int32_t layer,
                                         int32_t step, int32_t branch, double budget);

/* *work = the attention work of a whole run of the file's steps as a share of dense, counted from
 * the masks of budget: exact blocks, means, dense calls and the exact rows of the file. Files
 * without a tail of their own count pooled means. Calls esa_mask_file_require. */
ESA_API esa_status esa_mask_file_work(esa_mask_file *file, double *work, double budget);

/* Writes the decoded importance of one cell to out f32[H,nq,nk]. */
ESA_API esa_status esa_mask_file_importance(esa_mask_file *file, float *out, int32_t layer,
                                            int32_t step, int32_t branch);

/* ---------------------------------------------------------------- making mask files */

/* All calls below write output under a temporary name and rename it when it is complete. On failure
 * an existing output file is unchanged. */

/* For tools; not part of the ABI table. */
typedef struct esa_mask_build {
    uint32_t struct_size;
    int32_t importance;        /* ESA_IMPORTANCE_* (U8) */
    const double *budgets;     /* budgets to prebuild */
    int32_t budget_count;      /* 0 .. 16; at least 1 if importance is NONE (0) */
    int32_t store_dense;       /* 1: also stores layer 0 and the warm-up groups (0) */
    int32_t dense_first_layer; /* 1: sessions run layer 0 dense; -1: 1 for recordings of importance,
                                * 0 for recordings of errors (-1) */
    int32_t steps;             /* number of steps the file is for; 0: as recorded (0). Step i uses
                                * recorded step floor(i * recorded / steps). esa_mask_file_derive
                                * ignores it. */
    double warmup_frac; /* as in esa_session_params; -1: 0.2 for recordings of importance, 0 for
                         * recordings of errors (-1) */
    const esa_work_plan *plan; /* recordings of errors: how much each layer and step matters. NULL:
                                * all alike (NULL). Borrowed during the call. */
    int32_t exact_rows;        /* recordings of errors: exact rows of each sparse call, 0 ..
                                * ESA_MAX_EXACT_ROWS; -1: the recommended number, for recordings of
                                * importance 0 (-1) */
    int32_t reserved0;
    int64_t reserved[2];
} esa_mask_build;

ESA_API esa_mask_build esa_mask_build_default(void);

/* Adds up one or more recordings (shards of a run) into one. Any order and any split give the same
 * bits. */
ESA_API esa_status esa_recording_merge(esa_ctx *ctx, const char *output,
                                       const char *const *recordings, int32_t count);

/* Adds up one or more recordings of the same run and writes a mask file. It works cell by cell, so
 * it never holds a whole recording in memory. build NULL: the defaults.
 *
 * From recordings of importance, a budget is the kept fraction of key blocks in every cell. From
 * recordings of errors (selector ERROR) it is the attention work of the whole run as a share of
 * dense: exact blocks, means, exact rows and dense calls. The work is spread over layers and steps
 * for the least sum of errors, and the mean over all calls is the budget as closely as whole blocks
 * allow. ESA_ERR_ARGUMENT if a work does not even pay for the exact rows and the blocks that every
 * mask has. Such a file holds no importance, so build->importance is ignored and at least one
 * budget must be given. */
ESA_API esa_status esa_mask_file_build(esa_ctx *ctx, const char *output,
                                       const char *const *recordings, int32_t count,
                                       const esa_mask_build *build);

/* Rewrites a mask file with other budgets or less importance (F16 -> U8 -> NONE). The stored cells
 * stay: store_dense, dense_first_layer, warmup_frac and exact_rows of build are ignored. A file
 * without importance offers only its prebuilt budgets. */
ESA_API esa_status esa_mask_file_derive(esa_ctx *ctx, const char *output, esa_mask_file *file,
                                        const esa_mask_build *build);

/* Saves one mask as a mask file of one layer and one step, like `esa masks select --out`. B > 1
 * becomes B branches. */
ESA_API esa_status esa_mask_file_save(esa_ctx *ctx, const char *output, const esa_mask *mask);

/* Writes the masks of one budget in the exchange format of FA4: a safetensors file with
 * full_block_cnt I32 [L,G,H,nq] and full_block_idx I32 [L,G,H,nq,nk]. */
ESA_API esa_status esa_mask_file_export_fa4(esa_ctx *ctx, const char *output, esa_mask_file *file,
                                            double budget);

/* Reads a file of that format and writes a mask file. Its budget is the density of the masks, in
 * per mille. model may be NULL. A file that esa exported describes itself: info may be NULL, and
 * info and model must agree with the file if given. For any other file info gives Nq, Nk, block_q,
 * block_k and layout. */
ESA_API esa_status esa_mask_file_import_fa4(esa_ctx *ctx, const char *output, const char *input,
                                            const esa_mask_info *info, const char *model);

#ifdef __cplusplus
}
#endif
#endif
