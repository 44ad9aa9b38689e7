/* test_amx.c - the instructions of kernels_amx.c against the emulation, bit for bit.
 * SPDX-License-Identifier: Apache-2.0
 *
 * With AMX the processor executes them, so the test compares the processor with the plain C of
 * cpu/amx_tiles.h. Without AMX they raise SIGILL; the handler decodes them and calls that plain C.
 * Then the test shows that the compiled kernel names the right tiles and addresses. Both need
 * AVX-512 BF16 for the vector part. */
#define _GNU_SOURCE /* REG_RIP */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/tests.h"
#include "base/half.h"
#include "base/rng.h"
#include "common/naive.h"
#include "common/tiles_emulated.h"
#include "cpu/amx.h"
#include "cpu/tables.h"

#if defined(__x86_64__)
#define ESA_TILES_EMULATED
#include "cpu/amx_tiles.h"
#include <ucontext.h>

static int64_t executed; /* by the handler */

/* The general registers in the order of their numbers. */
static int64_t register_of(const ucontext_t *at, int number)
{
    static const int place[16] = { REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                   REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                   REG_R12, REG_R13, REG_R14, REG_R15 };
    return at->uc_mcontext.gregs[place[number]];
}

typedef struct tile_code {
    int opcode, prefix, reg, rm, vvvv; /* prefix: 0 none, 1 66, 2 F3, 3 F2 */
    int is_register;
    uint64_t address;
    int64_t pitch; /* with an index register: its value */
    int64_t length;
} tile_code;

/* Decodes VEX.128.0F38.W0. Returns 0 for any other code. */
static int decode(tile_code *x, const uint8_t *code, const ucontext_t *at)
{
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84)) return 0;
    const int far_index = !(code[1] & 0x40) * 8, far_base = !(code[1] & 0x20) * 8,
              mode = code[4] >> 6;
    x->opcode = code[3];
    x->prefix = code[2] & 3;
    x->vvvv = ~(code[2] >> 3) & 15;
    x->reg = code[4] >> 3 & 7;
    x->rm = code[4] & 7;
    x->is_register = mode == 3;
    x->length = 5;
    if (x->is_register) return 1;
    int base = x->rm + far_base;
    x->pitch = 0;
    uint64_t address = 0;
    if (x->rm == 4) {
        const int sib = code[5], index = (sib >> 3 & 7) + far_index;
        base = (sib & 7) + far_base;
        if (index != 4) x->pitch = register_of(at, index) * (1 << (sib >> 6));
        x->length++;
    }
    if ((base & 7) == 5 && mode == 0) { /* no base: disp32, or relative to the next instruction */
        int32_t away;
        memcpy(&away, code + x->length, 4);
        x->length += 4;
        address = (uint64_t)away;
        if (x->rm == 5) address += (uint64_t)(uintptr_t)(code + x->length);
    } else {
        address = (uint64_t)register_of(at, base);
        if (mode == 1) address += (uint64_t)(int8_t)code[x->length++];
        if (mode == 2) {
            int32_t away;
            memcpy(&away, code + x->length, 4);
            x->length += 4;
            address += (uint64_t)away;
        }
    }
    x->address = address;
    return 1;
}

/* Executes one instruction. Returns 0 if it is none of those that kernels use. */
static int execute(const tile_code *x)
{
    void *memory = (void *)(uintptr_t)x->address;
    if (x->opcode == 0x49 && x->prefix == 0 && !x->is_register) {
        const uint8_t *shape = memory;
        for (int i = 0; i < 8; i++) /* palette 1, and all tiles whole */
            if (shape[0] != 1 || shape[16 + 2 * i] != 64 || shape[17 + 2 * i] ||
                shape[48 + i] != 16)
                return 0;
        TILES_BEGIN();
    } else if (x->opcode == 0x49 && x->prefix == 0 && x->reg == 0 && x->rm == 0) {
        TILES_END();
    } else if (x->opcode == 0x49 && x->prefix == 3 && x->is_register) {
        TILE_ZERO(x->reg);
    } else if (x->opcode == 0x4b && x->prefix == 3 && !x->is_register) {
        TILE_LOAD(x->reg, memory, x->pitch);
    } else if (x->opcode == 0x4b && x->prefix == 2 && !x->is_register) {
        TILE_STORE(x->reg, memory, x->pitch);
    } else if (x->opcode == 0x5c && x->prefix == 2 && x->is_register) {
        TILE_BF16(x->reg, x->rm, x->vvvv);
    } else {
        return 0;
    }
    return 1;
}

static void on_illegal(int number, siginfo_t *info, void *context)
{
    ucontext_t *at = context;
    const uint8_t *code = (const uint8_t *)(uintptr_t)at->uc_mcontext.gregs[REG_RIP];
    tile_code x = { 0 };
    (void)info;
    if (!decode(&x, code, at) || !execute(&x)) {
        signal(number, SIG_DFL); /* the instruction raises it again */
        return;
    }
    at->uc_mcontext.gregs[REG_RIP] += x.length;
    executed++;
}

static const esa_cpu_kernels *real, *plain;

static int choose(void **state)
{
    (void)state;
    if (!(esa_cpu_detect() >> ESA_CPU_AVX512BF16 & 1)) return 0;
    real = esa_kernels_amx.bf16;
    plain = esa_kernels_tiles_avx512.bf16;
    printf("AMX: %s, seed %llu\n", esa_cpu_amx() ? "the processor" : "the handler of SIGILL",
           (unsigned long long)test_seed());
    return 0;
}

/* Called by each test: cmocka puts its own handler before each. */
static void take_instructions(void)
{
    struct sigaction action = { .sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO };
    if (!real) skip();
    if (!esa_cpu_amx()) assert_int_equal(sigaction(SIGILL, &action, NULL), 0);
}

static void *room(int64_t bytes)
{
    void *p = aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
    assert_non_null(p);
    memset(p, 0x5a, (size_t)((bytes + 63) / 64 * 64));
    return p;
}

/* bf16 values in [-1, 1], some of them zeros and denormals, which both must take as 0. */
static uint16_t *random_bf16(esa_rng *r, int64_t n)
{
    uint16_t *x = room(n * 2);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t bits = esa_rng_next(r) >> 40;
        x[i] = esa_f32_to_bf16(2.0f * esa_rng_unit(r) - 1.0f);
        if (bits % 61 == 0) x[i] = (uint16_t)(bits & 0x807f);
    }
    return x;
}

/* One step of attention: every buffer that a slot writes must have the same bits. */
static void check_step(int64_t keys, int64_t D, uint64_t seed)
{
    esa_rng r = { seed };
    const int64_t nr = real->nr, depth = esa_pad_depth(real, D), padded = esa_pad_keys(real, keys);
    uint16_t *q = random_bf16(&r, nr * D), *k = random_bf16(&r, keys * D),
             *v = random_bf16(&r, keys * D);
    float *o[2], *s[2], m[2][32], l[2][32], alpha[2][32];
    void *p[2];
    for (int i = 0; i < 2; i++) {
        const esa_cpu_kernels *kern = i ? plain : real;
        void *panel = room(esa_k_pack_bytes(kern, nr, D)),
             *rows_k = room(esa_rows_k_bytes(kern, keys, D)),
             *rows_v = room(esa_rows_v_bytes(kern, keys, D));
        s[i] = room(padded * nr * 4);
        p[i] = room(padded * nr * 2);
        o[i] = room(D * nr * 4);
        kern->panel_q(panel, q, ESA_DTYPE_BF16, D, NULL, nr, D, 1.0f);
        kern->rows_k(rows_k, k, ESA_DTYPE_BF16, D, NULL, keys, D);
        kern->rows_v(rows_v, v, ESA_DTYPE_BF16, D, NULL, keys, D);
        for (int c = 0; c < 32; c++) {
            m[i][c] = -INFINITY;
            l[i][c] = 0.0f;
        }
        kern->begin();
        for (int step = 0; step < 2; step++) {
            const float factor = step ? 1.5f : 0.5f; /* the second maximum may move */
            kern->kq(s[i], panel, rows_k, depth, keys, depth, factor);
            kern->softmax(p[i], s[i], keys, factor, NULL, NULL, m[i], l[i], alpha[i]);
            kern->pv(o[i], p[i], rows_v, D, keys, D, step ? alpha[i] : NULL, step);
        }
        kern->end();
        free(panel);
        free(rows_k);
        free(rows_v);
    }
    assert_memory_equal(s[0], s[1], (size_t)(keys * nr * 4));
    assert_memory_equal(p[0], p[1], (size_t)(padded * nr * 2));
    assert_memory_equal(o[0], o[1], (size_t)(D * nr * 4));
    assert_memory_equal(l[0], l[1], sizeof l[0]);
    for (int i = 0; i < 2; i++) {
        free(s[i]);
        free(p[i]);
        free(o[i]);
    }
    free(q);
    free(k);
    free(v);
}

/* The product of selectors, written and added. */
static void check_scores(int64_t rows, int64_t keys, int64_t D, uint64_t seed)
{
    esa_rng r = { seed };
    const int64_t ld = esa_ceil_div(keys, real->nr) * real->nr;
    uint16_t *q = random_bf16(&r, rows * D), *k = random_bf16(&r, keys * D);
    float *s[2];
    for (int i = 0; i < 2; i++) {
        const esa_cpu_kernels *kern = i ? plain : real;
        void *pack_q = room(esa_q_pack_bytes(kern, rows, D)),
             *pack_k = room(esa_k_pack_bytes(kern, keys, D));
        s[i] = room(kern->mr * ld * 4);
        kern->pack_q(pack_q, q, ESA_DTYPE_BF16, D, NULL, rows, D, 0.3f);
        kern->pack_k(pack_k, k, ESA_DTYPE_BF16, D, NULL, keys, D);
        kern->begin();
        for (int times = 0; times < 2; times++)
            kern->qk(s[i], ld, pack_q, pack_k, rows, keys, D, 0.3f, times);
        kern->end();
        free(pack_q);
        free(pack_k);
    }
    assert_memory_equal(s[0], s[1], (size_t)(rows * ld * 4));
    free(s[0]);
    free(s[1]);
    free(q);
    free(k);
}

static void same_bits(void **state)
{
    static const int64_t keys_of[] = { 1, 15, 16, 17, 32, 45, 64, 128 },
                         D_of[] = { 1, 16, 31, 64, 72, 128, 256 };
    (void)state;
    take_instructions();
    for (size_t a = 0; a < sizeof keys_of / sizeof keys_of[0]; a++)
        for (size_t b = 0; b < sizeof D_of / sizeof D_of[0]; b++) {
            check_step(keys_of[a], D_of[b], test_seed() + 10 * a + b);
            check_scores(1 + (int64_t)(5 * a + b) % 16, keys_of[a], D_of[b], test_seed() + a + b);
        }
    assert_true(esa_cpu_amx() || executed > 1000);
}

/* One product of tiles: sums whose bits depend on their order and on where they are rounded, and on
 * what becomes of denormals, infinities and NaN. */
static void order_of_sums(void **state)
{
    (void)state;
    take_instructions();
    esa_rng r = { test_seed() };
    for (int round = 0; round < 50; round++) {
        uint16_t panel[16 * 32 * 2], key[16 * 32];
        float s[2][16 * 32];
        for (int i = 0; i < 16 * 32 * 2; i++) {
            /* exponents far apart; later rounds near the smallest numbers; the last one anything */
            const int scale = (int)(esa_rng_next(&r) >> 60) * 3 - 24 - (round > 20 ? 52 : 0);
            const float x = ldexpf(2.0f * esa_rng_unit(&r) - 1.0f, scale);
            panel[i] = round < 49 ? esa_f32_to_bf16(x) : (uint16_t)(esa_rng_next(&r) >> 48);
            if (i < 16 * 32) key[i] = round < 49 ? esa_f32_to_bf16(x * 1.7f) : panel[i];
        }
        for (int i = 0; i < 2; i++) {
            const esa_cpu_kernels *kern = i ? plain : real;
            kern->begin();
            kern->kq(s[i], panel, key, 32, 16, 32, 1.0f);
            kern->end();
        }
        for (int i = 0; i < 16 * 32; i++) {
            if (isnan((double)s[0][i]) && isnan((double)s[1][i]))
                continue; /* payloads may differ */
            assert_memory_equal(&s[0][i], &s[1][i], 4);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(same_bits),
                                        cmocka_unit_test(order_of_sums) };
    return cmocka_run_group_tests(tests, choose, NULL);
}
#else
static void same_bits(void **state)
{
    (void)state;
    skip();
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(same_bits) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#endif
