/* store_kit.h - what the tests of the store share: a ctx with a GPU, and reading its memory.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_STORE_KIT_H
#define ESA_TESTS_MODEL_STORE_KIT_H

#include "model/store_file.h"

static esa_ctx *ctx;
static esa_nn nn;
static int32_t stand_in;

static inline int begin(void **state)
{
    (void)state;
    esa_device_info info = { .struct_size = sizeof info };
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 2;
    if (esa_ctx_create(&ctx, &p) || esa_device_get_info(ctx, &info)) return -1;
    stand_in = strcmp(info.name, "stand-in") == 0;
    esa_nn_init(&nn, ctx);
    return esa_nn_use(&nn, ESA_DEVICE_CUDA) ? -1 : 0;
}

static inline int end(void **state)
{
    (void)state;
    esa_nn_close(&nn);
    esa_ctx_free(ctx);
    return 0;
}

static inline void must(esa_status status)
{
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(ctx));
}

static inline void refused(esa_status got, esa_status want, const char *word)
{
    if (got != want || !strstr(esa_ctx_error(ctx), word))
        fail_msg("%s instead of %s, \"%s\" should mention \"%s\"", esa_status_name(got),
                 esa_status_name(want), esa_ctx_error(ctx), word);
}

/* Bytes and scales of a tensor on the device; the caller frees. */
static inline uint8_t *read_view(const part_tensor *t, int64_t *bytes)
{
    const int64_t data = part_count(t) * esa_view_element(t->view.dtype),
                  scales = t->view.dtype == ESA_DTYPE_F8 ? 4 * t->dim[0] : 0;
    uint8_t *out = malloc((size_t)(data + scales));
    assert_non_null(t->view.data);
    assert_int_equal(scales > 0, t->view.scale != NULL);
    must(nn.be->download(ctx, out, t->view.data, data));
    if (scales) must(nn.be->download(ctx, out + data, t->view.scale, scales));
    *bytes = data + scales;
    return out;
}

#endif
