# SPDX-License-Identifier: Apache-2.0
"""ESA's own module name; the code is in esa/diffusers/models.py."""
from .diffusers.models import MODELS, Model, find_model, generate_video, load_pipeline, model_of, to_frames

__all__ = ["MODELS", "Model", "find_model", "generate_video", "load_pipeline", "model_of", "to_frames"]
