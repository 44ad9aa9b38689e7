# SPDX-License-Identifier: Apache-2.0
"""Opening the library, contexts, errors; the package without torch, after fork, in threads, at the end of the
interpreter."""
import ctypes as C
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading

import esa
import numpy as np
import pytest
from esa.core import context, library, structs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def child(code, **environment):
    """Runs code in a fresh interpreter with this package."""
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT / "compat" / "mindiesd")])
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": paths, **environment})


def test_version_is_that_of_the_header():
    header = (ROOT / "include" / "esa" / "version.h").read_text()
    words = dict(re.findall(r"#define ESA_(\w+) (\d+)", header))
    version = f"{words['VERSION_MAJOR']}.{words['VERSION_MINOR']}.{words['VERSION_PATCH']}"
    assert esa.__version__ == version and int(words["API_VERSION"]) == library.API_VERSION
    pyproject = (ROOT / "compat" / "mindiesd" / "pyproject.toml").read_text()
    assert f'version = "{version}"' in pyproject


def test_every_struct_has_the_librarys_size():
    sizes = library.load().c.esa_abi()
    assert [sizes[i] for i in range(len(structs.ABI))] == [C.sizeof(s) for s in structs.ABI]
    header = (ROOT / "include" / "esa" / "esa.h").read_text()
    names = re.search(r"enum \{\s*ESA_ABI_CTX_PARAMS.*?ESA_ABI_COUNT", header, re.DOTALL).group(0)
    assert len(re.findall(r"ESA_ABI_", names)) - 1 == len(structs.ABI)


def test_every_field_lies_where_the_compiler_puts_it(tmp_path):
    """A C program that includes the headers prints the offset and the size of every field this package names."""
    classes = [
        s for s in vars(structs).values() if isinstance(s, type) and issubclass(s, C.Structure) and s is not C.Structure
    ]
    assert len(classes) >= len(structs.ABI) + 4
    lines = []
    for s in classes:
        name = "esa" + re.sub("[A-Z]", lambda m: "_" + m.group(0).lower(), s.__name__)
        lines += [
            f'    printf("{s.__name__}.{f} %zu %zu\\n", offsetof({name}, {f}), sizeof((({name} *)0)->{f}));'
            for f, *_ in s._fields_
        ]
        lines.append(f'    printf("{s.__name__} %zu\\n", sizeof({name}));')
    headers = ("stddef.h", "stdio.h", "esa/esa_tensors.h", "esa/esa_video.h")
    head = ["#define ESA_EXPERIMENTAL", *(f"#include <{name}>" for name in headers)]
    lines = [*head, "int main(void)", "{", *lines, "}", ""]
    source = "\n".join(lines)
    (tmp_path / "fields.c").write_text(source)
    subprocess.run(["cc", "-I", ROOT / "include", "-o", tmp_path / "fields", tmp_path / "fields.c"], check=True)
    printed = subprocess.run([tmp_path / "fields"], capture_output=True, text=True, check=True).stdout.split("\n")
    ours = []
    for s in classes:
        ours += [f"{s.__name__}.{f} {getattr(s, f).offset} {getattr(s, f).size}" for f, *_ in s._fields_]
        ours.append(f"{s.__name__} {C.sizeof(s)}")
    assert printed[:-1] == ours


def test_enums_are_the_headers():
    """Every word of the package's tables has the number that the headers give it."""
    text = "".join((ROOT / "include" / "esa" / name).read_text() for name in ("esa.h", "esa_session.h"))
    numbers = dict(re.findall(r"\b(ESA_[A-Z0-9_]+) = (-?\d+)", text))
    for table, prefix in ((structs.SELECTORS, "SELECT"), (structs.TRAITS, "TRAIT"), (structs.MODES, "MODE"),
                          (structs.ORDERS, "ORDER"), (structs.TAILS, "TAIL"), (structs.SESSION_MODES, "SESSION"),
                          (structs.CALL_KINDS, "CALL"), (structs.STEP_MAPS, "STEP_MAP"),
                          (structs.IMPORTANCES, "IMPORTANCE")):
        for word, number in table.items():
            assert int(numbers[f"ESA_{prefix}_{word.upper().replace('-', '_')}"]) == number
    c = library.load().c
    names = [c.esa_selector_name(i) for i in range(-1, len(structs.SELECTORS) + 1)]
    assert names == [None, *(word.encode() for word in structs.SELECTORS), None]
    assert c.esa_selector_traits(-1) == c.esa_selector_traits(len(structs.SELECTORS)) == 0
    assert c.esa_selector_traits(structs.SELECTORS["error"]) & structs.TRAITS["reads_v"]
    assert int(numbers["ESA_DTYPE_BF16"]) == structs.BF16 and int(numbers["ESA_DEVICE_CUDA"]) == structs.CUDA


def test_another_abi_is_refused(monkeypatch):
    class Longer(C.Structure):
        _fields_ = [("all", C.c_char * 4096)]
    monkeypatch.setattr(structs, "ABI", (structs.CtxParams, Longer))
    with pytest.raises(ImportError,
                       match="Longer has 88 bytes there and 4096 in this package: they are not of one version"):
        library.Library(library.find_library())


def test_another_api_version_is_refused(monkeypatch):
    monkeypatch.setattr(library, "API_VERSION", 99)
    with pytest.raises(ImportError, match="has API version 2, this package was written for 99"):
        library.Library(library.load().path)


def test_a_missing_library_is_an_import_error(tmp_path):
    done = child("import esa", ESA_LIB=str(tmp_path / "nothing.so"))
    assert done.returncode == 1 and f"ImportError: ESA_LIB names {tmp_path}/nothing.so, which is no file" in done.stderr
    other = tmp_path / "libesa.so"
    other.write_bytes(b"not a library")
    done = child("import esa", ESA_LIB=str(other))
    assert done.returncode == 1 and "could not be used: " in done.stderr and "ImportError" in done.stderr


def test_a_package_of_another_build_is_refused(tmp_path, monkeypatch):
    """An installed package carries the id of its build. Both ids are in the message."""
    (tmp_path / "lib").mkdir()
    note = tmp_path / "lib" / "esa_build.h"
    build = library.load().c.esa_build_id().decode()
    assert build.startswith(esa.__version__ + "-")
    monkeypatch.setattr(library, "package_folders", lambda: [tmp_path])
    for own, fits in ((build, True), ("0.1.0-000000000000", False)):
        note.write_text(f'#define ESA_BUILD_ID "{own}"\n')
        if fits:
            assert library.Library(library.load().path).version() == esa.__version__
        else:
            with pytest.raises(ImportError, match=f"this package is build {own}, .* is build {build}: install both"):
                library.Library(library.load().path)


def test_errors_carry_the_librarys_message():
    x = np.zeros((1, 3, 64, 16), np.float32)
    with pytest.raises(esa.EsaValueError, match="query heads must be a multiple of key heads") as caught:
        esa.attention(x, x[:, :2], x[:, :2])
    assert caught.value.status == -2 and caught.value.status_name == "ESA_ERR_SHAPE"
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, esa.EsaError)
    with pytest.raises(OSError, match="nothing.safetensors"):
        esa.MaskFile("/no/such/folder/nothing.safetensors")
    with pytest.raises(ValueError, match="not a safetensors file|safetensors"):
        esa.MaskFile(__file__)


def test_without_torch():
    """numpy alone is enough, and nothing of torch is imported."""
    done = child("""
        import sys
        sys.modules["torch"] = None                     # import torch would fail
        import numpy as np
        import esa
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 512, 32), dtype=np.float32)
        for sparse_type in (None, "rf_v2", "ada_bsa", "entropy"):
            out = esa.sparse_attention(q, k, v, sparse_type=sparse_type, sparsity=0.5)
            assert out.shape == q.shape and np.isfinite(out).all()
        session = esa.Session(esa.EsaConfig(), layers=1, steps=1)
        session.begin(); session.step(0)
        session.attention(0, q, k, v)
        del sys.modules["torch"]
        assert "diffusers" not in sys.modules
        import mindiesd
        assert mindiesd.sparse_attention is esa.sparse_attention
        print("fine")""")
    assert done.returncode == 0 and done.stdout == "fine\n" and done.stderr == ""


def test_import_does_not_import_torch():
    done = child("import esa, sys; print('torch' in sys.modules, 'diffusers' in sys.modules)")
    assert done.stdout == "False False\n", done.stderr


def test_objects_that_live_until_the_end_are_silent():
    done = child("""
        import numpy as np, esa
        x = np.random.default_rng(0).standard_normal((1, 2, 256, 32), dtype=np.float32)
        mask = esa.select(x, x)
        session = esa.Session(esa.EsaConfig(), layers=1, steps=1)
        esa.sparse_attention(x, x, x, sparse_type="rf_v2", sparsity=0.5)
        kept = [mask, session, (mask, session)]
        kept.append(kept)""")
    assert done.returncode == 0 and done.stderr == ""


def test_fork():
    """A child has no threads of its parent's contexts: shared ones are made anew, a session of the parent is refused
    with a message."""
    done = child("""
        import os, numpy as np, esa
        x = np.random.default_rng(0).standard_normal((1, 2, 512, 32), dtype=np.float32)
        want = esa.sparse_attention(x, x, x, sparse_type="rf_v2", sparsity=0.5)
        session = esa.Session(esa.EsaConfig(), layers=1, steps=1)
        pid = os.fork()
        if pid == 0:
            same = np.array_equal(want, esa.sparse_attention(x, x, x, sparse_type="rf_v2", sparsity=0.5))
            try:
                session.begin()
                text = "no error"
            except esa.EsaError as error:
                text = str(error)
            os._exit(0 if same and "before fork()" in text else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        session.begin()
        print("fine")""")
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_threads_of_python_share_a_context(seed):
    q, k, v = np.random.default_rng(seed).standard_normal((3, 1, 4, 1024, 32), dtype=np.float32)
    want = {s: esa.sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=s) for s in (0.25, 0.5, 0.75)}
    wrong = []

    def work(sparsity):
        for _ in range(5):
            if not np.array_equal(want[sparsity], esa.sparse_attention(q, k, v, sparse_type="rf_v2",
                                                                       sparsity=sparsity)):
                wrong.append(sparsity)
    threads = [threading.Thread(target=work, args=(s,)) for s in want for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_thread_count_changes_nothing(seed):
    q, k, v = np.random.default_rng(seed).standard_normal((3, 1, 4, 700, 48), dtype=np.float32)
    before = esa.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 5):
            esa.set_num_threads(threads)
            assert esa.get_num_threads() == threads
            outputs.append(esa.sparse_attention(q, k, v, sparse_type="entropy", sparsity=0.5, tail="pooled"))
    finally:
        esa.set_num_threads(0)
    assert esa.get_num_threads() == before
    assert all(np.array_equal(outputs[0], o) for o in outputs[1:])
    for bad in (-1, 1000, "2"):
        with pytest.raises(ValueError, match="threads must be 0 to 256"):
            esa.set_num_threads(bad)


def test_plans_are_kept_and_bounded(seed):
    from esa.core.plan import MAX_PLANS
    shared = context.shared_context()
    for tokens in range(64, 64 + 3 * MAX_PLANS):
        x = np.zeros((1, 1, tokens, 16), np.float32)
        esa.sparse_attention(x, x, x, sparse_type="rf_v2", sparsity=0.5)
    assert len(shared.plans) == MAX_PLANS
    known = list(shared.plans)
    esa.sparse_attention(x, x, x, sparse_type="rf_v2", sparsity=0.5)
    assert list(shared.plans) == known
