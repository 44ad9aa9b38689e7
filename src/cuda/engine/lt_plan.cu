// lt_plan.cu - plans of cuBLASLt: descriptors and algorithms of one shape, kept until the table of
// plans is full.
// SPDX-License-Identifier: Apache-2.0
//
// The algorithms come from the heuristics of cuBLASLt, without those that split sums over thread
// blocks: their bits may depend on the order in which blocks finish.
#include "cuda/engine/product.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace products
{

static_assert(sizeof(lt_algo) == 64 && sizeof(lt_result) == 96, "as in cublasLt.h");

// ---- the library ----

esa_status open_library(esa_cuda_device *dev)
{
    if (dev->products) return ESA_OK;
    product_state *s = (product_state *)calloc(1, sizeof *s);
    if (!s) return device_fail(dev, ESA_ERR_MEMORY, "out of memory for matrix products");
    int driver = 0;
    cudaDriverGetVersion(&driver);
    esa_status status = blas_open(&s->library, driver / 1000, dev->error, sizeof dev->error);
    if (!status) {
        const int32_t result = s->library.call.Create(&s->handle);
        if (result != LT_SUCCESS)
            status = device_fail(dev, ESA_ERR_DEVICE, "cuBLASLt could not start: %s (%.300s)",
                                 s->library.call.GetStatusString(result), s->library.path);
        if (status) blas_close(&s->library);
    }
    if (status) {
        free(s);
        return status;
    }
    const int64_t v = s->library.version;
    snprintf(s->name, sizeof s->name, "%d.%d.%d, %s", (int)(v / 10000), (int)(v / 100 % 100),
             (int)(v % 100), s->library.path);
    dev->products = s;
    return ESA_OK;
}

static void clear(const lt_functions &call, plan *p)
{
    if (p->desc) call.MatmulDescDestroy(p->desc);
    void *const layout[] = { p->a, p->b, p->d };
    for (void *one : layout)
        if (one) call.MatrixLayoutDestroy(one);
    memset(p, 0, sizeof *p);
}

// ---- descriptors ----

static int64_t alignment(const void *data)
{
    const uintptr_t low = (uintptr_t)data & (0 - (uintptr_t)data);
    return low == 0 || low > 256 ? 256 : (int64_t)low;
}

static plan_key key_of(const esa_product_args &a)
{
    plan_key k = {};
    k.rows = a.x.rows, k.in = a.x.cols, k.out = a.w.rows;
    k.ldx = a.x.ld, k.ldw = a.w.ld, k.ldy = a.y.ld;
    k.align_x = alignment(a.x.data), k.align_w = alignment(a.w.data);
    k.align_y = alignment(a.y.data);
    k.type = a.w.dtype, k.y_type = a.y.dtype;
    k.bias = a.bias != nullptr, k.act = a.act;
    k.fast = a.w.dtype == ESA_DTYPE_F8 && a.fast;
    k.add = a.add;
    return k;
}

static int32_t lt_type(int64_t dtype)
{
    return dtype == ESA_DTYPE_F8 ? LT_F8_E4M3 : dtype == ESA_DTYPE_F32 ? LT_F32 : LT_BF16;
}

// Sets attributes and keeps the first failure.
struct setter {
    const lt_functions &call;
    int32_t result;
    template <class T> void desc(void *at, int32_t attribute, const T &value)
    {
        if (result == LT_SUCCESS)
            result = call.MatmulDescSetAttribute(at, attribute, &value, sizeof value);
    }
    template <class T> void preference(void *at, int32_t attribute, const T &value)
    {
        if (result == LT_SUCCESS)
            result = call.MatmulPreferenceSetAttribute(at, attribute, &value, sizeof value);
    }
};

// Pointers that change from call to call.
static int32_t set_pointers(const lt_functions &call, const plan *p, const esa_product_args &a)
{
    setter set = { call, LT_SUCCESS };
    if (a.bias && p->way == FUSED) set.desc(p->desc, LT_DESC_BIAS_POINTER, a.bias);
    if (p->key.type == ESA_DTYPE_F8) {
        set.desc(p->desc, LT_DESC_A_SCALE, (const void *)a.w.scale);
        set.desc(p->desc, LT_DESC_B_SCALE, (const void *)a.x.scale);
    }
    return set.result;
}

static int32_t describe(const lt_functions &call, plan *p, const esa_product_args &a)
{
    const plan_key &k = p->key;
    const int32_t type = lt_type(k.type);
    int32_t result = call.MatmulDescCreate(&p->desc, LT_COMPUTE_F32, LT_F32);
    if (result == LT_SUCCESS) result = call.MatrixLayoutCreate(&p->a, type, k.in, k.out, k.ldw);
    if (result == LT_SUCCESS) result = call.MatrixLayoutCreate(&p->b, type, k.in, k.rows, k.ldx);
    if (result == LT_SUCCESS)
        result = call.MatrixLayoutCreate(&p->d, lt_type(k.y_type), k.out, k.rows, k.ldy);
    setter set = { call, result };
    set.desc(p->desc, LT_DESC_TRANSA, (int32_t)LT_OP_T);
    set.desc(p->desc, LT_DESC_TRANSB, (int32_t)LT_OP_N);
    const bool gelu = k.act == ESA_ACT_GELU_TANH;
    if (p->way == FUSED) {
        set.desc(p->desc, LT_DESC_EPILOGUE,
                 (uint32_t)(gelu ? (k.bias ? LT_EPILOGUE_GELU_BIAS : LT_EPILOGUE_GELU)
                                 : (k.bias ? LT_EPILOGUE_BIAS : LT_EPILOGUE_NONE)));
        if (k.bias)
            set.desc(p->desc, LT_DESC_BIAS_TYPE,
                     (int32_t)(k.type == ESA_DTYPE_F32 ? LT_F32 : LT_BF16));
    }
    if (k.type == ESA_DTYPE_F8) {
        set.desc(p->desc, LT_DESC_FAST_ACCUM, (int8_t)k.fast);
        set.desc(p->desc, LT_DESC_A_SCALE_MODE, (int32_t)LT_SCALE_OUTER);
        set.desc(p->desc, LT_DESC_B_SCALE_MODE, (int32_t)LT_SCALE_OUTER);
    }
    return set.result == LT_SUCCESS ? set_pointers(call, p, a) : set.result;
}

// Asks for algorithms; none is no failure.
static int32_t ask(const lt_functions &call, void *handle, plan *p)
{
    lt_result found[CANDIDATES] = {};
    void *preference = nullptr;
    int32_t count = 0, result = call.MatmulPreferenceCreate(&preference);
    setter set = { call, result };
    set.preference(preference, LT_PREF_WORKSPACE, (uint64_t)WORKSPACE);
    set.preference(preference, LT_PREF_REDUCTION, (uint32_t)0);
    set.preference(preference, LT_PREF_ALIGN_A, (uint32_t)p->key.align_w);
    set.preference(preference, LT_PREF_ALIGN_B, (uint32_t)p->key.align_x);
    set.preference(preference, LT_PREF_ALIGN_C, (uint32_t)p->key.align_y);
    set.preference(preference, LT_PREF_ALIGN_D, (uint32_t)p->key.align_y);
    result = set.result;
    if (result == LT_SUCCESS)
        result = call.MatmulAlgoGetHeuristic(handle, p->desc, p->a, p->b, p->d, p->d, preference,
                                             CANDIDATES, found, &count);
    if (preference) call.MatmulPreferenceDestroy(preference);
    p->count = p->choice = 0;
    for (int i = 0; result == LT_SUCCESS && i < count; ++i)
        if (found[i].state == LT_SUCCESS && found[i].workspace <= (size_t)WORKSPACE)
            p->algo[p->count++] = found[i].algo;
    return result;
}

static bool is_refusal(int32_t result)
{
    return result == LT_NOT_SUPPORTED || result == LT_INVALID_VALUE || result == LT_ARCH_MISMATCH;
}

static esa_status lt_fail(esa_cuda_device *dev, int32_t result)
{
    cudaGetLastError();
    return device_fail(dev, ESA_ERR_DEVICE, "matrix product: %s (cuBLASLt)",
                       dev->products->library.call.GetStatusString(result));
}

// Makes the plan for the first way from `from` on that has an algorithm.
static esa_status build(esa_cuda_device *dev, plan *p, const esa_product_args &args, int from)
{
    const product_state *s = dev->products;
    const plan_key key = key_of(args);
    const int64_t used = p->used;
    for (int way = from;; ++way) {
        clear(s->library.call, p);
        p->key = key;
        p->used = used;
        p->way = way;
        // Without bias and activation BARE is the same as FUSED; cuBLASLt has only one GELU.
        if (way == BARE && !key.bias && key.act == ESA_ACT_NONE) continue;
        if (way == FUSED && key.act != ESA_ACT_NONE && key.act != ESA_ACT_GELU_TANH) continue;
        if (way == PLAIN) return ESA_OK;
        int32_t result = describe(s->library.call, p, args);
        if (result == LT_SUCCESS) result = ask(s->library.call, s->handle, p);
        if (result != LT_SUCCESS && !is_refusal(result)) {
            clear(s->library.call, p);
            return lt_fail(dev, result);
        }
        if (result == LT_SUCCESS && p->count) return ESA_OK;
    }
}

// ---- the table ----

plan *find_plan(esa_cuda_device *dev, const esa_product_args &args)
{
    product_state *s = dev->products;
    const plan_key key = key_of(args);
    plan *oldest = s->plan;
    const int64_t now = ++s->products;
    for (plan &p : s->plan) {
        if (p.used && memcmp(&p.key, &key, sizeof key) == 0) {
            p.used = now;
            return &p;
        }
        if (p.used < oldest->used) oldest = &p;
    }
    clear(s->library.call, oldest);
    if (build(dev, oldest, args, FUSED)) return nullptr;
    oldest->used = now;
    return oldest;
}

esa_status next_algorithm(esa_cuda_device *dev, plan *p, const esa_product_args &args)
{
    if (++p->choice < p->count) return ESA_OK;
    return build(dev, p, args, p->way + 1);
}

esa_status run_algorithm(esa_cuda_device *dev, const plan *p, const esa_product_args &a, int i,
                         void *ws, cudaStream_t stream, bool *refused)
{
    const product_state *s = dev->products;
    const float one = 1.0f, keep = a.add ? 1.0f : 0.0f;
    int32_t result = set_pointers(s->library.call, p, a);
    if (result == LT_SUCCESS)
        result = s->library.call.Matmul(s->handle, p->desc, &one, a.w.data, p->a, a.x.data, p->b,
                                        &keep, a.y.data, p->d, a.y.data, p->d, &p->algo[i], ws,
                                        (size_t)WORKSPACE, stream);
    *refused = is_refusal(result);
    return result == LT_SUCCESS || *refused ? ESA_OK : lt_fail(dev, result);
}

} // namespace products

void products_close(esa_cuda_device *dev)
{
    product_state *s = dev->products;
    if (!s) return;
    const current_device scope(dev->ordinal);
    for (products::plan &p : s->plan) products::clear(s->library.call, &p);
    s->library.call.Destroy(s->handle);
    free(s); // the library stays loaded: its code may be needed when the process ends
    dev->products = nullptr;
}
