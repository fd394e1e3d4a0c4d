#!/usr/bin/env python3
"""Calibrate a real model, serve it from a 2-bit KV cache, and compare it with the plain server.

Builds SmolLM2-135M-Instruct, calibrates it with OptR, starts SGLang twice (unquantized, then with
--kv-quant optr), asks both servers three questions about a page of text, and prints the answers
side by side with the bytes per token and the KV capacity. Uses a GPU when there is one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import get_smollm2  # noqa: E402
from local_server import Server, ServerDidNotStart, environment  # noqa: E402

DOCUMENT = (ROOT / "scripts" / "demo_document.txt").read_text()
QUESTIONS = (
    "Who keeps the lighthouse at Skerry Point, and since which year?",
    "Which animals live on the island, according to the text?",
    "Why was the old lamp replaced?",
)


@dataclass
class Run:
    """What one server said."""

    answers: list[str]
    tokens_per_second: float
    capacity: int
    cached_tokens: int


@dataclass
class Answer:
    """One answer, and how long its tokens took after the first one."""

    text: str
    decoded_tokens: int
    decode_seconds: float
    cached_tokens: int


def ask(server: Server, question: str) -> Answer:
    """One greedy answer, streamed from the OpenAI-compatible endpoint."""
    messages = [{"role": "user", "content": f"{DOCUMENT}\n\nQuestion: {question}"}]
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 60}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, usage, arrivals = "", {}, []
    with server.open("/v1/chat/completions", body) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    text += piece
                    arrivals.append(time.monotonic())
    if len(arrivals) < 2:
        sys.exit(f"demo: no streamed answer to {question!r}; see the server's log {server.log}.")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text.strip(),
        usage["completion_tokens"] - 1,
        arrivals[-1] - arrivals[0],
        details.get("cached_tokens", 0),
    )


def question_server(label: str, model: Path, log: Path, flags: list[str]) -> Run:
    print(f"Starting the {label} server (its log: {log}) …", flush=True)
    with Server(model, log, flags) as server:
        answers = [ask(server, question) for question in QUESTIONS]
        capacity = int(server.get("/get_server_info")["max_total_num_tokens"])
    decoded = sum(answer.decoded_tokens for answer in answers)
    return Run(
        [answer.text for answer in answers],
        decoded / sum(answer.decode_seconds for answer in answers),
        capacity,
        sum(answer.cached_tokens for answer in answers),
    )


def calibrate(model: Path, quick: bool) -> Path:
    """Run `sglang-kvquant calibrate` and return the checkpoint, made anew only when missing."""
    from sglang_kvquant.checkpoint import default_checkpoint_path

    checkpoint = default_checkpoint_path(str(model), "optr")
    if checkpoint.exists():
        print(f"Using the checkpoint {checkpoint} of an earlier run.")
        return checkpoint
    command = [sys.executable, "-m", "sglang_kvquant", "calibrate", "--model", str(model)]
    command += ["--method", "optr"]
    if quick:
        print("Calibrating with less text and fewer steps than by default: there is no GPU.")
        command += ["--num-sequences", "8", "--num-queries", "64", "--steps", "40"]
    if subprocess.call(command, env=environment()):
        sys.exit("demo: the calibration failed; see its message above.")
    return checkpoint


def side_by_side(left: str, right: str, width: int) -> str:
    columns = [textwrap.wrap(text, width) or [""] for text in (left, right)]
    height = max(map(len, columns))
    rows = [column + [""] * (height - len(column)) for column in columns]
    return "\n".join(f"  {a:<{width}}  {b}" for a, b in zip(*rows, strict=True))


def report(model: Path, checkpoint: Path, plain: Run, packed: Run) -> None:
    from sglang_kvquant.checkpoint import load_checkpoint
    from sglang_kvquant.layout import GQALayout

    manifest = load_checkpoint(checkpoint).manifest
    info = manifest.model
    layout = GQALayout(info.num_kv_heads, info.head_dim, manifest.quantizer.group_size)
    packed_bytes = layout.bytes_per_token * info.num_layers
    plain_bytes = layout.bf16_bytes_per_token * info.num_layers
    width = (min(shutil.get_terminal_size((80, 24)).columns, 100) - 4) // 2
    for index, question in enumerate(QUESTIONS):
        print(f"\nQ: {question}")
        print(side_by_side("[BF16 cache]", "[2-bit cache]", width))
        print(side_by_side(plain.answers[index], packed.answers[index], width))
    ratio = plain_bytes / packed_bytes
    print(
        f"\n{'':24}{'BF16 cache':>14}{'--kv-quant optr':>18}\n"
        f"{'KV bytes per token':24}{plain_bytes:>14,}{packed_bytes:>18,}   "
        f"({ratio:.1f} times fewer)\n"
        f"{'KV capacity, tokens':24}{plain.capacity:>14,}{packed.capacity:>18,}   "
        f"(windows included)\n"
        f"{'tokens per second':24}{plain.tokens_per_second:>14.1f}"
        f"{packed.tokens_per_second:>18.1f}   (one request, decoding)\n"
        f"{'prompt tokens reused':24}{plain.cached_tokens:>14,}{packed.cached_tokens:>18,}\n"
        f"\nModel:       {model}\nCheckpoint:  {checkpoint}\n"
        f"Serve it:    python -m sglang.launch_server --model-path {model} --kv-quant optr"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument(
        "--server-args", default="", metavar="'FLAGS'", help="more flags for both servers"
    )
    parser.add_argument(
        "--unquantized-args", default="", metavar="'FLAGS'", help="more flags for the first one"
    )
    args = parser.parse_args()
    import torch

    begin = time.monotonic()
    logs = ROOT / ".cache" / "demo"
    logs.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    flags = [] if gpu else ["--device", "cpu", "--dtype", "bfloat16"]
    flags += ["--mem-fraction-static", "0.5" if gpu else "0.3", "--max-running-requests", "8"]
    flags += ["--enable-cache-report", *shlex.split(args.server_args)]
    plain_flags = flags if gpu else [*flags, "--attention-backend", "torch_native"]
    plain_flags = [*plain_flags, *shlex.split(args.unquantized_args)]
    model = get_smollm2.build(args.model, ROOT / ".cache" / "downloads")
    checkpoint = calibrate(model, quick=not gpu)
    quantized_flags = [*flags, "--kv-quant", "optr"]
    try:
        plain = question_server("unquantized", model, logs / "unquantized.log", plain_flags)
        packed = question_server("2-bit", model, logs / "kvquant.log", quantized_flags)
    except ServerDidNotStart as error:
        sys.exit(f"demo: {error}")
    report(model, checkpoint, plain, packed)
    print(f"The demo took {time.monotonic() - begin:.0f} s; both servers are stopped.")


if __name__ == "__main__":
    main()
