#!/usr/bin/env python3
"""Log-probabilities of a text from two machines' servers: do they compute the same model?

    python scripts/compare_logprobs.py --model DIR --save cpu.json      # on one machine
    python scripts/compare_logprobs.py --model DIR --save gpu.json      # on another
    python scripts/compare_logprobs.py cpu.json gpu.json                # differences

One server per method. Prompts are prefilled in chunks of 256 tokens, so that from the second chunk
on every token reads the cached prefix; then each prompt is continued greedily.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from local_server import Server  # noqa: E402

from sglang_kvquant.atomic import write_atomically  # noqa: E402

CHUNK = 256


def prompts(model: str, text: Path, num_prompts: int, num_tokens: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(text.read_text())["input_ids"]
    if len(ids) < num_prompts * num_tokens:
        sys.exit(f"compare_logprobs: {text} has {len(ids)} tokens, too few.")
    return [ids[i * num_tokens : (i + 1) * num_tokens] for i in range(num_prompts)]


def ask(server: Server, ids: list[int], new_tokens: int) -> dict[str, Any]:
    """Log-probability of every prompt token but the first, and a greedy continuation."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    with server.open("/generate", body, timeout=600) as response:
        answer = json.loads(response.read())
    rows = answer["meta_info"]["input_token_logprobs"][1:]
    return {"prompt": [row[0] for row in rows], "greedy": answer["output_ids"]}


def save(args: argparse.Namespace) -> None:
    ids = prompts(args.model, args.text, args.num_prompts, args.num_tokens)
    results: dict[str, Any] = {}
    for method in args.methods:
        flags = ["--chunked-prefill-size", str(CHUNK), "--disable-radix-cache"]
        flags += ["--max-running-requests", "8", *shlex.split(args.server_args)]
        if method != "bf16":
            flags += ["--kv-quant", method]
        else:
            flags += shlex.split(args.unquantized_args)
        with (
            tempfile.TemporaryDirectory() as folder,
            Server(args.model, Path(folder) / "log", flags) as server,
        ):
            results[method] = [ask(server, prompt, args.new_tokens) for prompt in ids]
        print(f"{method}: {len(ids)} prompts of {args.num_tokens} tokens", flush=True)
    write_atomically(args.save, json.dumps(results).encode())


def common_prefix(a: list[int], b: list[int]) -> int:
    equal = [x == y for x, y in zip(a, b, strict=True)]
    return equal.index(False) if False in equal else len(equal)


def compare(paths: list[Path]) -> None:
    first, second = (json.loads(path.read_text()) for path in paths)
    print(
        "| Method | Tokens | Mean loss | | Mean abs. difference | Largest | Greedy tokens equal |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for method in first:
        if method not in second:
            continue
        pairs = list(zip(first[method], second[method], strict=True))
        sides = [
            [x for answer in side[method] for x in answer["prompt"]] for side in (first, second)
        ]
        gaps = [abs(x - y) for x, y in zip(*sides, strict=True)]
        losses = [-sum(side) / len(side) for side in sides]
        same = sum(common_prefix(a["greedy"], b["greedy"]) for a, b in pairs)
        total = sum(len(a["greedy"]) for a, _ in pairs)
        print(
            f"| {method} | {len(gaps):,} | {losses[0]:.4f} | {losses[1]:.4f} | "
            f"{sum(gaps) / len(gaps):.4f} | {max(gaps):.3f} | {same} of {total} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", type=Path, nargs="*", help="two saved files to compare")
    add("--save", type=Path, help="ask servers on this machine and save their answers")
    add("--model", help="model directory")
    add("--methods", nargs="+", default=["bf16", "rtn", "quarot"])
    add("--text", type=Path, default=ROOT / "scripts" / "demo_document.txt")
    add("--num-prompts", type=int, default=1)
    add("--num-tokens", type=int, default=512)
    add("--new-tokens", type=int, default=32)
    add("--server-args", default="", metavar="'FLAGS'", help="more flags for every server")
    add("--unquantized-args", default="", metavar="'FLAGS'", help="more flags for bf16")
    args = parser.parse_args()
    if args.save and args.model and not args.files:
        save(args)
    elif len(args.files) == 2 and not args.save:
        compare(args.files)
    else:
        parser.error("give --model and --save, or two files")


if __name__ == "__main__":
    main()
