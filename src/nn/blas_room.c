/* blas_room.c - sees that the BLAS has its memory before it is used.
 * SPDX-License-Identifier: Apache-2.0
 *
 * OpenBLAS works in buffers of 128 MiB of address space, one for each thread that calls it at the
 * same time and one for each thread of its own. It takes them when they are first needed and keeps
 * them. If the system refuses one, it asks again, for ever. So where the address space is limited
 * (ulimit -v) the room is tested first, and then the buffers of our threads are taken at once,
 * before the model takes what is left.
 *
 * Other CBLAS libraries are left as they are. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "nn/nn.h"

#include <sys/mman.h>
#include <sys/resource.h>

/* Weak, so that any CBLAS links. */
extern int openblas_get_num_threads(void) __attribute__((weak));
extern void *blas_memory_alloc(int position) __attribute__((weak));
extern void blas_memory_free(void *buffer) __attribute__((weak));

/* A buffer of OpenBLAS on x86-64 and ARM64, and what the system's own records add. */
#define BUFFER_BYTES (INT64_C(129) << 20)
enum { MOST = ESA_MAX_THREADS + 1024 };

static int32_t is_limited(void)
{
    struct rlimit space, data;
    return (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) ||
           (getrlimit(RLIMIT_DATA, &data) == 0 && data.rlim_cur != RLIM_INFINITY);
}

/* 1 if so many buffers could be mapped at the same time. */
static int32_t has_room(int32_t buffers)
{
    void *part[MOST];
    int32_t n = 0;
    for (; n < buffers; n++) {
        part[n] = mmap(NULL, (size_t)BUFFER_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (part[n] == MAP_FAILED) break;
    }
    for (int32_t i = 0; i < n; i++) munmap(part[i], (size_t)BUFFER_BYTES);
    return n == buffers;
}

static void take_buffers(int32_t buffers)
{
    void *buffer[ESA_MAX_THREADS];
    if (!blas_memory_alloc || !blas_memory_free) return;
    for (int32_t i = 0; i < buffers; i++) buffer[i] = blas_memory_alloc(0);
    for (int32_t i = 0; i < buffers; i++) blas_memory_free(buffer[i]);
}

esa_status esa_nn_blas_ready(esa_nn *nn)
{
    const int32_t threads = esa_pool_threads(nn->ctx->pool);
    if (nn->ctx->blas_ready || !openblas_get_num_threads || !is_limited()) return ESA_OK;
    /* its own threads take theirs while it is loaded, or soon after */
    const int32_t own = openblas_get_num_threads() - 1, most = MOST - ESA_MAX_THREADS;
    const int32_t buffers = threads + (own < 0 ? 0 : own > most ? most : own);
    if (!has_room(buffers))
        return esa_fail(nn->ctx, ESA_ERR_MEMORY,
                        "out of memory: OpenBLAS needs %d x 128 MiB of address space, and the "
                        "limit of this process (ulimit -v) leaves less: raise it, or use fewer "
                        "threads (this ctx has %d, OpenBLAS's own are set by "
                        "OPENBLAS_NUM_THREADS)",
                        (int)buffers, (int)threads);
    take_buffers(threads);
    nn->ctx->blas_ready = 1;
    return ESA_OK;
}
