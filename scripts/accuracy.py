#!/usr/bin/env python3
"""Make the accuracy table: calibrate every base and OptR on it, per seed, and evaluate them all.

    python scripts/accuracy.py --model DIR --calibration FILE [FILE …] --test FILE [FILE …] \\
        --seeds 0,1,2 --bounds smollm2 --output out.json

Files are text or .jsonl, or uint16 token files (.bin), each also as .xz. A file given for both
uses is cut in two halves, so that calibration and test never share text. The seed picks the
calibration sequences. Needs the package with its `calibration` extra, not SGLang.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import math
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sglang_kvquant.atomic import write_atomically
from sglang_kvquant.calibration.capture import LayerTraces, visit_layers
from sglang_kvquant.calibration.data import CalibrationTokens, cut_sequences
from sglang_kvquant.calibration.recipe import LayerResult, Recipe, load_model, solve_layer
from sglang_kvquant.calibration.settings import OptRSettings
from sglang_kvquant.checkpoint import Checkpoint, Manifest, data_free_checkpoint, save_checkpoint
from sglang_kvquant.commands.evaluate import (
    device_name,
    load_tokenizer,
    run_batches,
    save_json,
    versions,
)
from sglang_kvquant.config import QuantizerConfig
from sglang_kvquant.evaluation.data import (
    Windows,
    cut_windows,
    read_stream,
    read_token_file,
    text_prefix,
)
from sglang_kvquant.evaluation.methods import build_transforms
from sglang_kvquant.evaluation.metrics import Evaluator
from sglang_kvquant.evaluation.results import format_table, summarize
from sglang_kvquant.evaluation.simulate import ReadRule
from sglang_kvquant.model_info import ModelInfo

BASES = ("quarot", "oscar", "oscar-per-head")

BOUNDS: dict[str, dict[str, float]] = {
    "smollm2": {
        "MSE optr(quarot) / quarot": 0.45,
        "MSE optr(oscar) / oscar": 0.50,
        "geo. MSE optr(quarot) / quarot+c": 0.80,
        "geo. MSE optr(oscar) / oscar+c": 0.85,
        "KL optr(quarot) / quarot": 0.55,
        "KL optr(oscar) / oscar": 0.55,
    },
    "gqa128": {
        "MSE optr(quarot) / quarot": 0.90,
        "MSE optr(oscar) / oscar": 0.92,
        "geo. MSE optr(quarot) / quarot+c": 0.90,
        "geo. MSE optr(oscar) / oscar+c": 0.90,
        "KL optr(quarot) / quarot": 0.95,
        "KL optr(oscar) / oscar": 0.95,
    },
    "qwen2.5-coder-1.5b": {
        "MSE optr(quarot) / quarot": 0.15,
        "MSE optr(oscar) / oscar": 0.15,
        "geo. MSE optr(quarot) / quarot+c": 0.95,
        "geo. MSE optr(oscar) / oscar+c": 0.95,
    },
}
"""Upper bounds of ratios, by model. KL of optr over its centred base must be below 1 for all."""


def main() -> int:
    args = parse_arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    info = ModelInfo.from_model_path(args.model)
    model = load_model(args.model, args.dtype, args.device)
    tokenizer = load_tokenizer(args.model)
    calibration, test = read_texts(args, tokenizer)
    windows = make_windows(test, args, text_prefix(tokenizer))
    settings = OptRSettings(**dict(parse_setting(item) for item in args.set))
    runs = []
    for seed in args.seeds:
        begin = time.perf_counter()
        tokens = make_sequences(calibration, args, text_prefix(tokenizer), seed)
        checkpoints = solve(model, tokens, info, dataclasses.replace(settings, seed=seed))
        solved = time.perf_counter()
        summary = score(model, checkpoints, windows, info, settings, args.batch_size)
        print(f"\nseed {seed}: calibrated in {solved - begin:.0f} s", end="")
        print(f", evaluated in {time.perf_counter() - solved:.0f} s\n{format_table(summary)}")
        if args.checkpoints:
            save_all(checkpoints, args.checkpoints, seed)
        runs.append(
            {
                "seed": seed,
                "calibration_sha256": tokens.sha256(),
                "objective_risen": count_risen(checkpoints),
                **summary,
            }
        )
    rows = compare(runs, BOUNDS.get(args.bounds, {}))
    print(f"\n{format_rows(rows)}")
    save_json(facts(args, info, windows, settings, runs, rows), args.output)
    print(f"numbers: {args.output}")
    if args.markdown:
        write_atomically(args.markdown, format_markdown(runs, rows).encode())
        print(f"tables:  {args.markdown}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True, nargs="+", type=Path)
    parser.add_argument("--test", required=True, nargs="+", type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="save both tables")
    parser.add_argument("--seeds", default="0,1,2", type=lambda s: [int(x) for x in s.split(",")])
    parser.add_argument("--bounds", choices=(*BOUNDS, "none"), default="none")
    parser.add_argument("--num-sequences", type=int, default=8, help="to learn from")
    parser.add_argument("--num-heldout", type=int, default=4, help="to select with")
    parser.add_argument("--calibration-len", type=int, default=1024)
    parser.add_argument("--num-windows", type=int, default=8, help="to test on")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a test window")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="field of OptRSettings"
    )
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="save them all here")
    args = parser.parse_args()
    for count in (args.num_sequences, args.num_heldout):
        if count % len(args.calibration):
            parser.error("--num-sequences and --num-heldout must be multiples of the files")
    if args.num_windows % len(args.test):
        parser.error("--num-windows must be a multiple of the number of test files")
    return args


def parse_setting(item: str) -> tuple[str, Any]:
    name, _, text = item.partition("=")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text


def read_texts(
    args: argparse.Namespace, tokenizer: Any
) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
    """(name, tokens) of the calibration and of the test files; shared files are halved."""

    def read(path: Path) -> torch.Tensor:
        is_tokens = path.name.removesuffix(".xz").endswith(".bin")
        return read_token_file(path) if is_tokens else read_stream(tokenizer, path)

    streams = {path: read(path) for path in {*args.calibration, *args.test}}
    shared = {*args.calibration} & {*args.test}

    def part(path: Path, first: bool) -> tuple[str, torch.Tensor]:
        stream = streams[path]
        if path in shared:
            half = len(stream) // 2
            stream = stream[:half] if first else stream[half:]
        return path.name, stream

    calibration = [part(path, True) for path in args.calibration]
    return calibration, [part(path, False) for path in args.test]


def make_windows(
    streams: list[tuple[str, torch.Tensor]], args: argparse.Namespace, prefix: list[int]
) -> Windows:
    """Equally many test windows of every file."""
    each = args.num_windows // len(streams)
    parts = [cut_windows(s, args.seq_len, each, name, prefix) for name, s in streams]
    return Windows(torch.cat([p.tokens for p in parts]), " + ".join(p.source for p in parts))


def make_sequences(
    streams: list[tuple[str, torch.Tensor]],
    args: argparse.Namespace,
    prefix: list[int],
    seed: int,
) -> CalibrationTokens:
    """Equally many calibration sequences of every file."""
    train, heldout = (n // len(streams) for n in (args.num_sequences, args.num_heldout))
    parts = [
        cut_sequences(s, args.calibration_len, train, heldout, seed, prefix, name)
        for name, s in streams
    ]
    return CalibrationTokens(
        torch.cat([p.train for p in parts]),
        torch.cat([p.heldout for p in parts]),
        " + ".join(p.source for p in parts),
    )


def recipes(quantizer: QuantizerConfig, settings: OptRSettings) -> dict[str, Recipe]:
    """Every calibrated method of the table."""
    only_mean = dataclasses.replace(settings, steps=0)
    made = {b: Recipe("oscar", b, quantizer, settings) for b in BASES if b != "quarot"}
    for base in BASES:
        made[f"{base}+c"] = Recipe("optr", base, quantizer, only_mean)
        made[f"optr({base})"] = Recipe("optr", base, quantizer, settings)
    return made


def solve(
    model: Any, tokens: CalibrationTokens, info: ModelInfo, settings: OptRSettings
) -> dict[str, Checkpoint]:
    """All checkpoints of one seed from one forward pass, layer by layer."""
    from tqdm import tqdm

    quantizer = QuantizerConfig.for_method("optr", info.head_dim)
    todo = recipes(quantizer, settings)
    results: dict[str, dict[int, LayerResult]] = {name: {} for name in todo}
    num_train = len(tokens.train)
    bar = tqdm(total=info.num_layers * len(todo), desc="calibrate", unit="solve", leave=False)

    def visit(layer_id: int, traces: LayerTraces) -> None:
        train, heldout = traces.select(slice(num_train)), traces.select(slice(num_train, None))
        for name, recipe in todo.items():
            results[name][layer_id] = solve_layer(train, heldout, recipe)
            bar.update()

    visit_layers(model, tokens.all(), visit)
    bar.close()
    made = {name: data_free_checkpoint(name, info) for name in ("rtn", "quarot")}
    for name, recipe in todo.items():
        made[name] = to_checkpoint(results[name], recipe, tokens, info)
    return made


def to_checkpoint(
    layers: dict[int, LayerResult], recipe: Recipe, tokens: CalibrationTokens, info: ModelInfo
) -> Checkpoint:
    objective = None
    if recipe.method == "optr":
        curves = ("k_before", "k_after", "v_before", "v_after")
        objective = {c: [layers[i].curves[c] for i in sorted(layers)] for c in curves}
        objective["name"] = "held-out L_K and L_V of OptR (equations 14 and 16)"
    manifest = Manifest(
        method=recipe.method,
        base=recipe.base,
        model=info,
        quantizer=recipe.quantizer,
        windows=recipe.windows,
        calibration={**recipe.to_json(), "data": tokens.source, "data_sha256": tokens.sha256()},
        objective=objective,
    )
    return Checkpoint(manifest, {i: layers[i].rotations for i in sorted(layers)})


def score(
    model: Any,
    checkpoints: dict[str, Checkpoint],
    windows: Windows,
    info: ModelInfo,
    settings: OptRSettings,
    batch_size: int,
) -> dict[str, Any]:
    transforms = {n: build_transforms(c, model.device) for n, c in checkpoints.items()}
    kept = next(iter(checkpoints.values())).manifest.windows
    kept = dataclasses.replace(
        kept, sink_tokens=settings.sink_tokens, recent_tokens=settings.recent_tokens
    )
    rule = ReadRule(kept, window_dtype=model.dtype)
    evaluator = Evaluator(model, transforms, rule, info.num_kv_heads)
    run_batches(evaluator, windows.tokens, batch_size)
    return summarize(evaluator, checkpoints, info)


def save_all(checkpoints: dict[str, Checkpoint], directory: Path, seed: int) -> None:
    for name, checkpoint in checkpoints.items():
        if name not in ("rtn", "quarot"):
            save_checkpoint(checkpoint, directory / f"{name}.seed{seed}.safetensors")


def count_risen(checkpoints: dict[str, Checkpoint]) -> int:
    """Heads whose held-out objective is higher after learning than before: must be 0."""
    risen = 0
    for checkpoint in checkpoints.values():
        objective = checkpoint.manifest.objective
        for side in ("k", "v") if objective else ():
            before, after = (torch.tensor(objective[f"{side}_{w}"]) for w in ("before", "after"))
            risen += int((after > before).sum())
    return risen


def compare(runs: list[dict[str, Any]], bounds: dict[str, float]) -> list[dict[str, Any]]:
    """Ratios of the table, per seed, with their bounds."""

    def mse(run: dict[str, Any], name: str) -> float:
        return run["methods"][name]["output_mse"]["mean"]

    def layers(run: dict[str, Any], name: str) -> list[float]:
        return run["methods"][name]["output_mse"]["per_layer"]

    def geometric(run: dict[str, Any], ours: str, base: str) -> float:
        pairs = zip(layers(run, ours), layers(run, base), strict=True)
        return math.exp(statistics.fmean(math.log(a / b) for a, b in pairs))

    def kl(run: dict[str, Any], name: str) -> float:
        return run["methods"][name]["kl"]["mean"]

    rows = [
        {"name": "MSE quarot / rtn", "values": [mse(r, "quarot") / mse(r, "rtn") for r in runs]}
    ]
    for kind in ("MSE", "geo. MSE", "KL", "KL centred"):
        for base in BASES:
            centred = f"{base}+c" if kind in ("geo. MSE", "KL centred") else base
            ours = f"optr({base})"
            measure = {"MSE": mse, "KL": kl, "KL centred": kl}.get(kind)
            values = [
                measure(r, ours) / measure(r, centred) if measure else geometric(r, ours, centred)
                for r in runs
            ]
            name = f"{kind.removesuffix(' centred')} {ours} / {centred}"
            bound = 1.0 if kind == "KL centred" and base in BASES[:2] else bounds.get(name)
            rows.append({"name": name, "values": values, "bound": bound})
    return [row | {"verdict": verdict(row)} for row in rows]


def verdict(row: dict[str, Any]) -> str:
    """``pass``: every seed within the bound; ``mean``: only the mean; else ``FAIL``."""
    bound, values = row.get("bound"), row["values"]
    if bound is None:
        return ""
    if max(values) <= bound and not (bound == 1.0 and max(values) == 1.0):
        return "pass"
    return "mean" if statistics.fmean(values) < bound else "FAIL"


def format_rows(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'ratio':<42} {'mean':>6} {'min':>6} {'max':>6} {'bound':>6}"]
    for row in rows:
        values, bound = row["values"], row.get("bound")
        shown = "" if bound is None else f"{bound:.2f}"
        numbers = (statistics.fmean(values), min(values), max(values))
        cells = " ".join(f"{x:6.3f}" for x in numbers)
        lines.append(f"{row['name']:<42} {cells} {shown:>6} {row['verdict']}")
    return "\n".join(lines)


def format_markdown(runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Means over the seeds of every method, then the ratios."""
    lines = ["| Method | W_O MSE | KL | Residual error | PPL | B/token |", "|---|" + "---:|" * 5]
    plain = statistics.fmean(run["full_precision"]["perplexity"] for run in runs)
    lines.append(f"| unquantized | | | | {plain:.2f} | |")
    for name in runs[0]["methods"]:
        entries = [run["methods"][name] for run in runs]
        mse, kl, residual = (
            statistics.fmean(e[key]["mean"] for e in entries)
            for key in ("output_mse", "kl", "residual_error")
        )
        perplexity = statistics.fmean(e["perplexity"] for e in entries)
        numbers = f"{mse:.4g} | {kl:.4f} | {residual:.4f} | {perplexity:.2f}"
        lines.append(f"| {name} | {numbers} | {entries[0]['bytes_per_token']} |")
    lines += ["", "| Ratio | mean | min | max | bound | |", "|---|" + "---:|" * 4 + "---|"]
    for row in rows:
        values, bound = row["values"], row.get("bound")
        shown = "" if bound is None else f"{bound:.2f}"
        mean, low, high = statistics.fmean(values), min(values), max(values)
        cells = f"{mean:.3f} | {low:.3f} | {high:.3f} | {shown} | {row['verdict']}"
        lines.append(f"| {row['name']} | {cells} |")
    return "\n".join(lines) + "\n"


def facts(
    args: argparse.Namespace,
    info: ModelInfo,
    windows: Windows,
    settings: OptRSettings,
    runs: list[dict[str, Any]],
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions(),
        "device": device_name(args.device),
        "dtype": args.dtype,
        "model": {"path": args.model, **info.to_json()},
        "test": {"source": windows.source, "sha256": windows.sha256()},
        "settings": dataclasses.asdict(settings),
        "runs": runs,
        "ratios": rows,
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"accuracy: {error}")
