# SPDX-License-Identifier: Apache-2.0
"""The build back end of esa-mindiesd (PEP 517): writes a wheel that holds one package of one file.

It is our own because it has to refuse: if the target environment already has MindIE-SD, the build fails with a message.
pip runs this file with the interpreter of that environment, so it looks at the interpreter's own installation folders
(build isolation hides them from import, not from the file system)."""
import base64
import hashlib
import io
import os
import pathlib
import re
import sysconfig
import tarfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
REAL = re.compile(r"mindie[-_.]?sd-.*\.(dist-info|egg-info)$", re.IGNORECASE)


def _field(name):
    return re.search(rf'^{name} = "(.*)"$', (HERE / "pyproject.toml").read_text(), re.MULTILINE).group(1)


def _refuse():
    for folder in {sysconfig.get_paths()[key] for key in ("purelib", "platlib")}:
        if not os.path.isdir(folder):
            continue
        real = next((name for name in sorted(os.listdir(folder)) if REAL.match(name)), None)
        package = pathlib.Path(folder, "mindiesd", "__init__.py")
        if real is None and package.exists() and "esa-mindiesd" not in package.read_text(errors="replace"):
            real = "mindiesd/"
        if real:
            raise RuntimeError(
                f"{folder} already holds MindIE-SD ({real}): esa-mindiesd does not install over it; use "
                "esa.sparse_attention instead")


def _metadata():
    return (
        f"Metadata-Version: 2.1\nName: {_field('name')}\nVersion: {_field('version')}\n"
        f"Summary: {_field('description')}\n"
        f"Requires-Python: {_field('requires-python')}\nRequires-Dist: esa-attention\n")


def get_requires_for_build_wheel(config_settings=None):
    _refuse()
    return []


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _refuse()
    version = _field("version")
    info = f"esa_mindiesd-{version}.dist-info"
    files = {
        "mindiesd/__init__.py": (HERE / "mindiesd" / "__init__.py").read_bytes(),
        f"{info}/METADATA": _metadata().encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: esa-mindiesd\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    wheel = f"esa_mindiesd-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, wheel), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    version = _field("version")
    name = f"esa_mindiesd-{version}"
    with tarfile.open(os.path.join(sdist_directory, f"{name}.tar.gz"), "w:gz") as archive:
        for path in ("pyproject.toml", "backend.py", "mindiesd/__init__.py"):
            archive.add(HERE / path, f"{name}/{path}")
        text = _metadata().encode()
        entry = tarfile.TarInfo(f"{name}/PKG-INFO")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    return f"{name}.tar.gz"
