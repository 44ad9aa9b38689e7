# SPDX-License-Identifier: Apache-2.0
"""What users of the originals know by name: ESA's processors and metrics, and its mask files.

Code written for the original imports these as `esa.processor`, `esa.cached_processor` and `esa.metrics`."""

Q_BLOCK, K_BLOCK = 256, 128         # the only block sizes of the original
