// cycles.cu - cycles of the parts of one stage (128 keys), for one and for two warpgroups.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "parts.cuh"

enum { QK = 1, PV = 2, EXP = 4, SOFTMAX = 8, SHARED_BYTES = 100000 };

template <int WHAT>
__global__ void __launch_bounds__(256, 1) stage(float *out, unsigned *cycles, int n)
{
    extern __shared__ unsigned char raw[];
    const uint32_t base = (smem_addr(raw) + 1023) & ~1023u;
    for (int i = threadIdx.x; i < 60000 / 4; i += blockDim.x)
        ((uint32_t *)raw)[i] = 0x38383838 ^ (i * 2654435761u & 0x07070707);
    proxy_fence();
    __syncthreads();
    float t[NO], x[64], m = 0.1f;
    int s[64];
    uint32_t p[16];
    for (int i = 0; i < NO; ++i) t[i] = threadIdx.x;
    for (int i = 0; i < 64; ++i) x[i] = threadIdx.x * 0.001f - i, s[i] = i * threadIdx.x;
    for (int i = 0; i < 16; ++i) p[i] = 0x38303030 + i;
    const uint64_t k = wgmma_desc(base, 16, 1024), v = wgmma_desc(base + 17408, 16, 1024),
                   q = wgmma_desc(base + 2 * 17408, 16, 1024);
    unsigned issue = 0;
    __syncthreads();
    const unsigned begin = clock();
#pragma unroll 1
    for (int it = 0; it < n; ++it) {
        pin(s), wgmma_pin(t), wgmma_pin(p);
        const unsigned before = clock();
        wgmma_fence();
        if (WHAT & QK) {
            product_s8<false>(s, q, k);
#pragma unroll
            for (int i = 1; i < 4; ++i) product_s8<true>(s, q + 2 * i, k + 2 * i);
            wgmma_commit();
        }
        if (WHAT & PV) {
            product_f8<false>(t, p, v);
#pragma unroll
            for (int i = 1; i < 4; ++i) product_f8<true>(t, p + 4 * i, v + 2 * i);
            wgmma_commit();
        }
        issue += clock() - before;
        if (WHAT & EXP) { // of registers that the products do not touch
#pragma unroll
            for (int i = 0; i < 64; ++i) x[i] = exp2_approx(x[i]);
            const int bits = __float_as_int(x[60]) | __float_as_int(x[63]);
            asm volatile("{.reg .pred mine, any;\n"
                         "HOLD:\n"
                         "setp.eq.s32 mine, %0, 0x80000001;\n"
                         "vote.sync.any.pred any, mine, -1;\n"
                         "@any bra.uni HOLD;}" ::"r"(bits)
                         : "memory");
        }
        wgmma_wait<0>();
        pin(s), wgmma_pin(t), wgmma_pin(p);
        if (WHAT & SOFTMAX) {
            int y[4] = { s[0], s[1], s[2], s[3] };
#pragma unroll
            for (int i = 4; i < 64; ++i) y[i % 4] = max(y[i % 4], s[i]);
            float top = (float)max(max(y[0], y[1]), max(y[2], y[3])) * 1e-6f;
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            m = fmaxf(m, fmaxf(top, __shfl_xor_sync(~0u, top, 2)));
            const float c = LOG2_448 - m - MAGIC * 1e-6f;
#pragma unroll
            for (int i = 0; i < 64; ++i)
                x[i] = exp2_approx(fmaf(__int_as_float(s[i] + MAGIC_BITS), 1e-6f, c));
#pragma unroll
            for (int i = 0; i < 64; ++i) t[i] = fmaf(t[i], m, 1.0f);
#pragma unroll
            for (int i = 0; i < 16; ++i)
                p[i] = pack_e4m3(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
        }
    }
    const unsigned end = clock();
    float sum = m;
    for (int i = 0; i < NO; ++i) sum += t[i];
    for (int i = 0; i < 64; ++i) sum += x[i] + s[i];
    for (int i = 0; i < 16; ++i) sum += p[i];
    out[blockIdx.x * 256 + threadIdx.x] = sum;
    if (threadIdx.x == 0) cycles[2 * blockIdx.x] = end - begin, cycles[2 * blockIdx.x + 1] = issue;
}

template <int WHAT> static void measure(const char *name)
{
    float *out;
    unsigned *cycles, host[2];
    cudaMalloc(&out, 132 * 256 * 4), cudaMalloc(&cycles, 132 * 8);
    cudaFuncSetAttribute(stage<WHAT>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    for (int warpgroups = 1; warpgroups <= 2; ++warpgroups) {
        for (int round = 0; round < 2; ++round)
            stage<WHAT><<<132, 128 * warpgroups, SHARED_BYTES>>>(out, cycles, 1000);
        if (cudaMemcpy(host, cycles, sizeof host, cudaMemcpyDeviceToHost))
            printf("%s: %s\n", name, cudaGetErrorString(cudaGetLastError()));
        else
            printf("%-40s %d warpgroups: %6.0f cycles, %4.0f until all is issued\n", name,
                   warpgroups, host[0] / 1000.0, host[1] / 1000.0);
    }
    cudaFree(out), cudaFree(cycles);
}

int main()
{
    measure<QK>("Q K^T");
    measure<PV>("P V with ones");
    measure<QK | PV>("both products");
    measure<EXP>("64 exponentials");
    measure<SOFTMAX>("softmax");
    measure<QK | EXP>("Q K^T beside exponentials");
    measure<PV | EXP>("P V beside exponentials");
    measure<QK | PV | EXP>("both products beside exponentials");
}
