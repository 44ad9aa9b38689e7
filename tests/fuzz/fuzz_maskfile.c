/* fuzz_maskfile.c - any bytes as a mask file: refused with a message, or every question gets an
 * answer.
 * SPDX-License-Identifier: Apache-2.0 */
#include "fuzz_session_seeds.h"

static void ask_cell(esa_mask_file *file, const esa_mask_file_info *info, int32_t layer,
                     int32_t step, int32_t branch, double budget)
{
    esa_mask *mask = NULL;
    const esa_status status = esa_mask_file_get(file, &mask, layer, step, branch, budget);
    if (status != ESA_OK) {
        must(!mask && esa_ctx_error(fuzz_ctx)[0], "a refusal has a message and no object");
        must(status == ESA_ERR_STATE || status == ESA_ERR_FORMAT || status == ESA_ERR_MISMATCH ||
                 status == ESA_ERR_ARGUMENT,
             "it is one of these");
        return;
    }
    esa_mask_info m = { .struct_size = sizeof m };
    must(esa_mask_get_info(mask, &m) == ESA_OK && m.H == info->H && m.nq == info->nq &&
             m.nk == info->nk,
         "a mask has the file's shape");
    must(m.kept >= 0 && m.kept <= m.H * m.nq * m.nk, "and keeps what exists");
    esa_mask_free(mask);
    must(esa_mask_file_stored(file, layer, step), "what was given is stored");
    double *heads = calloc((size_t)info->H, 3 * sizeof *heads);
    if (heads)
        must(esa_mask_file_heads(file, heads, heads + info->H, heads + 2 * info->H, layer, step,
                                 branch, budget) == ESA_OK,
             "heads have figures");
    free(heads);
    double density = -1;
    must(esa_mask_file_density(file, &density, layer, step, branch, budget) == ESA_OK &&
             density >= 0 && density <= 1,
         "a cell has a budget");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    esa_mask_file *file = NULL;
    const esa_status status = esa_mask_file_open_memory(fuzz_ctx, &file, data, (int64_t)size);
    if (status != ESA_OK) {
        must(status == ESA_ERR_FORMAT || status == ESA_ERR_VERSION,
             "only the format or its version can be wrong");
        must(!file && esa_ctx_error(fuzz_ctx)[0], "a refusal has a message and no object");
        return 0;
    }
    esa_mask_file_info info = { .struct_size = sizeof info };
    must(esa_mask_file_get_info(file, &info) == ESA_OK, "an open file can be described");
    const int32_t last_layer = info.layers - 1, last_step = info.steps - 1,
                  last_branch = info.branches - 1;
    for (int32_t b = 0; b < info.budget_count; b++) {
        must(esa_mask_file_require(file, info.budget_permille[b] / 1000.0) == ESA_OK,
             "prebuilt budgets are there");
        ask_cell(file, &info, last_layer, last_step, last_branch, info.budget_permille[b] / 1000.0);
        ask_cell(file, &info, 0, 0, 0, info.budget_permille[b] / 1000.0);
        double work = -1;
        const esa_status counted = esa_mask_file_work(file, &work,
                                                      info.budget_permille[b] / 1000.0);
        must(counted == ESA_OK ? work >= 0 : counted == ESA_ERR_FORMAT || counted == ESA_ERR_MEMORY,
             "masks have a work, or their bits are broken");
    }
    /* Deriving works on all cells: cheap only while they are few. The sizes are backed by the file,
     * so the product cannot overflow. */
    if (info.importance != ESA_IMPORTANCE_NONE && info.H * info.nq * info.nk < 1 << 16) {
        must(esa_mask_file_require(file, 0.123) == ESA_OK, "importance gives any budget");
        ask_cell(file, &info, last_layer, last_step, last_branch, 0.123);
        float *p = malloc((size_t)(info.H * info.nq * info.nk) * sizeof *p);
        if (p) (void)esa_mask_file_importance(file, p, last_layer, last_step, last_branch);
        free(p);
    } else if (info.importance == ESA_IMPORTANCE_NONE) {
        int32_t known = 0;
        for (int32_t b = 0; b < info.budget_count; b++) known |= info.budget_permille[b] == 123;
        if (!known)
            must(esa_mask_file_require(file, 0.123) == ESA_ERR_MISMATCH,
                 "without importance nothing is derived");
    }
    (void)esa_mask_file_stored(file, info.layers, info.steps);
    esa_mask_file_free(file);
    return 0;
}
