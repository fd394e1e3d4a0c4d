"""``sglang-kvquant inspect FILE``: what is in a checkpoint, or in one of OSCAR's files."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..config import Clip
    from ..oscar_format import OscarFile

WIDTH = 79
LABEL_WIDTH = 15


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show what is in a checkpoint",
        description="Show what is in a checkpoint, or in a rotation file published by OSCAR.",
    )
    parser.add_argument("file", metavar="FILE", help="checkpoint, or OSCAR's .pt file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from ..checkpoint import load_checkpoint
    from ..oscar_format import load_oscar_file

    path = Path(args.file).expanduser()
    if _is_torch_file(path):
        file = load_oscar_file(path)
        facts, lines = oscar_facts(file), oscar_lines(file)
    else:
        checkpoint = load_checkpoint(path)
        facts = checkpoint_facts(checkpoint)
        lines = [f"{path}", *checkpoint_lines(checkpoint, facts)]
    print(json.dumps(facts, indent=2) if args.json else "\n".join(lines))
    return 0


def _is_torch_file(path: Path) -> bool:
    """Whether OSCAR's format is meant; the loaders report what cannot be read."""
    from ..checkpoint import is_torch_file

    try:
        with path.open("rb") as file:
            return is_torch_file(file.read(9))
    except OSError:
        return False


def checkpoint_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Manifest plus what follows from it and from the tensors, as plain JSON."""
    from ..layout import GQALayout
    from ..rotation import orthogonality_error

    manifest = checkpoint.manifest
    model = manifest.model
    layout = GQALayout(model.num_kv_heads, model.head_dim, manifest.quantizer.group_size)
    errors = {
        name: orthogonality_error(tensor)
        for name, tensor in checkpoint.tensors().items()
        if name.endswith("_rotation")
    }
    worst = max(errors, key=errors.__getitem__, default=None)
    first = checkpoint.layers[0]
    packed, plain = layout.bytes_per_token, layout.bf16_bytes_per_token
    return {
        "kind": "checkpoint",
        **manifest.to_json(),
        "fingerprint": checkpoint.fingerprint(),
        "k_rotation_shape": None if first.k_rotation is None else list(first.k_rotation.shape),
        "v_rotation_shape": None if first.v_rotation is None else list(first.v_rotation.shape),
        "centred": first.k_mean is not None,
        "orthogonality_error": errors[worst] if worst else None,
        "orthogonality_worst": worst,
        "bytes_per_token": packed * model.num_layers,
        "bf16_bytes_per_token": plain * model.num_layers,
        "bytes_ratio": plain / packed,
        "objective_ratio": None if manifest.objective is None else _ratios(manifest.objective),
    }


def _ratios(objective: dict[str, Any]) -> dict[str, Any]:
    """Held-out loss after / before, per side: over all heads, and the extremes."""
    summary = {}
    for side in ("k", "v"):
        pairs = [
            pair
            for before, after in zip(
                objective[f"{side}_before"], objective[f"{side}_after"], strict=True
            )
            for pair in zip(before, after, strict=True)
        ]
        ratios = [_ratio(before, after) for before, after in pairs]
        summary[side] = {
            "geometric_mean": _geometric_mean(ratios),
            "min": min(ratios),
            "max": max(ratios),
            "heads_worse": sum(after > before for before, after in pairs),
            "heads": len(pairs),
        }
    return summary


def _ratio(before: float, after: float) -> float:
    if before == after:
        return 1.0
    return after / before if before else math.inf


def _geometric_mean(values: list[float]) -> float:
    if any(value <= 0 for value in values):
        return 0.0
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def checkpoint_lines(checkpoint: Checkpoint, facts: dict[str, Any]) -> list[str]:
    """The table for a terminal of 80 columns."""
    manifest, model = checkpoint.manifest, checkpoint.manifest.model
    quantizer, windows = manifest.quantizer, manifest.windows
    base = f", base {manifest.base}" if manifest.base else ""
    row = facts["bytes_per_token"] // (2 * model.num_layers * model.num_kv_heads)
    error = facts["orthogonality_error"]
    rows = [
        ("method", f"{manifest.method}{base}"),
        (
            "model",
            f"{model.architecture}, {model.num_layers} layers, {model.num_q_heads} query / "
            f"{model.num_kv_heads} KV heads, head_dim {model.head_dim}, "
            f"hidden {model.hidden_size}",
        ),
        ("weights sha256", model.weights_hash or "none: not bound to any weights"),
        (
            "quantizer",
            f"2 bits, group {quantizer.group_size}; clip K {_clip(quantizer.k_clip)}, "
            f"V {_clip(quantizer.v_clip)}",
        ),
        (
            "windows",
            f"{windows.sink_tokens} sink and {windows.recent_tokens} recent tokens in BF16",
        ),
        ("rotations", _rotations(facts)),
        (
            "bytes/token",
            f"{facts['bytes_per_token']:,}, BF16 {facts['bf16_bytes_per_token']:,}: "
            f"{facts['bytes_ratio']:.2f}x smaller ({row} B a key or value row)",
        ),
        (
            "orthogonality",
            f"error {error:.1e} at most ({facts['orthogonality_worst']})" if error else "exact",
        ),
        ("file", f"format {manifest.format_version}, by sglang-kvquant {manifest.tool_version}"),
        ("fingerprint", facts["fingerprint"]),
        *_calibration_rows(manifest.calibration),
    ]
    lines = [line for label, text in rows for line in _wrap(label, text)]
    if manifest.objective is not None:
        lines += ["", *objective_lines(manifest.objective, facts["objective_ratio"])]
    return lines


def _wrap(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{label:<{LABEL_WIDTH}}",
        subsequent_indent=" " * LABEL_WIDTH,
    )


def _clip(clip: Clip) -> str:
    return clip.kind if clip.kind == "none" else f"{clip.kind} {clip.ratio:g}"


def _rotations(facts: dict[str, Any]) -> str:
    shape = facts["k_rotation_shape"], facts["v_rotation_shape"]
    if shape[0] is None or shape[1] is None:
        return "none"
    keys, values = ("per KV head" if len(s) == 3 else "per layer" for s in shape)
    return f"K {keys}, V {values}; keys {'centred' if facts['centred'] else 'not centred'}"


def _calibration_rows(calibration: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in calibration.items()
    ]
    return [("calibration" if i == 0 else "", fact) for i, fact in enumerate(facts)]


def objective_lines(objective: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """Per layer: geometric means over the KV heads, ratio after / before with its extremes."""
    columns = f"{'before':>8} {'after':>8} {'ratio':>5} {'min':>5} {'max':>5}"
    lines = [
        *textwrap.wrap(
            f"Held-out {objective['name']}, geometric mean over the KV heads; ratio is "
            "after / before, min and max are those of single heads.",
            WIDTH,
        ),
        f"{'layer':>5}  {'keys':^35}  {'values':^35}".rstrip(),
        f"{'':>5}  {columns}  {columns}",
    ]
    for layer_id in range(len(objective["k_before"])):
        sides = "  ".join(
            _objective_cells(
                objective[f"{side}_before"][layer_id], objective[f"{side}_after"][layer_id]
            )
            for side in ("k", "v")
        )
        lines.append(f"{layer_id:>5}  {sides}")
    for side, name in (("k", "keys"), ("v", "values")):
        total = summary[side]
        lines.append(
            f"{name}: {total['geometric_mean']:.3f} of before over all {total['heads']} heads, "
            f"{total['min']:.3f} to {total['max']:.3f}; {total['heads_worse']} worse"
        )
    return lines


def _objective_cells(before: list[float], after: list[float]) -> str:
    ratios = [_ratio(b, a) for b, a in zip(before, after, strict=True)]
    means = f"{_geometric_mean(before):>8.2e} {_geometric_mean(after):>8.2e}"
    numbers = (_geometric_mean(ratios), min(ratios), max(ratios))
    return f"{means} " + " ".join(f"{number:>5.3f}"[:5] for number in numbers)


def oscar_facts(file: OscarFile) -> dict[str, Any]:
    """What one of OSCAR's files holds, as plain JSON."""
    import torch

    from ..rotation import orthogonality_error

    shapes = sorted({tuple(rotation.shape) for rotation in file.rotations.values()})
    determinants = torch.cat(
        [torch.linalg.det(r.double()).reshape(-1) for r in file.rotations.values()]
    )
    return {
        "kind": "oscar",
        "side": file.side,
        "format_version": file.format_version,
        "objective": file.objective,
        "source_grouping": file.source_grouping,
        "layers": list(file.rotations),
        "shapes": [list(shape) for shape in shapes],
        "orthogonality_error": max(orthogonality_error(r) for r in file.rotations.values()),
        "negative_determinants": int((determinants < 0).sum()),
        "rotations": len(determinants),
        "sha256": file.sha256(),
        "calibration": None if file.calibration is None else str(file.calibration),
    }


def oscar_lines(file: OscarFile) -> list[str]:
    facts = oscar_facts(file)
    side = {"k": "keys", "v": "values", None: "keys or values (it does not say)"}[file.side]
    ids = facts["layers"]
    sparse = "" if ids == list(range(len(ids))) else "; sparse, as for hybrid models"
    rows = [
        ("what", f"OSCAR's rotations for {side}, format version {file.format_version}"),
        ("objective", file.objective or "not stated"),
        ("grouping", file.source_grouping or "not stated"),
        ("layers", f"{len(ids)}, numbered {ids[0]} to {ids[-1]}{sparse}"),
        ("shapes", ", ".join(str(shape) for shape in facts["shapes"])),
        ("orthogonality", f"error {facts['orthogonality_error']:.1e} at most"),
        (
            "determinants",
            f"{facts['negative_determinants']} of {facts['rotations']} are -1",
        ),
        ("not in it", "model, clip ratios, group size, windows, key mean"),
        ("serve it", "sglang-kvquant convert --from-oscar K_FILE V_FILE --model M --output F"),
    ]
    if file.calibration is not None:
        rows.insert(-2, ("calibration", facts["calibration"]))
    return [str(file.path), *(line for label, text in rows for line in _wrap(label, text))]
