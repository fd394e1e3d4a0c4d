"""The manifest of a checkpoint: one JSON document that says what its tensors are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import __version__
from .config import METHODS, QuantizerConfig, WindowConfig, check_head_dim
from .model_info import ModelInfo

FORMAT_VERSION = 1
OBJECTIVE_CURVES = ("k_before", "k_after", "v_before", "v_after")


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint except its tensors.

    Attributes:
        method: one of METHODS except ``none``.
        base: rotation that learning started from, such as ``quarot`` or ``oscar``.
        model: the model that the checkpoint was made for.
        quantizer: group size and clips that the rotations were made with.
        windows: default windows.
        calibration: how it was made (data hash, seed, tokens, steps, settings); JSON values.
        objective: held-out loss per layer and KV head, or None. Keys: ``name`` (str) and
            OBJECTIVE_CURVES, each a list [num_layers][num_kv_heads] of finite numbers.
        format_version: of the file format.
        tool_version: of the program that wrote it.
    """

    method: str
    base: str | None
    model: ModelInfo
    quantizer: QuantizerConfig
    windows: WindowConfig
    calibration: dict[str, Any]
    objective: dict[str, Any] | None
    format_version: int = FORMAT_VERSION
    tool_version: str = __version__

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": self.format_version,
            "tool_version": self.tool_version,
            "method": self.method,
            "base": self.base,
            "model": self.model.to_json(),
            "quantizer": self.quantizer.to_json(),
            "windows": {
                "sink_tokens": self.windows.sink_tokens,
                "recent_tokens": self.windows.recent_tokens,
            },
            "calibration": self.calibration,
            "objective": self.objective,
        }

    @classmethod
    def from_json(cls, value: Any) -> Manifest:
        """Inverse of :meth:`to_json`, with every field checked.

        Raises:
            CheckpointError: a sentence without the name of the file.
        """
        if not isinstance(value, dict):
            raise CheckpointError("its manifest is not a JSON object")
        version = value.get("format_version")
        if type(version) is not int or version < 1:
            raise CheckpointError(f"its format_version is {version!r}, not a positive integer")
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"it has format version {version} and this sglang-kvquant {__version__} reads up "
                f"to {FORMAT_VERSION}; upgrade sglang-kvquant"
            )
        known = {*cls.__dataclass_fields__}
        if set(value) != known:
            difference = ", ".join(sorted(known ^ set(value)))
            raise CheckpointError(f"its manifest has missing or unknown keys: {difference}")
        try:
            manifest = cls(
                **{
                    **value,
                    "model": ModelInfo.from_json(value["model"]),
                    "quantizer": QuantizerConfig.from_json(value["quantizer"]),
                    "windows": WindowConfig(**value["windows"]),
                }
            )
        except (TypeError, ValueError, KeyError) as error:
            raise CheckpointError(f"its manifest is not understood: {error}") from error
        _check_manifest(manifest)
        return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Raise CheckpointError for the first field that is wrong in itself."""
    text = {"tool_version": manifest.tool_version, "method": manifest.method}
    for name, value in text.items():
        if not isinstance(value, str):
            raise CheckpointError(f"its {name} is {value!r}, not a string")
    if manifest.method not in METHODS or manifest.method == "none":
        raise CheckpointError(f"its method {manifest.method!r} is not one of {METHODS[1:]}")
    if manifest.base is not None and not isinstance(manifest.base, str):
        raise CheckpointError(f"its base is {manifest.base!r}, neither a string nor null")
    if not isinstance(manifest.calibration, dict):
        raise CheckpointError("its calibration facts are not a JSON object")
    quantizer, head_dim = manifest.quantizer, manifest.model.head_dim
    try:
        check_head_dim(head_dim)
    except ValueError as error:
        raise CheckpointError(str(error).rstrip(".")) from error
    numbers = (quantizer.k_clip.ratio, quantizer.v_clip.ratio)
    if type(quantizer.group_size) is not int or any(type(n) not in (int, float) for n in numbers):
        raise CheckpointError("its group size and clip ratios are not numbers")
    if head_dim % quantizer.group_size:
        raise CheckpointError(
            f"its group size {quantizer.group_size} does not divide head_dim {head_dim}"
        )
    if manifest.objective is not None:
        _check_objective(manifest.objective, manifest.model)


def _check_objective(objective: Any, model: ModelInfo) -> None:
    keys = {"name", *OBJECTIVE_CURVES}
    if not isinstance(objective, dict) or set(objective) != keys:
        raise CheckpointError(f"its objective must have exactly the keys {sorted(keys)}")
    if not isinstance(objective["name"], str):
        raise CheckpointError("the name of its objective is not a string")
    shape = (model.num_layers, model.num_kv_heads)
    for curve in OBJECTIVE_CURVES:
        try:
            values = torch.tensor(objective[curve], dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"its objective {curve} is not a table of numbers") from error
        if tuple(values.shape) != shape or not bool(values.isfinite().all()):
            raise CheckpointError(
                f"its objective {curve} must be finite numbers of shape {shape}, got "
                f"{tuple(values.shape)}"
            )
