/* mask_code.c - coding of block importance; see mask_code.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_code.h"

#include <math.h>
#include <string.h>

/* 2^(-i/48) for i = 1 .. 48, correctly rounded: the borders between steps. Other octaves
 * are exact multiples. */
static const double edge[48] = {
    0x1.f8a8d8c60f8b0p-1, 0x1.f16ca2748c5b4p-1, 0x1.ea4afa2a490dap-1, 0x1.e3437e7101344p-1,
    0x1.dc55cf3825611p-1, 0x1.d5818dcfba487p-1, 0x1.cec65ce34ab6bp-1, 0x1.c823e074ec129p-1,
    0x1.c199bdd85529cp-1, 0x1.bb279bae0702dp-1, 0x1.b4cd21de8773ap-1, 0x1.ae89f995ad3adp-1,
    0x1.a85dcd3dfd5b5p-1, 0x1.a248487c197b8p-1, 0x1.9c49182a3f090p-1, 0x1.965fea53d6e3dp-1,
    0x1.908c6e311553ep-1, 0x1.8ace5422aa0dbp-1, 0x1.85254dad800abp-1, 0x1.7f910d768cfb0p-1,
    0x1.7a11473eb0187p-1, 0x1.74a5afdea020fp-1, 0x1.6f4dfd42e841fp-1, 0x1.6a09e667f3bcdp-1,
    0x1.64d92356280f5p-1, 0x1.5fbb6d1e0d6a8p-1, 0x1.5ab07dd485429p-1, 0x1.55b8108f0ec5ep-1,
    0x1.50d1e16019061p-1, 0x1.4bfdad5362a27p-1, 0x1.473b326a66c19p-1, 0x1.428a2f98d728bp-1,
    0x1.3dea64c123422p-1, 0x1.395b92b10be1dp-1, 0x1.34dd7b1e4399dp-1, 0x1.306fe0a31b715p-1,
    0x1.2c1286bb3bcf3p-1, 0x1.27c531c0696cap-1, 0x1.2387a6e756238p-1, 0x1.1f59ac3c7d6c0p-1,
    0x1.1b3b08a10c5fbp-1, 0x1.172b83c7d517bp-1, 0x1.132ae6324d3b1p-1, 0x1.0f38f92d97963p-1,
    0x1.0b5586cf9890fp-1, 0x1.078059f4155d1p-1, 0x1.03b93e39ddb43p-1, 0x1.0000000000000p-1
};
/* 2^(-(2i+1)/96) for i = 0 .. 47: the middle of each step. */
static const double middle[48] = {
    0x1.fc510809955bfp-1, 0x1.f50765b6e4540p-1, 0x1.edd882ae58c0ep-1, 0x1.e6c3fcc4e16cfp-1,
    0x1.dfc97337b9b5fp-1, 0x1.d8e886a73f2bcp-1, 0x1.d220d911da25ap-1, 0x1.cb720dcef9069p-1,
    0x1.c4dbc98a1ded6p-1, 0x1.be5db23dfe8c2p-1, 0x1.b7f76f2fb5e47p-1, 0x1.b1a8a8ea07a7ep-1,
    0x1.ab710938b4f9fp-1, 0x1.a5503b23e255dp-1, 0x1.9f45eaeb8e56fp-1, 0x1.9951c6031928dp-1,
    0x1.93737b0cdc5e5p-1, 0x1.8daab9d5d2f69p-1, 0x1.87f7335151527p-1, 0x1.82589994cce13p-1,
    0x1.7cce9fd3b3498p-1, 0x1.7758fa5b50d7cp-1, 0x1.71f75e8ec5f74p-1, 0x1.6ca982e30b815p-1,
    0x1.676f1edb05aa7p-1, 0x1.6247eb03a5585p-1, 0x1.5d33a0f017abep-1, 0x1.5831fb36038b5p-1,
    0x1.5342b569d4f82p-1, 0x1.4e658c1b15ff8p-1, 0x1.499a3cd0d5121p-1, 0x1.44e086061892dp-1,
    0x1.403827265f6bcp-1, 0x1.3ba0e08a2e795p-1, 0x1.371a7373aa9cbp-1, 0x1.32a4a20b3f476p-1,
    0x1.2e3f2f5c51518p-1, 0x1.29e9df51fdee1p-1, 0x1.25a476b3e590ep-1, 0x1.216ebb230299cp-1,
    0x1.1d4873168b9aap-1, 0x1.193165d8e10d2p-1, 0x1.15295b84864dfp-1, 0x1.11301d0125b51p-1,
    0x1.0d4574009fa16p-1, 0x1.09692afc24500p-1, 0x1.059b0d3158574p-1, 0x1.01dae69f839eep-1
};

/* f = floor(48 log2(1/r) + 2) for a ratio r = p / rowmax in (0, 1]; at least 2. */
static int32_t step_of(double r)
{
    uint64_t bits;
    memcpy(&bits, &r, 8);
    /* r = m 2^-octave, 0.5 <= m < 1. octave is -1 only for r = 1. */
    const int32_t octave = 1022 - (int32_t)(bits >> 52);
    bits = (bits & UINT64_C(0xfffffffffffff)) | UINT64_C(0x3fe0000000000000);
    double m;
    memcpy(&m, &bits, 8);
    int32_t low = 0, high = 48; /* number of edges >= m */
    while (low < high) {
        const int32_t mid = (low + high) / 2;
        if (m <= edge[mid])
            low = mid + 1;
        else
            high = mid;
    }
    return 48 * octave + low + 2;
}

/* Writes block j. Blocks come in ascending order; the first of four clears their byte. */
static void put(uint8_t *code, uint8_t *fine, int64_t j, double r)
{
    uint32_t two = 3;
    code[j] = ESA_CODE_LAST;
    if (r > 0) {
        const int32_t f = step_of(r);
        if (f < 4 * ESA_CODE_LAST) {
            code[j] = (uint8_t)(f / 4);
            two = (uint32_t)f % 4;
        } else
            two = f < 4 * ESA_CODE_LAST + 48 ? 0 : f < 4 * ESA_CODE_LAST + 96 ? 1 : 2;
    }
    fine[j / 4] = (uint8_t)((j % 4 ? fine[j / 4] : 0u) | two << 2 * (j % 4));
}

uint64_t esa_code_from_sums(uint8_t *code, uint8_t *fine, const uint64_t *sum, int64_t nk)
{
    uint64_t top = 0;
    for (int64_t j = 0; j < nk; j++)
        if (sum[j] > top) top = sum[j];
    for (int64_t j = 0; j < nk; j++) put(code, fine, j, sum[j] ? (double)sum[j] / (double)top : 0);
    return top;
}

float esa_code_from_f32(uint8_t *code, uint8_t *fine, const float *p, int64_t nk)
{
    float top = 0;
    for (int64_t j = 0; j < nk; j++)
        if (p[j] > top) top = p[j];
    for (int64_t j = 0; j < nk; j++)
        put(code, fine, j, p[j] > 0 && top <= 3.402823466e38f ? (double)p[j] / (double)top : 0);
    return top;
}

void esa_code_table_init(esa_code_table *table)
{
    for (int32_t f = 0; f < 4 * ESA_CODE_LAST; f++) {
        const int32_t n = f < 2 ? 0 : f - 2; /* 0 and 1 are never written: p would exceed rowmax */
        table->weight[f] = ldexp(middle[n % 48], -(n / 48));
    }
    double *last = table->weight + 4 * ESA_CODE_LAST; /* one octave each below 2^-21.2 */
    last[0] = ldexp(edge[34], -21);
    last[1] = ldexp(edge[34], -22);
    last[2] = ldexp(edge[34], -23);
    last[3] = 0;
}

void esa_code_decode(float *out, const uint8_t *code, const uint8_t *fine, float rowmax, int64_t nk,
                     const esa_code_table *table)
{
    for (int64_t j = 0; j < nk; j++)
        out[j] = (float)((double)rowmax *
                         table->weight[4 * code[j] + (fine[j / 4] >> 2 * (j % 4) & 3)]);
}

double esa_row_entropy(const float *p, int64_t nk)
{
    if (nk <= 1) return 1;
    double e = 0;
    for (int64_t j = 0; j < nk; j++)
        if (p[j] > 0) e -= (double)p[j] * log((double)p[j]);
    return e / log((double)nk);
}
