#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the writers of PNG, Y4M and MP4 leave on disk, read back by other code: check_media.py MAKE_MEDIA. Standard
library only."""
import os
import random
import struct
import subprocess
import sys
import unittest
import zlib

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import kit  # noqa: E402

MAKE = sys.argv[1]


def picture(kind, height, width, seed=0):
    """RGB bytes: noise (cannot be packed), flat, or a gradient with an edge (every filter of PNG is of use
    somewhere)."""
    if kind == "noise":
        return random.Random(seed).randbytes(height * width * 3)
    if kind == "flat":
        return bytes([200, 30, 90]) * (height * width)
    rows = bytearray()
    for y in range(height):
        for x in range(width):
            rows += bytes([(x * 3 + seed) % 256, (y * 2 + x // 2) % 256, 255 if (x + y + seed) % 50 < 25 else y % 256])
    return bytes(rows)


def read_png(path):
    """(height, width, RGB bytes), everything checked that a decoder checks."""
    with open(path, "rb") as file:
        data = file.read()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, []
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at:at + 8])
        body, check = data[at + 8:at + 8 + size], struct.unpack(">I", data[at + 8 + size:at + 12 + size])[0]
        assert check == zlib.crc32(kind + body), kind
        chunks.append((kind, body))
        at += 12 + size
    kinds = [kind for kind, _ in chunks]
    assert kinds == [b"IHDR"] + [b"IDAT"] * (len(kinds) - 2) + [b"IEND"] and len(kinds) >= 3, kinds
    width, height, *settings = struct.unpack(">II5B", chunks[0][1])
    assert settings == [8, 2, 0, 0, 0]
    plain = zlib.decompress(b"".join(body for _, body in chunks[1:-1]))
    line = width * 3
    assert len(plain) == height * (line + 1)
    out, above = bytearray(), bytes(line)
    for y in range(height):
        kind, row = plain[y * (line + 1)], bytearray(plain[y * (line + 1) + 1:(y + 1) * (line + 1)])
        for i in range(line):
            a, b, c = (row[i - 3] if i >= 3 else 0), above[i], (above[i - 3] if i >= 3 else 0)
            p = a + b - c
            nearest = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
            row[i] = (row[i] + [0, a, b, (a + b) // 2, nearest][kind]) % 256
        out += row
        above = row
    return height, width, bytes(out)


def boxes(data):
    """The boxes of an MP4, by path, first of each."""
    found = {}

    def walk(data, path):
        at = 0
        while at + 8 <= len(data):
            size, kind = struct.unpack(">I4s", data[at:at + 8])
            name = path + kind.decode("latin1")
            assert size >= 8 and at + size <= len(data), name
            found.setdefault(name, data[at + 8:at + size])
            if kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
                walk(data[at + 8:at + size], name + "/")
            at += size
    walk(data, "")
    return found


class Media(kit.Folder):
    def make(self, pictures, height, width, fps, name):
        with open(self.path("raw"), "wb") as file:
            file.write(b"".join(pictures))
        done = subprocess.run(
            [MAKE, self.path("raw"),
             str(len(pictures)),
             str(height),
             str(width), str(fps),
             self.path(name)], capture_output=True, text=True)
        os.unlink(self.path("raw"))
        return done

    def test_png(self):
        for kind in ("noise", "flat", "gradient"):
            for height, width in ((1, 1), (3, 2), (64, 96), (37, 211)):
                want = picture(kind, height, width)
                self.assertEqual(self.make([want], height, width, 16, "a.png").returncode, 0)
                self.assertEqual(read_png(self.path("a.png")), (height, width, want), (kind, height, width))
        self.make([picture("gradient", 240, 320)], 240, 320, 16, "b.png")
        self.assertLess(os.path.getsize(self.path("b.png")), 240 * 320 * 3 / 4)         # it does pack

    def test_long_matches(self):
        want = bytes(300 * 300 * 3)                     # one run, longer than the window
        self.make([want], 300, 300, 16, "a.png")
        self.assertEqual(read_png(self.path("a.png"))[2], want)
        self.assertLess(os.path.getsize(self.path("a.png")), 4000)

    def test_folder(self):
        pictures = [picture("gradient", 16, 24, seed) for seed in range(7)]
        self.assertEqual(self.make(pictures, 16, 24, 16, "out/").returncode, 0)
        self.assertEqual(sorted(os.listdir(self.path("out"))), [f"{i:05d}.png" for i in range(7)])
        for i, want in enumerate(pictures):
            self.assertEqual(read_png(self.path(f"out/{i:05d}.png"))[2], want)
        # an older one is replaced as a whole
        self.assertEqual(self.make(pictures[:2], 16, 24, 16, "out/").returncode, 0)
        self.assertEqual(sorted(os.listdir(self.path("out"))), ["00000.png", "00001.png"])
        with open(self.path("out/mine"), "w"):
            pass
        done = self.make(pictures, 16, 24, 16, "out/")
        self.assertEqual(done.returncode, 1)
        self.assertIn("not pictures", done.stderr)
        self.assertEqual(sorted(os.listdir(self.path("out"))), ["00000.png", "00001.png", "mine"])
        self.assertEqual(os.listdir(self.dir), ["out"])

    def test_y4m(self):
        for fps, want in ((16, b"16:1"), (24000 / 1001, b"24000:1001"), (12.5, b"12500:1000")):
            pictures = [picture("gradient", 10, 14, seed) for seed in range(3)]
            self.assertEqual(self.make(pictures, 10, 14, fps, "a.y4m").returncode, 0)
            with open(self.path("a.y4m"), "rb") as file:
                head, data = file.read().split(b"\n", 1)
            self.assertEqual(head, b"YUV4MPEG2 W14 H10 F" + want + b" Ip A1:1 C444 XCOLORRANGE=LIMITED")
            for source in pictures:
                self.assertEqual(data[:6], b"FRAME\n")
                y, u, v = (data[6 + i * 140:6 + (i + 1) * 140] for i in range(3))
                data = data[6 + 3 * 140:]
                for i in range(140):
                    r, g, b = source[3 * i:3 * i + 3]
                    luma = 0.299 * r + 0.587 * g + 0.114 * b
                    exact = (16 + luma * 219 / 255, 128 + (b - luma) / 1.772 * 224 / 255,
                             128 + (r - luma) / 1.402 * 224 / 255)
                    for got, wanted in zip((y[i], u[i], v[i]), exact):
                        self.assertLess(abs(got - wanted), 0.52)        # rounding, and coefficients of 16 bits
            self.assertEqual(data, b"")

    def test_mp4(self):
        pictures = [picture("gradient", 48, 64, seed) for seed in range(9)]
        done = self.make(pictures, 48, 64, 16, "a.mp4")
        if "no FFmpeg" in done.stderr:
            self.assertEqual((done.returncode, os.listdir(self.dir)), (1, []))
            kit.skip(self, "built without FFmpeg")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        with open(self.path("a.mp4"), "rb") as file:
            first = file.read()
        found = boxes(first)
        self.assertEqual(next(iter(found)), "ftyp")
        table = "moov/trak/mdia/minf/stbl/"
        self.assertEqual(struct.unpack(">I", found[table + "stsz"][8:12])[0], 9)        # samples
        self.assertIn(found[table + "stsd"][12:16], (b"avc1", b"mp4v"))
        self.assertEqual(struct.unpack(">II", found["moov/trak/tkhd"][-8:]), (64 << 16, 48 << 16))
        scale, duration = struct.unpack(">II", found["moov/trak/mdia/mdhd"][12:20])
        self.assertAlmostEqual(duration / scale, 9 / 16)
        self.make(pictures, 48, 64, 16, "b.mp4")
        with open(self.path("b.mp4"), "rb") as file:
            self.assertEqual(file.read(), first)        # the same bytes every time
        done = self.make([picture("flat", 9, 8)], 9, 8, 16, "odd.mp4")
        self.assertEqual(done.returncode, 1)
        self.assertIn("even", done.stderr)
        self.assertEqual(sorted(os.listdir(self.dir)), ["a.mp4", "b.mp4"])

    def test_refusals(self):
        want = picture("flat", 8, 8)
        for name, word in (("a.gif", "ending"), ("a", "ending"), ("none/a.y4m", "No such file"), ("none/out/",
                                                                                                  "No such file")):
            done = self.make([want], 8, 8, 16, name)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (1, 1), name)
            self.assertIn(word, done.stderr)
        self.assertIn("folder", self.make([want] * 2, 8, 8, 16, "a.png").stderr)
        os.mkdir(self.path("d.y4m"))
        self.assertIn("folder", self.make([want], 8, 8, 16, "d.y4m").stderr)
        self.assertEqual(os.listdir(self.dir), ["d.y4m"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
