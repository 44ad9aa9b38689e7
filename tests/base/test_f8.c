/* test_f8.c - E4M3 (base/half.h) against its definition, and the bell curve of base/rng.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>

#include "common/tests.h"
#include "base/half.h"
#include "base/rng.h"
#include "common/naive.h"

/* By the definition: (-1)^s 2^(e-7) (1 + m/8), or 2^-6 m/8 if e is 0. */
static double defined(int code)
{
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = exponent ? ldexp(1 + mantissa / 8.0, exponent - 7)
                                 : ldexp(mantissa / 8.0, -6);
    return code & 0x80 ? -size : size;
}

static void every_code(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        const float x = esa_f8_to_f32((uint8_t)code);
        if ((code & 0x7f) == 0x7f) {
            assert_true(isnan(x));
            assert_int_equal(esa_f32_to_f8(x) & 0x7f, 0x7f);
            continue;
        }
        assert_true((double)x == defined(code));
        assert_int_equal(esa_f32_to_f8(x), code);
    }
}

/* Between neighbours: the nearer one, in the middle the even one. */
static void rounding(void **state)
{
    (void)state;
    for (int code = 0; code < 0x7e; code++)
        for (int sign = 0; sign < 2; sign++) {
            const float low = (float)defined(code), high = (float)defined(code + 1),
                        middle = (low + high) / 2, s = sign ? -1.0f : 1.0f;
            const int bit = sign ? 0x80 : 0, even = code % 2 ? code + 1 : code;
            assert_int_equal(esa_f32_to_f8(s * middle), bit | even);
            assert_int_equal(esa_f32_to_f8(s * nextafterf(middle, 0)), bit | code);
            assert_int_equal(esa_f32_to_f8(s * nextafterf(middle, 1e9f)), bit | (code + 1));
        }
    assert_int_equal(esa_f32_to_f8(449.0f), 0x7e);
    assert_int_equal(esa_f32_to_f8(-1e30f), 0xfe);
    assert_int_equal(esa_f32_to_f8(INFINITY), 0x7e);
    assert_int_equal(esa_f32_to_f8(1e-30f), 0);
    assert_int_equal(esa_f32_to_f8(-0.0f), 0x80);
}

/* The rounding without branches is the way there and back. */
static void there_and_back(void **state)
{
    (void)state;
    for (uint64_t u = 0; u <= UINT32_MAX; u += 65521 - u % 7) {
        const float x = esa_f32_from_bits((uint32_t)u), y = esa_f8_to_f32(esa_f32_to_f8(x)),
                    z = esa_round_f8(x);
        if (isnan(x))
            assert_true(isnan(z));
        else
            assert_int_equal(esa_bits_from_f32(y), esa_bits_from_f32(z));
    }
    for (int code = 0; code < 0x7e; code++) {
        const float low = (float)defined(code), high = (float)defined(code + 1),
                    middle = (low + high) / 2;
        const float near[] = { low, middle, nextafterf(middle, 0), nextafterf(middle, 1e9f) };
        for (int i = 0; i < 4; i++)
            for (int sign = 0; sign < 2; sign++) {
                const float x = sign ? -near[i] : near[i];
                assert_int_equal(esa_bits_from_f32(esa_round_f8(x)),
                                 esa_bits_from_f32(esa_f8_to_f32(esa_f32_to_f8(x))));
            }
    }
}

/* Mean 0, deviation 1, no value beyond 3.5; the errors of 100000 numbers are below 0.01. */
static void bell(void **state)
{
    enum { COUNT = 100000 };
    (void)state;
    double sum = 0, squares = 0, top = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        const double x = esa_rng_bell(test_seed(), i);
        sum += x;
        squares += x * x;
        top = fmax(top, fabs(x));
    }
    printf("seed %llu: mean %.4f, deviation %.4f, largest %.3f\n", (unsigned long long)test_seed(),
           sum / COUNT, sqrt(squares / COUNT), top);
    assert_true(fabs(sum / COUNT) < 0.02 && fabs(sqrt(squares / COUNT) - 1) < 0.01 && top < 3.5);
    assert_true(esa_rng_bell(1, 5) == esa_rng_bell(1, 5));
    assert_true(esa_rng_bell(1, 5) != esa_rng_bell(1, 6));
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_code), cmocka_unit_test(rounding),
                                        cmocka_unit_test(there_and_back), cmocka_unit_test(bell) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
