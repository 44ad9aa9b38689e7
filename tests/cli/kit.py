# SPDX-License-Identifier: Apache-2.0
"""What the checks of the command share: running it, and tests that have a folder of their own and know what a good
failure looks like. Standard library only. A file's class derives from Folder and says with `call` how its command is
run:

    class Base(kit.Folder):
        call = staticmethod(esa)        # esa(*words, cwd=..., ...) -> status, stdout, stderr
"""
import json
import os
import resource
import subprocess
import tempfile
import unittest

# Results do not depend on the number of threads, and the tests run beside each other on all cores: workers that wait
# would take the others' time.
ONE = ["--threads", 1]


def run(program, *words, cwd=None, env=None, limit=None):
    """Exit status, stdout, stderr. env: the whole environment, or None for that of this process; limit: the largest
    file it may write, in bytes."""
    def tighten():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    done = subprocess.run([program, *(word if isinstance(word, bytes) else str(word) for word in words)], cwd=cwd,
                          env=env, capture_output=True, text=True, preexec_fn=tighten if limit is not None else None)
    return done.returncode, done.stdout, done.stderr


def skip(case, reason):
    """Ends a test that cannot run here. scripts/test.sh counts the line; a skip without one is a failure."""
    print(f"SKIP {case.id().split('.', 1)[-1]}: {reason}", flush=True)
    case.skipTest(reason)


def read(path, mode="rb"):
    with open(path, mode) as file:
        return file.read()


def load(path):
    """A JSON file."""
    return json.loads(read(path))


class Folder(unittest.TestCase):
    """Tests in an empty folder, self.dir, which goes afterwards."""
    begins = "esa: "                    # what every message of failure begins with
    # what a failure exits with where the test does not say; None: 1 or 2, but no crash
    status = 1
    progress = False                    # whether lines of progress may stand before it

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.dir = self.folder.name
        self.addCleanup(self.folder.cleanup)

    def path(self, *names):
        return os.path.join(self.dir, *names)

    def read(self, *names):
        return read(self.path(*names))

    def put(self, name, data):
        """A file with these bytes or this text, and the folders above it; its path."""
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb" if isinstance(data, bytes) else "w",
                  encoding=None if isinstance(data, bytes) else "utf-8") as file:
            file.write(data)
        return path

    def files(self):
        """Everything below the folder."""
        return sorted(
            os.path.relpath(os.path.join(top, name), self.dir) for top, folders, names in os.walk(self.dir)
            for name in names + folders)

    def works(self, *args, **how):
        code, out, err = self.call(*args, cwd=self.dir, **how)
        self.assertEqual(code, 0, f"{args}: {err}")
        return out

    def fails(self, *args, status=0, says=(), **how):
        """The call fails with one message that holds every word of says, prints nothing and leaves no file behind.
        status 0: self.status."""
        before = self.files()
        code, out, err = self.call(*args, cwd=self.dir, **how)
        wanted = status or self.status
        self.assertIn(code, (wanted,) if wanted else (1, 2), (args, out, err))
        self.assertEqual(out, "", args)
        lines = err.splitlines()
        self.assertEqual(sum(line.startswith("esa: ") for line in lines), 1, (args, err))
        if not self.progress:
            self.assertEqual(len(lines), 1, (args, err))
        self.assertTrue(lines[-1].startswith(self.begins), err)
        for word in says:
            self.assertIn(word, lines[-1])
        # the empty lock of a killed run may go
        unlocked = [name for name in before if os.path.basename(name) != "lock"]
        after = self.files()
        self.assertEqual(after, unlocked if after == unlocked else before, f"{args} left something on disk")
        return lines[-1]
