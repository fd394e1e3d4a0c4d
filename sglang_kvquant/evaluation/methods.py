"""From the names on the command line to rotations: where each method's checkpoint comes from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import torch

from ..checkpoint import (
    Checkpoint,
    CheckpointError,
    check_matches,
    data_free_checkpoint,
    default_checkpoint_path,
    load_checkpoint,
)
from ..config import CALIBRATED_METHODS, DATA_FREE_METHODS
from ..model_info import ModelInfo
from ..reference.write import LayerTransform
from .data import EvaluationError

CENTRED = {
    "quarot+c": "--method optr --base quarot --steps 0",
    "oscar+c": "--method optr --base oscar --steps 0",
    "oscar-per-head+c": "--method optr --base oscar-per-head --steps 0",
}
"""A base with centred keys and no learning: what of OptR's gain is due to the key mean."""

CALIBRATION = {
    "oscar": "--method oscar",
    "oscar-per-head": "--method oscar --base oscar-per-head",
    "optr": "--method optr",
    **CENTRED,
}
"""Options of ``sglang-kvquant calibrate`` that make each method's checkpoint."""

METHOD_NAMES = (*DATA_FREE_METHODS, *CALIBRATION)


def load_methods(
    names: list[str], checkpoints: Mapping[str, str], model_path: str, info: ModelInfo
) -> dict[str, Checkpoint]:
    """Checkpoints of the named methods.

    Args:
        names: of METHOD_NAMES, or any label that `checkpoints` gives a file for.
        checkpoints: files by name; a method without one is looked for at its default place.
        model_path: as the user gave it.
        info: description of the model.

    Raises:
        EvaluationError: an unknown name or a missing file; the message names the command that
            makes it.
        CheckpointError: a file that cannot be used, or was made for another model.
    """
    unused = sorted(set(checkpoints) - set(names))
    if unused:
        raise EvaluationError(
            f"--checkpoint gives a file for {', '.join(unused)}, which --methods does not name; "
            "add it there."
        )
    return {name: _load(name, checkpoints.get(name), model_path, info) for name in names}


def _load(name: str, file: str | None, model_path: str, info: ModelInfo) -> Checkpoint:
    if file is None and name not in METHOD_NAMES:
        raise EvaluationError(
            f"there is no method {name}: known are {', '.join(METHOD_NAMES)}; any other label "
            f"needs --checkpoint {name}=FILE."
        )
    if name in DATA_FREE_METHODS:
        if file is not None:
            raise EvaluationError(
                f"{name} needs no rotations, so --checkpoint {name}={file} would be ignored; "
                "drop it, or choose another label."
            )
        return data_free_checkpoint(name, info)
    path = Path(file).expanduser() if file else default_checkpoint_path(model_path, name)
    if not path.exists():
        options = CALIBRATION.get(name, "--method optr").split()
        command = ["sglang-kvquant", "calibrate", "--model", model_path, *options]
        # calibrate saves plain methods where they are looked for; variants need --output.
        command += ["--output", str(path)] if file or name not in CALIBRATED_METHODS else []
        raise EvaluationError(
            f"there is no checkpoint of {name} at {path}; make it with `{shlex.join(command)}`, "
            f"or name one with --checkpoint {name}=FILE."
        )
    checkpoint = load_checkpoint(path)
    try:
        check_matches(checkpoint, info, checkpoint.manifest.method)
        _check_variant(name, checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{path} does not fit {name}: {error}") from error
    return checkpoint


def _check_variant(name: str, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError when a file holds something else than its name on the command line."""
    method, base = checkpoint.manifest.method, checkpoint.manifest.base
    if name not in CALIBRATION:
        return
    wanted = "optr" if name in CENTRED else name.removesuffix("-per-head")
    if method != wanted:
        raise CheckpointError(f"it holds method {method}, not {wanted}; give another file.")
    if name in CENTRED:
        settings = checkpoint.manifest.calibration.get("settings", {})
        if base != name.removesuffix("+c") or settings.get("steps") != 0:
            raise CheckpointError(
                f"it holds base {base} learned for {settings.get('steps')} steps, not "
                f"{name.removesuffix('+c')} without learning; give another file, or another label."
            )


def build_transforms(
    checkpoint: Checkpoint, device: torch.device | str
) -> dict[int, LayerTransform]:
    """Transforms of every layer as the server builds them, R_V applied online."""

    def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    quantizer = checkpoint.manifest.quantizer
    return {
        layer_id: LayerTransform.build(
            there(layer.k_rotation), there(layer.k_mean), there(layer.v_rotation), quantizer
        )
        for layer_id, layer in checkpoint.layers.items()
    }
