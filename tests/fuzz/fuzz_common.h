/* fuzz_common.h - what the file fuzzers share: a context, seeds, and a mutator that knows that the
 * first eight bytes of a file are the length of its header.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Seeds are made by the target itself when it starts and handed out by the mutator. The corpus
 * (tests/fuzz/corpus/fuzz_x) keeps what was found from them:
 *     fuzz_x -max_total_time=60 FOUND CORPUS   fuzzes from both, and writes to the folder FOUND
 *     fuzz_x --make-seeds FOLDER               writes the seeds into a folder, to look at */
#ifndef ESA_TESTS_FUZZ_COMMON_H
#define ESA_TESTS_FUZZ_COMMON_H

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "esa/esa.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed);

#define FUZZ_SEEDS 64

static esa_ctx *fuzz_ctx;
static struct {
    uint8_t *bytes;
    size_t size;
} fuzz_seed[FUZZ_SEEDS];
static int fuzz_seeds;

/* The target's own: writes its seeds into a folder; 0 on success. */
static int make_seeds(const char *folder);

static void must(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "broken promise: %s (%s)\n", what, esa_ctx_error(fuzz_ctx));
    abort();
}

static void keep_seed(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f) return;
    uint8_t buffer[8192];
    const size_t n = fread(buffer, 1, sizeof buffer, f);
    fclose(f);
    if (fuzz_seeds == FUZZ_SEEDS || n == sizeof buffer) return;
    fuzz_seed[fuzz_seeds].bytes = malloc(n + 1);
    if (!fuzz_seed[fuzz_seeds].bytes) return;
    memcpy(fuzz_seed[fuzz_seeds].bytes, buffer, n);
    fuzz_seed[fuzz_seeds++].size = n;
}

/* Through a folder of its own, which is removed again. */
static int load_seeds(void)
{
    char folder[] = "/tmp/esa-fuzz-XXXXXX", path[512];
    if (!mkdtemp(folder)) return 1;
    const int bad = make_seeds(folder);
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        keep_seed(path);
        unlink(path);
    }
    if (d) closedir(d);
    rmdir(folder);
    return bad || !fuzz_seeds;
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1;
    p.cpu_level = ESA_CPU_REF;
    if (esa_ctx_create(&fuzz_ctx, &p) != ESA_OK) exit(1);
    if (*argc == 3 && strcmp((*argv)[1], "--make-seeds") == 0) exit(make_seeds((*argv)[2]));
    if (load_seeds()) {
        fprintf(stderr, "the seeds could not be made: %s\n", esa_ctx_error(fuzz_ctx));
        exit(1);
    }
    return 0;
}

/* Now and then a seed as it is; three times in four only the header's text changes and its length
 * is set right, so that what lies behind the first check is reached. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    if (size < 8 || seed % 61 == 0) {
        const int i = (int)(seed / 61 % (unsigned)fuzz_seeds);
        if (fuzz_seed[i].size <= max) {
            memcpy(data, fuzz_seed[i].bytes, fuzz_seed[i].size);
            return fuzz_seed[i].size;
        }
    }
    uint64_t length = 0;
    if (size >= 8) memcpy(&length, data, 8);
    if (size < 8 || length > size - 8 || seed % 4 == 0) return LLVMFuzzerMutate(data, size, max);
    const size_t rest = size - 8 - (size_t)length;
    uint8_t *tail = malloc(rest + 1);
    if (!tail) return size;
    memcpy(tail, data + 8 + length, rest);
    const size_t header = LLVMFuzzerMutate(data + 8, (size_t)length, max - 8 - rest);
    memcpy(data + 8 + header, tail, rest);
    free(tail);
    length = header;
    memcpy(data, &length, 8);
    return 8 + header + rest;
}

#endif
