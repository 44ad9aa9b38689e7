/* ggml-cpu.h - computes the graphs of the stand-in for ggml (ggml.h beside it).
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_GGML_CPU_LITE_H
#define ESA_TESTS_GGML_CPU_LITE_H

#include <pthread.h>

#include "ggml.h"

struct ggml_lite_thread {
    struct ggml_cgraph *graph;
    int ith, nth;
    pthread_barrier_t *all;
};

static inline void *ggml_lite_work(void *user)
{
    const struct ggml_lite_thread *own = user;
    for (int i = 0; i < own->graph->count; i++) {
        struct ggml_tensor *node = own->graph->node[i];
        if (node->fun) node->fun(node, own->ith, own->nth, node->userdata);
        pthread_barrier_wait(own->all);
    }
    return NULL;
}

/* Threads of its own for every graph; ggml keeps them. */
static inline enum ggml_status ggml_graph_compute_with_ctx(struct ggml_context *ctx,
                                                           struct ggml_cgraph *graph, int n_threads)
{
    enum { MOST = 16 };
    struct ggml_lite_thread own[MOST];
    pthread_t thread[MOST];
    pthread_barrier_t all;
    (void)ctx;
    if (n_threads < 1 || n_threads > MOST) return GGML_STATUS_FAILED;
    pthread_barrier_init(&all, NULL, (unsigned)n_threads);
    for (int i = 0; i < n_threads; i++)
        own[i] = (struct ggml_lite_thread){ graph, i, n_threads, &all };
    for (int i = 1; i < n_threads; i++)
        if (pthread_create(&thread[i], NULL, ggml_lite_work, &own[i])) abort();
    ggml_lite_work(&own[0]);
    for (int i = 1; i < n_threads; i++) pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&all);
    return GGML_STATUS_SUCCESS;
}

#endif
