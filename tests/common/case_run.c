/* case_run.c - see case_run.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* program_invocation_name */
#include "common/case_run.h"
#include "cases/match.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static char running[160]; /* the case that runs; empty: none */
static int number, cases, wrong_cases;
static int begun; /* cases of all tests */

int few(int n) { return getenv("ESA_TEST_SMALL") ? n : 1; }

/* Prints the command, with the variables that this run has. */
static void print_alone(void)
{
    static const char *const variable[] = { "ESA_TEST_DEVICE", "ESA_CUDA",      "ESA_CUDA_LIB",
                                            "ESA_CPU",         "ESA_SEED",      "ESA_TEST_SEED",
                                            "ESA_TEST_SMALL",  "ESA_TEST_TIGHT" };
    printf("    alone:");
    for (size_t i = 0; i < sizeof variable / sizeof variable[0]; i++)
        if (getenv(variable[i])) printf(" %s=%s", variable[i], getenv(variable[i]));
    printf(" ESA_TEST_CASE='%s' %s\n", running, program_invocation_name);
}

int case_begin(const char *name, int every)
{
    const char *named = getenv("ESA_TEST_CASE");
    if (named && !case_matches(name, named)) return 0;
    if (every > 1 && number++ % every) return 0;
    if (getenv("ESA_TEST_VERBOSE")) printf("%s\n", name);
    snprintf(running, sizeof running, "%s", name);
    cases++;
    begun++;
    return 1;
}

void case_end(int wrong)
{
    if (wrong) {
        printf("    %s is wrong\n", running);
        print_alone();
    }
    wrong_cases += wrong != 0;
    running[0] = 0;
}

void cases_done(const char *what)
{
    const int all = cases, wrong = wrong_cases;
    cases = wrong_cases = 0;
    if (all)
        printf("%d cases of %s\n", all, what);
    else
        printf("no case of %s ran\n", what); /* scripts/test-cuda.sh looks for it */
    if (!all && !getenv("ESA_TEST_CASE")) fail_msg("no case of %s ran", what);
    if (wrong) fail_msg("%d of %d cases of %s are wrong", wrong, all, what);
}

int cases_stopped(void **state)
{
    (void)state;
    if (running[0]) print_alone();
    running[0] = 0;
    cases = wrong_cases = 0;
    return 0;
}

int case_tests(const struct CMUnitTest *tests, size_t count, CMFixtureFunction setup,
               CMFixtureFunction teardown)
{
    struct CMUnitTest chosen[32];
    size_t n = 0, named_tests = 0;
    const char *named = getenv("ESA_TEST_CASE");
    if (count > sizeof chosen / sizeof chosen[0]) return printf("too many tests\n");
    for (size_t i = 0; i < count; i++) {
        const int is_named = !named || case_matches(tests[i].name, named);
        if (is_named || tests[i].teardown_func == cases_stopped) chosen[n++] = tests[i];
        named_tests += is_named != 0;
    }
    const int failed = _cmocka_run_group_tests("tests", chosen, n, setup, teardown);
    if (named_tests || begun) return failed;
    printf("no case and no test is named %s\n", named ? named : "");
    return failed + 1;
}
