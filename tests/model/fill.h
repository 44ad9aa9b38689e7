/* fill.h - numbers that Python (tools/golden/fill.py) and C compute alike: element i of tensor
 * `name` is a hash of both.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_FILL_H
#define ESA_TESTS_MODEL_FILL_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t fill_name(const char *name)
{
    uint64_t h = UINT64_C(14695981039346656037);
    for (; *name; name++) h = (h ^ (uint8_t)*name) * UINT64_C(1099511628211);
    return h;
}

/* A multiple of 2^-23 in [-1, 1). */
static inline float fill_unit(uint64_t name, int64_t i)
{
    uint64_t z = name + (uint64_t)(i + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    z ^= z >> 31;
    return (float)((int64_t)(z >> 40) - (1 << 23)) / (float)(1 << 23);
}

static inline void fill_tensor(float *out, int64_t count, const char *name, float scale,
                               float offset)
{
    const uint64_t h = fill_name(name);
    for (int64_t i = 0; i < count; i++) {
        /* rounded before the sum, as numpy does */
        const volatile float product = fill_unit(h, i) * scale;
        out[i] = product + offset;
    }
}

/* A weight by its name and shape, as fill.weight in Python. */
static inline void fill_weight(float *out, const char *name, int32_t rank, const int64_t *dim)
{
    int64_t count = 1, fan_in = 1;
    for (int32_t i = 0; i < rank; i++) {
        count *= dim[i];
        if (i) fan_in *= dim[i];
    }
    const char *last = strrchr(name, '.'), *before = last;
    while (before && before > name && before[-1] != '.') before--;
    char parent[64] = "";
    if (last && before && (size_t)(last - before) < sizeof parent)
        memcpy(parent, before, (size_t)(last - before));
    const size_t n = strlen(name);
    if (last && strcmp(last, ".weight") == 0 && strstr(parent, "norm"))
        fill_tensor(out, count, name, 0.5f, 1.5f);
    else if (n >= 17 && strcmp(name + n - 17, "scale_shift_table") == 0)
        fill_tensor(out, count, name, 0.5f, 0);
    else if (rank == 1)
        fill_tensor(out, count, name, 0.25f, 0);
    else
        fill_tensor(out, count, name, (float)sqrt(3.0 / (double)fan_in), 0);
}

#endif
