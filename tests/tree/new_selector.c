/* new_selector.c - uses the selector "nearest" of docs/selectors.md: new_selector MASK_FILE.
 * SPDX-License-Identifier: Apache-2.0
 *
 * check_new_selector.py builds it where the enum has ESA_SELECT_NEAREST. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <esa/esa_session.h>

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        if (x) break;                                                                              \
        fprintf(stderr, "line %d: %s: %s\n", __LINE__, #x, esa_ctx_error(ctx));                    \
        exit(1);                                                                                   \
    } while (0)
enum { SIDE = 16, N = 4 * SIDE * SIDE, D = 16, ROWS = N / 128, NEAREST = ESA_SELECT_NEAREST };

static float data[4][N * D];

/* Three of eight blocks in each row: those nearest to its own. */
static void selects(esa_ctx *ctx, const esa_tensor *t, const char *path)
{
    esa_select_params p = esa_select_params_default(NEAREST);
    esa_mask *mask = NULL;
    esa_mask_file *file = NULL;
    esa_mask_file_info info = { .struct_size = sizeof info };
    uint8_t bits[ROWS];
    p.budget = 3.0 / ROWS;
    CHECK(!esa_select(ctx, &mask, &t[0], &t[1], &p));
    CHECK(!esa_mask_to_bits(mask, bits));
    for (int i = 0; i < ROWS; i++)
        CHECK(bits[i] == 7 << (i == 0 ? 0 : i == ROWS - 1 ? ROWS - 3 : i - 1));
    CHECK(!esa_mask_file_save(ctx, path, mask) && !esa_mask_file_open(ctx, &file, path));
    CHECK(!esa_mask_file_get_info(file, &info) && info.selector == NEAREST);
    esa_mask_file_free(file);
    esa_mask_free(mask);
}

static void runs_in_a_session(esa_ctx *ctx, const esa_tensor *t)
{
    esa_session_params p = esa_session_params_recommended(ESA_SESSION_ONLINE, NEAREST, 0);
    esa_session *session = NULL;
    esa_session_stats stats = { .struct_size = sizeof stats };
    CHECK(p.select.layout.order == ESA_ORDER_HILBERT && p.attention.tail == ESA_TAIL_POOLED);
    p.layers = 2;
    p.steps = 1;
    p.warmup_frac = 0;
    p.select.layout.grid_q[0] = 4;
    p.select.layout.grid_q[1] = p.select.layout.grid_q[2] = SIDE;
    CHECK(!esa_session_create(ctx, &session, &p) && !esa_session_begin(session));
    CHECK(!esa_session_step(session, 0, 0));
    for (int32_t layer = 0; layer < 2; layer++)
        CHECK(!esa_session_attention(session, layer, ESA_CALL_SELF, &t[0], &t[1], &t[2], &t[3],
                                     NULL));
    CHECK(!esa_session_get_stats(session, &stats, -1, -1) && stats.sparse_calls == 1);
    CHECK(stats.work > 0.5 && stats.work < 1); /* one dense layer, and half of the other */
    esa_session_free(session);
}

int main(int argc, char **argv)
{
    esa_ctx *ctx = NULL;
    esa_tensor t[4];
    esa_mask *none = NULL;
    CHECK(argc == 2 && !esa_ctx_create(&ctx, NULL));
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < N * D; j++) data[i][j] = (float)((i + j) % 97) / 97;
        t[i] = esa_tensor_bnsd(data[i], ESA_DTYPE_F32, 1, 1, N, D);
    }
    CHECK(strcmp(esa_selector_name(NEAREST), "nearest") == 0 && !esa_selector_name(NEAREST + 1));
    CHECK(esa_selector_traits(NEAREST) & ESA_TRAIT_BLIND);
    selects(ctx, t, argv[1]);
    runs_in_a_session(ctx, t);
    const esa_select_params p = esa_select_params_default(NEAREST + 1);
    CHECK(esa_select(ctx, &none, &t[0], &t[1], &p) == ESA_ERR_ARGUMENT);
    CHECK(strstr(esa_ctx_error(ctx), "RANDOM, ERROR or NEAREST"));
    esa_ctx_free(ctx);
    return 0;
}
