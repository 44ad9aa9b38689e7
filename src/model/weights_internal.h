/* weights_internal.h - what an esa_weights holds; shared by weights.c (files, comparison) and
 * weights_load.c.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_WEIGHTS_INTERNAL_H
#define ESA_MODEL_WEIGHTS_INTERNAL_H

#include "model/weights.h"

#define ESA_WEIGHTS_MAX_SHARDS  256
#define ESA_WEIGHTS_MAX_IGNORED 8

typedef struct esa_wanted {
    char name[160];
    esa_weight *view; /* to fill; NULL: only checked */
    int32_t flags, rank;
    int64_t dim[5];
    /* found by the check; belongs to the shard, which may be closed after loading */
    const esa_st_entry *entry;
    int32_t shard, present;
    int32_t mapped; /* the view points into the shard */
    void *copy;     /* owned; NULL: none */
    int64_t copy_bytes;
} esa_wanted;

struct esa_weights {
    esa_ctx *ctx;
    char part[64];
    esa_status status; /* of the wishes */
    int32_t checked;
    int32_t (*tick)(void *user, int64_t done, int64_t total); /* NULL, or asked between tensors */
    void *tick_user;
    /* NULL after loading, where nothing points into it any more */
    esa_tensors *shard[ESA_WEIGHTS_MAX_SHARDS];
    int32_t shard_count;
    int32_t ignore_count;
    char ignore[ESA_WEIGHTS_MAX_IGNORED][64];
    esa_wanted *want; /* [count of cap] */
    int64_t count, cap;
    esa_wanted **by_name; /* [count], sorted; made by the check */
};

#endif
