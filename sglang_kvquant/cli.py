"""The command ``sglang-kvquant``: calibrate, inspect, convert, evaluate.

Each subcommand is a module of ``sglang_kvquant.commands`` with ``add_parser(subparsers)`` and
``run(args) -> int``; it imports torch and transformers only when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from . import __version__

COMMANDS = ("calibrate", "inspect", "convert", "evaluate")
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

_OPTIONAL_PACKAGES = ("transformers", "tokenizers", "matplotlib")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-kvquant",
        description="Checkpoints for serving with SGLang from a rotated 2-bit KV cache.",
        epilog="Serve with: python -m sglang.launch_server --model-path MODEL --kv-quant optr",
    )
    parser.add_argument("--version", action="version", version=f"sglang-kvquant {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"{__package__}.commands.{name}")
        module.add_parser(subparsers)
        command = subparsers.choices[name]
        command.set_defaults(run=module.run)
        command.add_argument(
            "--debug", action="store_true", help="show the traceback of an error, not a sentence"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status (2 for an error of the user's making)."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough; keep the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        if args.debug or error.name not in _OPTIONAL_PACKAGES:
            raise
        message = f"{error.name} is not installed; pip install 'sglang-kvquant[calibration]'."
    except (ValueError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        message = str(error)
    print(f"sglang-kvquant: error: {message}", file=sys.stderr)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
