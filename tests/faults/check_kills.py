#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Commands that get a signal at moments of chance: check_kills.py ESA MODELS [--signals N].

SIGKILL, SIGTERM, SIGINT and SIGHUP take turns, N for each command. Every result is then what stood there before or the
new one whole, byte for byte. Only a run that died of its signal may leave temporary files; one that ended by itself
leaves none. A calibration goes on after each signal and comes to the same bits as one without. $ESA_TEST_SEED chooses
the moments. tests/cli/check_killed.py kills more commands, with SIGKILL alone."""
import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import video_files
from judge import SECONDS, Ended, complaints, names_below
from outcome import OLDER, TEMPORARY, contents, fill

SEED = int(os.environ.get("ESA_TEST_SEED", time.time_ns() % 10**9))
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CLIP = ["--height", 32, "--width", 32, "--block", "16x16", "--threads", 1]
EXPORTS = {"mp4": "v.mp4", "y4m": "v.y4m", "npy": "v.npy", "safetensors": "v.safetensors", "pictures": "p/"}


def default_signals():
    """A shell may have started this check with signals ignored, and the command would leave them so."""
    for number in SIGNALS[1:]:
        signal.signal(number, signal.SIG_DFL)


class Signalled(Ended):
    """A run that gets a signal `after` so many seconds, or as soon as something appears in `folder`. sent is 0 if it
    was faster."""

    def __init__(self, words, cwd, env, number, after, folder=None):
        run = subprocess.Popen(list(map(str, words)), cwd=cwd, env=env, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, preexec_fn=default_signals)
        end, there, self.sent = time.monotonic() + after, set(os.listdir(folder)) if folder else None, 0
        while run.poll() is None and time.monotonic() < end and not (folder and set(os.listdir(folder)) - there):
            time.sleep(0.0005)
        if run.poll() is None:
            run.send_signal(number)
            self.sent = number
        try:
            self.err = run.communicate(timeout=SECONDS)[1].decode(errors="replace")
            self.status = run.returncode
        except subprocess.TimeoutExpired:
            run.kill()
            run.communicate()
            self.status, self.err = None, ""


class Kills(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rng = random.Random(SEED)
        cls.env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        cls.env.update(ESA_MODELS=args.models, OPENBLAS_NUM_THREADS="1")
        print(f"check_kills: ESA_TEST_SEED={SEED}", flush=True)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir, self.made = folder.name, os.path.join(folder.name, "out")
        fill(self.made, {})
        pixels = self.rng.randbytes(40 * 64 * 64 * 3)
        video_files.write(os.path.join(self.dir, "a.npy"), video_files.npy(pixels, (40, 64, 64, 3)))

    def whole(self, words, results):
        """The results of a run that nobody disturbs. self.seconds: how long it takes."""
        begun = time.monotonic()
        run = Ended([args.esa, *words], self.dir, self.env, SECONDS)
        self.assertEqual(run.status, 0, run.err)
        self.seconds = time.monotonic() - begun
        return {name: contents(os.path.join(self.made, name)) for name in results}

    def signalled(self, turn, words):
        number, begun = SIGNALS[turn % len(SIGNALS)], time.monotonic()
        writing = turn // len(SIGNALS) % 2
        after = 5 * self.seconds if writing else self.rng.uniform(0, self.seconds)
        run = Signalled([args.esa, *words], self.dir, self.env, number, after, self.made if writing else None)
        if not run.sent:
            self.seconds = min(self.seconds, time.monotonic() - begun)
        return run

    def check(self, name, words, results):
        final = self.whole(words, results)
        old = {result: {min(data): OLDER} if isinstance(data, dict) else OLDER for result, data in final.items()}
        sent, runs = 0, 0
        while sent < args.signals and runs < 8 * args.signals:
            before = old if self.rng.random() < 0.5 else dict.fromkeys(results)
            fill(self.made, before)
            run = self.signalled(sent, words)
            told = complaints(run, self.made, results, before, final, sent=run.sent)
            self.assertEqual(told, [], f"{name}, signal {run.sent}, seed {SEED}, status {run.status}: {run.err[-300:]}")
            sent, runs = sent + (run.sent != 0), runs + 1
        print(f"check_kills: {name}: {sent} signals in {runs} runs", flush=True)
        self.assertEqual(sent, args.signals, f"{name} is too fast for its signals, seed {SEED}")
        self.assertEqual(self.whole(words, results), final)      # what is left there is in nobody's way

    def test_export(self):
        for name, target in EXPORTS.items():
            self.check(name, ["export", "a.npy", "--out", "out/" + target], [target.rstrip("/")])

    def test_generate(self):
        self.check("generate", ["generate", *CLIP, "--frames", 5, "--steps", 2, "--out", "out/v.y4m"], ["v.y4m"])

    def test_calibrate_goes_on(self):
        words = ["calibrate", *CLIP, "--frames", 9, "--steps", 2, "--num-prompts", 3, "--output", "out/m"]
        final = self.whole(words, ["m"])
        sent, runs, through = 0, 0, 0
        while sent < args.signals:
            before = {"m": None}
            fill(self.made, before)
            for attempt in range(6):        # the last comes through
                there = set(names_below(self.made, ["m"]))
                if attempt == 5 or sent == args.signals:
                    run, number = Ended([args.esa, *words], self.dir, self.env, SECONDS), 0
                    self.assertEqual(run.status, 0, run.err)
                else:
                    run = self.signalled(4 * (attempt % 2) + sent % 4, words)
                    number = run.sent
                told = complaints(run, self.made, ["m"], before, final, "m.part", number, there)
                self.assertEqual(told, [], f"calibrate, signal {number}, seed {SEED}: {run.err[-300:]}")
                sent, runs = sent + (number != 0), runs + 1
                if run.status == 0:
                    break
            self.assertEqual(contents(os.path.join(self.made, "m")), final["m"], f"seed {SEED}")
            stays = [name for name in os.listdir(self.made) if not TEMPORARY.search(name)]
            self.assertEqual(stays, ["m"], f"seed {SEED}")
            through += 1
        print(f"check_kills: calibrate: {sent} signals in {runs} runs, {through} came through", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("esa", type=os.path.abspath)
    parser.add_argument("models", type=os.path.abspath)
    parser.add_argument("--signals", type=int, default=40)
    args = parser.parse_args()
    unittest.main(argv=sys.argv[:1])
