/* test_gpu_eight_bit.c - attention in 8 bits on the GPU against the CPU, which defines what is
 * right, and against the textbook in double.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Both round the same numbers, but their f32 sums differ in the last bits, and from 8,192 keys on
 * the GPU takes its centres from a sample. A number near the middle of two codes then falls the
 * other way. If logits differ by d, a share d / STEP of all P changes by one step, STEP = 0.09 of
 * its size in the mean, so the outputs differ by sqrt(d STEP):
 *
 *   the same centres     d ~ 1e-4 (products and exp2 in f32)          0.3 %
 *   other centres        d ~ 4e-3 (all codes of k are rounded anew)   1.9 %
 *                        and all codes of v, sqrt(2) 2.65 %           4.2 % together
 *
 * Two results whose roundings have nothing in common would differ by sqrt(2) 3.7 % = 5.3 %, which
 * the bound on the difference excludes.
 *
 * P depends on the maximum so far, so the CPU takes the stages of the kernel: 128 keys for Hopper,
 * and 64 for the sm89 and sm80 kernels (CPU_SM89, CPU_SM80).
 *
 * The sm80 kernel rounds P and v to f16 (CPU_SM80). Then the outputs differ by what the logits
 * do, d, and by the last bit of some outputs in bf16: 0.1 % in all, or 0.45 % with other centres.
 * The bounds for f16 are two to three times as much. int8 itself has an error of 0.45 % on these
 * data. With E4M3 the difference would be 3.7 %.
 *
 * The error of the GPU against the textbook must be that of the CPU, but for chance and the
 * rounding of the output to the dtype.
 *
 * The plan says which kernel runs. Where it has no 8 bits, the case must be as good as 16 bits.
 * ESA_CUDA=sm80 and ESA_CUDA=sm89 test these kernels on a GPU that has better ones. */
#include "common/tests.h"
#include "base/half.h"
#include "common/attention_loop.h"

#define SAMPLED   8192
#define APART     (c->Nk >= SAMPLED ? 0.048 : 0.03)
#define APART_F16 (c->Nk >= SAMPLED ? 0.008 : 0.003)

/* What a call runs in: 16 bits, or 8 bits with P and v in E4M3 or f16. STEPS: E4M3, 64 keys at a
 * time. */
enum { SIXTEEN, E4M3, STEPS, F16, KINDS };
static const char *const kind_name[] = { "16 bits", "8 bits", "8 bits by 64", "8 bits f16" };
static int runs[KINDS];

/* A mask in which query block 0 keeps key block 0, and has key block 1 on the fine level if there
 * is one; of 256 x 256 tokens, on the GPU of ctx. */
static esa_mask *one_block(esa_ctx *ctx, const attention_case *c)
{
    uint8_t level[64]; /* blocks of 32 or more */
    memset(level, 2, sizeof level);
    level[0] = 0;
    if (c->fine) level[1] = 1;
    esa_mask_info info = mask_info_of(c->block_q, c->block_k, 1, 256, 256);
    info.fine = c->fine;
    esa_mask *host, *mask;
    if (esa_mask_from_levels(ctx, &host, &info, level)) fail_msg("%s", esa_ctx_error(ctx));
    assert_int_equal(esa_mask_to_device(ctx, &mask, host, ESA_DEVICE_CUDA), ESA_OK);
    esa_mask_free(host);
    return mask;
}

/* What a call like c runs in. Of c it takes the dtype, D, causality, blocks, fine means and tail,
 * and whether it is dense. */
static int kind_of(const attention_case *c)
{
    esa_ctx *ctx = level_ctx(GPU_BEST, 1);
    void *memory;
    const int64_t bytes = 256 * c->D * 4;
    assert_int_equal(esa_device_alloc(ctx, &memory, 2 * bytes), ESA_OK);
    esa_tensor t = esa_tensor_bnsd(memory, c->dtype, 1, 1, 256, c->D), o = t;
    t.device = o.device = ESA_DEVICE_CUDA;
    o.data = (char *)memory + bytes;
    esa_shapes s = esa_shapes_default();
    s.dtype = c->dtype;
    s.device = ESA_DEVICE_CUDA;
    s.B = s.Hq = s.Hkv = 1;
    s.Nq = s.Nk = 256;
    s.D = c->D;
    esa_attention_params p = esa_attention_params_default();
    p.precision = 8;
    p.causal = c->causal;
    p.tail = c->tail;
    esa_plan *plan;
    on_gpu_set(1);
    assert_int_equal(esa_plan_create(ctx, &plan, &s, NULL, &p), ESA_OK);
    esa_mask *mask = c->density >= 0.0 ? one_block(ctx, c) : NULL;
    const char *name = esa_plan_kernel(plan, mask, &t, &t, &t, &o);
    if (!*name) fail_msg("%s", esa_ctx_error(ctx));
    printf("dtype %d D %lld blocks %dx%d%s causal %d tail %d fine %d: %s\n", c->dtype,
           (long long)c->D, c->block_q, c->block_k, mask ? "" : " dense", c->causal, c->tail,
           c->fine, name);
    const int kind = strstr(name, "sm80-8bit")   ? F16
                     : strstr(name, "sm89-8bit") ? STEPS
                     : strstr(name, "8bit")      ? E4M3
                                                 : SIXTEEN;
    esa_mask_free(mask);
    esa_plan_free(plan);
    on_gpu_set(-1);
    esa_device_free(ctx, memory);
    esa_ctx_free(ctx);
    return kind;
}

/* Hopper has 8-bit kernels for its two short types at D 128 and key blocks of 128; other GPUs have
 * them at D 64 and 128 and for blocks of 64, too. Causal calls and centroids never have them. */
static void names(void **state)
{
    (void)state;
    esa_ctx *ctx = level_ctx(GPU_BEST, 1);
    esa_device_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_device_get_info(ctx, &info), ESA_OK);
    const int hopper = !on_stand_in() && strcmp(info.kernels, "sm90a") == 0,
              ada = strcmp(info.kernels, "sm89") == 0, ampere = strcmp(info.kernels, "sm80") == 0;
    esa_ctx_free(ctx);
    attention_case c = { .density = 0.5 };
    for (c.dtype = ESA_DTYPE_F16; c.dtype <= ESA_DTYPE_BF16; c.dtype++)
        for (c.tail = ESA_TAIL_NONE; c.tail <= ESA_TAIL_LEVELS; c.tail++)
            for (int shape = 0; shape < 4; shape++) {
                c.D = shape % 2 ? 64 : 128;
                c.block_q = c.block_k = shape < 2 ? 128 : 64;
                c.fine = c.tail == ESA_TAIL_LEVELS ? 8 : 0;
                c.causal = 0;
                const int kind = kind_of(&c), open = c.tail != ESA_TAIL_CENTROID;
                if (hopper) assert_int_equal(kind, open && shape == 0 ? E4M3 : SIXTEEN);
                if (ada) assert_int_equal(kind, open ? STEPS : SIXTEEN);
                if (ampere) assert_int_equal(kind, open ? F16 : SIXTEEN);
                c.causal = 1;
                assert_int_equal(kind_of(&c), SIXTEEN);
            }
    /* The smallest fine means: 4 tokens. */
    c = (attention_case){ .dtype = ESA_DTYPE_BF16,
                          .D = 128,
                          .block_q = 64,
                          .block_k = 64,
                          .density = 0.5,
                          .tail = ESA_TAIL_LEVELS,
                          .fine = 16 };
    if (ada || ampere) assert_int_equal(kind_of(&c), ada ? STEPS : F16);
    /* A head dimension, a type and blocks that no 8-bit kernel takes. */
    const attention_case other[] = {
        { .dtype = ESA_DTYPE_BF16, .D = 96, .block_q = 128, .block_k = 128, .density = -1.0 },
        { .dtype = ESA_DTYPE_F32, .D = 128, .block_q = 128, .block_k = 128, .density = -1.0 },
        { .dtype = ESA_DTYPE_BF16, .D = 128, .block_q = 32, .block_k = 32, .density = 0.5 }
    };
    if (!on_stand_in())
        for (int i = 0; i < 3; i++) assert_int_equal(kind_of(&other[i]), SIXTEEN);
}

/* Outputs and LSE of a case in double; the caller frees. */
static double *outputs(const attention_case *c, int32_t level, double **lse)
{
    int64_t bytes;
    on_gpu_set(level == GPU_BEST);
    char *bits = attention_bits(c, level, 2, &bytes);
    on_gpu_set(-1);
    const int64_t rows = c->B * c->Hq * c->Nq, n = rows * c->D, size = esa_dtype_size(c->dtype),
                  row = c->D + c->pad;
    /* The rows lie side by side with their padding, whatever the order of heads and tokens. */
    assert_int_equal(bytes, rows * row * size + rows * 4);
    double *out = malloc((size_t)n * 8);
    *lse = malloc((size_t)rows * 8);
    for (int64_t i = 0; i < n; i++)
        out[i] = (double)esa_load_f32(bits, i / c->D * row + i % c->D, c->dtype);
    for (int64_t i = 0; i < rows; i++)
        (*lse)[i] = (double)esa_load_f32(bits + rows * row * size, i, ESA_DTYPE_F32);
    free(bits);
    return out;
}

static double apart(const double *a, const double *b, int64_t n)
{
    double difference = 0.0, all = 0.0;
    for (int64_t i = 0; i < n; i++) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        all += b[i] * b[i];
    }
    return all > 0.0 ? sqrt(difference / all) : difference > 0.0 ? (double)INFINITY : 0.0;
}

static double lse_apart(const double *a, const double *b, int64_t rows)
{
    double worst = 0.0;
    for (int64_t i = 0; i < rows; i++) {
        const double d = a[i] == b[i] ? 0.0 : fabs(a[i] - b[i]);
        if (!(d <= worst)) worst = isnan(d) ? (double)INFINITY : d;
    }
    return worst;
}

/* kind_of, asked once per kind of call. */
static int known_kind(const attention_case *c)
{
    static int known[3][2][4][17][3][2][2]; /* 0: not asked yet */
    int *answer = &known[c->dtype][c->D == 128][c->tail][c->fine][c->block_q / 128]
                        [c->block_k / 128][c->density < 0.0];
    if (!*answer) *answer = 1 + kind_of(c);
    return *answer - 1;
}

static int check(const attention_case *c)
{
    const int kind = known_kind(c);
    const int32_t reference = kind == F16 ? CPU_SM80 : kind == STEPS ? CPU_SM89 : ESA_CPU_BEST;
    double *lse[2], *const cpu = outputs(c, reference, &lse[0]),
                           *const gpu = outputs(c, GPU_BEST, &lse[1]);
    const int64_t rows = c->B * c->Hq * c->Nq;
    const double between = apart(gpu, cpu, rows * c->D),
                 between_lse = lse_apart(lse[1], lse[0], rows);
    double unused;
    on_gpu_set(0);
    const double of_cpu = attention_error(c, reference, 2, &unused);
    on_gpu_set(1);
    const double of_gpu = attention_error(c, GPU_BEST, 2, &unused);
    on_gpu_set(-1);
    /* Few outputs leave more to chance: 4 / sqrt(n). The output itself has 8 or 11 bits. */
    const double chance = 4.0 / sqrt((double)(rows * c->D));
    const int right = kind == SIXTEEN
                          ? of_gpu <= 0x1p-7
                          : between <= (kind == F16 ? APART_F16 : APART) && between_lse <= 0.03 &&
                                of_gpu <= of_cpu * (1.05 + chance) + 0x1p-8;
    runs[kind]++;
    if (!right || getenv("ESA_TEST_VERBOSE"))
        printf("    %s, %s: apart %.4f, lse %.4f; errors %.4f (GPU) and %.4f (CPU)\n",
               right ? "right" : "WRONG", kind_name[kind], between, between_lse, of_gpu, of_cpu);
    free(cpu);
    free(gpu);
    free(lse[0]);
    free(lse[1]);
    return !right;
}

/* Where the machine is slow every seventh case has to do. */
static void cases(void **state)
{
    (void)state;
    run_cases("eight/tiles/", 0, few(7), check);
    for (int kind = SIXTEEN; kind < KINDS; kind++)
        if (runs[kind]) printf("%d cases in %s\n", runs[kind], kind_name[kind]);
}

/* A longer call does not have larger errors. Chance moves them by 5 %; with E4M3, sums in one
 * accumulator would be several times as wrong at the end. With f16 there is one accumulator of 24
 * bits. Tensor cores cut what they add to it, by half of the last bit in the mean, and 2^18 keys
 * are 2^14 additions: a share of 2^-10 is lost at most. */
static void no_growth_at(int64_t D)
{
    double first = 0.0;
    const int64_t most = getenv("ESA_TEST_SMALL") ? 4096 : 262144;
    for (int64_t n = 1024; n <= most; n *= 4) {
        const attention_case c = { .B = 1,
                                   .Hq = 1,
                                   .Hkv = 1,
                                   .Nq = 128,
                                   .Nk = n,
                                   .D = D,
                                   .dtype = ESA_DTYPE_F16,
                                   .block_q = 128,
                                   .block_k = 128,
                                   .density = -1.0,
                                   .precision = 8 };
        const int kind = known_kind(&c);
        if (kind == SIXTEEN) return; /* test_attention has those */
        const double cut = kind == F16 ? (double)(n / 16) * 0x1p-24 : 0.0;
        double lse;
        on_gpu_set(1);
        const double error = attention_error(&c, GPU_BEST, 2, &lse);
        on_gpu_set(-1);
        printf("D %lld, %lld keys: relative error %.4f, lse %.5f\n", (long long)D, (long long)n,
               error, lse);
        if (n == 1024) first = error;
        assert_true(error <= 1.1 * first + cut);
    }
}

static void no_growth(void **state)
{
    (void)state;
    no_growth_at(128);
    no_growth_at(64);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        CASES(cases),
        cmocka_unit_test(names),
        cmocka_unit_test(no_growth),
    };
    return RUN(tests);
}
