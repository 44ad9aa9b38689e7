#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `--linear fp8-fast` loses: the error of E4M3 products with exact and with fast sums, against float64.

    bench/fp8_sums.py                   a GPU of compute capability 9.0 and torch

Rows of both matrices have a scale each, as in the engine. "all" is the error against the product of the numbers before
they were rounded to E4M3, "sums" the error against that of the rounded ones: sums and the rounding of the output."""
import torch

ROWS, OUT = 2048, 1024


def inputs(kind, k):
    x = torch.randn(ROWS, k, device="cuda")
    if kind == "outliers":                                  # channels 20 times as large as others
        x[:, torch.randint(k, (k // 64, ))] *= 20
    return x.abs() if kind == "positive" else x


def rounded(x):
    scale = x.abs().amax(1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def main():
    torch.manual_seed(0)
    for k in (1536, 5120, 8960, 13824):
        for kind in ("normal", "outliers", "positive"):
            x, w = inputs(kind, k), torch.randn(OUT, k, device="cuda") / k**0.5
            (qx, sx), (qw, sw) = rounded(x), rounded(w)
            true = x.double() @ w.double().T
            exact = (qx.double() * sx.double()) @ (qw.double() * sw.double()).T
            line = f"{k:6} {kind:9}"
            for fast in (False, True):
                y = torch._scaled_mm(qx, qw.T, sx, sw.T.contiguous(), out_dtype=torch.bfloat16,
                                     use_fast_accum=fast).double()
                error = [((y - other).norm() / other.norm()).item() for other in (true, exact)]
                line += f"  {'fast' if fast else 'f32'}: all {100 * error[0]:.3f} %, sums {100 * error[1]:.3f} %"
            print(line, flush=True)


if __name__ == "__main__":
    main()
