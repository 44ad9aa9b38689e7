# SPDX-License-Identifier: Apache-2.0
"""The programs that need a diffusers pipeline (`python -m esa.calibrate`, ...) and what they share.

Files, metrics and experiment results are the work of the native `esa` command, which they call (native.py)."""
