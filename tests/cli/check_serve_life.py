#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa serve` that ends and begins again: check_serve_life.py ESA MODELS. Signals, kill -9 at moments of chance, two
servers on one folder, records that are damaged. Standard library only. ESA_TEST_SEED sets the seed, ESA_TEST_KILLS the
number of kills (3)."""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import unittest

import kit
import serve_kit
from serve_kit import LONG, SMALL, TINY

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "ESA_MODELS": MODELS}
SEED = int(os.environ.get("ESA_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
KILLS = int(os.environ.get("ESA_TEST_KILLS") or 3)


class Life(kit.Folder):

    def server(self, *options):
        return serve_kit.Server(ESA, self.path("out"), *kit.ONE, *options, env=ENV)

    def test_second_server(self):
        with self.server():
            code, out, err = kit.run(ESA, "serve", "--port", 0, "--output-dir", self.path("out"), env=ENV)
            self.assertEqual((code, out), (1, ""))
            self.assertIn("another server uses the folder", err)
            with serve_kit.Server(ESA, self.path("other"), env=ENV) as other:
                self.assertEqual(other.get("/health").status, 200)
        with self.server() as again:                                      # the lock went with its process
            self.assertEqual(again.get("/health").status, 200)

    def test_signals(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            s = self.server()
            finished = s.make(**TINY)
            s.wait(finished)
            running, waiting = s.make(**LONG), s.make(**TINY)
            s.wait(running, until=("in_progress",))
            stream = s.events(running)
            next(stream)
            began = time.monotonic()
            self.assertEqual(s.stop(number), 0)
            print(f"{number.name}: stopped after {time.monotonic() - began:.2f} s", flush=True)
            with self.server() as again:
                self.assertEqual(again.job(finished)["status"], "completed")
                job = again.job(running)
                self.assertEqual(job["status"], "failed")
                self.assertIn("server was stopped", job["error"]["message"])
                self.assertEqual(again.wait(waiting)["status"], "completed")

    def test_twice(self):
        """A second signal ends the process at once."""
        s = self.server()
        running = s.make(**{**LONG, "size": "256x256"})
        s.wait(running, until=("in_progress",))
        s.process.send_signal(signal.SIGINT)
        time.sleep(0.02)
        status = s.stop(signal.SIGINT)
        self.assertIn(status, (0, 130))                                   # 0: it had stopped before

    def test_kill(self):
        """kill -9 at moments of chance: what was finished stays, byte for byte; what waited is made; what ran has
        failed, and says why; nothing half written is served."""
        print(f"ESA_TEST_SEED={SEED}", flush=True)
        chance = random.Random(SEED)
        seen, count = {}, 0                                               # finished videos and their bytes
        for kill in range(KILLS):
            s = self.server("--keep", 1000)                               # all of them: none is old enough to go
            new = [s.make(**(SMALL if chance.random() < 0.2 else TINY), seed=kill * 100 + i) for i in range(12)]
            end = time.monotonic() + chance.uniform(0, 5)
            while time.monotonic() < end:
                for name in new:
                    if name not in seen and s.job(name)["status"] == "completed":
                        seen[name] = s.get(f"/v1/videos/{name}/content").body
            known = {name: s.job(name)["status"] for name in new}
            s.stop(signal.SIGKILL)
            with self.server("--keep", 1000) as again:
                for name, status in known.items():
                    job = again.job(name)
                    self.assertIn(job.get("status"), ("queued", "in_progress", "completed", "failed"), (name, status))
                    if status == "completed":
                        self.assertEqual(job["status"], "completed")
                    if job["status"] == "failed":
                        self.assertIn("server ended while", job["error"]["message"])
                        self.assertEqual(again.get(f"/v1/videos/{name}/content").status, 422)
                        count += 1
                self.assertLessEqual(sum(again.job(name)["status"] == "failed" for name in new), 1)
                for name in new:
                    again.wait(name)
                for name, video in seen.items():
                    self.assertEqual(again.get(f"/v1/videos/{name}/content").body, video)
                listed = [j["id"] for j in again.get("/v1/videos?limit=100").json["data"]]
                self.assertTrue(set(new) <= set(listed))
            self.assertFalse([file for file in self.files() if file.endswith(".tmp")])
        print(f"{KILLS} kills, {len(seen)} videos finished before one, {count} were being made", flush=True)

    def test_leftovers(self):
        """Temporary files of killed writers go; damaged records and the files of others stay."""
        with self.server() as s:
            name = s.make(**TINY)
            s.wait(name)
        other = "video_gen_" + "ab" * 16
        self.put(f"out/{other}.json", "{ not JSON")
        self.put(f"out/{'video_gen_' + 'cd' * 16}.json", json.dumps({"record": "esa serve 1", "id": name}))
        self.put("out/notes.json", "{}")
        self.put("out/notes.json.0123abcd.tmp", "x")
        self.put(f"out/{name}.mp4.0123abcd.tmp", "x")
        with self.server() as s:
            self.assertEqual([j["id"] for j in s.get("/v1/videos").json["data"]], [name])
            self.assertEqual(s.said().count("is left alone"), 2)
        left = set(self.files())
        self.assertNotIn(f"out/{name}.mp4.0123abcd.tmp", left)
        self.assertTrue({f"out/{other}.json", "out/notes.json", "out/notes.json.0123abcd.tmp"} <= left)
        os.remove(self.path("out", name + ".mp4"))                        # its owner took the video away
        with self.server() as s:
            self.assertIn("was removed", s.job(name)["error"]["message"])

    def test_model_is_gone(self):
        with self.server("--model", "mine=wan-tiny") as s:
            s.make(**LONG)
            waiting = s.make(**TINY, model="mine")
        with self.server() as s:
            job = s.job(waiting)
            self.assertEqual(job["status"], "failed")
            self.assertIn("no longer has the model mine", job["error"]["message"])

    def test_folder(self):
        self.put("file", "x")
        for folder in ("file", "file/below"):
            code, _, err = kit.run(ESA, "serve", "--port", 0, "--output-dir", self.path(folder), env=ENV)
            self.assertEqual(code, 1, err)

    def test_disk_full(self):
        """A job whose record cannot be written is refused, and the server goes on."""
        with self.server() as s:
            s.wait(s.make(**TINY))
            shutil.rmtree(s.folder)
            answer = s.ask("POST", "/v1/videos", TINY)
            self.assertEqual(answer.status, 507, answer.body)
            self.assertIn("cannot be written", answer.json["error"]["message"])
            os.mkdir(s.folder)
            self.assertEqual(s.wait(s.make(**TINY))["status"], "completed")

    def test_without_library(self):
        """Without libmicrohttpd the command says what to install. The loader is made to fail with an empty file."""
        folder = self.path("lib")
        os.mkdir(folder)
        for name in ("libmicrohttpd.so.12", "libmicrohttpd.so"):
            self.put(f"lib/{name}", "no library")
        done = subprocess.run([ESA, "serve", "--port", "0", "--output-dir", self.path("out")], capture_output=True,
                              text=True, timeout=60, check=False, env={**ENV, "LD_LIBRARY_PATH": folder})
        self.assertEqual(done.returncode, 1)
        self.assertIn("apt-get install libmicrohttpd", done.stderr)
        self.assertFalse(os.path.exists(self.path("out")))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
