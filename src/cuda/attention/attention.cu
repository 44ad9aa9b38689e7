// attention.cu - one attention call: carves the workspace, prepares a job on the stream, chooses
// the kernel and launches it.
// SPDX-License-Identifier: Apache-2.0
//
// Each step has its own file: gather rows into block order (with an order), rank the rows of every
// head (with a mask), block means, bits of the blocks they stand in for and first states (with a
// tail), then the kernel. In 8 bits, rounding takes the place of gathering and means. docs/cuda.md
// has a table of the steps, and attention.cuh has the contract between preparing and computing.
#include "cuda/attention/attention.cuh"
#include "cuda/attention/prepare.cuh"

#include <string.h>

// The tail stands in for skipped blocks, and a dense call skips none. The workspace is counted
// before the mask is known, so it always has room for the tail that is asked for.
static bool has_tail(const esa_attn_args *a) { return a->tail != ESA_TAIL_NONE && a->count; }

// An 8-bit kernel, and how q, k and v are rounded for it. value: bytes of a value.
struct eight_bit_kernel {
    const char *name;
    int64_t value;
    bool (*takes)(const esa_cuda_device *, const esa_attn_args *);
    esa_status (*quantise)(esa_cuda_device *, const esa_attn_args *, const quantised *,
                           cudaStream_t);
    esa_status (*launch)(esa_cuda_device *, const attention_job *, cudaStream_t);
};

// In the order in which they are asked.
static const eight_bit_kernel eight_bit_kernels[] = {
    { "sm90a-8bit", 1, sm90_8bit_takes, sm90_quantise, sm90_8bit_launch },
    { "sm89-8bit", 1, sm89_8bit_takes, sm89_quantise, sm89_8bit_launch },
    { "sm80-8bit", 2, sm80_8bit_takes, sm80_quantise, sm80_8bit_launch },
};

static const eight_bit_kernel *choose_eight_bit(const esa_cuda_device *dev, const esa_attn_args *a)
{
    for (const eight_bit_kernel &kernel : eight_bit_kernels)
        if (kernel.takes(dev, a)) return &kernel;
    return nullptr;
}

static prepared carve_parts(carve *ws, const esa_cuda_device *dev, const esa_attn_args *a)
{
    prepared p;
    memset(&p, 0, sizeof p);
    p.eight_bit = choose_eight_bit(dev, a);
    const int64_t element = element_bytes(a->dtype), rows = a->B * a->Hq * a->nq;
    p.row_pitch = ceil_div(a->D * element, (int64_t)16) * 16 / element;
    p.next = ws->take<int32_t>(1);
    p.order = ws->take<int32_t>(rows);
    if (a->nq > ORDER_RUN) p.runs = ws->take<uint32_t>(rows);
    const int64_t nk_pad = ceil_div(a->nk, (int64_t)128) * 128;
    if (p.eight_bit) {
        p.q8 = carve_quantised(ws, a, p.eight_bit->value);
        if (a->tail == ESA_TAIL_NONE) return p;
        p.nk_pad = nk_pad;
        p.stands = ws->take<uint32_t>(rows * (nk_pad / 32));
        if (a->tail == ESA_TAIL_LEVELS) p.fine_columns = ws->take<int32_t>(rows);
        return p;
    }
    if (a->perm_q) p.q = ws->take<char>(a->B * a->Hq * a->Nq * p.row_pitch * element);
    if (a->perm_k) {
        p.k = ws->take<char>(a->B * a->Hkv * a->Nk * p.row_pitch * element);
        p.v = ws->take<char>(a->B * a->Hkv * a->Nk * p.row_pitch * element);
    }
    if (a->tail == ESA_TAIL_NONE) return p;
    p.mean_pitch = a->D <= 64 ? 64 : a->D <= 128 ? 128 : 256;
    p.nk_pad = nk_pad;
    p.k_mean = ws->take<char>(a->B * a->Hkv * p.nk_pad * p.mean_pitch * element);
    p.v_mean = ws->take<char>(a->B * a->Hkv * p.nk_pad * p.mean_pitch * element);
    p.stands = ws->take<uint32_t>(rows * (p.nk_pad / 32));
    if (a->tail == ESA_TAIL_LEVELS) {
        const int64_t fine = a->B * a->Hkv * a->nk * a->fine * p.mean_pitch * element;
        p.k_fine = ws->take<char>(fine);
        p.v_fine = ws->take<char>(fine);
        p.fine_columns = ws->take<int32_t>(rows);
    }
    if (a->tail != ESA_TAIL_CENTROID) return p;
    p.q_mean = ws->take<float>(rows * p.mean_pitch);
    p.state_o = ws->take<float>(rows * p.mean_pitch);
    p.state_m = ws->take<float>(rows);
    p.state_l = ws->take<float>(rows);
    return p;
}

static void view_gathered(const void **data, int64_t *stride, const void *rows, int64_t H,
                          int64_t N, int64_t pitch)
{
    *data = rows;
    stride[0] = H * N * pitch;
    stride[1] = N * pitch;
    stride[2] = pitch;
}

// The call as the kernels see it, with every view in block order. The parts may be null if only the
// choice of a kernel is wanted.
static attention_job job_of(const esa_attn_args *args, const prepared *p)
{
    attention_job job;
    memset(&job, 0, sizeof job);
    job.a = *args;
    esa_attn_args *a = &job.a;
    if (args->perm_q) view_gathered(&a->q, a->q_stride, p->q, a->Hq, a->Nq, p->row_pitch);
    if (args->perm_k) {
        view_gathered(&a->k, a->k_stride, p->k, a->Hkv, a->Nk, p->row_pitch);
        view_gathered(&a->v, a->v_stride, p->v, a->Hkv, a->Nk, p->row_pitch);
    }
    a->perm_q = a->perm_k = nullptr;
    const bool fine = has_tail(args) && a->tail == ESA_TAIL_LEVELS && a->fine && a->fine_count;
    if (!has_tail(args))
        a->tail = ESA_TAIL_NONE;
    else if (a->tail == ESA_TAIL_LEVELS)
        a->tail = ESA_TAIL_POOLED;
    if (!fine) a->fine = 0, a->fine_count = nullptr, a->fine_index = nullptr;
    job.scatter = args->perm_q;
    for (int i = 0; i < 2; ++i) job.scatter_stride[i] = args->perm_q_stride[i];
    job.next = p->next;
    job.order = args->count ? p->order : nullptr;
    job.q8 = p->q8;
    if (!a->lse) job.q8.q_centre = nullptr;
    if (a->tail == ESA_TAIL_NONE) job.q8.k_mean = nullptr;
    if (!fine) job.q8.k_fine = nullptr;
    if (a->tail == ESA_TAIL_NONE) return job;
    job.k_mean = p->k_mean;
    job.v_mean = p->v_mean;
    job.mean_pitch = p->mean_pitch;
    job.nk_pad = p->nk_pad;
    job.stands = p->stands;
    if (fine) job.k_fine = p->k_fine, job.v_fine = p->v_fine, job.fine_columns = p->fine_columns;
    job.state_o = p->state_o;
    job.state_m = p->state_m;
    job.state_l = p->state_l;
    return job;
}

struct kernel_choice {
    esa_attn_kernel kernel;
    esa_status (*launch)(esa_cuda_device *, const attention_job *, cudaStream_t);
};

// The parts say whether the call runs in 8 bits; a as the kernels see it no longer tells.
static kernel_choice choose(const esa_cuda_device *dev, const esa_attn_args *a, const prepared &p)
{
    if (p.eight_bit) return { { p.eight_bit->name, 8 }, p.eight_bit->launch };
    if (sm90_takes(dev, a)) return { { "sm90a", 16 }, sm90_launch };
    if (sm80_takes(dev, a)) return { { "sm80", 16 }, sm80_launch };
    return { { "simt", 16 }, simt_launch };
}

int64_t attention_workspace(const esa_cuda_device *dev, const esa_attn_args *args)
{
    carve ws(nullptr);
    carve_parts(&ws, dev, args);
    return ws.bytes();
}

esa_attn_kernel attention_kernel(const esa_cuda_device *dev, const esa_attn_args *args)
{
    carve ws(nullptr);
    const prepared parts = carve_parts(&ws, dev, args);
    const attention_job job = job_of(args, &parts);
    return choose(dev, &job.a, parts).kernel;
}

esa_status attention_run(esa_cuda_device *dev, const esa_attn_args *args, void *workspace,
                         void *stream_handle)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t stream = (cudaStream_t)stream_handle;
    carve ws(workspace);
    const prepared parts = carve_parts(&ws, dev, args);
    const attention_job job = job_of(args, &parts);
    esa_status status = parts.eight_bit ? parts.eight_bit->quantise(dev, args, &job.q8, stream)
                                        : gather_rows(dev, args, &parts, stream);
    if (!status) status = row_order(dev, &job.a, &parts, stream);
    if (!status && job.a.tail != ESA_TAIL_NONE) status = tail_means(dev, &job.a, &parts, stream);
    if (!status && job.a.tail == ESA_TAIL_CENTROID)
        status = tail_states(dev, &job.a, &parts, stream);
    return status ? status : choose(dev, &job.a, parts).launch(dev, &job, stream);
}

// The first call runs on the side stream. Teams of both kernels take tiles until there are none, so
// a second call with many tiles fills the multiprocessors that a first one with few leaves idle.
esa_status attention_both(esa_cuda_device *dev, const esa_attn_args *first, void *first_ws,
                          const esa_attn_args *second, void *second_ws, void *stream_handle)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t stream = (cudaStream_t)stream_handle;
    esa_status status = device_check(dev, cudaEventRecord(dev->forked, stream),
                                     "starting work beside other work");
    if (!status)
        status = device_check(dev, cudaStreamWaitEvent(dev->side, dev->forked, 0),
                              "starting work beside other work");
    if (status) return status;
    status = attention_run(dev, first, first_ws, dev->side);
    if (!status) status = attention_run(dev, second, second_ws, stream);
    // The streams are joined in any case: what was started reads memory of the caller.
    cudaError_t result = cudaEventRecord(dev->joined, dev->side);
    if (result == cudaSuccess) result = cudaStreamWaitEvent(stream, dev->joined, 0);
    return status ? status : device_check(dev, result, "waiting for work beside other work");
}
