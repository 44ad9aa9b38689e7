/* cpu_backend.c - the table of the CPU: host memory, kernels of src/cpu, selectors of src/select.
 * SPDX-License-Identifier: Apache-2.0 */
#include "backend/backend.h"

#include <string.h>
#include <time.h>
#include "cpu/attn_cpu.h"
#include "select/select.h"

static esa_status cpu_open(esa_ctx *ctx)
{
    (void)ctx;
    return ESA_OK;
}

static esa_status cpu_reach(esa_ctx *ctx, const esa_tensor *view, const char *name)
{
    (void)ctx;
    (void)view;
    (void)name;
    return ESA_OK;
}

static int32_t cpu_ordinal(const esa_ctx *ctx)
{
    (void)ctx;
    return 0;
}

/* ---------------------------------------------------------------- memory and marks */

static esa_status cpu_alloc(esa_ctx *ctx, void **ptr, int64_t bytes)
{
    *ptr = esa_mem_alloc(&ctx->mem, bytes);
    if (*ptr) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory: %lld bytes could not be allocated",
                    (long long)bytes);
}

static void cpu_release(esa_ctx *ctx, void *ptr, int64_t bytes)
{
    esa_mem_free(&ctx->mem, ptr, bytes);
}

static esa_status cpu_copy(esa_ctx *ctx, void *dst, const void *src, int64_t bytes)
{
    (void)ctx;
    if (bytes) memcpy(dst, src, (size_t)bytes);
    return ESA_OK;
}

static esa_status cpu_mark_record(esa_ctx *ctx, esa_mark *mark)
{
    (void)ctx;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    mark->seconds = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    return ESA_OK;
}

static esa_status cpu_mark_elapsed(esa_ctx *ctx, double *seconds, const esa_mark *from,
                                   const esa_mark *to)
{
    (void)ctx;
    *seconds = to->seconds - from->seconds;
    return ESA_OK;
}

static void cpu_mark_release(esa_ctx *ctx, esa_mark *mark)
{
    (void)ctx;
    (void)mark;
}

/* ---------------------------------------------------------------- attention */

static esa_attn_args with_kernels(const esa_ctx *ctx, const esa_attn_args *args)
{
    esa_attn_args a = *args;
    a.kern = esa_attn_cpu_kernels(ctx->kern, args);
    a.pool = ctx->pool;
    return a;
}

static int64_t cpu_attention_workspace(esa_ctx *ctx, const esa_attn_args *args)
{
    const esa_attn_args a = with_kernels(ctx, args);
    return esa_attn_cpu_workspace(&a);
}

static esa_status cpu_attention(esa_ctx *ctx, const esa_attn_args *args, void *ws)
{
    const esa_attn_args a = with_kernels(ctx, args);
    if (!ws) ESA_TRY(esa_ctx_scratch(ctx, &ws, esa_attn_cpu_workspace(&a)));
    esa_attn_cpu(&a, ws);
    return ESA_OK;
}

static esa_attn_kernel cpu_attention_kernel(esa_ctx *ctx, const esa_attn_args *args)
{
    return esa_attn_cpu_kernel(ctx->kern, args);
}

static esa_status cpu_exact_take(esa_ctx *ctx, const esa_attn_args *args, void *rows)
{
    const esa_attn_args a = with_kernels(ctx, args);
    esa_attn_cpu_take(&a, rows);
    return ESA_OK;
}

static esa_status cpu_exact_mend(esa_ctx *ctx, const esa_attn_args *args, const void *o,
                                 const float *lse)
{
    const esa_attn_args a = with_kernels(ctx, args);
    esa_attn_cpu_mend(&a, o, lse);
    return ESA_OK;
}

/* ---------------------------------------------------------------- selection */

static esa_select_args with_selectors(const esa_ctx *ctx, const esa_select_args *args)
{
    esa_select_args a = *args;
    a.kern = esa_select_kernels(ctx->kern, args);
    a.pool = ctx->pool;
    return a;
}

static int64_t cpu_select_workspace(esa_ctx *ctx, const esa_select_args *args)
{
    const esa_select_args a = with_selectors(ctx, args);
    return esa_select_workspace(&a);
}

static void write_facts(esa_mask *mask)
{
    mask->facts[0] = mask->existing;
    mask->facts[1] = esa_mask_kept(mask);
    mask->facts[2] = esa_mask_fine(mask);
}

static esa_status cpu_select(esa_ctx *ctx, const esa_select_args *args, esa_mask *mask,
                             float *importance, void *ws)
{
    const esa_select_args a = with_selectors(ctx, args);
    if (!ws) ESA_TRY(esa_ctx_scratch(ctx, &ws, esa_select_workspace(&a)));
    if (importance) {
        esa_select_importance(&a, importance, NULL, ws);
        esa_select_from_importance(&a, mask, importance, ws);
    } else {
        esa_select_run(&a, mask, ws);
    }
    write_facts(mask);
    return ESA_OK;
}

static esa_status cpu_importance(esa_ctx *ctx, const esa_select_args *args, float *out,
                                 double *entropy, void *ws)
{
    const esa_select_args a = with_selectors(ctx, args);
    if (!ws) ESA_TRY(esa_ctx_scratch(ctx, &ws, esa_select_workspace(&a)));
    esa_select_importance(&a, out, entropy, ws);
    return ESA_OK;
}

static int64_t cpu_errors_workspace(esa_ctx *ctx, const esa_select_args *args)
{
    const esa_select_args a = with_selectors(ctx, args);
    return esa_select_errors_workspace(&a);
}

static esa_status cpu_errors(esa_ctx *ctx, const esa_select_args *args, float *out, void *ws)
{
    const esa_select_args a = with_selectors(ctx, args);
    if (!ws) ESA_TRY(esa_ctx_scratch(ctx, &ws, esa_select_errors_workspace(&a)));
    esa_select_errors(&a, out, ws);
    return ESA_OK;
}

static int64_t cpu_order_workspace(esa_ctx *ctx, const esa_select_args *args)
{
    const esa_select_args a = with_selectors(ctx, args);
    return esa_adaptive_workspace(&a);
}

static esa_status cpu_order(esa_ctx *ctx, const esa_select_args *args, int32_t *perm_q,
                            int32_t *perm_k, void *ws)
{
    const esa_select_args a = with_selectors(ctx, args);
    if (!ws) ESA_TRY(esa_ctx_scratch(ctx, &ws, esa_adaptive_workspace(&a)));
    esa_adaptive_order(&a, perm_q, perm_k, ws);
    return ESA_OK;
}

/* ---------------------------------------------------------------- masks */

static esa_status cpu_mask_create(esa_ctx *ctx, esa_mask **mask, const esa_mask *like)
{
    *mask = esa_mask_like(&ctx->mem, like);
    if (!*mask)
        return esa_fail(ctx, ESA_ERR_MEMORY,
                        "out of memory for a mask of %lld x %lld blocks and %lld heads",
                        (long long)like->nq, (long long)like->nk, (long long)(like->B * like->H));
    (*mask)->filled = 0;
    return ESA_OK;
}

static esa_status cpu_mask_set_bits(esa_ctx *ctx, esa_mask *mask, const uint8_t *bits,
                                    const uint8_t *fine)
{
    (void)ctx;
    esa_mask_set_bits(mask, bits, fine);
    mask->facts[1] = esa_mask_kept(mask);
    mask->facts[2] = esa_mask_fine(mask);
    return ESA_OK;
}

static esa_status cpu_mask_get_bits(esa_ctx *ctx, const esa_mask *mask, uint8_t *bits,
                                    uint8_t *fine)
{
    (void)ctx;
    esa_mask_write_bits(bits, mask, mask->count, mask->index);
    if (mask->fine) esa_mask_write_bits(fine, mask, mask->fine_count, mask->fine_index);
    return ESA_OK;
}

const esa_backend esa_backend_cpu = {
    .name = "CPU",
    .device = ESA_DEVICE_CPU,
    .host_memory = 1,
    .order_room = 0,
    .open = cpu_open,
    .ordinal = cpu_ordinal,
    .reach = cpu_reach,
    .alloc = cpu_alloc,
    .release = cpu_release,
    .scratch = esa_ctx_scratch,
    .upload = cpu_copy,
    .download = cpu_copy,
    .copy = cpu_copy,
    .mark_record = cpu_mark_record,
    .mark_elapsed = cpu_mark_elapsed,
    .mark_release = cpu_mark_release,
    .attention_workspace = cpu_attention_workspace,
    .attention = cpu_attention,
    .attention_kernel = cpu_attention_kernel,
    .exact_take = cpu_exact_take,
    .exact_mend = cpu_exact_mend,
    .select_workspace = cpu_select_workspace,
    .select = cpu_select,
    .importance_workspace = cpu_select_workspace,
    .importance = cpu_importance,
    .errors_workspace = cpu_errors_workspace,
    .errors = cpu_errors,
    .order_workspace = cpu_order_workspace,
    .order = cpu_order,
    .mask_create = cpu_mask_create,
    .mask_set_bits = cpu_mask_set_bits,
    .mask_get_bits = cpu_mask_get_bits,
};
