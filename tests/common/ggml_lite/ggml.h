/* ggml.h - a stand-in for the part of ggml that examples/06_ggml.c uses.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Own code with ggml's names and meaning, as its header documents them: tensors with sizes ne and
 * byte strides nb, views, custom operations, and a graph that threads compute node by node. As in
 * ggml, every thread calls a custom operation with its number ith of nth, and no thread starts the
 * next node before all have ended this one. tests/install/check_ggml.py builds the example with a
 * real ggml. Header only, for one source file. */
#ifndef ESA_TESTS_GGML_LITE_H
#define ESA_TESTS_GGML_LITE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define GGML_MAX_DIMS    4
#define GGML_MAX_SRC     10
#define GGML_N_TASKS_MAX (-1)

enum ggml_type { GGML_TYPE_F32 = 0, GGML_TYPE_F16 = 1, GGML_TYPE_BF16 = 30 };
enum ggml_status { GGML_STATUS_FAILED = -1, GGML_STATUS_SUCCESS = 0 };

struct ggml_tensor;
typedef void (*ggml_custom_op_t)(struct ggml_tensor *dst, int ith, int nth, void *userdata);

struct ggml_tensor {
    enum ggml_type type;
    int64_t ne[GGML_MAX_DIMS]; /* elements */
    size_t nb[GGML_MAX_DIMS];  /* strides in bytes */
    struct ggml_tensor *src[GGML_MAX_SRC];
    void *data;
    ggml_custom_op_t fun; /* NULL: not a custom operation */
    void *userdata;
};

struct ggml_init_params {
    size_t mem_size;
    void *mem_buffer; /* must be NULL here */
    bool no_alloc;    /* must be false here */
};

struct ggml_context {
    char *memory;
    size_t size, used;
};

enum { GGML_LITE_NODES = 64 };
struct ggml_cgraph {
    int count;
    struct ggml_tensor *node[GGML_LITE_NODES];
};

static inline struct ggml_context *ggml_init(struct ggml_init_params params)
{
    struct ggml_context *ctx = malloc(sizeof *ctx);
    if (!ctx || params.mem_buffer || params.no_alloc) abort();
    ctx->size = params.mem_size / 64 * 64;
    ctx->used = 0;
    ctx->memory = aligned_alloc(64, ctx->size);
    if (!ctx->memory) abort();
    return ctx;
}

static inline void ggml_free(struct ggml_context *ctx)
{
    free(ctx->memory);
    free(ctx);
}

/* As in ggml, a context that is full ends the program. */
static inline void *ggml_lite_take(struct ggml_context *ctx, size_t bytes)
{
    void *const ptr = ctx->memory + ctx->used;
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > ctx->size - ctx->used) abort();
    ctx->used += bytes;
    return ptr;
}

static inline size_t ggml_type_size(enum ggml_type type) { return type == GGML_TYPE_F32 ? 4 : 2; }

static inline struct ggml_tensor *ggml_new_tensor_4d(struct ggml_context *ctx, enum ggml_type type,
                                                     int64_t ne0, int64_t ne1, int64_t ne2,
                                                     int64_t ne3)
{
    struct ggml_tensor *t = ggml_lite_take(ctx, sizeof *t);
    *t = (struct ggml_tensor){ .type = type, .ne = { ne0, ne1, ne2, ne3 } };
    t->nb[0] = ggml_type_size(type);
    for (int i = 1; i < GGML_MAX_DIMS; i++) t->nb[i] = t->nb[i - 1] * (size_t)t->ne[i - 1];
    t->data = ggml_lite_take(ctx, t->nb[3] * (size_t)ne3);
    return t;
}

/* A view: axis i of a becomes axis axis_i. */
static inline struct ggml_tensor *ggml_permute(struct ggml_context *ctx, struct ggml_tensor *a,
                                               int axis0, int axis1, int axis2, int axis3)
{
    const int axis[GGML_MAX_DIMS] = { axis0, axis1, axis2, axis3 };
    struct ggml_tensor *t = ggml_lite_take(ctx, sizeof *t);
    *t = *a;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        t->ne[axis[i]] = a->ne[i];
        t->nb[axis[i]] = a->nb[i];
    }
    t->fun = NULL;
    t->src[0] = a;
    for (int i = 1; i < GGML_MAX_SRC; i++) t->src[i] = NULL;
    return t;
}

static inline struct ggml_tensor *ggml_custom_4d(struct ggml_context *ctx, enum ggml_type type,
                                                 int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3,
                                                 struct ggml_tensor **args, int n_args,
                                                 ggml_custom_op_t fun, int n_tasks, void *userdata)
{
    struct ggml_tensor *t = ggml_new_tensor_4d(ctx, type, ne0, ne1, ne2, ne3);
    (void)n_tasks; /* ggml sizes its plan by it; all threads call the operation */
    for (int i = 0; i < n_args; i++) t->src[i] = args[i];
    t->fun = fun;
    t->userdata = userdata;
    return t;
}

static inline struct ggml_cgraph *ggml_new_graph(struct ggml_context *ctx)
{
    struct ggml_cgraph *graph = ggml_lite_take(ctx, sizeof *graph);
    graph->count = 0;
    return graph;
}

/* What a tensor is made of comes before it. */
static inline void ggml_build_forward_expand(struct ggml_cgraph *graph, struct ggml_tensor *tensor)
{
    for (int i = 0; i < graph->count; i++)
        if (graph->node[i] == tensor) return;
    for (int i = 0; i < GGML_MAX_SRC && tensor->src[i]; i++)
        ggml_build_forward_expand(graph, tensor->src[i]);
    if (graph->count == GGML_LITE_NODES) abort();
    graph->node[graph->count++] = tensor;
}

#endif
