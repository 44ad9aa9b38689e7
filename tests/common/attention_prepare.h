/* attention_prepare.h - what an attention case is made of: between attention_prepare.c, which makes
 * and runs it, and attention_case.c, which checks it.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_ATTENTION_PREPARE_H
#define ESA_TESTS_ATTENTION_PREPARE_H

#include "common/attention_case.h"
#include "common/naive.h"

enum { PARTS = 7 };
typedef struct prepared {
    guarded memory[PARTS]; /* q, k, v, o, lse, values and scales of d */
    esa_tensor t[5];
    esa_carry carry;
    double *added;
    uint8_t *keep; /* [B][Hq][nq][nk] or NULL */
    int32_t *perm_q, *perm_k;
    esa_mask *mask;
    esa_ctx *ctx;
    naive_case naive;
} prepared;

/* Makes the case; release it in any case. */
void case_prepare(prepared *p, const attention_case *c, int32_t level, int32_t threads);
void case_release(prepared *p);
/* lse: NULL, or the view that receives it. */
esa_status case_run(prepared *p, const attention_case *c, const esa_tensor *lse);
/* Element d of a row of the carry. */
double case_carried(const esa_carry *x, int64_t row, int64_t d);

#endif
