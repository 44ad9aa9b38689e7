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
    server_args.get_global_server_args = lambda: args
    sys.modules[server_args.__name__] = server_args
    return args
