#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Commands whose memory or files fail: check_faults.py ESA MODELS MAKE_RECORDING FAULTS alloc|files
[--command NAME] [--runs N].

FAULTS is faults.c as a library. Each run lets one call fail, or that call and all later ones of its kind. Whatever
fails, a command
  - ends by itself, in time, and not by a signal;
  - with status 0 has written what a run without faults writes;
  - with another status has said why, in one line that begins with "esa: ";
  - leaves of each result what stood there before or the new one whole, and no temporary file.
A calibration that failed goes on where it was, to the same bits. `--runs` is the number of runs per kind. The first
calls of a kind are tried one by one, the others by chance ($ESA_TEST_SEED)."""
import argparse
import errno
import os
import random
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import report_fixture
import video_files
from judge import SECONDS, Ended, complaints
from outcome import OLDER, contents, fill

SEED = int(os.environ.get("ESA_TEST_SEED", time.time_ns() % 10**9))
CLIP = ["--frames", 5, "--height", 32, "--width", 32, "--block", "16x16", "--threads", 1]
# kind of call in faults.c: errors that the system gives there
ERRORS = {
    "alloc": [errno.ENOMEM], "open": [errno.EIO, errno.EMFILE], "read": [errno.EIO],
    "write": [errno.EIO, errno.ENOSPC], "sync": [errno.EIO, errno.ENOSPC], "rename": [errno.EIO, errno.ENOSPC],
    "truncate": [errno.EIO, errno.ENOSPC], "close": [errno.EIO], "mmap": [errno.ENOMEM, errno.EIO],
    "mkdir": [errno.ENOSPC], "stat": [errno.EIO]
}
# command: words, results below out/. A name with a slash is a folder of pictures.
COMMANDS = {
    "doctor": (["doctor", "--threads", 1, "--json", "out/d.json"], ["d.json"]),
    "info": (["masks", "info", "in.masks", "--layer", 1, "--step", 2, "--json", "out/i.json"], ["i.json"]),
    "derive": (["masks", "derive", "in.masks", "--budgets", 0.4, "--out", "out/m"], ["m"]),
    "merge": (["masks", "merge", "rec", "--out", "out/m"], ["m"]),
    "mp4": (["export", "a.npy", "--out", "out/v.mp4", "--json", "out/e.json"], ["v.mp4", "e.json"]),
    "y4m": (["export", "v.mp4", "--out", "out/v.y4m"], ["v.y4m"]),
    "pictures": (["export", "a.npy", "--out", "out/p/"], ["p"]),
    "evaluate": (["evaluate", "--reference", "pictures", "--generated", "v.mp4", "--output", "out/m.json"], ["m.json"]),
    "report": (["report", "res", "--output", "out/page.html"], ["page.html"]),
    "check": (["generate", "--check"], []),
    "generate": (["generate", *CLIP, "--steps", 1, "--out", "out/v.npy", "--json", "out/r.json"], ["v.npy", "r.json"]),
    "calibrate": (["calibrate", *CLIP, "--steps", 2, "--num-prompts", 1, "--output", "out/m"], ["m"]),
}
RESUMED = {"calibrate": "m.part"}       # what a failed run leaves so that the next goes on there


class Bench:
    """A folder with what the commands read."""

    def __init__(self, folder, rng, args):
        self.dir, self.made, self.rng = folder, os.path.join(folder, "out"), rng
        self.esa, self.faults = args.esa, args.faults
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        self.env.update(ESA_MODELS=args.models, OPENBLAS_NUM_THREADS="1")
        pixels = rng.randbytes(6 * 32 * 32 * 3)
        video_files.write(self.path("a.npy"), video_files.npy(pixels, (6, 32, 32, 3)))
        picture = b"FRAME\n" + bytes(range(256)) * 12
        with open(self.path("v.y4m"), "wb") as file:
            file.write(b"YUV4MPEG2 W32 H32 F8:1 Ip A1:1 C444\n" + picture * 5)
        report_fixture.make(self.path("res"), "res", [self.path("v.y4m")], prompts=["p"])
        subprocess.run([args.make_recording, self.path("rec"), "7", "1"], check=True)
        for words in (["masks", "merge", "rec", "--out", "in.masks"], ["export", "a.npy", "--out", "v.mp4"],
                      ["export", "a.npy", "--out", "pictures/"]):
            self.plain(words)

    def path(self, name):
        return os.path.join(self.dir, name)

    def run(self, words, **more):
        return Ended([self.esa, *words], self.dir, {**self.env, **more}, SECONDS)

    def plain(self, words):
        run = self.run(words)
        if run.status != 0:
            sys.exit(f"{words} without a fault: status {run.status}: {run.err}")

    def faulty(self, words, fault):
        """A run with a fault, and how many calls of each kind it made and how many failed: kind -> (calls, failed)."""
        counts = self.path("counts")
        if os.path.exists(counts):
            os.unlink(counts)
        more = {"ESA_FAULT": fault} if fault else {}
        run = self.run(words, LD_PRELOAD=self.faults, ESA_FAULT_COUNTS=counts, **more)
        lines = (contents(counts) or b"").decode().split("\n")[:-1]
        return run, {kind: (int(calls), int(failed)) for kind, calls, failed in map(str.split, lines)}


class Command:
    def __init__(self, bench, name):
        self.bench, self.name = bench, name
        self.words, self.results = COMMANDS[name]
        fill(bench.made, {})
        run, self.calls = bench.faulty(self.words, None)
        if run.status != 0 or not any(calls for calls, _ in self.calls.values()):
            sys.exit(f"{name} under {bench.faults} without a fault: status {run.status}: {run.err}")
        self.final = {result: contents(os.path.join(bench.made, result)) for result in self.results}
        # A folder is replaced only if it holds pictures: one of them, older.
        self.old = {result: {min(data): OLDER} if isinstance(data, dict) else OLDER
                    for result, data in self.final.items()}

    def try_one(self, fault, replace):
        """One run with a fault; its status, and what is wrong with it."""
        bench, resumed = self.bench, RESUMED.get(self.name)
        before = {result: old if replace else None for result, old in self.old.items()}
        fill(bench.made, before)
        run, counts = bench.faulty(self.words, fault)
        found = complaints(run, bench.made, self.results, before, self.final, resumed)
        if resumed and run.status in (1, 2) and bench.rng.random() < 0.2:
            again = bench.run(self.words)
            told = complaints(again, bench.made, self.results, before, self.final)
            found += [f"going on after it: {text} {again.err[-200:]}" for text in told]
        if "wrong results" in run.err:
            found.append("a fault is no wrong result")
        hit = counts.get(fault.split()[0], (0, 1))[1]       # a command that ends in a hurry leaves no counts
        said = run.err.strip().splitlines()[-1:]
        return run.status, hit, [f"{self.name}, fault '{fault}', old files {replace}: {text}: {said}" for text in found]


def choose(calls, number, rng):
    """Numbers of calls: the first third one by one, the rest by chance."""
    first = min(calls, number // 3)
    return [*range(1, first + 1), *rng.sample(range(first + 1, calls + 1), min(calls - first, number - first))]


def trials(command, kinds, number, rng):
    """Faults of one command: the kinds share the number."""
    here = [kind for kind in kinds if command.calls[kind][0]]
    for i, kind in enumerate(here):
        share = number // len(here) + (i < number % len(here))
        for at in choose(command.calls[kind][0], max(share, 3), rng):
            for in_a_row in (1, 0) if kind == "alloc" else (rng.choice((1, 1, 2, 0)),):
                yield f"{kind} {at} {rng.choice(ERRORS[kind])} {in_a_row}"


class Faults(unittest.TestCase):
    def test_faults(self):
        rng, begun = random.Random(SEED), time.monotonic()
        print(f"check_faults: ESA_TEST_SEED={SEED}", flush=True)
        kinds = ["alloc"] if args.kind == "alloc" else [kind for kind in ERRORS if kind != "alloc"]
        names = [args.command] if args.command else list(COMMANDS)
        found, total, refused = [], 0, 0
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(folder, rng, args)
            for name in names:
                command, tried, wrong, failed, hits = Command(bench, name), 0, 0, 0, 0
                number = args.runs // len(names) // (2 if args.kind == "alloc" else 1)
                for fault in trials(command, kinds, number, rng):
                    status, hit, bad = command.try_one(fault, rng.random() < 0.5)
                    tried, wrong, failed, hits = tried + 1, wrong + len(bad), failed + (status != 0), hits + (hit > 0)
                    found += bad
                print(f"check_faults: {name}: {tried} runs, {hits} with a fault, {failed} refused, {wrong} wrong",
                      flush=True)
                self.assertGreater(hits, 0.9 * tried, f"{name}: most faults did not happen, seed {SEED}")
                self.assertGreater(failed, 0, f"{name}: no fault mattered, seed {SEED}")
                total, refused = total + tried, refused + failed
        print(f"check_faults: {args.kind}: {total} runs, {refused} refused, {time.monotonic() - begun:.0f} s")
        self.assertEqual(found, [], f"{len(found)} wrong, seed {SEED}:\n" + "\n".join(found[:20]))


class Known(unittest.TestCase):
    """What has gone wrong before, without chance. The class of the kind runs."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bench = Bench(folder.name, random.Random(SEED), args)

    def every(self, name, kind, error, in_a_row, step=1):
        command = Command(self.bench, name)
        for at in range(1, command.calls[kind][0] + 1, step):
            self.assertEqual(command.try_one(f"{kind} {at} {error} {in_a_row}", False)[2], [])


class KnownFiles(Known):
    def test_a_folder_that_was_there_stays(self):
        """A folder whose stat failed was taken for one that the command had made itself."""
        for at in range(1, 8):
            fill(self.bench.made, {})
            run, counts = self.bench.faulty(["export", "missing.npy", "--out", "out/v.y4m"], f"stat {at} {errno.EIO} 1")
            self.assertEqual(run.status, 1, run.err)
            self.assertTrue(os.path.isdir(self.bench.made), f"stat {at}: {run.err}")
        self.assertLess(counts["stat"][0], 8)

    def test_pictures_without_descriptors(self):
        """A folder of pictures could not be removed if it could not be opened."""
        self.every("pictures", "open", errno.EMFILE, 0)


    def test_what_cannot_be_looked_at_is_not_missing(self):
        """A page lacked a table, and a calibration its folder's last file, where stat failed."""
        self.every("report", "stat", errno.EIO, 1)
        self.every("calibrate", "stat", errno.EIO, 1)

    def test_recorded_prompts_stay(self):
        """A recording was removed where stat failed, as if there were none."""
        command, bench = Command(self.bench, "calibrate"), self.bench
        fill(bench.made, {})
        bench.faulty(command.words, f"rename {command.calls['rename'][0]} {errno.EIO} 1")
        begun = contents(os.path.join(bench.made, "m.part"))
        self.assertIn("recording.0", begun)
        for at in range(1, command.calls["stat"][0] + 1):
            fill(bench.made, {"m.part": begun})
            run, _ = bench.faulty(command.words, f"stat {at} {errno.EIO} 1")
            if run.status == 0:
                self.assertIn("1 already recorded", run.err, f"stat {at}")
            elif contents(os.path.join(bench.made, "m")) != command.final["m"]:
                left = contents(os.path.join(bench.made, "m.part")) or {}
                self.assertEqual(left.get("recording.0"), begun["recording.0"], f"stat {at}: {run.err}")


class KnownAlloc(Known):
    def test_no_memory_is_no_wrong_result(self):
        """Of JSON, too: a quote behind a key was missing where the text had to grow."""
        self.every("doctor", "alloc", errno.ENOMEM, 1)

    def test_no_memory_is_no_other_text(self):
        """A byte of a long text that was read was missing, and a character became U+FFFD."""
        self.every("report", "alloc", errno.ENOMEM, 1, 7)

    def test_the_folder_of_a_finished_calibration_goes(self):
        """Its files counted as foreign where the file that marks them could not be read."""
        self.every("calibrate", "alloc", errno.ENOMEM, 1, 9)

    def test_the_hash_of_a_model_is_whole(self):
        self.every("generate", "alloc", errno.ENOMEM, 1, 7)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("esa", type=os.path.abspath)
    parser.add_argument("models", type=os.path.abspath)
    parser.add_argument("make_recording", type=os.path.abspath)
    parser.add_argument("faults", type=os.path.abspath)
    parser.add_argument("kind", choices=("alloc", "files"))
    parser.add_argument("--command", choices=COMMANDS)
    parser.add_argument("--runs", type=int, default=320)
    args = parser.parse_args()
    unittest.main(argv=[sys.argv[0], "Faults", "Known" + args.kind.capitalize()])
