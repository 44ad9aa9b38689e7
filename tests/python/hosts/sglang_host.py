# SPDX-License-Identifier: Apache-2.0
"""Makes the diffusion part of a released SGLang importable: prepare(folder of its unpacked wheel). Kernel packages and
the parsed command line are stand-ins."""
import pathlib
import sys
import types

import stubs


def prepare(folder, *missing):
    """Returns the stand-in of the server's arguments. missing: further packages that may be absent."""
    folder = pathlib.Path(folder)
    sys.path.insert(0, str(folder))
    stubs.install("IPython", "pybase64", "sgl_kernel", "triton", "zmq", *missing)
    # The packages themselves, without their __init__: it imports the language runtime.
    for name in ("sglang", "sglang.multimodal_gen.runtime.layers", "sglang.multimodal_gen.runtime.layers.attention",
                 "sglang.kernels", "sglang.srt.plugins", "sglang.multimodal_gen.runtime.managers"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder.joinpath(*name.split(".")))]
    args = types.SimpleNamespace(attention_backend_config={})
    server_args = types.ModuleType("sglang.multimodal_gen.runtime.server_args")
    server_args.get_global_server_args, server_args.ServerArgs = lambda: args, object
    sys.modules[server_args.__name__] = server_args
    return args


RUNTIME = "sglang.multimodal_gen.runtime"
H3 = f"{RUNTIME}.pipelines_core.stages.model_specific_stages.minimax_h3"


def prepare_h3(folder):
    """After prepare: makes MiniMax-H3's loop and transformer importable. Kernels, weights and distributed runs are
    stand-ins."""
    stubs.replace("sglang.kernels.ops", "sglang.srt.layers", "sglang.srt.environ", "sglang.srt.utils",
                  *(f"{RUNTIME}.{name}" for name in ("distributed", "loader", "cache", "layers.quantization",
                                                     "layers.linear", "layers.usp")))
    stubs.give(f"{RUNTIME}.distributed.parallel_state", get_ulysses_ctx=lambda: (1, 0), get_ring_ctx=lambda: (1, 0))
    packages = [H3]
    while packages[-1] != RUNTIME:
        packages.append(packages[-1].rpartition(".")[0])
    for name in packages[:-1]:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(pathlib.Path(folder).joinpath(*name.split(".")))]
