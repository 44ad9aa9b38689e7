# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/random.safetensors: what torch.randn gives on an x86 CPU with AVX2 (pip install torch==2.13.0
safetensors).

    python tools/golden/torch_randn.py tests/golden/random.safetensors

randn.SEED.COUNT is one call. Of the long ones every 1009th element is kept, and the sum of all elements' bits."""
import sys

import torch
from safetensors.torch import save_file

assert torch.backends.cpu.get_cpu_capability() in ("AVX2",
                                                   "AVX512"), "without AVX2 torch's numbers differ in the last digits"
tensors = {}


def generator(seed):
    return torch.Generator("cpu").manual_seed(seed)


for seed, count in ((0, 1), (0, 15), (1, 5), (0, 16), (7, 33), (100, 47), (2**32 + 5, 64), (2**63, 31)):
    tensors[f"randn.{seed}.{count}"] = torch.randn(count, generator=generator(seed))
for seed, count in ((0, 16 * 17 * 32 * 32), (42, 624 * 16 + 3)):
    x = torch.randn(count, generator=generator(seed))
    tensors[f"every.{seed}.{count}"] = x[::1009].clone()
    tensors[f"bits.{seed}.{count}"] = x.view(torch.int32).to(torch.int64).sum().reshape(1)
# One generator, several calls: a short one leaves a number behind that the next short one takes.
g = generator(3)
tensors["calls"] = torch.cat([torch.randn(count, generator=g) for count in (3, 20, 4, 16, 1)])
save_file(tensors, sys.argv[1], {"torch": torch.__version__})
