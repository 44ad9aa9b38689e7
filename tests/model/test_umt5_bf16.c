/* test_umt5_bf16.c - the text encoder on the CPU in bf16 against f32.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/umt5_bf16.h"

static void as_close_as_transformers(void **unused)
{
    (void)unused;
    if (!host_has_bf16()) skip();
    compare_cases(ON_HOST_BF16);
}

static void wan_tiny(void **unused)
{
    (void)unused;
    if (!host_has_bf16()) skip();
    compare_tiny(ON_HOST_BF16);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(as_close_as_transformers),
                                        cmocka_unit_test(wan_tiny) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
