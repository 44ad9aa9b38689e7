/* weights_internal.h - the struct behind esa_weights, for weights.c (files, comparison) and
 * weights_load.c.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_WEIGHTS_INTERNAL_H
#define ESA_MODEL_WEIGHTS_INTERNAL_H

#include "model/weights.h"

#define ESA_WEIGHTS_MAX_SHARDS  256
#define ESA_WEIGHTS_MAX_IGNORED 8

typedef struct esa_wanted {
    char name[160];
    esa_weight *view; /* filled by loading; NULL: only checked */
    int32_t flags, rank, group;
    int64_t dim[5];
    /* set by the check; belongs to the shard, which loading may close */
    const esa_st_entry *entry;
    int32_t shard, present;
    int32_t mapped; /* the view points into the shard */
    void *copy;     /* owned; NULL: none */
    int64_t copy_bytes;
} esa_wanted;

struct esa_weights {
    esa_ctx *ctx;
    char part[64];
    esa_status status; /* first failure of esa_weights_want */
    int32_t checked;
    int32_t random;                                           /* 1: no files, random numbers */
    int32_t group;                                            /* of the tensors wanted next */
    int32_t (*tick)(void *user, int64_t done, int64_t total); /* called between tensors, or NULL */
    void *tick_user;
    /* NULL after loading if no view points into it */
    esa_tensors *shard[ESA_WEIGHTS_MAX_SHARDS];
    int32_t shard_count;
    int32_t ignore_count;
    char ignore[ESA_WEIGHTS_MAX_IGNORED][64];
    esa_wanted *want; /* [count of cap] */
    int64_t count, cap;
    esa_wanted **by_name; /* [count], sorted; set by the check */
};

#endif
