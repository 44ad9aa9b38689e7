/* work_plan.h - what a work plan holds, and the calls behind esa_work.h. They do not take the ctx
 * guard; the public calls do.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   work_plan.c        makes a plan, checks its values, reads its quality curve
 *   work_plan_file.c   reads and writes plan files
 *   work_plan_solve.c  maps a plan to a run and solves for its densities
 *   anchors.c          the anchors of a run, for the solver and for sessions */
#ifndef ESA_WORKPLAN_WORK_PLAN_H
#define ESA_WORKPLAN_WORK_PLAN_H

#include "base/engine.h"
#include "ctx/ctx.h"
#include "esa/esa_work.h"
#include "io/safetensors.h"

#define ESA_WORK_FORMAT_VERSION 1
#define ESA_WORK_MAX_AXIS       65535 /* most layers and steps */

struct esa_work_plan {
    esa_ctx *ctx;
    esa_allocator mem;
    esa_work_plan_info info;
    double *sigma;   /* [steps]; the four arrays share one allocation */
    double *density; /* [points] */
    double *error;   /* [layers][steps][points] */
    double *weight;  /* [layers][steps] */
    int64_t bytes;
    double work[ESA_WORK_MAX_LEVELS], psnr[ESA_WORK_MAX_LEVELS], spread[ESA_WORK_MAX_LEVELS];
};

/* name: what messages call the plan. */
esa_status esa_work_plan_make(esa_ctx *ctx, esa_work_plan **plan, const char *name,
                              const esa_work_plan_info *info, const double *sigma,
                              const double *density, const double *error, const double *weight);
esa_status esa_work_plan_rate(esa_work_plan *plan, const char *name, int32_t count,
                              const double *work, const double *psnr, const double *spread);
/* Takes ownership of tensors, even on failure. */
ESA_ENGINE esa_status esa_work_plan_read(esa_ctx *ctx, esa_work_plan **plan, esa_tensors *tensors);
esa_status esa_work_plan_densities(esa_ctx *ctx, const esa_work_plan *plan, double *density,
                                   int32_t layers, int32_t steps, const double *sigma,
                                   const uint8_t *dense, double work, const esa_work_costs *costs,
                                   double *realised);
/* The weights of a run of so many steps, spaced as in the plan: weight[layers][steps].
 * ESA_ERR_ARGUMENT if the plan has another number of layers. */
esa_status esa_work_plan_weights(esa_ctx *ctx, const esa_work_plan *plan, double *weight,
                                 int32_t layers, int32_t steps);
/* As esa_work_plan_reach. */
ESA_ENGINE esa_status esa_work_plan_find(esa_ctx *ctx, const esa_work_plan *plan, double psnr,
                                         double *work);

/* Anchors as esa_session_params has them: carry, and a list that may take the place of its rule. */
esa_status esa_anchors_check(esa_ctx *ctx, int32_t carry, const int32_t *list, int32_t count,
                             int32_t steps);
/* Writes the anchors (room for steps entries) and returns their number; 0: the run does not
 * carry. branches: as in esa_carry_anchors. */
int32_t esa_anchors_of(int32_t *anchors, int32_t carry, const int32_t *list, int32_t count,
                       int32_t steps, int32_t branches);

#endif
