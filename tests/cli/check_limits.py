#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command under limits of the system: check_limits.py ESA MODELS (the folder with wan-tiny in it). Standard library
only. Whatever the limit, a command works or ends with a message; it never hangs."""
import os
import resource
import subprocess
import sys
import unittest

import kit

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
# Hundreds of times what a run takes here: a command that is slow on a busy machine is not one that hangs.
SECONDS = 300
SMALL = ["--frames", 5, "--height", 32, "--width", 32, "--steps", 1, "--block", "16x16"]


def esa(*words, before):
    """Exit status and stderr."""
    done = subprocess.run([ESA, *map(str, words)], capture_output=True, text=True, timeout=SECONDS, preexec_fn=before,
                          env={**os.environ, "ESA_MODELS": MODELS})
    return done.returncode, done.stderr


class AddressSpace(kit.Folder):
    def run_within(self, *words, mebibytes):
        size = mebibytes << 20
        return esa(*words, before=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)))

    def test_generate(self):
        """From too little to load the engine to enough for everything."""
        ended = []
        for mebibytes in (100, 300, 400, 500, 700, 1000, 8000):
            out = self.path(f"{mebibytes}.npy")
            status, err = self.run_within("generate", *SMALL, "--threads", 2, "--out", out, mebibytes=mebibytes)
            if status == 0:
                self.assertTrue(os.path.isfile(out))
            else:
                self.assertEqual(status, 1, err)
                self.assertRegex(err, "cannot be (opened|mapped: Cannot allocate memory)|out of memory|ESA_ERR_MEMORY")
                self.assertFalse(os.path.exists(out))
            ended.append(status)
        self.assertEqual((ended[0], ended[-1]), (1, 0))
        self.assertEqual(ended, sorted(ended, reverse=True))    # what works with less works with more

    def test_many_threads_need_little(self):
        """Sixteen threads work where one does: their stacks take address space, but little else."""
        status, err = self.run_within("generate", *SMALL, "--out", self.path("a.npy"), "--threads", 16, mebibytes=1500)
        self.assertEqual(status, 0, err)

    def test_doctor(self):
        for mebibytes in (150, 300, 1000):
            status, err = self.run_within("doctor", "--threads", 2, mebibytes=mebibytes)
            self.assertIn(status, (0, 1), err)
            self.assertTrue(status == 0 or err)


class Threads(kit.Folder):
    @staticmethod
    def one_process():
        """No thread beside the first. root has no such limit, so a user without other processes takes its place."""
        user = 200000 + os.getpid() % 100000
        root = os.geteuid() == 0
        if root:
            os.setgroups([])
            os.setresgid(user, user, user)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        if root:
            os.setresuid(user, user, user)

    def test_doctor_says_why_there_are_fewer(self):
        done = subprocess.run([ESA, "doctor", "--threads", "3"], capture_output=True, text=True, timeout=SECONDS,
                              preexec_fn=self.one_process, cwd="/", env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
        self.assertIn("threads   1: the system started only 1 of 3 threads: ", done.stdout, done.stderr)
        self.assertIn("esa: the system started only 1 of 3 threads: ", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
