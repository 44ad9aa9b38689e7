# SPDX-License-Identifier: Apache-2.0
"""Makes a released vLLM-Omni importable without vllm: prepare(folder of its unpacked wheel). vllm is a stand-in, whose
linear layers are torch's, and the platform is a CUDA platform without a GPU."""
import collections
import importlib
import logging
import pathlib
import sys
import types

import stubs
import torch
from torch import nn

said = []                               # what was logged once


class Log(logging.Logger):
    """vLLM's logger: each *_once line appears once."""

    def warning_once(self, text, *values):
        if (line := text % values) not in said:
            said.append(line)

    info_once = debug_once = lambda self, text, *values: None


class Linear(nn.Linear):
    """vLLM's parallel linears in one process."""

    def __init__(self, inputs=None, outputs=None, bias=True, hidden_size=None, head_size=0, total_num_heads=0, **rest):
        self.fused = hidden_size is not None
        super().__init__(hidden_size or inputs, 3 * head_size * total_num_heads if self.fused else outputs, bias=bias)
        self.num_heads = self.num_kv_heads = total_num_heads

    def forward(self, x):
        return (super().forward(x), None) if self.fused else super().forward(x)


def resolve(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def prepare(folder, *missing):
    """missing: further packages that may be absent and are not needed."""
    folder = pathlib.Path(folder)
    sys.path.insert(0, str(folder))
    stubs.install("vllm", "aenum", "janus", "msgpack", "modelscope", "omegaconf", "zmq", *missing)
    stubs.give("vllm", __version__="0.32.0", __version_tuple__=(0, 32, 0))
    stubs.give("vllm.logger", init_logger=Log)
    stubs.give("vllm.envs", VLLM_PLUGINS=None)
    stubs.give("vllm.plugins", load_general_plugins=lambda: None)
    stubs.give("vllm.utils.import_utils", resolve_obj_by_qualname=resolve)
    stubs.give("vllm.model_executor.layers.quantization", QUANTIZATION_METHODS=[])
    stubs.give("vllm.model_executor.layers.linear", QKVParallelLinear=Linear, ColumnParallelLinear=Linear,
               RowParallelLinear=Linear, LinearBase=Linear)
    stubs.give("vllm._custom_ops", rms_norm=lambda out, x, weight, eps: out.copy_(
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight))
    stubs.give("vllm.model_executor.models.utils",
               extract_layer_index=lambda prefix: next(int(part) for part in prefix.split(".") if part.isdigit()))
    stubs.give("vllm.distributed", get_tensor_model_parallel_world_size=lambda: 1,
               get_tensor_model_parallel_rank=lambda: 0)
    # The packages themselves, without their __init__: it patches vllm.
    for name in ("vllm_omni", "vllm_omni.diffusion.models.wan2_2"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder.joinpath(*name.split(".")))]

    import vllm_omni.platforms as platforms
    from vllm_omni.platforms.cuda.platform import CudaOmniPlatform

    class Cuda(CudaOmniPlatform):
        """A Hopper without FlashAttention, as its selection code sees it."""
        get_device_capability = classmethod(lambda cls, *a: collections.namedtuple("Capability", "major minor")(9, 0))
        has_flash_attn_package = classmethod(lambda cls: False)
        device_type = device_name = "cuda"

    platforms._current_omni_platform = Cuda()
    from vllm_omni.diffusion.envs import PACKAGES_CHECKER
    PACKAGES_CHECKER.get_packages_info = lambda: {"has_flash_attn": False}
