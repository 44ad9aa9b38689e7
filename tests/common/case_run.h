/* case_run.h - which cases of tests/cases run, and the command that runs a wrong one alone.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_TEST_CASE=GLOB,... runs only the cases and tests whose names match. */
#ifndef ESA_TESTS_CASE_RUN_H
#define ESA_TESTS_CASE_RUN_H

#include "common/tests.h"

/* n if only some of the cases are to run ($ESA_TEST_SMALL: every n-th), else 1. */
int few(int n);
/* 1 if the case is to run now: $ESA_TEST_CASE names it, or is not set; and it is the first of
 * `every` such cases. */
int case_begin(const char *name, int every);
/* The end of the case. wrong: how often it was wrong; if it was, prints the command that runs it
 * alone. */
void case_end(int wrong);
/* The end of all cases of a test: prints their number. Fails the test if one was wrong, or if none
 * ran though $ESA_TEST_CASE is not set. */
void cases_done(const char *what);
/* The teardown of a test that runs cases: says which case stopped it. */
int cases_stopped(void **state);
#define CASES(test) cmocka_unit_test_teardown(test, cases_stopped)

/* Runs a program's tests; if $ESA_TEST_CASE is set, only those that run cases (CASES) and those
 * that it names. Returns the number of failures; 1 if it names no case and no test. */
int case_tests(const struct CMUnitTest *tests, size_t count, CMFixtureFunction setup,
               CMFixtureFunction teardown);
#define RUN_CASES(tests, setup, teardown)                                                          \
    case_tests(tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)

#endif
