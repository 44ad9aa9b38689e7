/* 04_work.c - a model run with a total amount of work: the error selector with the recommended
 * settings spends 44% of dense attention over all layers and steps.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Before: 03_session.c. Next: 05_engine.c puts it into an engine. These are the settings of `esa
 * generate` and `esa.apply`. The "model" is a loop that makes q, k and v for a video of T x Y x X
 * tokens. */
#include <math.h>
#include <stdio.h>
#include <esa/esa_session.h>

enum { LAYERS = 3, STEPS = 8, BRANCHES = 2, H = 2, T = 6, Y = 16, X = 16, N = T * Y * X, D = 32 };

static float q[H * N * D], k[H * N * D], v[H * N * D], o[H * N * D];

/* Tokens near each other in the video are alike, and noise hides it less from step to step. */
static void layer_input(int layer, int step, int branch)
{
    unsigned s = (unsigned)(1 + (layer * STEPS + step) * BRANCHES + branch);
    const float loud = 1.0f - (float)step / STEPS;
    for (int i = 0; i < H * N * D; i++) {
        const int n = i / D % N, t = n / (Y * X), y = n / X % Y, x = n % X, d = i % D;
        const int axis = d % 3 == 0 ? 3 * t : d % 3 == 1 ? y : x;
        s = s * 1664525u + 1013904223u;
        const float noise = loud * (float)((int)(s >> 24) - 128) / 128.0f,
                    place = 1.5f * cosf((float)(axis * (1 + d / 6)) * 0.2f);
        q[i] = place + noise;
        k[i] = place - noise;
        v[i] = place + 0.5f * noise;
    }
}

/* Runs one video through the session: every step for the prompt and for the negative prompt. */
static esa_status run(esa_session *session)
{
    esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, 1, H, N, D),
               tk = esa_tensor_bnsd(k, ESA_DTYPE_F32, 1, H, N, D),
               tv = esa_tensor_bnsd(v, ESA_DTYPE_F32, 1, H, N, D),
               to = esa_tensor_bnsd(o, ESA_DTYPE_F32, 1, H, N, D);
    esa_status status = esa_session_begin(session);
    for (int step = 0; step < STEPS; step++)
        for (int branch = 0; branch < BRANCHES; branch++) {
            if (!status) status = esa_session_step(session, step, branch);
            for (int layer = 0; !status && layer < LAYERS; layer++) {
                layer_input(layer, step, branch);
                status = esa_session_attention(session, layer, ESA_CALL_SELF, &tq, &tk, &tv, &to,
                                               NULL);
            }
        }
    return status;
}

/* Prints the work of every step, then asked and realised work of the video. 1 if they agree. */
static int report(const esa_session *session)
{
    esa_session_stats stats = { .struct_size = sizeof stats };
    for (int step = 0; step < STEPS; step++) {
        if (esa_session_get_stats(session, &stats, -1, step)) return 0;
        printf("step %d: work %.3f, %lld masks made\n", step, stats.work,
               (long long)stats.masks_made);
    }
    if (esa_session_get_stats(session, &stats, -1, -1)) return 0;
    printf("%lld calls, %lld of them sparse: work %.3f of dense attention (asked %.2f)\n",
           (long long)stats.calls, (long long)stats.sparse_calls, stats.work, stats.work_asked);
    /* Blocks are whole, so a short video misses the work by a little. */
    return stats.calls == LAYERS * STEPS * BRANCHES && fabs(stats.work - stats.work_asked) < 0.03;
}

int main(void)
{
    esa_ctx *ctx;
    esa_session *session = NULL;
    if (esa_ctx_create(&ctx, NULL)) return 1;

    /* Order, blocks, tail, exact rows and the reuse of masks come from the library. A work decides
     * how dense every layer and step runs; the selector decides which blocks that buys. */
    esa_session_params params = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ERROR,
                                                               N);
    params.layers = LAYERS;
    params.steps = STEPS;
    params.branches = BRANCHES;
    params.work = esa_preset_work_for(ESA_PRESET_BALANCED, params.steps, params.carry,
                                      params.branches);
    params.work_or_least = 1; /* a preset suits any length */
    params.select.layout.grid_q[0] = T;
    params.select.layout.grid_q[1] = Y;
    params.select.layout.grid_q[2] = X;

    esa_status status = esa_session_create(ctx, &session, &params);
    if (!status) status = run(session);
    if (status) fprintf(stderr, "%s: %s\n", esa_status_name(status), esa_ctx_error(ctx));
    const int good = !status && report(session);
    esa_session_free(session);
    esa_ctx_free(ctx);
    return good ? 0 : 1;
}
