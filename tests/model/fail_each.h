/* fail_each.h - lets every allocation in the life of a part fail once.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_FAIL_EACH_H
#define ESA_TESTS_MODEL_FAIL_EACH_H

#include "io/scratch.h"

static char message[600]; /* of life: its message, before trimming clears it */

/* Each failure gives a status and a message, and leaks nothing; life returns the first of them, and
 * trims the ctx. There are more than `least` allocations. */
static inline void fail_each(esa_status (*life)(esa_ctx *ctx, void *from), void *from,
                             int64_t least)
{
    counting count;
    esa_ctx *ctx = counting_ctx(&count, 1);
    const int64_t before = count.live;
    int64_t failures = 0;
    esa_status status;
    do {
        count.left = failures;
        status = life(ctx, from);
        if (status) {
            if (status != ESA_ERR_MEMORY)
                print_error("allocation %lld: %s: %s\n", (long long)failures,
                            esa_status_name(status), message);
            assert_int_equal(status, ESA_ERR_MEMORY);
            assert_true(strlen(message) > 10);
            failures++;
        }
        assert_int_equal(count.live, before);
    } while (status && failures < 5000);
    print_message("%lld allocations\n", (long long)failures);
    assert_true(failures > least);
    esa_ctx_free(ctx);
    assert_int_equal(count.live, 0);
}

#endif
