/* blas.c - opens the machine's CBLAS at run time. Benchmarks compare with it; the command does not
 * link to a BLAS.
 * SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "core/cli.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* dlsym returns an object pointer; POSIX promises that copying its bits into a function pointer
 * works. */
static void symbol(void *function, void *handle, const char *name)
{
    void *address = dlsym(handle, name);
    memcpy(function, &address, sizeof address);
}

/* 1 unless the address space is limited (ulimit -v) and too small for OpenBLAS, which takes 128 MiB
 * for each thread, and asks for ever if the system refuses. */
static int has_room(int threads)
{
    struct rlimit space;
    if (getrlimit(RLIMIT_AS, &space) != 0 || space.rlim_cur == RLIM_INFINITY) return 1;
    setenv("OPENBLAS_NUM_THREADS", "1", 0); /* while it is loaded; then `threads` is set */
    const size_t bytes = ((size_t)threads + 1) * ((size_t)129 << 20);
    void *room = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) return 0;
    munmap(room, bytes);
    return 1;
}

void cli_blas_open(cli_blas *blas, int threads)
{
    static const char *const names[] = { "libopenblas.so.0", "libopenblas.so", "libmkl_rt.so.2",
                                         "libmkl_rt.so",     "libblis.so.4",   "libcblas.so.3",
                                         "libblas.so.3" };
    static const char *const setters[] = { "openblas_set_num_threads", "MKL_Set_Num_Threads",
                                           "bli_thread_set_num_threads" };
    memset(blas, 0, sizeof *blas);
    if (!has_room(threads)) return;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && !blas->handle; i++) {
        void *handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!handle) continue;
        symbol(&blas->sgemm, handle, "cblas_sgemm");
        if (!blas->sgemm) {
            dlclose(handle);
            continue;
        }
        blas->handle = handle;
        snprintf(blas->name, sizeof blas->name, "%s", names[i]);
    }
    if (!blas->handle) return;
    const char *(*core)(void) = NULL;
    symbol(&core, blas->handle, "openblas_get_corename");
    if (core) snprintf(blas->core, sizeof blas->core, "%s", core());
    for (size_t i = 0; i < 2 && !blas->threads_set; i++) {
        void (*set)(int) = NULL;
        symbol(&set, blas->handle, setters[i]);
        if (set) {
            set(threads);
            blas->threads_set = 1;
        }
    }
    if (!blas->threads_set) { /* BLIS counts in its own integer type */
        void (*set)(int64_t) = NULL;
        symbol(&set, blas->handle, setters[2]);
        if (set) {
            set(threads);
            blas->threads_set = 1;
        }
    }
}

void cli_blas_close(cli_blas *blas)
{
    if (blas->handle) dlclose(blas->handle);
    memset(blas, 0, sizeof *blas);
}
