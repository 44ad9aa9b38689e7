/* fuzz_gguf.c - any bytes as a GGUF file: refused with a message, or everything it says is true.
 * SPDX-License-Identifier: Apache-2.0 */
#include "fuzz_common.h"
#include "../io/gguf_make.h"
#include "base/blocks.h"
#include "io/gguf.h"

/* What the type and the dims of a tensor need; the reader has refused what overflows. */
static int64_t expected_bytes(const esa_st_entry *e)
{
    const int64_t block = esa_blocks_elements(e->dtype);
    int64_t n = 1;
    for (int32_t i = 0; i < e->rank; i++) n *= e->dim[i];
    return block ? n / block * esa_blocks_bytes(e->dtype) : n * (e->dtype == ESA_FILE_F32 ? 4 : 2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    esa_tensors *file = NULL;
    const esa_status status = esa_gguf_open_memory(fuzz_ctx, &file, data, (int64_t)size);
    if (status != ESA_OK) {
        must(status == ESA_ERR_FORMAT, "only the format can be wrong");
        must(!file && esa_ctx_error(fuzz_ctx)[0], "a refusal has a message and no object");
        return 0;
    }
    volatile uint8_t touched = 0;
    for (int64_t i = 0; i < file->count; i++) {
        const esa_st_entry *e = &file->entry[i];
        const uint8_t *at = esa_st_data(file, e);
        must(esa_st_find(file, e->name) == e, "every tensor is found by its name");
        must(at >= data && e->end >= e->begin && at + (e->end - e->begin) <= data + size,
             "data lies inside the file");
        must(e->rank >= 0 && e->rank <= ESA_FILE_MAX_RANK, "the rank has room");
        must(expected_bytes(e) == e->end - e->begin, "bytes are those of type and dims");
        must(i == 0 || file->entry[i - 1].end <= e->begin, "tensors do not overlap");
        if (e->end > e->begin) touched = (uint8_t)(touched ^ at[0] ^ at[e->end - e->begin - 1]);
    }
    for (int64_t i = 0; i < file->pair_count; i++)
        must(esa_st_metadata(file, file->pair[i].key) == file->pair[i].value,
             "metadata can be asked for");
    esa_st_close(file);
    return 0;
}

static gguf_make seed(int i)
{
    static const uint64_t dim[5] = { 256, 2, 1, 1, 1 };
    static const uint32_t type[] = { 0, 1, 30, 8, 12, 13, 14 };
    static const size_t bytes[] = { 2048, 1024, 1024, 544, 288, 352, 448 };
    const int kinds = i == 0 ? 0 : i == 1 ? 1 : 3;
    gguf_make m = gguf_begin(i % 2 ? 3 : 2, (uint64_t)kinds, i ? 4 : 0);
    if (i) {
        gguf_text(&m, "general.architecture", "wan");
        gguf_key(&m, "general.alignment", 4);
        gguf_u32(&m, 32);
        gguf_key(&m, "list", 9);
        gguf_u32(&m, 8);
        gguf_u64(&m, 1);
        gguf_string(&m, "text");
        gguf_key(&m, "nest", 9);
        gguf_u32(&m, 9);
        gguf_u64(&m, 1);
        gguf_u32(&m, 7);
        gguf_u64(&m, 3);
        gguf_byte(&m, 0);
        gguf_byte(&m, 1);
        gguf_byte(&m, 0);
    }
    size_t at = 0;
    for (int k = 0; k < kinds; k++) {
        const int t = (i + k) % 7;
        const char name[] = { 'x', (char)('0' + k), 0 };
        /* Q6_K has 420 bytes, rounded up. */
        gguf_tensor(&m, name, (uint32_t)(2 + (i + k) % 4), dim, type[t], at);
        at += bytes[t];
    }
    gguf_data(&m, 32, at);
    return m;
}

static int make_seeds(const char *folder)
{
    for (int i = 0; i < 7; i++) {
        const gguf_make m = seed(i);
        char path[1024];
        snprintf(path, sizeof path, "%s/seed%d", folder, i);
        FILE *f = fopen(path, "wb");
        if (!f) return 1;
        const int bad = fwrite(m.bytes, 1, m.size, f) != m.size;
        if (fclose(f) != 0 || bad) return 1;
    }
    return 0;
}
