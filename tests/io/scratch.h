/* scratch.h - helpers of the file tests: a folder of their own, whole files, an allocator that
 * counts and fails on demand.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_IO_SCRATCH_H
#define ESA_TESTS_IO_SCRATCH_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/counting.h"
#include "common/tests.h"
#include "esa/esa.h"

typedef struct scratch {
    char dir[256];
    char path[640];
} scratch;

static inline scratch scratch_make(void)
{
    scratch s;
    const char *root = getenv("TMPDIR");
    snprintf(s.dir, sizeof s.dir, "%s/esa-test-XXXXXX",
             root && *root && strlen(root) < 200 ? root : "/tmp");
    assert_non_null(mkdtemp(s.dir));
    return s;
}

/* Full path of a name; valid until the next call on the same scratch. */
static inline const char *scratch_path(scratch *s, const char *name)
{
    snprintf(s->path, sizeof s->path, "%s/%s", s->dir, name);
    return s->path;
}

/* Number of files in the folder. */
static inline int scratch_count(const scratch *s)
{
    int n = 0;
    DIR *d = opendir(s->dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.' || (e->d_name[1] && strcmp(e->d_name, "..") != 0);
    closedir(d);
    return n;
}

static inline void scratch_remove(scratch *s)
{
    DIR *d = opendir(s->dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            unlink(scratch_path(s, e->d_name));
    closedir(d);
    assert_int_equal(rmdir(s->dir), 0);
}

static inline void scratch_write(const char *path, const void *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    if (n) assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* The whole file; the caller frees. */
static inline uint8_t *scratch_read(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    *n = (size_t)ftell(f);
    rewind(f);
    uint8_t *bytes = malloc(*n ? *n : 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *n, f), *n);
    fclose(f);
    return bytes;
}

static inline int scratch_same(const char *a, const char *b)
{
    size_t na, nb;
    uint8_t *x = scratch_read(a, &na), *y = scratch_read(b, &nb);
    const int same = na == nb && memcmp(x, y, na) == 0;
    free(x);
    free(y);
    return same;
}

static inline esa_ctx *counting_ctx(counting *c, int32_t threads)
{
    *c = (counting){ .left = -1 };
    const esa_ctx_params p = counting_params(c, threads);
    esa_ctx *ctx = NULL;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

/* Checks the status, and that the message contains each of the words (NULL ends the list). */
static inline void assert_refused(const esa_ctx *ctx, esa_status status, esa_status expected, ...)
{
    if (status != expected)
        fail_msg("status %s, expected %s: %s", esa_status_name(status), esa_status_name(expected),
                 esa_ctx_error(ctx));
    va_list words;
    va_start(words, expected);
    for (const char *w; (w = va_arg(words, const char *));)
        if (!strstr(esa_ctx_error(ctx), w))
            fail_msg("'%s' is missing in: %s", w, esa_ctx_error(ctx));
    va_end(words);
    assert_true(esa_ctx_error(ctx)[0] != 0);
}

#endif
