/* test_pool.c - the thread pool with 2 to 128 threads, more than the machine has: every item runs
 * once, a worker number belongs to one thread at a time, and threads that are kept busy do not keep
 * others from the rest.
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/tests.h"
#include "base/pool.h"

enum { MAX_ITEMS = 2000, MAX_THREADS = 128 };

static void *take(void *user, uint64_t bytes)
{
    (void)user;
    return aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
}

static void give(void *user, void *p, uint64_t bytes)
{
    (void)user;
    (void)bytes;
    free(p);
}

static const esa_allocator memory = { take, give, NULL };

typedef struct run {
    int32_t threads;
    _Atomic int32_t times[MAX_ITEMS], inside[MAX_THREADS], wrong;
    _Atomic int64_t last; /* largest item that has started, plus 1 */
    int64_t held;         /* worker of item 0 waits until so many others are done; 0: never */
    _Atomic int64_t done;
} run;

static void count_item(void *arg, int64_t item, int32_t worker)
{
    run *r = arg;
    if (worker < 0 || worker >= r->threads || atomic_fetch_add(&r->inside[worker], 1)) r->wrong++;
    atomic_fetch_add(&r->times[item], 1);
    int64_t last = atomic_load(&r->last);
    while (last <= item && !atomic_compare_exchange_weak(&r->last, &last, item + 1)) {}
    for (volatile int spin = 0; spin < (int)(item % 7) * 50; spin++) {}
    if (r->held && item == 0)
        while (atomic_load(&r->done) < r->held) {
            const struct timespec moment = { 0, 100000 };
            nanosleep(&moment, NULL);
        }
    else
        atomic_fetch_add(&r->done, 1);
    atomic_fetch_sub(&r->inside[worker], 1);
}

static run now;

static void check(esa_pool *pool, int64_t items, int64_t held)
{
    memset(&now, 0, sizeof now);
    now.threads = esa_pool_threads(pool);
    now.held = held;
    esa_pool_run(pool, count_item, &now, items);
    assert_int_equal(now.wrong, 0);
    assert_int_equal(now.last, items);
    for (int64_t i = 0; i < MAX_ITEMS; i++) assert_int_equal(now.times[i], i < items);
}

static void every_item_once(void **state)
{
    static const int32_t threads_of[] = { 1, 2, 3, 8, 16, 64, 128 };
    static const int64_t items_of[] = { 0, 1, 2, 3, 15, 64, 127, 128, 129, MAX_ITEMS };
    (void)state;
    for (size_t t = 0; t < sizeof threads_of / sizeof threads_of[0]; t++) {
        esa_pool *pool;
        assert_int_equal(esa_pool_create(&pool, threads_of[t], &memory), ESA_OK);
        assert_int_equal(esa_pool_threads(pool), threads_of[t]);
        /* runs in a row meet workers that spin; after a pause they sleep */
        for (int round = 0; round < 20; round++)
            for (size_t n = 0; n < sizeof items_of / sizeof items_of[0]; n++)
                check(pool, items_of[n], 0);
        const struct timespec pause = { 0, 5000000 };
        for (int round = 0; round < 3; round++) {
            nanosleep(&pause, NULL);
            check(pool, 129, 0);
        }
        esa_pool_free(pool);
    }
}

/* The first item ends only after all others: they must go to the other threads. */
static void a_long_item_delays_no_other(void **state)
{
    static const int32_t threads_of[] = { 2, 16, 128 };
    (void)state;
    for (size_t t = 0; t < sizeof threads_of / sizeof threads_of[0]; t++) {
        esa_pool *pool;
        assert_int_equal(esa_pool_create(&pool, threads_of[t], &memory), ESA_OK);
        for (int round = 0; round < 5; round++) check(pool, 500, 499);
        esa_pool_free(pool);
    }
}

/* Pools that never run, and that are freed while their workers spin or sleep. */
static void freed_at_any_time(void **state)
{
    (void)state;
    for (int round = 0; round < 50; round++) {
        esa_pool *pool;
        assert_int_equal(esa_pool_create(&pool, 1 + round % 9, &memory), ESA_OK);
        if (round % 3) check(pool, 10 * (round % 3), 0);
        esa_pool_free(pool);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_item_once),
        cmocka_unit_test(a_long_item_delays_no_other),
        cmocka_unit_test(freed_at_any_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
