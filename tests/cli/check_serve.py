#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa serve` as clients see it: check_serve.py ESA MODELS. Every endpoint, every refusal, keys, limits, comparison,
cancelling. Standard library only. check_serve_life.py ends servers, check_serve_load.py loads them."""
import json
import os
import re
import socket
import statistics
import struct
import sys
import time
import unittest
import zlib

import kit
import serve_kit
from serve_kit import LONG, SMALL, TINY, form

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
serve_kit.Served.esa = ESA
serve_kit.Served.env = {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "ESA_MODELS": MODELS}


def png(width=8, height=8):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(3 * width) for _ in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


class Api(serve_kit.Served):

    def test_what_it_is(self):
        health = self.server.get("/health")
        self.assertEqual((health.status, health.json["status"]), (200, "ok"))
        model, = self.server.get("/v1/models").json["data"]
        self.assertEqual((model["id"], model["object"]), ("wan-tiny", "model"))
        own = model["esa"]
        self.assertEqual(own["defaults"], {"width": 128, "height": 128, "frames": 33, "steps": 8, "guidance": 2.5,
                                           "fps": 16})
        self.assertEqual((own["image"], own["presets"]), ("none", ["faithful", "balanced", "fast"]))
        self.assertEqual(own["multiple"]["width"], 8)
        api = self.server.get("/openapi.json").json
        self.assertEqual(api["openapi"], "3.1.0")
        self.assertNotIn("security", api)
        options = api["components"]["schemas"]["Esa"]["properties"]
        code, text, _ = kit.run(ESA, "generate", "--help")
        self.assertEqual(code, 0)
        elsewhere = {"prompt", "prompts", "num-prompts", "out", "output-dir", "compare", "lpips", "dense-out", "beside-out",
                     "prompt-embeds", "save-embeds", "latents", "save-latents", "check", "transformer", "transformer-2",
                     "hold", "json", "image", "model", "threads", "device", "linear", "keep", "max-vram"}
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
        body, kind = form([("prompt", "a red ball"), ("size", "64x64"), ("seconds", "0.5"), ("num_inference_steps", "2"),
                           ("esa.preset", "fast"), ("esa[seed]", "4"), ("esa", json.dumps({"block": "16x16"})), ("negative_prompt", "")])
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
        other = self.server.raw(b"POST /v1/videos/sync HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                                b"Content-Length: %d\r\n\r\n" % len(data) + data)
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
        videos = {v: self.server.get(f"/v1/videos/{name}/content?variant={v}").body for v in ("sparse", "dense", "beside")}
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

    def test_cancel(self):
        """DELETE stops a video within four blocks: long before its step ends. The next one starts."""
        name = self.server.make(**LONG)
        after = self.server.make(**TINY)
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


class Refusals(serve_kit.Served):
    options = ("--max-prompt", 300, "--max-pixels", 1 << 22, "--max-body", 1 << 16)

    def wrong(self, fields, *words, param=None, status=400):
        return self.refused(status, self.server.ask("POST", "/v1/videos", fields), *words, param=param)

    def test_fields(self):
        for fields, param, word in (
            ({}, "prompt", "prompt is needed"), ({"prompt": " \n"}, "prompt", "needed"), ({"prompt": 5}, "prompt", "text"),
            ({"prompt": "x" * 301}, "prompt", "301 bytes"), ({"promt": "x"}, "promt", "did you mean prompt?"),
            ({"size": "64"}, "size", "WIDTHxHEIGHT"), ({"size": "0x64"}, "size", "WIDTHxHEIGHT"),
            ({"size": "64x64x64"}, "size", "WIDTHxHEIGHT"), ({"size": "99999x64"}, "size", "WIDTHxHEIGHT"),
            ({"size": "60x64"}, "size", "multiple of 8"), ({"height": 20}, "height", "multiple of 8"),
            ({"size": "64x64", "width": 64}, "size", "same thing"), ({"seconds": 0}, "seconds", "above 0"),
            ({"seconds": "x"}, "seconds", "number"), ({"seconds": 1e9}, "seconds", "100000"),
            ({"num_frames": 0}, "num_frames", "1 .. 100000"), ({"num_frames": 1.5}, "num_frames", "whole number"),
            ({"num_frames": 9, "seconds": 1}, "seconds", "same thing"), ({"seed": -1}, "seed", "0 .. 9e+15"),
            ({"num_inference_steps": 100000}, "num_inference_steps", "1 .. 10000"),
            ({"guidance_scale": True}, "guidance_scale", "number"), ({"fps": 0}, "fps", "0.01 .. 1000"),
            ({"n": 2}, "n", "one video"), ({"size": "1024x1024", "num_frames": 99}, "size", "at most 4194304"),
            ({"image_reference": "http://example.com/a.png"}, "image_reference", "fetches nothing"),
            ({"image_reference": {"url": "file:///etc/passwd"}}, "image_reference", "fetches nothing"),
            ({"image_reference": "data:image/png;base64,!!!"}, "image_reference", "no base64"),
            ({"image_reference": "data:image/png;base64,aGVsbG8="}, "image_reference", "no PNG"),
            ({"extra_body": {"bad": 1}}, "bad", "no field"), ({"extra_body": 1}, "extra_body", "object"),
            ({"extra_body": {"extra_body": {}}}, "extra_body", "of its kind"),
            ({"extra_params": {"seed": 1}, "seed": 1}, "seed", "twice"),
        ):
            with self.subTest(fields=fields):
                self.wrong({**({} if "prompt" in fields or not fields else {"prompt": "x"}), **fields}, word, param=param)
        self.wrong({"prompt": "x", "model": "other"}, "no model 'other'", param="model", status=404)

    def test_options(self):
        for options, param, word in (
            ({"preset": "fst"}, "esa.preset", "did you mean fast?"), ({"presets": "fast"}, "esa.presets", "did you mean preset?"),
            ({"steps": 0}, "esa.steps", "1 .. 10000"), ({"work": 2}, "esa.work", "0.01 .. 1"),
            ({"steps": [1, 2]}, "esa.steps", "whole number"), ({"steps": {"a": 1}}, "esa.steps", "must be a number"),
            ({"work": 0.5, "preset": "fast"}, "esa", "say the same thing"), ({"carry": "no"}, "esa", "expected auto, off"),
            ({"budget": 0.5, "work": 0.5}, "esa", "say the same thing"), ({"block": "8"}, "esa", "8"),
            ({"method": "cached"}, "esa", "needs --masks"), ({"masks": "mine"}, "esa.masks", "no mask file 'mine'"),
            ({"masks": "/etc/passwd"}, "esa.masks", "no mask file"), ({"plan": "x"}, "esa.plan", "no work plan"),
            ({"lora": "../a"}, "esa.lora", "no LoRA"), ({"lora": ["a:b"]}, "esa.lora", "NAME:SCALE"),
            ({"method": "dense", "compare": True}, "esa", "another --method"), ({"compare": "maybe"}, "esa.compare", "true"),
            ({"image": "/etc/passwd"}, "esa.image", "no option"), ({"out": "x"}, "esa.out", "no option"),
            ({"prompt-embeds": "/x"}, "esa.prompt-embeds", "no option"), ({"model": "x"}, "esa.model", "no option"),
            ({"UPPER": 1}, "esa", "no option"), ({"seed": 1.5}, "esa.seed", "whole number"),
            ({"layers16": [0]}, "esa", "need --precision 8"), ({"sigmas": [2]}, "esa.sigmas", "0 .. 1"),
        ):
            with self.subTest(options=options):
                self.wrong({"prompt": "x", "esa": options}, word, param=param)
        self.wrong({"prompt": "x", "seed": 1, "esa": {"seed": 1}}, "same thing", param="seed")
        self.wrong({"prompt": "x", "esa": 5}, "object", param="esa")
        self.wrong({"prompt": "x", "esa": {"guidance_2": 1, "guidance-2": 1}}, "twice", param="esa.guidance-2")

    def test_bodies(self):
        ask = self.server.ask
        kind = {"Content-Type": "application/json"}
        self.refused(415, ask("POST", "/v1/videos", b"x", {"Content-Type": "text/plain"}))
        self.refused(415, ask("POST", "/v1/videos", b"{}", {}))
        for body in (b"", b"{", b"[]", b"null", b'{"prompt":"x","prompt":"y"}', b'{"prompt":"\xff"}', b'{"prompt":"a\\u0000b"}',
                     b"[" * 5000, b'{"esa":' * 20, b'{"seed":1e999,"prompt":"x"}', b'{"prompt":"x"} more'):
            self.refused(400, ask("POST", "/v1/videos", body, kind))
        mark = {"Content-Type": "multipart/form-data; boundary=b"}
        for body in (b"", b"--b", b"--b\r\n\r\nx\r\n--b--", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--",
                     b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx',
                     b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n\xff\r\n--b--',
                     b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\0b\r\n--b--'):
            self.refused(400, ask("POST", "/v1/videos", body, mark))
        self.refused(400, ask("POST", "/v1/videos", b"--b--", {"Content-Type": "multipart/form-data"}), "boundary")
        body, kind = form([("prompt", "x")], [("prompt2", "a", b"x")])
        self.refused(400, ask("POST", "/v1/videos", body, {"Content-Type": kind}), "takes no file", param="prompt2")
        body, kind = form([("prompt", "x")], [("input_reference", "a.png", png())])
        self.refused(400, ask("POST", "/v1/videos", body, {"Content-Type": kind}), "takes no picture")
        body, kind = form([("prompt", "x")], [("input_reference", "a.png", png(4, 9000))])
        self.refused(400, ask("POST", "/v1/videos", body, {"Content-Type": kind}), "4 x 9000", param="input_reference")

    def test_too_long(self):
        """A body that is too long is refused before it comes, one whose length was not said when it is."""
        other = self.server.raw(b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                                b"Content-Length: 99999999\r\n\r\n{")
        head = other.recv(4096)
        self.assertTrue(head.startswith(b"HTTP/1.1 413 "), head)
        other.close()
        pieces = b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(20)) + b"0\r\n\r\n"
        other = self.server.raw(b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                                b"Transfer-Encoding: chunked\r\n\r\n" + pieces)
        head = other.recv(4096)
        self.assertTrue(head.startswith(b"HTTP/1.1 413 "), head)
        other.close()
        other = self.server.raw(b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:                                                              # one that does not end is cut off
            for _ in range(2000):
                other.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            self.fail("8 MB were taken of a body of 64 KB")
        except (BrokenPipeError, ConnectionResetError):
            pass
        other.close()
        self.assertEqual(self.server.get("/health").status, 200)

    def test_methods(self):
        for method, path, allowed in (("PUT", "/v1/videos", "GET, HEAD, POST"), ("GET", "/v1/videos/sync", "POST"),
                                      ("POST", "/v1/videos/video_gen_0", "GET, HEAD, DELETE"),
                                      ("POST", "/v1/videos/video_gen_0/content", "GET, HEAD"),
                                      ("DELETE", "/v1/videos/video_gen_0/events", "GET, HEAD"),
                                      ("POST", "/health", "GET, HEAD"), ("OPTIONS", "/v1/models", "GET, HEAD")):
            answer = self.server.ask(method, path)
            self.refused(405, answer)
            self.assertEqual(answer.headers["allow"], allowed)
        for path in ("/nothing", "/v1", "/v1/videosx", "/v1/videos/", "/v1/videos/../../etc/passwd", "/v1/videos/%2e%2e",
                     "/v1/videos/video_gen_0/other", "/v1/videos/" + "a" * 200, "/v1/videos/a/b/content"):
            self.refused(404, self.server.get(path))

    def test_other_sites(self):
        ask = self.server.ask
        own = f"localhost:{self.server.port}"
        self.refused(403, ask("GET", "/health", headers={"Host": "evil.example"}), "evil.example")
        self.refused(403, ask("GET", "/", headers={"Host": f"evil.example:{self.server.port}"}))
        self.refused(403, ask("POST", "/v1/videos", TINY, {"Host": own, "Origin": "http://evil.example"}), "other sites")
        self.refused(403, ask("POST", "/v1/videos", TINY, {"Host": own, "Origin": "null"}))
        self.assertEqual(ask("GET", "/v1/models", headers={"Host": own, "Origin": f"http://{own}"}).status, 200)
        self.assertEqual(ask("GET", "/health", headers={"Host": f"[::1]:{self.server.port}"}).status, 200)


class Limits(serve_kit.Served):
    options = ("--timeout", 1, "--max-queue", 2, "--keep", 2)

    def cut_off(self, data, seconds):
        """The server ends a connection that sends one byte every half a second."""
        other = self.server.raw(data)
        other.settimeout(0.5)
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            try:
                if not other.recv(4096):
                    break
                self.fail("an answer to half a request")
            except TimeoutError:
                pass
            except ConnectionResetError:
                break
            try:
                other.send(b"a")
            except (BrokenPipeError, ConnectionResetError):
                break
        else:
            self.fail(f"still open after {seconds} s")
        other.close()

    def test_slow_clients(self):
        self.cut_off(b"GET /health HT", 15)
        self.cut_off(b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", 15)
        self.cut_off(b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{", 25)
        self.cut_off(b"", 15)
        self.assertEqual(self.server.get("/health").status, 200)

    def test_queue(self):
        running = self.server.make(**LONG)
        self.server.wait(running, until=("in_progress",))
        waiting = [self.server.make(**TINY) for _ in range(2)]
        self.assertEqual([self.server.job(name)["esa"]["queue_position"] for name in waiting], [1, 2])
        full = self.server.ask("POST", "/v1/videos", TINY)
        self.refused(429, full, "2 videos wait")
        self.assertIn("retry-after", full.headers)
        self.assertEqual(self.server.ask("DELETE", f"/v1/videos/{waiting[0]}").status, 200)
        self.assertEqual(self.server.job(waiting[1])["esa"]["queue_position"], 1)
        self.server.ask("DELETE", f"/v1/videos/{running}")
        self.assertEqual(self.server.wait(waiting[1])["status"], "completed")

    def test_keep(self):
        mine = os.path.join(self.server.folder, "holiday.mp4")
        like = os.path.join(self.server.folder, "video_gen_" + "0" * 32 + ".mp4")
        for path in (mine, like):
            with open(path, "wb") as file:
                file.write(b"mine")
        names = []
        for seed in range(4):
            names.append(self.server.make(**TINY, seed=seed))
            self.server.wait(names[-1])
        end = time.monotonic() + 20
        while len(left := [j["id"] for j in self.server.get("/v1/videos").json["data"]]) > 2 and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(left, names[:1:-1])
        files = os.listdir(self.server.folder)
        self.assertFalse([file for file in files for name in names[:2] if name in file])
        self.assertEqual((kit.read(mine), kit.read(like)), (b"mine", b"mine"))

    def test_crowd(self):
        others = [self.server.raw() for _ in range(128)]
        try:
            answer = self.server.get("/health")
            self.refused(503, answer, "128 connections")
        finally:
            for other in others:
                other.close()
        end = time.monotonic() + 20
        while self.server.get("/health").status != 200:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)


class Keys(serve_kit.Served):
    KEY = "a-secret-key-0123456789"

    @classmethod
    def setUpClass(cls):
        import tempfile
        cls.keys = tempfile.NamedTemporaryFile("w", suffix=".key")
        cls.keys.write(cls.KEY + "\n")
        cls.keys.flush()
        cls.options = ("--api-key-file", cls.keys.name, "--host", "0.0.0.0")
        super().setUpClass()

    def test_key(self):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {self.KEY}x"},
                        {"Authorization": f"Bearer {self.KEY[:-1]}"}, {"Authorization": "Bearer "},
                        {"Authorization": f"Basic {self.KEY}"}):
            for method, path in (("GET", "/v1/videos"), ("GET", "/v1/models"), ("GET", "/metrics"),
                                 ("GET", "/v1/videos/video_gen_0/content"), ("DELETE", "/v1/videos/video_gen_0"),
                                 ("GET", "/v1/videos/video_gen_0/events")):
                answer = self.server.ask(method, path, headers=headers)
                self.refused(401, answer)
                self.assertEqual(answer.headers["www-authenticate"], "Bearer")
            self.refused(401, self.server.ask("POST", "/v1/videos", TINY, headers))
        for path in ("/", "/health", "/openapi.json"):
            self.assertEqual(self.server.get(path).status, 200)
        self.assertEqual(self.server.get("/openapi.json").json["security"], [{"key": []}])
        self.server.key = self.KEY
        self.assertEqual(self.server.get("/v1/videos").json["data"], [])
        self.assertEqual(self.server.get("/v1/models", Host="my.machine.example").status, 200)
        name = self.server.make(**TINY)
        self.assertEqual(list(self.server.events(name))[-1][2]["status"], "completed")
        self.assertNotIn(self.KEY, self.server.said())


class Words(kit.Folder):
    """Options that are refused before a server starts."""
    call = staticmethod(lambda *args, cwd=None: kit.run(ESA, "serve", *args, cwd=cwd, env=serve_kit.Served.env))

    def test_help(self):
        out = self.works("--help")
        for option in ("--host", "--port", "--api-key-file", "--insecure", "--model", "--output-dir", "--keep",
                       "--max-queue", "--lora", "--masks", "--preset", "--device", "--max-vram", "--threads"):
            self.assertEqual(len(re.findall(rf"^  {option}\b(?!-)", out, re.M)), 1, option)

    def test_refusals(self):
        self.put("short.key", "short")
        self.put("spaces.key", "a key with spaces in it")
        self.put("a.lora", "x")
        for args, status, word in ((["--host", "0.0.0.0"], 2, "--api-key-file"), (["--host", "::"], 2, "--insecure"),
                                   (["--port", 70000], 2, "65535"), (["--api-key-file", "none.key"], 1, "none.key"),
                                   (["--api-key-file", "short.key"], 1, "16 to 4096"),
                                   (["--api-key-file", "spaces.key"], 1, "without spaces"),
                                   (["--lora", "x"], 2, "NAME=FILE"), (["--lora", "x=none"], 1, "no file 'none'"),
                                   (["--lora", "x=a.lora", "--lora", "x=a.lora"], 2, "twice"),
                                   (["--masks", "a b=x"], 2, "NAME=FILE"), (["--model", "nothing"], 1, "nothing"),
                                   (["--model", "wan-tiny", "--model", "wan-tiny"], 2, "two models"),
                                   (["--work", 0.5, "--preset", "fast"], 2, "same thing"), (["--keep", 0], 2, "at least 1"),
                                   (["--method", "cached"], 2, "masks by their name"), (["word"], 2, "unexpected word"),
                                   (["--image", "x.png"], 2, "--image")):
            with self.subTest(args=args):
                self.fails(*args, status=status, says=[word] if word != "at least 1" else [])

    def test_port_in_use(self):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            code, _, err = self.call("--port", other.getsockname()[1], cwd=self.dir)
            self.assertEqual(code, 1)
            self.assertIn("cannot listen on 127.0.0.1", err)


class Names(serve_kit.Served):
    """Two models; defaults of requests."""
    options = ("--model", "first=wan-tiny", "--model", f"{MODELS}/wan-tiny", "--preset", "fast", "--steps", 2)

    def test_models(self):
        self.assertEqual([m["id"] for m in self.server.get("/v1/models").json["data"]], ["first", "wan-tiny"])
        fields = {k: v for k, v in SMALL.items() if k != "num_inference_steps"}
        for model in ("wan-tiny", "first", None):
            done = self.server.wait(self.server.make(**fields, **({"model": model} if model else {})))
            self.assertEqual((done["status"], done["model"], done["esa"]["steps"]), ("completed", model or "first", 2), done)
            warm = [m["id"] for m in self.server.get("/v1/models").json["data"] if m["esa"]["warm"]]
            self.assertEqual(warm, [model or "first"])
        # the request's way of saying how much work takes the place of the server's
        done = self.server.wait(self.server.make(**fields, esa={"method": "entropy", "budget": 0.5}))
        self.assertEqual(done["status"], "completed", done)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
