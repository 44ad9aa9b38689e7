# SPDX-License-Identifier: Apache-2.0
"""Two processes with half of the tokens each, through vLLM-Omni's own Ulysses strategy: omni_ulysses.py FOLDER, started
with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. Each checks its half against the whole."""
import os
import sys
import types

import torch
import torch.distributed as dist
from omni_host import prepare

prepare(sys.argv[1])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
import esa  # noqa: E402
from esa.hosts import vllm_omni as ours  # noqa: E402
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata, VideoTokenLayout  # noqa: E402
from vllm_omni.diffusion.attention.layer import Attention  # noqa: E402
from vllm_omni.diffusion.attention.parallel import factory  # noqa: E402
from vllm_omni.diffusion.config import set_current_diffusion_config  # noqa: E402
from vllm_omni.diffusion.data import parse_attention_config  # noqa: E402
from vllm_omni.diffusion.forward_context import set_forward_context  # noqa: E402

GRID, HEADS, DIM = (8, 8, 20), 4, 32
TOKENS, PADDING = 8 * 8 * 20, 2                         # padded, as if the number of ranks did not divide the tokens
ours.register()
ours.MIN_VIDEO_TOKENS = 128
factory.get_sequence_parallel_world_size = lambda: 2
factory.get_sp_group = lambda: types.SimpleNamespace(
    ulysses_group=dist.group.WORLD, ulysses_world_size=2, ulysses_rank=rank, ring_world_size=1, ring_group=None)
settings = types.SimpleNamespace(
    diffusion_attention_config=parse_attention_config(
        {"default": {"backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.5}}}),
    parallel_config=types.SimpleNamespace(ring_degree=1, ulysses_degree=2, allgather_degree=1,
                                          sequence_parallel_size=2), model_class_name=None)
q, k, v = torch.randn(3, 1, TOKENS + PADDING, HEADS, DIM, generator=torch.Generator().manual_seed(0))
half = slice(rank * (TOKENS + PADDING) // 2, (rank + 1) * (TOKENS + PADDING) // 2)
metadata = AttentionMetadata(video_layout=VideoTokenLayout(prefix_len=0, latent_grid=GRID, used_len=TOKENS))
with set_current_diffusion_config(settings), set_forward_context(omni_diffusion_config=settings, denoise_step_idx=0):
    layer = Attention(num_heads=HEADS, head_size=DIM, causal=False, softmax_scale=DIM**-0.5, qkv_layout="BSND",
                      prefix="blocks.0.attn1")
    assert layer.parallel_strategy.name == "ulysses"
    with torch.no_grad():
        out = layer(*(x[:, half].contiguous() for x in (q, k, v)), metadata)
want = esa.sparse_attention(*(x[:, :TOKENS] for x in (q, k, v)), input_layout="BSND", head_num=HEADS,
                            sparse_type="rf_v2", sparsity=0.5, latent_shape_q=GRID)
want = torch.nn.functional.pad(want, (0, 0, 0, 0, 0, PADDING))
assert torch.equal(out, want[:, half])
run = layer.attention.model.run(layer.attention.config)
assert run.stats().sparse_calls == 1 and run.stats().density < 0.7
dist.destroy_process_group()
print("Ulysses: ok")
