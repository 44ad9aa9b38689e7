/* fuzz_work_plan.c - any bytes as a work plan: refused with a message, or every question gets an
 * answer.
 * SPDX-License-Identifier: Apache-2.0 */
#include "fuzz_common.h"

#include "esa/esa_work.h"

/* Plans of two sizes, each with and without a quality curve. */
static int make_seeds(const char *folder)
{
    char path[512];
    const double sigma[] = { 1, 0.6, 0.3 }, density[] = { 0.1, 0.3 };
    const double works[] = { 0.2, 0.5 }, psnr[] = { 28, 41 }, spread[] = { 1, 2 };
    double error[3 * 3 * 2], weight[3 * 3];
    for (int i = 0; i < 18; i++) error[i] = 1.0 / (i + 1);
    for (int i = 0; i < 9; i++) weight[i] = i;
    for (int i = 0; i < 4; i++) {
        esa_work_plan_info info = { .struct_size = sizeof info,
                                    .layers = i < 2 ? 1 : 3,
                                    .steps = 3 - i / 2,
                                    .points = 1 + i % 2,
                                    .model = "mini" };
        esa_work_plan *plan;
        if (esa_work_plan_create(fuzz_ctx, &plan, &info, sigma, density, error, weight)) return 1;
        esa_status status = esa_work_plan_set_quality(plan, i % 2 ? 2 : 0, works, psnr, spread);
        snprintf(path, sizeof path, "%s/plan%d", folder, i);
        if (!status) status = esa_work_plan_save(plan, path);
        esa_work_plan_free(plan);
        if (status) return 1;
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    esa_work_plan *plan = NULL;
    const esa_status status = esa_work_plan_open_memory(fuzz_ctx, &plan, data, (int64_t)size);
    if (status != ESA_OK) {
        must(status == ESA_ERR_FORMAT || status == ESA_ERR_VERSION,
             "only the format or its version can be wrong");
        must(!plan && esa_ctx_error(fuzz_ctx)[0], "a refusal has a message and no object");
        return 0;
    }
    esa_work_plan_info info = { .struct_size = sizeof info };
    must(esa_work_plan_get_info(plan, &info) == ESA_OK, "an open plan can be described");
    double work = 0, psnr = 0, spread = 0;
    if (info.levels && esa_work_plan_reach(plan, 30, &work) == ESA_OK)
        must(esa_work_plan_expect(plan, work, &psnr, &spread) == ESA_OK,
             "a work that the plan names has an expected quality");
    const int32_t steps = 5;
    double *density = calloc((size_t)info.layers * (size_t)steps, sizeof *density);
    esa_work_costs costs = esa_work_costs_default();
    for (int round = 0; density && info.layers < 1000 && round < 4; round++) {
        costs.floor = round / 3.0; /* below all points, between them, above them, dense */
        if (esa_work_plan_solve(fuzz_ctx, plan, density, info.layers, steps, NULL, NULL, 0.5,
                                &costs, NULL) != ESA_OK)
            continue;
        for (int64_t i = 0; i < (int64_t)info.layers * steps; i++)
            must(density[i] > 0 && density[i] <= 1 && density[i] >= costs.floor - 1e-9,
                 "densities are densities, and none is below the floor");
    }
    free(density);
    esa_work_plan_free(plan);
    return 0;
}
