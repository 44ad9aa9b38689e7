/* on_gpu.c - copies on the GPU of what a test gives to a call; see on_gpu.h. on_gpu_calls.c holds
 * the calls.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Copies go through a ctx of their own: the test's may be busy or counting its allocations. Both
 * work on the default stream, so they are in order. $ESA_TEST_TIGHT leaves the guards behind the
 * bytes away: then compute-sanitizer sees reads past the end, too. */
#include "common/on_gpu_mirror.h"
#include "base/half.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 256, GUARD_BYTE = 0xa5, MOST_OWNERS = 256 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static esa_ctx *mover;

static int chosen = -1;

void on_gpu_set(int where) { chosen = where; }

int on_gpu(void)
{
    if (chosen >= 0) return chosen;
    const char *device = getenv("ESA_TEST_DEVICE");
    return device && !strcmp(device, "cuda");
}

int on_stand_in(void)
{
    const char *plugin = getenv("ESA_CUDA_LIB");
    return plugin && strstr(plugin, "stand_in") != NULL;
}

/* ---------------------------------------------------------------- memory */

static int move_failed(esa_status status, const char *what, int64_t bytes)
{
    if (status)
        fprintf(stderr, "on_gpu: %s %lld bytes: %s: %s\n", what, (long long)bytes,
                esa_status_name(status), esa_ctx_error(mover));
    return status != ESA_OK;
}

void *gpu_new(int64_t bytes)
{
    void *ptr = NULL;
    pthread_mutex_lock(&lock);
    if (!mover) {
        esa_ctx_params p = esa_ctx_params_default();
        p.threads = 1;
        if (esa_ctx_create(&mover, &p)) mover = NULL;
    }
    if (!mover || move_failed(esa_device_alloc(mover, &ptr, bytes), "allocating", bytes))
        ptr = NULL;
    pthread_mutex_unlock(&lock);
    return ptr;
}

void gpu_free(void *ptr)
{
    pthread_mutex_lock(&lock);
    if (ptr) esa_device_free(mover, ptr);
    pthread_mutex_unlock(&lock);
}

static int gpu_put(void *dst, const void *src, int64_t bytes)
{
    pthread_mutex_lock(&lock);
    const int failed = move_failed(esa_device_upload(mover, dst, src, bytes), "uploading", bytes);
    pthread_mutex_unlock(&lock);
    return !failed;
}

static int gpu_get(void *dst, const void *src, int64_t bytes)
{
    pthread_mutex_lock(&lock);
    const int failed = move_failed(esa_device_download(mover, dst, src, bytes), "downloading",
                                   bytes);
    pthread_mutex_unlock(&lock);
    return !failed;
}

/* ---------------------------------------------------------------- regions: host bytes and their
 * copy */

int usable(const esa_tensor *t)
{
    return t && t->struct_size == sizeof *t && t->device == ESA_DEVICE_CPU && t->data &&
           t->dtype >= 0 && t->dtype <= ESA_DTYPE_BF16 && t->dim[0] > 0 && t->dim[1] > 0 &&
           t->dim[2] > 0 && t->dim[3] > 0 &&
           (double)t->dim[0] * (double)t->dim[1] * (double)t->dim[2] * (double)t->dim[3] < 1e9;
}

int usable_carry(const esa_carry *c)
{
    return c && c->struct_size == sizeof *c && c->device == ESA_DEVICE_CPU && c->value &&
           (c->scale != NULL) == (c->format == ESA_CARRY_E4M3) &&
           esa_carry_bytes(c->format, c->B, c->H, c->N, c->D) > 0;
}

static int64_t carry_bytes(const esa_carry *c)
{
    return c->B * c->H * c->N * c->D * (c->format == ESA_CARRY_E4M3 ? 1 : 2);
}

static void span(const esa_tensor *t, char **low, char **high)
{
    const int64_t size = esa_dtype_size(t->dtype);
    *low = t->data;
    *high = *low + t->dim[3] * size;
    for (int i = 0; i < 3; i++) {
        const int64_t reach = (t->dim[i] - 1) * t->stride[i] * size;
        if (reach < 0)
            *low += reach;
        else
            *high += reach;
    }
}

/* Views that share a range (q, k, v, o side by side in one buffer) share a region. */
static void add_region(mirror *m, char *low, char *high)
{
    for (int i = 0; i < m->regions; i++) {
        region *r = &m->region[i];
        if (high <= r->low || low >= r->high) continue;
        if (r->low < low) low = r->low;
        if (r->high > high) high = r->high;
        *r = m->region[--m->regions];
        i = -1;
    }
    m->region[m->regions++] = (region){ .low = low, .high = high };
}

static int open_region(region *r)
{
    const int64_t used = r->high - r->low;
    const int tight = getenv("ESA_TEST_TIGHT") != NULL;
    r->lead = (tight ? 0 : GUARD) + (int64_t)((uintptr_t)r->low % 64);
    r->bytes = r->lead + used + (tight ? 0 : GUARD);
    r->image = malloc((size_t)r->bytes);
    r->gpu = gpu_new(r->bytes);
    if (!r->image || !r->gpu) return 0;
    memset(r->image, GUARD_BYTE, (size_t)r->bytes);
    memcpy(r->image + r->lead, r->low, (size_t)used);
    return gpu_put(r->gpu, r->image, r->bytes);
}

void mirror_close(mirror *m)
{
    for (int i = 0; i < m->regions; i++) {
        gpu_free(m->region[i].gpu);
        free(m->region[i].image);
    }
    gpu_free(m->kv_len);
}

/* Where a byte of the host is on the GPU. */
static void *on_the_gpu(const mirror *m, const void *host)
{
    const char *at = host;
    for (int j = 0; j < m->regions; j++) {
        const region *r = &m->region[j];
        if (at >= r->low && at < r->high) return r->gpu + r->lead + (at - r->low);
    }
    return NULL;
}

int mirror_open(mirror *m, const esa_tensor *const *host, int views)
{
    return mirror_open_carry(m, host, views, NULL, 0);
}

/* 0 if a copy failed. host[i] NULL: not given. */
int mirror_open_carry(mirror *m, const esa_tensor *const *host, int views, const esa_carry *carry,
                      int32_t use)
{
    memset(m, 0, sizeof *m);
    m->views = views;
    m->host_carry = carry;
    m->makes = use == ESA_CARRY_MAKE;
    for (int i = 0; i < views; i++) {
        char *low, *high;
        m->host[i] = host[i];
        if (!host[i]) continue;
        span(host[i], &low, &high);
        add_region(m, low, high);
    }
    if (carry) {
        char *value = carry->value, *scale = (char *)carry->scale;
        add_region(m, value, value + carry_bytes(carry));
        if (scale) add_region(m, scale, scale + carry->B * carry->H * carry->N * 4);
    }
    for (int i = 0; i < m->regions; i++)
        if (!open_region(&m->region[i])) return 0;
    if (carry) {
        m->carry = *carry;
        m->carry.device = ESA_DEVICE_CUDA;
        m->carry.value = on_the_gpu(m, carry->value);
        if (carry->scale) m->carry.scale = on_the_gpu(m, carry->scale);
    }
    for (int i = 0; i < views; i++) {
        if (!host[i]) continue;
        m->view[i] = *host[i];
        m->view[i].device = ESA_DEVICE_CUDA;
        m->view[i].data = on_the_gpu(m, host[i]->data);
    }
    return 1;
}

const esa_tensor *gpu_view(const mirror *m, int i) { return m->host[i] ? &m->view[i] : NULL; }

/* Lengths, on the GPU like the tensors. */
const int32_t *put_lengths(mirror *m, const int32_t *kv_len, int64_t B)
{
    if (!kv_len) return NULL;
    m->kv_len = gpu_new(B * 4);
    if (m->kv_len) gpu_put(m->kv_len, kv_len, B * 4);
    return m->kv_len;
}

/* Copies the rows of one output from a downloaded region to the host and to the region's image. */
static void take_rows(const esa_tensor *t, region *r, const unsigned char *now)
{
    const int64_t size = esa_dtype_size(t->dtype);
    for (int64_t b = 0; b < t->dim[0]; b++)
        for (int64_t h = 0; h < t->dim[1]; h++)
            for (int64_t n = 0; n < t->dim[2]; n++) {
                char *row = (char *)t->data +
                            (b * t->stride[0] + h * t->stride[1] + n * t->stride[2]) * size;
                if (row < r->low || row >= r->high) return; /* the view lies in another region */
                const int64_t at = r->lead + (row - r->low);
                memcpy(row, now + at, (size_t)(t->dim[3] * size));
                memcpy(r->image + at, now + at, (size_t)(t->dim[3] * size));
            }
}

/* The same for bytes that follow each other. */
static void take_bytes(void *host, int64_t bytes, region *r, const unsigned char *now)
{
    if (!host || (char *)host < r->low || (char *)host >= r->high) return;
    const int64_t at = r->lead + ((char *)host - r->low);
    memcpy(host, now + at, (size_t)bytes);
    memcpy(r->image + at, now + at, (size_t)bytes);
}

/* Outputs (views from `first` on, and a difference that is made) go back to the host; nothing else
 * may have changed, and nothing at all after a failure. */
esa_status mirror_check(mirror *m, esa_status status, int first, const char *call)
{
    for (int i = 0; i < m->regions; i++) {
        region *r = &m->region[i];
        unsigned char *now = malloc((size_t)r->bytes);
        if (!now || !gpu_get(now, r->gpu, r->bytes)) {
            free(now);
            return status ? status : ESA_ERR_INTERNAL;
        }
        for (int v = first; v < m->views && !status; v++)
            if (m->host[v]) take_rows(m->host[v], r, now);
        const esa_carry *c = m->makes && !status ? m->host_carry : NULL;
        if (c) {
            take_bytes(c->value, carry_bytes(c), r, now);
            take_bytes(c->scale, c->B * c->H * c->N * 4, r, now);
        }
        int64_t at = 0, changed = 0, where = 0;
        for (; at < r->bytes; at++)
            if (now[at] != r->image[at]) {
                if (!changed++) where = at - r->lead;
            }
        if (changed) {
            fprintf(
                stderr,
                "on_gpu: %s changed %lld bytes that are no output, the first at %+lld of %lld\n",
                call, (long long)changed, (long long)where, (long long)(r->high - r->low));
            status = ESA_ERR_INTERNAL;
        }
        free(now);
    }
    return status;
}

/* ---------------------------------------------------------------- the caller's workspace, exactly
 * as large as announced */

workspace workspace_open(const esa_plan *plan, const void *host)
{
    workspace w = { NULL, NULL, 0 };
    if (!host || esa_plan_workspace(plan, &w.bytes)) return w;
    unsigned char *image = malloc((size_t)(w.bytes + 2 * GUARD));
    w.gpu = gpu_new(w.bytes + 2 * GUARD);
    if (image && w.gpu) {
        memset(image, GUARD_BYTE, (size_t)(w.bytes + 2 * GUARD));
        gpu_put(w.gpu, image, w.bytes + 2 * GUARD);
        w.ws = w.gpu + GUARD + (uintptr_t)host % ESA_WORKSPACE_ALIGN;
    }
    free(image);
    return w;
}

esa_status workspace_close(const workspace *w, esa_status status)
{
    if (!w->gpu) return status;
    const int64_t before = w->ws - w->gpu, after = w->bytes + 2 * GUARD - before - w->bytes;
    unsigned char guard[2 * GUARD];
    if (!gpu_get(guard, w->gpu, before) || !gpu_get(guard + before, w->ws + w->bytes, after))
        status = ESA_ERR_INTERNAL;
    for (int64_t i = 0; i < before + after; i++)
        if (guard[i] != GUARD_BYTE) {
            fprintf(stderr, "on_gpu: a byte %s the workspace of %lld bytes was changed\n",
                    i < before ? "before" : "behind", (long long)w->bytes);
            status = ESA_ERR_INTERNAL;
            break;
        }
    gpu_free(w->gpu);
    return status;
}

/* ---------------------------------------------------------------- lengths that plans and sessions
 * keep */

typedef struct owner {
    const void *of;
    const int32_t *host;
    int32_t *gpu;
    int64_t B;
} owner;
static owner owners[MOST_OWNERS];

static owner *owner_find(const void *of)
{
    for (int i = 0; i < MOST_OWNERS; i++)
        if (owners[i].of == of) return &owners[i];
    return NULL;
}

void owner_drop(const void *of)
{
    pthread_mutex_lock(&lock);
    owner *o = of ? owner_find(of) : NULL;
    const owner gone = o ? *o : (owner){ NULL, NULL, NULL, 0 };
    if (o) memset(o, 0, sizeof *o);
    pthread_mutex_unlock(&lock);
    gpu_free(gone.gpu);
}

int32_t *owner_keep(const void *of, const int32_t *host, int64_t B, int32_t *gpu)
{
    pthread_mutex_lock(&lock);
    owner *o = owner_find(NULL);
    if (o) *o = (owner){ of, host, gpu, B };
    pthread_mutex_unlock(&lock);
    return gpu;
}

/* The values may have changed since the last call. */
void owner_renew(const void *of, int64_t B)
{
    pthread_mutex_lock(&lock);
    const owner *o = owner_find(of);
    const owner copy = o ? *o : (owner){ NULL, NULL, NULL, 0 };
    pthread_mutex_unlock(&lock);
    if (copy.gpu && copy.host) gpu_put(copy.gpu, copy.host, (copy.B ? copy.B : B) * 4);
}
