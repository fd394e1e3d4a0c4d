"""Refuse at start what cannot be served: one sentence with what, why and what to do.

Checked in the main process on the raw arguments, again there on the resolved ones and the model's
files before any process starts, and once more in every scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_kvquant.checkpoint import resolve_checkpoint
from sglang_kvquant.config import KVQuantOptions, check_head_dim
from sglang_kvquant.model_info import ModelInfo, resolve_model_path
from sglang_kvquant.serving import compat
from sglang_kvquant.serving.refusal_table import TABLE


def check_version() -> None:
    """Raise ValueError for an SGLang that was never tested. There is no override: pin a version.

    A hook that misses its place would serve wrong answers rather than fail.
    """
    version = compat.sglang_version()
    if version not in compat.SUPPORTED_VERSIONS:
        raise ValueError(
            f"--kv-quant was not tested with SGLang {version}: install one of "
            f"{', '.join(compat.SUPPORTED_VERSIONS)}, or serve without --kv-quant."
        )


def check_arguments(args: Any, options: KVQuantOptions) -> None:
    """Raise ValueError for the first row of the refusal matrix that the arguments meet.

    Args:
        args: SGLang's arguments by attribute: a complete Namespace, ServerArgs, or its resolved
            view.
        options: the user's options.

    Raises:
        ValueError: a sentence for the user.
        RuntimeError: a field that a row needs does not exist, so nothing can be promised.
    """
    version = compat.sglang_version()
    for row in TABLE:
        if version not in row.versions:
            continue
        missing = [name for name in row.fields if not hasattr(args, name)]
        if missing:
            raise RuntimeError(f"SGLang {version} has no ServerArgs.{missing[0]} ({row.what})")
        if row.applies(args):
            raise ValueError(row.sentence(args))


def check_model(args: Any, options: KVQuantOptions) -> None:
    """Raise ValueError unless the model is served and the checkpoint was made for it.

    Reads config.json, safetensors headers and a few tensors; no weight is loaded.
    """
    info = ModelInfo.from_model_path(args.model_path, args.revision)
    check_head_dim(info.head_dim)
    check_config(resolve_model_path(args.model_path, args.revision))
    resolve_checkpoint(
        options, args.model_path, args.revision, check_weights=args.load_format != "dummy"
    )


def check_config(directory: Path) -> None:
    """Raise ValueError for a model whose own files ask for something that is not served."""
    config = _read(directory / "config.json")
    modelopt = _read(directory / "hf_quant_config.json").get("quantization") or {}
    for applies, what, why in MODEL_TABLE:
        if applies(config, modelopt):
            raise ValueError(
                f"{directory} {what}, which cannot be combined with --kv-quant: {why}; serve this "
                "model without --kv-quant."
            )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _declares_kv_dtype(config: dict, modelopt: dict) -> bool:
    quantization = config.get("quantization_config") or {}
    declared = (
        quantization.get("kv_cache_scheme"),
        quantization.get("kv_cache_quant_algo"),
        modelopt.get("kv_cache_quant_algo"),
    )
    return any(value not in (None, "", "auto", "none") for value in declared)


ModelRow = tuple[Callable[[dict, dict], bool], str, str]

MODEL_TABLE: tuple[ModelRow, ...] = (
    (
        lambda config, modelopt: bool(config.get("use_sliding_window")),
        "has sliding-window layers",
        "their keys leave the cache in an order that the BF16 windows do not follow",
    ),
    (
        _declares_kv_dtype,
        "declares a quantized KV cache",
        "its cache would be FP8 or FP4 instead of the packed one",
    ),
    (
        lambda config, modelopt: bool(config.get("is_encoder_decoder")),
        "is an encoder-decoder model",
        "cross-attention is not implemented",
    ),
)
"""What config.json and hf_quant_config.json may ask for: predicate, what, why."""
