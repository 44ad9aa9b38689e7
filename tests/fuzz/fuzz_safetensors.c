/* fuzz_safetensors.c - any bytes as a tensor file: refused with a message, or everything it says
 * is true.
 * SPDX-License-Identifier: Apache-2.0 */
#include "fuzz_common.h"
#include "esa/esa_tensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    esa_tensors *file = NULL;
    const esa_status status = esa_tensors_open_memory(fuzz_ctx, &file, data, (int64_t)size);
    if (status != ESA_OK) {
        must(status == ESA_ERR_FORMAT, "only the format can be wrong");
        must(!file && esa_ctx_error(fuzz_ctx)[0], "a refusal has a message and no object");
        return 0;
    }
    int64_t total = 0;
    volatile uint8_t touched = 0;
    const int64_t count = esa_tensors_count(file);
    for (int64_t i = 0; i < count; i++) {
        esa_tensor_info t = { .struct_size = sizeof t }, u = t;
        must(esa_tensors_at(file, i, &t) == ESA_OK, "every tensor can be asked for");
        must(esa_tensors_find(file, t.name, &u) == ESA_OK && u.data == t.data,
             "and found by its name");
        must((const uint8_t *)t.data >= data && t.bytes >= 0 && (uint64_t)t.bytes <= size &&
                 (const uint8_t *)t.data + t.bytes <= data + size,
             "data lies inside the file");
        if (t.bytes)
            touched = (uint8_t)(touched ^ ((const uint8_t *)t.data)[0] ^
                                ((const uint8_t *)t.data)[t.bytes - 1]);
        total += t.bytes;
    }
    uint64_t header;
    memcpy(&header, data, 8);
    must(8 + header + (uint64_t)total == size, "tensors tile the data");
    for (int64_t i = 0; i < esa_tensors_metadata_count(file); i++) {
        const char *key, *value;
        must(esa_tensors_metadata_at(file, i, &key, &value) == ESA_OK &&
                 esa_tensors_metadata(file, key) == value,
             "metadata can be asked for");
    }
    esa_tensors_free(file);
    return 0;
}

static int make_seeds(const char *folder)
{
    static const char *const headers[] = {
        "{}", "{\"__metadata__\":{\"a\":\"\\u00e9\\ud83d\\ude00\\n\"}}   ",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},\"b\":{\"dtype\":"
        "\"BOOL\",\"shape\":[],\"data_offsets\":[24,25]}}",
        "{\"e\":{\"dtype\":\"F8_E4M3\",\"shape\":[0],\"data_offsets\":[0,0]},\"f\":{\"data_"
        "offsets\":[0,8],\"shape\":[1],\"dtype\":\"U64\"}}"
    };
    static const size_t bytes[] = { 0, 0, 25, 8 };
    for (int i = 0; i < 4; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/seed%d", folder, i);
        FILE *f = fopen(path, "wb");
        if (!f) return 1;
        const uint64_t n = strlen(headers[i]);
        const uint8_t zeros[64] = { 0 };
        const int bad = fwrite(&n, 1, 8, f) != 8 || fwrite(headers[i], 1, n, f) != n ||
                        fwrite(zeros, 1, bytes[i], f) != bytes[i];
        if (fclose(f) != 0 || bad) return 1;
    }
    return 0;
}
