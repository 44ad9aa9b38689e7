#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The GPU plugin comes from the folder of libesa, however libesa was opened and wherever the process goes later:
check_plugin_path.py LIBESA STAND_IN PYTHON (the folder of the package). Standard library only. STAND_IN is a plugin
whose GPU is the processor."""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

LIBESA, STAND_IN, PACKAGE = (pathlib.Path(word).resolve() for word in sys.argv[1:4])
# argv: the path to open libesa by, the folder to go to before the first GPU call
HOST = """
import ctypes, os, sys
lib = ctypes.CDLL(sys.argv[1])
os.chdir(sys.argv[2])
ctx, count = ctypes.c_void_p(), ctypes.c_int32()
lib.esa_ctx_error.restype = ctypes.c_char_p
assert lib.esa_ctx_create(ctypes.byref(ctx), None) == 0
status = lib.esa_device_count(ctx, ctypes.byref(count))
print(status, count.value, lib.esa_ctx_error(ctx).decode())
"""
PACKAGE_HOST = """
import os, sys
from esa.core.library import load
path = load().path
os.chdir(sys.argv[1])
print(path, path.is_file())
"""


class Paths(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.good, self.other = pathlib.Path(folder.name).resolve() / "good", pathlib.Path(folder.name) / "other"
        for place in (self.good, self.other):
            (place / "lib").mkdir(parents=True)
        shutil.copy(LIBESA, self.good / "lib" / "libesa.so")
        for place in (self.other, self.other / "lib"):      # a plugin that anyone may have put there
            shutil.copy(STAND_IN, place / "libesa_cuda.so")

    def run_host(self, code, *words, cwd=None, **variables):
        env = {n: v for n, v in os.environ.items() if n not in ("ESA_LIB", "ESA_CUDA_LIB", "LD_LIBRARY_PATH")}
        done = subprocess.run([sys.executable, "-c", code, *map(str, words)], cwd=cwd or self.good,
                              env={**env, **{n: str(v) for n, v in variables.items()}}, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def check(self, opened, cwd, **variables):
        """First no plugin is found, then the one beside libesa."""
        mine = self.good / "lib" / "libesa_cuda.so"
        self.assertIn(str(mine), self.run_host(HOST, opened, self.other, cwd=cwd, **variables))
        shutil.copy(STAND_IN, mine)
        self.assertRegex(self.run_host(HOST, opened, self.other, cwd=cwd, **variables), "^0 [1-9]")
        mine.unlink()

    def test_opened_by_a_relative_path(self):
        self.check("lib/libesa.so", self.good)
        self.check("./libesa.so", self.good / "lib")
        self.check("../good/lib/libesa.so", self.other)

    def test_found_in_the_current_folder(self):
        for folder in (".", "", ":/nowhere"):
            self.check("libesa.so", self.good / "lib", LD_LIBRARY_PATH=folder or ":")

    def test_opened_by_an_absolute_path(self):
        self.check(self.good / "lib" / "libesa.so", self.other)

    def test_a_relative_variable_is_refused(self):
        text = self.run_host(HOST, self.good / "lib" / "libesa.so", self.other, ESA_CUDA_LIB="lib/libesa_cuda.so")
        self.assertIn("ESA_CUDA_LIB is lib/libesa_cuda.so, expected an absolute path", text)

    def test_the_package_keeps_an_absolute_path(self):
        text = self.run_host(PACKAGE_HOST, self.other, ESA_LIB="lib/libesa.so", PYTHONPATH=PACKAGE)
        self.assertEqual(text.strip(), f"{self.good / 'lib' / 'libesa.so'} True")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
