/* pool.h - a small thread pool: a parallel for with dynamic scheduling. Idle threads sleep.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_BASE_POOL_H
#define ESA_BASE_POOL_H

#include "base/engine.h"
#include "base/memory.h"

typedef struct esa_pool esa_pool;

/* item: 0 .. items-1; each runs exactly once. worker: 0 .. threads-1, the number of the thread in
 * this run; use it to index scratch. */
typedef void (*esa_pool_fn)(void *arg, int64_t item, int32_t worker);

/* threads >= 1. The calling thread is worker 0, so threads - 1 are started. If the system refuses a
 * thread, the pool has those that it got; esa_pool_refused is then the error (an errno), else 0. */
esa_status esa_pool_create(esa_pool **pool, int32_t threads, const esa_allocator *mem);
int32_t esa_pool_refused(const esa_pool *pool);
void esa_pool_free(esa_pool *pool);
/* 1 in a child process of the one that made the pool (fork). There a run does everything on the
 * calling thread. */
int32_t esa_pool_forked(const esa_pool *pool);
ESA_ENGINE int32_t esa_pool_threads(const esa_pool *pool);
/* Runs fn on all items and returns when all are done. Items start in ascending order. Not
 * reentrant. */
ESA_ENGINE void esa_pool_run(esa_pool *pool, esa_pool_fn fn, void *arg, int64_t items);

#endif
