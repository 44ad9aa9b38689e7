# SPDX-License-Identifier: Apache-2.0
"""Videos as other programs write them, for the tests of `esa evaluate` and `esa export`: PNG of every kind, Y4M, NPY,
safetensors. Standard library only."""
import json
import math
import random
import struct
import zlib

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def filtered(rows, depth, channels, rng):
    """Rows of samples as PNG packs them, each behind a filter that is drawn for it."""
    step, above, packed = max(1, channels * depth // 8), None, b""
    for samples in rows:
        bits = "".join(format(s, f"0{depth}b") for s in samples)
        row = int(bits.ljust((len(bits) + 7) // 8 * 8, "0"), 2).to_bytes((len(bits) + 7) // 8, "big")
        above = above or bytes(len(row))
        kind, out = rng.randrange(5), bytearray()
        for i, value in enumerate(row):
            a, b, c = (row[i - step] if i >= step else 0), above[i], (above[i - step] if i >= step else 0)
            p = a + b - c
            nearest = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
            out.append((value - [0, a, b, (a + b) // 2, nearest][kind]) % 256)
        packed += bytes([kind]) + bytes(out)
        above = row
    return packed


# First column and row of each pass, and the steps between its columns and rows.
WHOLE = ((0, 0, 1, 1), )
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png(samples, height, width, colour, depth, seed=0, level=6, strategy=zlib.Z_DEFAULT_STRATEGY, pieces=1,
        interlaced=0, palette=b"", extra=b""):
    """samples: numbers of `depth` bits, [height][width][channels]. A filter is drawn for every row."""
    rng, n = random.Random(seed), CHANNELS[colour]
    rows = b""
    for left, top, across, down in ADAM7 if interlaced else WHOLE:
        part = [[s for x in range(left, width, across) for s in samples[(y * width + x) * n:(y * width + x + 1) * n]]
                for y in range(top, height, down)]
        if part and part[0]:
            rows += filtered(part, depth, n, rng)
    packer = zlib.compressobj(level, zlib.DEFLATED, 15, 9, strategy)
    packed = packer.compress(rows) + packer.flush()
    size = -(-len(packed) // pieces)
    body = b"".join(chunk(b"IDAT", packed[i:i + size]) for i in range(0, len(packed), size))
    return (b"\x89PNG\r\n\x1a\n" +
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)) +
            (chunk(b"PLTE", palette) if palette else b"") + extra + body + chunk(b"IEND", b""))


def npy(data, shape, word="|u1", order="False", version=1):
    head = f"{{'descr': '{word}', 'fortran_order': {order}, 'shape': {tuple(shape)}, }}"
    size = 10 if version == 1 else 12
    head += " " * (-(size + len(head) + 1) % 64) + "\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I",
                                                            len(head)) + head.encode() + data


def read_npy(path):
    """Shape and bytes of a U8 file of ours."""
    data = read(path)
    assert data[:8] == b"\x93NUMPY\x01\x00" and struct.unpack("<H", data[8:10])[0] == 118
    head = eval(data[10:128].decode(), {"__builtins__": {}}, {})          # a literal that we wrote
    assert head["descr"] == "|u1" and head["fortran_order"] is False
    return head["shape"], data[128:]


def safetensors(tensors, metadata=None):
    """tensors: name -> (dtype, shape, bytes)."""
    header, at = ({"__metadata__": metadata} if metadata else {}), 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def noise(count, seed):
    return random.Random(seed).randbytes(count)


def moving(frames, height, width, seed=0):
    """Smooth stripes that move: lossy formats can keep them."""
    out = bytearray()
    for t in range(frames):
        for y in range(height):
            for x in range(width):
                out += bytes([(4 * x + 3 * t + seed) % 200, (3 * y + seed) % 180, (2 * (x + y) + 5 * t) % 220])
    return bytes(out)


def lcg(seed, count):
    """The generator of the golden vectors: values in -2 .. 2 in steps of 1/64."""
    values = []
    for _ in range(count):
        seed = (seed * 1664525 + 1013904223) % 2**32
        values.append(((seed >> 24) - 128) / 64)
    return values


def f32(seed, *shape):
    """A tensor of those values, as safetensors() takes it."""
    count = math.prod(shape)
    return ("F32", list(shape), struct.pack(f"<{count}f", *lcg(seed, count)))


def lpips_weights(net="alex"):
    """AlexNet's shapes, numbers that repeat: quick to write, good enough to see that LPIPS runs."""
    tensors = {}
    for i, (out, inner, k) in enumerate(((64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3))):
        count = out * inner * k * k
        scale = math.sqrt(4 / (inner * k * k))
        part = struct.pack("<1021f", *(scale * math.sin(j * j) for j in range(1021)))
        tensors[f"conv.{i}.weight"] = ("F32", (out, inner, k, k), (part * (count // 1021 + 1))[:4 * count])
        tensors[f"conv.{i}.bias"] = ("F32", (out,), bytes(4 * out))
        tensors[f"lin.{i}.weight"] = ("F32", (out,), struct.pack("<f", 0.5) * out)
    return safetensors(tensors, {"format": "esa-lpips-1", "net": net})
