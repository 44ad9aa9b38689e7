/* rounding.h - the step that rounds q, k and v to 8 bits on a GPU, alone: for its test and its
 * times. rounding.cuh fills it in; rounding_sm90.cu and rounding_sm89.cu have values in E4M3 (the
 * latter also for D 64 and blocks of 64 keys), rounding_sm80.cu in f16.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_CUDA_ROUNDING_H
#define ESA_TESTS_CUDA_ROUNDING_H

#include "base/args.h"

#ifdef __cplusplus
extern "C" {
#endif

/* On the host, with the layouts of struct quantised (src/cuda/attention/quantise.cuh). */
typedef struct rounded {
    int64_t nq, nk, nk_pad;
    const int8_t *q, *k, *k_mean, *k_fine;
    const void *v, *v_mean, *v_fine;
    const float *q_scale, *k_scale, *v_scale, *v_centre, *v_middle, *k_centre, *q_centre;
    void *memory; /* of all of them; the caller frees */
} rounded;

enum { ROUNDING_STEPS = 4 }; /* launches */

/* 1 if there is a GPU that runs it. */
int rounding_e4m3_runs(void);
int rounding_e4m3_64_runs(void);
int rounding_f16_runs(void);
/* Rounds; pointers of args are on the host. Returns the error of CUDA, NULL if there is none. */
const char *rounding_e4m3(rounded *out, const esa_attn_args *args);
const char *rounding_e4m3_64(rounded *out, const esa_attn_args *args);
const char *rounding_f16(rounded *out, const esa_attn_args *args);
/* Medians of the milliseconds of each launch (ms[0] ..), and of all of them together (the last).
 * The shapes of args are used, its pointers are not. */
const char *rounding_e4m3_times(float ms[ROUNDING_STEPS + 1], const esa_attn_args *args);
const char *rounding_e4m3_64_times(float ms[ROUNDING_STEPS + 1], const esa_attn_args *args);
const char *rounding_f16_times(float ms[ROUNDING_STEPS + 1], const esa_attn_args *args);

#ifdef __cplusplus
}
#endif

#endif
