# SPDX-License-Identifier: Apache-2.0
"""esa inside other programs, one module each: `vllm_omni`, `comfyui`, `sglang`, `lightx2v`.

A module imports its host, so nothing here is imported until the host asks for it. `run` is what they share: sessions
for calls whose layer, step and layout the host tells."""
