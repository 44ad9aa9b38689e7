/* test_wan_faults.c - every allocation in the life of a transformer fails once: a status, a
 * message, and no leak.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/golden.h"
#include "model/dit_cases.h"
#include "model/fail_each.h"
#include "model/sched/sched.h"

/* Config, weights as bf16 (so that copies are made), one video, text, a sparse forward, a scheduler
 * step. The first failure is returned. */
static esa_status life(esa_ctx *ctx, void *from)
{
    const dit_case *c = &dit_cases[0];
    dit_bench *b = from;
    char path[640];
    esa_nn nn;
    esa_wan_config config;
    esa_dit *dit = NULL;
    esa_session *session = NULL;
    esa_sched *sched = NULL;
    esa_session_params p = esa_session_params_default();
    const esa_sched_config sc = {
        .kind = ESA_SCHED_UNIPC, .train_steps = 1000, .order = 2, .shift = 3
    };
    p.select.block_q = p.select.block_k = 32;
    esa_nn_init(&nn, ctx);
    const esa_part_env env = { .nn = &nn, .folder = b->folder.top.dir, .hold = ESA_HOLD_BF16 };
    snprintf(path, sizeof path, "%s", scratch_path(&b->folder.part, "config.json"));
    esa_status status = esa_config_wan(ctx, &config, path);
    if (status == ESA_OK) status = open_dit(&env, &dit, &esa_wan_dit_kind, &config);
    if (status == ESA_OK)
        status = esa_dit_begin(dit, c->latent, &p.select.layout, p.select.selector, p.select.mode,
                               1);
    if (status == ESA_OK) status = set_text(dit, 0, b->text, c->text_rows);
    p.layers = c->config.layers;
    p.steps = 1;
    p.warmup_frac = 0;
    if (status == ESA_OK) status = esa_session_create(ctx, &session, &p);
    if (status == ESA_OK) status = esa_session_begin(session);
    if (status == ESA_OK) status = esa_session_step(session, 0, 0);
    if (status == ESA_OK) status = forward(dit, session, 0, b->v, b->x, c->t);
    if (status == ESA_OK) status = esa_sched_create(&nn, &sched, &sc, 1, 4 * 2 * 16 * 16);
    if (status == ESA_OK) status = esa_sched_step(sched, 0, b->v, b->x, NULL);
    snprintf(message, sizeof message, "%s", esa_ctx_error(ctx));
    esa_sched_free(sched);
    esa_session_free(session);
    esa_dit_free(dit);
    assert_int_equal(nn.held, nn.scratch_bytes);
    esa_nn_close(&nn);
    assert_int_equal(nn.held, 0);
    esa_ctx_trim(ctx);
    return status;
}

static void every_allocation(void **state)
{
    (void)state;
    dit_bench b;
    dit_open(&b, &dit_cases[0], ESA_HOLD_F32, 1);
    fail_each(life, &b, 30);
    dit_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_allocation) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
