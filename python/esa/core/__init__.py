# SPDX-License-Identifier: Apache-2.0
"""The C library under Python: its binding (library, structs), arrays as views (tensor), and on top of them masks,
layouts, sessions, frames and the torch operator. Needs numpy; torch only where tensors come from it."""
