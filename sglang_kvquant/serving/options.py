"""The user's flags: command line, ``--config`` files and keyword arguments of ``sglang.Engine``.

All three end as :class:`KVQuantOptions` on ServerArgs. What SGLang itself must know (attention
backend, page size, prefill graphs) is written into its own arguments before ServerArgs exists,
because SGLang resolves them against each other there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from sglang_kvquant import config
from sglang_kvquant.config import KVQuantOptions
from sglang_kvquant.serving import compat

KEYWORDS = (
    "kv_quant",
    "kv_quant_checkpoint",
    "kv_quant_sink_tokens",
    "kv_quant_recent_tokens",
)
"""Attributes of the parsed command line, and keyword arguments of ``sglang.Engine``."""

CUDA_PAGE_SIZE = 64
CUDA_PAGE_SIZES = (16, 32, 64, 128)
CPU_PAGE_SIZE = 1
"""Larger pages are allocated by a Triton kernel, which a CPU cannot run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this plugin to SGLang's parser."""
    group = parser.add_argument_group(
        "rotated 2-bit KV cache (sglang-kvquant)",
        "Keep the KV cache in 2 bits: 36 bytes instead of 256 for a key or value row of 128 "
        "elements (7.1 times smaller). For Llama, Qwen2, Qwen3 and Phi-3/Phi-4 models. Calibrate "
        "once per model with `sglang-kvquant calibrate --model MODEL --method optr`, or choose a "
        "method that needs no calibration.",
    )
    group.add_argument(
        "--kv-quant",
        metavar="METHOD",
        default=None,
        help="How the KV cache is quantized to 2 bits. none (default): SGLang as it is; rtn: "
        "plain min/max; quarot: Hadamard rotation; oscar: rotation computed from calibration "
        "text; optr: a rotation per head, trained on calibration text. rtn and quarot work at "
        "once; oscar and optr need `sglang-kvquant calibrate` first. rolaq (MLA models) is not "
        "available yet.",
    )
    group.add_argument(
        "--kv-quant-checkpoint",
        metavar="FILE",
        default=None,
        help="Rotations made by `sglang-kvquant calibrate`, for --kv-quant oscar or optr. "
        "Default: where calibrate saves them for this model and method, below "
        "$SGLANG_KVQUANT_HOME or ~/.cache/sglang-kvquant.",
    )
    group.add_argument(
        "--kv-quant-sink-tokens",
        metavar="N",
        type=int,
        default=None,
        help="First tokens of every request that are kept in BF16 as well (0 to 4096). Default: "
        f"the checkpoint's number, usually {config.DEFAULT_SINK_TOKENS}.",
    )
    group.add_argument(
        "--kv-quant-recent-tokens",
        metavar="N",
        type=int,
        default=None,
        help="Most recent tokens of every request that are kept in BF16 as well (0 to 4096). "
        f"Default: the checkpoint's number, usually {config.DEFAULT_RECENT_TOKENS}. On a prefix "
        "cache hit this many tokens are computed again. Each running request reserves sink and "
        "recent tokens at BF16 size (36 MiB for 256 tokens of an 8B model).",
    )


def parse_options(values: Mapping[str, Any]) -> KVQuantOptions | None:
    """The options in a parsed command line or in keyword arguments; None without --kv-quant.

    Args:
        values: may hold any of KEYWORDS; None counts as not given.

    Raises:
        ValueError: an unknown method, a value out of range, or a flag that would have no effect.
    """
    method = values.get("kv_quant")
    given = {name: values.get(name) for name in KEYWORDS[1:] if values.get(name) is not None}
    if method is None or method == "none":
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(
                f"{flags} would have no effect without --kv-quant; add --kv-quant METHOD "
                f"({', '.join(config.METHODS[1:-1])}), or drop it."
            )
        return None
    if method not in config.METHODS:
        raise ValueError(
            f"--kv-quant {method} is not a method; choose one of {', '.join(config.METHODS[:-1])}."
        )
    checkpoint = given.get("kv_quant_checkpoint")
    return KVQuantOptions(
        method=method,
        checkpoint=None if checkpoint is None else str(checkpoint),
        sink_tokens=given.get("kv_quant_sink_tokens"),
        recent_tokens=given.get("kv_quant_recent_tokens"),
    )


def device_of(args: Any) -> str:
    """Device type of SGLang's arguments: the given one, or what SGLang would take."""
    return (args.device or compat.default_device()).split(":")[0]


def sglang_arguments(args: Any) -> dict[str, Any]:
    """What SGLang's own arguments must be so that it serves through this plugin.

    Values the user gave stay as they are; whether they are allowed is a matter of the refusals.

    Args:
        args: SGLang's arguments by name, with defaults where nothing was given.
    """
    device = device_of(args)
    chosen: dict[str, Any] = {}
    if args.attention_backend is None:
        chosen["attention_backend"] = compat.backend_name(device)
    if args.page_size is None:
        chosen["page_size"] = CPU_PAGE_SIZE if device == "cpu" else CUDA_PAGE_SIZE
    if args.cuda_graph_backend_prefill is None:
        # Attention over a packed prefix has not been verified inside a captured prefill.
        chosen["cuda_graph_backend_prefill"] = "disabled"
    return chosen


def prepare(values: Mapping[str, Any], options: KVQuantOptions, check: Callable) -> dict[str, Any]:
    """Check raw SGLang arguments and return those that have to change.

    Args:
        values: what the user gave, by field name; missing ones are SGLang's defaults.
        options: the parsed options.
        check: ``check(args, options)`` raises ValueError for a combination that is not served.
    """
    args = argparse.Namespace(**{**compat.server_args_defaults(), **values})
    chosen = sglang_arguments(args)
    for name, value in chosen.items():
        setattr(args, name, value)
    check(args, options)
    return chosen
