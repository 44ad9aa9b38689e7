/* gguf_file.h - writes GGUF files for the tests of weights: with the blocks of the golden file, or
 * with true names and shapes and holes for data.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_GGUF_FILE_H
#define ESA_TESTS_MODEL_GGUF_FILE_H

#include "model/golden.h"
#include "base/blocks.h"

typedef struct gguf_tensor_file {
    char name[192];
    int32_t rank;
    int64_t dim[5];   /* outermost first */
    int32_t dtype;    /* ESA_FILE_* or ESA_BLOCKS_* */
    const void *data; /* NULL: a hole */
} gguf_tensor_file;

static inline uint32_t gguf_number(int32_t dtype)
{
    return dtype == ESA_FILE_F16      ? 1
           : dtype == ESA_FILE_BF16   ? 30
           : dtype == ESA_BLOCKS_Q8_0 ? 8
           : dtype == ESA_BLOCKS_Q4_K ? 12
           : dtype == ESA_BLOCKS_Q5_K ? 13
           : dtype == ESA_BLOCKS_Q6_K ? 14
                                      : 0;
}

static inline int64_t gguf_bytes(const gguf_tensor_file *t)
{
    int64_t n = 1;
    for (int32_t i = 0; i < t->rank; i++) n *= t->dim[i];
    const int64_t block = esa_blocks_elements(t->dtype);
    return block ? n / block * esa_blocks_bytes(t->dtype) : n * (t->dtype == ESA_FILE_F32 ? 4 : 2);
}

static inline void gguf_word(FILE *f, uint64_t value, size_t bytes)
{
    assert_int_equal(fwrite(&value, bytes, 1, f), 1);
}

static inline void gguf_words(FILE *f, const char *text)
{
    gguf_word(f, strlen(text), 8);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
}

/* Version 3, architecture wan, alignment 32. Leading dimensions of 1 are dropped, as ggml does. */
static inline void gguf_file_write(const char *path, const gguf_tensor_file *list, int64_t count)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite("GGUF", 4, 1, f), 1);
    gguf_word(f, 3, 4);
    gguf_word(f, (uint64_t)count, 8);
    gguf_word(f, 1, 8);
    gguf_words(f, "general.architecture");
    gguf_word(f, 8, 4);
    gguf_words(f, "wan");
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        const gguf_tensor_file *t = &list[i];
        int32_t first = 0;
        while (first < t->rank - 1 && t->dim[first] == 1) first++;
        gguf_words(f, t->name);
        gguf_word(f, (uint64_t)(t->rank - first), 4);
        for (int32_t d = t->rank - 1; d >= first; d--) gguf_word(f, (uint64_t)t->dim[d], 8);
        gguf_word(f, gguf_number(t->dtype), 4);
        gguf_word(f, (uint64_t)at, 8);
        at += (gguf_bytes(t) + 31) / 32 * 32;
    }
    int64_t place = ((int64_t)ftell(f) + 31) / 32 * 32;
    for (int64_t i = 0; i < count; i++) {
        const int64_t bytes = gguf_bytes(&list[i]);
        if (list[i].data) {
            assert_int_equal(fseek(f, (long)place, SEEK_SET), 0);
            assert_int_equal(fwrite(list[i].data, 1, (size_t)bytes, f), (size_t)bytes);
        }
        place += (bytes + 31) / 32 * 32;
    }
    fclose(f);
    assert_int_equal(truncate(path, (off_t)place), 0);
}

/* The golden blocks of four types as tensors [rows][256]; names are those of the types. */
enum { GGUF_TYPES = 4 };
static inline void gguf_golden(const esa_tensors *golden, gguf_tensor_file *list,
                               const float **values)
{
    for (int32_t i = 0; i < GGUF_TYPES; i++) {
        gguf_tensor_file *t = &list[i];
        esa_tensor_info blocks = { .struct_size = sizeof blocks };
        char name[40];
        int64_t count;
        *t = (gguf_tensor_file){ .rank = 2, .dtype = ESA_BLOCKS_Q8_0 + i };
        snprintf(t->name, sizeof t->name, "%s", esa_blocks_name(t->dtype));
        snprintf(name, sizeof name, "%.8s.blocks", t->name);
        assert_int_equal(esa_tensors_find(golden, name, &blocks), ESA_OK);
        snprintf(name, sizeof name, "%.8s.values", t->name);
        values[i] = golden_find(golden, name, &count);
        t->dim[0] = count / 256;
        t->dim[1] = 256;
        t->data = blocks.data;
    }
}

#endif
