# SPDX-License-Identifier: Apache-2.0
"""The golden vectors of rf_v2 and ada_bsa (those of tests/select/test_golden.c): their input generator and their
rows."""
import numpy as np

RF = [  # grid, q seed, sparsity, protected first frame, rows
    ((3, 20, 20), 3, 0.6, True, "3ff 3ff 3ff 3ff 11f 1ef af 1cf 3cf 23f"),
    ((3, 20, 20), 3, 0.6, False, "2c4 309 c6 194 119 1e0 aa 1c2 3c0 238"),
    ((4, 16, 16), 5, 0.5, True, "ff ff 4f f cb 4f 9b 37"),
    ((4, 16, 16), 5, 0.5, False, "a6 f 4d f ca 4d 99 35"),
]
ADA = [  # threshold, sparsity, causal, mode, rows
    (0.85, 0.0, False, "compat", "ffd bff fdf bff f7f ffb fbf ff7 ffb fdf ffb f7f"),
    (0.9, 0.0, True, "compat", "1 3 7 f 1f 3f 7f ff 1ff 3ff 7ff f7f"),
    (1.0, 0.4, True, "compat", "1 3 7 f 1f 3f 7f ff 1ff 3db 7cb b7b"),
    (0.85, 0.0, False, "compat-round", "ffd bff fdf bff f7f ffb fff ff7 ffb fff ffb f7f"),
    (0.9, 0.0, True, "compat-round", "1 3 7 f 1f 3f 7f ff 1ff 3ff 7ff f7f"),
    (1.0, 0.4, True, "compat-round", "1 3 7 f 1f 3f 7f ff 1ff 3db 7db b7b"),
]


def values(seed, tokens, dim=16):
    """[1, 1, tokens, dim] float32: a linear congruential generator's top bytes, ((s >> 24) - 128) / 64."""
    out = np.empty(tokens * dim, np.float32)
    s = seed
    for i in range(out.size):
        s = (s * 1664525 + 1013904223) & 0xffffffff
        out[i] = ((s >> 24) - 128) / 64
    return out.reshape(1, 1, tokens, dim)


def rows(mask):
    """The block rows of a mask [1, 1, nq, nk] as hexadecimal words, bit j = column j."""
    return " ".join(f"{sum(1 << j for j, kept in enumerate(row) if kept):x}" for row in mask.blocks()[0, 0])
