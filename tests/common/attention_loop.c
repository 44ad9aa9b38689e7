/* attention_loop.c - see attention_loop.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "common/attention_loop.h"

int32_t level_of[8];
int levels, native;

static int find_levels(void **state)
{
    (void)state;
    levels = find_test_levels(level_of, &native);
    printf("%d levels, seed %llu\n", levels, (unsigned long long)test_seed());
    return levels ? 0 : -1;
}

static int run_case(case_walk *w, int (*check)(const attention_case *c))
{
    attention_case *c = &w->c;
    if ((w->flags & LESS) && on_stand_in()) {
        if (c->Hq > 2) c->Hq = 2, c->Hkv = 1;
        if (c->Nk > 1300) c->Nk = 1300;
    }
    /* Emulated kernel sets have no 8 bits of their own. */
    if (w->flags & BITS) return check_bits(c, level_of, c->precision == 8 ? native : levels);
    return check ? check(c) : check_attention(c, level_of, levels, 2);
}

void run_cases(const char *group, int every, int tiles, int (*check)(const attention_case *c))
{
    const int all = getenv("ESA_TEST_CASE") || on_gpu();
    for (case_walk w = { 0 }; case_next(&w);) {
        const int step = strstr(w.name, "/tiles/") ? tiles : every;
        if (strncmp(w.name, group, strlen(group)) != 0 || !step) continue;
        if ((w.flags & ON_GPU) && !all) continue;
        if (case_begin(w.name, w.flags & ALWAYS ? 1 : step)) case_end(run_case(&w, check));
    }
    cases_done(group);
}

attention_case case_of(const char *name)
{
    for (case_walk w = { 0 }; case_next(&w);)
        if (strcmp(w.name, name) == 0) return w.c;
    fail_msg("no case %s", name);
    return (attention_case){ 0 };
}

int attention_tests(const struct CMUnitTest *tests, size_t count)
{
    return case_tests(tests, count, find_levels, NULL);
}
