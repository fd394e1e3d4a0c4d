"""Offline calibration of rotations: once per model, from a few thousand tokens of text.

Needs torch and transformers, never SGLang. :func:`calibrate` is the whole path; the modules below
it are its steps: data (text to tokens), capture (tokens to traces), oscar and optr (traces to
rotations), recipe (what is chosen and how layers are solved and saved).
"""

from .capture import LayerTraces, attention_override, collect_traces, visit_layers
from .data import CalibrationTokens, load_tokens
from .errors import CalibrationError
from .recipe import LayerResult, Recipe, calibrate, calibrate_traces, load_model, solve_layer
from .settings import OptRSettings

__all__ = [
    "CalibrationError",
    "CalibrationTokens",
    "LayerResult",
    "LayerTraces",
    "OptRSettings",
    "Recipe",
    "attention_override",
    "calibrate",
    "calibrate_traces",
    "collect_traces",
    "load_model",
    "load_tokens",
    "solve_layer",
    "visit_layers",
]
