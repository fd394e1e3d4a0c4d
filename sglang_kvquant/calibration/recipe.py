"""A calibration from end to end: model and tokens in, checkpoint out; resumable."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from .. import __version__
from ..atomic import write_atomically
from ..checkpoint import Checkpoint, LayerRotations, Manifest
from ..config import QuantizerConfig, WindowConfig, check_head_dim
from ..model_info import ModelInfo
from ..rotation import hadamard, per_head
from .capture import LayerTraces, visit_layers
from .data import CalibrationTokens
from .errors import CalibrationError
from .optr import learn_layer
from .oscar import head_rotations, layer_rotations
from .settings import OptRSettings

BASES = {"oscar": ("oscar", "oscar-per-head"), "optr": ("quarot", "oscar", "oscar-per-head")}
"""Bases of each calibrated method."""

DEFAULT_BASE = {"oscar": "oscar", "optr": "quarot"}

MIN_CALIBRATION_TOKENS = 1024
"""Second moments of head_dim 128 need many more rows than dimensions: fewer tokens give matrices
that load and serve, but are junk."""

Curves = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to compute.

    Attributes:
        method: ``oscar`` (rotations only) or ``optr`` (key mean and learned corrections).
        base: one of BASES[method]: the rotation itself for oscar, the start of learning for optr.
        quantizer: group size and clips that optr learns through, kept in the checkpoint.
        settings: of optr; its windows also become the checkpoint's defaults.
    """

    method: Literal["oscar", "optr"]
    base: str
    quantizer: QuantizerConfig
    settings: OptRSettings = field(default_factory=OptRSettings)

    def __post_init__(self) -> None:
        if self.method not in BASES:
            raise ValueError(f"method must be one of {tuple(BASES)}, got {self.method!r}")
        if self.base not in BASES[self.method]:
            raise CalibrationError(
                f"--method {self.method} has no base {self.base}; choose one of "
                f"{', '.join(BASES[self.method])}."
            )

    @property
    def windows(self) -> WindowConfig:
        return WindowConfig(self.settings.sink_tokens, self.settings.recent_tokens)

    def to_json(self) -> dict[str, Any]:
        """Everything that the result depends on, besides model and tokens."""
        facts: dict[str, Any] = {"method": self.method, "base": self.base}
        if self.method == "optr":
            facts |= {"settings": asdict(self.settings), "quantizer": self.quantizer.to_json()}
        return facts


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One solved layer.

    Attributes:
        rotations: fp32 on the CPU.
        curves: held-out losses per KV head: ``k_before``, ``k_after``, ``v_before``, ``v_after``;
            None for methods that do not learn.
    """

    rotations: LayerRotations
    curves: Curves | None = None


def base_rotations(traces: LayerTraces, base: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(R_K, R_V) of a base, fp64, [head_dim, head_dim] or per head with a leading axis."""
    if base == "quarot":
        rotation = hadamard(traces.k.shape[-1]).to(traces.k.device)
        return rotation, rotation
    return layer_rotations(traces) if base == "oscar" else head_rotations(traces)


def solve_layer(train: LayerTraces, heldout: LayerTraces, recipe: Recipe) -> LayerResult:
    """Rotations of one layer from its traces."""
    k_base, v_base = base_rotations(train, recipe.base)
    if recipe.method == "oscar":
        k, v = (r.float().cpu().contiguous() for r in (k_base, v_base))
        return LayerResult(LayerRotations(k, v, None))
    num_kv_heads = train.k.shape[1]
    k_base, v_base = per_head(k_base, num_kv_heads), per_head(v_base, num_kv_heads)
    layer = learn_layer(train, heldout, k_base, v_base, recipe.quantizer, recipe.settings)
    k, v, mean = (
        t.float().cpu().contiguous()
        for t in (layer.keys.rotation, layer.values.rotation, layer.k_mean)
    )
    curves = {
        f"{side}_{when}": getattr(learned, when).tolist()
        for side, learned in (("k", layer.keys), ("v", layer.values))
        for when in ("before", "after")
    }
    return LayerResult(LayerRotations(k, v, mean), curves)


class WorkDirectory:
    """Solved layers on disk, so that a killed run continues where it stopped.

    One safetensors file per layer, in a directory named after a hash of everything that the
    result depends on: other settings never see these files.
    """

    def __init__(self, root: Path, key: dict[str, Any]) -> None:
        self.root = root
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self.path = root / digest[:16]

    def load(self, layer_id: int) -> LayerResult | None:
        """A layer solved before, or None; a damaged file is solved again."""
        file = self.path / f"layer_{layer_id}.safetensors"
        try:
            with safe_open(file, framework="pt") as stored:
                curves = json.loads(stored.metadata()["curves"])
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None
        rotations = LayerRotations(
            tensors["k_rotation"], tensors["v_rotation"], tensors.get("k_mean")
        )
        return LayerResult(rotations, curves)

    def store(self, layer_id: int, result: LayerResult) -> None:
        tensors = {n: t for n, t in result.rotations._asdict().items() if t is not None}
        data = save(tensors, metadata={"curves": json.dumps(result.curves)})
        write_atomically(self.path / f"layer_{layer_id}.safetensors", data)


def calibrate(
    model: Any,
    tokens: CalibrationTokens,
    recipe: Recipe,
    info: ModelInfo,
    work_root: str | Path | None = None,
    on_layer: Callable[[int, LayerResult, float | None], None] | None = None,
) -> Checkpoint:
    """Calibrate a transformers model; the caller saves the checkpoint.

    Each layer is solved while the forward pass over all sequences stands at it, so that one
    layer's traces are held at a time. The result is bit-for-bit repeatable on one machine with
    one number of threads, resumed or not.

    Args:
        model: causal language model, on the device that shall do the work.
        tokens: sequences to learn from and to select with.
        recipe: method, base, quantizer and settings.
        info: what the checkpoint is for.
        work_root: directory for solved layers, to be removed by the caller once the checkpoint
            is saved; None keeps nothing.
        on_layer: called after each layer with its index, its result and the seconds it took, None
            when it had been solved by an earlier run.

    Raises:
        CalibrationError: the tokens are too few or too many for the model, or the traces are not
            finite.
    """
    check_tokens(tokens, recipe)
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and tokens.train.shape[1] > longest:
        raise CalibrationError(
            f"Sequences of {tokens.train.shape[1]} tokens are longer than this model's context of "
            f"{longest}; give a smaller --seq-len."
        )
    check_head_dim(info.head_dim)
    facts = _facts(tokens, recipe, model.dtype, model.device)
    work = None
    if work_root is not None:
        work = WorkDirectory(Path(work_root), {"model": info.to_json(), **facts})
    results: dict[int, LayerResult] = {}

    def visit(layer_id: int, traces: LayerTraces) -> None:
        result, seconds = work.load(layer_id) if work else None, None
        if result is None:
            begin = time.perf_counter()
            result = solve_layer(*_split(traces, tokens), recipe)
            seconds = time.perf_counter() - begin
            if work:
                work.store(layer_id, result)
        results[layer_id] = result
        if on_layer is not None:
            on_layer(layer_id, result, seconds)

    visit_layers(model, tokens.all(), visit)
    return _assemble(results, facts, recipe, info)


def calibrate_traces(
    traces: dict[int, LayerTraces], tokens: CalibrationTokens, recipe: Recipe, info: ModelInfo
) -> Checkpoint:
    """The same from traces that :func:`collect_traces` took on ``tokens.all()``.

    For experiments with many recipes on one model.
    """
    check_tokens(tokens, recipe)
    check_head_dim(info.head_dim)
    results = {
        layer_id: solve_layer(*_split(layer, tokens), recipe) for layer_id, layer in traces.items()
    }
    k = traces[0].k
    return _assemble(results, _facts(tokens, recipe, k.dtype, k.device), recipe, info)


def _split(traces: LayerTraces, tokens: CalibrationTokens) -> tuple[LayerTraces, LayerTraces]:
    num_train = len(tokens.train)
    return traces.select(slice(num_train)), traces.select(slice(num_train, None))


def _assemble(
    results: dict[int, LayerResult], facts: dict[str, Any], recipe: Recipe, info: ModelInfo
) -> Checkpoint:
    manifest = Manifest(
        method=recipe.method,
        base=recipe.base,
        model=info,
        quantizer=recipe.quantizer,
        windows=recipe.windows,
        calibration=facts,
        objective=_objective(results),
    )
    return Checkpoint(manifest, {i: result.rotations for i, result in sorted(results.items())})


def check_tokens(tokens: CalibrationTokens, recipe: Recipe) -> None:
    """Raise CalibrationError when the tokens are too few, or too short for the windows."""
    if tokens.train.numel() < MIN_CALIBRATION_TOKENS:
        raise CalibrationError(
            f"{tokens.train.numel()} calibration tokens are too few: rotations from less than "
            f"{MIN_CALIBRATION_TOKENS} tokens load and serve, but are junk; give more or longer "
            "sequences."
        )
    if recipe.method == "optr":
        recipe.settings.query_positions(tokens.train.shape[1])  # refuses short sequences


def _facts(
    tokens: CalibrationTokens, recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    return {
        **recipe.to_json(),
        "tool_version": __version__,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "data": tokens.source,
        "data_sha256": tokens.sha256(),
        "seed": tokens.seed,
        "num_sequences": tokens.train.shape[0],
        "num_heldout": tokens.heldout.shape[0],
        "seq_len": tokens.train.shape[1],
    }


def _objective(results: dict[int, LayerResult]) -> dict[str, Any] | None:
    curves = [results[layer_id].curves for layer_id in sorted(results)]
    if any(layer is None for layer in curves):
        return None
    table: dict[str, Any] = {"name": "held-out L_K and L_V of OptR (equations 14 and 16)"}
    for name in ("k_before", "k_after", "v_before", "v_after"):
        table[name] = [layer[name] for layer in curves if layer is not None]
    return table


def load_model(path: str, dtype: str = "auto", device: str = "cpu") -> Any:
    """A transformers causal language model in evaluation mode.

    Args:
        path: model directory.
        dtype: ``float32``, ``bfloat16``, or ``auto``: float32 on the CPU, where bfloat16 is slow,
            else the checkpoint's own.
        device: torch device.

    Raises:
        CalibrationError: there is no such device.
    """
    from transformers import AutoModelForCausalLM

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CalibrationError(
            f"--device {device} cannot be used here ({str(error).splitlines()[0]}); use cpu or "
            "install a torch that supports it."
        ) from error
    if dtype == "auto":
        dtype = "float32" if torch.device(device).type == "cpu" else "auto"
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa"
    )
    return model.to(device).eval()
