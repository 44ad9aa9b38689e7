/* session_overhead.c - microseconds that one session call costs when there is almost nothing to
 * compute.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     session_overhead [--device cpu|cuda] [--rounds N] [--threads N]
 *
 * Every call has 1 x 1 x 256 x 16 (B, H, N, D), and a mask keeps one key block of 16, so what is
 * measured is the way from the public call to the kernel: guard, checks, plan, policy, statistics.
 * One round is one video of 64 steps and 8 layers; esa_session_begin and esa_session_step are part
 * of it.
 *
 *     dense    mode DENSE (mostly arithmetic)
 *     online   a mask is made in every call
 *     reused   a mask is made at the first step only
 *
 * On a GPU "queued" is the time until the calls have returned, "done" the time until the GPU has
 * finished. The program uses public headers only. */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <esa/esa_session.h>

enum { H = 1, N = 256, D = 16, SIZE = H * N * D, LAYERS = 8, STEPS = 64, CALLS = LAYERS * STEPS };
enum { MAX_ROUNDS = 1000 };

typedef struct mode {
    const char *name;
    int32_t session; /* ESA_SESSION_* */
    int32_t refresh_every;
} mode;

static const mode modes[] = {
    { "dense", ESA_SESSION_DENSE, 1 },
    { "online", ESA_SESSION_ONLINE, 1 },
    { "reused", ESA_SESSION_ONLINE, STEPS },
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void must(const esa_ctx *ctx, esa_status status)
{
    if (status == ESA_OK) return;
    fprintf(stderr, "session_overhead: %s: %s\n", esa_status_name(status), esa_ctx_error(ctx));
    exit(1);
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* q, k, v and o with values in -1 .. 1, on the device. */
static void make_views(esa_ctx *ctx, esa_tensor view[4], int32_t device)
{
    static float host[4][SIZE];
    uint32_t seed = 1;
    for (int i = 0; i < 4; i++) {
        void *data = host[i];
        for (int j = 0; j < SIZE; j++) {
            seed = seed * 1664525u + 1013904223u;
            host[i][j] = (float)(int32_t)seed / 2147483648.0f;
        }
        if (device == ESA_DEVICE_CUDA) {
            must(ctx, esa_device_alloc(ctx, &data, sizeof host[i]));
            must(ctx, esa_device_upload(ctx, data, host[i], sizeof host[i]));
        }
        view[i] = esa_tensor_bnsd(data, ESA_DTYPE_F32, 1, H, N, D);
        view[i].device = device;
    }
}

static void run_video(esa_ctx *ctx, esa_session *s, const esa_tensor view[4])
{
    must(ctx, esa_session_begin(s));
    for (int32_t step = 0; step < STEPS; step++) {
        must(ctx, esa_session_step(s, step, 0));
        for (int32_t layer = 0; layer < LAYERS; layer++)
            must(ctx, esa_session_attention(s, layer, ESA_CALL_SELF, &view[0], &view[1], &view[2],
                                            &view[3], NULL));
    }
}

static void print_row(const char *name, const char *what, double *seconds, int rounds)
{
    qsort(seconds, (size_t)rounds, sizeof *seconds, ascending);
    printf("%-8s %-7s %10.3f %10.3f %10.3f\n", name, what, 1e6 * seconds[rounds / 2] / CALLS,
           1e6 * seconds[0] / CALLS, 1e6 * seconds[rounds - 1] / CALLS);
}

static void measure(esa_ctx *ctx, const mode *m, const esa_tensor view[4], int32_t device,
                    int rounds)
{
    static double queued[MAX_ROUNDS], done[MAX_ROUNDS];
    esa_session_params p = esa_session_params_default();
    p.mode = m->session;
    p.layers = LAYERS;
    p.steps = STEPS;
    p.dense_first_layer = 0;
    p.warmup_frac = 0.0;
    p.refresh_every = m->refresh_every;
    p.select = esa_select_params_default(ESA_SELECT_ENTROPY);
    p.select.block_q = 256;
    p.select.block_k = 16;
    p.select.budget = 1.0 / 16;
    esa_session *s = NULL;
    must(ctx, esa_session_create(ctx, &s, &p));
    for (int round = -2; round < rounds; round++) { /* two rounds to warm up */
        const double start = now();
        run_video(ctx, s, view);
        const double returned = now();
        if (device == ESA_DEVICE_CUDA) must(ctx, esa_device_sync(ctx));
        if (round < 0) continue;
        queued[round] = returned - start;
        done[round] = now() - start;
    }
    if (device == ESA_DEVICE_CUDA) print_row(m->name, "queued", queued, rounds);
    print_row(m->name, "done", done, rounds);
    esa_session_free(s);
}

int main(int argc, char **argv)
{
    int32_t device = ESA_DEVICE_CPU;
    int rounds = 31, threads = 1;
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--device") && (!strcmp(value, "cpu") || !strcmp(value, "cuda")))
            device = !strcmp(value, "cuda") ? ESA_DEVICE_CUDA : ESA_DEVICE_CPU;
        else if (!strcmp(argv[i], "--rounds") && atoi(value) > 0 && atoi(value) <= MAX_ROUNDS)
            rounds = atoi(value);
        else if (!strcmp(argv[i], "--threads") && atoi(value) > 0)
            threads = atoi(value);
        else {
            fprintf(stderr,
                    "usage: session_overhead [--device cpu|cuda] [--rounds 1..%d] [--threads N]\n",
                    MAX_ROUNDS);
            return 2;
        }
    }
    esa_ctx_params params = esa_ctx_params_default();
    params.threads = threads;
    esa_ctx *ctx = NULL;
    const esa_status status = esa_ctx_create(&ctx, &params);
    if (status != ESA_OK) {
        fprintf(stderr, "session_overhead: no context: %s\n", esa_status_name(status));
        return 1;
    }
    esa_tensor view[4];
    make_views(ctx, view, device);
    printf("esa %s, %s, %d thread(s), %d rounds of %d calls, microseconds per call\n",
           esa_version(), device == ESA_DEVICE_CUDA ? "cuda" : esa_ctx_cpu(ctx), threads, rounds,
           CALLS);
    printf("%-8s %-7s %10s %10s %10s\n", "mode", "until", "median", "least", "most");
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        measure(ctx, &modes[i], view, device, rounds);
    if (device == ESA_DEVICE_CUDA)
        for (int i = 0; i < 4; i++) esa_device_free(ctx, view[i].data);
    esa_ctx_free(ctx);
    return 0;
}
