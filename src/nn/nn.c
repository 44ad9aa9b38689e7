/* nn.c - memory, threads and the BLAS for the operations of nn.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An OpenBLAS that starts its own threads inside our workers makes two pools compete for the same
 * cores. While the engine works, it is therefore set to one thread, and our pool splits the rows of
 * every product; the old setting is restored afterwards. The setting belongs to the process:
 * another thread of the caller that multiplies matrices at that moment gets one thread too. BLAS
 * libraries without such a call are left as they are. */
#include "nn/nn.h"

#include <time.h>

/* Weak, so that any CBLAS links. */
extern void openblas_set_num_threads(int threads) __attribute__((weak));
extern int openblas_get_num_threads(void) __attribute__((weak));

double esa_nn_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void esa_nn_init(esa_nn *nn, esa_ctx *ctx) { *nn = (esa_nn){ .ctx = ctx, .be = &esa_backend_cpu }; }

void esa_nn_close(esa_nn *nn)
{
    esa_nn_free(nn, nn->scratch, nn->scratch_bytes);
    nn->scratch = NULL;
    nn->scratch_bytes = 0;
}

void esa_nn_enter(esa_nn *nn)
{
    if (nn->entered++ || !openblas_get_num_threads || !openblas_set_num_threads) return;
    nn->blas_threads = openblas_get_num_threads();
    if (nn->blas_threads != 1) openblas_set_num_threads(1);
}

void esa_nn_leave(esa_nn *nn)
{
    if (--nn->entered || !openblas_get_num_threads || !openblas_set_num_threads) return;
    if (nn->blas_threads != 1) openblas_set_num_threads(nn->blas_threads);
}

esa_status esa_nn_alloc(esa_nn *nn, void **ptr, int64_t bytes, const char *what)
{
    *ptr = esa_mem_alloc(&nn->ctx->mem, bytes);
    if (!*ptr)
        return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for %s: %lld bytes", what,
                        (long long)bytes);
    nn->held += bytes;
    nn->peak = esa_max64(nn->peak, nn->held);
    return ESA_OK;
}

void esa_nn_free(esa_nn *nn, void *ptr, int64_t bytes)
{
    if (!ptr) return;
    esa_mem_free(&nn->ctx->mem, ptr, bytes);
    nn->held -= bytes;
}

esa_status esa_nn_scratch(esa_nn *nn, void **ptr, int64_t bytes)
{
    if (bytes > nn->scratch_bytes) {
        esa_nn_free(nn, nn->scratch, nn->scratch_bytes);
        nn->scratch = NULL;
        nn->scratch_bytes = 0;
        ESA_TRY(esa_nn_alloc(nn, &nn->scratch, bytes, "scratch"));
        nn->scratch_bytes = bytes;
    }
    *ptr = nn->scratch;
    return ESA_OK;
}

typedef struct rows_job {
    esa_nn_rows_fn fn;
    void *arg;
    int64_t rows, piece;
} rows_job;

static void run_piece(void *arg, int64_t item, int32_t worker)
{
    const rows_job *j = arg;
    const int64_t first = item * j->piece;
    j->fn(j->arg, first, esa_min64(j->piece, j->rows - first), worker);
}

void esa_nn_parallel(esa_nn *nn, esa_nn_rows_fn fn, void *arg, int64_t rows, int64_t piece)
{
    rows_job job = { fn, arg, rows, piece };
    esa_pool_run(nn->ctx->pool, run_piece, &job, esa_ceil_div(rows, piece));
}
