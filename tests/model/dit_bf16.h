/* dit_bf16.h - the transformer in bf16 against f32, block by block.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The bound is what diffusers loses: the file wan_dit_bf16 holds the error of its bf16 against its
 * own f32 for the same weights and inputs, and ours may be 1.2 times as large. Errors are the root
 * mean square of the difference over that of f32. */
#ifndef ESA_TESTS_MODEL_DIT_BF16_H
#define ESA_TESTS_MODEL_DIT_BF16_H

#include "model/golden.h"
#include "model/dit_cases.h"

#define SHARE 1.2
enum { MOST_BLOCKS = 16 };

/* The hidden states of one run. */
typedef struct states {
    float *block[MOST_BLOCKS + 1]; /* [tokens * d]; the first is the input of block 0 */
    int64_t count;
    int32_t seen;
} states;

static inline void keep(void *user, int32_t block, const float *hidden, int64_t tokens, int64_t d)
{
    states *s = user;
    assert_int_equal(block + 1, s->seen);
    s->count = tokens * d;
    s->block[s->seen] = malloc((size_t)s->count * 4);
    assert_non_null(s->block[s->seen]);
    memcpy(s->block[s->seen++], hidden, (size_t)s->count * 4);
}

static inline void states_free(states *s)
{
    for (int32_t i = 0; i < s->seen; i++) free(s->block[i]);
}

static inline double distance(const float *got, const float *want, int64_t count)
{
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        const double e = (double)got[i] - (double)want[i];
        difference += e * e;
        size += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / size);
}

static inline esa_session_params dense(int32_t order)
{
    esa_session_params p = esa_session_params_default();
    p.mode = ESA_SESSION_DENSE;
    p.select.layout.order = order;
    return p;
}

/* A device in bf16 against the CPU in f32. */
static inline void compare(const dit_case *c, int32_t order, int32_t device)
{
    dit_bench b[2];
    states s[2] = { { .seen = 0 }, { .seen = 0 } };
    for (int32_t i = 0; i < 2; i++) {
        esa_session_params p = dense(order);
        dit_open_on(&b[i], c, ESA_HOLD_AUTO, 2, i ? device : ESA_DEVICE_CPU);
        esa_wan_dit_set_watch(b[i].dit, keep, &s[i]);
        esa_session_free(dit_forward(&b[i], c, &p));
        assert_int_equal(s[i].seen, c->config.layers + 1);
    }
    esa_tensors *file = golden_open(b[0].ctx, "wan_dit_bf16.safetensors");
    int64_t count;
    const float *allowed = golden_find(file, c->name, &count);
    assert_int_equal(count, c->config.layers + 2);
    print_message("%s, order %d:", c->name, order);
    int32_t wrong = 0;
    for (int32_t i = 0; i < count; i++) {
        const double e = i + 1 < count ? distance(s[1].block[i], s[0].block[i], s[0].count)
                                       : distance(b[1].v, b[0].v, b[0].out_count);
        print_message(" %.2e (%.2f)", e, e / (double)allowed[i]);
        wrong += !(e <= SHARE * (double)allowed[i]);
    }
    print_message("\n");
    assert_int_equal(wrong, 0);
    esa_tensors_free(file);
    for (int32_t i = 0; i < 2; i++) {
        states_free(&s[i]);
        dit_close(&b[i]);
    }
}

#endif
