"""``sglang-kvquant convert``: OSCAR's published rotations to a checkpoint, and back."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EPILOG = """\
examples:
  sglang-kvquant convert --from-oscar k_rotation.pt v_rotation.pt \\
      --model MODEL --output oscar.safetensors
  sglang-kvquant convert --to-oscar optr.safetensors --output DIRECTORY --drop-mean
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="convert OSCAR's rotation files to a checkpoint, and back",
        description="Convert OSCAR's rotation files to a checkpoint, or a checkpoint to them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--from-oscar",
        nargs="+",
        metavar="FILE",
        help="the K file and the V file, or a directory that has one of each",
    )
    direction.add_argument("--to-oscar", metavar="CHECKPOINT", help="checkpoint to convert")
    parser.add_argument(
        "--output",
        required=True,
        help="checkpoint to write, or, for --to-oscar, the directory of the two files",
    )
    parser.add_argument("--model", help="model that OSCAR's files were made for")
    parser.add_argument(
        "--k-clip",
        type=float,
        metavar="RATIO",
        help="percentile clip of keys, 0 for none (default 0.96, OSCAR's)",
    )
    parser.add_argument(
        "--v-clip",
        type=float,
        metavar="RATIO",
        help="percentile clip of values, 0 for none (default 0.92, OSCAR's)",
    )
    parser.add_argument("--group-size", type=int, help="elements per scale (default: head_dim)")
    parser.add_argument(
        "--drop-mean",
        action="store_true",
        help="for --to-oscar: leave out the key mean, which OSCAR's format cannot carry",
    )


def run(args: argparse.Namespace) -> int:
    importing = args.from_oscar is not None
    unused = {
        "--drop-mean": importing and args.drop_mean,
        "--model": not importing and args.model is not None,
        "--k-clip": not importing and args.k_clip is not None,
        "--v-clip": not importing and args.v_clip is not None,
        "--group-size": not importing and args.group_size is not None,
    }
    wrong = [name for name, given in unused.items() if given]
    if wrong:
        direction = "--from-oscar" if importing else "--to-oscar"
        raise ValueError(f"{', '.join(wrong)} has no meaning with {direction}; leave it out.")
    return _from_oscar(args) if importing else _to_oscar(args)


def _from_oscar(args: argparse.Namespace) -> int:
    from ..checkpoint import save_checkpoint
    from ..config import NO_CLIP, OSCAR_K_CLIP, OSCAR_V_CLIP, Clip, QuantizerConfig
    from ..model_info import ModelInfo
    from ..oscar_format import checkpoint_from_oscar, find_oscar_files, load_oscar_pair

    if args.model is None:
        raise ValueError("--from-oscar needs --model: OSCAR's files do not say their model.")
    if len(args.from_oscar) > 2:
        raise ValueError("--from-oscar takes a K file and a V file, or one directory.")
    info = ModelInfo.from_model_path(args.model)

    def clip(ratio: float | None, default: Clip) -> Clip:
        if ratio is None:
            return default
        return Clip("percentile", ratio) if ratio else NO_CLIP

    defaults = QuantizerConfig.for_method("oscar", info.head_dim, args.group_size)
    quantizer = QuantizerConfig(
        defaults.group_size, clip(args.k_clip, OSCAR_K_CLIP), clip(args.v_clip, OSCAR_V_CLIP)
    )
    if len(args.from_oscar) == 1:
        directory = Path(args.from_oscar[0])
        if not directory.is_dir():
            raise ValueError(f"{directory} is no directory; give the K file and the V file.")
        k_file, v_file = find_oscar_files(directory)
    else:
        k_file, v_file = load_oscar_pair(*args.from_oscar)
    checkpoint = checkpoint_from_oscar(k_file, v_file, info, quantizer)
    save_checkpoint(checkpoint, args.output)
    print(f"K rotations  {k_file.path} ({k_file.objective or 'no objective'})")
    print(f"V rotations  {v_file.path} ({v_file.objective or 'no objective'})")
    print(f"checkpoint   {args.output}")
    print(
        "OSCAR's files name no model: only the number of layers and the shapes were compared.",
        file=sys.stderr,
    )
    return 0


def _to_oscar(args: argparse.Namespace) -> int:
    from ..checkpoint import load_checkpoint
    from ..oscar_format import save_oscar_files

    checkpoint = load_checkpoint(args.to_oscar)
    k_path, v_path = save_oscar_files(checkpoint, args.output, args.drop_mean)
    quantizer = checkpoint.manifest.quantizer
    print(f"K rotations  {k_path}")
    print(f"V rotations  {v_path}")
    print(
        f"The files do not carry group size {quantizer.group_size}, K clip "
        f"{quantizer.k_clip.kind} {quantizer.k_clip.ratio:g} and V clip "
        f"{quantizer.v_clip.kind} {quantizer.v_clip.ratio:g}: set them where you serve.",
        file=sys.stderr,
    )
    return 0
