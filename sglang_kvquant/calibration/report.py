"""Before/after table of a calibration, for a terminal of 80 columns."""

from __future__ import annotations

import math
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_HEAD_BLOCKS = 16


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(max(v, 1e-12)) for v in values) / len(values))


def ratios(before: list[float], after: list[float]) -> list[float]:
    """after / before of each head; 1 where there was nothing to improve."""
    return [a / b if b > 0 else 1.0 for b, a in zip(before, after, strict=True)]


def objective_table(objective: dict[str, Any]) -> str:
    """Held-out loss after / before, per layer: geometric mean, worst head, one block per head.

    A block is low when the head improved much and full when it did not improve.
    """
    num_heads = min(len(objective["k_before"][0]), MAX_HEAD_BLOCKS)
    head = f"{'mean':>6} {'worst':>9}  {'heads':<{max(num_heads, 5)}}"
    lines = [f"{'':>5}   keys  {'':{len(head) - 5}} values", f"layer   {head}   {head}".rstrip()]
    everything: dict[str, list[float]] = {"k": [], "v": []}
    for layer_id in range(len(objective["k_before"])):
        cells = []
        for side in ("k", "v"):
            ratio = ratios(
                objective[f"{side}_before"][layer_id], objective[f"{side}_after"][layer_id]
            )
            everything[side] += ratio
            cells.append(_cell(ratio, max(num_heads, 5)))
        lines.append(f"{layer_id:>5}   {cells[0]}   {cells[1]}".rstrip())
    k, v = (geometric_mean(everything[side]) for side in ("k", "v"))
    lines.append(f"all heads, geometric mean of after / before: keys {k:.3f}, values {v:.3f}")
    return "\n".join(lines)


def _cell(ratio: list[float], width: int) -> str:
    worst = max(range(len(ratio)), key=ratio.__getitem__)
    top = len(BLOCKS) - 1
    blocks = "".join(BLOCKS[min(top, int(r * len(BLOCKS)))] for r in ratio[:MAX_HEAD_BLOCKS])
    return f"{geometric_mean(ratio):6.3f} {ratio[worst]:5.3f}@{worst:<3}  {blocks:<{width}}"
