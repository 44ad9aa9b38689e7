/* case_alone.h - the command that runs one case alone.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_CASE_ALONE_H
#define ESA_TESTS_CASE_ALONE_H

#include <errno.h> /* program_invocation_name, with _GNU_SOURCE */
#include <stdio.h>
#include <stdlib.h>
#include "cases/match.h"

/* Prints the command, with the variables that this run has. */
static inline void case_alone(const char *name)
{
    static const char *const variable[] = { "ESA_TEST_DEVICE", "ESA_CUDA", "ESA_CUDA_LIB",
                                            "ESA_CPU",         "ESA_SEED", "ESA_TEST_TIGHT" };
    printf("    alone:");
    for (size_t i = 0; i < sizeof variable / sizeof variable[0]; i++)
        if (getenv(variable[i])) printf(" %s=%s", variable[i], getenv(variable[i]));
    printf(" ESA_TEST_CASE='%s' %s\n", name, program_invocation_name);
}

#endif
