/* 03_session.c - a model run: records importance, builds a mask file, runs again with its masks,
 * and prints the statistics.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Before: 02_masks.c. Next: 04_work.c spends a total amount of work. The "model" here is a loop
 * that makes q, k and v per layer and step. A real model calls the session where it used to compute
 * attention. */
#include <stdio.h>
#include <esa/esa_session.h>

enum { LAYERS = 3, STEPS = 5, H = 2, N = 640, D = 32 };

static float q[H * N * D], k[H * N * D], v[H * N * D], o[H * N * D];

static void layer_input(int layer, int step)
{
    unsigned s = (unsigned)(1 + layer * 100 + step);
    for (int i = 0; i < H * N * D; i++) {
        s = s * 1664525u + 1013904223u;
        const float noise = (float)((int)(s >> 24) - 128) / 128.0f,
                    place = (float)((i / D) % N / 64 % 8 == i % 8 ? 2 : 0);
        q[i] = place + noise;
        k[i] = place - noise;
        v[i] = noise;
    }
}

/* Runs one video through the session. */
static esa_status run(esa_session *session)
{
    esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, 1, H, N, D),
               tk = esa_tensor_bnsd(k, ESA_DTYPE_F32, 1, H, N, D);
    esa_tensor tv = esa_tensor_bnsd(v, ESA_DTYPE_F32, 1, H, N, D),
               to = esa_tensor_bnsd(o, ESA_DTYPE_F32, 1, H, N, D);
    esa_status status = esa_session_begin(session);
    for (int step = 0; !status && step < STEPS; step++) {
        status = esa_session_step(session, step, 0);
        for (int layer = 0; !status && layer < LAYERS; layer++) {
            layer_input(layer, step);
            status = esa_session_attention(session, layer, ESA_CALL_SELF, &tq, &tk, &tv, &to, NULL);
        }
    }
    return status;
}

int main(void)
{
    const char *recording = "03_session.recording", *masks = "03_session.safetensors";
    const double budgets[] = { 0.5, 0.25 };
    esa_ctx *ctx;
    esa_session *session = NULL;
    esa_mask_file *file = NULL;
    esa_session_stats stats;
    stats.struct_size = sizeof stats;
    if (esa_ctx_create(&ctx, NULL)) return 1;

    /* 1. Calibrate: run dense and record the importance of every block. */
    esa_session_params params = esa_session_params_default();
    params.mode = ESA_SESSION_RECORD;
    params.layers = LAYERS;
    params.steps = STEPS;
    params.model = "example";
    esa_status status = esa_session_create(ctx, &session, &params);
    if (!status) status = run(session);
    if (!status) status = esa_session_save_recording(session, recording);
    esa_session_free(session);
    session = NULL;

    /* 2. Build masks for two budgets in one file. Several recordings (prompts, machines) would be
     * added up here. */
    esa_mask_build build = esa_mask_build_default();
    build.budgets = budgets;
    build.budget_count = 2;
    if (!status) status = esa_mask_file_build(ctx, masks, &recording, 1, &build);
    if (!status) status = esa_mask_file_open(ctx, &file, masks);

    /* 3. Run with the masks of the file; no selector runs. Layer 0 and the first fifth of the steps
     * stay dense. */
    params.mode = ESA_SESSION_CACHED;
    params.masks = file;
    params.select.budget = 0.25;
    params.attention.tail = ESA_TAIL_POOLED;
    if (!status) status = esa_session_create(ctx, &session, &params);
    if (!status) status = run(session);
    if (!status) status = esa_session_get_stats(session, &stats, -1, -1);
    if (status)
        fprintf(stderr, "%s: %s\n", esa_status_name(status), esa_ctx_error(ctx));
    else
        printf("%lld calls: %lld dense by policy, %lld sparse at density %.3f (asked %.2f), %lld "
               "fallbacks\n",
               (long long)stats.calls, (long long)stats.dense_calls, (long long)stats.sparse_calls,
               stats.density, stats.density_asked, (long long)stats.fallback_calls);
    const int good = !status && stats.calls == LAYERS * STEPS &&
                     stats.sparse_calls == (LAYERS - 1) * (STEPS - 1) && stats.fallback_calls == 0;
    esa_session_free(session);
    esa_mask_file_free(file);
    esa_ctx_free(ctx);
    remove(recording);
    remove(masks);
    return good ? 0 : 1;
}
