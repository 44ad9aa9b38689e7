// planes.cu - what a decoder does with planes: norms over the channels of a pixel, latents as
// planes, pixels as bytes; and convolutions as the rest of the plugin sees them.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/engine/activate.cuh"
#include "cuda/engine/conv.cuh"
#include "cuda/runtime/lanes.cuh"

namespace
{

enum { THREADS = 256 };

// ---- norms ----

// The factor of a pixel whose squares sum to `squares`.
__device__ __forceinline__ float pixel_factor(float squares, int64_t channels)
{
    return sqrtf((float)channels) / fmaxf(sqrtf(squares), 1e-12f);
}

// LANES lanes hold a pixel, PIECES times 8 channels each.
template <int LANES, int PIECES>
__global__ void __launch_bounds__(THREADS)
    norm_kernel(const __grid_constant__ esa_plane_norm_args a)
{
    const unsigned pixel = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES,
                   width = (unsigned)a.width;
    const int lane = threadIdx.x % LANES, channels = (int)a.channels;
    const bool exists = pixel < (unsigned)a.height * width;
    const int64_t row = pixel / width, column = pixel % width;
    const bf16 *x = (const bf16 *)a.x + row * a.x_row + column * channels;
    bf16 *y = (bf16 *)a.y + row * a.y_row + column * channels;
    packed<bf16> raw[PIECES];
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const int c = (p * LANES + lane) * 8;
        raw[p].words = make_uint4(0, 0, 0, 0);
        if (exists && c < channels) raw[p].words = *(const uint4 *)(x + c);
    }
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        float v[8];
        raw[p].unpack(v);
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += v[i] * v[i];
    }
    const float factor = pixel_factor(lanes_sum<LANES>(squares), channels);
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const int c = (p * LANES + lane) * 8;
        if (!exists || c >= channels) continue;
        float v[8];
        raw[p].unpack(v);
        const float4 lo = __ldg((const float4 *)(a.gamma + c)),
                     hi = __ldg((const float4 *)(a.gamma + c) + 1);
        const float gamma[8] = { lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w };
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            out[i] = pack2<bf16>(activate(v[2 * i] * factor * gamma[2 * i], a.act),
                                 activate(v[2 * i + 1] * factor * gamma[2 * i + 1], a.act));
        *(uint4 *)(y + c) = make_uint4(out[0], out[1], out[2], out[3]);
    }
}

// Any number of channels and any alignment: a warp for each pixel, one channel at a time.
template <class T>
__global__ void __launch_bounds__(THREADS)
    plain_norm_kernel(const __grid_constant__ esa_plane_norm_args a)
{
    const unsigned pixel = blockIdx.x * (THREADS / 32) + threadIdx.x / 32,
                   width = (unsigned)a.width;
    if (pixel >= (unsigned)a.height * width) return; // a whole warp
    const int64_t row = pixel / width, column = pixel % width;
    const T *x = (const T *)a.x + row * a.x_row + column * a.channels;
    T *y = (T *)a.y + row * a.y_row + column * a.channels;
    float squares = 0.0f;
    for (int64_t c = threadIdx.x % 32; c < a.channels; c += 32) {
        const float v = to_float(x[c]);
        squares += v * v;
    }
    const float factor = pixel_factor(lanes_sum<32>(squares), a.channels);
    for (int64_t c = threadIdx.x % 32; c < a.channels; c += 32)
        round_to(&y[c], activate(to_float(x[c]) * factor * __ldg(a.gamma + c), a.act));
}

template <int LANES, int PIECES> void norm_launch(const esa_plane_norm_args &a, cudaStream_t stream)
{
    const int64_t blocks = ceil_div(a.height * a.width * LANES, (int64_t)THREADS);
    norm_kernel<LANES, PIECES><<<(unsigned)blocks, THREADS, 0, stream>>>(a);
}

// ---- latents and bytes ----

template <class T>
__global__ void __launch_bounds__(THREADS)
    latent_kernel(const __grid_constant__ esa_plane_latent_args a)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= a.height * a.width * a.channels) return;
    const int64_t c = at % a.channels, x = at / a.channels % a.width,
                  y = at / (a.channels * a.width);
    const float latent = a.latents[c * a.channel + y * a.row + x];
    round_to((T *)a.y + y * a.y_row + x * a.channels + c,
             __fadd_rn(__fmul_rn(latent, a.scale[c]), a.shift[c]));
}

__global__ void __launch_bounds__(THREADS)
    bytes_kernel(const __grid_constant__ esa_plane_bytes_args a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.count) return;
    const float x = __fadd_rn(__fmul_rn(a.x[i], 0.5f), 0.5f);
    if (x != x) *a.wrong = 1;
    a.bytes[i] = (uint8_t)__float2int_rn(__fmul_rn(x > 0 ? (x < 1 ? x : 1.0f) : 0.0f, 255.0f));
}

// ---- convolutions ----

conv::plan plan_of(const esa_cuda_device *dev, const esa_plane_conv_args &a)
{
    conv::plan p;
    p.side = a.up2 ? 2 : a.kh;
    p.taps = p.side * p.side;
    p.phases = a.up2 ? 4 : 1;
    // The widths of Wan's decoder are multiples of 96, those of CogVideoX and HunyuanVideo of 128.
    // Groups of 96 channels, and of 64 with 128 at once, need more shared memory than some GPUs
    // have.
    const bool large = dev->shared_bytes >= 200 << 10;
    p.KC = a.cin % 96 == 0 && large   ? 96
           : a.cin % 48 == 0          ? 48
           : a.cin % 64 == 0 && large ? 64
                                      : 16;
    p.N = p.KC >= 64 && p.side == 3 && a.cout <= 16 ? 16 : p.KC == 64 ? 128 : 96;
    p.wgmma = dev->level >= LEVEL_SM90A && p.KC == 96 && p.N == 96;
    p.groups = ceil_div(a.cin, p.KC);
    p.n_tiles = ceil_div(a.cout, p.N);
    p.bytes = (int64_t)p.phases * a.kt * p.groups * p.taps * p.n_tiles * p.N * p.KC * 2;
    return p;
}

// 1 if tap k of three falls on the source pixel `tap` (0 or 1) of a phase: nearest neighbours share
// a source pixel.
__device__ __forceinline__ bool folded(int phase, int tap, int k)
{
    return phase ? (tap ? k == 2 : k < 2) : (tap ? k > 0 : k == 0);
}

// One thread for each packed element.
template <int KC>
__global__ void __launch_bounds__(THREADS)
    pack_kernel(bf16 *packed, const float *weight, const conv::plan p, int cin, int cout, int kt)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= p.bytes / 2) return;
    int64_t rest = at;
    const int ch = (int)(rest % KC);
    rest /= KC;
    const int n = (int)(rest % p.N);
    rest /= p.N;
    const int co = (int)(rest % p.n_tiles) * p.N + n;
    rest /= p.n_tiles;
    const int tap = (int)(rest % p.taps);
    rest /= p.taps;
    const int ci = (int)(rest % p.groups) * KC + ch;
    rest /= p.groups;
    const int frame = (int)(rest % kt), phase = (int)(rest / kt);
    float value = 0.0f;
    if (ci < cin && co < cout) {
        const int kernel = p.side == 1 ? 1 : 9;
        const float *w = weight + (((int64_t)co * cin + ci) * kt + frame) * kernel;
        if (p.side != 2)
            value = w[tap];
        else
            for (int k = 0; k < 9; ++k)
                if (folded(phase >> 1, tap >> 1, k / 3) && folded(phase & 1, tap & 1, k % 3))
                    value += w[k];
    }
    const int64_t row = at / KC - n;
    const int place = p.wgmma ? (ch / 8 * p.N + n) * 8 : conv::place<KC>(ch / 8, n) / 2;
    round_to(packed + row * KC + place + ch % 8, value);
}

esa_status check_conv(esa_cuda_device *dev, const esa_plane_conv_args &a)
{
    if (a.kh == a.kw && (a.kh == 1 || a.kh == 3) && a.kt >= 1 && a.kt <= 3 &&
        (!a.up2 || a.kh == 3) && a.cin >= 1 && a.cout >= 1)
        return ESA_OK;
    return device_fail(dev, ESA_ERR_UNSUPPORTED,
                       "a convolution with %d x %d x %d taps from %d to %d channels%s, the GPU "
                       "takes 1 x 1 or 3 x 3 taps over up to 3 frames",
                       a.kt, a.kh, a.kw, a.cin, a.cout, a.up2 ? ", doubled" : "");
}

bool aligned(const void *p, int64_t bytes) { return (uintptr_t)p % bytes == 0; }

} // namespace

int64_t conv_bytes(const esa_cuda_device *dev, const esa_plane_conv_args *args)
{
    return plan_of(dev, *args).bytes;
}

esa_status conv_pack(esa_cuda_device *dev, void *packed, const esa_plane_conv_args *args,
                     const float *weight, void *stream)
{
    const current_device scope(dev->ordinal);
    const esa_status status = check_conv(dev, *args);
    if (status) return status;
    const conv::plan p = plan_of(dev, *args);
    const unsigned blocks = (unsigned)ceil_div(p.bytes / 2, (int64_t)THREADS);
    bf16 *const to = (bf16 *)packed;
    cudaStream_t const s = (cudaStream_t)stream;
    if (p.KC == 96)
        pack_kernel<96><<<blocks, THREADS, 0, s>>>(to, weight, p, args->cin, args->cout, args->kt);
    else if (p.KC == 64)
        pack_kernel<64><<<blocks, THREADS, 0, s>>>(to, weight, p, args->cin, args->cout, args->kt);
    else if (p.KC == 48)
        pack_kernel<48><<<blocks, THREADS, 0, s>>>(to, weight, p, args->cin, args->cout, args->kt);
    else
        pack_kernel<16><<<blocks, THREADS, 0, s>>>(to, weight, p, args->cin, args->cout, args->kt);
    return launch_check(dev, "packing a convolution");
}

esa_status conv_run(esa_cuda_device *dev, const esa_plane_conv_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const esa_plane_conv_args &a = *args;
    const esa_status status = check_conv(dev, a);
    if (status || a.height < 1 || a.width < 1) return status;
    if (a.dtype != ESA_DTYPE_BF16 || a.height > 1 << 20 || a.width > 1 << 20)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "a convolution over a plane of type %d with %lld x %lld pixels, the GPU "
                           "takes BF16",
                           a.dtype, (long long)a.height, (long long)a.width);
    const conv::plan p = plan_of(dev, a);
    conv::job job = {};
    job.packed = (const bf16 *)a.packed, job.bias = a.bias;
    job.vectors = a.cin % 8 == 0 && a.x_row % 8 == 0;
    for (int f = 0; f < a.kt; ++f) {
        if (!a.x[f]) continue;
        job.x[job.frames] = (const bf16 *)a.x[f];
        job.frame[job.frames++] = f;
        job.vectors = job.vectors && aligned(a.x[f], 16);
    }
    job.x_row = a.x_row;
    job.y = a.y, job.residual = a.residual, job.y_row = a.y_row, job.residual_row = a.residual_row;
    job.y_f32 = a.y_dtype == ESA_DTYPE_F32;
    job.pairs = !job.y_f32 && a.cout % 2 == 0 && a.y_row % 2 == 0 && aligned(a.y, 4) &&
                aligned(a.residual, 4) && (!a.residual || a.residual_row % 2 == 0);
    job.up2 = a.up2;
    job.height = (int)a.height, job.width = (int)a.width, job.cin = a.cin, job.cout = a.cout;
    job.groups = p.groups, job.n_tiles = p.n_tiles, job.kt = a.kt;
    return (p.wgmma ? conv_sm90_launch : conv_mma_launch)(dev, p, job, (cudaStream_t)stream);
}

esa_status pixel_norm_run(esa_cuda_device *dev, const esa_plane_norm_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const esa_plane_norm_args &a = *args;
    cudaStream_t const s = (cudaStream_t)stream;
    if (a.height < 1 || a.width < 1 || a.channels < 1) return ESA_OK;
    if (a.height * a.width > 0x7fffffff / 32)
        return device_fail(dev, ESA_ERR_UNSUPPORTED, "a plane of %lld x %lld pixels is too large",
                           (long long)a.height, (long long)a.width);
    const bool wide = a.dtype == ESA_DTYPE_BF16 && a.channels % 8 == 0 && a.channels <= 768 &&
                      a.x_row % 8 == 0 && a.y_row % 8 == 0 && aligned(a.x, 16) &&
                      aligned(a.y, 16) && aligned(a.gamma, 16);
    const unsigned blocks = (unsigned)ceil_div(a.height * a.width * 32, (int64_t)THREADS);
    if (!wide && a.dtype == ESA_DTYPE_BF16)
        plain_norm_kernel<bf16><<<blocks, THREADS, 0, s>>>(a);
    else if (!wide)
        plain_norm_kernel<float><<<blocks, THREADS, 0, s>>>(a);
    else if (a.channels <= 96)
        norm_launch<4, 3>(a, s);
    else if (a.channels <= 192)
        norm_launch<8, 3>(a, s);
    else if (a.channels <= 384)
        norm_launch<16, 3>(a, s);
    else
        norm_launch<32, 3>(a, s);
    return launch_check(dev, "a norm of pixels");
}

esa_status from_latents_run(esa_cuda_device *dev, const esa_plane_latent_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const int64_t count = args->height * args->width * args->channels;
    if (count < 1) return ESA_OK;
    const unsigned blocks = (unsigned)ceil_div(count, (int64_t)THREADS);
    if (args->dtype == ESA_DTYPE_BF16)
        latent_kernel<bf16><<<blocks, THREADS, 0, (cudaStream_t)stream>>>(*args);
    else
        latent_kernel<float><<<blocks, THREADS, 0, (cudaStream_t)stream>>>(*args);
    return launch_check(dev, "latents as a plane");
}

esa_status to_bytes_run(esa_cuda_device *dev, const esa_plane_bytes_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    if (args->count < 1) return ESA_OK;
    const unsigned blocks = (unsigned)ceil_div(args->count, (int64_t)THREADS);
    bytes_kernel<<<blocks, THREADS, 0, (cudaStream_t)stream>>>(*args);
    return launch_check(dev, "pixels as bytes");
}

esa_status zero_run(esa_cuda_device *dev, void *ptr, int64_t bytes, void *stream)
{
    const current_device scope(dev->ordinal);
    return device_check(dev, cudaMemsetAsync(ptr, 0, (size_t)bytes, (cudaStream_t)stream),
                        "setting memory to 0");
}
