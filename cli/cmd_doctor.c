/* cmd_doctor.c - `esa doctor`: which kernels, libraries and machine are in use, and a check that
 * they compute the right thing.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    int32_t level;
} levels[] = {
    { "ref", ESA_CPU_REF },       { "avx2", ESA_CPU_AVX2 },
    { "avx512", ESA_CPU_AVX512 }, { "avx512bf16", ESA_CPU_AVX512BF16 },
    { "neon", ESA_CPU_NEON },
};
#define LEVELS ((int)(sizeof levels / sizeof levels[0]))

/* awkward on purpose: no multiple of a block or a vector; but GPUs have fast head dims */
enum { HEADS = 2, TOKENS = 333, DIM = 80, GPU_DIM = 128 };

/* Largest error of dense attention against a plain sum in double, over both heads. f32 tensors. */
static double check_error(const esa_tensor *q, const esa_tensor *k, const esa_tensor *v,
                          const esa_tensor *o)
{
    const int dim = (int)q->dim[3];
    double worst = 0, score[TOKENS];
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < TOKENS; i++) {
            const float *qi = (const float *)q->data + (h * TOKENS + i) * dim,
                        *oi = (const float *)o->data + (h * TOKENS + i) * dim;
            double top = -INFINITY, sum = 0, out[GPU_DIM] = { 0 };
            for (int j = 0; j < TOKENS; j++) {
                const float *kj = (const float *)k->data + (h * TOKENS + j) * dim;
                score[j] = 0;
                for (int d = 0; d < dim; d++) score[j] += (double)qi[d] * (double)kj[d];
                score[j] /= sqrt((double)dim);
                if (score[j] > top) top = score[j];
            }
            for (int j = 0; j < TOKENS; j++) {
                const float *vj = (const float *)v->data + (h * TOKENS + j) * dim;
                const double p = exp(score[j] - top);
                sum += p;
                for (int d = 0; d < dim; d++) out[d] += p * (double)vj[d];
            }
            for (int d = 0; d < dim; d++) {
                const double e = fabs(out[d] / sum - (double)oi[d]);
                if (!(e <= worst)) worst = e; /* NaN counts as the worst */
            }
        }
    return worst;
}

/* Runs dense and full-mask attention on small data. NaN: the library refused (its sentence is in
 * ctx). */
static double self_test(esa_ctx *ctx)
{
    esa_tensor t[4];
    double error = NAN;
    int ready = 1;
    for (int i = 0; i < 4; i++) {
        t[i] = data_tensor_new(ESA_DTYPE_F32, 1, HEADS, TOKENS, DIM);
        ready = ready && t[i].data;
        if (t[i].data) data_tensor_random(&t[i], (uint64_t)i + 1, 1.0);
    }
    esa_mask *mask = NULL;
    const esa_select_params full = esa_select_params_default(ESA_SELECT_FULL);
    if (ready && esa_attention(ctx, &t[0], &t[1], &t[2], &t[3], NULL, NULL) == ESA_OK) {
        const double dense = check_error(&t[0], &t[1], &t[2], &t[3]);
        if (esa_select(ctx, &mask, &t[0], &t[1], &full) == ESA_OK &&
            esa_attention(ctx, &t[0], &t[1], &t[2], &t[3], mask, NULL) == ESA_OK) {
            const double sparse = check_error(&t[0], &t[1], &t[2], &t[3]);
            error = dense > sparse ? dense : sparse;
        }
    }
    esa_mask_free(mask);
    for (int i = 0; i < 4; i++) data_tensor_free(&t[i]);
    return error;
}

/* ---------------------------------------------------------------- GPUs */

/* f32 values that are exact in bf16: the last 16 bits cut off. */
static void cut_to_bf16(esa_tensor *t)
{
    uint32_t *bits = t->data;
    for (int64_t i = 0; i < data_tensor_count(t); i++) bits[i] &= 0xffff0000u;
}

/* o of the GPU into out (f32). */
static esa_status fetch(esa_ctx *ctx, esa_tensor *out, const esa_tensor *o)
{
    const int64_t n = data_tensor_count(o);
    if (o->dtype == ESA_DTYPE_F32) return esa_device_download(ctx, out->data, o->data, n * 4);
    /* the upper half of the same memory: widening from the front does not overrun it */
    uint16_t *half = (uint16_t *)out->data + n;
    const esa_status status = esa_device_download(ctx, half, o->data, n * 2);
    for (int64_t i = 0; i < n && status == ESA_OK; i++) {
        const uint32_t bits = (uint32_t)half[i] << 16;
        memcpy((char *)out->data + i * 4, &bits, 4);
    }
    return status;
}

/* Dense and full-mask attention on the GPU; NaN: refused (its sentence is in ctx). *kernel: what
 * ran. */
static double gpu_test(esa_ctx *ctx, int32_t dtype, const char **kernel)
{
    esa_tensor t[4], cast[3], gpu[4];
    esa_mask *mask = NULL;
    esa_plan *plan = NULL;
    double error = NAN;
    int ready = 1;
    memset(gpu, 0, sizeof gpu);
    memset(cast, 0, sizeof cast);
    for (int i = 0; i < 4; i++) {
        t[i] = data_tensor_new(ESA_DTYPE_F32, 1, HEADS, TOKENS, GPU_DIM);
        if (!(ready = ready && t[i].data)) continue;
        data_tensor_random(&t[i], (uint64_t)i + 1, 1.0);
        cut_to_bf16(&t[i]);
        if (i < 3 && dtype != ESA_DTYPE_F32)
            cast[i] = data_tensor_new(dtype, 1, HEADS, TOKENS, GPU_DIM);
        if (cast[i % 3].data && i < 3) data_tensor_convert(&cast[i], &t[i]);
        /* o: any contents will do */
        esa_tensor shape = esa_tensor_bnsd(t[i].data, dtype, 1, HEADS, TOKENS, GPU_DIM);
        gpu[i] = data_tensor_to_gpu(ctx, i < 3 && cast[i].data ? &cast[i] : &shape);
        ready = ready && gpu[i].data;
    }
    esa_shapes shapes = esa_shapes_default();
    shapes.dtype = dtype;
    shapes.device = ESA_DEVICE_CUDA;
    shapes.B = 1;
    shapes.Hq = shapes.Hkv = HEADS;
    shapes.Nq = shapes.Nk = TOKENS;
    shapes.D = GPU_DIM;
    const esa_select_params full = esa_select_params_default(ESA_SELECT_FULL);
    if (ready) {
        double worst = 0;
        esa_status status = esa_plan_create(ctx, &plan, &shapes, &full, NULL);
        if (status == ESA_OK) status = esa_mask_create(plan, &mask);
        if (status == ESA_OK) status = esa_plan_select(plan, mask, &gpu[0], &gpu[1], NULL);
        for (int sparse = 0; sparse < 2 && status == ESA_OK; sparse++) {
            *kernel = esa_plan_kernel(plan, sparse ? mask : NULL, &gpu[0], &gpu[1], &gpu[2],
                                      &gpu[3]);
            status = esa_plan_attention(plan, sparse ? mask : NULL, &gpu[0], &gpu[1], &gpu[2],
                                        &gpu[3], NULL, NULL);
            if (status == ESA_OK) status = fetch(ctx, &t[3], &gpu[3]);
            const double now = status == ESA_OK ? check_error(&t[0], &t[1], &t[2], &t[3]) : NAN;
            if (!(now <= worst)) worst = now;
        }
        if (status == ESA_OK) error = worst;
    }
    esa_mask_free(mask);
    esa_plan_free(plan);
    for (int i = 0; i < 4; i++) {
        data_tensor_free(&t[i]);
        if (i < 3) data_tensor_free(&cast[i]);
        data_tensor_free_gpu(ctx, &gpu[i]);
    }
    return error;
}

/* One GPU: what it is, which kernels it gets, and that they are right. */
static int gpu_report(cli_json *json, int32_t ordinal)
{
    /* bf16 keeps 8 bits: rounding probabilities and outputs of order one stays below 0.01. f32: as
     * on the CPU. */
    static const struct {
        int32_t dtype;
        const char *name;
        double bound;
    } checks[] = { { ESA_DTYPE_BF16, "bf16", 2e-2 }, { ESA_DTYPE_F32, "f32", 1e-5 } };
    esa_device_info info;
    esa_ctx *ctx;
    int status = cli_ctx_gpu(&ctx, &info, ordinal, "doctor");
    if (status) return status;
    printf("gpu %-5d ", (int)ordinal);
    cli_gpu_print(stdout, &info);
    cli_gpu_json(json, NULL, &info);
    for (int i = 0; i < 2; i++) {
        const char *kernel = "?";
        const double error = gpu_test(ctx, checks[i].dtype, &kernel);
        const int ok = error <= checks[i].bound;
        printf("check     %-10s %s on GPU %d in %s (largest error %.1e)\n", kernel,
               ok ? "right" : "WRONG", (int)ordinal, checks[i].name, error);
        if (!ok)
            status = cli_fail("doctor: GPU %d, %s: %s", (int)ordinal, checks[i].name,
                              esa_ctx_error(ctx)[0] ? esa_ctx_error(ctx) : "wrong results");
    }
    esa_ctx_free(ctx);
    return status;
}

/* No GPU is no failure: one line says why. */
static int gpus_report(cli_json *json, esa_ctx *ctx)
{
    int32_t count = 0;
    int status = CLI_OK;
    const esa_status counted = esa_device_count(ctx, &count);
    if (counted != ESA_OK)
        printf("cuda      not in use: %s\n", esa_ctx_error(ctx));
    else if (count == 0)
        printf("cuda      not in use: this machine has no GPU\n");
    cli_json_text(json, "cuda",
                  counted != ESA_OK ? esa_ctx_error(ctx)
                  : count           ? "in use"
                                    : "no GPU");
    cli_json_open(json, "gpus", '[');
    for (int32_t i = 0; i < count; i++) {
        const int failed = gpu_report(json, i);
        if (failed) status = failed;
    }
    cli_json_close(json);
    return status;
}

static void blas_report(const cli_blas *blas, const char *cpu)
{
    const char *better = cli_blas_better_core(blas, cpu);
    if (!blas->handle)
        printf("cblas     none found; benchmarks compare with it\n");
    else
        printf("cblas     %s%s%s%s\n", blas->name, blas->core[0] ? ", kernels for " : "",
               blas->core, better ? ": slow on this processor" : "");
    if (better)
        printf("hint      it does not know this processor; OPENBLAS_CORETYPE=%s in the environment "
               "makes its products several times faster\n",
               better);
}

int cmd_doctor(int argc, char **argv)
{
    int64_t threads = 0;
    const char *json_path = NULL;
    int done, status = CLI_OK;
    const cli_option options[] = {
        { "--threads", CLI_INT, &threads, "N", 0, ESA_MAX_THREADS, 0, "0: one per core (0)" },
        { "--json", CLI_OUTPUT, &json_path, "FILE", 0, 0, 0, "also write what is printed as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    status = cli_options(
        "esa doctor", "[options]",
        "Says which kernels, libraries and machine are in use, and checks every kernel set.",
        options, argc, argv, NULL, &done);
    if (status || done) return status;
    if (esa_api_version() != ESA_API_VERSION)
        return cli_fail(
            "this command was built for API version %d but found libesa with version %d",
            ESA_API_VERSION, (int)esa_api_version());
    esa_ctx *ctx;
    if ((status = cli_ctx_new(&ctx, threads)) != 0) return status;
    esa_ctx_params params = esa_ctx_params_default();
    params.threads = (int32_t)threads;

    cli_machine m;
    cli_blas blas;
    cli_machine_get(&m);
    cli_blas_open(&blas, esa_ctx_threads(ctx));
    const char *lowered = getenv("ESA_CPU");
    cli_json *json = cli_json_new();
    cli_machine_json(json, ctx, blas.handle ? blas.name : NULL);
    printf("esa       %s, API %d, commit %s\n", esa_version(), (int)esa_api_version(),
           cli_commit());
    printf("machine   %s, %d cores, %.1f GiB\n", m.cpu, m.cores,
           (double)m.memory_bytes / 1073741824.0);
    printf("system    %s\n", m.os);
    printf("threads   %d\n", (int)esa_ctx_threads(ctx));
    printf("kernels   %s%s%s%s\n", esa_ctx_cpu(ctx), lowered ? " (ESA_CPU=" : "",
           lowered ? lowered : "", lowered ? ")" : "");
    blas_report(&blas, esa_ctx_cpu(ctx));
    const int gpus = gpus_report(json, ctx);

    /* 1e-5: f32 sums of 333 products of order one stay below 1e-6 in every kernel set, a wrong
     * index gives errors near 0.1. */
    const double bound = 1e-5;
    cli_json_open(json, "kernel_sets", '[');
    for (int i = 0; i < LEVELS; i++) {
        esa_ctx *one;
        params.cpu_level = levels[i].level;
        cli_json_open(json, NULL, '{');
        cli_json_text(json, "name", levels[i].name);
        const esa_status have = esa_ctx_create(&one, &params);
        cli_json_bool(json, "available", have == ESA_OK);
        if (have == ESA_OK) {
            const double error = self_test(one);
            const int ok = error <= bound;
            printf("check     %-10s %s (largest error %.1e)\n", levels[i].name,
                   ok ? "right" : "WRONG", error);
            cli_json_real(json, "largest_error", error);
            cli_json_bool(json, "right", ok);
            if (!ok)
                status = cli_fail("doctor: kernel set %s: %s", levels[i].name,
                                  esa_ctx_error(one)[0] ? esa_ctx_error(one) : "wrong results");
        } else {
            printf("check     %-10s not on this machine\n", levels[i].name);
        }
        cli_json_close(json);
        esa_ctx_free(one);
    }
    cli_json_close(json);
    cli_blas_close(&blas);
    esa_ctx_free(ctx);
    const int saved = cli_json_save(json, json_path);
    return status ? status : gpus ? gpus : saved;
}
