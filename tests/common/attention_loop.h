/* attention_loop.h - the set-up, the loop over cases/attention.def and the end of the programs that
 * test attention.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_ATTENTION_LOOP_H
#define ESA_TESTS_ATTENTION_LOOP_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/tests.h"
#include "common/attention_case.h"
#include "common/case_run.h"
#include "common/naive.h"
#include "common/on_gpu.h"

/* The levels of this machine. native: how many a ctx can be made for by itself. */
extern int32_t level_of[8];
extern int levels, native;

/* Runs the cases whose names begin with `group`: every `every`-th, and of those with "tiles" in the
 * name every `tiles`-th; 0: none. check returns how often a case was wrong; NULL: compared with the
 * textbook on all levels. Fails the test at the end if a case was wrong. */
void run_cases(const char *group, int every, int tiles, int (*check)(const attention_case *c));
/* The case of this name, which must exist; for tests that change it. */
attention_case case_of(const char *name);
/* What main returns: finds the levels, runs the tests and cleans up. */
int attention_tests(const struct CMUnitTest *tests, size_t count);
#define RUN(tests) attention_tests(tests, sizeof(tests) / sizeof((tests)[0]))

#endif
