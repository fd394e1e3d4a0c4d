"""One HTML file with table, figures and how they were made; it loads nothing from outside."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any

from ..atomic import write_atomically
from .plots import figures

CAPTIONS = {
    "output_error_per_layer.png": (
        "Immediate error: one layer's cache quantized at a time, full-precision activations in."
    ),
    "residual_error_per_layer.png": "Propagated error: every layer's cache quantized.",
    "output_error_per_head.png": (
        "Immediate error by layer and KV head, relative to plain INT2 without rotation or "
        "clipping (100 %)."
    ),
}

STYLE = """
body { font-family: sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .7rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } tr { border-bottom: 1px solid #ccc; }
img { max-width: 100%; } pre { background: #f4f4f4; padding: .7rem; overflow-x: auto; }
"""


def write_report(results: dict[str, Any], directory: Path) -> Path:
    """Write the PNG figures and report.html into `directory`; returns the HTML file."""
    images = figures(results)
    for name, data in images.items():
        write_atomically(directory / name, data)
    page = directory / "report.html"
    write_atomically(page, render(results, images).encode())
    return page


def render(results: dict[str, Any], images: dict[str, bytes]) -> str:
    """The page as a string."""
    model, data, windows = results["model"], results["data"], results["windows"]
    facts = {
        "Model": f"{model['path']} ({model['architecture']}, {model['dtype']}, {model['device']})",
        "Text": f"{data['source']}, {data['num_windows']} windows of {data['seq_len']} tokens",
        "Not quantized": (
            f"{windows['sink_tokens']} sink and {windows['recent_tokens']} recent tokens"
        ),
    }
    rows = "".join(f"<li>{html.escape(k)}: {html.escape(v)}</li>" for k, v in facts.items())
    meanings = "".join(
        f"<li><b>{html.escape(k)}</b>: {html.escape(v)}</li>"
        for k, v in results["meanings"].items()
    )
    pictures = "".join(_picture(name, data) for name, data in images.items())
    provenance = {
        key: results[key] for key in ("command", "created", "versions", "model", "data", "windows")
    }
    provenance["methods"] = {name: m["origin"] for name, m in results["methods"].items()}
    return (
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>KV-cache quantization: {html.escape(model['path'])}</title>"
        f"<style>{STYLE}</style></head><body><h1>Accuracy of a 2-bit KV cache</h1>"
        f"<ul>{rows}</ul>{_table(results)}<h2>What the columns mean</h2><ul>{meanings}</ul>"
        f"{pictures}<h2>How it was made</h2>"
        f"<pre>{html.escape(json.dumps(provenance, indent=2))}</pre></body></html>"
    )


def _picture(name: str, data: bytes) -> str:
    encoded = base64.b64encode(data).decode()
    caption = html.escape(CAPTIONS[name])
    return (
        f"<figure><img alt='{caption}' src='data:image/png;base64,{encoded}'>"
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _table(results: dict[str, Any]) -> str:
    head = (
        "<tr><th>Method</th><th>Output MSE</th><th>KL</th><th>KL past windows</th>"
        "<th>Residual error</th><th>Perplexity</th><th>Bytes/token</th><th>Ratio</th></tr>"
    )
    methods = results["methods"]
    first = next(iter(methods.values()))
    plain = results["full_precision"]["perplexity"]
    rows = [
        f"<tr><td>unquantized</td><td></td><td></td><td></td><td></td><td>{plain:.4g}</td>"
        f"<td>{first['bf16_bytes_per_token']}</td><td>1.00</td></tr>"
    ]
    for name, m in methods.items():
        late = m["kl"]["past_windows"]
        cells = (
            f"{m['output_mse']['mean']:.4g}",
            f"{m['kl']['mean']:.4g}",
            "" if late is None else f"{late:.4g}",
            f"{m['residual_error']['mean']:.4g}",
            f"{m['perplexity']:.4g}",
            str(m["bytes_per_token"]),
            f"{m['ratio']:.2f}",
        )
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f"<tr><td>{html.escape(name)}</td>{row}</tr>")
    return f"<table>{head}{''.join(rows)}</table>"
