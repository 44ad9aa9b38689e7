#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa serve` as clients see it: check_serve.py ESA MODELS. Every endpoint, comparison, cancelling,
models. Standard library only. check_serve_refusals.py has what is refused, check_serve_life.py ends servers,
check_serve_load.py loads them."""
import json
import os
import re
import statistics
import sys
import time
import unittest

import kit
import serve_kit
from serve_kit import LONG, SMALL, TINY, form

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
serve_kit.Served.esa = ESA
serve_kit.Served.env = {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "ESA_MODELS": MODELS}


class Api(serve_kit.Served):

    def test_what_it_is(self):
        health = self.server.get("/health")
        self.assertEqual((health.status, health.json["status"]), (200, "ok"))
        model, = self.server.get("/v1/models").json["data"]
        self.assertEqual((model["id"], model["object"]), ("wan-tiny", "model"))
        own = model["esa"]
        self.assertEqual(own["defaults"], {"width": 128, "height": 128, "frames": 33, "steps": 8, "guidance": 2.5,
                                           "fps": 16, "preset": "balanced"})
        self.assertEqual((own["image"], own["presets"]), ("none", ["faithful", "balanced", "fast"]))
        self.assertEqual(own["multiple"]["width"], 8)
        api = self.server.get("/openapi.json").json
        self.assertEqual(api["openapi"], "3.1.0")
        self.assertNotIn("security", api)
        options = api["components"]["schemas"]["Esa"]["properties"]
        code, text, _ = kit.run(ESA, "generate", "--help")
        self.assertEqual(code, 0)
        elsewhere = {"prompt", "prompts", "num-prompts", "out", "output-dir", "compare", "lpips", "dense-out",
                     "beside-out", "prompt-embeds", "save-embeds", "latents", "save-latents", "check",
                     "transformer", "transformer-2",
                     "hold", "json", "image", "model", "threads", "device", "linear", "keep", "max-vram",
                     "dtype"}
        known = set(re.findall(r"^  --([a-z0-9-]+)", text, re.M))
        self.assertEqual(set(options) - {"compare"}, known - elsewhere)   # a new option is thought about
        self.assertEqual(options["preset"]["enum"], ["faithful", "balanced", "fast"])

    def test_metrics(self):
        text = self.server.get("/metrics")
        self.assertTrue(text.headers["content-type"].startswith("text/plain; version=0.0.4"))
        samples = {}
        for line in text.body.decode().splitlines():
            if line.startswith("#"):
                self.assertRegex(line, r"^# (HELP esa_\w+ .+\.|TYPE esa_\w+ (gauge|counter))$")
            else:
                found = re.fullmatch(r'(esa_\w+(?:\{\w+="[^"]*"\})?) (\S+)', line)
                self.assertTrue(found, line)
                samples[found[1]] = float(found[2])
        self.assertEqual(samples['esa_model_warm{model="wan-tiny"}'] in (0, 1), True)
        self.assertGreaterEqual(samples['esa_http_connections'], 1)

    def test_page(self):
        page = self.server.get("/")
        self.assertEqual(page.status, 200)
        self.assertIn("default-src 'self'", page.headers["content-security-policy"])
        self.assertIn(b"<title>", page.body)
        for name in ("page.css", "prompts_tiny.txt", "openapi.json.", "../esa", "%2e%2e/esa"):
            self.refused(404, self.server.get(f"/{name}"))                 # only its own files

    def test_a_video(self):
        s = self.server
        made = s.ask("POST", "/v1/videos", {**SMALL, "seed": 5, "fps": 8, "esa": {"preset": "fast", "block": "16x16"}})
        self.assertEqual(made.status, 200, made.body)
        job = made.json
        self.assertRegex(job["id"], r"^video_gen_[0-9a-f]{32}$")
        self.assertIn(job["status"], ("queued", "in_progress"))
        self.assertEqual((job["object"], job["model"], job["prompt"], job["size"]),
                         ("video", "wan-tiny", "a red ball", "64x64"))
        self.assertEqual(job["esa"]["request"]["esa"], {"preset": "fast", "block": "16x16"})
        done = s.wait(job["id"])
        self.assertEqual((done["status"], done["progress"], done["error"]), ("completed", 100, None), done)
        self.assertEqual((done["num_frames"], done["fps"], done["esa"]["seed"], done["seconds"]), (9, 8, 5, "1"))
        self.assertEqual((done["esa"]["step"], done["esa"]["steps"], done["esa"]["preset"]), (4, 4, "fast"))
        self.assertEqual(done["esa"]["variants"], ["sparse", "preview"])
        self.assertGreater(done["esa"]["work"], 0)
        self.assertGreaterEqual(done["completed_at"], done["created_at"])
        url = f"/v1/videos/{job['id']}/content"
        video = s.get(url)
        self.assertEqual((video.status, video.headers["content-type"]), (200, "video/mp4"))
        self.assertEqual(video.body[4:8], b"ftyp")
        size = len(video.body)
        for text, piece in (("bytes=0-9", video.body[:10]), ("bytes=10-", video.body[10:]),
                            ("bytes=-5", video.body[-5:]), (f"bytes=3-{size + 9}", video.body[3:]),
                            (f"bytes=-{size + 9}", video.body)):
            part = s.get(url, Range=text)
            self.assertEqual((part.status, part.body), (206, piece), text)
            first = size - len(piece) if not text.startswith("bytes=0") else 0
            self.assertEqual(part.headers["content-range"], f"bytes {first}-{first + len(piece) - 1}/{size}")
        for text in (f"bytes={size}-", "bytes=-0", "bytes=99999999999999999999-"):
            part = s.get(url, Range=text)
            self.refused(416, part)
            self.assertEqual(part.headers["content-range"], f"bytes */{size}")
        for text in ("bytes=a-", "bytes=5-2", "bytes=0-1,4-5", "lines=1-2", "bytes=1-2x"):
            self.assertEqual(s.get(url, Range=text).status, 200, text)
        tag = video.headers["etag"]
        self.assertEqual(s.get(url, If_None_Match=tag).status, 304)
        self.assertEqual(s.get(url, Range="bytes=0-1", If_Range=tag).status, 206)
        self.assertEqual(s.get(url, Range="bytes=0-1", If_Range='"other"').status, 200)
        head = s.ask("HEAD", url)
        self.assertEqual((head.status, head.headers["content-length"], head.body), (200, str(size), b""))
        picture = s.get(f"{url}?variant=preview")
        self.assertEqual((picture.headers["content-type"], picture.body[:4]), ("image/png", b"\x89PNG"))
        self.refused(404, s.get(f"{url}?variant=dense"), param="variant")
        self.refused(400, s.get(f"{url}?variant=../x"), param="variant")
        gone = s.ask("DELETE", f"/v1/videos/{job['id']}")
        self.assertEqual(gone.json, {"id": job["id"], "object": "video.deleted", "deleted": True})
        self.refused(404, s.get(f"/v1/videos/{job['id']}"))
        self.refused(404, s.get(url))
        self.refused(404, s.ask("DELETE", f"/v1/videos/{job['id']}"))
        self.assertFalse([name for name in os.listdir(s.folder) if job["id"] in name])

    def test_the_same_as_generate(self):
        """A video of the server has the bytes of `esa generate` with the same options."""
        name = self.server.make(**SMALL, seed=3, negative_prompt="blue",
                                esa={"work": 0.9, "carry": 2, "cache": "auto", "mp4-quality": 90})
        done = self.server.wait(name)
        self.assertEqual(done["status"], "completed", done["error"])
        path = os.path.join(self.temporary.name, "same.mp4")
        code, _, err = kit.run(ESA, "generate", "--prompt", "a red ball", "--negative-prompt", "blue", "--frames", 9,
                               "--height", 64, "--width", 64, "--steps", 4, "--seed", 3, "--work", 0.9, "--carry", 2,
                               "--cache", "auto", "--mp4-quality", 90, "--out", path, *kit.ONE, env=self.env)
        self.assertEqual(code, 0, err)
        self.assertEqual(self.server.get(f"/v1/videos/{name}/content").body, kit.read(path))

    def test_a_failure(self):
        """What only the engine can see ends a job with its words."""
        name = self.server.make(**SMALL, esa={"work": 0.1})
        done = self.server.wait(name)
        self.assertEqual((done["status"], done["error"]["code"]), ("failed", "generation_failed"))
        self.assertRegex(done["error"]["message"], r"^work is 0\.1, but at the lowest density .*\.$")
        self.refused(422, self.server.get(f"/v1/videos/{name}/content"), "lowest density")
        self.refused(500, self.server.ask("POST", "/v1/videos/sync", {**SMALL, "esa": {"work": 0.1}}), "lowest density")

    def test_form(self):
        body, kind = form([("prompt", "a red ball"), ("size", "64x64"), ("seconds", "0.5"),
                           ("num_inference_steps", "2"), ("esa.preset", "fast"), ("esa[seed]", "4"),
                           ("esa", json.dumps({"block": "16x16"})),
                           ("negative_prompt", "")])
        made = self.server.ask("POST", "/v1/videos", body, {"Content-Type": kind})
        self.assertEqual(made.status, 200, made.body)
        done = self.server.wait(made.json["id"])
        self.assertEqual((done["status"], done["num_frames"]), ("completed", 9), done)   # 0.5 s at 16, and the first
        self.assertEqual(done["esa"]["settings"], {"preset": "fast", "seed": "4", "block": "16x16"})
        self.assertEqual(done["esa"]["seed"], 4)

    def test_sync(self):
        answer = self.server.ask("POST", "/v1/videos/sync", TINY)
        self.assertEqual((answer.status, answer.headers["content-type"], answer.body[4:8]), (200, "video/mp4", b"ftyp"))
        self.assertEqual(answer.headers["x-model"], "wan-tiny")
        self.assertGreater(float(answer.headers["x-inference-time-s"]), 0)
        self.assertEqual(self.server.job(answer.headers["x-request-id"])["status"], "completed")
        self.refused(400, self.server.ask("POST", "/v1/videos/sync", {"prompt": ""}), param="prompt")

    def test_sync_client_goes(self):
        """A client that waits and goes away takes its video along."""
        data = json.dumps(LONG).encode()

        other = self.server.raw(b"POST /v1/videos/sync HTTP/1.1\r\nHost: localhost\r\n"
                                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        while not (running := self.server.get("/health").json["running"]):
            time.sleep(0.05)
        other.close()
        done = self.server.wait(running)
        self.assertEqual(done["status"], "failed")
        self.assertIn("went away", done["error"]["message"])

    def test_compare(self):
        name = self.server.make(**SMALL, esa={"compare": True, "work": 0.8})
        passes = {data["pass"] for _, kind, data in self.server.events(name) if kind == "progress"}
        self.assertEqual(passes, {0, 1})
        done = self.server.job(name)
        self.assertEqual(done["esa"]["variants"], ["sparse", "dense", "beside", "preview"])
        compare = done["esa"]["compare"]
        self.assertTrue(compare["psnr"] > 5 and 0 < compare["ssim"] <= 1 and compare["speedup"] > 0, compare)
        videos = {v: self.server.get(f"/v1/videos/{name}/content?variant={v}").body
                  for v in ("sparse", "dense", "beside")}
        self.assertEqual(len(set(videos.values())), 3)
        for video in videos.values():
            self.assertEqual(video[4:8], b"ftyp")
        self.assertEqual(self.server.get(f"/v1/videos/{name}/content").body, videos["sparse"])

    def test_events(self):
        name = self.server.make(**{**SMALL, "num_inference_steps": 8})
        seen = list(self.server.events(name))
        kinds = [kind for _, kind, _ in seen]
        self.assertEqual((kinds[0], kinds[-1]), ("job", "job"))
        self.assertEqual(seen[-1][2]["status"], "completed")
        ids = [number for number, _, _ in seen]
        self.assertEqual(ids, sorted(ids))
        steps = [data for _, kind, data in seen if kind == "progress"]
        self.assertTrue(any(data["stage"] == "denoise" for data in steps))
        for before, after in zip(steps, steps[1:]):
            self.assertLessEqual(before["progress"], after["progress"])
            self.assertLessEqual(before["step"], after["step"])
        previews = [data for _, kind, data in seen if kind == "preview"]
        self.assertTrue(previews)
        self.assertEqual(previews[0]["url"],
                         f"/v1/videos/{name}/content?variant=preview&step={previews[0]['step']}")
        self.assertEqual(self.server.get(previews[-1]["url"]).body[:4], b"\x89PNG")
        late = list(self.server.events(name))                             # of a finished job: its end
        self.assertEqual([(kind, data["status"]) for _, kind, data in late], [("job", "completed")])
        self.refused(404, self.server.get("/v1/videos/video_gen_0/events"))

    def test_list(self):
        names = [self.server.make(**TINY, seed=i) for i in range(5)]
        for name in names:
            self.server.wait(name)
        newest = self.server.get("/v1/videos?limit=3").json
        self.assertEqual((newest["object"], [j["id"] for j in newest["data"]]), ("list", names[:-4:-1]))
        self.assertEqual((newest["first_id"], newest["last_id"], newest["has_more"]), (names[4], names[2], True))
        rest = self.server.get(f"/v1/videos?after={names[2]}&limit=2").json
        self.assertEqual([j["id"] for j in rest["data"]], [names[1], names[0]])
        rising = self.server.get(f"/v1/videos?order=asc&after={names[2]}").json
        self.assertEqual([j["id"] for j in rising["data"]], names[3:])
        self.assertFalse(rising["has_more"])
        self.assertEqual(self.server.get("/v1/videos?limit=0").json["data"], [])
        for query, param in (("limit=101", "limit"), ("limit=-1", "limit"), ("limit=x", "limit"), ("limit=", "limit"),
                             ("order=up", "order")):
            self.refused(400, self.server.get(f"/v1/videos?{query}"), param=param)
        self.refused(404, self.server.get("/v1/videos?after=video_gen_0"), param="after")


class Times(serve_kit.Served):
    """Under sanitizers a step takes minutes, so these are left out there."""

    def test_cancel(self):
        """DELETE stops a video within four blocks: long before its step ends. The next one starts."""
        name = self.server.make(**LONG)
        after = self.server.make(**TINY)
        while self.server.get("/health").json["running"] != name:      # a new server opens its model first
            time.sleep(0.005)
        self.assertEqual(self.server.job(after)["esa"]["queue_position"], 1)
        stream = self.server.events(name)
        begun = []
        for _, kind, data in stream:
            if kind == "progress" and data["stage"] == "denoise":
                begun.append(data["seconds"])
            if len(begun) == 3:
                break
        step = begun[2] - begun[1]
        began = time.monotonic()
        self.assertEqual(self.server.ask("DELETE", f"/v1/videos/{name}").status, 200)
        while self.server.get("/health").json["running"] == name:
            time.sleep(0.005)
        took = time.monotonic() - began
        print(f"a step takes {step:.2f} s, cancelling took {took:.2f} s", flush=True)
        # wan-tiny has 8 blocks for each of two branches, so four are a quarter of a step; as much again, and a
        # constant, for a machine that does other things meanwhile
        self.assertLess(took, 0.5 * step + 0.5)
        self.assertEqual([data["status"] for _, kind, data in stream if kind == "job"], ["deleted"])
        self.assertEqual(self.server.wait(after)["status"], "completed")
        self.assertFalse([file for file in os.listdir(self.server.folder) if name in file])

    def test_warm(self):
        """A second request on a warm model begins its first step in under 0.1 s."""
        ready = []
        self.server.wait(self.server.make(**TINY))
        for seed in range(7):
            done = self.server.wait(self.server.make(**SMALL, seed=seed))
            ready.append(done["esa"]["seconds_to_first_step"])
        print(f"first steps after {min(ready):.4f} .. {max(ready):.4f} s, median {statistics.median(ready):.4f} s",
              flush=True)
        # The prompt is known, so only latents and the session are made: milliseconds. Half of them may meet a
        # machine that is busy with other tests.
        self.assertLess(statistics.median(ready), 0.1)


class Names(serve_kit.Served):
    """Two models; defaults of requests."""
    options = ("--model", "first=wan-tiny", "--model", f"{MODELS}/wan-tiny", "--preset", "fast", "--steps", 2)

    def test_models(self):
        self.assertEqual([m["id"] for m in self.server.get("/v1/models").json["data"]], ["first", "wan-tiny"])
        fields = {k: v for k, v in SMALL.items() if k != "num_inference_steps"}
        for model in ("wan-tiny", "first", None):
            done = self.server.wait(self.server.make(**fields, **({"model": model} if model else {})))
            self.assertEqual((done["status"], done["model"], done["esa"]["steps"]),
                             ("completed", model or "first", 2), done)
            warm = [m["id"] for m in self.server.get("/v1/models").json["data"] if m["esa"]["warm"]]
            self.assertEqual(warm, [model or "first"])
        # the request's way of saying how much work takes the place of the server's
        done = self.server.wait(self.server.make(**fields, esa={"method": "entropy", "budget": 0.5}))
        self.assertEqual(done["status"], "completed", done)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
