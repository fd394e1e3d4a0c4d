"""``sglang-kvquant calibrate``: make the checkpoint of a model."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from ..config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS, GROUP_SIZES

EPILOG = """\
The text is cut into sequences of --seq-len tokens. Without --data the project's own text is used:
about 18,000 tokens of prose, dialogue, code, tables and JSON. --data takes UTF-8 text, or .jsonl
with {"text": ...}, {"messages": [...]} or {"prompt": ..., "completion": ...} per line (chats pass
through the model's chat template); either may be compressed as .xz.

A run that was killed continues where it stopped when it is started again with the same options.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to ``sglang-kvquant``."""
    parser = subparsers.add_parser(
        "calibrate",
        help="make the checkpoint of a model from text",
        description="Make the rotations that --kv-quant oscar or optr reads, once per model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="model directory or Hugging Face name")
    parser.add_argument("--method", choices=("oscar", "optr"), default="optr")
    parser.add_argument(
        "--base",
        choices=("quarot", "oscar", "oscar-per-head"),
        help="rotation of oscar (default: oscar), start of optr (default: quarot)",
    )
    parser.add_argument("--data", metavar="FILE", help="text to calibrate on")
    parser.add_argument(
        "--output", metavar="FILE", help="default: where the server looks for this model"
    )
    text = parser.add_argument_group("text")
    text.add_argument("--seq-len", type=int, default=1024, help="tokens per sequence")
    text.add_argument(
        "--num-sequences",
        type=int,
        help="sequences to learn from (default: as many as the text has, 8 to 24)",
    )
    text.add_argument("--num-heldout", type=int, default=4, help="other sequences, to select with")
    text.add_argument("--seed", type=int, default=0)
    quantizer = parser.add_argument_group("quantizer and windows")
    quantizer.add_argument(
        "--group-size", type=int, choices=GROUP_SIZES, help="default: the largest that fits"
    )
    quantizer.add_argument("--sink-tokens", type=int, default=DEFAULT_SINK_TOKENS)
    quantizer.add_argument("--recent-tokens", type=int, default=DEFAULT_RECENT_TOKENS)
    optr = parser.add_argument_group("optr")
    optr.add_argument("--steps", type=int, help="Adam steps; 0 only centres the keys")
    optr.add_argument("--lr", type=float, help="learning rate")
    optr.add_argument("--lambda-k", type=float, help="weight of the output error of keys")
    optr.add_argument("--num-queries", type=int, help="scored queries per sequence")
    optr.add_argument("--query-selection", choices=("last", "spread"))
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", help="default: cuda when there is a GPU, else cpu")
    machine.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the model; auto: float32 on the CPU, else as stored",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate as the options say; raises ValueError with a sentence for the user."""
    from ..checkpoint import default_checkpoint_path, save_checkpoint
    from ..model_info import ModelInfo, resolve_model_path

    info = ModelInfo.from_model_path(args.model)
    recipe = _recipe(args, info.head_dim)
    if args.output:
        output = Path(args.output).expanduser()
    else:
        output = default_checkpoint_path(args.model, args.method)
    work_root = output.with_name(f".{output.name}.work")
    begin = time.perf_counter()
    checkpoint = _calibrate(args, str(resolve_model_path(args.model)), info, recipe, work_root)
    replaced = output.exists()
    save_checkpoint(checkpoint, output)
    shutil.rmtree(work_root, ignore_errors=True)
    _report(args, checkpoint, output, replaced, time.perf_counter() - begin)
    return 0


def _recipe(args: argparse.Namespace, head_dim: int) -> Any:
    from ..calibration.recipe import DEFAULT_BASE, Recipe
    from ..calibration.settings import OptRSettings
    from ..config import QuantizerConfig

    quantizer = QuantizerConfig.for_method(args.method, head_dim, args.group_size)
    names = ("steps", "lr", "lambda_k", "num_queries", "query_selection")
    chosen = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if chosen and args.method != "optr":
        options = ", ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise ValueError(f"{options} would be ignored with --method {args.method}: drop it.")
    settings = OptRSettings(
        sink_tokens=args.sink_tokens, recent_tokens=args.recent_tokens, seed=args.seed, **chosen
    )
    return Recipe(args.method, args.base or DEFAULT_BASE[args.method], quantizer, settings)


def _calibrate(
    args: argparse.Namespace, model_dir: str, info: Any, recipe: Any, work_root: Path
) -> Any:
    import torch
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from ..calibration.capture import peak_bytes
    from ..calibration.data import load_tokens
    from ..calibration.recipe import calibrate, check_tokens, load_model

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokens = load_tokens(
        tokenizer, args.data, args.seq_len, args.num_sequences, args.num_heldout, args.seed
    )
    check_tokens(tokens, recipe)  # before a large model is loaded
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(model_dir, args.dtype, device)
    need = peak_bytes(info, len(tokens.all()), args.seq_len, model.dtype.itemsize)
    print(
        f"{info.num_layers} layers, {tuple(tokens.train.shape)} tokens of {tokens.source}, "
        f"{device}: about {need / 2**30:.1f} GiB beside the model's weights.",
        file=sys.stderr,
    )
    with tqdm(total=info.num_layers, desc=f"{recipe.method}({recipe.base})", unit="layer") as bar:

        def on_layer(layer_id: int, result: Any, seconds: float | None) -> None:
            how = "by an earlier run" if seconds is None else f"in {seconds:.1f} s"
            bar.set_postfix_str(f"layer {layer_id} solved {how}", refresh=False)
            bar.update()

        try:
            return calibrate(model, tokens, recipe, info, work_root, on_layer)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"{device} ran out of memory ({str(error).splitlines()[0]}); use fewer "
                "--num-sequences, a smaller --seq-len or --device cpu. Solved layers are kept."
            ) from error


def _report(
    args: argparse.Namespace, checkpoint: Any, output: Path, replaced: bool, seconds: float
) -> None:
    from ..calibration.report import objective_table

    if checkpoint.manifest.objective is not None:
        print("Held-out loss after / before learning (before: the base with centred keys)")
        print(objective_table(checkpoint.manifest.objective))
    again = ", replacing the one there" if replaced else ""
    print(f"Saved in {seconds:.0f} s{again}: {output}")
    command = ["python", "-m", "sglang.launch_server", "--model-path", args.model]
    command += ["--kv-quant", args.method]
    command += ["--kv-quant-checkpoint", str(output)] if args.output else []
    print(f"Serve with: {shlex.join(command)}")
