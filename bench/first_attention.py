#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds from `pip install` to the first sparse attention in a new virtual environment.

    first_attention.py WHEEL                      numpy comes from the package index
    first_attention.py WHEEL --offline            no network: numpy must be installed beside this interpreter

The first call runs in a new process on the CPU, and on the GPU if there is one: numpy makes q, k and v, the library
copies them to the GPU, selects, computes and copies the output back. The GPU's output must agree with the CPU's."""
import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import venv

PROBE = """
import ctypes as C, json, sys, time
start = time.perf_counter()
import numpy as np
numpy_seconds = time.perf_counter() - start
start = time.perf_counter()
import esa
from esa.core import structs as T, tensor
from esa.core.context import Context
out = {"import numpy": numpy_seconds, "import esa": time.perf_counter() - start}
heads, tokens, dim = 12, 8192, 128
random = np.random.default_rng(0)
q, k, v = random.standard_normal((3, 1, heads, tokens, dim), dtype=np.float32).astype(np.float16)
start = time.perf_counter()
if sys.argv[1] == "cpu":
    result = esa.sparse_attention(q, k, v, head_num=heads, sparse_type="rf_v2", sparsity=0.8)
    out["first call"] = time.perf_counter() - start
    start = time.perf_counter()
    esa.sparse_attention(q, k, v, head_num=heads, sparse_type="rf_v2", sparsity=0.8)
    out["second call"] = time.perf_counter() - start
else:
    context = Context()
    c = context.lib.c
    info = T.DeviceInfo(C.sizeof(T.DeviceInfo))
    context.run(c.esa_device_get_info, context.ptr, C.byref(info))
    out["open the GPU"] = time.perf_counter() - start
    c.esa_device_alloc.argtypes = [C.c_void_p, C.c_void_p, C.c_int64]
    c.esa_device_upload.argtypes = c.esa_device_download.argtypes = [C.c_void_p] * 3 + [C.c_int64]
    def on_gpu(array):
        pointer = C.c_void_p()
        context.run(c.esa_device_alloc, context.ptr, C.byref(pointer), array.nbytes)
        context.run(c.esa_device_upload, context.ptr, pointer, array.ctypes.data, array.nbytes)
        view = tensor.view(array)
        view.device, view.data = T.CUDA, pointer.value
        return view
    params = c.esa_select_params_default(2)
    params.budget = 0.2
    def call(views):
        mask = C.c_void_p()
        refs = [C.byref(view) for view in views]
        begin = time.perf_counter()
        context.run(c.esa_select, context.ptr, C.byref(mask), *refs[:2], C.byref(params))
        context.run(c.esa_attention, context.ptr, *refs, mask, None)
        if views[0].device == T.CUDA:
            context.run(c.esa_device_sync, context.ptr)
        c.esa_mask_free(mask)
        return time.perf_counter() - begin
    result, wanted = np.zeros_like(q), np.zeros_like(q)
    views = [on_gpu(array) for array in (q, k, v, result)]
    out["first call"], out["second call"] = call(views), call(views)
    context.run(c.esa_device_download, context.ptr, result.ctypes.data, views[3].data, result.nbytes)
    call([tensor.view(array) for array in (q, k, v, wanted)])
    out["difference from the CPU"] = float(np.abs(result.astype(np.float32) - wanted.astype(np.float32)).max())
    out["gpu"] = f"{info.name.decode()}, CUDA driver {info.driver // 1000}.{info.driver % 1000 // 10}, " \\
                 f"kernels {info.kernels.decode()}"
print(json.dumps(out))
"""


def timed(words, **named):
    start = time.perf_counter()
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, **named)
    return time.perf_counter() - start, done


def lend_numpy(folder):
    """Lets the environment import the numpy of this interpreter, which may itself be one of an environment."""
    found = importlib.util.find_spec("numpy")
    if found is None:
        sys.exit(f"first_attention.py: --offline needs numpy, which {sys.executable} does not have")
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "numpy-of-another.pth").write_text(f"{pathlib.Path(found.origin).parents[1]}\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--offline", action="store_true", help="pip --no-index; numpy of this interpreter")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch, "env")
        start = time.perf_counter()
        venv.create(folder, with_pip=True)
        if options.offline:
            lend_numpy(folder)
        print(f"virtual environment        {time.perf_counter() - start:7.2f} s")
        python = folder / "bin" / "python"
        words = [python, "-m", "pip", "install", "--disable-pip-version-check", "--force-reinstall", "--no-deps"]
        if not options.offline:
            seconds, done = timed([*words, "numpy"])
            print(f"pip install numpy          {seconds:7.2f} s")
        install, done = timed([*words, *(["--no-index"] if options.offline else []), options.wheel.resolve()])
        if done.returncode:
            sys.exit(done.stderr)
        print(f"pip install esa-attention  {install:7.2f} s")
        for device in ("cpu", "gpu"):
            seconds, done = timed([python, "-c", PROBE, device], cwd=scratch)
            if done.returncode:
                print(f"{device}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
                if device == "cpu":
                    return 1
                continue
            figures = json.loads(done.stdout)
            print(f"first attention, {device}       {seconds:7.2f} s, a new process with all that it does")
            print(f"from pip install, {device}      {install + seconds:7.2f} s")
            for name, value in figures.items():
                print(f"    {name:22s} {value if isinstance(value, str) else f'{value:7.4f}'}")
            if figures.get("difference from the CPU", 0) > 2e-3:      # f16 outputs of size 0.1: two roundings
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
