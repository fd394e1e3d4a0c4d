"""``sglang-kvquant evaluate``: what each method costs in accuracy on held-out text."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS, WindowConfig

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint
    from ..evaluation.data import Windows
    from ..evaluation.metrics import Evaluator
    from ..model_info import ModelInfo

DESCRIPTION = """\
Simulate serving from a 2-bit KV cache on held-out text, with the server's own quantizer, and
compare with the unquantized model: error of every attention output after W_O, KL divergence of
the next-token distribution, perplexity, bytes per token. Every query reads its cache as a decode
step would.

methods: rtn and quarot need no checkpoint; oscar, oscar-per-head and optr, and the centred bases
quarot+c, oscar+c and oscar-per-head+c, take --checkpoint NAME=FILE or the default place of that
model and method. Any other name is a label for the file given with --checkpoint."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "evaluate",
        help="measure the accuracy of methods on held-out text",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="model directory or Hugging Face name")
    parser.add_argument(
        "--methods", required=True, help="comma-separated, such as rtn,quarot,oscar,optr"
    )
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="checkpoint of a method; may be repeated",
    )
    parser.add_argument(
        "--data", required=True, type=Path, help="held-out text or .jsonl, each also as .xz"
    )
    parser.add_argument("--max-tokens", type=int, help="use only the first tokens of the text")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per window")
    parser.add_argument("--num-windows", type=int, default=8, help="windows to score")
    parser.add_argument("--sink-tokens", type=int, default=DEFAULT_SINK_TOKENS)
    parser.add_argument("--recent-tokens", type=int, default=DEFAULT_RECENT_TOKENS)
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="save all numbers")
    parser.add_argument("--report", type=Path, metavar="DIR", help="save figures and report.html")
    parser.add_argument("--device", help="cpu or cuda; the GPU when there is one")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="of model and window copies; auto is float32 on the CPU, else the model's own",
    )
    parser.add_argument("--batch-size", type=int, default=1, help="windows per forward pass")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the table, save what was asked for."""
    import torch

    from ..evaluation.data import load_windows
    from ..evaluation.methods import load_methods
    from ..evaluation.report import write_report
    from ..evaluation.results import format_table
    from ..model_info import ModelInfo, resolve_model_path

    names, files = _method_names(args.methods), _checkpoint_files(args.checkpoint)
    _check_numbers(args)
    windows_config = WindowConfig(args.sink_tokens, args.recent_tokens)
    info = ModelInfo.from_model_path(args.model)
    checkpoints = load_methods(names, files, args.model, info)
    directory = str(resolve_model_path(args.model))
    windows = load_windows(
        load_tokenizer(directory), args.data, args.seq_len, args.num_windows, args.max_tokens
    )
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    results = evaluate(
        directory, checkpoints, windows, windows_config, info, device, args.dtype, args.batch_size
    )
    results["model"]["path"] = args.model
    results["command"] = shlex.join(["sglang-kvquant", *sys.argv[1:]])
    for name, entry in results["methods"].items():
        entry["origin"]["checkpoint"] = files.get(name)
    print(format_table(results))
    if args.output:
        save_json(results, args.output)
        print(f"numbers: {args.output}")
    if args.report:
        print(f"report:  {write_report(results, args.report)}")
    return 0


def evaluate(
    directory: str,
    checkpoints: dict[str, Checkpoint],
    windows: Windows,
    windows_config: WindowConfig,
    info: ModelInfo,
    device: str,
    dtype: str,
    batch_size: int,
) -> dict[str, Any]:
    """Load the model, score all windows, and return everything that is saved."""
    from ..calibration.recipe import load_model
    from ..evaluation.methods import build_transforms
    from ..evaluation.metrics import Evaluator
    from ..evaluation.results import origin, summarize
    from ..evaluation.simulate import ReadRule

    model = load_model(directory, dtype, device)
    transforms = {name: build_transforms(c, device) for name, c in checkpoints.items()}
    rule = ReadRule(windows_config, window_dtype=model.dtype)
    evaluator = Evaluator(model, transforms, rule, info.num_kv_heads)
    run_batches(evaluator, windows.tokens, batch_size)
    results = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "model": {
            **info.to_json(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": device_name(device),
        },
        "data": {
            "source": windows.source,
            "sha256": windows.sha256(),
            "num_windows": windows.tokens.shape[0],
            "seq_len": windows.tokens.shape[1],
        },
        "windows": {
            "sink_tokens": windows_config.sink_tokens,
            "recent_tokens": windows_config.recent_tokens,
        },
        **summarize(evaluator, checkpoints, info),
    }
    for name, entry in results["methods"].items():
        entry["origin"] = origin(checkpoints[name], None)
    return results


def run_batches(evaluator: Evaluator, tokens: torch.Tensor, batch_size: int) -> None:
    """All windows, with a progress bar that knows the time left."""
    from tqdm import tqdm

    batches = tokens.split(batch_size)
    passes = len(batches) * (1 + len(evaluator.methods))
    with tqdm(total=passes, desc="evaluate", unit="pass", dynamic_ncols=True) as bar:
        for batch in batches:
            evaluator.run(batch, advance=bar.update)


def load_tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def versions() -> dict[str, str]:
    import torch
    import transformers

    from .. import __version__

    return {
        "sglang_kvquant": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: str) -> str:
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def save_json(results: dict[str, Any], path: Path) -> None:
    from ..atomic import write_atomically

    write_atomically(path, json.dumps(results, indent=1, allow_nan=False).encode())


def _method_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"--methods must name each method once, got {text!r}.")
    if "none" in names:
        raise ValueError("the unquantized model is always measured; drop none from --methods.")
    # Figures and percentages are relative to plain INT2.
    return names if "rtn" in names else ["rtn", *names]


def _checkpoint_files(given: list[str]) -> dict[str, str]:
    files: dict[str, str] = {}
    for item in given:
        name, separator, path = item.partition("=")
        if not separator or not name or not path or name in files:
            raise ValueError(
                f"--checkpoint takes NAME=FILE, once per name, got {item!r}; for example "
                "--checkpoint optr=optr.safetensors."
            )
        files[name] = path
    return files


def _check_numbers(args: argparse.Namespace) -> None:
    if args.seq_len < 2 or args.num_windows < 1 or args.batch_size < 1:
        raise ValueError(
            "--seq-len must be at least 2, --num-windows and --batch-size at least 1."
        )
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ValueError(f"--max-tokens must be positive, got {args.max_tokens}.")
