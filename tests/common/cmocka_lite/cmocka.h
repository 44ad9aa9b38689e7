/* cmocka.h - a stand-in for the part of cmocka that our tests use, for cross builds where no cmocka
 * package exists.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Own code with cmocka's names and meaning: a failed assertion prints its place and leaves the test
 * by longjmp; a group runs all its tests and returns the number that failed. No mocks, no memory
 * checks: native builds use the real library. Header only, one group per program, as our tests are
 * written. */
#ifndef ESA_TESTS_CMOCKA_LITE_H
#define ESA_TESTS_CMOCKA_LITE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*CMFixtureFunction)(void **state);
typedef void (*CMUnitTestFunction)(void **state);

struct CMUnitTest {
    const char *name;
    CMUnitTestFunction test_func;
    CMFixtureFunction setup_func;
    CMFixtureFunction teardown_func;
    void *initial_state;
};

/* One instance per program, in a function so that a header may be included by several files: the
 * helpers of tests/common too. */
/* outcome: 0 running, 1 failed, 2 skipped */
struct cmocka_lite_state {
    jmp_buf leave;
    int outcome;
};
#if defined(__GNUC__)
__attribute__((weak))
#endif
struct cmocka_lite_state cmocka_lite_now;

#if defined(__GNUC__)
#define CMOCKA_LITE_UNUSED       __attribute__((unused))
#define CMOCKA_LITE_PRINTF(f, a) __attribute__((unused, format(printf, f, a)))
#else
#define CMOCKA_LITE_UNUSED
#define CMOCKA_LITE_PRINTF(f, a)
#endif

CMOCKA_LITE_UNUSED static _Noreturn void cmocka_lite_leave(int outcome)
{
    cmocka_lite_now.outcome = outcome;
    longjmp(cmocka_lite_now.leave, 1);
}

CMOCKA_LITE_PRINTF(3, 4)
static _Noreturn void cmocka_lite_fail(const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    cmocka_lite_leave(1);
}

CMOCKA_LITE_UNUSED static void cmocka_lite_true(int holds, const char *text, const char *file,
                                                int line)
{
    if (!holds) cmocka_lite_fail(file, line, "does not hold: %s", text);
}

CMOCKA_LITE_UNUSED static void cmocka_lite_int(long long a, long long b, int equal,
                                               const char *text, const char *file, int line)
{
    if ((a == b) != equal)
        cmocka_lite_fail(file, line, "%lld %s %lld (%s)", a, equal ? "!=" : "==", b, text);
}

CMOCKA_LITE_UNUSED static void cmocka_lite_float(double a, double b, double epsilon,
                                                 const char *file, int line)
{
    const double d = a > b ? a - b : b - a;
    if (!(d <= epsilon) && a != b)
        cmocka_lite_fail(file, line, "%.9g and %.9g differ by more than %.3g", a, b, epsilon);
}

CMOCKA_LITE_UNUSED static void cmocka_lite_string(const char *a, const char *b, int equal,
                                                  const char *file, int line)
{
    if ((strcmp(a, b) == 0) != equal)
        cmocka_lite_fail(file, line, "\"%s\" %s \"%s\"", a, equal ? "!=" : "==", b);
}

CMOCKA_LITE_UNUSED static void cmocka_lite_memory(const void *a, const void *b, size_t n, int equal,
                                                  const char *file, int line)
{
    if ((memcmp(a, b, n) == 0) != equal)
        cmocka_lite_fail(file, line, "%zu bytes %s", n, equal ? "differ" : "are equal");
}

CMOCKA_LITE_UNUSED static int cmocka_lite_group(const char *group, const struct CMUnitTest *tests,
                                                size_t count, CMFixtureFunction setup,
                                                CMFixtureFunction teardown)
{
    volatile int failed = 0;
    void *group_state = NULL;
    fprintf(stderr, "[==========] %s: Running %zu test(s).\n", group, count);
    if (setup && setup(&group_state) != 0) {
        fprintf(stderr, "[  FAILED  ] GROUP SETUP\n");
        return (int)count;
    }
    for (volatile size_t i = 0; i < count; i++) {
        const struct CMUnitTest *t = &tests[i];
        void *state = t->initial_state ? t->initial_state : group_state;
        fprintf(stderr, "[ RUN      ] %s\n", t->name);
        cmocka_lite_now.outcome = 0;
        if (setjmp(cmocka_lite_now.leave) == 0) {
            if (t->setup_func && t->setup_func(&state) != 0) cmocka_lite_now.outcome = 1;
            if (cmocka_lite_now.outcome == 0) t->test_func(&state);
            if (t->teardown_func && t->teardown_func(&state) != 0) cmocka_lite_now.outcome = 1;
        }
        if (cmocka_lite_now.outcome == 1) failed++;
        fprintf(stderr, "[ %s ] %s\n",
                cmocka_lite_now.outcome == 1   ? " FAILED "
                : cmocka_lite_now.outcome == 2 ? "SKIPPED "
                                               : "     OK ",
                tests[i].name);
    }
    if (teardown && teardown(&group_state) != 0) failed++;
    fprintf(stderr, "[==========] %s: %zu test(s) run, %d failed.\n", group, count, failed);
    return failed;
}

#define cmocka_unit_test(f)                                  { #f, f, NULL, NULL, NULL }
#define cmocka_unit_test_setup(f, s)                         { #f, f, s, NULL, NULL }
#define cmocka_unit_test_teardown(f, t)                      { #f, f, NULL, t, NULL }
#define cmocka_unit_test_setup_teardown(f, s, t)             { #f, f, s, t, NULL }
#define cmocka_unit_test_prestate(f, p)                      { #f, f, NULL, NULL, p }
#define cmocka_unit_test_prestate_setup_teardown(f, s, t, p) { #f, f, s, t, p }
#define _cmocka_run_group_tests                              cmocka_lite_group
#define cmocka_run_group_tests(tests, setup, teardown)                                             \
    cmocka_lite_group(#tests, tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)
#define cmocka_run_group_tests_name(name, tests, setup, teardown)                                  \
    cmocka_lite_group(name, tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)

#define assert_true(c)     cmocka_lite_true((c) ? 1 : 0, #c, __FILE__, __LINE__)
#define assert_false(c)    cmocka_lite_true((c) ? 0 : 1, "not " #c, __FILE__, __LINE__)
#define assert_non_null(p) cmocka_lite_true((p) != NULL, #p " is not NULL", __FILE__, __LINE__)
#define assert_null(p)     cmocka_lite_true((p) == NULL, #p " is NULL", __FILE__, __LINE__)
#define assert_ptr_equal(a, b)                                                                     \
    cmocka_lite_true((const void *)(a) == (const void *)(b), #a " == " #b, __FILE__, __LINE__)
#define assert_ptr_not_equal(a, b)                                                                 \
    cmocka_lite_true((const void *)(a) != (const void *)(b), #a " != " #b, __FILE__, __LINE__)
#define assert_int_equal(a, b)                                                                     \
    cmocka_lite_int((long long)(a), (long long)(b), 1, #a ", " #b, __FILE__, __LINE__)
#define assert_int_not_equal(a, b)                                                                 \
    cmocka_lite_int((long long)(a), (long long)(b), 0, #a ", " #b, __FILE__, __LINE__)
#define assert_return_code(rc, error) cmocka_lite_true((rc) >= 0, #rc " >= 0", __FILE__, __LINE__)
#define assert_in_range(v, lo, hi)                                                                 \
    cmocka_lite_true((v) >= (lo) && (v) <= (hi), #v " in " #lo " .. " #hi, __FILE__, __LINE__)
#define assert_not_in_range(v, lo, hi)                                                             \
    cmocka_lite_true((v) < (lo) || (v) > (hi), #v " outside " #lo " .. " #hi, __FILE__, __LINE__)
#define assert_float_equal(a, b, e)                                                                \
    cmocka_lite_float((double)(a), (double)(b), (double)(e), __FILE__, __LINE__)
#define assert_string_equal(a, b)     cmocka_lite_string(a, b, 1, __FILE__, __LINE__)
#define assert_string_not_equal(a, b) cmocka_lite_string(a, b, 0, __FILE__, __LINE__)
#define assert_memory_equal(a, b, n)  cmocka_lite_memory(a, b, (size_t)(n), 1, __FILE__, __LINE__)
#define assert_memory_not_equal(a, b, n)                                                           \
    cmocka_lite_memory(a, b, (size_t)(n), 0, __FILE__, __LINE__)
#define fail()             cmocka_lite_fail(__FILE__, __LINE__, "failed")
#define fail_msg(...)      cmocka_lite_fail(__FILE__, __LINE__, __VA_ARGS__)
#define skip()             cmocka_lite_leave(2)
#define print_message(...) fprintf(stdout, __VA_ARGS__)
#define print_error(...)   fprintf(stderr, __VA_ARGS__)

#endif
