/* esa_work.h - work plans: how much attention each layer and step of a run gets.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Work is the attention arithmetic of a whole clip as a share of dense attention, everything
 * counted: exact blocks, means of the tail, exact rows, dense calls, the selection of blocks and
 * adaptive orders.
 *
 * A work plan knows, for each cell (layer, step) of a model, how large the error is at a few
 * densities, and how much such an error moves the result. From that and from the work that a run
 * may spend, esa_work_plan_solve finds how dense each cell must be for the least expected error. A
 * plan is indexed by noise level, so it fits any resolution and step count. `esa calibrate --plan`
 * makes plans. docs/mask-files.md describes the file.
 *
 * Without a plan, the uniform rule takes its place: all cells have the same curve and the same
 * weight, so every sparse cell gets about the same share of the work.
 *
 * The rules of esa.h hold here too. Sessions (esa_session.h) take a plan and a work. */
#ifndef ESA_WORK_H
#define ESA_WORK_H

#include "esa.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esa_work_plan esa_work_plan;

#define ESA_WORK_MAX_POINTS 32 /* densities of an error curve */
#define ESA_WORK_MAX_LEVELS 32 /* measured works of the quality curve */

typedef struct esa_work_plan_info {
    uint32_t struct_size;
    int32_t format_version;
    int32_t layers, steps; /* cells that were measured */
    int32_t points;        /* densities of each curve, 1 .. ESA_WORK_MAX_POINTS */
    int32_t levels;        /* points of the quality curve, 0 .. ESA_WORK_MAX_LEVELS */
    int32_t prompts;       /* prompts that were measured */
    /* What the measured runs used: ESA_SELECT_*, ESA_ORDER_*, ESA_TAIL_* and blocks. */
    int32_t selector, order, tail;
    int32_t block_q, block_k;
    char model[128];      /* "": unknown */
    char config_hash[80]; /* "": unknown */
    /* Anchors of the measured runs (esa_session.h, carry); 0: they did not carry. Without carry, a
     * run is less close to dense than a quality curve with anchors says. */
    int32_t anchors;
    int32_t reserved0;
    int64_t reserved[3];
} esa_work_plan_info;

/* Makes a plan from measurements; everything is copied.
 *
 *     sigma    f64[steps]                 noise level of each step, falling, within 0 .. 1
 *     density  f64[points]                ascending, above 0 and below 1
 *     error    f64[layers][steps][points] error of the cell's output at each density, >= 0
 *     weight   f64[layers][steps]         how much a unit of that error moves the result, >= 0
 *
 * info gives layers, steps, points and the descriptive fields; its format_version and levels are
 * ignored. On success the caller owns *plan and frees it with esa_work_plan_free; on failure it is
 * NULL. The plan keeps ctx for messages; ctx must outlive it. */
ESA_API esa_status esa_work_plan_create(esa_ctx *ctx, esa_work_plan **plan,
                                        const esa_work_plan_info *info, const double *sigma,
                                        const double *density, const double *error,
                                        const double *weight);
ESA_API void esa_work_plan_free(esa_work_plan *plan);

/* Sets what runs with this plan reached: at work[i] (ascending, within 0 .. 1) a mean PSNR of
 * psnr[i] dB against dense, with the standard deviation spread[i] between prompts. count 0:
 * unknown. */
ESA_API esa_status esa_work_plan_set_quality(esa_work_plan *plan, int32_t count, const double *work,
                                             const double *psnr, const double *spread);

/* Reads and writes a plan: one safetensors file. Every size and value is checked. The file is
 * written under a temporary name and then renamed. */
ESA_API esa_status esa_work_plan_open(esa_ctx *ctx, esa_work_plan **plan, const char *path);
ESA_API esa_status esa_work_plan_open_memory(esa_ctx *ctx, esa_work_plan **plan, const void *bytes,
                                             int64_t size);
ESA_API esa_status esa_work_plan_save(const esa_work_plan *plan, const char *path);

/* The caller sets info->struct_size to sizeof *info before the call. */
ESA_API esa_status esa_work_plan_get_info(const esa_work_plan *plan, esa_work_plan_info *info);

/* Copies the measurements into arrays of the shapes above; each may be NULL. */
ESA_API esa_status esa_work_plan_get(const esa_work_plan *plan, double *sigma, double *density,
                                     double *error, double *weight);

/* Expected PSNR in dB and its spread at a work, by interpolation between measured works. Below the
 * first or above the last of them: ESA_ERR_ARGUMENT. Without a quality curve: ESA_ERR_STATE. */
ESA_API esa_status esa_work_plan_expect(const esa_work_plan *plan, double work, double *psnr,
                                        double *spread);
/* The least work with that expected PSNR. Errors as above; a PSNR below the first is reached by the
 * first work. */
ESA_API esa_status esa_work_plan_reach(const esa_work_plan *plan, double psnr, double *work);

/* Estimates the weights of cells from how much the result moved when only some layers, or only some
 * steps, ran sparse. It assumes weight[l][t] = a[group of l] b[group of t] and that the effects of
 * cells add up.
 *
 *     weight    f64[layers][steps]  receives the weights
 *     error     f64[layers][steps]  error of each cell at the density of those runs, >= 0
 *     by_layer  f64[layer_groups]   squared change of the result with the layers of a group sparse
 *     by_step   f64[step_groups]    the same with the steps of a group sparse
 *
 * Layer l belongs to group floor(l * layer_groups / layers); steps alike. */
ESA_API esa_status esa_work_fit(esa_ctx *ctx, double *weight, int32_t layers, int32_t steps,
                                const double *error, int32_t layer_groups, const double *by_layer,
                                int32_t step_groups, const double *by_step);

/* A value of refresh_every and order_every: masks or orders are made at the first sparse step of a
 * layer, and at 1/8, 1/4 and 1/2 of its sparse steps in the run (rounded down). For 8 steps these
 * are the steps 0, 1, 2 and 4, for 50 steps 0, 6, 12 and 25. Attention changes most early in a run.
 * A long run makes no more masks than a short one. */
#define ESA_REFRESH_EARLY (-1)

/* What a sparse cell pays beside its density, and when. Shares of one dense call. esa_session_costs
 * fills it in for a session. */
typedef struct esa_work_costs {
    uint32_t struct_size;
    int32_t branches;       /* guidance branches, >= 1 (1) */
    int32_t share_branches; /* 1: the branches share masks and orders (0) */
    int32_t refresh_every;  /* as in esa_session_params; 0: once; or ESA_REFRESH_EARLY (1) */
    int32_t order_every;    /* likewise (1) */
    int32_t or_least;     /* 1: a work that no densities reach becomes the least; 0: an error (0) */
    double select, order; /* one selection; one order; 0: none (0) */
    double exact;         /* exact rows, paid by every sparse call; 0: none (0) */
    double floor;         /* least density of a sparse call, because each row keeps a block (0) */
    /* Carry, as in esa_session_params: at the anchors, and not by refresh_every and order_every, a
     * layer makes mask and order and runs dense too, one branch with share_branches, else each.
     * carry 0: off (0). anchors: borrowed; NULL: by the rule (NULL). */
    int32_t carry, anchor_count;
    const int32_t *anchors;
    int64_t reserved[2];
} esa_work_costs;

ESA_API esa_work_costs esa_work_costs_default(void);

/* Solves for the density of each cell of a run: density f64[layers][steps], where 1 means dense.
 * plan NULL: the uniform rule. sigma f64[steps]: noise levels of the run, falling; NULL: spaced as
 * in the plan. dense u8[layers][steps]: 1 where the cell must be dense; NULL: none. work: 0 .. 1.
 * costs NULL: the defaults. *realised (may be NULL) receives the work that the densities will cost.
 * ESA_ERR_ARGUMENT if no densities cost so little (*realised then receives the least work), unless
 * costs->or_least; or if the plan has another number of layers. */
ESA_API esa_status esa_work_plan_solve(esa_ctx *ctx, const esa_work_plan *plan, double *density,
                                       int32_t layers, int32_t steps, const double *sigma,
                                       const uint8_t *dense, double work,
                                       const esa_work_costs *costs, double *realised);

#ifdef __cplusplus
}
#endif
#endif
