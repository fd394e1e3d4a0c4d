#!/usr/bin/env python3
"""Compare SGLang's BF16 backends with --kv-quant at equal GPU memory, server against server.

    python scripts/bench_serving.py --model DIR [--dummy-weights] [--output out/bench]

Starts one server after the other with the same --mem-fraction-static and runs SGLang's own
benchmark (sglang.benchmark.one_batch_server) against each:

  sweep       one request per context length: time to first token, milliseconds per decoded token
  throughput  long prompts, as many requests as fit into that server's cache

Ratios are to the fastest BF16 backend of the same case in the same run. A BF16 backend that does
not start here is listed as missing; without any, the run fails. Saves bench.json after every
server, bench.md and bench.png at the end; `--redraw FOLDER` makes the last two again from
bench.json, on another machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from local_server import Server, ServerDidNotStart, environment  # noqa: E402

from sglang_kvquant.atomic import write_atomically  # noqa: E402

BENCHMARK = "sglang.benchmark.one_batch_server"
CALIBRATED = ("oscar", "optr")


@dataclass
class Point:
    """Medians of one context length, one request."""

    context: int
    first_token_s: float
    decode_ms: float
    repeats: int


@dataclass
class Load:
    """A full cache: as many requests at once as fit."""

    requests: int
    input_len: int
    output_len: int
    decode_tokens_per_s: float
    output_tokens_per_s: float


@dataclass
class Result:
    """What one server did."""

    label: str
    quantized: bool
    attention_backend: str
    capacity: int
    points: list[Point] = field(default_factory=list)
    load: Load | None = None


def median_points(rows: list[dict[str, Any]]) -> list[Point]:
    """Rows of the benchmark's result file, one request each, to medians per context length."""
    points = []
    for context in sorted({row["input_len"] for row in rows}):
        group = [row for row in rows if row["input_len"] == context]
        step = [(r["latency"] - r["last_ttft"]) / (r["output_len"] - 1) * 1e3 for r in group]
        first = statistics.median(r["last_ttft"] for r in group)
        points.append(Point(context, first, statistics.median(step), len(group)))
    return points


def requests_that_fit(capacity: int, tokens_per_request: int, max_running: int) -> int:
    return max(1, min(capacity // tokens_per_request, max_running))


def best_baseline(results: list[Result], context: int, name: str) -> float | None:
    """Smallest `name` of the BF16 servers at one context length."""
    values = [
        getattr(point, name)
        for result in results
        if not result.quantized
        for point in result.points
        if point.context == context
    ]
    return min(values, default=None)


def run_benchmark(server: Server, model: str, rows: Path, cases: list[str]) -> list[dict]:
    """One call of SGLang's benchmark; returns the lines that it added to `rows`."""
    rows.unlink(missing_ok=True)
    command = [sys.executable, "-m", BENCHMARK, "--model", "None"]
    command += ["--base-url", f"http://127.0.0.1:{server.port}", "--local-tokenizer-path", model]
    command += ["--dataset-name", "random-ids", "--client-stream-interval", "16"]
    command += ["--no-append-to-github-summary", "--result-filename", str(rows), *cases]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode or not rows.exists():
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"{BENCHMARK} measured nothing; the end of its output:\n{tail}")
    return [json.loads(line) for line in rows.read_text().splitlines()]


def measure(args: argparse.Namespace, label: str, flags: list[str], folder: Path) -> Result:
    """Start one server and run both parts."""
    log = folder / f"{label.replace(' ', '_')}.log"
    print(f"{label}: starting (log: {log}) …", flush=True)
    common = ["--mem-fraction-static", str(args.mem_fraction), *shlex.split(args.server_args)]
    if args.dummy_weights:
        common += ["--load-format", "dummy"]
    begin = time.monotonic()
    with Server(args.model, log, [*common, *flags], args.start_seconds) as server:
        info = server.get("/server_info")
        capacity = int(info["max_total_num_tokens"])
        print(
            f"  ready after {time.monotonic() - begin:.0f} s, {capacity:,} KV tokens", flush=True
        )
        backend = str(info.get("attention_backend"))
        result = Result(label, "--kv-quant" in flags, backend, capacity)
        rows = folder / "rows.jsonl"
        longest = min(capacity, int(info.get("context_length") or capacity)) - args.decode_tokens
        contexts = [context for context in args.contexts if context < longest]
        if contexts:
            lens = [str(context) for context in contexts for _ in range(args.repeats)]
            cases = ["--batch-size", "1", "--input-len", *lens]
            cases += ["--output-len", str(args.decode_tokens)]
            result.points = median_points(run_benchmark(server, args.model, rows, cases))
        if args.throughput:
            result.load = run_load(args, server, info, capacity, rows)
    return result


def run_load(
    args: argparse.Namespace, server: Server, info: dict, capacity: int, rows: Path
) -> Load:
    input_len, output_len = args.throughput
    running = info["internal_states"][0]["effective_max_running_requests_per_dp"]
    cap = min(int(running), args.max_requests)
    count = requests_that_fit(capacity, input_len + output_len, cap)
    cases = ["--batch-size", str(count), "--input-len", str(input_len)]
    cases += ["--output-len", str(output_len), "--skip-warmup"]
    row = run_benchmark(server, args.model, rows, cases)[0]
    decoding = row["latency"] - row["last_ttft"]
    return Load(
        count,
        input_len,
        output_len,
        count * (output_len - 1) / decoding,
        count * output_len / row["latency"],
    )


def random_checkpoint(model: str, method: str, folder: Path) -> Path:
    """A checkpoint of random rotations: speed does not depend on their values."""
    import torch

    from sglang_kvquant.checkpoint import (
        Checkpoint,
        LayerRotations,
        data_free_checkpoint,
        save_checkpoint,
    )
    from sglang_kvquant.model_info import ModelInfo

    info = ModelInfo.from_model_path(model)
    manifest = data_free_checkpoint("quarot", info).manifest
    manifest = replace(manifest, method=method, base="quarot" if method == "optr" else None)
    generator = torch.Generator().manual_seed(0)
    heads, dim = info.num_kv_heads, info.head_dim
    layers = {}
    for layer in range(info.num_layers):
        random = torch.randn(2, heads, dim, dim, generator=generator, dtype=torch.float64)
        r_k, r_v = torch.linalg.qr(random)[0].float()
        layers[layer] = LayerRotations(r_k, r_v, torch.randn(heads, dim, generator=generator))
    path = folder / f"random-{method}.safetensors"
    save_checkpoint(Checkpoint(manifest, layers), path)
    return path


def table(results: list[Result], contexts: list[int]) -> str:
    """Both parts as Markdown, with ratios to the best BF16 server (above 1 is better)."""
    lines = ["| Context | " + " | ".join(r.label for r in results) + " |"]
    lines.append("|---:|" + "---:|" * len(results))
    for context in contexts:
        cells = []
        for result in results:
            point = next((p for p in result.points if p.context == context), None)
            if point is None:
                cells.append("does not fit")
                continue
            cell = f"{point.decode_ms:.2f} ms, first {point.first_token_s * 1e3:.0f} ms"
            base = best_baseline(results, context, "decode_ms")
            first = best_baseline(results, context, "first_token_s")
            if result.quantized and base and first:
                cell += f" ({base / point.decode_ms:.2f}×, {first / point.first_token_s:.2f}×)"
            cells.append(cell)
        lines.append(f"| {context:,} | " + " | ".join(cells) + " |")
    plain = [r for r in results if not r.quantized]
    capacity = max(r.capacity for r in plain)
    lines += ["", "| Server | KV tokens | Requests | Decode tok/s | Overall output tok/s |"]
    lines.append("|---|---:|---:|---:|---:|")
    best = max((r.load.decode_tokens_per_s for r in plain if r.load), default=0.0)
    overall = max((r.load.output_tokens_per_s for r in plain if r.load), default=0.0)
    for r in results:
        row = f"| {r.label} | {r.capacity:,}"
        row += f" ({r.capacity / capacity:.2f}×)" if r.quantized else ""
        if r.load:
            row += f" | {r.load.requests} | {r.load.decode_tokens_per_s:,.0f}"
            row += f" ({r.load.decode_tokens_per_s / best:.2f}×)" if r.quantized and best else ""
            row += f" | {r.load.output_tokens_per_s:,.0f}"
            row += (
                f" ({r.load.output_tokens_per_s / overall:.2f}×)"
                if r.quantized and overall
                else ""
            )
        else:
            row += " | | |"
        lines.append(row + " |")
    return "\n".join(lines)


def plot(results: list[Result], path: Path, title: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print(f"{path.name} left out: matplotlib is not installed; use --redraw where it is")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for result in results:
        xs, ys = [p.context for p in result.points], [p.decode_ms for p in result.points]
        axes.plot(xs, ys, "o-" if result.quantized else "s--", label=result.label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("ms per decoded token, one request")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def machine() -> dict[str, str]:
    """Card, versions and commit, for the record."""
    import torch

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    cpu = f"CPU {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    names = ("sglang", "torch", "triton", "sglang-kernel", "flashinfer-python")
    return {"device": card, "commit": commit, **{name: installed(name) for name in names}}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="model directory")
    source.add_argument("--redraw", type=Path, metavar="FOLDER", help="only table and plot")
    add("--dummy-weights", action="store_true", help="random weights and random rotations")
    add("--backends", nargs="*", default=["fa3", "flashinfer", "triton"], help="BF16 baselines")
    add("--methods", nargs="*", default=["quarot", "optr"], help="values of --kv-quant")
    add("--mem-fraction", type=float, default=0.8, help="the same for every server")
    add(
        "--contexts",
        type=int,
        nargs="*",
        default=[1024, 4096, 8192, 16384, 32768, 65536, 131072, 261120],
    )
    add("--decode-tokens", type=int, default=64, help="decoded per request of the sweep")
    add("--repeats", type=int, default=3, help="of each context length")
    add(
        "--throughput",
        type=int,
        nargs=2,
        default=[32768, 1024],
        metavar=("IN", "OUT"),
        help="prompt and output tokens; 0 0 leaves this part out",
    )
    add("--max-requests", type=int, default=256, help="of the throughput part")
    add("--server-args", default="", metavar="'FLAGS'", help="more flags for every server")
    add("--start-seconds", type=float, default=600)
    add("--output", type=Path, default=ROOT / "out" / "bench_serving", help="a folder")
    args = parser.parse_args()
    if args.decode_tokens < 2 or args.repeats < 1:
        parser.error("--decode-tokens must be at least 2 and --repeats at least 1")
    if not any(args.throughput):
        args.throughput = None
    return args


def measure_all(args: argparse.Namespace, folder: Path) -> None:
    """Every server in turn; bench.json holds what has been measured so far."""
    facts = {"command": shlex.join(sys.argv), **machine(), "model": Path(args.model).name}
    results: list[Result] = []
    missing: dict[str, str] = {}
    servers = [(f"BF16 {name}", ["--attention-backend", name]) for name in args.backends]
    with tempfile.TemporaryDirectory() as scratch:
        for method in args.methods:
            flags = ["--kv-quant", method]
            if args.dummy_weights and method in CALIBRATED:
                checkpoint = random_checkpoint(args.model, method, Path(scratch))
                flags += ["--kv-quant-checkpoint", str(checkpoint)]
            servers.append((method, flags))
        for label, flags in servers:
            try:
                results.append(measure(args, label, flags, folder))
            except (ServerDidNotStart, RuntimeError) as error:
                if "--kv-quant" in flags:
                    sys.exit(f"bench_serving: {label}: {error}")
                missing[label] = str(error)
                print(f"  not measured: {str(error).splitlines()[-1]}", flush=True)
            record = {"facts": facts, "missing": missing, "results": [asdict(r) for r in results]}
            write_atomically(folder / "bench.json", f"{json.dumps(record, indent=1)}\n".encode())


def load_results(path: Path) -> list[Result]:
    """The results that bench.json holds."""
    results = []
    for row in json.loads(path.read_text())["results"]:
        points = [Point(**point) for point in row.pop("points")]
        load = row.pop("load")
        results.append(Result(**row, points=points, load=Load(**load) if load else None))
    return results


def show(folder: Path) -> None:
    """Table and plot from bench.json."""
    record = json.loads((folder / "bench.json").read_text())
    facts, results = record["facts"], load_results(folder / "bench.json")
    if all(result.quantized for result in results):
        sys.exit(
            "bench_serving: no BF16 server was measured, so there is nothing to compare with."
        )
    contexts = sorted({point.context for result in results for point in result.points})
    text = table(results, contexts)
    write_atomically(folder / "bench.md", f"{text}\n".encode())
    plot(results, folder / "bench.png", f"{facts['model']}, {facts['device']}")
    print("\n" + text)
    print("\n" + "\n".join(f"{name}: {value}" for name, value in facts.items()))
    for result in results:
        print(f"attention backend of {result.label}: {result.attention_backend}")
    for label in record["missing"]:
        print(f"not measured: {label} (see bench.json)")
    print(f"saved in {folder}")


def main() -> None:
    args = parse_arguments()
    if args.redraw is None:
        args.output.mkdir(parents=True, exist_ok=True)
        measure_all(args, args.output)
    show(args.redraw or args.output)


if __name__ == "__main__":
    main()
