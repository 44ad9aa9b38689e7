/* on_gpu.c - see on_gpu.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Copies go through a ctx of their own: the test's may be busy or counting its allocations. Both
 * work on the default stream, so they are in order. $ESA_TEST_TIGHT leaves the guards behind the
 * bytes away: then compute-sanitizer sees reads past the end, too. */
#define ESA_EXPERIMENTAL
#include "common/on_gpu.h"
#include "base/half.h"
#include "esa/esa_session.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 256, GUARD_BYTE = 0xa5, MOST_VIEWS = 6, MOST_OWNERS = 256, MOST_BATCH = 64 };

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

static void *gpu_new(int64_t bytes)
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

static void gpu_free(void *ptr)
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

typedef struct region {
    char *low, *high;     /* host bytes [low, high) */
    char *gpu;            /* the allocation */
    int64_t lead, bytes;  /* offset of low in it; its size */
    unsigned char *image; /* what was uploaded */
} region;

typedef struct mirror {
    region region[MOST_VIEWS];
    int regions;
    const esa_tensor *host[MOST_VIEWS];
    esa_tensor view[MOST_VIEWS]; /* the same on the GPU */
    int views;
    int32_t *kv_len;
} mirror;

static int usable(const esa_tensor *t)
{
    return t && t->struct_size == sizeof *t && t->device == ESA_DEVICE_CPU && t->data &&
           t->dtype >= 0 && t->dtype <= ESA_DTYPE_BF16 && t->dim[0] > 0 && t->dim[1] > 0 &&
           t->dim[2] > 0 && t->dim[3] > 0 &&
           (double)t->dim[0] * (double)t->dim[1] * (double)t->dim[2] * (double)t->dim[3] < 1e9;
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

static void mirror_close(mirror *m)
{
    for (int i = 0; i < m->regions; i++) {
        gpu_free(m->region[i].gpu);
        free(m->region[i].image);
    }
    gpu_free(m->kv_len);
}

/* 0 if a copy failed. host[i] NULL: not given. */
static int mirror_open(mirror *m, const esa_tensor *const *host, int views)
{
    memset(m, 0, sizeof *m);
    m->views = views;
    for (int i = 0; i < views; i++) {
        char *low, *high;
        m->host[i] = host[i];
        if (!host[i]) continue;
        span(host[i], &low, &high);
        add_region(m, low, high);
    }
    for (int i = 0; i < m->regions; i++)
        if (!open_region(&m->region[i])) return 0;
    for (int i = 0; i < views; i++) {
        if (!host[i]) continue;
        m->view[i] = *host[i];
        m->view[i].device = ESA_DEVICE_CUDA;
        for (int j = 0; j < m->regions; j++) {
            const region *r = &m->region[j];
            char *data = host[i]->data;
            if (data >= r->low && data < r->high)
                m->view[i].data = r->gpu + r->lead + (data - r->low);
        }
    }
    return 1;
}

static const esa_tensor *gpu_view(const mirror *m, int i)
{
    return m->host[i] ? &m->view[i] : NULL;
}

/* Lengths, on the GPU like the tensors. */
static const int32_t *put_lengths(mirror *m, const int32_t *kv_len, int64_t B)
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

/* Outputs (views from `first` on) go back to the host; nothing else may have changed, and nothing
 * at all after a failure. */
static esa_status mirror_check(mirror *m, esa_status status, int first, const char *call)
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

typedef struct workspace {
    char *gpu, *ws;
    int64_t bytes;
} workspace;

static workspace workspace_open(const esa_plan *plan, const void *host)
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

static esa_status workspace_close(const workspace *w, esa_status status)
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

static void owner_drop(const void *of)
{
    pthread_mutex_lock(&lock);
    owner *o = of ? owner_find(of) : NULL;
    const owner gone = o ? *o : (owner){ NULL, NULL, NULL, 0 };
    if (o) memset(o, 0, sizeof *o);
    pthread_mutex_unlock(&lock);
    gpu_free(gone.gpu);
}

static int32_t *owner_keep(const void *of, const int32_t *host, int64_t B, int32_t *gpu)
{
    pthread_mutex_lock(&lock);
    owner *o = owner_find(NULL);
    if (o) *o = (owner){ of, host, gpu, B };
    pthread_mutex_unlock(&lock);
    return gpu;
}

/* The values may have changed since the last call. */
static void owner_renew(const void *of, int64_t B)
{
    pthread_mutex_lock(&lock);
    const owner *o = owner_find(of);
    const owner copy = o ? *o : (owner){ NULL, NULL, NULL, 0 };
    pthread_mutex_unlock(&lock);
    if (copy.gpu && copy.host) gpu_put(copy.gpu, copy.host, (copy.B ? copy.B : B) * 4);
}

/* ---------------------------------------------------------------- the calls */

#define REAL(name) __real_##name
esa_status REAL(esa_attention)(esa_ctx *, const esa_tensor *, const esa_tensor *,
                               const esa_tensor *, const esa_tensor *, const esa_mask *,
                               const esa_attention_params *);
esa_status REAL(esa_select)(esa_ctx *, esa_mask **, const esa_tensor *, const esa_tensor *,
                            const esa_select_params *);
esa_status REAL(esa_importance)(esa_ctx *, float *, double *, const esa_tensor *,
                                const esa_tensor *, const esa_select_params *);
esa_status REAL(esa_mask_mass)(esa_ctx *, double *, const esa_mask *, const esa_tensor *,
                               const esa_tensor *, const esa_attention_params *, int32_t);
esa_status REAL(esa_plan_create)(esa_ctx *, esa_plan **, const esa_shapes *,
                                 const esa_select_params *, const esa_attention_params *);
void REAL(esa_plan_free)(esa_plan *);
esa_status REAL(esa_plan_select)(const esa_plan *, esa_mask *, const esa_tensor *,
                                 const esa_tensor *, void *);
esa_status REAL(esa_plan_attention)(const esa_plan *, const esa_mask *, const esa_tensor *,
                                    const esa_tensor *, const esa_tensor *, const esa_tensor *,
                                    const esa_tensor *, void *);
esa_status REAL(esa_session_begin)(esa_session *);
esa_status REAL(esa_session_set_kv_len)(esa_session *, const int32_t *);
esa_status REAL(esa_session_attention)(esa_session *, int32_t, int32_t, const esa_tensor *,
                                       const esa_tensor *, const esa_tensor *, const esa_tensor *,
                                       const esa_tensor *);
void REAL(esa_session_free)(esa_session *);

/* Prototypes for the names the linker makes up. */
#define WRAP(name) __wrap_##name
__typeof__(REAL(esa_attention)) WRAP(esa_attention);
__typeof__(REAL(esa_select)) WRAP(esa_select);
__typeof__(REAL(esa_importance)) WRAP(esa_importance);
__typeof__(REAL(esa_mask_mass)) WRAP(esa_mask_mass);
__typeof__(REAL(esa_plan_create)) WRAP(esa_plan_create);
__typeof__(REAL(esa_plan_free)) WRAP(esa_plan_free);
__typeof__(REAL(esa_plan_select)) WRAP(esa_plan_select);
__typeof__(REAL(esa_plan_attention)) WRAP(esa_plan_attention);
__typeof__(REAL(esa_session_begin)) WRAP(esa_session_begin);
__typeof__(REAL(esa_session_set_kv_len)) WRAP(esa_session_set_kv_len);
__typeof__(REAL(esa_session_attention)) WRAP(esa_session_attention);
__typeof__(REAL(esa_session_free)) WRAP(esa_session_free);

esa_status WRAP(esa_attention)(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                               const esa_tensor *v, const esa_tensor *o, const esa_mask *mask,
                               const esa_attention_params *params)
{
    const esa_tensor *lse = params && params->struct_size == sizeof *params ? params->lse : NULL;
    if (!on_gpu() || !usable(q) || !usable(k) || !usable(v) || !usable(o) || (lse && !usable(lse)))
        return REAL(esa_attention)(ctx, q, k, v, o, mask, params);
    mirror m;
    const esa_tensor *const host[] = { q, k, v, o, lse };
    esa_attention_params p = params ? *params : esa_attention_params_default();
    esa_status status = ESA_ERR_INTERNAL;
    if (mirror_open(&m, host, 5)) {
        if (p.struct_size == sizeof p) {
            p.kv_len = put_lengths(&m, p.kv_len, q->dim[0]);
            p.lse = gpu_view(&m, 4);
        }
        status = REAL(esa_attention)(ctx, gpu_view(&m, 0), gpu_view(&m, 1), gpu_view(&m, 2),
                                     gpu_view(&m, 3), mask, &p);
        status = mirror_check(&m, status, 3, "esa_attention");
    }
    mirror_close(&m);
    return status;
}

esa_status WRAP(esa_select)(esa_ctx *ctx, esa_mask **mask, const esa_tensor *q, const esa_tensor *k,
                            const esa_select_params *params)
{
    if (!on_gpu() || !usable(q) || !usable(k)) return REAL(esa_select)(ctx, mask, q, k, params);
    mirror m;
    const esa_tensor *const host[] = { q, k };
    esa_select_params p = params ? *params : esa_select_params_default(ESA_SELECT_ENTROPY);
    esa_status status = ESA_ERR_INTERNAL;
    if (mirror_open(&m, host, 2)) {
        if (p.struct_size == sizeof p) p.kv_len = put_lengths(&m, p.kv_len, q->dim[0]);
        status = mirror_check(&m, REAL(esa_select)(ctx, mask, gpu_view(&m, 0), gpu_view(&m, 1), &p),
                              2, "esa_select");
    }
    mirror_close(&m);
    return status;
}

esa_status WRAP(esa_importance)(esa_ctx *ctx, float *out, double *entropy, const esa_tensor *q,
                                const esa_tensor *k, const esa_select_params *params)
{
    if (!on_gpu() || !usable(q) || !usable(k))
        return REAL(esa_importance)(ctx, out, entropy, q, k, params);
    mirror m;
    const esa_tensor *const host[] = { q, k };
    esa_select_params p = params ? *params : esa_select_params_default(ESA_SELECT_ENTROPY);
    esa_status status = ESA_ERR_INTERNAL;
    if (mirror_open(&m, host, 2)) {
        if (p.struct_size == sizeof p) p.kv_len = put_lengths(&m, p.kv_len, q->dim[0]);
        status = mirror_check(
            &m, REAL(esa_importance)(ctx, out, entropy, gpu_view(&m, 0), gpu_view(&m, 1), &p), 2,
            "esa_importance");
    }
    mirror_close(&m);
    return status;
}

/* The mass is measured on the CPU: only the mask comes back. */
esa_status WRAP(esa_mask_mass)(esa_ctx *ctx, double *mass, const esa_mask *mask,
                               const esa_tensor *q, const esa_tensor *k,
                               const esa_attention_params *params, int32_t row_step)
{
    esa_mask *copy = NULL;
    esa_status status = ESA_OK;
    if (on_gpu() && mask) status = esa_mask_to_device(ctx, &copy, mask, ESA_DEVICE_CPU);
    if (!status)
        status = REAL(esa_mask_mass)(ctx, mass, copy ? copy : mask, q, k, params, row_step);
    esa_mask_free(copy);
    return status;
}

esa_status WRAP(esa_plan_create)(esa_ctx *ctx, esa_plan **plan, const esa_shapes *shapes,
                                 const esa_select_params *select,
                                 const esa_attention_params *attention)
{
    if (!on_gpu() || !shapes || shapes->struct_size != sizeof *shapes ||
        shapes->device != ESA_DEVICE_CPU)
        return REAL(esa_plan_create)(ctx, plan, shapes, select, attention);
    esa_shapes s = *shapes;
    esa_select_params sp = select ? *select : esa_select_params_default(ESA_SELECT_ENTROPY);
    esa_attention_params ap = attention ? *attention : esa_attention_params_default();
    const int32_t *host = select && sp.struct_size == sizeof sp && sp.kv_len ? sp.kv_len
                          : ap.struct_size == sizeof ap                      ? ap.kv_len
                                                                             : NULL;
    int32_t *gpu = host ? gpu_new(s.B * 4) : NULL;
    if (gpu && sp.struct_size == sizeof sp && sp.kv_len) sp.kv_len = gpu;
    if (gpu && ap.kv_len) ap.kv_len = gpu;
    s.device = ESA_DEVICE_CUDA;
    const esa_status status = REAL(esa_plan_create)(ctx, plan, &s, select ? &sp : NULL,
                                                    attention ? &ap : NULL);
    if (status || !gpu)
        gpu_free(gpu);
    else
        owner_keep(*plan, host, s.B, gpu);
    return status;
}

void WRAP(esa_plan_free)(esa_plan *plan)
{
    owner_drop(plan);
    REAL(esa_plan_free)(plan);
}

esa_status WRAP(esa_plan_select)(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                                 const esa_tensor *k, void *ws)
{
    if (!on_gpu() || !usable(q) || !usable(k)) return REAL(esa_plan_select)(plan, mask, q, k, ws);
    mirror m;
    const esa_tensor *const host[] = { q, k };
    esa_status status = ESA_ERR_INTERNAL;
    owner_renew(plan, q->dim[0]);
    const workspace w = workspace_open(plan, ws);
    if (mirror_open(&m, host, 2))
        status = mirror_check(
            &m, REAL(esa_plan_select)(plan, mask, gpu_view(&m, 0), gpu_view(&m, 1), w.ws), 2,
            "esa_plan_select");
    mirror_close(&m);
    return workspace_close(&w, status);
}

esa_status WRAP(esa_plan_attention)(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                                    const esa_tensor *k, const esa_tensor *v, const esa_tensor *o,
                                    const esa_tensor *lse, void *ws)
{
    if (!on_gpu() || !usable(q) || !usable(k) || !usable(v) || !usable(o) || (lse && !usable(lse)))
        return REAL(esa_plan_attention)(plan, mask, q, k, v, o, lse, ws);
    mirror m;
    const esa_tensor *const host[] = { q, k, v, o, lse };
    esa_status status = ESA_ERR_INTERNAL;
    owner_renew(plan, q->dim[0]);
    const workspace w = workspace_open(plan, ws);
    if (mirror_open(&m, host, 5)) {
        status = REAL(esa_plan_attention)(plan, mask, gpu_view(&m, 0), gpu_view(&m, 1),
                                          gpu_view(&m, 2), gpu_view(&m, 3), gpu_view(&m, 4), w.ws);
        status = mirror_check(&m, status, 3, "esa_plan_attention");
    }
    mirror_close(&m);
    return workspace_close(&w, status);
}

esa_status WRAP(esa_session_begin)(esa_session *session)
{
    owner_drop(session);
    return REAL(esa_session_begin)(session);
}

esa_status WRAP(esa_session_set_kv_len)(esa_session *session, const int32_t *kv_len)
{
    if (!on_gpu() || !session) return REAL(esa_session_set_kv_len)(session, kv_len);
    owner_drop(session);
    /* the batch is known when attention is called */
    int32_t *gpu = kv_len ? gpu_new(MOST_BATCH * 4) : NULL;
    if (gpu) owner_keep(session, kv_len, 0, gpu);
    return REAL(esa_session_set_kv_len)(session, gpu);
}

esa_status WRAP(esa_session_attention)(esa_session *session, int32_t layer, int32_t kind,
                                       const esa_tensor *q, const esa_tensor *k,
                                       const esa_tensor *v, const esa_tensor *o,
                                       const esa_tensor *lse)
{
    if (!on_gpu() || !usable(q) || !usable(k) || !usable(v) || !usable(o) || (lse && !usable(lse)))
        return REAL(esa_session_attention)(session, layer, kind, q, k, v, o, lse);
    mirror m;
    const esa_tensor *const host[] = { q, k, v, o, lse };
    esa_status status = ESA_ERR_INTERNAL;
    owner_renew(session, q->dim[0]);
    if (mirror_open(&m, host, 5)) {
        status = REAL(esa_session_attention)(session, layer, kind, gpu_view(&m, 0), gpu_view(&m, 1),
                                             gpu_view(&m, 2), gpu_view(&m, 3), gpu_view(&m, 4));
        status = mirror_check(&m, status, 3, "esa_session_attention");
    }
    mirror_close(&m);
    return status;
}

void WRAP(esa_session_free)(esa_session *session)
{
    owner_drop(session);
    REAL(esa_session_free)(session);
}
