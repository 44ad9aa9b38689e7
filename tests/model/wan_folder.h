/* wan_folder.h - makes model folders for tests: the names and shapes of a Wan transformer, with
 * made-up weights or as sparse files.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_WAN_FOLDER_H
#define ESA_TESTS_MODEL_WAN_FOLDER_H

#include "io/scratch.h"
#include <stdlib.h>
#include "esa/esa_tensors.h"
#include "model/fill.h"
#include "model/config/config.h"

typedef struct wan_shape {
    char name[160];
    int32_t rank;
    int64_t dim[5];
} wan_shape;
typedef struct wan_shapes {
    wan_shape *list;
    int64_t count, cap;
} wan_shapes;

static inline void shapes_add(wan_shapes *s, int32_t rank, int64_t a, int64_t b, int64_t c,
                              int64_t d, int64_t e, const char *name)
{
    if (s->count == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 64;
        s->list = realloc(s->list, (size_t)s->cap * sizeof *s->list);
        assert_non_null(s->list);
    }
    wan_shape *t = &s->list[s->count++];
    *t = (wan_shape){ .rank = rank, .dim = { a, b, c, d, e } };
    snprintf(t->name, sizeof t->name, "%s", name);
}

static inline void shapes_linear(wan_shapes *s, int64_t out, int64_t in, const char *name)
{
    char full[160];
    snprintf(full, sizeof full, "%s.weight", name);
    shapes_add(s, 2, out, in, 0, 0, 0, full);
    snprintf(full, sizeof full, "%s.bias", name);
    shapes_add(s, 1, out, 0, 0, 0, 0, full);
}

/* 15 tensors and 27 per block, as published (Wan2.1 on the hub); written here a second time, not
 * taken from the engine. */
static inline wan_shapes wan_transformer_shapes(const esa_wan_config *c)
{
    wan_shapes s = { 0 };
    char name[128];
    const int64_t d = (int64_t)c->heads * c->head_dim,
                  volume = (int64_t)c->patch[0] * c->patch[1] * c->patch[2];
    shapes_add(&s, 5, d, c->in_channels, c->patch[0], c->patch[1], c->patch[2],
               "patch_embedding.weight");
    shapes_add(&s, 1, d, 0, 0, 0, 0, "patch_embedding.bias");
    shapes_linear(&s, d, c->freq_dim, "condition_embedder.time_embedder.linear_1");
    shapes_linear(&s, d, d, "condition_embedder.time_embedder.linear_2");
    shapes_linear(&s, 6 * d, d, "condition_embedder.time_proj");
    shapes_linear(&s, d, c->text_dim, "condition_embedder.text_embedder.linear_1");
    shapes_linear(&s, d, d, "condition_embedder.text_embedder.linear_2");
    for (int32_t i = 0; i < c->layers; i++) {
        snprintf(name, sizeof name, "blocks.%d.scale_shift_table", i);
        shapes_add(&s, 3, 1, 6, d, 0, 0, name);
        for (int32_t a = 1; a <= 2; a++) {
            static const char *const part[] = { "to_q", "to_k", "to_v", "to_out.0" };
            for (int32_t p = 0; p < 4; p++) {
                snprintf(name, sizeof name, "blocks.%d.attn%d.%s", i, a, part[p]);
                shapes_linear(&s, d, d, name);
            }
            for (int32_t p = 0; p < 2; p++) {
                snprintf(name, sizeof name, "blocks.%d.attn%d.norm_%s.weight", i, a, p ? "k" : "q");
                shapes_add(&s, 1, d, 0, 0, 0, 0, name);
            }
        }
        if (c->cross_norm) {
            snprintf(name, sizeof name, "blocks.%d.norm2.weight", i);
            shapes_add(&s, 1, d, 0, 0, 0, 0, name);
            snprintf(name, sizeof name, "blocks.%d.norm2.bias", i);
            shapes_add(&s, 1, d, 0, 0, 0, 0, name);
        }
        snprintf(name, sizeof name, "blocks.%d.ffn.net.0.proj", i);
        shapes_linear(&s, c->ffn, d, name);
        snprintf(name, sizeof name, "blocks.%d.ffn.net.2", i);
        shapes_linear(&s, d, c->ffn, name);
    }
    shapes_linear(&s, volume * c->out_channels, d, "proj_out");
    shapes_add(&s, 3, 1, 2, d, 0, 0, "scale_shift_table");
    return s;
}

static inline int64_t shape_count(const wan_shape *s)
{
    int64_t n = 1;
    for (int32_t i = 0; i < s->rank; i++) n *= s->dim[i];
    return n;
}

/* Writes list[first .. first+count) with made-up weights as f32. */
static inline void wan_write_weights(esa_ctx *ctx, const char *path, const wan_shape *list,
                                     int64_t count)
{
    esa_tensors_writer *w = NULL;
    assert_int_equal(esa_tensors_writer_create(ctx, &w, path), ESA_OK);
    for (int64_t i = 0; i < count; i++)
        assert_int_equal(
            esa_tensors_writer_declare(w, list[i].name, ESA_FILE_F32, list[i].rank, list[i].dim),
            ESA_OK);
    for (int64_t i = 0; i < count; i++) {
        const int64_t n = shape_count(&list[i]);
        float *data = malloc((size_t)n * 4);
        assert_non_null(data);
        fill_weight(data, list[i].name, list[i].rank, list[i].dim);
        assert_int_equal(esa_tensors_writer_data(w, data, n * 4), ESA_OK);
        free(data);
    }
    assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
    esa_tensors_writer_free(w);
}

/* A sparse shard of the right length that takes no disk space. */
static inline void wan_write_holes(const char *path, const wan_shape *list, int64_t count,
                                   const char *dtype, int64_t size)
{
    const size_t room = 4096 + (size_t)count * 400;
    char *header = malloc(room);
    assert_non_null(header);
    size_t at = (size_t)snprintf(header, room, "{");
    int64_t offset = 0;
    for (int64_t i = 0; i < count; i++) {
        at += (size_t)snprintf(header + at, room - at, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[",
                               i ? "," : "", list[i].name, dtype);
        for (int32_t k = 0; k < list[i].rank; k++)
            at += (size_t)snprintf(header + at, room - at, "%s%lld", k ? "," : "",
                                   (long long)list[i].dim[k]);
        const int64_t bytes = shape_count(&list[i]) * size;
        at += (size_t)snprintf(header + at, room - at, "],\"data_offsets\":[%lld,%lld]}",
                               (long long)offset, (long long)(offset + bytes));
        offset += bytes;
    }
    at += (size_t)snprintf(header + at, room - at, "}");
    while (at % 8) header[at++] = ' ';
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    const uint64_t n = at;
    assert_int_equal(fwrite(&n, 8, 1, f), 1);
    assert_int_equal(fwrite(header, 1, at, f), at);
    fclose(f);
    assert_int_equal(truncate(path, (off_t)(8 + (int64_t)at + offset)), 0);
    free(header);
}

static inline void wan_write_config(const char *path, const esa_wan_config *c)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f,
            "{\"_class_name\": \"WanTransformer3DModel\", \"_diffusers_version\": \"0.33.0\", "
            "\"added_kv_proj_dim\": null, \"image_dim\": null,\n"
            "\"num_attention_heads\": %d, \"attention_head_dim\": %d, \"num_layers\": %d, "
            "\"ffn_dim\": %d, \"in_channels\": %d,\n"
            "\"out_channels\": %d, \"patch_size\": [%d, %d, %d], \"text_dim\": %d, \"freq_dim\": "
            "%d, \"rope_max_seq_len\": %d,\n"
            "\"cross_attn_norm\": %s, \"qk_norm\": \"rms_norm_across_heads\", \"eps\": %g}\n",
            c->heads, c->head_dim, c->layers, c->ffn, c->in_channels, c->out_channels, c->patch[0],
            c->patch[1], c->patch[2], c->text_dim, c->freq_dim, c->rope_max,
            c->cross_norm ? "true" : "false", c->eps);
    fclose(f);
}

/* Makes DIR/transformer with config and one weight file. Remove it with wan_folder_remove;
 * scratch_remove cannot. */
typedef struct wan_folder {
    scratch top;
    scratch part;
} wan_folder;

static inline wan_folder wan_folder_make(void)
{
    wan_folder f = { .top = scratch_make() };
    snprintf(f.part.dir, sizeof f.part.dir, "%.200s/transformer", f.top.dir);
    assert_int_equal(mkdir(f.part.dir, 0755), 0);
    return f;
}

static inline void wan_folder_remove(wan_folder *f)
{
    scratch_remove(&f->part);
    scratch_remove(&f->top);
}

static inline void wan_folder_fill(wan_folder *f, esa_ctx *ctx, const esa_wan_config *c)
{
    wan_write_config(scratch_path(&f->part, "config.json"), c);
    wan_shapes s = wan_transformer_shapes(c);
    wan_write_weights(ctx, scratch_path(&f->part, "diffusion_pytorch_model.safetensors"), s.list,
                      s.count);
    free(s.list);
}

#endif
