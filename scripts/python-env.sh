#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the virtual environment that the Python tests run in: python-env.sh [FILE]. FILE is a requirements file (default
# tests/python/requirements.txt). Each has its own folder under .venv/, which is made again when the file or the
# interpreter changes. Prints the environment's python. $ESA_PYTHON_BASE may name the interpreter to start from.
set -euo pipefail
cd "$(dirname "$0")/.."
requirements=${1:-tests/python/requirements.txt}
[ -f "$requirements" ] || { echo "python-env.sh: $requirements does not exist" >&2; exit 2; }
base=${ESA_PYTHON_BASE:-python3}
if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "python-env.sh: the tests need Python 3.10 or newer, $base is $("$base" --version)" >&2
    exit 1
fi
folder=.venv/$(basename "$requirements" .txt)
python=$folder/bin/python
stamp=$(cat "$(dirname "$requirements")"/requirements*.txt <("$base" --version) "$0" | sha256sum | cut -d' ' -f1)
if [ -f "$folder/stamp" ] && [ "$(cat "$folder/stamp")" = "$stamp" ] && [ -x "$python" ]; then
    echo "$PWD/$python"
    exit 0
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
run() { "$@" >"$log" 2>&1 || { tail -n 20 "$log" >&2; echo "python-env.sh: '$*' failed" >&2; exit 1; }; }
echo "python-env: making $folder" >&2
rm -rf "$folder"
run "$base" -m venv "$folder"
# The CPU build of torch first, by its full name: plain torch would bring gigabytes of CUDA along. If no configured
# index has it, torch's own does.
# Python compiles the modules that the tests import, a part of all, when it first meets them.
pip=("$python" -m pip install --disable-pip-version-check --no-compile)
version=$(sed -n 's/^torch==//p' "$requirements")
if [ -n "$version" ] && ! "${pip[@]}" "torch==$version+cpu" >"$log" 2>&1; then
    run "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "torch==$version"
fi
run "${pip[@]}" -r "$requirements"
echo "$stamp" >"$folder/stamp"
echo "$PWD/$python"
