/* use.c - a program outside the tree: builds against an installed esa and uses each part of it
 * once.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <esa/esa.h>
#include <esa/esa_tensors.h>
#include <esa/esa_session.h>

int main(void)
{
    enum { N = 70, D = 16 };
    static float q[N * D], k[N * D], v[N * D], o[N * D];
    for (int i = 0; i < N * D; i++) {
        q[i] = (float)(i % 7) - 3;
        k[i] = (float)(i % 5) - 2;
        v[i] = 2.5f;
    }
    esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, 1, 1, N, D),
               tk = esa_tensor_bnsd(k, ESA_DTYPE_F32, 1, 1, N, D);
    esa_tensor tv = esa_tensor_bnsd(v, ESA_DTYPE_F32, 1, 1, N, D),
               to = esa_tensor_bnsd(o, ESA_DTYPE_F32, 1, 1, N, D);
    esa_ctx *ctx;
    if (esa_api_version() != ESA_API_VERSION || esa_ctx_create(&ctx, NULL) != ESA_OK) return 1;
    const esa_status status = esa_attention(ctx, &tq, &tk, &tv, &to, NULL, NULL);
    /* equal values: every average of them is the value, to a rounding of the sum */
    double worst = 0;
    for (int i = 0; i < N * D; i++) worst = fmax(worst, fabs(o[i] - 2.5));
    esa_tensors *file;
    const esa_status refused = esa_tensors_open(ctx, &file, "/nonexistent/file");
    const int told = strlen(esa_ctx_error(ctx)) > 0;
    esa_ctx_free(ctx);
    printf("esa %s: %s, largest error %g\n", esa_version(), esa_status_name(status), worst);
    return status == ESA_OK && worst < 1e-5 && refused == ESA_ERR_IO && told && file == NULL ? 0
                                                                                             : 1;
}
