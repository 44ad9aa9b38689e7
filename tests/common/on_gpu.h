/* on_gpu.h - one list of tests for both backends: with ESA_TEST_DEVICE=cuda the calls of a test run
 * on the GPU.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The linker puts the functions of on_gpu_calls.c between the tests and the library (--wrap,
 * cmake/EsaTests.cmake). For views on the CPU they copy the bytes behind the views to the GPU (same
 * alignment, guard bytes around), run the call there, copy the outputs back, and answer
 * ESA_ERR_INTERNAL with a line on stderr if a byte that is not an output changed. Workspaces given
 * by the caller get exactly the announced bytes on the GPU, guarded likewise. Views that already
 * lie on a GPU pass through. */
#ifndef ESA_TESTS_ON_GPU_H
#define ESA_TESTS_ON_GPU_H

#include "esa/esa.h"

/* 1 if ESA_TEST_DEVICE=cuda: for the few expectations that differ. */
int on_gpu(void);
/* For a test that compares the two: 0 sends the following calls to the CPU, 1 to the GPU, -1 where
 * ESA_TEST_DEVICE says. */
void on_gpu_set(int where);
/* 1 if that GPU is tests/cuda/stand_in.c. */
int on_stand_in(void);

#endif
