/* cmd_doctor.c - `esa doctor`: which kernels, libraries and machine are in use, and a check that they compute the right thing.
 * SPDX-License-Identifier: Apache-2.0 */
#include "data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct { const char *name; int32_t level; } levels[] = {
    { "ref", ESA_CPU_REF }, { "avx2", ESA_CPU_AVX2 }, { "avx512", ESA_CPU_AVX512 }, { "avx512bf16", ESA_CPU_AVX512BF16 },
    { "neon", ESA_CPU_NEON },
};
#define LEVELS ((int)(sizeof levels / sizeof levels[0]))

enum { HEADS = 2, TOKENS = 333, DIM = 80 };     /* awkward on purpose: no multiple of a block or a vector */

/* Largest error of dense attention against a plain sum in double, over both heads. */
static double check_error(const esa_tensor *q, const esa_tensor *k, const esa_tensor *v, const esa_tensor *o)
{
    double worst = 0, score[TOKENS];
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < TOKENS; i++) {
            const float *qi = (const float *)q->data + (h * TOKENS + i) * DIM, *oi = (const float *)o->data + (h * TOKENS + i) * DIM;
            double top = -INFINITY, sum = 0, out[DIM] = { 0 };
            for (int j = 0; j < TOKENS; j++) {
                const float *kj = (const float *)k->data + (h * TOKENS + j) * DIM;
                score[j] = 0;
                for (int d = 0; d < DIM; d++) score[j] += (double)qi[d] * (double)kj[d];
                score[j] /= sqrt((double)DIM);
                if (score[j] > top) top = score[j];
            }
            for (int j = 0; j < TOKENS; j++) {
                const float *vj = (const float *)v->data + (h * TOKENS + j) * DIM;
                const double p = exp(score[j] - top);
                sum += p;
                for (int d = 0; d < DIM; d++) out[d] += p * (double)vj[d];
            }
            for (int d = 0; d < DIM; d++) {
                const double e = fabs(out[d] / sum - (double)oi[d]);
                if (!(e <= worst)) worst = e;       /* NaN counts as the worst */
            }
        }
    return worst;
}

/* Runs dense and full-mask attention on small data. NaN: the library refused (its sentence is in ctx). */
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
        if (esa_select(ctx, &mask, &t[0], &t[1], &full) == ESA_OK && esa_attention(ctx, &t[0], &t[1], &t[2], &t[3], mask, NULL) == ESA_OK) {
            const double sparse = check_error(&t[0], &t[1], &t[2], &t[3]);
            error = dense > sparse ? dense : sparse;
        }
    }
    esa_mask_free(mask);
    for (int i = 0; i < 4; i++) data_tensor_free(&t[i]);
    return error;
}

int cmd_doctor(int argc, char **argv)
{
    int64_t threads = 0;
    const char *json_path = NULL;
    int done, status = CLI_OK;
    const cli_option options[] = {
        { "--threads", CLI_INT, &threads, "N", 0, ESA_MAX_THREADS, 0, "0: one per core (0)" },
        { "--json", CLI_TEXT, &json_path, "FILE", 0, 0, 0, "also write what is printed as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    status = cli_options("esa doctor", "[options]", "Says which kernels, libraries and machine are in use, and checks every kernel set.",
                         options, argc, argv, NULL, &done);
    if (status || done) return status;
    if (esa_api_version() != ESA_API_VERSION)
        return cli_fail("this command was built for API version %d but found libesa with version %d", ESA_API_VERSION, (int)esa_api_version());
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
    printf("esa       %s, API %d, commit %s\n", esa_version(), (int)esa_api_version(), cli_commit());
    printf("machine   %s, %d cores, %.1f GiB\n", m.cpu, m.cores, (double)m.memory_bytes / 1073741824.0);
    printf("system    %s\n", m.os);
    printf("threads   %d\n", (int)esa_ctx_threads(ctx));
    printf("kernels   %s%s%s%s\n", esa_ctx_cpu(ctx), lowered ? " (ESA_CPU=" : "", lowered ? lowered : "", lowered ? ")" : "");
    printf("cblas     %s\n", blas.handle ? blas.name : "none found; only benchmarks use it");
    printf("cuda      not in this build\n");

    /* 1e-5: f32 sums of 333 products of order one stay below 1e-6 in every kernel set, a wrong index gives errors near 0.1. */
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
            printf("check     %-10s %s (largest error %.1e)\n", levels[i].name, ok ? "right" : "WRONG", error);
            cli_json_real(json, "largest_error", error);
            cli_json_bool(json, "right", ok);
            if (!ok) status = cli_fail("doctor: kernel set %s: %s", levels[i].name, esa_ctx_error(one)[0] ? esa_ctx_error(one) : "wrong results");
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
    return status ? status : saved;
}
