/* attention_loop.c - see attention_loop.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* program_invocation_name */
#include "common/attention_loop.h"
#include "common/case_alone.h"

int32_t level_of[8];
int levels, native;

static char running[sizeof(((case_walk *)NULL)->name)]; /* the case that runs; empty: none */

static int find_levels(void **state)
{
    (void)state;
    levels = find_test_levels(level_of, &native);
    printf("%d levels, seed %llu\n", levels, (unsigned long long)test_seed());
    return levels ? 0 : -1;
}

int few(int n) { return getenv("ESA_TEST_SMALL") ? n : 1; }

/* 1 if the case is one of the program, and is to run here. */
static int wanted(const case_walk *w, const char *group, int every, int tiles)
{
    static int number;
    const char *named = getenv("ESA_TEST_CASE");
    const int of_tiles = strstr(w->name, "/tiles/") != NULL, step = of_tiles ? tiles : every;
    if (strncmp(w->name, group, strlen(group)) != 0 || !step) return 0;
    if (named ? !case_matches(w->name, named) : (w->flags & ON_GPU) && !on_gpu()) return 0;
    return w->flags & ALWAYS || number++ % step == 0;
}

static int run_case(case_walk *w, int (*check)(const attention_case *c))
{
    attention_case *c = &w->c;
    if ((w->flags & LESS) && on_stand_in()) {
        if (c->Hq > 2) c->Hq = 2, c->Hkv = 1;
        if (c->Nk > 1300) c->Nk = 1300;
    }
    if (getenv("ESA_TEST_VERBOSE")) printf("%s\n", w->name);
    snprintf(running, sizeof running, "%s", w->name);
    /* Emulated kernel sets have no 8 bits of their own. */
    const int wrong = w->flags & BITS ? check_bits(c, level_of, c->precision == 8 ? native : levels)
                      : check         ? check(c)
                                      : check_attention(c, level_of, levels, 2);
    running[0] = 0;
    if (wrong) case_alone(w->name);
    return wrong != 0;
}

void run_cases(const char *group, int every, int tiles, int (*check)(const attention_case *c))
{
    int cases = 0, wrong = 0;
    for (case_walk w = { 0 }; case_next(&w);)
        if (wanted(&w, group, every, tiles)) {
            cases++;
            wrong += run_case(&w, check);
        }
    printf("%d cases of %s\n", cases, group);
    if (wrong) fail_msg("%d of %d cases of %s are wrong", wrong, cases, group);
}

int cases_end(void **state)
{
    (void)state;
    if (running[0]) case_alone(running);
    running[0] = 0;
    return 0;
}

int attention_tests(const struct CMUnitTest *tests, size_t count)
{
    struct CMUnitTest chosen[32];
    size_t n = 0;
    const char *named = getenv("ESA_TEST_CASE");
    for (size_t i = 0; i < count && n < sizeof chosen / sizeof chosen[0]; i++)
        if (!named || !strcmp(tests[i].name, "cases") || case_matches(tests[i].name, named))
            chosen[n++] = tests[i];
    return _cmocka_run_group_tests("tests", chosen, n, find_levels, NULL);
}
