/* context.c - making and freeing a ctx, its small questions, version and ABI table.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE                     /* sched_getaffinity */
#include "attn/device.h"
#include "base/pool.h"
#include "cpu/cpu.h"
#include "esa/esa_media.h"
#include "esa/esa_session.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *default_alloc(void *user, uint64_t bytes)
{
    (void)user;
    return aligned_alloc(64, (size_t)bytes);
}

static void default_dealloc(void *user, void *ptr, uint64_t bytes)
{
    (void)user;
    (void)bytes;
    free(ptr);
}

esa_ctx_params esa_ctx_params_default(void)
{
    esa_ctx_params p;
    memset(&p, 0, sizeof p);
    p.struct_size = sizeof p;
    return p;
}

/* CPUs this process may run on (a container or taskset may grant fewer than the machine has). */
static int32_t usable_cpus(void)
{
    long n = 0;
#if defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) n = CPU_COUNT(&set);
#endif
    if (n < 1) n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > ESA_MAX_THREADS ? ESA_MAX_THREADS : (int32_t)n;
}

esa_status esa_ctx_create(esa_ctx **out, const esa_ctx_params *params)
{
    if (!out) return ESA_ERR_ARGUMENT;
    *out = NULL;
    if (params && params->struct_size != sizeof *params) return ESA_ERR_VERSION;
    const esa_ctx_params p = params ? *params : esa_ctx_params_default();
    for (int32_t i = 0; i < 4; i++) if (p.reserved[i]) return ESA_ERR_ARGUMENT;
    if (p.threads < 0 || p.threads > ESA_MAX_THREADS || !p.alloc != !p.dealloc) return ESA_ERR_ARGUMENT;
    if (p.cpu_level < ESA_CPU_BEST || p.cpu_level > ESA_CPU_NEON) return ESA_ERR_ARGUMENT;
    const esa_cpu_kernels *kern = esa_cpu_kernels_get(p.cpu_level);
    if (!kern) return ESA_ERR_UNSUPPORTED;      /* a level this machine does not have, or an unknown $ESA_CPU */

    esa_allocator mem = { default_alloc, default_dealloc, NULL };
    if (p.alloc) mem = (esa_allocator){ p.alloc, p.dealloc, p.alloc_user };
    esa_ctx *ctx = esa_mem_zalloc(&mem, sizeof *ctx);
    if (!ctx) return ESA_ERR_MEMORY;
    ctx->mem = mem;
    ctx->log = p.log;
    ctx->log_user = p.log_user;
    ctx->cuda_stream = p.cuda_stream;
    ctx->cuda_device = p.cuda_device;
    ctx->kern = kern;
    atomic_init(&ctx->busy, 0);
    const esa_status status = esa_pool_create(&ctx->pool, p.threads ? p.threads : usable_cpus(), &mem);
    if (status) {
        esa_mem_free(&mem, ctx, sizeof *ctx);
        return status;
    }
    esa_log(ctx, ESA_LOG_INFO, "esa %s: CPU kernels %s, %d threads", esa_version(), kern->name, (int)esa_pool_threads(ctx->pool));
    *out = ctx;
    return ESA_OK;
}

void esa_ctx_free(esa_ctx *ctx)
{
    if (!ctx) return;
    esa_cuda_close(ctx);
    esa_pool_free(ctx->pool);
    esa_mem_free(&ctx->mem, ctx->arena, ctx->arena_bytes);
    const esa_allocator mem = ctx->mem;
    esa_mem_free(&mem, ctx, sizeof *ctx);
}

const char *esa_ctx_error(const esa_ctx *ctx) { return ctx ? ctx->error : ""; }
int32_t esa_ctx_threads(const esa_ctx *ctx) { return ctx ? esa_pool_threads(ctx->pool) : 0; }
const char *esa_ctx_cpu(const esa_ctx *ctx) { return ctx ? ctx->kern->name : ""; }

void esa_ctx_memory(const esa_ctx *ctx, int64_t *held_bytes, int64_t *peak_bytes)
{
    if (held_bytes) *held_bytes = ctx ? ctx->arena_bytes : 0;
    if (peak_bytes) *peak_bytes = ctx ? ctx->arena_peak : 0;
}

void esa_ctx_trim(esa_ctx *ctx)
{
    if (!ctx || esa_ctx_enter(ctx)) return;
    esa_mem_free(&ctx->mem, ctx->arena, ctx->arena_bytes);
    ctx->arena = NULL;
    ctx->arena_bytes = 0;
    esa_cuda_trim(ctx);
    esa_ctx_leave(ctx);
}

const char *esa_status_name(esa_status status)
{
    switch (status) {
    case ESA_OK:              return "ESA_OK";
    case ESA_ERR_ARGUMENT:    return "ESA_ERR_ARGUMENT";
    case ESA_ERR_SHAPE:       return "ESA_ERR_SHAPE";
    case ESA_ERR_DTYPE:       return "ESA_ERR_DTYPE";
    case ESA_ERR_UNSUPPORTED: return "ESA_ERR_UNSUPPORTED";
    case ESA_ERR_MEMORY:      return "ESA_ERR_MEMORY";
    case ESA_ERR_DEVICE:      return "ESA_ERR_DEVICE";
    case ESA_ERR_IO:          return "ESA_ERR_IO";
    case ESA_ERR_FORMAT:      return "ESA_ERR_FORMAT";
    case ESA_ERR_MISMATCH:    return "ESA_ERR_MISMATCH";
    case ESA_ERR_STATE:       return "ESA_ERR_STATE";
    case ESA_ERR_VERSION:     return "ESA_ERR_VERSION";
    case ESA_ERR_POLICY:      return "ESA_ERR_POLICY";
    case ESA_ERR_INTERNAL:    return "ESA_ERR_INTERNAL";
    default:                  return "unknown esa_status";
    }
}

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
const char *esa_version(void) { return TEXT(ESA_VERSION_MAJOR) "." TEXT(ESA_VERSION_MINOR) "." TEXT(ESA_VERSION_PATCH); }
int32_t esa_api_version(void) { return ESA_API_VERSION; }

const uint32_t *esa_abi(void)
{
    static const uint32_t size[ESA_ABI_COUNT] = {
        [ESA_ABI_CTX_PARAMS] = sizeof(esa_ctx_params), [ESA_ABI_TENSOR] = sizeof(esa_tensor),
        [ESA_ABI_LAYOUT] = sizeof(esa_layout), [ESA_ABI_SELECT_PARAMS] = sizeof(esa_select_params),
        [ESA_ABI_ATTENTION_PARAMS] = sizeof(esa_attention_params), [ESA_ABI_SHAPES] = sizeof(esa_shapes),
        [ESA_ABI_MASK_INFO] = sizeof(esa_mask_info), [ESA_ABI_SESSION_PARAMS] = sizeof(esa_session_params),
        [ESA_ABI_SESSION_STATS] = sizeof(esa_session_stats), [ESA_ABI_MASK_FILE_INFO] = sizeof(esa_mask_file_info),
        [ESA_ABI_TENSOR_INFO] = sizeof(esa_tensor_info), [ESA_ABI_DEVICE_INFO] = sizeof(esa_device_info),
    };
    return size;
}

/* The offsets are the ABI: a change here needs a new ESA_API_VERSION. */
#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field " moved")
AT(esa_ctx_params, alloc, 8);       AT(esa_ctx_params, cuda_stream, 48);    AT(esa_ctx_params, reserved, 64);
AT(esa_tensor, data, 16);           AT(esa_tensor, dim, 24);                AT(esa_tensor, stride, 56);
AT(esa_layout, window, 16);         AT(esa_layout, grid_q, 28);             AT(esa_layout, grid_k, 48);
AT(esa_layout, reserved, 68);       AT(esa_select_params, budget, 24);      AT(esa_select_params, keep_sink, 48);
AT(esa_select_params, seed, 64);    AT(esa_select_params, kv_len, 72);      AT(esa_select_params, layout, 80);
AT(esa_attention_params, scale, 16);    AT(esa_attention_params, lse, 32);  AT(esa_shapes, B, 16);
AT(esa_mask_info, B, 16);           AT(esa_mask_info, density_asked, 64);   AT(esa_mask_info, layout, 104);
