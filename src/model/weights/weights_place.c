/* weights_place.c - where wanted tensors lie in the tensors of a file that hold several of them, or
 * their rows in another order.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The rules of weights.h number the runs of all tensors that lie under one name. A run begins where
 * those with smaller numbers end. */
#include <stdlib.h>
#include <string.h>

#include "model/weights/weights_internal.h"

static int by_name(const void *a, const void *b)
{
    const esa_place *x = a, *y = b;
    const int c = strcmp(x->name, y->name);
    return c ? c : strcmp(x->runs, y->runs);
}

int64_t esa_wanted_count(const esa_wanted *e)
{
    int64_t n = 1;
    for (int32_t i = 0; i < e->rank; i++) n = esa_size_mul(n, e->dim[i]);
    return n;
}

/* Elements of a tensor in runs with a smaller number. */
static int64_t before(const esa_place *p, char number)
{
    int64_t runs = 0;
    for (const char *c = p->runs; *c; c++) runs += *c < number;
    return runs ? runs * (esa_wanted_count(p->e) / (int64_t)strlen(p->runs)) : 0;
}

/* The tensors of one name. */
static void share(esa_place *list, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        esa_share *s = &list[i].share;
        *s = (esa_share){ .runs = (int32_t)strlen(list[i].runs) };
        for (int64_t k = 0; s->runs && k < count; k++) {
            s->side += list[k].e->dim[0];
            for (int32_t r = 0; r < s->runs; r++) s->at[r] += before(&list[k], list[i].runs[r]);
        }
    }
}

void esa_places_sort(esa_place *list, int64_t count)
{
    if (count) qsort(list, (size_t)count, sizeof *list, by_name);
    for (int64_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && strcmp(list[end].name, list[i].name) == 0;) end++;
        share(list + i, end - i);
    }
}

esa_place *esa_places_find(esa_place *list, int64_t count, const char *name)
{
    int64_t lo = 0;
    for (int64_t hi = count; lo < hi;) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (strcmp(list[mid].name, name) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < count && strcmp(list[lo].name, name) == 0 ? &list[lo] : NULL;
}

esa_place *esa_places_next(esa_place *list, int64_t count, const esa_place *p)
{
    const int64_t next = p - list + 1;
    return next < count && strcmp(list[next].name, p->name) == 0 ? &list[next] : NULL;
}

int64_t esa_share_element(const esa_share *s, const esa_wanted *e, int64_t i, int64_t *left)
{
    const int64_t count = esa_wanted_count(e), run = s->runs ? count / s->runs : count;
    const int64_t k = run > 0 ? esa_min64(i / run, s->runs ? s->runs - 1 : 0) : 0;
    if (left) *left = (k + 1) * run - i;
    return s->runs ? s->at[k] + i - k * run : i;
}
