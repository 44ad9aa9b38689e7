/* fuzz_recording.c - any bytes as a recording: refused with a message, or it can be summed up row
 * by row.
 * SPDX-License-Identifier: Apache-2.0 */
#include "fuzz_session_seeds.h"
#include "maskfile/recording.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    esa_recording rec;
    esa_tensors *tensors = NULL;
    if (esa_st_open_memory(fuzz_ctx, &tensors, data, (int64_t)size) != ESA_OK) return 0;
    const esa_status status = esa_recording_make(fuzz_ctx, &rec, tensors);
    if (status != ESA_OK) {
        must(status == ESA_ERR_FORMAT || status == ESA_ERR_VERSION,
             "only the format or its version can be wrong");
        must(esa_ctx_error(fuzz_ctx)[0], "a refusal has a message");
        return 0;
    }
    uint64_t *row = malloc((size_t)rec.info.nk * sizeof *row);
    for (int64_t cell = 0; row && cell < rec.cells; cell++) {
        if (!esa_recordings_count(&rec, 1, cell)) continue;
        esa_recordings_row(row, &rec, 1, cell, 0);
        esa_recordings_row(row, &rec, 1, cell, rec.blocks / rec.info.nk - 1);
    }
    free(row);
    (void)esa_recording_check_sums(fuzz_ctx, &rec);
    (void)esa_recording_is_dense(&rec, 0);
    esa_recording_close(fuzz_ctx, &rec);
    return 0;
}
