#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The esa command as a user runs it: check_cli.py ESA MAKE_RECORDING STAND_IN (a plugin for a machine without a
GPU).

Every failure must be one message on stderr, an exit status, and nothing left on disk."""
import ctypes
import fnmatch
import json
import os
import platform
import re
import struct
import subprocess
import sys
import unittest

import kit
import video_files
from video_files import f32, lcg

ESA, MAKE_RECORDING, STAND_IN = map(os.path.abspath, sys.argv[1:4])
COMMANDS = [[], ["bench"], ["masks"]]
LEAVES = [["demo"], ["doctor"], ["bench", "attention"], ["bench", "quality"], ["masks", "select"], ["masks", "info"],
          ["masks", "derive"], ["masks", "merge"], ["masks", "convert"], ["report"]]


def esa(*args, cwd=None, env=None):
    return kit.run(ESA, *args, cwd=cwd, env={**os.environ, **(env or {})})


def write_tensors(path, tensors):
    """A safetensors file: {name: (dtype, shape, bytes)}."""
    video_files.write(path, video_files.safetensors(tensors))


def rows(text):
    """The hex numbers of `b h i hex` lines, in order, and the number of lines."""
    return " ".join(line.split()[3] for line in text.splitlines())


class Base(kit.Folder):
    call = staticmethod(esa)
    status = None


class Words(Base):
    def test_no_words_lists_commands(self):
        for command in COMMANDS:
            code, out, err = esa(*command)
            self.assertEqual((code, out), (2, ""), command)
            self.assertIn("usage:", err)

    def test_help_everywhere(self):
        for command in COMMANDS + LEAVES:
            for flag in ("--help", "-h"):
                code, out, err = esa(*command, flag)
                self.assertEqual((code, err), (0, ""), command)
                self.assertIn("usage: " + " ".join(["esa", *command]), out)
        for leaf in LEAVES:
            self.assertIn("--", esa(*leaf, "--help")[1], leaf)

    def test_help_wins_over_wrong_options(self):
        self.assertIn("usage:", self.works("masks", "select", "--nonsense", "--help"))

    def test_version(self):
        self.assertRegex(self.works("--version"), r"^esa \d+\.\d+\.\d+ \(.+\)\n$")

    def test_typing_errors(self):
        self.fails("benhc", status=2, says=["benhc", "did you mean 'esa bench'"])
        self.fails("masks", "selct", status=2, says=["did you mean 'esa masks select'"])
        self.fails("masks", "select", "--budgte", "0.5", status=2, says=["--budgte, did you mean --budget?"])
        self.fails("bench", "attention", "--selector", "entrpoy", status=2, says=["entrpoy", "did you mean entropy?"])
        self.fails("bench", "attention", "--shape", "wan-1.3b-48p", status=2, says=["did you mean wan-1.3b-480p?"])
        self.fails("somethingelse", status=2, says=["somethingelse", "--help"])
        self.fails("masks", "select", "--thiswasneveranoption", status=2, says=["--help"])

    def test_every_option_gets_a_hint(self):
        """However many options a command has: with its last letter missing or doubled, each leads to a suggestion."""
        for leaf in LEAVES:
            names = re.findall(r"^  (--[a-z0-9-]+)", self.works(*leaf, "--help"), re.M)
            for typed in {name[:-1] for name in names} | {name + name[-1] for name in names}:
                if typed not in names:
                    self.fails(*leaf, typed, "x", status=2, says=[typed + ", did you mean --"])
        self.assertGreater(len(re.findall(r"^  --", self.works("generate", "--help"), re.M)), 40)

    def test_help_says_ranges(self):
        self.assertRegex(self.works("masks", "select", "--help"), r"--samples N .*\(4\) \[1 \.\. 256\]\n")

    def test_wrong_values(self):
        for args in (["--density", "1.5"], ["--density", "0.5,,0.2"], ["--density", ""], ["--density", "x"],
                     ["--density", "nan"], ["--rounds", "0"], ["--rounds", "1.5"], ["--rounds", "99999999999999999999"],
                     ["--threads", "-1"], ["--threads",
                                           "257"], ["--shape", "1,2,3"], ["--shape", "1,2,3,x"], ["--shape", "0,1,1,1"],
                     ["--shape", ""], ["--block", "128"], ["--block", "128x"], ["--grid", "1,2"], ["--grid", "1,2,3,4"],
                     ["--dtype", "f64"], ["--tail",
                                          "f32"], ["--causal=1"], ["--json"], ["--density",
                                                                               ",".join(["0.5"] * 17)], ["word"]):
            self.fails("bench", "attention", *args, status=2)

    def test_library_refuses_with_a_message(self):
        self.fails("bench", "attention", "--shape", "1,1,64,257", "--rounds", "1", status=1, says=["257"])
        self.fails("bench", "attention", "--shape", "1,1,64,16", "--block", "100x100", "--density", "0.5", status=1,
                   says=["100"])
        self.fails("bench", "attention", "--shape", "1,1,64,16", "--grid", "2,5,5", "--order", "tile", "--density",
                   "0.5", status=1)

    def test_impossible_memory(self):
        self.fails("bench", "attention", "--shape", "1073741824,1073741824,1,1", status=1, says=["memory"])


class Outputs(Base):
    """Where output goes: links stay links, open files and devices are written through, and a lost table is an error."""

    def shell(self, command):
        done = subprocess.run(["sh", "-c", command], cwd=self.dir, env={**os.environ, "ESA": ESA}, capture_output=True,
                              text=True)
        return done.returncode, done.stdout, done.stderr

    def test_links_stay_links(self):
        with open(self.path("target"), "w") as file:
            file.write("old")
        os.symlink("target", self.path("link"))
        os.symlink("new", self.path("dangling"))
        for name, target in (("link", "target"), ("dangling", "new")):
            self.works("doctor", "--json", name)
            self.assertTrue(os.path.islink(self.path(name)))
            self.assertTrue(os.path.isfile(self.path(target)) and not os.path.islink(self.path(target)))
            self.assertIn("machine", kit.load(self.path(target)))
        self.assertEqual(sorted(os.listdir(self.dir)), ["dangling", "link", "new", "target"])
        os.symlink("loop", self.path("loop"))
        code, _, err = esa("doctor", "--json", "loop", cwd=self.dir)
        self.assertEqual(code, 1)
        self.assertIn("loop", err)

    def test_permissions_are_kept(self):
        for mode in (0o600, 0o640):
            os.chmod(self.put("private", "old"), mode)
            self.works("doctor", "--json", "private")
            self.assertEqual(os.stat(self.path("private")).st_mode & 0o7777, mode)

    def test_links_that_may_be_a_trap(self):
        """Another user's link in a sticky folder of everybody; only root can make one."""
        os.chmod(self.dir, 0o1777)
        self.put("target", "old")
        os.symlink("target", self.path("link"))
        if os.geteuid() == 0:
            os.lchown(self.path("link"), 65534, 65534)
            self.fails("doctor", "--json", "link", status=1, says=["link of another user"])
            self.assertEqual(self.read("target"), b"old")
        else:
            self.works("doctor", "--json", "link")

    def test_standard_output_is_never_replaced(self):
        os.symlink("/proc/self/fd/1", self.path("stdout"))              # as /dev/stdout is, but ours to lose
        code, _, err = self.shell('"$ESA" doctor --json stdout > file')
        self.assertEqual((code, err), (0, ""))
        self.assertTrue(os.path.islink(self.path("stdout")))
        text = kit.read(self.path("file"), "r")
        self.assertIn("kernels ", text)                                  # the table, then the JSON
        self.assertIn("machine", json.loads(text[text.index("{\n"):]))
        code, out, err = self.shell('"$ESA" doctor --json stdout | cat')
        self.assertIn("machine", json.loads(out[out.index("{\n"):]))
        code, _, err = self.shell('"$ESA" doctor --json /proc/self/fd/3 3> third')
        self.assertEqual((code, err), (0, ""))
        self.assertIn("machine", kit.load(self.path("third")))
        code, _, err = self.shell('mkfifo fifo; cat fifo > copy & "$ESA" doctor --json fifo; wait')
        self.assertIn("machine", kit.load(self.path("copy")))
        self.fails("doctor", "--json", "-", status=2, says=["--json", "./-"])

    def test_names_as_long_as_they_get(self):
        for size in (240, 241, 248, 249, 255):
            self.works("doctor", "--json", "n" * size)
            self.assertIn("machine", kit.load(self.path("n" * size)))
        self.assertEqual(len(os.listdir(self.dir)), 5)

    def test_lost_output_is_an_error(self):
        for command in ("--version", "--help", "doctor", "doctor --json d"):
            for lost in ("> /dev/full", ">&-"):
                code, _, err = self.shell(f'"$ESA" {command} {lost}')
                self.assertEqual(code, 1, (command, lost))
                self.assertEqual(len(err.splitlines()), 1, err)
                self.assertIn("standard output", err)
        self.assertIn("machine", kit.load(self.path("d")))
        code, _, err = self.shell('"$ESA" nonsense >&-')                 # nothing was to be printed
        self.assertEqual((code, len(err.splitlines())), (2, 1))

    def test_file_size_limit(self):
        code, _, err = self.shell('ulimit -f 0; "$ESA" doctor --json d')
        self.assertEqual((code, err), (1, "esa: output: d cannot be written: File too large\n"))
        write_tensors(self.path("q"), {"q": f32(1, 1, 2, 400, 16)})
        code, _, err = self.shell('ulimit -f 0; "$ESA" masks select --q q --k q --out m')
        self.assertEqual(code, 1, err)
        self.assertEqual(os.listdir(self.dir), ["q"])

    def test_any_bytes_in_a_name(self):
        write_tensors(self.path("q"), {"q": f32(1, 1, 2, 400, 16)})
        name = b"a\xff\xc3\xa4\xe2\x82\xed\xa0\x80\xc0\xaf\xf5\x80z"
        shown = "a\ufffd\u00e4" + "\ufffd" * 2 + "\ufffd" * 3 + "\ufffd" * 2 + "\ufffd" * 2 + "z"
        subprocess.run([ESA, "masks", "select", "--q", "q", "--k", "q", "--out", name], cwd=self.dir, check=True,
                       capture_output=True)
        subprocess.run([ESA, "masks", "info", name, "--json", "i"], cwd=self.dir, check=True, capture_output=True)
        self.assertEqual(kit.load(self.path("i"))["file"], shown)

    def test_every_option_is_explained(self):
        for leaf in LEAVES:
            lines = self.works(*leaf, "--help").splitlines()
            for i, line in enumerate(lines):
                if line.startswith("  --"):
                    self.assertTrue(
                        len(line) > 33 or (i + 1 < len(lines) and lines[i + 1].startswith(" " * 33)), (leaf, line))


class Setup(Base):
    """scripts/setup.sh with commands of our own in front of the real ones."""
    SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "setup.sh")

    def setup(self, **commands):
        for name, body in commands.items():
            path = self.path(name.replace("_", "-"))
            with open(path, "w") as file:
                file.write("#!/bin/sh\n" + body + "\n")
            os.chmod(path, 0o755)
        done = subprocess.run(["bash", self.SCRIPT, "bench"],
                              env={**os.environ, "PATH": self.dir + ":" + os.environ["PATH"]}, capture_output=True,
                              text=True)
        return done.returncode, done.stdout + done.stderr

    def test_long_list_of_libraries(self):
        for _ in range(5):                                              # the pipe must not decide
            self.assertEqual(self.setup(ldconfig="echo libopenblas.so.0; seq 200000", apt_get="exit 1"), (0, ""))

    def test_cblas_is_optional(self):
        code, said = self.setup(ldconfig="exit 1", apt_get="exit 1")
        self.assertEqual(code, 0, said)
        self.assertIn("no CBLAS", said)


class Install(Base):
    ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")

    def test_absolute_folders(self):
        subprocess.run([
            "cmake", "-S", self.ROOT, "-B", self.dir, "-DESA_TESTS=OFF", "-DESA_CUDA=OFF",
            "-DCMAKE_INSTALL_PREFIX=/some/where", "-DCMAKE_INSTALL_LIBDIR=/far/lib",
            "-DCMAKE_INSTALL_INCLUDEDIR=/far/include"
        ], check=True, capture_output=True)
        text = kit.read(self.path("esa.pc"), "r")
        self.assertIn("\nlibdir=/far/lib\n", text)
        self.assertIn("\nincludedir=/far/include\n", text)

    def test_prefix_with_a_space(self):
        out = subprocess.run(["make", "-n", "all", "PREFIX=/a place"], cwd=self.ROOT, check=True, capture_output=True,
                             text=True).stdout
        self.assertIn('-DCMAKE_INSTALL_PREFIX="/a place"', out)


class Golden(Base):
    """Golden rows of the originals' selectors; bit j of a number is key block j."""

    def pair(self, q_seed, k_seed, tokens):
        write_tensors(self.path("q"), {"q": f32(q_seed, 1, 1, tokens, 16)})
        write_tensors(self.path("k"), {"k": f32(k_seed, 1, 1, tokens, 16)})

    def select(self, *args):
        return rows(self.works("masks", "select", "--q", "q", "--k", "k", *args))

    def test_ada_bsa(self):
        self.pair(1, 2, 1536)
        plain = ["--selector", "ada_bsa", "--cdf", "0.85", "--sparsity", "0"]
        self.assertEqual(self.select(*plain, "--mode", "compat"), "ffd bff fdf bff f7f ffb fbf ff7 ffb fdf ffb f7f")
        self.assertEqual(self.select(*plain, "--mode", "compat-round"),
                         "ffd bff fdf bff f7f ffb fff ff7 ffb fff ffb f7f")

    def test_ada_bsa_causal(self):
        self.pair(1, 2, 1536)
        for mode in ("compat", "compat-round"):
            self.assertEqual(
                self.select("--selector", "ada_bsa", "--causal", "--cdf", "0.9", "--sparsity", "0", "--mode", mode),
                "1 3 7 f 1f 3f 7f ff 1ff 3ff 7ff f7f")
        capped = ["--selector", "ada_bsa", "--causal", "--cdf", "1", "--sparsity", "0.4", "--mode"]
        self.assertEqual(self.select(*capped, "compat"), "1 3 7 f 1f 3f 7f ff 1ff 3db 7cb b7b")
        self.assertEqual(self.select(*capped, "compat-round"), "1 3 7 f 1f 3f 7f ff 1ff 3db 7db b7b")

    def test_rf_v2(self):
        self.pair(3, 4, 1200)
        grid = ["--selector", "rf_v2", "--mode", "compat", "--grid", "3,20,20", "--sparsity", "0.6"]
        self.assertEqual(self.select(*grid), "3ff 3ff 3ff 3ff 11f 1ef af 1cf 3cf 23f")
        for release in ("3.0", "3.1"):          # without text they are the same
            self.assertEqual(self.select(*grid, "--release", release), "3ff 3ff 3ff 3ff 11f 1ef af 1cf 3cf 23f")
        # 1170 + 30 tokens are 10 + 1 blocks apart and 10 together
        text = ["--selector", "rf_v2", "--mode", "compat", "--grid", "3,15,26", "--text-front", "30", "--release"]
        self.assertEqual([len(self.select(*text, release).split()) for release in ("3.0", "3.1")], [11, 10])
        self.fails("masks", "select", "--q", "q", "--k", "k", *grid, "--release", "2.0", status=2, says=["2.0"])
        self.assertEqual(self.select(*grid, "--protect-first-frame", "0"), "2c4 309 c6 194 119 1e0 aa 1c2 3c0 238")
        self.pair(5, 6, 1024)
        grid = ["--selector", "rf_v2", "--mode", "compat", "--grid", "4,16,16", "--sparsity", "0.5"]
        self.assertEqual(self.select(*grid), "ff ff 4f f cb 4f 9b 37")
        self.assertEqual(self.select(*grid, "--protect-first-frame", "0"), "a6 f 4d f ca 4d 99 35")

    def test_lines(self):
        write_tensors(self.path("q"), {"q": f32(1, 2, 3, 600, 16)})
        write_tensors(self.path("k"), {"k": f32(2, 2, 3, 300, 16)})
        out = self.works("masks", "select", "--q", "q", "--k", "k", "--selector", "full", "--block", "128x128")
        expected = [f"{b} {h} {i} 7" for b in range(2) for h in range(3) for i in range(5)]
        self.assertEqual(out.splitlines(), expected)

    def test_budget_is_one_minus_sparsity(self):
        self.pair(1, 2, 1536)
        self.assertEqual(self.select("--budget", "0.25"), self.select("--sparsity", "0.75"))
        self.assertEqual(self.select("--budget", "0.25", "--threads", "1"),
                         self.select("--budget=0.25", "--threads", "2"))
        for number in self.select("--budget", "0.25", "--selector", "random").split():
            self.assertEqual(bin(int(number, 16)).count("1"), 3)        # a quarter of 12 key blocks in every row


class SelectFiles(Base):
    def setUp(self):
        super().setUp()
        write_tensors(self.path("q"), {"q": f32(1, 1, 2, 400, 16), "other": f32(3, 1, 2, 400, 16)})
        write_tensors(self.path("k"), {"k": f32(2, 1, 2, 400, 16), "other": f32(4, 1, 2, 400, 16)})

    def test_arguments(self):
        self.fails("masks", "select", status=2, says=["--q"])
        self.fails("masks", "select", "--q", "q", status=2, says=["--k"])
        self.fails("masks", "select", "--q", "q", "--k", "k", "--budget", "0.5", "--sparsity", "0.5", status=2,
                   says=["--sparsity"])
        self.fails("masks", "select", "--q", "q", "--k", "k", "--keep-sink", "2", status=2)

    def test_error(self):
        """The error selector reads v, and its rows have a second number for the fine blocks."""
        write_tensors(self.path("v"), {"v": f32(5, 1, 2, 400, 16), "other": f32(6, 1, 2, 400, 16)})
        args = ["masks", "select", "--q", "q", "--k", "k"]
        error = [*args, "--selector", "error", "--v", "v", "--budget", "0.3", "--block", "32x32"]
        seen = set()
        for more in ([], ["--order", "adaptive"], ["--grid", "4,10,10", "--order", "adaptive"],
                     ["--tail", "none"], ["--tensor", "other"]):
            lines = [line.split() for line in self.works(*error, *more).splitlines()]
            self.assertEqual([line[:3] for line in lines], [["0", str(h), str(i)] for h in (0, 1) for i in range(13)])
            self.assertEqual({len(line) for line in lines}, {4})
            kept = [bin(int(line[3], 16)).count("1") for line in lines]
            self.assertGreaterEqual(min(kept), 1)
            self.assertAlmostEqual(sum(kept) / (26 * 13), 0.3, delta=0.01)       # one block of 338 is 0.003
            seen.add(" ".join(line[3] for line in lines))
        self.assertEqual(len(seen), 5)
        for fine in ([], ["--fine", "8"]):
            lines = [line.split() for line in self.works(*error, "--tail", "levels", *fine).splitlines()]
            self.assertEqual({len(line) for line in lines}, {5})
            exact, means = ([int(line[at], 16) for line in lines] for at in (3, 4))
            self.assertFalse(any(a & b for a, b in zip(exact, means)))           # a block is exact or fine
            self.assertTrue(any(means))
            self.assertLess(sum(bin(x).count("1") for x in exact) / (26 * 13), 0.3)
        self.assertEqual(self.works(*error, "--threads", "1"), self.works(*error, "--threads", "2"))
        # Groups of tokens that are scored: the default by name changes nothing, other ones do.
        self.assertEqual(self.works(*error, "--score-groups", "8x4"), self.works(*error))
        self.assertNotEqual(self.works(*error, "--score-groups", "1x1"), self.works(*error))
        for groups in ("8", "8x", "0x4", "3x4", "8x32", "x4", "8x4x2"):
            self.fails(*error, "--score-groups", groups, status=2, says=["--score-groups", groups, "1, 2, 4, 8 or 16"])
        self.fails(*error, "--tail", "levels", "--score-groups", "8x8", status=1, says=["group_k is 8", "fine mean"])
        self.fails(*args, "--score-groups", "8x4", status=2, says=["--score-groups needs --selector error"])
        # A stored mask is read again with its selector, its level and its blocks.
        for tail in ("none", "pooled", "levels"):
            blocks = [line.split()[3:] for line in self.works(*error, "--tail", tail).splitlines()]
            self.works(*error, "--tail", tail, "--out", "m")
            self.works("masks", "info", "m", "--layer", "0", "--step", "0", "--json", "i")
            info = kit.load(self.path("i"))
            self.assertEqual((info["selector"], info["format_version"], info["exact_rows"], info["fine"]),
                             ("error", 2, 0, 4 if tail == "levels" else 0))
            density = sum(cell["density"] for cell in info["heads_of_cell"]) / 2
            self.assertAlmostEqual(density, sum(bin(int(row[0], 16)).count("1") for row in blocks) / (26 * 13))
        self.fails(*error, "--order", "adaptive", "--out", "m", status=1, says=["adaptive"])
        self.fails(*args, "--selector", "error", status=2, says=["--v FILE"])
        self.fails(*args, "--v", "v", status=2, says=["--v needs --selector error"])
        self.fails(*args, "--tail", "pooled", status=2, says=["--tail needs --selector error"])
        self.fails(*args, "--fine", "4", status=2, says=["--fine needs --selector error"])
        self.fails(*args, "--order", "adaptive", status=2, says=["--selector error", "not entropy"])
        self.fails(*error, "--fine", "4", status=2, says=["--tail levels"])
        self.fails(*error, "--tail", "centroid", status=2, says=["none, pooled or levels"])
        self.fails(*error, "--tail", "levels", "--fine", "5", status=1, says=["fine is 5"])
        self.fails(*error, "--causal", status=1, says=["bidirectional"])
        self.fails(*error, "--mode", "compat", status=1, says=["compat"])
        write_tensors(self.path("short"), {"v": f32(5, 1, 2, 300, 16)})
        self.fails(*args, "--selector", "error", "--v", "short", status=1, says=["300", "400"])
        self.fails(*args, "--selector", "error", "--v", "none", status=1, says=["none"])

    def test_missing_and_wrong_files(self):
        self.fails("masks", "select", "--q", "nowhere", "--k", "k", status=1, says=["nowhere"])
        self.fails("masks", "select", "--q", "q", "--k", "k", "--tensor", "absent", status=1, says=["absent"])
        self.fails("masks", "select", "--q", ".", "--k", "k", status=1)
        with open(self.path("junk"), "wb") as file:
            file.write(os.urandom(200))
        self.fails("masks", "select", "--q", "junk", "--k", "k", status=1)
        whole = self.read("q")
        for size in (0, 1, 7, 8, 9, 100, len(whole) - 1):
            with open(self.path("cut"), "wb") as file:
                file.write(whole[:size])
            self.fails("masks", "select", "--q", "cut", "--k", "k", status=1)
        with open(self.path("cut"), "wb") as file:
            file.write(whole + b"x")
        self.fails("masks", "select", "--q", "cut", "--k", "k", status=1)
        write_tensors(self.path("rank"), {"q": f32(1, 400, 16)})
        self.fails("masks", "select", "--q", "rank", "--k", "k", status=1, says=["2 dimensions", "B,H,N,D"])
        write_tensors(self.path("type"), {"q": ("I32", [1, 2, 4, 16], bytes(512))})
        self.fails("masks", "select", "--q", "type", "--k", "k", status=1, says=["F32"])
        write_tensors(self.path("two"), {"a": f32(1, 1, 1, 4, 16), "b": f32(1, 1, 1, 4, 16)})
        self.fails("masks", "select", "--q", "two", "--k", "k", status=1, says=["--tensor"])

    def test_shapes_that_do_not_fit(self):
        write_tensors(self.path("dim"), {"k": f32(1, 1, 2, 400, 32)})
        self.fails("masks", "select", "--q", "q", "--k", "dim", status=1, says=["16", "32"])
        write_tensors(self.path("heads"), {"k": f32(1, 1, 3, 400, 16)})
        self.fails("masks", "select", "--q", "q", "--k", "heads", status=1, says=["3"])
        self.fails("masks", "select", "--q", "q", "--k", "k", "--grid", "3,10,10", status=1, says=["3x10x10", "400"])

    def test_tensor_names(self):
        by_side = self.works("masks", "select", "--q", "q", "--k", "k", "--budget", "0.3", "--block", "32x32")
        other = self.works("masks", "select", "--q", "q", "--k", "k", "--budget", "0.3", "--block", "32x32", "--tensor",
                           "other")
        self.assertNotEqual(by_side, other)
        self.assertEqual(len(by_side.splitlines()), 2 * 13)

    def test_bf16_and_f16(self):
        # Values of the generator are multiples of 1/64 up to 2: exact in both short types, so masks are the same.
        values = lcg(1, 800 * 16)
        f16 = struct.pack(f"<{len(values)}e", *values)
        bf16 = b"".join(struct.pack("<f", x)[2:] for x in values)
        args = ["--k", "k", "--budget", "0.3", "--block", "32x32"]
        write_tensors(self.path("k"), {"k": f32(2, 1, 2, 400, 16)})
        expected = self.works("masks", "select", "--q", "q", *args)
        for name, raw in (("F16", f16), ("BF16", bf16)):
            k = lcg(2, 800 * 16)
            k_raw = struct.pack(f"<{len(k)}e", *k) if name == "F16" else b"".join(struct.pack("<f", x)[2:] for x in k)
            write_tensors(self.path("qs"), {"q": (name, [1, 2, 400, 16], raw)})
            write_tensors(self.path("ks"), {"k": (name, [1, 2, 400, 16], k_raw)})
            self.assertEqual(self.works("masks", "select", "--q", "qs", "--k", "ks", *args[2:]), expected, name)

    def test_out_then_info_and_fa4(self):
        args = ["masks", "select", "--q", "q", "--k", "k", "--budget", "0.3", "--block", "32x32"]
        printed = self.works(*args)
        # the name's ending means nothing
        self.assertIn("density asked 0.3000", self.works(*args, "--out", "mask.pt"))
        out = self.works("masks", "info", "mask.pt", "--json", "info.json")
        self.assertIn("32x32", out)
        info = kit.load(self.path("info.json"))
        self.assertEqual((info["nq"], info["nk"], info["heads"], info["layers"], info["steps"]), (13, 13, 2, 1, 1))
        self.assertEqual(info["bytes"], os.path.getsize(self.path("mask.pt")))
        budget = info["budgets"][0]
        self.assertIn("density", self.works("masks", "info", "mask.pt", "--layer", "0", "--step", "0"))
        self.works("masks", "convert", "mask.pt", "--to", "fa4", "--budget", budget, "--out", "fa4")
        count, index = self.read_fa4("fa4")
        kept = [sum(1 << j for j in index[r * 13:r * 13 + count[r]]) for r in range(26)]
        self.assertEqual(" ".join(f"{x:x}" for x in kept), rows(printed))
        self.works("masks", "convert", "fa4", "--from", "fa4", "--out", "back")
        self.works("masks", "info", "back", "--json", "back.json")
        again = kit.load(self.path("back.json"))
        self.works("masks", "convert", "back", "--to", "fa4", "--budget", again["budgets"][0], "--out", "fa4b")
        self.assertEqual(self.read_fa4("fa4b"), (count, index))
        self.fails("masks", "convert", "fa4", "--out", "x", status=2, says=["--to", "--from"])
        self.fails("masks", "info", "fa4", status=1)
        self.fails("masks", "info", "mask.pt", "--layer", "7", "--step", "0", "--json", "never.json", status=1)

    def test_causal_is_written_down(self):
        args = [
            "masks", "select", "--q", "q", "--k", "k", "--budget", "0.3", "--block", "32x32", "--selector", "ada_bsa"
        ]
        for extra, causal in (([], False), (["--causal"], True)):
            self.works(*args, *extra, "--out", "m")
            self.assertEqual("causal" in self.works("masks", "info", "m", "--json", "i"), causal)
            self.assertIs(kit.load(self.path("i"))["causal"], causal)

    def test_convert_ignores_nothing(self):
        self.works("masks", "select", "--q", "q", "--k", "k", "--budget", "0.3", "--block", "32x32", "--out", "m",
                   "--grid", "4,10,10")
        self.works("masks", "convert", "m", "--to", "fa4", "--budget", "0.3", "--out", "fa4")
        back = ["masks", "convert", "fa4", "--from", "fa4", "--out", "x"]
        for extra in (["--block", "32x32"], ["--grid", "4,10,10"], ["--order",
                                                                    "raster"], ["--text-front",
                                                                                "0"], ["--text-back",
                                                                                       "3"], ["--window", "1,2,3"]):
            self.fails(*back, *extra, status=2, says=[extra[0], "--tokens"])
        self.fails(*back, "--budget", "0.5", status=2, says=["--budget", "--to"])
        self.fails("masks", "convert", "m", "--to", "fa4", "--out", "x", "--tokens", "400", status=2,
                   says=["--tokens", "--from"])
        own = ["--tokens", "400", "--block", "32x32"]
        self.fails(*back, *own, "--window", "1,2,3", status=2, says=["--window", "tile3d"])
        self.fails(*back, *own, "--grid", "4,5,20", status=1, says=["4x5x20", "4x10x10"])
        self.fails(*back, *own, "--order", "tile3d", "--window", "1,2,3", status=1, says=["tile3d 1x2x3", "raster"])
        self.works(*back, *own, "--grid", "4,10,10", "--order", "raster")
        self.works(*back, *own)
        self.write_fa4("theirs", [2, 1], [0, 2, 0, 1, 0, 0])
        self.works("masks", "convert", "theirs", "--from", "fa4", "--tokens", "300", "--grid", "3,10,10", "--order",
                   "tile3d", "--window", "1,5,5", "--out", "t")
        self.works("masks", "info", "t", "--json", "i")
        self.assertEqual(kit.load(self.path("i"))["order"], "tile3d")

    def test_fa4_of_others(self):
        """A file without our metadata: tokens and blocks must be told, and must fit."""
        count, index = [2, 1], [0, 2, 0, 1, 0, 0]
        self.write_fa4("fa4", count, index)
        args = ["masks", "convert", "fa4", "--from", "fa4", "--out", "x"]
        self.fails(*args, status=1, says=["block sizes"])
        self.fails(*args, "--tokens", "4000", "--block", "256x128", status=1, says=["4000"])
        self.fails(*args, "--tokens", "1,2,3", status=2, says=["3 numbers"])
        self.works(*args, "--tokens", "300", "--block", "256x128", "--model", "m")
        self.works("masks", "info", "x", "--json", "i")
        info = kit.load(self.path("i"))
        self.assertEqual((info["model"], info["selector"], info["Nq"], info["nq"], info["nk"]), ("m", None, 300, 2, 3))
        self.works("masks", "convert", "x", "--to", "fa4", "--budget", info["budgets"][0], "--out", "y")
        self.assertEqual(self.read_fa4("y"), (tuple(count), tuple(index)))
        for bad in ([0, 3, 0], [-1, 0, 0], [0, 0, 0]):                      # beyond nk, negative, twice
            self.write_fa4("fa4", count, bad + [1, 0, 0])
            self.fails("masks", "convert", "fa4", "--from", "fa4", "--tokens", "300", "--block", "256x128", "--out",
                       "z", status=1)

    def write_fa4(self, name, count, index):
        write_tensors(self.path(name), {"full_block_cnt": ("I32", [1, 1, 1, 2], struct.pack("<2i", *count)),
                                        "full_block_idx": ("I32", [1, 1, 1, 2, 3], struct.pack("<6i", *index))})

    def read_fa4(self, name):
        raw = self.read(name)
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8:8 + size])
        result = []
        for tensor in ("full_block_cnt", "full_block_idx"):
            self.assertEqual(header[tensor]["dtype"], "I32")
            a, b = header[tensor]["data_offsets"]
            result.append(struct.unpack(f"<{(b - a) // 4}i", raw[8 + size + a:8 + size + b]))
        return tuple(result)

    def test_out_that_cannot_be_written(self):
        self.fails("masks", "select", "--q", "q", "--k", "k", "--out", "no/such/folder/x", status=1,
                   says=["no/such/folder/x"])


class Recordings(Base):
    def setUp(self):
        super().setUp()
        for name, seed, prompts in (("a", 1, 1), ("b", 2, 2)):
            subprocess.run([MAKE_RECORDING, self.path(name), str(seed), str(prompts)], check=True)

    def bytes_of(self, name):
        return self.read(name)

    def test_merge_in_any_order(self):
        self.works("masks", "merge", "a", "b", "--out", "ab", "--budgets", "0.5,0.3")
        self.works("masks", "merge", "b", "a", "--out", "ba", "--budgets", "0.5,0.3")
        self.assertEqual(self.bytes_of("ab"), self.bytes_of("ba"))
        self.works("masks", "merge", "a", "b", "--recording", "--out", "sum")
        self.works("masks", "merge", "sum", "--out", "s", "--budgets", "0.5,0.3")
        self.assertEqual(self.bytes_of("ab"), self.bytes_of("s"))
        self.works("masks", "info", "ab", "--json", "i")
        info = kit.load(self.path("i"))
        # budgets rest in ascending order
        self.assertEqual((info["prompts"], info["model"], info["budgets"], info["importance"]),
                         (3, "test-model", [0.3, 0.5], "u8"))
        self.assertEqual((info["layers"], info["stored_layers"], info["steps"], info["stored_groups"]), (3, 2, 5, 4))

    def test_derived_equals_prebuilt(self):
        self.works("masks", "merge", "a", "b", "--out", "both", "--budgets", "0.5,0.3")
        self.works("masks", "merge", "a", "b", "--out", "one", "--budgets", "0.5")
        self.works("masks", "derive", "one", "--budgets", "0.5,0.3", "--out", "derived")
        self.assertEqual(self.bytes_of("both"), self.bytes_of("derived"))
        self.works("masks", "derive", "both", "--importance", "none", "--out", "bare")
        self.assertLess(os.path.getsize(self.path("bare")), os.path.getsize(self.path("both")))
        self.fails("masks", "derive", "bare", "--budgets", "0.2", "--out", "x", status=1)
        self.fails("masks", "derive", "bare", "--importance", "u8", "--out", "x", status=1)

    def test_refusals(self):
        self.fails("masks", "merge", "--out", "x", status=2, says=["0 files"])
        self.fails("masks", "merge", "a", status=2, says=["--out"])
        self.fails("masks", "merge", "a", "nowhere", "--out", "x", status=1, says=["nowhere"])
        self.fails("masks", "info", "a", status=1, says=["recording"])
        self.fails("masks", "derive", "a", "--out", "x", status=1, says=["recording"])
        self.works("masks", "merge", "a", "--out", "m")
        self.fails("masks", "merge", "m", "--out", "x", status=1)
        self.fails("masks", "derive", "m", "a", "--out", "x", status=2, says=["2 files"])
        whole = self.bytes_of("m")
        for size in (0, 8, 50, len(whole) // 2, len(whole) - 1):
            with open(self.path("cut"), "wb") as file:
                file.write(whole[:size])
            self.fails("masks", "info", "cut", status=1)


class Bench(Base):
    FIELDS = {
        "shape", "dtype", "kernel", "selector", "tail", "density_asked", "density", "seconds", "seconds_median",
        "gflops", "of_sgemm", "precision", "speedup_vs_dense", "select_seconds", "order_seconds", "peak_extra_bytes",
        "order", "exact_rows"
    }

    def test_default(self):
        """Without options the rows are the calls of `esa generate` without options: what the library recommends for
        the error selector, at the works of the presets with carry, which has no exact rows."""
        self.works("bench", "attention", "--shape", "1,2,600,32", "--rounds", "1", "--json", "b.json")
        dense, *rows = kit.load(self.path("b.json"))["rows"]
        works = [row["density_asked"] for row in rows]
        self.assertTrue(1 > works[0] > works[1] > works[2] > 0.05, works)
        self.assertEqual((dense["selector"], dense["exact_rows"], dense["order"]), ("dense", 0, None))
        self.assertEqual([(row["selector"], row["tail"], row["order"], row["exact_rows"], row["density_asked"])
                          for row in rows], [("error", "levels", "adaptive", 0, x) for x in works])
        for row in rows:
            self.assertGreater(row["select_seconds"], 0)
            self.assertGreater(row["order_seconds"], 0)
        help_text = self.works("bench", "attention", "--help")
        presets = f"{works[0]:g}, {works[1]:g} or {works[2]:g} in 50 steps"
        listed = ",".join(f"{x:g}" for x in works)
        self.assertIn(f"(1,{listed}, as the presets in 50 steps)", " ".join(help_text.split()))
        self.assertIn(presets, " ".join(self.works("generate", "--help").split()))
        # each of them can be chosen, and the other selectors keep theirs
        self.works("bench", "attention", "--shape", "1,2,600,32", "--rounds", "1", "--json", "b.json", "--density", 0.5,
                   "--tail", "pooled", "--exact-rows", 3, "--order", "raster")
        row, = kit.load(self.path("b.json"))["rows"]
        self.assertEqual((row["selector"], row["tail"], row["order"], row["exact_rows"], row["order_seconds"]),
                         ("error", "pooled", "raster", 3, None))
        self.works("bench", "attention", "--shape", "1,2,600,32", "--rounds", "1", "--json", "b.json", "--density", 0.5,
                   "--selector", "entropy,error")
        self.assertEqual([(row["tail"], row["order"], row["exact_rows"]) for row in
                          kit.load(self.path("b.json"))["rows"]], [("none", None, 0), ("levels", "adaptive", 0)])

    def test_cases(self):
        """--case takes the calls of tests/cases/attention.def by name, and each name is one call."""
        names = self.works("bench", "attention", "--case", "list").split()
        self.assertEqual(len(names), len(set(names)))
        wanted = "levels/lengths/f16*,carry/tiles/one_d/d64/*,attention/sizes/1x1/f32/dense"
        rows = self.works("bench", "attention", "--case", wanted, "--rounds", 1).splitlines()[1:]
        self.assertEqual(sorted(row.split()[0] for row in rows), sorted(
            name for name in names if any(fnmatch.fnmatch(name, glob) for glob in wanted.split(","))))
        self.assertEqual(len(rows), 7)
        for row in rows:
            self.assertGreater(float(row.split()[3]), 0)
        self.fails("bench", "attention", "--case", "no/such", status=2, says=["no/such", "--case list"])
        self.fails("bench", "attention", "--case", "eight/*", "--tail=none", status=2, says=["--tail=none", "--rounds"])

    def test_json(self):
        out = self.works("bench", "attention", "--selector", "random", "--shape", "1,2,512,32", "--density", "1,0.5",
                         "--rounds", "3", "--json", "b.json")
        self.assertIn("speedup", out)
        data = kit.load(self.path("b.json"))
        self.assertTrue({"machine", "commit", "sgemm_gflops", "rows"} <= set(data))
        for key in ("cpu", "cores", "memory_bytes", "threads", "kernels"):
            self.assertTrue(data["machine"][key], key)
        self.assertEqual([set(row) for row in data["rows"]], [self.FIELDS] * 2)
        dense, half = data["rows"]
        self.assertEqual((dense["density"], dense["speedup_vs_dense"], dense["shape"], half["selector"]),
                         (1, 1, "1,2,512,32", "random"))
        self.assertEqual(half["density"], 0.5)
        self.assertIsNone(half["select_seconds"])
        self.assertIsNone(half["order_seconds"])
        self.assertGreater(half["peak_extra_bytes"], 0)
        for row in data["rows"]:
            self.assertLessEqual(row["seconds"], row["seconds_median"])
            # The definition: 4 Nq keptkeys D H over the time.
            self.assertAlmostEqual(row["gflops"] * row["seconds"], 4e-9 * 512 * 512 * row["density"] * 32 * 2,
                                   delta=1e-8)
            if data["sgemm_gflops"]:
                self.assertAlmostEqual(row["of_sgemm"], row["gflops"] / data["sgemm_gflops"], delta=1e-6)
        self.assertEqual(os.listdir(self.dir), ["b.json"])

    def test_precision(self):
        self.works("bench", "attention", "--selector", "random", "--shape", "1,1,200,32", "--density", "1,0.5",
                   "--block", "32x32", "--rounds", "1", "--precision", "8", "--tail", "pooled,centroid",
                   "--json", "p.json")
        rows = kit.load(self.path("p.json"))["rows"]
        self.assertEqual({row["precision"] for row in rows}, {8})
        self.assertEqual([row["kernel"] == "cpu-8bit" for row in rows], [True, True, False])    # none for centroids

    def test_selectors_types_tails(self):
        self.works("bench", "attention", "--shape", "1,4,600,32", "--grid", "6,10,10", "--density", "1,0.5",
                   "--selector", "entropy,rf_v2,ada_bsa", "--tail", "none,pooled,centroid", "--dtype", "f32,bf16,f16",
                   "--rounds", "1", "--json", "b.json")
        data = kit.load(self.path("b.json"))
        self.assertEqual(len(data["rows"]), 3 * (1 + 9))
        for row in data["rows"]:
            self.assertEqual(row["select_seconds"] is None, row["selector"] == "dense")
            self.assertGreater(row["gflops"], 0)
            self.assertIsNone(row["order_seconds"])
        self.works("bench", "attention", "--shape", "2,1,300,16", "--causal", "--density", "1,0.5", "--rounds", "1",
                   "--threads", "1")

    def error(self, *args, **how):
        """Rows of the error selector: [with an adaptive order], [without], by tail."""
        found = []
        for order in (["--order", "adaptive"], ["--order", "hilbert"]):
            self.works("bench", "attention", "--shape", "1,2,600,32", "--grid", "6,10,10", "--density", "1,0.4",
                       "--selector", "error", "--tail", "none,pooled,levels", "--block", "64x64", "--rounds", "1",
                       "--json", "b.json", *order, *args, **how)
            dense, *more = kit.load(self.path("b.json"))["rows"]
            self.assertEqual([dense[name] for name in ("selector", "select_seconds", "order_seconds")],
                             ["dense", None, None])
            self.assertEqual([row["tail"] for row in more], ["none", "pooled", "levels"])
            for row in more:
                self.assertGreater(row["select_seconds"], 0)
                # with levels, means take some of the budget; one block of 100 is 0.01
                self.assertAlmostEqual(row["density"], 0.4, delta=0.1 if row["tail"] == "levels" else 0.011)
            found.append(more)
        for adaptive, plain in zip(*found):
            self.assertGreater(adaptive["order_seconds"], 0)
            self.assertIsNone(plain["order_seconds"])
        return found

    def test_error(self):
        self.error("--fine", "8")
        for args, says in ((["--selector", "error,entropy", "--order", "adaptive"], ["adaptive", "not entropy"]),
                           (["--order", "adaptive", "--selector", "random"], ["--selector error", "not random"]),
                           (["--selector", "error", "--tail", "pooled,centroid"], ["none, pooled or levels"]),
                           (["--selector", "error", "--causal"], ["--causal"]),
                           (["--selector", "error", "--fine", "32"], ["2 .. 16"])):
            self.fails("bench", "attention", "--rounds", "1", *args, status=2, says=says)
        self.fails("bench", "attention", "--rounds", "1", "--shape", "1,1,600,16", "--selector", "error", "--tail",
                   "levels", "--density", "0.5", "--fine", "3", status=1, says=["fine is 3"])

    def test_random_takes_layouts_too(self):
        args = [
            "bench", "attention", "--selector", "random", "--shape", "1,1,600,16", "--density", "0.2", "--rounds", "1",
            "--block", "16x16", "--json", "b.json"
        ]
        self.works(*args)
        plain = kit.load(self.path("b.json"))["rows"][0]["density"]
        self.works(*args, "--text-front", "160")                        # ten forced columns and rows
        self.assertGreater(kit.load(self.path("b.json"))["rows"][0]["density"], plain + 0.1)
        self.fails(*args, "--window", "1,2,3", status=2, says=["--window", "tile3d"])
        self.fails(*args, "--text-back", "601", status=1, says=["601"])

    def test_json_that_cannot_be_written(self):
        code, _, err = esa("bench", "attention", "--shape", "1,1,64,16", "--density", "1", "--rounds", "1", "--json",
                           "no/folder/b", cwd=self.dir)
        self.assertEqual(code, 1)
        self.assertIn("no/folder/b", err.splitlines()[-1])
        code, _, err = esa("doctor", "--json", "/dev/full")
        self.assertEqual(code, 1)
        self.assertIn("/dev/full", err)
        self.assertEqual(os.listdir(self.dir), [])

    def test_quality(self):
        args = [
            "bench", "quality", "--grid", "2,16,16", "--dim", "32", "--density", "0.5", "--selector", "entropy,random",
            "--order", "raster,hilbert"
        ]
        out = self.works(*args)
        lines = [line.split(",") for line in out.splitlines()]
        self.assertEqual(lines[0], "head,selector,order,density_asked,density,tail,kept_mass,output_error".split(","))
        self.assertEqual(len(lines), 1 + 2 * 2 * 3 * 4)
        for line in lines[1:]:
            self.assertTrue(0 < float(line[6]) <= 1 and 0 <= float(line[7]), line)
        self.works(*args, "--out", "q.csv", "--threads", "1")
        self.assertEqual(kit.read(self.path("q.csv"), "r"), out)          # the same on any number of threads
        self.fails(*args, "--dim", "33", status=2, says=["33"])

    def test_quality_of_error(self):
        args = ["bench", "quality", "--grid", "2,16,16", "--dim", "32", "--density", "0.3", "--selector"]
        lines = [line.split(",") for line in self.works(*args, "error", "--order", "hilbert,adaptive").splitlines()[1:]]
        self.assertEqual(len(lines), 2 * 3 * 4)
        self.assertEqual({line[2] for line in lines}, {"hilbert", "adaptive"})
        self.assertEqual({line[5] for line in lines}, {"none", "pooled", "levels"})     # its own tails
        # One budget for all heads, up to the 16 blocks of one row of 4 heads; levels also pay for means.
        for order in ("hilbert", "adaptive"):
            kept = [float(line[4]) for line in lines if line[2] == order and line[5] == "pooled"]
            self.assertAlmostEqual(sum(kept) / 4, 0.3, delta=0.04)
        mixed = self.works(*args, "entropy,error", "--order", "raster")
        self.assertEqual(len(mixed.splitlines()), 1 + 2 * 3 * 4)
        self.fails(*args, "error", "--tail", "centroid", status=2, says=["none, pooled or levels"])
        self.fails(*args, "entropy", "--order", "adaptive", status=2, says=["--selector error", "not entropy"])

    def test_demo(self):
        out = self.works("demo", "--grid", "4,16,16", "--dim", "32", "--budget", "0.5", "--rounds", "1", "--json",
                         "d.json")
        self.assertIn("kept mass", out)
        data = kit.load(self.path("d.json"))
        names = [(row["selector"], row["tail"]) for row in data["rows"]]
        self.assertEqual(names[0], ("dense", "none"))
        self.assertEqual(
            sorted(names[1:]),
            sorted([*((s, t) for s in ("entropy", "rf_v2", "ada_bsa", "random") for t in ("none", "pooled")),
                    ("error", "pooled"), ("error", "levels")]))
        by = {name: row for name, row in zip(names, data["rows"])}
        # Any selector that looks at q and k must keep more than chance does.
        for selector in ("entropy", "rf_v2", "ada_bsa"):
            self.assertGreater(by[selector, "none"]["kept_mass"], by["random", "none"]["kept_mass"] + 0.05)
        # The error selector minimises just this error, with orders made for these heads.
        self.assertLess(by["error", "pooled"]["output_error"],
                        min(by[s, "pooled"]["output_error"] for s in ("entropy", "rf_v2", "ada_bsa")))
        self.works("demo", "--grid", "2,16,16", "--dim", "32", "--budget", "0.5", "--rounds", "1", "--order",
                   "adaptive")


class Doctor(Base):
    def test_doctor(self):
        out = self.works("doctor", "--json", "d.json")
        data = kit.load(self.path("d.json"))
        for set_ in data["kernel_sets"]:
            if set_["available"]:
                self.assertTrue(set_["right"], set_)
        self.assertTrue(data["kernel_sets"][0]["available"])
        self.assertIn(data["machine"]["kernels"], out)

    def test_unknown_kernel_set(self):
        for command in (["doctor"], ["demo"], ["bench", "attention"], ["masks", "info", "x"]):
            self.fails(*command, status=1, says=["ESA_CPU", "nonsense", "avx2"], env={"ESA_CPU": "nonsense"})

    def test_amx_refused(self):
        """Without the permission the doctor falls back to another set, and says so in one line."""
        def refuse():
            """A filter that refuses arch_prctl(0x1023), by which a process asks for a feature."""
            def code(op, value, if_true=0, if_false=0):
                return struct.pack("HBBI", op, if_true, if_false, value)
            rules = (code(0x20, 0) + code(0x15, 158, 0, 3) + code(0x20, 16) + code(0x15, 0x1023, 0, 1) +
                     code(0x06, 0x00050001) + code(0x06, 0x7fff0000))
            program = ctypes.create_string_buffer(rules, len(rules))
            header = struct.pack("HxxxxxxQ", len(rules) // 8, ctypes.addressof(program))
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, header, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")
        if platform.machine() != "x86_64":
            kit.skip(self, "AMX is x86 only")
        done = subprocess.run([ESA, "doctor", "--json", "d"], cwd=self.dir, capture_output=True, text=True,
                              preexec_fn=refuse, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            has = re.search(r"\bamx_bf16\b", info.read()) is not None
        line = re.search("^check +amx +(.*)$", done.stdout, re.M)[1]
        self.assertEqual(line.startswith("refused: "), has, line)
        self.assertNotRegex(done.stdout, r"(?m)^kernels +amx")
        amx = next(x for x in kit.load(self.path("d"))["kernel_sets"] if x["name"] == "amx")
        self.assertEqual((amx["available"], amx.get("refused", False)), (False, has))

    def test_lowered(self):
        self.assertRegex(self.works("doctor", env={"ESA_CPU": "ref"}), r"kernels +ref \(ESA_CPU=ref\)")

    def test_no_plugin(self):
        no = {"ESA_CUDA_LIB": "/no/such/libesa_cuda.so"}
        self.assertRegex(self.works("doctor", env=no), r"cuda +not in use: .*/no/such/libesa_cuda.so")
        self.fails("bench", "attention", "--device", "cuda", status=1, says=["/no/such/libesa_cuda.so"], env=no)
        self.fails("bench", "attention", "--device", "gpu", status=2, says=["--device", "cpu|cuda"])


class Gpu(Base):
    env = {"ESA_CUDA_LIB": STAND_IN}

    def test_doctor(self):
        out = self.works("doctor", "--json", "d.json", env=self.env)
        self.assertRegex(out, r"gpu 0 +stand-in.*sm90a kernels")
        self.assertEqual(out.count("right on GPU 0"), 2)
        data = kit.load(self.path("d.json"))
        self.assertEqual(data["gpus"][0]["kernels"], "sm90a")
        self.assertRegex(out, r"cublasLt +stand-in")
        self.assertEqual(data["cublaslt"], "stand-in")
        missing = self.works("doctor", env={**self.env, "ESA_STAND_IN_BLAS": "missing"})
        self.assertRegex(missing, r"cublasLt +not in use: .*pip install nvidia-cublas")
        self.assertRegex(self.works("doctor", env={**self.env, "ESA_CUDA": "sm80"}), r"sm80 kernels \(ESA_CUDA=sm80\)")
        self.assertIn("sm89 kernels", self.works("doctor", env={**self.env, "ESA_CUDA": "sm89"}))
        self.assertIn("nonsense", esa("doctor", env={**self.env, "ESA_CUDA": "nonsense"})[2])

    def test_bench(self):
        out = self.works("bench", "attention", "--device", "cuda", "--shape", "1,2,300,32", "--dtype", "f32,bf16",
                         "--density", "1,0.5", "--selector", "random,entropy", "--tail", "pooled", "--rounds", "2",
                         "--json", "b.json", env=self.env)
        self.assertIn("stand-in", out)
        data = kit.load(self.path("b.json"))
        self.assertEqual(data["gpu"]["name"], "stand-in")
        self.assertEqual(len(data["rows"]), 6)
        for row in data["rows"]:
            self.assertGreater(row["seconds"], 0)
            self.assertEqual(row["kernel"], "stand-in")
            self.assertEqual(row["select_seconds"] is not None, row["selector"] == "entropy")

    def test_bench_error(self):
        Bench.error(self, "--device", "cuda", env=self.env)


if __name__ == "__main__":
    if "--command" in sys.argv[4:]:             # under sanitizers: without what runs scripts and CMake instead
        del Setup, Install
    unittest.main(argv=["check_cli", "-v"])
