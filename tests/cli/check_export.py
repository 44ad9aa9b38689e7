#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa export`, and the readers below it on files of other programs: check_export.py ESA MODELS [CLASS ...]. Standard
library only.

Every failure must be one message on stderr, an exit status, and nothing left on disk."""
import math
import os
import struct
import sys
import unittest
import zlib

import kit
import schemas
import video_files as vf

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])


class Base(kit.Folder):
    begins = "esa: export: "

    def call(self, *args, cwd=None, env=None, command="export"):
        return kit.run(ESA, command, *args, cwd=cwd, env={**os.environ, **(env or {})})


class Pictures(Base):
    def pixels(self, name):
        self.works(name, "--out", "out.npy")
        return vf.read_npy(self.path("out.npy"))

    def test_every_kind(self):
        kinds = ((0, (1, 2, 4, 8, 16)), (2, (8, 16)), (3, (1, 2, 4, 8)), (4, (8, 16)), (6, (8, 16)))
        for interlaced, height, width in ((0, 9, 13), (1, 9, 13), (1, 1, 2), (1, 3, 1)):
            for colour, depth in ((colour, depth) for colour, depths in kinds for depth in depths):
                n = vf.CHANNELS[colour]
                most, count = (1 << depth) - 1, height * width * n
                raw = vf.noise(2 * count, 16 * colour + depth)
                samples = [v % (most + 1) for v in struct.unpack(f">{count}H", raw)]
                palette = vf.noise(3 * (most + 1), 5) if colour == 3 else b""
                self.put(
                    "a.png",
                    vf.png(samples, height, width, colour, depth, seed=depth, palette=palette, interlaced=interlaced,
                           extra=vf.chunk(b"tEXt", b"a\0b")))
                want = bytearray()
                for i in range(height * width):
                    pixel = samples[i * n:i * n + n]
                    if colour == 3:
                        want += palette[3 * pixel[0]:3 * pixel[0] + 3]
                    else:
                        rgb = pixel[:3] if colour in (2, 6) else pixel[:1] * 3
                        want += bytes(math.floor(v * 255 / most + 0.5) for v in rgb)
                self.assertEqual(self.pixels("a.png"), ((1, height, width, 3), bytes(want)),
                                 (colour, depth, interlaced))

    def test_sixteen_bits(self):
        """Every value of 16 bits becomes the nearest of 8."""
        self.put("a.png", vf.png(list(range(65536)), 256, 256, 0, 16))
        self.assertEqual(self.pixels("a.png")[1][::3], bytes(math.floor(v / 257 + 0.5) for v in range(65536)))

    def test_transparency_is_dropped(self):
        """Neither a transparent colour nor the gamma of the file changes a byte."""
        samples = list(vf.noise(300, 2))
        for kind, body in ((b"tRNS", struct.pack(">HHH", *samples[:3])), (b"gAMA", struct.pack(">I", 100000)),
                           (b"tRNS", b"damaged, but not needed")):
            self.put("a.png", vf.png(samples, 10, 10, 2, 8, extra=vf.chunk(kind, body)))
            self.assertEqual(self.pixels("a.png")[1], bytes(samples), (kind, body))
        self.put("b.png", vf.png([1, 0] * 50, 10, 10, 3, 1, palette=b"abcdef", extra=vf.chunk(b"tRNS", b"\0\x80")))
        self.assertEqual(self.pixels("b.png")[1], b"defabc" * 50)

    def test_every_packing(self):
        """Stored, fixed and dynamic blocks, runs, one code only, IDAT in pieces."""
        height, width = 60, 70
        gradient = [v for y in range(height) for x in range(width) for v in (x * 3 % 256, (y + x) % 256, 7)]
        flat = [9, 9, 9] * (height * width)
        random_ = list(vf.noise(height * width * 3, 3))
        for samples in (gradient, flat, random_):
            for level, strategy in ((0, zlib.Z_DEFAULT_STRATEGY), (1, zlib.Z_DEFAULT_STRATEGY),
                                    (9, zlib.Z_DEFAULT_STRATEGY), (6, zlib.Z_FIXED), (6, zlib.Z_HUFFMAN_ONLY),
                                    (6, zlib.Z_RLE)):
                self.put(
                    "a.png",
                    vf.png(samples, height, width, 2, 8, seed=level, level=level, strategy=strategy, pieces=1 + level))
                self.assertEqual(self.pixels("a.png")[1], bytes(samples), (level, strategy))

    def test_refusals(self):
        samples = list(vf.noise(300, 1))
        good, inter = vf.png(samples, 10, 10, 2, 8), vf.png(samples, 10, 10, 2, 8, interlaced=1)

        def header(width, height):
            return vf.chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))

        for name, data, word in (
            ("cut", good[:-20], "too early"),
            ("cut-interlaced", inter[:-20], "too early"),
            ("pixels", good[:45] + b"\x7f" + good[46:], "IDAT"),
            ("crc", good[:-13] + bytes([good[-13] ^ 1]) + good[-12:], "CRC"),
            ("text-crc", good[:33] + vf.chunk(b"tEXt", b"a\0b")[:-1] + b"\0" + good[33:], "CRC"),
            ("huge", good[:16] + struct.pack(">I", 100000) + good[20:], "CRC"),
            ("large", good[:8] + header(16385, 1) + good[33:], "16385 x 1"),
            ("zero", good[:8] + header(0, 1) + good[33:], "IHDR"),
            ("nopalette", vf.png([0] * 100, 10, 10, 3, 8), "PLTE"),
            ("index", vf.png([5] * 100, 10, 10, 3, 8, palette=b"abc"), "palette"),
            ("unknown", good[:33] + vf.chunk(b"ABCD", b"") + good[33:], "critical chunk"),
            ("few", good[:8] + header(10, 11) + good[33:], "Not enough"),
            ("many", good[:8] + header(10, 9) + good[33:], "Too much"),
            ("bomb", good[:8] + header(16000, 16000) + good[33:], "too early"),
        ):
            self.put(name + ".png", data)
            self.fails(name + ".png", "--out", "x.npy", says=[name + ".png", word])

    def test_folder_in_order(self):
        for i in (0, 2, 10, 1):
            self.put(f"clip/shot{i}.png", vf.png([i] * 12, 2, 2, 2, 8))
        self.put("clip/notes.txt", b"not a picture")
        self.works("clip", "--out", "a.npy")
        self.assertEqual(vf.read_npy(self.path("a.npy")),
                         ((4, 2, 2, 3), bytes([0] * 12 + [1] * 12 + [2] * 12 + [10] * 12)))
        self.put("clip/shot3.png", vf.png([0] * 27, 3, 3, 2, 8))
        self.fails("clip", "--out", "b.npy", says=["shot3.png", "3 x 3", "2 x 2"])


class Raw(Base):
    def test_y4m(self):
        """Against the definition in floating point: the nearest level, but for the last digits."""
        height, width = 7, 11

        def rgb(y, u, v, full):
            luma = y if full else (y - 16) * 255 / 219
            b, r = (u - 128) * (1 if full else 255 / 224), (v - 128) * (1 if full else 255 / 224)
            out = (luma + 1.402 * r, luma - 0.344136 * b - 0.714136 * r, luma + 1.772 * b)
            return [min(max(x, 0), 255) for x in out]

        def chroma(plane, x, y, across, down, columns, rows, left):
            def at(p, n, k, place):
                """Samples around pixel p and their weights; sample i stands at pixel i * k + place."""
                where = (p - place) / k
                low = math.floor(where)
                return [(min(max(low, 0), n - 1), 1 - (where - low)), (min(max(low + 1, 0), n - 1), where - low)]

            return sum(plane[j * columns + i] * a * b
                       for i, a in at(x, columns, across, 0 if left or across == 1 else 0.5)
                       for j, b in at(y, rows, down, 0.5 if down == 2 else 0))

        for name, across, down, planes, left in (("420jpeg", 2, 2, 3, 0), ("420mpeg2", 2, 2, 3, 1), ("422", 2, 1, 3, 1),
                                                 ("444", 1, 1, 3, 0), ("444alpha", 1, 1, 4, 0), ("mono", 1, 1, 1, 0)):
            for full in (False, True):
                rows, columns = -(-height // down), -(-width // across)
                luma, extra = vf.noise(height * width, 1), [vf.noise(rows * columns, s) for s in (2, 3)]
                frame = luma + (b"".join(extra) if planes >= 3 else b"") + (luma if planes == 4 else b"")
                head = f"YUV4MPEG2 W{width} H{height} F25:2 Ip A1:1 C{name}" + (" XCOLORRANGE=FULL"
                                                                                if full else "") + "\n"
                self.put("a.y4m", head.encode() + b"FRAME\n" + frame + b"FRAME Xa=b\n" + frame)
                self.assertIn("at 12.5 a second", self.works("a.y4m", "--out", "a.npy"))
                shape, got = vf.read_npy(self.path("a.npy"))
                self.assertEqual(shape, (2, height, width, 3))
                self.assertEqual(got[:len(got) // 2], got[len(got) // 2:])
                for y in range(height):
                    for x in range(width):
                        u, v = (chroma(p, x, y, across, down, columns, rows, left) if planes >= 3 else 128
                                for p in extra)
                        for have, want in zip(got[(y * width + x) * 3:], rgb(luma[y * width + x], u, v, full)):
                            self.assertLess(abs(have - want), 0.51, (name, full, x, y))
        for data, word in ((b"YUV4MPEG2 W4 H4 C420p10\nFRAME\n" + bytes(48),
                            "C420p10"), (b"YUV4MPEG2 W4 H4 C444\nFRAME\n" + bytes(47), "incomplete"),
                           (b"YUV4MPEG2 W4 H4\n", "no frames"), (b"YUV4MPEG2 W0 H4\nFRAME\n",
                                                                 "0 x 4"), (b"YUV4MPEG2 W4 H4", "no end")):
            self.put("bad.y4m", data)
            self.fails("bad.y4m", "--out", "x.npy", says=["bad.y4m", word])

    def test_tensors(self):
        data = vf.noise(2 * 3 * 4 * 3, 1)
        shape = (2, 3, 4, 3)
        floats = {
            "<f4": struct.pack("<72f", *(v / 255 for v in data)), "<f8": struct.pack("<72d", *(v / 255 for v in data)),
            "<f2": struct.pack("<72e", *(v / 255 for v in data))
        }
        for word, raw in (("|u1", data), *floats.items()):
            for version, dims in ((1, shape), (2, (1, *shape))):
                self.put("a.npy", vf.npy(raw, dims, word, version=version))
                self.works("a.npy", "--out", "b.npy")
                self.assertEqual(vf.read_npy(self.path("b.npy")), (shape, data), (word, version))
        for name, dtype, raw in (("frames", "U8", data), ("frames", "F32", floats["<f4"]), ("video", "F16",
                                                                                            floats["<f2"])):
            self.put("a.safetensors", vf.safetensors({name: (dtype, shape, raw)}, {"fps": "24"}))
            self.assertIn("24 a second", self.works("a.safetensors", "--out", "b.npy"))
            self.assertEqual(vf.read_npy(self.path("b.npy"))[1], data)
        for dtype in ("u8", "f32", "f16"):
            self.works("b.npy", "--out", f"{dtype}.safetensors", "--dtype", dtype, "--fps", 12)
            self.works(f"{dtype}.safetensors", "--out", "c.npy")
            self.assertEqual(vf.read_npy(self.path("c.npy"))[1], data, dtype)

    def test_refusals(self):
        data, u8 = bytes(72), (2, 3, 4, 3)
        for name, raw, words in (("first.npy", vf.npy(data, (2, 3, 3, 4)),
                                  ["channels come second",
                                   "permute(0, 2, 3, 1)"]), ("order.npy", vf.npy(data, u8, order="True"),
                                                             ["Fortran"]), ("big.npy", vf.npy(data * 4, u8,
                                                                                              ">f4"), ["'>f4'"]),
                                 ("int.npy", vf.npy(data * 8, u8,
                                                    "<i8"), ["'<i8'"]), ("few.npy", vf.npy(data[:-1],
                                                                                           u8), ["71 bytes", "72"]),
                                 ("minus.npy", vf.npy(struct.pack("<72f", *[-1.0] * 72), u8,
                                                      "<f4"), ["-1", "[0, 1]"]), ("flat.npy", vf.npy(data,
                                                                                                     (72, )), ["[72]"]),
                                 ("two.npy", vf.npy(data, (2, 1, 3, 4, 3)), ["one video per file"]),
                                 ("huge.npy", vf.npy(data, (2**40, 2**40, 4, 3)),
                                  ["72 bytes"]), ("none.npy", b"\x93NUMPY\x01\x00\xff\xff{", ["damaged"]),
                                 ("many.safetensors", vf.safetensors({"a": ("U8", u8, data), "b": ("U8", u8, data)}),
                                  ["none of them is called frames"
                                   ]), ("bool.safetensors", vf.safetensors({"frames": ("BOOL", u8, data)}),
                                        ["BOOL"]), ("x.pt", b"PK\x03\x04" + bytes(60),
                                                    ["ZIP",
                                                     "safetensors"]), ("text.mp4", b"no video" * 30, ["text.mp4"])):
            self.put(name, raw)
            self.fails(name, "--out", "out.y4m", says=[name, *words])


class References(Base):
    def test_no_other_file(self):
        """Files that name a readable secret beside them: nothing of it comes out."""
        self.put("a.npy", vf.npy(vf.moving(3, 32, 48), (3, 32, 48, 3)))
        code, _, err = self.call("a.npy", "--out", "secret.mp4", cwd=self.dir)
        if code and "no FFmpeg" in err:
            kit.skip(self, "built without FFmpeg")
        self.assertEqual(code, 0, err)
        self.works("a.npy", "--out", "secret/")
        os.rename(self.path("secret/00000.png"), self.path("secret000.png"))
        self.put("notes.txt", "words that must not become pictures\n")
        mpd = ('<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
               'mediaPresentationDuration="PT1S" profiles="urn:mpeg:dash:profile:isoff-main:2011"><Period>'
               '<AdaptationSet mimeType="video/mp4">'
               '<Representation id="0" bandwidth="9"><BaseURL>@/secret.mp4</BaseURL></Representation></AdaptationSet>'
               "</Period></MPD>\n")
        hls = "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\n@/secret.mp4\n#EXT-X-ENDLIST\n"
        for name, text in (("concat.mp4", "ffconcat version 1.0\nfile notes.txt\n"),
                           ("movie.mkv", "ffconcat version 1.0\nfile secret.mp4\n"), ("list.mp4", hls),
                           ("dash.mp4", mpd), ("secret%03d.png", "a pattern of pictures\n")):
            self.put(name, text.replace("@", self.dir))
            for out in ("out.npy", "out/"):
                self.fails(name, "--out", out, says=[name])
        self.fails("notes.txt", "--out", "out.npy", says=["notes.txt"])


class Export(Base):
    def test_round_trips(self):
        frames, height, width = 7, 32, 48
        video = vf.moving(frames, height, width)
        self.put("a.npy", vf.npy(video, (frames, height, width, 3)))
        code, _, err = self.call("a.npy", "--out", "a.mp4", "--codec", "lossless", "--fps", 12, cwd=self.dir)
        if code and "no FFmpeg" in err:
            kit.skip(self, "built without FFmpeg")
        self.assertEqual(code, 0, err)
        self.assertIn("at 12 a second", self.works("a.mp4", "--out", "b.safetensors"))
        self.works("b.safetensors", "--out", "pictures/")
        self.assertEqual(sorted(os.listdir(self.path("pictures"))), [f"{i:05d}.png" for i in range(frames)])
        self.works("pictures", "--out", "c.npy")
        # every pixel, through four forms
        self.assertEqual(vf.read_npy(self.path("c.npy")), ((frames, height, width, 3), video))
        sizes = []
        for quality in (20, 60, 95):
            out = self.works("a.npy", "--out", "q.mp4", "--quality", quality, "--json", "q.json")
            self.assertIn("a.npy -> q.mp4: 7 frames of 48 x 32 at 16 a second", out)
            files = schemas.check(self.path("q.json"), "export")["files"]
            self.assertEqual((files[0]["output"], files[0]["bytes"]), ("q.mp4", os.path.getsize(self.path("q.mp4"))))
            sizes.append(files[0]["bytes"])
            self.works("q.mp4", "--out", "q.npy")
            got = vf.read_npy(self.path("q.npy"))[1]
            error = sum((x - y) ** 2 for x, y in zip(got, video)) / len(video)
            # hard edges in chroma at 4:2:0; a wrong matrix gives under 20
            self.assertGreater(10 * math.log10(65025 / error), 24)
        self.assertTrue(sizes[0] < sizes[1] < sizes[2], sizes)

    def test_folder(self):
        """As the original's export_mp4: a folder's tensors, each beside itself."""
        for name in ("000", "001"):
            self.put(f"results/{name}.safetensors",
                     vf.safetensors({"frames": ("U8", (2, 16, 16, 3), vf.moving(2, 16, 16))}))
        self.put("results/metrics.json", b"{}")
        self.put("results/masks.safetensors", vf.safetensors({"mask.0500.bits": ("U8", (4,), bytes(4))}))
        self.put("results/.hidden.npy", b"")
        out = self.works("results", "--to", "y4m")
        self.assertEqual(len(out.splitlines()), 2)
        self.assertEqual(
            sorted(os.listdir(self.path("results"))),
            sorted([
                ".hidden.npy", "000.safetensors", "000.y4m", "001.safetensors", "001.y4m", "masks.safetensors",
                "metrics.json"
            ]))
        self.works("results", "--to", "y4m")                              # again: from the tensors, not from the copies
        self.assertIn("has that format already", self.works("results", "--to", "safetensors"))
        self.works("results", "--to", "png", "--output-dir", "deep/er")
        self.assertEqual(sorted(os.listdir(self.path("deep/er"))), ["000", "001"])
        self.works("deep/er", "--to", "npy", "--output-dir", "flat")
        self.assertEqual(vf.read_npy(self.path("flat/001.npy"))[1], vf.moving(2, 16, 16))

    def test_words(self):
        self.put("a.npy", vf.npy(bytes(12), (1, 2, 2, 3)))
        self.put("b.npy", vf.npy(bytes(12), (1, 2, 2, 3)))
        os.mkdir(self.path("empty"))
        self.fails(status=2, says=["no video"])
        self.fails("a.npy", "b.npy", "--out", "c.y4m", status=2, says=["--output-dir"])
        self.fails("a.npy", "--out", "c.y4m", "--output-dir", "d", status=2, says=["give one"])
        self.fails("a.npy", "--out", "c.y4m", "--to", "y4m", status=2, says=["--to"])
        for name in ("c.gif", "c.webm", "c", "--"):
            self.fails("a.npy", f"--out={name}", status=2, says=["must end in", ".mp4"])
        self.fails("a.npy", "--out=", status=2, says=["--out"])
        self.fails("a.npy", "--codec", "vp8", status=2, says=["vp8", "h264"])
        self.fails("a.npy", "--quality", "101", status=2, says=["101"])
        self.fails("a.npy", "--qualty", "10", status=2, says=["--quality"])
        self.fails("a.npy", "--to", "npy", says=["over itself"])
        self.fails("none.npy", says=["none.npy", "No such file"])
        self.fails("empty", says=["empty", "no videos"])
        self.fails("a.npy", "--out", "new/folder/x.gif.mp4", "--codec", "hevc", "--quality", "0", status=2,
                   says=["quality"])
        self.put("odd.npy", vf.npy(bytes(27), (1, 3, 3, 3)))
        code, out, err = self.call("odd.npy", "--out", "new/x.mp4", cwd=self.dir)
        self.assertEqual((code, out), (1, ""))
        self.assertIn("x.mp4", err)
        self.assertFalse(os.path.exists(self.path("new")))                # the folder is taken back
        code, out, err = self.call("--help")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("usage: esa export", out)


class Latents(Base):
    """What `esa generate` decodes is what `esa export --vae` makes of its latents."""

    def test_like_generate(self):
        code, _, err = self.call("--frames", 5, "--height", 32, "--width", 48, "--steps", 1, "--method", "dense",
                                 "--out", "made/", "--save-latents", "x.safetensors", command="generate", cwd=self.dir,
                                 env={"ESA_MODELS": MODELS})
        self.assertEqual(code, 0, err)
        for vae in (os.path.join(MODELS, "wan-tiny"), os.path.join(MODELS, "wan-tiny", "vae")):
            self.assertIn("5 frames of 48 x 32", self.works("x.safetensors", "--vae", vae, "--out", "back/"))
            for name in os.listdir(self.path("made")):
                self.assertEqual(vf.read(self.path("made/" + name)), vf.read(self.path("back/" + name)))
        self.fails("x.safetensors", "--out", "y.y4m", status=2, says=["latents", "--vae"])
        self.fails("x.safetensors", "--vae", "nowhere", "--out", "y.y4m", says=["nowhere"])
        self.put("bad.safetensors", vf.safetensors({"latents": ("F32", (3, 1, 2, 2), bytes(48))}))
        code, out, err = self.call("bad.safetensors", "--vae", os.path.join(MODELS, "wan-tiny"), "--out", "y.y4m",
                                   cwd=self.dir)
        self.assertEqual((code, out, len(err.splitlines())), (1, "", 1))
        self.assertIn("[3, 1, 2, 2]", err)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
