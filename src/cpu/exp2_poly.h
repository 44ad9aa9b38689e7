/* exp2_poly.h - 2^f as 1 + f (C1 + f (C2 + ...)).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Minimax in relative error with the constant term fixed at 1, so 2^0 is exactly 1.
 *
 * C, on [-1/2, 1/2]: the error of the polynomial is 9.2e-8; its f32 evaluation is within about
 * 2 ulp. W, on [0, 1], for weights that are rounded to bf16: 2.9e-6, 700 times less than that
 * rounding. */
#ifndef ESA_CPU_EXP2_POLY_H
#define ESA_CPU_EXP2_POLY_H

#define EXP2_C1 0x1.62e42ap-1f
#define EXP2_C2 0x1.ebf9bcp-3f
#define EXP2_C3 0x1.c6b752p-5f
#define EXP2_C4 0x1.3cea88p-7f
#define EXP2_C5 0x1.5bba14p-10f

#define EXP2_W1 0x1.62d6c6p-1f
#define EXP2_W2 0x1.ee2452p-3f
#define EXP2_W3 0x1.abf866p-5f
#define EXP2_W4 0x1.b7f73ap-7f

#endif
