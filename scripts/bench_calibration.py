#!/usr/bin/env python3
"""Time the calibration of a model's layers from random traces, without the model itself.

    python scripts/bench_calibration.py [--layers 36] [--device cuda]

The shapes are Qwen3-8B's unless told otherwise; the settings are the defaults of `sglang-kvquant
calibrate`. The forward pass that gives the traces is not part of the time. Keys have outlier
channels, so that the losses are not those of pure noise.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from sglang_kvquant.calibration.capture import LayerTraces
from sglang_kvquant.calibration.recipe import DEFAULT_BASE, Recipe, solve_layer
from sglang_kvquant.calibration.settings import OptRSettings
from sglang_kvquant.config import QuantizerConfig


def random_traces(args: argparse.Namespace, layer: int) -> LayerTraces:
    random = torch.Generator(args.device).manual_seed(layer)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=args.device).bfloat16()

    rows = (args.num_sequences + args.num_heldout, args.seq_len, args.head_dim)
    q, k, v = (
        normal(rows[0], heads, *rows[1:])
        for heads in (args.num_q_heads, args.num_kv_heads, args.num_kv_heads)
    )
    k[..., :4] *= 8
    o_weight = normal(args.hidden_size, args.num_q_heads * args.head_dim) / args.hidden_size**0.5
    return LayerTraces(q, k, v, o_weight, args.head_dim**-0.5)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shape = {"layers": 36, "num-q-heads": 32, "num-kv-heads": 8, "head-dim": 128}
    data = {"hidden-size": 4096, "num-sequences": 16, "num-heldout": 4, "seq-len": 1024}
    for name, value in (shape | data).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    settings = OptRSettings()
    quantizer = QuantizerConfig.for_method("optr", args.head_dim)
    recipe = Recipe("optr", DEFAULT_BASE["optr"], quantizer, settings)
    seconds, gains = [], []
    for layer in range(args.layers):
        traces = random_traces(args, layer)
        train, heldout = (
            traces.select(slice(args.num_sequences)),
            traces.select(slice(args.num_sequences, None)),
        )
        begin = time.perf_counter()
        curves = solve_layer(train, heldout, recipe).curves
        seconds.append(time.perf_counter() - begin)
        assert curves is not None
        gains.append(sum(curves["k_after"]) / sum(curves["k_before"]))
    card = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    print(
        json.dumps(
            {
                "device": card,
                "torch": torch.__version__,
                "shape": {k: v for k, v in vars(args).items() if k != "device"},
                "steps": settings.steps,
                "seconds": round(sum(seconds), 2),
                "first_layer_s": round(seconds[0], 2),
                "later_layer_s": round(sum(seconds[1:]) / max(1, len(seconds) - 1), 3),
                "key_loss_after_over_before": round(sum(gains) / len(gains), 4),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
