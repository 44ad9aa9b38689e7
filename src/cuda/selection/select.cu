// select.cu - runs the selector named in the params on the GPU, the two halves of the entropy
// selector, and the scores of the error selector.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/selection/select.cuh"

namespace
{

// The parts every selection starts with. The parts of the selector follow.
struct select_parts {
    select_rules rules;
    int32_t *quota; // [B][nq]; with budgets of the heads [B][Hq][nq]
};

select_parts lay_out(carve &c, const esa_select_args *a)
{
    const bool heads = esa_selector_has(a->params.selector, ESA_ROW_HEAD_BUDGETS);
    select_parts p = {};
    p.rules = rules_carve(c, a);
    p.quota = c.take<int32_t>(a->B * a->nq * (heads ? a->Hq : 1));
    return p;
}

esa_status check(esa_cuda_device *dev, const esa_select_args *a, const esa_cuda_mask *mask)
{
    if (mask && mask->cap < a->nk)
        return device_fail(dev, ESA_ERR_ARGUMENT, "a mask has room for %lld of %lld blocks a row",
                           (long long)mask->cap, (long long)a->nk);
    return ESA_OK;
}

esa_status pick_importance(esa_cuda_device *dev, const esa_select_args *a,
                           const select_rules &rules, int32_t *quota, const float *importance,
                           const esa_cuda_mask *mask, carve c, cudaStream_t stream)
{
    const esa_status status = entropy_budgets(dev, a, rules, importance, nullptr, quota, c, stream);
    return status ? status
                  : pick_launch(dev, a, rules, { importance, quota, 0, a->B * a->Hq * a->nq, true },
                                mask, stream);
}

} // namespace

esa_status entropy_run(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                       int32_t *quota, const esa_cuda_mask *mask, carve c, cudaStream_t stream)
{
    float *importance = c.take<float>(a->B * a->Hq * a->nq * a->nk);
    const esa_status status = entropy_importance(dev, a, rules, importance, c, stream);
    return status ? status : pick_importance(dev, a, rules, quota, importance, mask, c, stream);
}

int64_t select_workspace(const esa_cuda_device *dev, const esa_select_args *a)
{
    carve c(nullptr);
    lay_out(c, a);
    switch (a->params.selector) {
#define CARVE(ID, id, ...)                                                                         \
    case ESA_SELECT_##ID: id##_carve(c, dev, a); break;
        ESA_SELECTORS(CARVE)
#undef CARVE
    }
    return c.bytes();
}

esa_status select_run(esa_cuda_device *dev, const esa_select_args *a, const esa_cuda_mask *mask,
                      void *ws, void *stream_given)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t stream = (cudaStream_t)stream_given;
    carve c(ws);
    const select_parts p = lay_out(c, a);
    const int32_t selector = a->params.selector;
    const bool all = esa_keeps_all(&a->params);
    // the compat modes of an original have a choice of their own
    const bool quotas = !all && esa_selector_has(selector, ESA_ROW_SPREADS) &&
                        (a->params.mode == ESA_MODE_FIXED ||
                         esa_selector_has(selector, ESA_TRAIT_BLIND));
    esa_status status = check(dev, a, mask);
    if (!status)
        status = rules_launch(dev, a, p.rules, quotas ? p.quota : nullptr, mask->facts, stream);
    if (!status && mask->fine_count && (all || !esa_selector_has(selector, ESA_TRAIT_WEIGHS_TAIL)))
        status = device_check(
            dev,
            cudaMemsetAsync(mask->fine_count, 0,
                            (size_t)(a->B * a->Hq * a->nq) * sizeof *mask->fine_count, stream),
            "clearing the fine level");
    if (status) return status;
    switch (all ? ESA_SELECT_FULL : selector) {
#define RUN(ID, id, ...)                                                                           \
    case ESA_SELECT_##ID: return id##_run(dev, a, p.rules, p.quota, mask, c, stream);
        ESA_SELECTORS(RUN)
#undef RUN
    }
    return device_fail(dev, ESA_ERR_INTERNAL, "there is no selector %d", (int)selector);
}

esa_status importance_run(esa_cuda_device *dev, const esa_select_args *a, float *out,
                          double *entropy, void *ws, void *stream_given)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t stream = (cudaStream_t)stream_given;
    carve c(ws);
    const select_parts p = lay_out(c, a);
    esa_status status = rules_launch(dev, a, p.rules, nullptr, nullptr, stream);
    if (!status) status = entropy_importance(dev, a, p.rules, out, c, stream);
    if (!status && entropy)
        status = entropy_budgets(dev, a, p.rules, out, entropy, nullptr, c, stream);
    return status;
}

esa_status errors_run(esa_cuda_device *dev, const esa_select_args *a, float *out, void *ws,
                      void *stream_given)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t stream = (cudaStream_t)stream_given;
    carve c(ws);
    const select_parts p = lay_out(c, a);
    const esa_status status = rules_launch(dev, a, p.rules, nullptr, nullptr, stream);
    return status ? status : error_scores_run(dev, a, p.rules, out, c, stream);
}

esa_status from_importance_run(esa_cuda_device *dev, const esa_select_args *a,
                               const esa_cuda_mask *mask, const float *importance, void *ws,
                               void *stream_given)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t stream = (cudaStream_t)stream_given;
    carve c(ws);
    const select_parts p = lay_out(c, a);
    esa_status status = check(dev, a, mask);
    if (!status) status = rules_launch(dev, a, p.rules, nullptr, mask->facts, stream);
    return status ? status : pick_importance(dev, a, p.rules, p.quota, importance, mask, c, stream);
}
