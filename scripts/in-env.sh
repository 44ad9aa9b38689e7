#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a program in the environment of the Python tests: in-env.sh PROGRAM [ARGUMENT...]. The environment's programs
# (python, ruff, clang-format) come first on the PATH. $ESA_REQUIREMENTS may name another requirements file.
set -euo pipefail
here=$(dirname "$0")
python=$("$here/python-env.sh" "${ESA_REQUIREMENTS:-tests/python/requirements.txt}")
PATH=${python%/*}:$PATH exec "$@"
