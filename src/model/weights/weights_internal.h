/* weights_internal.h - the struct behind esa_weights, for weights.c (files, comparison) and
 * weights_load.c.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_WEIGHTS_INTERNAL_H
#define ESA_MODEL_WEIGHTS_INTERNAL_H

#include "model/weights/lora.h"
#include "model/weights/weights.h"

#define ESA_WEIGHTS_MAX_SHARDS  256
#define ESA_WEIGHTS_MAX_IGNORED 8
#define ESA_RUNS                2 /* most runs of a tensor that lies otherwise in a file */

/* Where the elements of a wanted tensor lie in a tensor of a file. */
typedef struct esa_share {
    int32_t runs;         /* equal pieces of the wanted tensor; 0: it is the file's, as it is */
    int64_t at[ESA_RUNS]; /* element of the file's tensor that a run begins with */
    int64_t side;         /* side 0 of the file's tensor */
} esa_share;

typedef struct esa_wanted {
    char name[160];   /* in the layout of diffusers */
    char file[192];   /* in the files; set by the check */
    esa_weight *view; /* filled by loading; NULL: only checked */
    int32_t flags, rank, group;
    int64_t dim[5];
    /* set by the check; belongs to the shard, which loading may close */
    const esa_st_entry *entry;
    esa_share share; /* where it lies in entry */
    int32_t shard, present;
    const esa_st_entry *scale; /* E4M3: its scale in the file; NULL: 1 */
    int32_t scale_shard;
    const esa_st_entry *input; /* E4M3: a scale of activations, which is not used; NULL: none */
    esa_delta *delta;          /* changes of LoRA files; NULL: none; set by the check */
    int32_t mapped;            /* the view points into the shard */
    void *copy;                /* owned; NULL: none */
    int64_t copy_bytes;
} esa_wanted;

/* A name in a file, and a wanted tensor that lies there, alone or with others. */
typedef struct esa_place {
    const char *name;
    esa_wanted *e;
    const char *runs; /* digits of the rule; "": the tensor is the file's, as it is */
    esa_share share;  /* set by esa_places_sort */
} esa_place;

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
    int32_t named;            /* 1: one file that the caller named */
    const esa_naming *naming; /* NULL: names are those of diffusers */
    const char *prefix;       /* of names in the files; set by the check */
    const esa_naming *theirs; /* layout of the files; NULL: diffusers; set by the check */
    esa_loras loras;
    int32_t ignore_count;
    char ignore[ESA_WEIGHTS_MAX_IGNORED][64];
    esa_wanted *want; /* [count of cap] */
    int64_t count, cap;
    esa_place *place; /* [count], sorted by the names in the files; set by the check */
};

/* weights_place.c. Sorts by names and finds out where the tensors lie under them. */
void esa_places_sort(esa_place *list, int64_t count);
/* The first place of this name, and the next one of the same name; NULL: none. */
esa_place *esa_places_find(esa_place *list, int64_t count, const char *name);
esa_place *esa_places_next(esa_place *list, int64_t count, const esa_place *p);
/* The element of the file's tensor where element i of a wanted one lies. *left, if not NULL,
 * becomes the number of elements that follow one another there, this one included. */
int64_t esa_share_element(const esa_share *share, const esa_wanted *e, int64_t i, int64_t *left);
int64_t esa_wanted_count(const esa_wanted *e); /* elements */

/* weights_names.c: finds out which layout the files have. */
void esa_weights_layout(esa_weights *w);
/* After that: the tensor with this name of diffusers; NULL: the files have none. */
const esa_st_entry *esa_weights_entry(const esa_weights *w, const char *name);
/* Side i of that tensor, from 1 to 65536; otherwise, if it is not there or has another rank. */
int32_t esa_weights_side(const esa_weights *w, const char *name, int32_t rank, int32_t i,
                         int32_t otherwise);
/* One more than the highest number of a block, up to 1024. first: the name in diffusers of a tensor
 * of block 0, whose number is the first digit in it. */
int32_t esa_weights_blocks(const esa_weights *w, const char *first);
/* Writes the name of a tensor of diffusers in another layout; *runs = the digits of its rule, or
 * "". 0 if it is too long. */
int32_t esa_naming_apply(char *out, size_t size, const esa_naming *naming, const char *name,
                         const char **runs);
/* Finds the layout and sets the names of the wanted tensors in the files. */
esa_status esa_weights_rename(esa_weights *w);
/* 1 if a name of the files belongs to another part, because it lacks the prefix. */
int32_t esa_weights_foreign(const esa_weights *w, const char *name);
/* Reports what a file is that the caller named: format, architecture, types, layout. */
void esa_weights_about(const esa_weights *w, void (*report)(void *user, const char *line),
                       void *user);

/* weights_load.c. The type of a wanted tensor in the file, as ESA_DTYPE_* or ESA_BLOCKS_*. */
int32_t esa_weights_file_dtype(const esa_wanted *e);
/* Rows: dim[0]; of a vector 1, or its runs. No row lies in two runs. */
int64_t esa_weights_rows(const esa_wanted *e);
/* Bytes of elements in a file; those with blocks are whole blocks. */
int64_t esa_weights_size(int32_t dtype, int64_t elements);
/* Where element i of a tensor lies in its mapped file. */
const uint8_t *esa_weights_data(const esa_weights *w, const esa_wanted *e, int64_t i);
/* Loads one tensor into host memory, held in dtype, and fills its view. */
esa_status esa_weights_load_one(esa_weights *w, esa_wanted *e, int32_t dtype);
/* The type that hold means for a tensor. */
int32_t esa_weights_held(const esa_weights *w, const esa_wanted *e, int32_t hold);
/* Copies bytes of a shard with all threads, and gives the pages of the file back. */
void esa_weights_copy(esa_weights *w, int32_t shard, void *dst, const void *src, int64_t bytes);
/* Writes elements first .. first+count-1 of a tensor with blocks to dst, in f32 or bf16, with all
 * threads, and gives the pages of the file back. They begin and end with a block and lie in one
 * run. */
void esa_weights_expand(esa_weights *w, const esa_wanted *e, void *dst, int32_t dtype,
                        int64_t first, int64_t count);
/* Gives the pages of elements first .. end-1, of one run, of a mapped file back. */
void esa_weights_give_back(const esa_weights *w, const esa_wanted *e, int64_t first, int64_t end);
/* Bytes of the tensor in the file; 0 if it is not loaded. Random tensors count as BF16. */
int64_t esa_weights_bytes(const esa_weights *w, const esa_wanted *e);
/* Closes the shards that no view points into. The object cannot load again. */
void esa_weights_close_files(esa_weights *w);

/* weights_f8.c. 1 if a tensor of the file is named as the scale of a wanted tensor, or as a scale
 * of its activations; notes it there. */
int32_t esa_weights_take_scale(esa_weights *w, const esa_st_entry *entry, int32_t shard);
/* NULL, or what is wrong with the scales of a tensor, once all files were compared; *name is that
 * of the scale. */
const char *esa_weights_scale_fault(const esa_wanted *e, const char **name);
/* *scale = the scales of the rows, [esa_weights_rows], to be freed by the caller with ctx->mem. */
esa_status esa_weights_scales(esa_weights *w, const esa_wanted *e, float **scale);

/* weights_random.c. Mean and deviation of a random tensor, and its seed. */
void esa_weights_bell(const esa_wanted *e, float *mean, float *deviation);
uint64_t esa_weights_seed(const esa_wanted *e);

#endif
