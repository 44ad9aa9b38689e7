/* fuzz_model.c - reads any config.json with a weight file in which any bytes are changed. Each
 * input is refused with a message, or loads and runs.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Input: 8 bytes length n, n bytes of config.json, then changes to a good file of a very small
 * model, 4 bytes each: position (3 bytes) and new value. A position beyond the end cuts the file.
 * Inputs stay short in this way, although the file has 42 tensors. */
#include "fuzz/fuzz_common.h"
#include "model/open_part.h"

#define WIDTH   4  /* 2 heads of 2 */
#define MAX_RUN 64 /* models that load are also run up to these widths */

static const char config_text[] =
    "{\"_class_name\":\"WanTransformer3DModel\",\"num_attention_heads\":2,\"attention_head_dim\":2,"
    "\"num_layers\":1,\"ffn_dim\":3,\"in_channels\":1,"
    "\"out_channels\":1,\"text_dim\":2,\"freq_dim\":2,\"patch_size\":[1,1,2],\"eps\":1e-6,\"cross_"
    "attn_norm\":true}";

static uint8_t good[16384];
static size_t good_size;

typedef struct maker {
    char header[12000];
    size_t at;
    int64_t offset;
} maker;

static void put(maker *m, const char *name, const char *kind, int rank, int64_t a, int64_t b,
                int64_t c)
{
    const int64_t dim[5] = { a, b, c, 1, 2 };
    int64_t count = 1;
    m->at += (size_t)snprintf(m->header + m->at, sizeof m->header - m->at,
                              "%s\"%s%s\":{\"dtype\":\"F32\",\"shape\":[", m->at > 1 ? "," : "",
                              name, kind);
    for (int i = 0; i < rank; i++) {
        m->at += (size_t)snprintf(m->header + m->at, sizeof m->header - m->at, "%s%d", i ? "," : "",
                                  (int)dim[i]);
        count *= dim[i];
    }
    m->at += (size_t)snprintf(m->header + m->at, sizeof m->header - m->at,
                              "],\"data_offsets\":[%d,%d]}", (int)m->offset,
                              (int)(m->offset + 4 * count));
    m->offset += 4 * count;
}

static void put_linear(maker *m, const char *name, int64_t out, int64_t in)
{
    put(m, name, ".weight", 2, out, in, 0);
    put(m, name, ".bias", 1, out, 0, 0);
}

static void make_good(void)
{
    static maker m = { .header = "{", .at = 1 };
    put(&m, "patch_embedding", ".weight", 5, WIDTH, 1, 1);
    put(&m, "patch_embedding", ".bias", 1, WIDTH, 0, 0);
    put_linear(&m, "condition_embedder.time_embedder.linear_1", WIDTH, 2);
    put_linear(&m, "condition_embedder.time_embedder.linear_2", WIDTH, WIDTH);
    put_linear(&m, "condition_embedder.time_proj", 6 * WIDTH, WIDTH);
    put_linear(&m, "condition_embedder.text_embedder.linear_1", WIDTH, 2);
    put_linear(&m, "condition_embedder.text_embedder.linear_2", WIDTH, WIDTH);
    put(&m, "blocks.0", ".scale_shift_table", 3, 1, 6, WIDTH);
    for (int a = 1; a <= 2; a++) {
        static const char *const part[] = { "to_q", "to_k", "to_v", "to_out.0" };
        char name[64];
        for (int i = 0; i < 4; i++) {
            snprintf(name, sizeof name, "blocks.0.attn%d.%s", a, part[i]);
            put_linear(&m, name, WIDTH, WIDTH);
        }
        snprintf(name, sizeof name, "blocks.0.attn%d", a);
        put(&m, name, ".norm_q.weight", 1, WIDTH, 0, 0);
        put(&m, name, ".norm_k.weight", 1, WIDTH, 0, 0);
    }
    put(&m, "blocks.0.norm2", ".weight", 1, WIDTH, 0, 0);
    put(&m, "blocks.0.norm2", ".bias", 1, WIDTH, 0, 0);
    put_linear(&m, "blocks.0.ffn.net.0.proj", 3, WIDTH);
    put_linear(&m, "blocks.0.ffn.net.2", WIDTH, 3);
    put_linear(&m, "proj_out", 2, WIDTH);
    put(&m, "scale", "_shift_table", 3, 1, 2, WIDTH);
    m.header[m.at++] = '}';
    const uint64_t n = m.at;
    memcpy(good, &n, 8);
    memcpy(good + 8, m.header, m.at);
    good_size = 8 + m.at + (size_t)m.offset;
    for (size_t i = 0; i < (size_t)m.offset; i += 4) {
        const float f = (float)((int)(i * 37 % 19) - 9) / 16.0f;
        memcpy(good + 8 + m.at + i, &f, 4);
    }
}

/* A model that was accepted must run, whatever its numbers are. */
static void run(esa_dit *dit, const esa_wan_config *c)
{
    static float x[4096], v[4096], text[2 * MAX_RUN];
    const int32_t latent[3] = { c->patch[0], 2 * c->patch[1], 2 * c->patch[2] };
    const int64_t volume = (int64_t)latent[0] * latent[1] * latent[2];
    if (c->heads * c->head_dim > MAX_RUN || c->ffn > MAX_RUN || c->text_dim > MAX_RUN ||
        volume * c->in_channels > 4096 || volume * c->out_channels > 4096 || c->rope_max < 2)
        return;
    esa_session_params p = esa_session_params_default();
    esa_session *s = NULL;
    p.mode = ESA_SESSION_DENSE;
    p.layers = c->layers;
    p.steps = 1;
    must(esa_dit_begin(dit, latent, &p.select.layout, ESA_SELECT_ENTROPY, ESA_MODE_FIXED, 1) ==
             ESA_OK,
         "a small video fits");
    must(set_text(dit, 0, text, 2) == ESA_OK, "text is taken");
    must(esa_session_create(fuzz_ctx, &s, &p) == ESA_OK && esa_session_begin(s) == ESA_OK &&
             esa_session_step(s, 0, 0) == ESA_OK,
         "a session");
    must(forward(dit, s, 0, v, x, 500) == ESA_OK, "a model that was taken runs");
    esa_session_free(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t n = 0;
    if (size < 8) return 0;
    memcpy(&n, data, 8);
    if (n > size - 8) return 0;
    esa_wan_config c;
    esa_status status = esa_config_wan_memory(fuzz_ctx, &c, (const char *)data + 8, (int64_t)n,
                                              "config.json");
    if (status != ESA_OK) {
        must(esa_ctx_error(fuzz_ctx)[0] != 0, "a refusal has a message");
        return 0;
    }
    uint8_t *file = malloc(good_size);
    if (!file) return 0;
    memcpy(file, good, good_size);
    size_t length = good_size;
    for (size_t i = 8 + (size_t)n; i + 4 <= size; i += 4) {
        const size_t at = data[i] | (size_t)data[i + 1] << 8 | (size_t)data[i + 2] << 16;
        if (at < good_size)
            file[at] = data[i + 3];
        else if (data[i + 2] < 0x40)
            length = at % good_size;
    }
    uint8_t *exact = malloc(length + 1); /* so that a read past its end is seen */
    if (exact) {
        memcpy(exact, file, length);
        esa_nn nn;
        esa_nn_init(&nn, fuzz_ctx);
        const esa_part_env env = { .nn = &nn,
                                   .folder = "",
                                   .file = exact,
                                   .file_bytes = (int64_t)length,
                                   .hold = (int32_t)(size % 4) };
        esa_dit *dit = NULL;
        status = open_dit(&env, &dit, &esa_wan_dit_kind, &c);
        if (status == ESA_OK)
            run(dit, &c);
        else
            must(!dit && esa_ctx_error(fuzz_ctx)[0], "a refusal has a message and no object");
        esa_dit_free(dit);
        esa_nn_close(&nn);
    }
    free(exact);
    free(file);
    return 0;
}

static int make_seeds(const char *folder)
{
    static const uint8_t change[][8] = { { 0 },
                                         { 0x20, 0, 0, 'x' },
                                         { 0, 0x10, 0, 0xff, 0x04, 0x10, 0, 0x7f },
                                         { 0xff, 0xff, 0x10, 0 } };
    static const size_t bytes[] = { 0, 4, 8, 4 };
    make_good();
    for (int i = 0; i < 4; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/seed%d", folder, i);
        FILE *f = fopen(path, "wb");
        if (!f) return 1;
        const uint64_t n = sizeof config_text - 1;
        const int bad = fwrite(&n, 1, 8, f) != 8 || fwrite(config_text, 1, n, f) != n ||
                        fwrite(change[i], 1, bytes[i], f) != bytes[i];
        if (fclose(f) != 0 || bad) return 1;
    }
    return 0;
}
