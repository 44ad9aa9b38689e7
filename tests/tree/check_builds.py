#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The libraries compare their build ids when they meet, and one ctx serves the engine.

    check_builds.py ESA_COMMAND LIBESA LIBESA_VIDEO STAND_IN_PLUGIN SOURCE_DIR

A copy of libesa gets another build id (its bytes are patched). The engine, the command, the CUDA plugin and the Python
package must refuse it with one message that names both builds. Then `esa generate` runs with the right libraries and
its threads are counted: those of one pool."""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

command, libesa, video, plugin, source = (pathlib.Path(a).resolve() for a in sys.argv[1:6])
build = re.search(rb"\d+\.\d+\.\d+-[0-9a-f]{12}\0", libesa.read_bytes()).group()[:-1]
other = build[:-12] + b"0" * 12
assert build != other


def run(*words, **environment):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=300,
                          env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", **environment})
    return done.returncode, done.stdout + done.stderr


def expect_refusal(what, answer):
    status, text = answer
    assert status != 0, f"{what}: another build was accepted: {text}"
    named = [b.decode() in text for b in (build, other)]
    assert all(named) and "from one build" in text, f"{what}: the message does not name both builds: {text}"
    print(f"{what}: {text.strip().splitlines()[-1]}")


def install(folder, patched):
    """The command and both libraries in one folder, libesa with another id where patched."""
    for file in (command, video):
        shutil.copy(file, folder)
    data = libesa.read_bytes()
    (folder / libesa.name).write_bytes(data.replace(build, other) if patched else data)
    for file in (libesa, video):        # the names that other libraries and the command know them by
        stem = file.name.split(".so")[0]
        for link in file.parent.glob(f"{stem}.so*"):
            if link.is_symlink():
                (folder / link.name).symlink_to(file.name)


def threads_of(trace):
    """Threads that the process started, by the system calls that start one."""
    return len(re.findall(r"clone3?\(", trace.read_text()))


ENGINE = """
import ctypes, sys
lib, video = (ctypes.CDLL(p, mode=ctypes.RTLD_GLOBAL) for p in sys.argv[1:3])
ctx, frames = ctypes.c_void_p(), ctypes.c_void_p()
lib.esa_ctx_error.restype = ctypes.c_char_p
assert lib.esa_ctx_create(ctypes.byref(ctx), None) == 0
status = video.esa_model_open(ctx, ctypes.byref(frames), b"nowhere", None)
print(lib.esa_ctx_error(ctx).decode())
sys.exit(status != 0)
"""
PLUGIN = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
ctx, count = ctypes.c_void_p(), ctypes.c_int32()
lib.esa_ctx_error.restype = ctypes.c_char_p
assert lib.esa_ctx_create(ctypes.byref(ctx), None) == 0
status = lib.esa_device_count(ctx, ctypes.byref(count))
print(lib.esa_ctx_error(ctx).decode())
sys.exit(status != 0)
"""

with tempfile.TemporaryDirectory() as scratch:
    wrong, right = pathlib.Path(scratch, "wrong"), pathlib.Path(scratch, "right")
    for folder, patched in ((wrong, True), (right, False)):
        folder.mkdir()
        install(folder, patched)
    generate = ["generate", "--model", source / "models/wan-tiny", "--frames", 5, "--height", 64, "--width", 64,
                "--steps", 1, "--threads", 2]
    expect_refusal("esa generate", run(wrong / command.name, *generate, "--out", wrong / "a.mp4"))
    expect_refusal("libesa_video", run(sys.executable, "-c", ENGINE, wrong / libesa.name, wrong / video.name))
    expect_refusal("plugin", run(sys.executable, "-c", PLUGIN, wrong / libesa.name, ESA_CUDA_LIB=str(plugin)))
    expect_refusal("Python", run(sys.executable, "-c", "from esa.core.library import load; load().video",
                                 ESA_LIB=str(wrong / libesa.name), PYTHONPATH=str(source / "python")))
    status, text = run(right / command.name, *generate, "--out", right / "a.y4m")
    assert status == 0, text
    strace = shutil.which("strace")
    if strace is None or run(strace, "-f", "-o", right / "probe", "/bin/true")[0] != 0:
        print("SKIP threads of esa generate: strace is missing or not allowed")
    else:
        trace = right / "trace"
        status, text = run(strace, "-f", "-e", "trace=clone,clone3", "-o", trace, right / command.name, *generate,
                           "--out", right / "b.y4m", OPENBLAS_NUM_THREADS="1")
        assert status == 0, text
        started = threads_of(trace)
        print(f"esa generate --threads 2 starts {started} thread(s) beside its own")
        assert started == 1, "one pool of two threads starts one thread"
print("ok")
