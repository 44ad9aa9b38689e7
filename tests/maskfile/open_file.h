/* open_file.h - a mask file that a test opens with its one context, and the file's info.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MASKFILE_OPEN_FILE_H
#define ESA_TESTS_MASKFILE_OPEN_FILE_H

#include "session/mini_model.h"
#include "common/one_ctx.h"

static inline esa_mask_file *open_file(const char *path)
{
    esa_mask_file *f;
    ok(ctx, esa_mask_file_open(ctx, &f, path));
    return f;
}

static inline esa_mask_file_info info_of(const esa_mask_file *f)
{
    esa_mask_file_info i = { .struct_size = sizeof i };
    assert_int_equal(esa_mask_file_get_info(f, &i), ESA_OK);
    return i;
}

#endif
