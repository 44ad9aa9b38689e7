/* on_gpu_mirror.h - between on_gpu.c, which copies, and on_gpu_calls.c, which calls.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_ON_GPU_MIRROR_H
#define ESA_TESTS_ON_GPU_MIRROR_H

#include "common/on_gpu.h"
#include "esa/esa_carry.h"

enum { MOST_VIEWS = 8, MOST_BATCH = 64 };

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
    const esa_carry *host_carry; /* or NULL */
    esa_carry carry;             /* the same on the GPU */
    int32_t makes;               /* the call writes it */
} mirror;

typedef struct workspace {
    char *gpu, *ws;
    int64_t bytes;
} workspace;

/* Memory of the GPU, through a ctx of its own. */
void *gpu_new(int64_t bytes);
void gpu_free(void *ptr);

/* 1 if the view is one on the CPU that can be copied. */
int usable(const esa_tensor *t);
int usable_carry(const esa_carry *c);
/* Copies all views to the GPU (host[i] may be NULL); 0: failed. Close the mirror in any case. */
int mirror_open(mirror *m, const esa_tensor *const *host, int views);
/* The same with a carried difference. */
int mirror_open_carry(mirror *m, const esa_tensor *const *host, int views, const esa_carry *carry,
                      int32_t use);
void mirror_close(mirror *m);
const esa_tensor *gpu_view(const mirror *m, int i);
const int32_t *put_lengths(mirror *m, const int32_t *kv_len, int64_t B);
/* Views from `first` on are outputs and come back; the others must not have changed. */
esa_status mirror_check(mirror *m, esa_status status, int first, const char *call);

/* A guarded workspace on the GPU, exactly as large as announced; none if host is NULL. */
workspace workspace_open(const esa_plan *plan, const void *host);
esa_status workspace_close(const workspace *w, esa_status status);

/* Key lengths that a plan or session keeps on the GPU. */
void owner_drop(const void *of);
int32_t *owner_keep(const void *of, const int32_t *host, int64_t B, int32_t *gpu);
void owner_renew(const void *of, int64_t B);

#endif
