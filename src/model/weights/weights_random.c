/* weights_random.c - what random weights are made of (esa_weights_open_random). The numbers depend
 * on the name and the place alone, so every device and every type has the same ones.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "model/weights/weights_internal.h"

/* 1 for the weight of a norm: NAME.weight, where the last part of NAME contains "norm". */
static int32_t is_norm(const char *name)
{
    const char *end = strrchr(name, '.'), *norm = NULL;
    if (!end || strcmp(end, ".weight") != 0) return 0;
    for (const char *at = strstr(name, "norm"); at && at < end; at = strstr(at + 1, "norm"))
        norm = at;
    return norm && !memchr(norm, '.', (size_t)(end - norm));
}

void esa_weights_bell(const esa_wanted *e, float *mean, float *deviation)
{
    const int32_t norm = e->rank <= 1 && is_norm(e->name);
    *mean = norm ? 1.0f : 0.0f;
    *deviation = norm ? 0.0f : 0.02f;
}

uint64_t esa_weights_seed(const esa_wanted *e)
{
    uint64_t h = UINT64_C(14695981039346656037); /* FNV-1a */
    for (const char *c = e->name; *c; c++) h = (h ^ (uint8_t)*c) * UINT64_C(1099511628211);
    return h;
}
