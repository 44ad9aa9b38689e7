/* cmd_doctor.c - `esa doctor`: prints which kernels, libraries and machine are in use, and checks
 * that every kernel set computes the right thing.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* bf16: the set has kernels of its own for bf16. */
static const struct {
    const char *name;
    int32_t level, bf16;
} levels[] = {
    { "ref", ESA_CPU_REF, 0 },           { "avx2", ESA_CPU_AVX2, 0 },
    { "avx512", ESA_CPU_AVX512, 0 },     { "avx512bf16", ESA_CPU_AVX512BF16, 1 },
    { "amx", ESA_CPU_AMX, 1 },           { "neon", ESA_CPU_NEON, 0 },
    { "neonbf16", ESA_CPU_NEONBF16, 1 },
};
#define LEVELS ((int)(sizeof levels / sizeof levels[0]))

/* Sizes that are not multiples of a block or a vector. GPUs take a head dim with fast kernels. */
enum { HEADS = 2, TOKENS = 333, DIM = 80, GPU_DIM = 128 };

/* Dense attention as a plain sum in double, of f32, over both heads. The caller frees; NULL: no
 * memory. */
static double *plain_attention(const esa_tensor *q, const esa_tensor *k, const esa_tensor *v)
{
    const int dim = (int)q->dim[3];
    double score[TOKENS], *want = calloc((size_t)HEADS * TOKENS * (size_t)dim, sizeof *want);
    if (!want) return NULL;
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < TOKENS; i++) {
            const float *qi = (const float *)q->data + (h * TOKENS + i) * dim;
            double top = -INFINITY, sum = 0, *out = want + (h * TOKENS + i) * dim;
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
            for (int d = 0; d < dim; d++) out[d] /= sum;
        }
    return want;
}

/* The largest difference between o, in f32, and want; infinite if o holds NaN. */
static double check_error(const double *want, const esa_tensor *o)
{
    double worst = 0;
    for (int64_t i = 0; i < data_tensor_count(o); i++) {
        const double e = fabs(want[i] - (double)((const float *)o->data)[i]);
        if (isnan(e)) return (double)INFINITY;
        if (e > worst) worst = e;
    }
    return worst;
}

/* Makes f32 values exact in bf16 by clearing their last 16 bits. */
static void cut_to_bf16(esa_tensor *t)
{
    uint32_t *bits = t->data;
    for (int64_t i = 0; i < data_tensor_count(t); i++) bits[i] &= 0xffff0000u;
}

/* Copies o, which the kernels wrote, into out as f32. */
static esa_status fetch(esa_ctx *ctx, int32_t device, esa_tensor *out, const esa_tensor *o)
{
    const int64_t n = data_tensor_count(o);
    if (o->data == out->data) return ESA_OK;
    if (o->dtype == ESA_DTYPE_F32) return esa_device_download(ctx, out->data, o->data, n * 4);
    /* Into the upper half of out: widening from the front never overwrites what is still needed. */
    uint16_t *half = (uint16_t *)out->data + n;
    esa_status status = ESA_OK;
    if (device == ESA_DEVICE_CPU)
        memcpy(half, o->data, (size_t)n * 2);
    else
        status = esa_device_download(ctx, half, o->data, n * 2);
    for (int64_t i = 0; i < n && !status; i++) {
        const uint32_t bits = (uint32_t)half[i] << 16;
        memcpy((char *)out->data + i * 4, &bits, 4);
    }
    return status;
}

/* q, k, v or o of the self-test: as f32, and as the kernels take it */
typedef struct operand {
    esa_tensor f32, cast, given;
} operand;

/* Makes operand i. given is what the kernels take: f32 itself or cast, or a copy of it on the GPU.
 * 0 if it failed. */
static int operand_new(operand *x, esa_ctx *ctx, int32_t device, int32_t dtype, int dim, int i)
{
    x->f32 = data_tensor_new(ESA_DTYPE_F32, 1, HEADS, TOKENS, dim);
    if (!x->f32.data) return 0;
    data_tensor_random(&x->f32, (uint64_t)i + 1, 1.0);
    cut_to_bf16(&x->f32);
    if (dtype != ESA_DTYPE_F32) {
        x->cast = data_tensor_new(dtype, 1, HEADS, TOKENS, dim);
        if (!x->cast.data) return 0;
        data_tensor_convert(&x->cast, &x->f32);
    }
    x->given = x->cast.data ? x->cast : x->f32;
    if (device == ESA_DEVICE_CPU) return 1;
    x->given = data_tensor_to_gpu(ctx, &x->given);
    return x->given.data != NULL;
}

static void operand_free(operand *x, esa_ctx *ctx)
{
    if (x->given.data != x->f32.data && x->given.data != x->cast.data)
        data_tensor_free_gpu(ctx, &x->given);
    data_tensor_free(&x->f32);
    data_tensor_free(&x->cast);
}

/* The largest error of dense and of full-mask attention on small data. NaN if the library refused,
 * with its message in ctx, or if memory ran out. *kernel: the kernel that ran. *want: what comes
 * out, which is the same for all tests of a device; NULL before the first one, and the caller frees
 * it after the last. */
static double self_test(esa_ctx *ctx, int32_t device, int32_t dtype, const char **kernel,
                        double **want)
{
    const int dim = device == ESA_DEVICE_CPU ? DIM : GPU_DIM;
    operand x[4];
    esa_mask *mask = NULL;
    esa_plan *plan = NULL;
    esa_status status = ESA_OK;
    double worst = 0;
    memset(x, 0, sizeof x);
    for (int i = 0; i < 4 && !status; i++)
        if (!operand_new(&x[i], ctx, device, dtype, dim, i)) status = ESA_ERR_MEMORY;
    if (!status && !*want) *want = plain_attention(&x[0].f32, &x[1].f32, &x[2].f32);
    if (!*want) status = ESA_ERR_MEMORY;
    esa_shapes shapes = esa_shapes_default();
    shapes.dtype = dtype;
    shapes.device = device;
    shapes.B = 1;
    shapes.Hq = shapes.Hkv = HEADS;
    shapes.Nq = shapes.Nk = TOKENS;
    shapes.D = dim;
    const esa_select_params full = esa_select_params_default(ESA_SELECT_FULL);
    const esa_tensor *q = &x[0].given, *k = &x[1].given, *v = &x[2].given;
    esa_tensor *o = &x[3].given;
    if (!status) status = esa_plan_create(ctx, &plan, &shapes, &full, NULL);
    if (!status) status = esa_mask_create(plan, &mask);
    if (!status) status = esa_plan_select(plan, mask, q, k, NULL);
    for (int sparse = 0; sparse < 2 && !status; sparse++) {
        *kernel = esa_plan_kernel(plan, sparse ? mask : NULL, q, k, v, o);
        status = esa_plan_attention(plan, sparse ? mask : NULL, q, k, v, o, NULL, NULL);
        if (!status) status = fetch(ctx, device, &x[3].f32, o);
        if (status) break;
        const double error = check_error(*want, &x[3].f32);
        if (error > worst) worst = error;
    }
    esa_mask_free(mask);
    esa_plan_free(plan);
    for (int i = 0; i < 4; i++) operand_free(&x[i], ctx);
    return status ? (double)NAN : worst;
}

/* What a self-test allows. bf16 keeps 8 bits: rounding probabilities and outputs of order one
 * stays below 0.01. f32 sums of 333 products of order one stay below 1e-6; a wrong index gives
 * errors near 0.1. */
#define BF16_BOUND 2e-2
#define F32_BOUND  1e-5

/* Why a self-test failed. */
static const char *reason(const esa_ctx *ctx, double error)
{
    if (esa_ctx_error(ctx)[0]) return esa_ctx_error(ctx);
    return isnan(error) ? "out of memory" : "wrong results";
}

/* ---------------------------------------------------------------- GPUs */

/* The library of matrix products, which the engine needs and attention does not: without it there
 * is only a line that says how to get it. */
static void library_report(cli_json *json, esa_ctx *ctx)
{
    char name[1200];
    const int found = !esa_device_library(ctx, name, (int32_t)sizeof name);
    printf("cublasLt  %s%s\n", found ? "" : "not in use: ", found ? name : esa_ctx_error(ctx));
    cli_json_text(json, "cublaslt", found ? name : esa_ctx_error(ctx));
}

/* Describes one GPU and checks the kernels it uses. */
static int gpu_report(cli_json *json, int32_t ordinal)
{
    static const struct {
        int32_t dtype;
        const char *name;
        double bound;
    } checks[] = { { ESA_DTYPE_BF16, "bf16", BF16_BOUND }, { ESA_DTYPE_F32, "f32", F32_BOUND } };
    esa_device_info info;
    esa_ctx *ctx;
    int status = cli_ctx_gpu(&ctx, &info, ordinal, "doctor");
    if (status) return status;
    printf("gpu %-5d ", (int)ordinal);
    cli_gpu_print(stdout, &info);
    cli_gpu_json(json, NULL, &info);
    double *want = NULL;
    for (int i = 0; i < 2; i++) {
        const char *kernel = "?";
        const double error = self_test(ctx, ESA_DEVICE_CUDA, checks[i].dtype, &kernel, &want);
        const int ok = error <= checks[i].bound;
        printf("check     %-10s %s on GPU %d in %s (largest error %.1e)\n", kernel,
               ok ? "right" : "WRONG", (int)ordinal, checks[i].name, error);
        if (!ok)
            status = cli_fail("doctor: GPU %d, %s: %s", (int)ordinal, checks[i].name,
                              reason(ctx, error));
    }
    free(want);
    esa_ctx_free(ctx);
    return status;
}

/* A machine without a GPU is fine: one line says why none is used. */
static int gpus_report(cli_json *json, esa_ctx *ctx)
{
    int32_t count = 0;
    int status = CLI_OK;
    const esa_status counted = esa_device_count(ctx, &count);
    if (counted)
        printf("cuda      not in use: %s\n", esa_ctx_error(ctx));
    else if (count == 0)
        printf("cuda      not in use: this machine has no GPU\n");
    cli_json_text(json, "cuda", counted ? esa_ctx_error(ctx) : count ? "in use" : "no GPU");
    cli_json_open(json, "gpus", '[');
    for (int32_t i = 0; i < count; i++) {
        const int failed = gpu_report(json, i);
        if (failed) status = failed;
    }
    cli_json_close(json);
    if (count) library_report(json, ctx);
    return status;
}

static void blas_report(const cli_blas *blas)
{
    if (blas->handle)
        printf("cblas     %s%s%s; only `esa bench attention` uses it, to compare with\n",
               blas->name, blas->core[0] ? ", kernels for " : "", blas->core);
    else
        printf("cblas     none found; `esa bench attention` leaves out sgemm\n");
}

/* Checks every kernel set of the CPU that this machine can run. */
static int kernel_sets_report(cli_json *json, int64_t threads)
{
    int status = CLI_OK;
    double *want = NULL;
    esa_ctx_params params = esa_ctx_params_default();
    params.threads = (int32_t)threads;
    cli_json_open(json, "kernel_sets", '[');
    for (int i = 0; i < LEVELS; i++) {
        esa_ctx *ctx;
        const char *kernel, *name = levels[i].name;
        params.cpu_level = levels[i].level;
        const int have = !esa_ctx_create(&ctx, &params);
        cli_json_open(json, NULL, '{');
        cli_json_fields(json, "name %s available %i", name, have);
        if (have) {
            double error = self_test(ctx, ESA_DEVICE_CPU, ESA_DTYPE_F32, &kernel, &want);
            int ok = error <= F32_BOUND;
            printf("check     %-10s %s (largest error %.1e", name, ok ? "right" : "WRONG", error);
            cli_json_fields(json, "largest_error %g", error);
            if (ok && levels[i].bf16) {
                error = self_test(ctx, ESA_DEVICE_CPU, ESA_DTYPE_BF16, &kernel, &want);
                ok = error <= BF16_BOUND;
                printf("; bf16 %s, %.1e", ok ? "right" : "WRONG", error);
                cli_json_fields(json, "largest_error_bf16 %g", error);
            }
            printf(")\n");
            cli_json_fields(json, "right %i", ok);
            if (!ok) status = cli_fail("doctor: kernel set %s: %s", name, reason(ctx, error));
        } else if (levels[i].level == ESA_CPU_AMX && cli_machine_has("amx_bf16")) {
            printf("check     %-10s refused: the processor has it, but the system does not let "
                   "this process use it\n",
                   name);
            cli_json_fields(json, "refused %i", 1);
        } else
            printf("check     %-10s not on this machine\n", name);
        cli_json_close(json);
        esa_ctx_free(ctx);
    }
    free(want);
    cli_json_close(json);
    return status;
}

int cmd_doctor(int argc, char **argv)
{
    int64_t threads = 0;
    const char *json_path = NULL;
    int done, status = CLI_OK;
    const cli_option options[] = {
        { "--threads", CLI_INT, &threads, "N", 0, ESA_MAX_THREADS, 0,
          "CPU threads; 0: one per core (0)" },
        { "--json", CLI_OUTPUT, &json_path, "FILE", 0, 0, 0, "also write what is printed as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    status = cli_options(
        "esa doctor", "[options]",
        "Prints which kernels, libraries and machine are in use, and checks every kernel set.",
        options, argc, argv, NULL, &done);
    if (status || done) return status;
    if (esa_api_version() != ESA_API_VERSION)
        return cli_fail(
            "this command was built for API version %d but found libesa with version %d",
            ESA_API_VERSION, (int)esa_api_version());
    esa_ctx *ctx;
    if ((status = cli_ctx_new(&ctx, threads)) != 0) return status;
    cli_machine m;
    cli_blas blas;
    cli_machine_get(&m);
    cli_blas_open(&blas, esa_ctx_threads(ctx));
    const char *lowered = getenv("ESA_CPU");
    cli_json *json = cli_json_new();
    cli_machine_json(json, ctx, blas.handle ? blas.name : NULL);
    printf("esa       build %s, API %d, commit %s\n", esa_build_id(), (int)esa_api_version(),
           cli_commit());
    printf("machine   %s, %d cores, %.1f GiB\n", m.cpu, m.cores,
           (double)m.memory_bytes / 1073741824.0);
    printf("system    %s\n", m.os);
    const char *limit = esa_ctx_limit(ctx);
    printf("threads   %d%s%s\n", (int)esa_ctx_threads(ctx), *limit ? ": " : "", limit);
    cli_json_text(json, "threads_limit", *limit ? limit : NULL);
    printf("kernels   %s%s%s%s\n", esa_ctx_cpu(ctx), lowered ? " (ESA_CPU=" : "",
           lowered ? lowered : "", lowered ? ")" : "");
    blas_report(&blas);
    const int gpus = gpus_report(json, ctx);

    status = kernel_sets_report(json, threads);
    cli_blas_close(&blas);
    esa_ctx_free(ctx);
    const int saved = cli_json_save(json, json_path);
    return status ? status : gpus ? gpus : saved;
}
