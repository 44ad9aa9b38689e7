// ladder.cu - times every version and compares some rows with f64. ladder [N]
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "rare.cuh"
#include "quantise.cuh"
#if HEAD == 128
#include "halves.cuh"
#include "whole.cuh"
#endif

#define CK(x)                                                                                      \
    do {                                                                                           \
        const int e_ = (int)(x);                                                                   \
        if (e_) printf("%s, line %d: error %d\n", #x, __LINE__, e_), exit(1);                      \
    } while (0)

constexpr int HEADS = D == 128 ? 12 : 48, ROUNDS = 5, SAMPLE = 24;
constexpr double SCALE = D == 128 ? 0.08838834764831845 : 0.125;

static decltype(&cuTensorMapEncodeTiled) encode;

static CUtensorMap map_of(void *p, int64_t x, int64_t y, int64_t z, int wide, int high)
{
    CUtensorMap m;
    const cuuint64_t dim[3] = { (cuuint64_t)x, (cuuint64_t)y, (cuuint64_t)z },
                     stride[2] = { (cuuint64_t)x, (cuuint64_t)(x * y) };
    const cuuint32_t box[3] = { (cuuint32_t)wide, (cuuint32_t)high, 1 }, one[3] = { 1, 1, 1 };
    CK(encode(&m, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, p, dim, stride, box, one,
              CU_TENSOR_MAP_INTERLEAVE_NONE,
              wide == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return m;
}
template <class T> static T *allocate(size_t n)
{
    T *p;
    CK(cudaMalloc(&p, n * sizeof(T)));
    CK(cudaMemset(p, 0, n * sizeof(T)));
    return p;
}

struct problem {
    int N, blocks, padded;
    __nv_bfloat16 *x[3], *o; // q, k, v
    float *lse;
    uint8_t *q, *k, *v;
    float *q_scale, *k_scale, *v_scale, *k_mean, *v_mean, *v_top;
    int *next;
    long long *cycles;
    std::vector<float> host[3];
    std::vector<double> want; // rows of the sample

    explicit problem(int N) : N(N), blocks((N + 127) / 128), padded(blocks * 128)
    {
        const size_t n = (size_t)HEADS * N * D, wide = (size_t)HEADS * padded * D;
        std::mt19937 rng(N);
        std::normal_distribution<float> normal;
        std::vector<__nv_bfloat16> half(n);
        for (int t = 0; t < 3; ++t) {
            std::vector<float> shift(HEADS * D), noise(1 << 20);
            for (auto &s : shift) s = t ? 0.7f * normal(rng) : 0.0f;
            for (auto &s : noise) s = normal(rng) * (t ? 1.0f : 1.4f);
            host[t].resize(n);
            // A period keeps the host's part short; it is no divisor of the blocks.
            for (size_t i = 0; i < n; ++i) {
                half[i] = __float2bfloat16(noise[(i + i / 999983 * 77) & 1048575] +
                                           shift[i / ((size_t)N * D) * D + i % D]);
                host[t][i] = __bfloat162float(half[i]);
            }
            x[t] = allocate<__nv_bfloat16>(n);
            CK(cudaMemcpy(x[t], half.data(), n * 2, cudaMemcpyHostToDevice));
        }
        o = allocate<__nv_bfloat16>(n), lse = allocate<float>((size_t)HEADS * N);
        q = allocate<uint8_t>(wide), k = allocate<uint8_t>(wide), v = allocate<uint8_t>(wide);
        q_scale = allocate<float>(HEADS * blocks), k_scale = allocate<float>(HEADS * blocks);
        v_scale = allocate<float>(HEADS * D), k_mean = allocate<float>(HEADS * D);
        v_mean = allocate<float>(HEADS * D), v_top = allocate<float>(HEADS * D);
        next = allocate<int>(1), cycles = allocate<long long>(1);
        column_mean<<<dim3(HEADS, 88), D>>>(x[1], k_mean, N);
        column_mean<<<dim3(HEADS, 88), D>>>(x[2], v_mean, N);
        column_top<<<dim3(HEADS, 88), D>>>(x[2], v_mean, v_top, N);
        round_values<<<dim3(blocks, HEADS), 256>>>(x[2], v_mean, v_top, v, v_scale, N, padded);
    }
    template <bool INT8> void round()
    {
        const dim3 grid(blocks, HEADS);
        round_rows<INT8><<<grid, 256>>>(x[0], nullptr, q, q_scale, N, padded);
        round_rows<INT8><<<grid, 256>>>(x[1], k_mean, k, k_scale, N, padded);
    }
    ~problem()
    {
        void *const all[] = { x[0],    x[1],    x[2],    o,      lse,    q,     k,    v,
                              q_scale, k_scale, v_scale, k_mean, v_mean, v_top, next, cycles };
        for (void *p : all) cudaFree(p);
    }

    void compute_sample()
    {
        for (int i = 0; i < SAMPLE; ++i) {
            const size_t h = i % HEADS, n = (size_t)i * 7919 * 131 % N, head = h * N;
            std::vector<double> w(N), r(D, 0.0);
            double top = -1e300, sum = 0;
            for (int j = 0; j < N; ++j) {
                for (int d = 0; d < D; ++d)
                    w[j] += (double)host[0][(head + n) * D + d] * host[1][(head + j) * D + d];
                w[j] *= SCALE;
                top = std::max(top, w[j]);
            }
            for (int j = 0; j < N; ++j) {
                const double e = exp(w[j] - top);
                sum += e;
                for (int d = 0; d < D; ++d) r[d] += e * host[2][(head + j) * D + d];
            }
            for (int d = 0; d < D; ++d) want.push_back(r[d] / sum);
        }
    }
    // Relative error of the sample.
    double error()
    {
        if (want.empty()) compute_sample();
        std::vector<__nv_bfloat16> got(D);
        double wrong = 0, all = 0;
        for (int i = 0; i < SAMPLE; ++i) {
            const size_t h = i % HEADS, n = (size_t)i * 7919 * 131 % N;
            CK(cudaMemcpy(got.data(), o + (h * N + n) * D, D * 2, cudaMemcpyDeviceToHost));
            for (int d = 0; d < D; ++d) {
                const double t = want[i * D + d], g = (float)got[d];
                wrong += (g - t) * (g - t), all += t * t;
            }
        }
        return sqrt(wrong / all);
    }
};

using kernel = void (*)(args, CUtensorMap, CUtensorMap, CUtensorMap);

template <bool INT8> static void time_version(problem &p, const char *name, kernel run)
{
    CK(cudaFuncSetAttribute((const void *)run, cudaFuncAttributeMaxDynamicSharedMemorySize,
                            SHARED));
    p.round<INT8>();
    const CUtensorMap q = map_of(p.q, D, p.padded, HEADS, D, TILE),
                      k = map_of(p.k, D, p.padded, HEADS, D, 128),
                      v = map_of(p.v, p.padded, D, HEADS, 128, D);
    args a = { p.o,
               p.lse,
               p.q_scale,
               p.k_scale,
               p.v_scale,
               p.v_mean,
               p.N,
               HEADS,
               (p.N + TILE - 1) / TILE,
               p.blocks,
               p.blocks,
               (p.N + TILE - 1) / TILE * HEADS,
               p.next,
               (float)(SCALE * 1.4426950408889634),
               p.cycles };
    cudaEvent_t from, to;
    CK(cudaEventCreate(&from));
    CK(cudaEventCreate(&to));
    printf("%-40s %6d tokens:", name, p.N);
    for (int part : { 10, 1 }) { // a tenth of the keys, then all
        a.nk = std::max(1, p.blocks / part);
        std::vector<std::pair<float, double>> runs; // milliseconds, MHz
        for (int i = -1; i < ROUNDS; ++i) {
            CK(cudaMemsetAsync(p.next, 0, 4));
            CK(cudaEventRecord(from));
            run<<<132, 128 * TEAM + 128, SHARED>>>(a, q, k, v);
            CK(cudaEventRecord(to));
            CK(cudaEventSynchronize(to));
            float t;
            long long cycles;
            CK(cudaEventElapsedTime(&t, from, to));
            CK(cudaMemcpy(&cycles, p.cycles, 8, cudaMemcpyDeviceToHost));
            if (i >= 0) runs.push_back({ t, 1e-3 * cycles / t });
        }
        std::sort(runs.begin(), runs.end());
        const auto median = runs[ROUNDS / 2];
        printf(" %7.3f ms, %4.0f MHz, %4.0f TFLOP/s;", median.first, median.second,
               4e-9 * HEADS * p.N * (double)a.nk * KEYS * D / median.first);
    }
    printf(" relative error %.4f\n", p.error());
    fflush(stdout);
}

#if HEAD == 128
template <class V> static void time_whole(problem &p, const char *name)
{
    time_version<V::INT8>(p, name, attention_kernel<consumer<V>>);
}

#endif

int main(int argc, char **argv)
{
    cudaDriverEntryPointQueryResult found;
    void *entry = nullptr;
    CK(cudaFree(nullptr));
    CK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                        &found));
    encode = (decltype(encode))entry;
    for (int N : { D == 128 ? 8192 : 4096, D == 128 ? 32768 : 17776, D == 128 ? 75648 : 65536 }) {
        if (argc > 1 && atoi(argv[1]) != N) continue;
        problem p(N);
#if HEAD == 128
        //                 INT8 ONES TWO TURNS Q_REGS HOLD POLY
        time_whole<version<0, 0, 0, 0, 0, 0, 0>>(p, "v1 E4M3, additions, one level");
        time_whole<version<0, 0, 1, 0, 0, 0, 0>>(p, "v2 two levels");
        time_whole<version<0, 1, 1, 0, 0, 0, 0>>(p, "v3 sums by rows of ones");
        time_whole<version<1, 1, 1, 0, 0, 0, 0>>(p, "v4 INT8 logits");
        time_whole<version<1, 1, 1, 0, 1, 0, 0>>(p, "v5 Q in registers");
        time_whole<version<1, 1, 1, 1, 1, 0, 0>>(p, "v5 in turns, after the issue");
        time_whole<version<1, 1, 1, 2, 1, 0, 0>>(p, "v5 in turns, after Q K^T");
        time_whole<version<1, 1, 1, 0, 1, 0, 4>>(p,
                                                 "v5 a quarter of the exponentials by polynomial");
        time_whole<version<1, 1, 1, 0, 0, 1, 0>>(p, "v6 Q in shared memory, wait held back");
        time_whole<version<1, 1, 1, 0, 1, 1, 0>>(p, "v6 with Q in registers");
        time_whole<version<1, 1, 1, 2, 0, 1, 0>>(p, "v6 in turns");
        time_version<true>(p, "v7 halves of 64 keys", attention_kernel<half_consumer>);
#endif
        time_version<true>(p, "v8 o takes t after 1 stage",
                           attention_kernel<rare_consumer<1, false>>);
        time_version<true>(p, "v8 2 stages", attention_kernel<rare_consumer<2, false>>);
        time_version<true>(p, "v8 4 stages", attention_kernel<rare_consumer<4, false>>);
        time_version<true>(p, "v8 8 stages", attention_kernel<rare_consumer<8, false>>);
        time_version<true>(p, "v8 16 stages", attention_kernel<rare_consumer<16, false>>);
        time_version<true>(p, "v9 4 stages", attention_kernel<rare_consumer<4, true>>);
        time_version<true>(p, "v9 8 stages", attention_kernel<rare_consumer<8, true>>);
    }
}
