/* make_recording.c - writes a small recording, for the command-line tests of `esa masks merge`:
 * make_recording PATH SEED PROMPTS
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <esa/esa_session.h>

enum { LAYERS = 3, STEPS = 5, H = 2, N = 700, D = 16 };

int main(int argc, char **argv)
{
    static float x[3 * H * N * D], o[H * N * D];
    if (argc != 4) return 2;
    unsigned s = (unsigned)atoi(argv[2]);
    esa_tensor t[4];
    for (int i = 0; i < 4; i++)
        t[i] = esa_tensor_bnsd(i < 3 ? x + i * H * N * D : o, ESA_DTYPE_F32, 1, H, N, D);
    esa_ctx *ctx;
    esa_session *session = NULL;
    esa_session_params params = esa_session_params_default();
    params.mode = ESA_SESSION_RECORD;
    params.layers = LAYERS;
    params.steps = STEPS;
    params.model = "test-model";
    if (esa_ctx_create(&ctx, NULL) != ESA_OK) return 1;
    esa_status status = esa_session_create(ctx, &session, &params);
    for (int prompt = 0; status == ESA_OK && prompt < atoi(argv[3]); prompt++) {
        status = esa_session_begin(session);
        for (int step = 0; status == ESA_OK && step < STEPS; step++) {
            status = esa_session_step(session, step, 0);
            for (int layer = 0; status == ESA_OK && layer < LAYERS; layer++) {
                for (int i = 0; i < 3 * H * N * D; i++) {
                    s = s * 1664525u + 1013904223u;
                    x[i] = (float)((int)(s >> 24) - 128) / 64.0f;
                }
                status = esa_session_attention(session, layer, ESA_CALL_SELF, &t[0], &t[1], &t[2],
                                               &t[3], NULL);
            }
        }
    }
    if (status == ESA_OK) status = esa_session_save_recording(session, argv[1]);
    if (status != ESA_OK) fprintf(stderr, "%s\n", esa_ctx_error(ctx));
    esa_session_free(session);
    esa_ctx_free(ctx);
    return status == ESA_OK ? 0 : 1;
}
