#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `esa serve` refuses: check_serve_refusals.py ESA MODELS. Requests that are wrong, too long or too slow, clients
without the key, pages of other sites, options that contradict one another. Standard library only."""
import os
import re
import socket
import struct
import sys
import tempfile
import time
import unittest
import zlib

import kit
import serve_kit
from serve_kit import LONG, TINY, form

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
serve_kit.Served.esa = ESA
serve_kit.Served.env = {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "ESA_MODELS": MODELS}


def png(width=8, height=8):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(3 * width) for _ in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


class Refusals(serve_kit.Served):
    options = ("--max-prompt", 300, "--max-pixels", 1 << 22, "--max-body", 1 << 16)

    def wrong(self, fields, *words, param=None, status=400):
        return self.refused(status, self.server.ask("POST", "/v1/videos", fields), *words, param=param)

    def test_fields(self):
        for fields, param, word in (
            ({}, "prompt", "prompt is needed"), ({"prompt": " \n"}, "prompt", "needed"), ({"prompt": 5}, "prompt",
                                                                                          "text"),
            ({"prompt": "x" * 301}, "prompt", "301 bytes"), ({"promt": "x"}, "promt", "did you mean prompt?"),
            ({"size": "64"}, "size", "WIDTHxHEIGHT"), ({"size": "0x64"}, "size", "WIDTHxHEIGHT"),
            ({"size": "64x64x64"}, "size", "WIDTHxHEIGHT"), ({"size": "99999x64"}, "size", "WIDTHxHEIGHT"),
            ({"size": "60x64"}, "size", "multiple of 8"), ({"height": 20}, "height", "multiple of 8"),
            ({"size": "64x64", "width": 72}, "size", "same thing"), ({"seconds": 0}, "seconds", "above 0"),
            ({"seconds": "x"}, "seconds", "number"), ({"seconds": 1e9}, "seconds", "100000"),
            ({"num_frames": 0}, "num_frames", "1 .. 100000"), ({"num_frames": 1.5}, "num_frames", "whole number"),
            ({"num_frames": 9, "seconds": 0}, "seconds", "above 0"),
            ({"generate_sound": True}, "generate_sound", "only be false"),
            ({"guidance_scale_2": 3}, "guidance_scale_2", "one transformer"),
            ({"frame_interpolation_exp": 2}, "frame_interpolation_exp", "only be 1"), ({"user": 5}, "user", "text"),
            ({"seed": -1}, "seed", "0 .. 9e+15"),
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
                self.wrong({**({} if "prompt" in fields or not fields else {"prompt": "x"}), **fields}, word,
                           param=param)
        self.wrong({"prompt": "x", "model": "other"}, "no model 'other'", param="model", status=404)

    def test_options(self):
        for options, param, word in (
            ({"preset": "fst"}, "esa.preset", "did you mean fast?"), ({"presets": "fast"}, "esa.presets",
                                                                      "did you mean preset?"),
            ({"steps": 0}, "esa.steps", "1 .. 10000"), ({"work": 2}, "esa.work", "0.01 .. 1"),
            ({"steps": [1, 2]}, "esa.steps", "whole number"), ({"steps": {"a": 1}}, "esa.steps", "must be a number"),
            ({"work": 0.5, "preset": "fast"}, "esa", "say the same thing"),
            ({"carry": "no"}, "esa", "expected auto, off"),
            ({"budget": 0.5, "work": 0.5}, "esa", "say the same thing"), ({"block": "8"}, "esa", "8"),
            ({"method": "cached"}, "esa", "needs --masks"), ({"masks": "mine"}, "esa.masks", "no mask file 'mine'"),
            ({"masks": "/etc/passwd"}, "esa.masks", "no mask file"), ({"plan": "x"}, "esa.plan", "no work plan"),
            ({"lora": "../a"}, "esa.lora", "no LoRA"), ({"lora": ["a:b"]}, "esa.lora", "NAME:SCALE"),
            ({"method": "dense", "compare": True}, "esa", "another --method"), ({"compare": "maybe"}, "esa.compare",
                                                                                "true"),
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
        for body in (b"", b"{", b"[]", b"null", b'{"prompt":"x","prompt":"y"}', b'{"prompt":"\xff"}',
                     b'{"prompt":"a\\u0000b"}',
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
        for path in ("/nothing", "/v1", "/v1/videosx", "/v1/videos/", "/v1/videos/../../etc/passwd",
                     "/v1/videos/%2e%2e",
                     "/v1/videos/video_gen_0/other", "/v1/videos/" + "a" * 200, "/v1/videos/a/b/content"):
            self.refused(404, self.server.get(path))

    def test_other_sites(self):
        ask = self.server.ask
        own = f"localhost:{self.server.port}"
        self.refused(403, ask("GET", "/health", headers={"Host": "evil.example"}), "evil.example")
        self.refused(403, ask("GET", "/", headers={"Host": f"evil.example:{self.server.port}"}))
        self.refused(403, ask("POST", "/v1/videos", TINY, {"Host": own, "Origin": "http://evil.example"}),
                     "other sites")
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
                                   (["--work", 0.5, "--preset", "fast"], 2, "same thing"), (["--keep", 0], 2,
                                                                                            "at least 1"),
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


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
