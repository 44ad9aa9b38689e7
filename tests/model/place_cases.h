/* place_cases.h - tensors that lie otherwise in a file: several in one, halves that change places
 * or alternate. Files of every type, the rows that each wanted tensor has there, written a second
 * time and not taken from the engine, and a LoRA in the names of the file.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_PLACE_CASES_H
#define ESA_TESTS_MODEL_PLACE_CASES_H

#include "model/gguf_file.h"
#include "model/weights/lora.h"
#include "model/store_file.h"

enum { PLACE_COLS = 32, PLACE_WANTED = 16, PLACE_FILE = 8, PLACE_RANK = 3 };

static const esa_naming_rule place_rules[] = {
    { "blocks.#.q", "layers.#.fused@0" },
    { "blocks.#.k", "layers.#.fused@1" },
    { "blocks.#.v", "layers.#.fused@2" },
    { "blocks.#.up", "layers.#.fused@3" },
    { "last", "final.1@10" },
    { "first.one", "both.0@02" },
    { "first.two", "both.0@13" },
    { "blocks.#.out", "layers.#.proj" },
};
static const esa_naming place_other = { .name = "another", .marker = "nowhere" };
static const esa_naming place_naming = { .name = "the test",
                                         .marker = "layers.0.fused.weight",
                                         .rule = place_rules,
                                         .rules = 8,
                                         .next = &place_other };

/* A wanted tensor: sides, and first and number of rows of its runs in the file's tensor. Even
 * numbers are weights, the next one is the bias. */
typedef struct place_case {
    const char *name;
    int32_t file; /* number of the file's tensor */
    int64_t rows, from[2][2];
    esa_weight view;
} place_case;

#define PLACE_BOTH(layer, number, ...)                                                             \
    { layer ".weight", number, __VA_ARGS__ }, { layer ".bias", number + 1, __VA_ARGS__ }
#define PLACE_NONE { 0 }

static inline void place_wanted(place_case c[PLACE_WANTED])
{
    const place_case list[PLACE_WANTED] = {
        PLACE_BOTH("blocks.0.q", 0, 8, { { 0, 8 } }, PLACE_NONE),
        PLACE_BOTH("blocks.0.k", 0, 8, { { 8, 8 } }, PLACE_NONE),
        PLACE_BOTH("blocks.0.v", 0, 8, { { 16, 8 } }, PLACE_NONE),
        PLACE_BOTH("blocks.0.up", 0, 20, { { 24, 20 } }, PLACE_NONE),
        PLACE_BOTH("last", 2, 12, { { 6, 6 }, { 0, 6 } }, PLACE_NONE),
        PLACE_BOTH("first.one", 4, 4, { { 0, 2 }, { 12, 2 } }, PLACE_NONE),
        PLACE_BOTH("first.two", 4, 20, { { 2, 10 }, { 14, 10 } }, PLACE_NONE),
        PLACE_BOTH("blocks.0.out", 6, 5, { { 0, 5 } }, PLACE_NONE),
    };
    memcpy(c, list, sizeof list);
}

/* The file's tensors. The number of a tensor decides what scales an E4M3 matrix has (part_scales):
 * for each row, none, one, for each row. */
static inline void place_part(part *p, int32_t file)
{
    p->count = 0;
    part_add(p, 0, 0, file, 44, PLACE_COLS, "layers.0.fused.weight");
    part_add(p, 0, 0, ESA_FILE_F16, 44, 0, "layers.0.fused.bias");
    part_add(p, 0, 0, file, 12, PLACE_COLS, "final.1.weight");
    part_add(p, 0, 0, ESA_FILE_F32, 12, 0, "final.1.bias");
    part_add(p, 0, 0, file, 24, PLACE_COLS, "both.0.weight");
    part_add(p, 0, 0, ESA_FILE_BF16, 24, 0, "both.0.bias");
    part_add(p, 0, 0, file, 5, PLACE_COLS, "layers.0.proj.weight");
    part_add(p, 0, 0, ESA_FILE_F32, 5, 0, "layers.0.proj.bias");
    assert_int_equal(p->count, PLACE_FILE);
}

static inline void place_want(place_case c[PLACE_WANTED], esa_weights *w, int32_t flags)
{
    esa_weights_naming(w, &place_naming);
    for (int32_t i = 0; i < PLACE_WANTED; i++)
        esa_weights_want(w, &c[i].view, i % 2 ? 0 : flags, 2 - i % 2,
                         (int64_t[]){ c[i].rows, PLACE_COLS }, "%s", c[i].name);
}

/* The row of the file's tensor where a row of a wanted one lies. */
static inline int64_t place_row(const place_case *c, int64_t row)
{
    const int64_t first = c->from[0][1];
    return row < first ? c->from[0][0] + row : c->from[1][0] + row - first;
}

/* Element i of a wanted tensor without changes, in the type of the file's tensor. */
static inline float place_value(const part *p, const place_case *c, int64_t i, int32_t bias)
{
    const int64_t cols = bias ? 1 : PLACE_COLS;
    return part_value(p, &p->tensor[c->file], place_row(c, i / cols) * cols + i % cols);
}

/* ---------------------------------------------------------------- a LoRA */

static inline float place_down(int32_t file, int64_t i)
{
    return fill_unit(77 + (uint64_t)file, i);
}
static inline float place_up(int32_t file, int64_t i) { return fill_unit(99 + (uint64_t)file, i); }
static inline float place_diff(int32_t file, int64_t i)
{
    return fill_unit(55 + (uint64_t)file, i);
}

/* What the LoRA adds to element i of a wanted tensor: matrices get up down, biases a whole
 * difference. */
static inline float place_change(const place_case *c, int64_t i, int32_t bias)
{
    if (bias) return place_diff(c->file, place_row(c, i));
    const int64_t row = place_row(c, i / PLACE_COLS), col = i % PLACE_COLS;
    double sum = 0;
    for (int32_t r = 0; r < PLACE_RANK; r++)
        sum += (double)place_up(c->file, row * PLACE_RANK + r) *
               (double)place_down(c->file, r * PLACE_COLS + col);
    return (float)sum;
}

static inline void place_write_lora(const part *p, esa_ctx *ctx, const char *path)
{
    static const char *const end[2][2] = { { ".lora_down.weight", ".lora_up.weight" },
                                           { ".diff_b", "" } };
    esa_tensors_writer *w = NULL;
    assert_int_equal(esa_tensors_writer_create(ctx, &w, path), ESA_OK);
    for (int32_t pass = 0; pass < 2; pass++)
        for (int32_t i = 0; i < PLACE_FILE; i++)
            for (int32_t side = 0; side < 2 - i % 2; side++) {
                const part_tensor *t = &p->tensor[i];
                const int64_t rows = i % 2 || side ? t->dim[0] : PLACE_RANK,
                              cols = i % 2  ? 1
                                     : side ? PLACE_RANK
                                            : PLACE_COLS;
                float x[44 * PLACE_COLS];
                char name[96];
                const size_t tail = strlen(i % 2 ? ".bias" : ".weight");
                snprintf(name, sizeof name, "diffusion_model.%.*s%s", (int)(strlen(t->name) - tail),
                         t->name, end[i % 2][side]);
                for (int64_t k = 0; k < rows * cols; k++)
                    x[k] = i % 2 ? place_diff(i, k) : side ? place_up(i, k) : place_down(i, k);
                assert_int_equal(pass ? esa_tensors_writer_data(w, x, 4 * rows * cols)
                                      : esa_tensors_writer_declare(w, name, ESA_FILE_F32, 2 - i % 2,
                                                                   (int64_t[]){ rows, cols }),
                                 ESA_OK);
            }
    assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
    esa_tensors_writer_free(w);
}

#endif
