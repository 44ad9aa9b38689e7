/* stand_in.c - a CUDA plugin whose GPU is this processor: the host side of the CUDA backend on
 * machines that have none.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Built as a module of its own and found through $ESA_CUDA_LIB. Kernels are the CPU's. "Device"
 * memory is mapped without any access right except while the plugin works, so a host that touches a
 * device pointer dies on the spot, and gone when released. What only a real GPU can show (kernels,
 * streams, graphs) is not here.
 *
 * $ESA_STAND_IN_FAIL=n lets the n-th call from now on that a real GPU may fail (0: the next) do so,
 * once; then the variable is gone. $ESA_STAND_IN_BLAS=missing: it has no library of products.
 * While a variable is set: $ESA_STAND_IN_FULL: no memory can be allocated. $ESA_STAND_IN_MOST=n: no
 * more than n bytes can be, though more are free. $ESA_STAND_IN_BYTES=n: it has so much memory
 * instead of 1 GiB. $ESA_STAND_IN_LOST: every call fails. $ESA_STAND_IN_OPEN: its memory is not
 * guarded, which takes most of the time of small work. $ESA_STAND_IN_CARRY: attention forgets to
 * add carried differences. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, setenv */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "cpu/attn_cpu.h"
#include "cuda/cuda.h"
#include "esa_build.h" /* written by the build: ESA_BUILD_ID */
#include "select/select.h"
#include "stand_in.h"

/* ---------------------------------------------------------------- memory that only the plugin may
 * touch */

enum { MOST_BLOCKS = 4096, PAGE = 4096 };
static struct {
    void *base;
    int64_t bytes, asked; /* in pages; as the caller said */
} block[MOST_BLOCKS];
static int64_t in_use, asked;
static int blocks, inside; /* inside: calls at work now */
static int opened;         /* 1: all blocks can be read and written */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int64_t number(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);
    return text ? (int64_t)strtoll(text, NULL, 10) : otherwise;
}

static int64_t capacity(void) { return number("ESA_STAND_IN_BYTES", INT64_C(1) << 30); }

static void open_memory(int open)
{
    const int right = open ? PROT_READ | PROT_WRITE : PROT_NONE;
    if (open != opened)
        for (int i = 0; i < blocks; i++) mprotect(block[i].base, (size_t)block[i].bytes, right);
    opened = open;
}

void stand_in_enter(void)
{
    pthread_mutex_lock(&lock);
    if (!inside++) open_memory(1);
    pthread_mutex_unlock(&lock);
}

void stand_in_leave(void)
{
    pthread_mutex_lock(&lock);
    if (!--inside) open_memory(getenv("ESA_STAND_IN_OPEN") != NULL);
    pthread_mutex_unlock(&lock);
}

esa_status stand_in_say(esa_cuda_device *dev, esa_status status, const char *text)
{
    snprintf(dev->error, sizeof dev->error, "%s", text);
    return status;
}

/* 1: it is this call's turn to fail. */
static int out_of_luck(void)
{
    const char *left = getenv("ESA_STAND_IN_FAIL");
    if (getenv("ESA_STAND_IN_LOST")) return 1;
    if (!left) return 0;
    char now[16];
    snprintf(now, sizeof now, "%d", atoi(left) - 1);
    return atoi(left) > 0 ? setenv("ESA_STAND_IN_FAIL", now, 1) : !unsetenv("ESA_STAND_IN_FAIL");
}

esa_status stand_in_luck(esa_cuda_device *dev)
{
    return out_of_luck() ? stand_in_say(dev, ESA_ERR_DEVICE, "the stand-in GPU was told to fail")
                         : ESA_OK;
}

static int64_t free_bytes(void)
{
    pthread_mutex_lock(&lock);
    const int64_t bytes = capacity() - in_use;
    pthread_mutex_unlock(&lock);
    return bytes;
}

static int full(int64_t bytes)
{
    pthread_mutex_lock(&lock);
    const int over = bytes > number("ESA_STAND_IN_MOST", INT64_MAX) - asked;
    pthread_mutex_unlock(&lock);
    return over || bytes < 0 || bytes > free_bytes() || getenv("ESA_STAND_IN_FULL");
}

static esa_status alloc(esa_cuda_device *dev, void **ptr, int64_t bytes)
{
    *ptr = NULL;
    if (getenv("ESA_STAND_IN_LOST")) return stand_in_luck(dev);
    if (full(bytes) || out_of_luck())
        return stand_in_say(dev, ESA_ERR_MEMORY, "GPU 0 has less memory free than is needed");
    const int64_t size = bytes ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE;
    void *base = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                      0);
    if (base == MAP_FAILED)
        return stand_in_say(dev, ESA_ERR_MEMORY, "out of memory for the stand-in GPU");
    memset(base, 0x7f, (size_t)size); /* as a GPU's memory: anything but zeros */
    pthread_mutex_lock(&lock);
    const int many = blocks == MOST_BLOCKS;
    if (!many) {
        block[blocks].base = base;
        block[blocks].asked = bytes;
        block[blocks++].bytes = size;
        in_use += size;
        asked += bytes;
        if (!opened) mprotect(base, (size_t)size, PROT_NONE);
    }
    pthread_mutex_unlock(&lock);
    if (many) {
        munmap(base, (size_t)size);
        return stand_in_say(dev, ESA_ERR_MEMORY,
                            "the stand-in GPU holds too many blocks: something leaks");
    }
    *ptr = base;
    return ESA_OK;
}

static void release(int32_t ordinal, void *ptr)
{
    (void)ordinal;
    pthread_mutex_lock(&lock);
    for (int i = 0; ptr && i < blocks; i++)
        if (block[i].base == ptr) {
            munmap(ptr, (size_t)block[i].bytes);
            in_use -= block[i].bytes;
            asked -= block[i].asked;
            block[i] = block[--blocks];
            ptr = NULL;
        }
    pthread_mutex_unlock(&lock);
    if (ptr) abort(); /* freed twice, or never ours */
}

static esa_status move(void *dst, const void *src, int64_t bytes)
{
    stand_in_enter();
    memcpy(dst, src, (size_t)bytes);
    stand_in_leave();
    return ESA_OK;
}

static esa_status upload(esa_cuda_device *dev, void *dst, const void *src, int64_t bytes,
                         void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    return status ? status : move(dst, src, bytes);
}

static esa_status download(int32_t ordinal, void *dst, const void *src, int64_t bytes, void *stream)
{
    (void)ordinal;
    (void)stream;
    return out_of_luck() ? ESA_ERR_DEVICE : move(dst, src, bytes);
}

static esa_status sync_stream(esa_cuda_device *dev, void *stream)
{
    (void)stream;
    return stand_in_luck(dev);
}

/* ---------------------------------------------------------------- the device */

static esa_status devices(int32_t *count, char *error, int32_t error_bytes)
{
    (void)error;
    (void)error_bytes;
    *count = 1;
    return ESA_OK;
}

static esa_status open_device(esa_cuda_device **dev, int32_t ordinal, const char *level,
                              char *error, int32_t error_bytes)
{
    *dev = NULL;
    if (ordinal != 0) {
        snprintf(error, (size_t)error_bytes,
                 "there is no GPU %d: this machine has 1, numbered from 0", (int)ordinal);
        return ESA_ERR_DEVICE;
    }
    if (!level || !*level) level = "sm90a";
    const int sm80 = !strcmp(level, "sm80"), steps = sm80 || !strcmp(level, "sm89");
    if (!steps && strcmp(level, "sm90a")) {
        snprintf(error, (size_t)error_bytes, "ESA_CUDA is \"%.40s\", expected sm80, sm89 or sm90a",
                 level);
        return ESA_ERR_UNSUPPORTED;
    }
    esa_ctx *ctx = NULL; /* lends its allocator: the pool keeps a copy of it */
    esa_ctx_params params = esa_ctx_params_default();
    params.threads = 1;
    esa_cuda_device *d = calloc(1, sizeof *d);
    if (!d || esa_ctx_create(&ctx, &params) || esa_pool_create(&d->pool, 1, &ctx->mem)) {
        snprintf(error, (size_t)error_bytes, "out of memory for the stand-in GPU");
        esa_ctx_free(ctx);
        free(d);
        return ESA_ERR_MEMORY;
    }
    esa_ctx_free(ctx);
    snprintf(d->level, sizeof d->level, "%s", level);
    snprintf(d->kernel, sizeof d->kernel, "stand-in%s%s-8bit", steps ? "-" : "",
             steps ? level : "");
    d->eight = *esa_cpu_kernels_get(ESA_CPU_BEST);
    d->eight.eight_f16 = sm80, d->eight.eight_steps = steps;
    *dev = d;
    return ESA_OK;
}

static void close_device(esa_cuda_device *dev)
{
    esa_pool_free(dev->pool);
    free(dev);
}

static const char *last_error(const esa_cuda_device *dev) { return dev->error; }

static esa_status info_of(esa_cuda_device *dev, esa_cuda_info *info)
{
    memset(info, 0, sizeof *info);
    info->major = 9;
    info->multiprocessors = 1;
    info->memory = capacity();
    info->free_memory = free_bytes();
    snprintf(info->name, sizeof info->name, "stand-in");
    snprintf(info->kernels, sizeof info->kernels, "%s", dev->level);
    return ESA_OK;
}

/* ---------------------------------------------------------------- marks */

typedef struct mark {
    struct timespec at;
} mark;

void stand_in_count(int64_t change)
{
    pthread_mutex_lock(&lock);
    in_use += change * (int64_t)sizeof(mark);
    pthread_mutex_unlock(&lock);
}

static esa_status mark_create(esa_cuda_device *dev, void **out)
{
    *out = NULL;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    *out = calloc(1, sizeof(mark));
    if (!*out) return stand_in_say(dev, ESA_ERR_MEMORY, "out of memory for a mark");
    stand_in_count(1);
    return ESA_OK;
}

static void mark_release(int32_t ordinal, void *at)
{
    (void)ordinal;
    stand_in_count(-1);
    free(at);
}

static esa_status mark_record(esa_cuda_device *dev, void *at, void *stream)
{
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &((mark *)at)->at);
    return stand_in_luck(dev);
}

static esa_status mark_elapsed(esa_cuda_device *dev, double *seconds, void *from, void *to)
{
    const struct timespec *a = &((mark *)from)->at, *b = &((mark *)to)->at;
    *seconds = (double)(b->tv_sec - a->tv_sec) + 1e-9 * (double)(b->tv_nsec - a->tv_nsec) + 1e-9;
    return stand_in_luck(dev);
}

/* ---------------------------------------------------- the CPU's kernels, the caller's workspace */

static esa_attn_args attention_args(const esa_cuda_device *dev, const esa_attn_args *args)
{
    esa_attn_args a = *args;
    a.kern = esa_attn_cpu_kernels(esa_cpu_kernels_get(ESA_CPU_BEST), args);
    if (dev->eight.eight_steps && esa_attn_cpu_eight_takes(args)) a.kern = &dev->eight;
    a.pool = dev->pool;
    return a;
}

static esa_select_args select_args(const esa_cuda_device *dev, const esa_select_args *args)
{
    esa_select_args a = *args;
    a.kern = esa_cpu_kernels_get(ESA_CPU_BEST);
    a.pool = dev->pool;
    return a;
}

/* Lengths as a GPU reads them: outside 0 .. Nk counts as the nearer end. The caller frees. */
static int32_t *lengths(const int32_t *kv_len, int64_t B, int64_t Nk)
{
    int32_t *clamped = kv_len ? malloc((size_t)B * 4) : NULL;
    for (int64_t b = 0; clamped && b < B; b++)
        clamped[b] = kv_len[b] < 0 ? 0 : kv_len[b] > Nk ? (int32_t)Nk : kv_len[b];
    return clamped;
}

static int64_t attention_workspace(const esa_cuda_device *dev, const esa_attn_args *args)
{
    const esa_attn_args a = attention_args(dev, args);
    return esa_attn_cpu_workspace(&a);
}

static esa_status attention(esa_cuda_device *dev, const esa_attn_args *args, void *ws, void *stream)
{
    (void)stream;
    esa_attn_args a = attention_args(dev, args);
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    int32_t *len = lengths(a.kv_len, a.B, a.Nk);
    a.kv_len = len;
    if (a.carry.use == ESA_CARRY_ADD && getenv("ESA_STAND_IN_CARRY")) a.carry.value = NULL;
    esa_attn_cpu(&a, ws);
    free(len);
    stand_in_leave();
    return ESA_OK;
}

static esa_status attention_both(esa_cuda_device *dev, const esa_attn_args *first, void *first_ws,
                                 const esa_attn_args *second, void *second_ws, void *stream)
{
    /* The other way round than on a GPU: nothing may depend on the order. */
    const esa_status status = attention(dev, second, second_ws, stream);
    return status ? status : attention(dev, first, first_ws, stream);
}

static esa_attn_kernel attention_kernel(const esa_cuda_device *dev, const esa_attn_args *args)
{
    if (esa_attn_cpu_eight_takes(args)) return (esa_attn_kernel){ dev->kernel, 8 };
    return (esa_attn_kernel){ "stand-in", 16 };
}

static esa_status exact_take(esa_cuda_device *dev, const esa_attn_args *args, void *rows,
                             void *stream)
{
    (void)stream;
    const esa_attn_args a = attention_args(dev, args);
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    esa_attn_cpu_take(&a, rows);
    stand_in_leave();
    return ESA_OK;
}

static esa_status exact_mend(esa_cuda_device *dev, const esa_attn_args *args, const void *o,
                             const float *lse, void *stream)
{
    (void)stream;
    const esa_attn_args a = attention_args(dev, args);
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    esa_attn_cpu_mend(&a, o, lse);
    stand_in_leave();
    return ESA_OK;
}

static int64_t select_workspace(const esa_cuda_device *dev, const esa_select_args *args)
{
    esa_select_args a = select_args(dev, args);
    int64_t bytes = esa_select_workspace(&a);
    a.params.selector = ESA_SELECT_ENTROPY; /* importance and from_importance share it */
    a.params.mode = args->params.selector == ESA_SELECT_ENTROPY ? args->params.mode
                                                                : ESA_MODE_FIXED;
    return esa_max64(bytes,
                     args->params.selector == ESA_SELECT_ENTROPY ? esa_select_workspace(&a) : 0);
}

/* A CPU mask object over the device's arrays. */
static esa_mask mask_over(const esa_select_args *a, const esa_cuda_mask *m)
{
    esa_mask mask;
    memset(&mask, 0, sizeof mask);
    mask.B = m->B;
    mask.H = m->H;
    mask.nq = m->nq;
    mask.nk = m->nk;
    mask.cap = m->cap;
    mask.count = m->count;
    mask.index = m->index;
    mask.fine_count = m->fine_count;
    mask.fine_index = m->fine_index;
    if (a) {
        mask.Nq = a->Nq;
        mask.Nk = a->Nk;
        mask.block_q = a->params.block_q;
        mask.block_k = a->params.block_k;
        mask.fine = m->fine_count ? a->params.fine : 0;
    }
    return mask;
}

/* What the real one does not have either. */
static esa_status check_selector(esa_cuda_device *dev, const esa_select_args *a)
{
    if (a->params.selector == ESA_SELECT_ENTROPY && a->params.mode == ESA_MODE_COMPAT_ROUND &&
        !esa_keeps_all(&a->params))
        return stand_in_say(dev, ESA_ERR_UNSUPPORTED,
                            "the entropy selector in mode compat-round runs on the CPU only");
    return stand_in_luck(dev);
}

/* importance NULL: the selector of args runs; else its second half. */
static esa_status select_with(esa_cuda_device *dev, const esa_select_args *args,
                              const esa_cuda_mask *m, const float *importance, void *ws)
{
    esa_select_args a = select_args(dev, args);
    const esa_status status = check_selector(dev, &a);
    if (status) return status;
    stand_in_enter();
    esa_mask mask = mask_over(&a, m);
    int32_t *len = lengths(a.params.kv_len, a.B, a.Nk);
    a.params.kv_len = len;
    if (importance)
        esa_select_from_importance(&a, &mask, importance, ws);
    else
        esa_select_run(&a, &mask, ws);
    m->facts[0] = mask.existing;
    m->facts[1] = esa_mask_kept(&mask);
    m->facts[2] = esa_mask_fine(&mask);
    free(len);
    stand_in_leave();
    return ESA_OK;
}

static esa_status select_mask(esa_cuda_device *dev, const esa_select_args *args,
                              const esa_cuda_mask *m, void *ws, void *stream)
{
    (void)stream;
    return select_with(dev, args, m, NULL, ws);
}

static esa_status from_importance(esa_cuda_device *dev, const esa_select_args *args,
                                  const esa_cuda_mask *m, const float *importance, void *ws,
                                  void *stream)
{
    (void)stream;
    return select_with(dev, args, m, importance, ws);
}

static esa_status importance(esa_cuda_device *dev, const esa_select_args *args, float *out,
                             double *entropy, void *ws, void *stream)
{
    (void)stream;
    esa_select_args a = select_args(dev, args);
    const esa_status status = check_selector(dev, &a);
    if (status) return status;
    stand_in_enter();
    int32_t *len = lengths(a.params.kv_len, a.B, a.Nk);
    a.params.kv_len = len;
    esa_select_importance(&a, out, entropy, ws);
    free(len);
    stand_in_leave();
    return ESA_OK;
}

static esa_status errors(esa_cuda_device *dev, const esa_select_args *args, float *out, void *ws,
                         void *stream)
{
    (void)stream;
    esa_select_args a = select_args(dev, args);
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    int32_t *len = lengths(a.params.kv_len, a.B, a.Nk);
    a.params.kv_len = len;
    esa_select_errors(&a, out, ws);
    free(len);
    stand_in_leave();
    return ESA_OK;
}

static int64_t order_workspace(const esa_cuda_device *dev, const esa_select_args *args)
{
    const esa_select_args a = select_args(dev, args);
    return esa_adaptive_workspace(&a);
}

static esa_status order(esa_cuda_device *dev, const esa_select_args *args, int32_t *perm_q,
                        int32_t *perm_k, void *ws, void *stream)
{
    (void)stream;
    const esa_select_args a = select_args(dev, args);
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    esa_adaptive_order(&a, perm_q, perm_k, ws);
    stand_in_leave();
    return ESA_OK;
}

static esa_status bits_to_lists(esa_cuda_device *dev, const esa_cuda_mask *m, const uint8_t *bits,
                                const uint8_t *fine, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    esa_mask mask = mask_over(NULL, m);
    esa_mask_set_bits(&mask, bits, fine);
    m->facts[1] = esa_mask_kept(&mask);
    m->facts[2] = esa_mask_fine(&mask);
    stand_in_leave();
    return ESA_OK;
}

static esa_status lists_to_bits(esa_cuda_device *dev, const esa_cuda_mask *m, uint8_t *bits,
                                uint8_t *fine, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    const esa_mask mask = mask_over(NULL, m);
    esa_mask_write_bits(bits, &mask, m->count, m->index);
    if (m->fine_count) esa_mask_write_bits(fine, &mask, m->fine_count, m->fine_index);
    stand_in_leave();
    return ESA_OK;
}

static const esa_cuda_table table = {
    .struct_size = sizeof(esa_cuda_table),
    .abi = ESA_CUDA_ABI,
    .version = "stand-in",
    .devices = devices,
    .open = open_device,
    .close = close_device,
    .error = last_error,
    .info = info_of,
    .alloc = alloc,
    .release = release,
    .upload = upload,
    .download = download,
    .copy = upload,
    .sync = sync_stream,
    .mark_create = mark_create,
    .mark_release = mark_release,
    .mark_record = mark_record,
    .mark_elapsed = mark_elapsed,
    .attention_workspace = attention_workspace,
    .attention = attention,
    .attention_kernel = attention_kernel,
    .attention_both = attention_both,
    .exact_take = exact_take,
    .exact_mend = exact_mend,
    .select_workspace = select_workspace,
    .select = select_mask,
    .importance = importance,
    .from_importance = from_importance,
    .errors = errors,
    .order_workspace = order_workspace,
    .order = order,
    .bits_to_lists = bits_to_lists,
    .lists_to_bits = lists_to_bits,
    .rows = &stand_in_rows,
    .products = &stand_in_products,
    .latents = &stand_in_latents,
    .biased = &stand_in_biased,
    .planes = &stand_in_planes,
    .transfer = &stand_in_transfer,
};

__attribute__((visibility("default"))) const esa_cuda_table *esa_cuda_entry(
    uint32_t abi, const esa_cuda_host *host, char *error, int32_t error_bytes)
{
    const int fits = abi == ESA_CUDA_ABI && host->table_size == sizeof table;
    if (fits && strcmp(host->build, ESA_BUILD_ID) == 0) return &table;
    snprintf(error, (size_t)error_bytes,
             "the stand-in is build %s, libesa is build %s: install both from one build",
             ESA_BUILD_ID, fits ? host->build : "of another interface");
    return NULL;
}
