/* pool.c - a pthread pool.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An atomic counter hands out the items of a run, so a slow item never delays the others. Between
 * runs, workers spin for some microseconds and then sleep on a condition variable: attention is
 * several short runs in a row, and waking a thread costs as much as a small run.
 *
 * A child process made by fork() has none of the workers, and locks may be held by threads that it
 * does not have. So a run there does all items on the calling thread, and esa_pool_free neither
 * joins nor takes a lock. */
#define _GNU_SOURCE /* MADV_WIPEONFORK */
#include "base/pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#define SPINS 1000 /* polls before sleeping: 20 to 50 microseconds */
#define LINE  64   /* bytes of a cache line; memory comes aligned to it */

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

typedef struct pool_worker {
    struct esa_pool *pool;
    pthread_t thread;
    int32_t id;
} pool_worker;

struct esa_pool {
    esa_allocator mem;
    int32_t threads; /* workers, including the caller */
    int32_t refused; /* error of pthread_create; 0: all threads that were asked for run */
    pid_t process;   /* that made the pool */
    /* A page that the system clears in a child process: 1 in the process that made the pool. NULL
     * where the system cannot do that; then process tells, at the price of a system call. */
    const volatile int32_t *mark;
    int64_t mark_bytes;
    int64_t bytes;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    int32_t quit;
    esa_pool_fn fn;
    void *arg;
    int64_t items;
    /* Each on a cache line of its own: idle workers poll the first, the caller polls the second,
     * and all threads write the third for every item. */
    _Alignas(LINE) _Atomic uint64_t
        generation;                         /* counts runs; a worker that sees a new one joins */
    _Alignas(LINE) _Atomic int32_t running; /* workers still inside the current run */
    _Alignas(LINE) _Atomic int64_t next;
    _Alignas(LINE) pool_worker worker[]; /* [threads - 1] */
};

static void pool_drain(esa_pool *pool, int32_t id)
{
    const esa_pool_fn fn = pool->fn;
    void *const arg = pool->arg;
    const int64_t items = pool->items;
    for (;;) {
        const int64_t item = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (item >= items) return;
        fn(arg, item, id);
    }
}

static void *pool_main(void *arg)
{
    pool_worker *w = arg;
    esa_pool *pool = w->pool;
    uint64_t seen = 0, now = 0;
    for (;;) {
        for (int32_t i = 0; i < SPINS && now == seen; i++) {
            relax();
            now = atomic_load_explicit(&pool->generation, memory_order_acquire);
        }
        /* A worker that saw the new run needs no lock, for which all others would wait: the run
         * cannot end without it. */
        if (now == seen) {
            pthread_mutex_lock(&pool->lock);
            while (atomic_load(&pool->generation) == seen && !pool->quit)
                pthread_cond_wait(&pool->wake, &pool->lock);
            const int32_t quit = pool->quit;
            now = atomic_load(&pool->generation);
            pthread_mutex_unlock(&pool->lock);
            if (quit) return NULL;
        }
        seen = now;
        pool_drain(pool, w->id);
        /* The last worker signals. The lock keeps the signal from being lost. */
        if (atomic_fetch_sub(&pool->running, 1) == 1) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
    }
}

static void make_mark(esa_pool *pool)
{
    pool->process = getpid();
#ifdef MADV_WIPEONFORK
    const long page = sysconf(_SC_PAGESIZE);
    if (page < (long)sizeof(int32_t)) return;
    void *mark = mmap(NULL, (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                      0);
    if (mark == MAP_FAILED) return;
    if (madvise(mark, (size_t)page, MADV_WIPEONFORK)) {
        munmap(mark, (size_t)page);
        return;
    }
    *(int32_t *)mark = 1;
    pool->mark = mark;
    pool->mark_bytes = page;
#endif
}

int32_t esa_pool_forked(const esa_pool *pool)
{
    return pool->mark ? !*pool->mark : getpid() != pool->process;
}

esa_status esa_pool_create(esa_pool **out, int32_t threads, const esa_allocator *mem)
{
    *out = NULL;
    const int64_t bytes = (int64_t)sizeof(esa_pool) + (threads - 1) * (int64_t)sizeof(pool_worker);
    esa_pool *pool = esa_mem_zalloc(mem, bytes);
    if (!pool) return ESA_ERR_MEMORY;
    pool->mem = *mem;
    pool->threads = 1;
    pool->bytes = bytes;
    make_mark(pool);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    for (int32_t i = 0; i < threads - 1 && !pool->refused; i++) {
        pool->worker[i].pool = pool;
        pool->worker[i].id = i + 1;
        pool->refused = pthread_create(&pool->worker[i].thread, NULL, pool_main, &pool->worker[i]);
        if (!pool->refused) pool->threads++;
    }
    *out = pool;
    return ESA_OK;
}

static void stop_workers(esa_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->quit = 1;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->threads - 1; i++) pthread_join(pool->worker[i].thread, NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
}

void esa_pool_free(esa_pool *pool)
{
    if (!pool) return;
    if (!esa_pool_forked(pool)) stop_workers(pool);
    if (pool->mark) munmap((void *)pool->mark, (size_t)pool->mark_bytes);
    const esa_allocator mem = pool->mem;
    esa_mem_free(&mem, pool, pool->bytes);
}

int32_t esa_pool_refused(const esa_pool *pool) { return pool->refused; }
int32_t esa_pool_threads(const esa_pool *pool) { return pool->threads; }

void esa_pool_run(esa_pool *pool, esa_pool_fn fn, void *arg, int64_t items)
{
    if (items <= 0) return;
    if (pool->threads == 1 || items == 1 || esa_pool_forked(pool)) {
        for (int64_t i = 0; i < items; i++) fn(arg, i, 0);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->arg = arg;
    pool->items = items;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store(&pool->running, pool->threads - 1);
    atomic_fetch_add(&pool->generation, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    pool_drain(pool, 0);
    for (int32_t i = 0; i < SPINS && atomic_load_explicit(&pool->running, memory_order_acquire);
         i++)
        relax();
    pthread_mutex_lock(&pool->lock);
    while (atomic_load(&pool->running)) pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
