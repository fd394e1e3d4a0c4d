"""From sums to the numbers that are shown and saved."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..checkpoint import Checkpoint
from ..layout import GQALayout
from ..model_info import ModelInfo
from .metrics import Evaluator, OutputErrors, Scores

BASELINE = "rtn"
"""Plain INT2, without rotation or clipping: 100 % of the heat maps."""

MEANINGS = {
    "output_mse": (
        "mean over all query positions, query heads, KV heads and windows of ||dy||^2 after W_O, "
        "one layer quantized at a time; mean over layers"
    ),
    "kl": (
        "nats, KL(full precision || method) of the next token; the mean over all scored "
        "positions, which are all but the last of each window"
    ),
    "past_windows": "the same over positions >= sink_tokens + recent_tokens only",
    "residual_error": (
        "sum ||h~ - h||^2 / sum ||h||^2 of the residual stream after each layer, all layers "
        "quantized; mean over layers"
    ),
    "bytes_per_token": "packed cache of the whole model, windows not counted",
}


def output_error_summary(errors: OutputErrors) -> dict[str, Any]:
    per_head = errors.mean()  # [num_layers, num_kv_heads]
    return {
        "mean": float(per_head.mean()),
        "past_windows": float(errors.late_mean().mean()),
        "per_layer": per_head.mean(1).tolist(),
        "per_head": per_head.tolist(),
    }


def score_summary(scores: Scores, first_late: int) -> dict[str, Any]:
    kl = torch.stack(scores.kl).double()  # [num_windows, seq_len - 1]
    nll = torch.stack(scores.nll).double()
    residual = torch.as_tensor(scores.residual_error) / torch.as_tensor(scores.residual_norm)
    late = kl[:, first_late:]
    return {
        "kl": {
            "mean": float(kl.mean()),
            "past_windows": float(late.mean()) if late.numel() else None,
            "per_window": kl.mean(1).tolist(),
        },
        "nll": float(nll.mean()),
        "perplexity": math.exp(float(nll.mean())),
        "residual_error": {"mean": float(residual.mean()), "per_layer": residual.tolist()},
    }


def cache_summary(checkpoint: Checkpoint, info: ModelInfo) -> dict[str, Any]:
    layout = GQALayout(info.num_kv_heads, info.head_dim, checkpoint.manifest.quantizer.group_size)
    packed = layout.bytes_per_token * info.num_layers
    plain = layout.bf16_bytes_per_token * info.num_layers
    return {"bytes_per_token": packed, "bf16_bytes_per_token": plain, "ratio": plain / packed}


def origin(checkpoint: Checkpoint, path: str | None) -> dict[str, Any]:
    """Which rotations a method used."""
    manifest = checkpoint.manifest
    return {
        "method": manifest.method,
        "base": manifest.base,
        "checkpoint": path,
        "fingerprint": checkpoint.fingerprint(),
        "quantizer": manifest.quantizer.to_json(),
        "calibration": manifest.calibration,
    }


def summarize(
    evaluator: Evaluator, checkpoints: dict[str, Checkpoint], info: ModelInfo
) -> dict[str, Any]:
    """Everything measured: ``full_precision`` and, by name, ``methods``."""
    windows = evaluator.rule.windows
    first_late = windows.sink_tokens + windows.recent_tokens
    methods: dict[str, Any] = {}
    for name in evaluator.methods:
        entry = {"output_mse": output_error_summary(evaluator.output_errors[name])}
        if evaluator.scores[name].kl:
            entry |= score_summary(evaluator.scores[name], first_late)
        methods[name] = entry | cache_summary(checkpoints[name], info)
    summary: dict[str, Any] = {"meanings": MEANINGS, "methods": methods}
    if evaluator.scores["none"].kl:
        plain = score_summary(evaluator.scores["none"], first_late)
        summary["full_precision"] = {key: plain[key] for key in ("nll", "perplexity")}
    return summary


def relative_rms(summary: dict[str, Any], name: str) -> list[list[float]]:
    """RMS output error per [layer][KV head] as a percentage of plain INT2 (OptR, Appendix B)."""
    ours = torch.tensor(summary["methods"][name]["output_mse"]["per_head"], dtype=torch.float64)
    baseline = torch.tensor(
        summary["methods"][BASELINE]["output_mse"]["per_head"], dtype=torch.float64
    )
    return (100 * (ours / baseline).sqrt()).tolist()


def format_table(summary: dict[str, Any]) -> str:
    """The terminal's table, at most 80 columns."""
    methods = summary["methods"]
    columns = ("W_O MSE", "% rtn", "KL", "resid.", "PPL", "B/token", "ratio")
    widths = (9, 6, 8, 8, 8, 8, 6)
    name_width = 80 - sum(widths) - len(widths)
    head = "".join(f" {c:>{w}}" for c, w in zip(columns, widths, strict=True))
    lines = [f"{'method':<{name_width}}{head}"]
    baseline = methods.get(BASELINE, {}).get("output_mse", {}).get("mean")
    plain = summary.get("full_precision")
    if plain:
        first = next(iter(methods.values()))
        perplexity = _number(plain["perplexity"], 8)
        cells = ["", "", "", "", perplexity, str(first["bf16_bytes_per_token"]), "1.00"]
        lines.append(_row("unquantized", cells, widths, name_width))
    for name, m in methods.items():
        percent = f"{100 * m['output_mse']['mean'] / baseline:.1f}" if baseline else ""
        cells = [f"{m['output_mse']['mean']:.3g}", percent, "", "", ""]
        if "kl" in m:
            values = (m["kl"]["mean"], m["residual_error"]["mean"], m["perplexity"])
            cells[2:] = [_number(value, 8) for value in values]
        cells += [str(m["bytes_per_token"]), f"{m['ratio']:.2f}"]
        lines.append(_row(name, cells, widths, name_width))
    return "\n".join(lines)


def _row(name: str, cells: list[str], widths: tuple[int, ...], name_width: int) -> str:
    text = "".join(f" {c:>{w}}" for c, w in zip(cells, widths, strict=True))
    return f"{name[:name_width]:<{name_width}}{text}"


def _number(value: float, width: int) -> str:
    """Four decimals when they fit, else significant digits."""
    text = f"{value:.4f}"
    return text if len(text) <= width and value < 1000 else f"{value:.3g}"
