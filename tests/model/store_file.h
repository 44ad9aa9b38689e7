/* store_file.h - a part with groups for the tests of the store: its tensors, a file of them in
 * every type, and the values that the file holds.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_STORE_FILE_H
#define ESA_TESTS_MODEL_STORE_FILE_H

#include <math.h>
#include "io/scratch.h"
#include "base/half.h"
#include "esa/esa_tensors.h"
#include "model/fill.h"
#include "model/weights/store.h"

enum { PART_BLOCKS = 7, PART_TENSORS = 3 + 10 * PART_BLOCKS, PART_WIDTH = 24 };

typedef struct part_tensor {
    char name[64];
    int32_t group, flags, rank;
    int64_t dim[3];
    int32_t file; /* ESA_FILE_* */
    esa_weight view;
} part_tensor;

/* The tensors, and how a file holds them: type -1 mixes F32, F16 and BF16. */
typedef struct part {
    part_tensor tensor[PART_TENSORS];
    int32_t count;
    scratch folder;
} part;

static inline void part_add(part *p, int32_t group, int32_t flags, int32_t file, int64_t a,
                            int64_t b, const char *name)
{
    part_tensor *t = &p->tensor[p->count];
    *t = (part_tensor){ .group = group, .flags = flags, .rank = b ? 2 : 1, .dim = { a, b } };
    snprintf(t->name, sizeof t->name, "%s", name);
    t->file = file >= 0 ? file : p->count % 3;
    p->count++;
}

static inline void part_make(part *p, int32_t file)
{
    static const char *const qkv[3] = { "q", "k", "v" };
    const int64_t d = PART_WIDTH;
    char name[64];
    p->count = 0;
    part_add(p, 0, 0, file, 3 * d, d, "embed.weight");
    part_add(p, 0, ESA_WANT_F32, -1, d, 0, "out_norm.weight");
    part_add(p, 0, ESA_WANT_HOST, -1, 10, d, "words.weight");
    for (int32_t i = 0; i < PART_BLOCKS; i++) {
        const int32_t f8 = i && i < PART_BLOCKS - 1 ? ESA_WANT_F8 : 0;
        for (int32_t k = 0; k < 3; k++) {
            snprintf(name, sizeof name, "blocks.%d.%s.weight", i, qkv[k]);
            part_add(p, 1 + i, f8 | (k ? ESA_WANT_JOIN : 0), file, d, d, name);
        }
        for (int32_t k = 0; k < 3; k++) {
            snprintf(name, sizeof name, "blocks.%d.%s.bias", i, qkv[k]);
            part_add(p, 1 + i, k ? ESA_WANT_JOIN : 0, -1, d, 0, name);
        }
        snprintf(name, sizeof name, "blocks.%d.norm.weight", i);
        part_add(p, 1 + i, ESA_WANT_F32, -1, d, 0, name);
        snprintf(name, sizeof name, "blocks.%d.up.weight", i);
        part_add(p, 1 + i, f8, file, i == 3 ? 5 * d : 3 * d, d, name); /* one is larger */
        snprintf(name, sizeof name, "blocks.%d.up.bias", i);
        part_add(p, 1 + i, 0, -1, i == 3 ? 5 * d : 3 * d, 0, name);
        snprintf(name, sizeof name, "blocks.%d.table", i);
        part_add(p, 1 + i, ESA_WANT_F32, -1, 6, d, name);
    }
    assert_int_equal(p->count, PART_TENSORS);
}

static inline int64_t part_count(const part_tensor *t)
{
    return t->dim[0] * (t->rank > 1 ? t->dim[1] : 1);
}

/* Scales of an E4M3 tensor in the file: one for each row, one, or none. */
static inline int64_t part_scales(const part *p, const part_tensor *t)
{
    const int64_t n = t - p->tensor;
    return t->file != ESA_FILE_F8_E4M3 || n % 3 == 2 ? 0 : n % 3 == 1 ? 1 : t->dim[0];
}

static inline float part_scale(const part *p, const part_tensor *t, int64_t row)
{
    const int64_t n = part_scales(p, t);
    return n == 0 ? 1.0f : 0.002f + 0.001f * (float)(n == 1 ? 0 : row % 7);
}

/* Element i as the file stores it, without its scale. */
static inline float part_stored(const part_tensor *t, int64_t i)
{
    const float x = fill_unit(fill_name(t->name), i);
    return t->file == ESA_FILE_F8_E4M3 ? esa_f8_to_f32(esa_f32_to_f8(200 * x))
                                       : esa_round_to(x, t->file);
}

/* The value of element i. */
static inline float part_value(const part *p, const part_tensor *t, int64_t i)
{
    const float x = part_stored(t, i);
    if (t->file != ESA_FILE_F8_E4M3) return x;
    return x * part_scale(p, t, t->rank > 1 ? i / t->dim[1] : 0);
}

static inline void part_write_tensor(esa_tensors_writer *w, const part *p, const part_tensor *t)
{
    const int64_t n = part_count(t), scales = part_scales(p, t);
    uint8_t *bytes = malloc((size_t)n * 4);
    float *scale = malloc((size_t)(scales + 1) * 4);
    const int32_t f8 = t->file == ESA_FILE_F8_E4M3;
    for (int64_t i = 0; i < n; i++)
        if (f8)
            bytes[i] = esa_f32_to_f8(part_stored(t, i));
        else
            esa_store_f32(bytes, i, t->file, part_stored(t, i));
    assert_int_equal(esa_tensors_writer_data(w, bytes, n * (f8 ? 1 : esa_dtype_size(t->file))),
                     ESA_OK);
    for (int64_t i = 0; i < scales; i++) scale[i] = part_scale(p, t, i);
    if (scales) assert_int_equal(esa_tensors_writer_data(w, scale, 4 * scales), ESA_OK);
    free(bytes);
    free(scale);
}

/* Writes folder/part.safetensors; E4M3 tensors with scales under both names that are in use. */
static inline void part_write(part *p, esa_ctx *ctx)
{
    esa_tensors_writer *w = NULL;
    p->folder = scratch_make();
    assert_int_equal(
        esa_tensors_writer_create(ctx, &w, scratch_path(&p->folder, "part.safetensors")), ESA_OK);
    for (int32_t i = 0; i < p->count; i++) {
        const part_tensor *t = &p->tensor[i];
        const int64_t scales = part_scales(p, t);
        assert_int_equal(esa_tensors_writer_declare(w, t->name, t->file, t->rank, t->dim), ESA_OK);
        char name[96];
        snprintf(name, sizeof name, "%.*s%s", (int)(strlen(t->name) - strlen(".weight")), t->name,
                 i % 2 ? ".weight_scale" : ".scale_weight");
        if (scales)
            assert_int_equal(esa_tensors_writer_declare(w, name, ESA_FILE_F32, scales > 1, &scales),
                             ESA_OK);
    }
    for (int32_t i = 0; i < p->count; i++) part_write_tensor(w, p, &p->tensor[i]);
    assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
    esa_tensors_writer_free(w);
}

static inline void part_want(part *p, esa_weights *w)
{
    for (int32_t i = 0; i < p->count; i++) {
        part_tensor *t = &p->tensor[i];
        esa_weights_group(w, t->group);
        esa_weights_want(w, &t->view, t->flags, t->rank, t->dim, "%s", t->name);
    }
}

#endif
