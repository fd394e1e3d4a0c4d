"""The paper's error figures: lines per layer, heat map per head (OptR, Figures 4 and A)."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

from .results import BASELINE, relative_rms

HEAT_RANGE = (3.0, 100.0)
"""Percent of plain INT2; the colours are logarithmic between, saturated outside."""

DPI = 120


def figures(summary: dict[str, Any]) -> dict[str, bytes]:
    """PNG images by file name."""
    made = {"output_error_per_layer.png": _png(lambda fig: _output_lines(fig, summary), (8, 4.2))}
    methods = summary["methods"]
    if all("residual_error" in m for m in methods.values()):
        made["residual_error_per_layer.png"] = _png(
            lambda fig: _residual_lines(fig, summary), (8, 4.2)
        )
    maps = [name for name in methods if name != BASELINE]
    if BASELINE in methods and maps:
        num_layers = len(methods[BASELINE]["output_mse"]["per_head"])
        rows = math.ceil(len(maps) / 4)
        size = (2.2 * min(len(maps), 4) + 1.4, rows * max(2.6, 0.16 * num_layers + 1.0))
        made["output_error_per_head.png"] = _png(lambda fig: _heat_map(fig, summary, maps), size)
    return made


def _png(draw: Callable[[Any], None], size: tuple[float, float]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: no global state, no display, safe in any thread.
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _lines(figure: Any, curves: dict[str, list[float]], title: str, label: str) -> None:
    axes = figure.add_subplot()
    for name, values in curves.items():
        mean = sum(values) / len(values)
        axes.plot(range(len(values)), values, marker=".", label=f"{name} (mean {mean:.3g})")
    axes.set(yscale="log", title=title, xlabel="layer", ylabel=label)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _output_lines(figure: Any, summary: dict[str, Any]) -> None:
    curves = {name: m["output_mse"]["per_layer"] for name, m in summary["methods"].items()}
    _lines(figure, curves, "Error of the attention output after W_O", "mean ||Δy||²")


def _residual_lines(figure: Any, summary: dict[str, Any]) -> None:
    curves = {name: m["residual_error"]["per_layer"] for name, m in summary["methods"].items()}
    _lines(figure, curves, "Propagated error of the residual stream", "Σ||Δh||² / Σ||h||²")


def _heat_map(figure: Any, summary: dict[str, Any], names: list[str]) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter

    columns = min(len(names), 4)
    grid = figure.subplots(math.ceil(len(names) / columns), columns, squeeze=False)
    panels = list(grid.flat)
    norm = LogNorm(*HEAT_RANGE)
    for axes, name in zip(panels, names, strict=False):
        cells = relative_rms(summary, name)  # [num_layers][num_kv_heads]
        image = axes.imshow(cells, norm=norm, cmap="viridis", aspect="auto", origin="lower")
        axes.set_title(name, fontsize=9)
        axes.set_xticks(range(len(cells[0])))
        axes.set_xlabel("KV head", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    bar = figure.colorbar(
        image, ax=grid, ticks=[3, 10, 30, 100], format=FuncFormatter(lambda x, _: f"{x:g} %")
    )
    bar.set_label("RMS output error, % of plain INT2", fontsize=8)
