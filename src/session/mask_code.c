/* mask_code.c - see mask_code.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/mask_code.h"

#include <math.h>
#include <string.h>

/* 2^(-i/12) and 2^(-(2i+1)/24), correctly rounded; other octaves are exact multiples by powers of two. */
static const double step[12] = {
    0x1.0000000000000p+0, 0x1.e3437e7101344p-1, 0x1.c823e074ec129p-1, 0x1.ae89f995ad3adp-1, 0x1.965fea53d6e3dp-1, 0x1.7f910d768cfb0p-1,
    0x1.6a09e667f3bcdp-1, 0x1.55b8108f0ec5ep-1, 0x1.428a2f98d728bp-1, 0x1.306fe0a31b715p-1, 0x1.1f59ac3c7d6c0p-1, 0x1.0f38f92d97963p-1};
static const double between[12] = {
    0x1.f16ca2748c5b4p-1, 0x1.d5818dcfba487p-1, 0x1.bb279bae0702dp-1, 0x1.a248487c197b8p-1, 0x1.8ace5422aa0dbp-1, 0x1.74a5afdea020fp-1,
    0x1.5fbb6d1e0d6a8p-1, 0x1.4bfdad5362a27p-1, 0x1.395b92b10be1dp-1, 0x1.27c531c0696cap-1, 0x1.172b83c7d517bp-1, 0x1.078059f4155d1p-1};

/* Code of the ratio r = p / rowmax in [0, 1]: the number of half steps 2^-((2c+1)/24) that r does not exceed. */
static uint8_t code_of(double r)
{
    if (!(r > 0)) return ESA_CODE_ZERO;
    uint64_t bits;
    memcpy(&bits, &r, 8);
    const int octave = 1023 - (int)(bits >> 52);        /* r = m 2^-octave, 1 <= m < 2; r = 1 gives 0 and the loop ends at once */
    if (octave > 22) return ESA_CODE_ZERO;
    bits = (bits & UINT64_C(0xfffffffffffff)) | UINT64_C(0x3fe0000000000000);
    double m;                                           /* r's mantissa in [0.5, 1): compared with the half steps of one octave */
    memcpy(&m, &bits, 8);
    int c = 0;
    while (c < 12 && m <= between[c]) c++;
    /* r = 2m 2^-octave = m 2^-(octave-1): codes 12 (octave - 1) .. 12 octave. */
    const int code = 12 * (octave - 1) + c;
    return code < 0 ? 0 : code > ESA_CODE_ZERO ? ESA_CODE_ZERO : (uint8_t)code;
}

uint64_t esa_code_from_sums(uint8_t *code, const uint64_t *sum, int64_t nk)
{
    uint64_t top = 0;
    for (int64_t j = 0; j < nk; j++)
        if (sum[j] > top) top = sum[j];
    for (int64_t j = 0; j < nk; j++) code[j] = sum[j] == 0 ? ESA_CODE_ZERO : code_of((double)sum[j] / (double)top);
    return top;
}

float esa_code_from_f32(uint8_t *code, const float *p, int64_t nk)
{
    float top = 0;
    for (int64_t j = 0; j < nk; j++)
        if (p[j] > top) top = p[j];
    for (int64_t j = 0; j < nk; j++) code[j] = p[j] > 0 ? code_of((double)p[j] / (double)top) : ESA_CODE_ZERO;
    return top;
}

void esa_code_table_init(esa_code_table *table)
{
    for (int c = 0; c < ESA_CODE_ZERO; c++) table->weight[c] = ldexp(step[c % 12], -(c / 12));
    table->weight[ESA_CODE_ZERO] = 0;
}

void esa_code_decode(float *out, const uint8_t *code, float rowmax, int64_t nk, const esa_code_table *table)
{
    for (int64_t j = 0; j < nk; j++) out[j] = (float)((double)rowmax * table->weight[code[j]]);
}

double esa_row_entropy(const float *p, int64_t nk)
{
    if (nk <= 1) return 1;
    double e = 0;
    for (int64_t j = 0; j < nk; j++)
        if (p[j] > 0) e -= (double)p[j] * log((double)p[j]);
    return e / log((double)nk);
}
