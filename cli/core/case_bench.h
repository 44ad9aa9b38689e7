/* case_bench.h - times the calls of tests/cases/attention.def.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_CASE_BENCH_H
#define ESA_CLI_CASE_BENCH_H

#include <stdint.h>

typedef struct case_bench_params {
    int device;      /* ESA_DEVICE_* */
    int64_t threads; /* 0: one per core */
    int64_t rounds;
    uint64_t seed;
} case_bench_params;

/* Times the cases that match one of the shell patterns in `globs`, which commas separate, and
 * prints a table; "list" prints the names of all. argv holds the options that were given. */
int case_bench(const char *globs, int argc, char **argv, const case_bench_params *p);

#endif
