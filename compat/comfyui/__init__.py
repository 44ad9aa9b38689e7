# SPDX-License-Identifier: Apache-2.0
"""The node "Sparse Attention (esa)" for ComfyUI: this folder belongs into custom_nodes/. The code is in the package
esa-attention (esa.hosts.comfyui)."""
from esa.hosts.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
