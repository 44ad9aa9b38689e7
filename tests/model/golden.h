/* golden.h - reads the golden files of the engine's tests.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_GOLDEN_H
#define ESA_TESTS_MODEL_GOLDEN_H

#include "io/scratch.h"
#include <math.h>
#include "esa/esa_tensors.h"

/* tests/golden/NAME, from $ESA_TEST_GOLDEN (ctest sets it; the live test points it elsewhere). */
static inline esa_tensors *golden_open(esa_ctx *ctx, const char *name)
{
    const char *folder = getenv("ESA_TEST_GOLDEN");
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder && *folder ? folder : "tests/golden", name);
    esa_tensors *file = NULL;
    if (esa_tensors_open(ctx, &file, path) != ESA_OK) print_error("%s\n", esa_ctx_error(ctx));
    assert_non_null(file);
    return file;
}

static inline const float *golden_find(const esa_tensors *file, const char *name, int64_t *count)
{
    esa_tensor_info info = { .struct_size = sizeof info };
    const esa_status status = esa_tensors_find(file, name, &info);
    if (status != ESA_OK) print_error("golden: no tensor %s\n", name);
    assert_int_equal(status, ESA_OK);
    assert_int_equal(info.dtype, ESA_FILE_F32);
    assert_true(((uintptr_t)info.data & 3) == 0);
    *count = info.bytes / 4;
    return info.data;
}

/* Largest |a[i * every] - b[i]| over scale. NaN counts as infinite. */
static inline double golden_error(const float *a, int64_t every, const float *b, int64_t count,
                                  double scale)
{
    double worst = 0;
    for (int64_t i = 0; i < count; i++) {
        const double e = fabs((double)a[i * every] - (double)b[i]);
        if (!(e <= worst)) worst = isnan(e) ? INFINITY : e;
    }
    return worst / scale;
}

#endif
