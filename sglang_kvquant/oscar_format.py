"""OSCAR's rotation files: two PyTorch files per model, one for keys and one for values.

    v1  {"format_version": 1, "objective": str, "source_grouping": "layer",
         "layers": {id: {"layer_id": int, "rotation": [D, D], "eigenvalues": [D]}}}
    v2  {"format_version": 2, "objective": str, "source_grouping": "per_kv_head",
         "layers": {id: {"layer_id": int, "rotation": [H_kv, D, D]}}}

Layer keys are int or str and are the model's own layer numbers. As in OSCAR's loader the shape of
a rotation counts, not the format version. Files are read with ``weights_only=True``: pickled code
is refused, not run. The format has no key mean, clip ratio, group size or window.

Source: github.com/FutureMLS-Lab/OSCAR, rotation/compute_kv_rotation.py, fit_perhead_rotation.py.
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .atomic import write_atomically
from .checkpoint import Checkpoint, CheckpointError, LayerRotations, Manifest
from .config import QuantizerConfig, WindowConfig
from .model_info import ModelInfo
from .rotation import ORTHOGONALITY_TOLERANCE, orthogonality_error, per_head

Side = Literal["k", "v"]

K_FILE_NAME = "k_rotation.pt"
V_FILE_NAME = "v_rotation.pt"

_SIDES: tuple[Side, ...] = ("k", "v")
_OBJECTIVES: dict[Side, tuple[str, ...]] = {"k": ("qqt", "ktk"), "v": ("sst", "vtv")}
_MAX_DIM = 1024
_MAX_HEADS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class OscarFile:
    """One of OSCAR's files, checked.

    Attributes:
        path: where it was read.
        side: ``k`` or ``v`` as its objective, else its name says; None when neither does.
        format_version: as written in the file.
        objective: what the rotation was fitted to.
        source_grouping: ``layer`` or ``per_kv_head``.
        rotations: layer id to fp32 [head_dim, head_dim] or [num_kv_heads, head_dim, head_dim].
        calibration: the optional key of files from OSCAR's online calibrator.
    """

    path: Path
    side: Side | None
    format_version: int
    objective: str
    source_grouping: str
    rotations: dict[int, torch.Tensor]
    calibration: Any = None

    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def load_oscar_file(path: str | os.PathLike[str]) -> OscarFile:
    """Read one file and check every rotation.

    Raises:
        CheckpointError: missing, unreadable, not one of OSCAR's files, carrying code, or with
            rotations that are misshapen, not finite or not orthogonal.
    """
    path = Path(path)
    document = _unpickle_weights(path)
    try:
        return _parse(path, document)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not a rotation file of OSCAR's: {error}.") from error


def _unpickle_weights(path: Path) -> Any:
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory; name the K file and the V file in it.")
    try:
        file = path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    with file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        # Damaged and hostile files raise nearly any type; all of them mean the same to the user.
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
            raise CheckpointError(
                f"{path} is damaged, not a PyTorch file, or holds more than tensors and plain "
                f"values and is not unpickled ({reason}); get the file again from a source you "
                "trust."
            ) from error


def _parse(path: Path, document: Any) -> OscarFile:
    if isinstance(document, torch.Tensor):
        raise CheckpointError("it holds a bare tensor, as rotations for MLA latents do")
    if not isinstance(document, dict) or not isinstance(document.get("layers"), dict):
        raise CheckpointError("it has no dictionary of layers")
    version = document.get("format_version")
    if version not in (1, 2) or isinstance(version, bool):
        raise CheckpointError(f"its format_version is {version!r}, and 1 and 2 are known")
    if not document["layers"]:
        raise CheckpointError("it has no layers")
    rotations: dict[int, torch.Tensor] = {}
    for key, entry in document["layers"].items():
        layer_id = _layer_id(key)
        if layer_id in rotations:
            raise CheckpointError(f"layer {layer_id} is there twice, as a number and as a string")
        rotations[layer_id] = _rotation(layer_id, entry)
    objective = str(document.get("objective", ""))
    return OscarFile(
        path=path,
        side=_side(path, objective),
        format_version=version,
        objective=objective,
        source_grouping=str(document.get("source_grouping", "")),
        rotations=dict(sorted(rotations.items())),
        calibration=document.get("calibration"),
    )


def _layer_id(key: Any) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit():
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, int) or key < 0:
        raise CheckpointError(f"its layer key {key!r} is not a layer number")
    return key


def _rotation(layer_id: int, entry: Any) -> torch.Tensor:
    """Checked fp32 rotation of one layer's entry."""
    rotation = entry.get("rotation") if isinstance(entry, dict) else None
    if not isinstance(rotation, torch.Tensor) or not rotation.is_floating_point():
        raise CheckpointError(f"layer {layer_id} has no rotation tensor of a float type")
    if entry.get("layer_id", layer_id) != layer_id:
        raise CheckpointError(f"layer {layer_id} calls itself {entry['layer_id']!r}")
    shape = tuple(rotation.shape)
    square = len(shape) in (2, 3) and shape[-1] == shape[-2] and 1 <= shape[-1] <= _MAX_DIM
    if not square or (len(shape) == 3 and not 1 <= shape[0] <= _MAX_HEADS):
        raise CheckpointError(
            f"the rotation of layer {layer_id} has shape {list(shape)}, not [D, D] or [H, D, D]"
        )
    rotation = rotation.detach().float()
    if not bool(rotation.isfinite().all()):
        raise CheckpointError(f"the rotation of layer {layer_id} has values that are not finite")
    error = orthogonality_error(rotation)
    if error > ORTHOGONALITY_TOLERANCE:
        raise CheckpointError(
            f"the rotation of layer {layer_id} is not orthogonal: R R^T differs from the identity "
            f"by {error:.1e}, more than {ORTHOGONALITY_TOLERANCE:.0e}"
        )
    return rotation.contiguous()


def _side(path: Path, objective: str) -> Side | None:
    """The objective decides; a file of unknown objective is told by the start of its name."""
    for side in _SIDES:
        if any(word in objective for word in _OBJECTIVES[side]):
            return side
    for side in _SIDES:
        if path.name.lower().startswith(f"{side}_"):
            return side
    return None


def find_oscar_files(directory: str | os.PathLike[str]) -> tuple[OscarFile, OscarFile]:
    """The one K file and the one V file among the ``*.pt`` files of a directory.

    Raises:
        CheckpointError: none or several of a side, or rotations of MLA latents.
    """
    directory = Path(directory)
    paths = sorted(directory.glob("*.pt"))
    if any(path.name.startswith("layer_") for path in paths):
        raise CheckpointError(
            f"{directory} holds one layer_*.pt per layer, as rotations for MLA latents do; this "
            "version serves no MLA models."
        )
    files = [load_oscar_file(path) for path in paths]
    found: list[OscarFile] = []
    for side in _SIDES:
        matching = [file for file in files if file.side == side]
        if len(matching) != 1:
            names = ", ".join(file.path.name for file in matching) or "none"
            raise CheckpointError(
                f"{directory} must have exactly one {side.upper()} file, found {names}; name the "
                "K file and the V file yourself."
            )
        found += matching
    return found[0], found[1]


def load_oscar_pair(
    k_path: str | os.PathLike[str], v_path: str | os.PathLike[str]
) -> tuple[OscarFile, OscarFile]:
    """Read a K file and a V file; two files that are plainly of one side are refused."""
    k_file, v_file = load_oscar_file(k_path), load_oscar_file(v_path)
    for file, side in ((k_file, "k"), (v_file, "v")):
        if file.side not in (side, None):
            raise CheckpointError(
                f"{file.path} was given as the {side.upper()} file, but its objective "
                f"{file.objective!r} or its name says otherwise; give the K file first."
            )
    return k_file, v_file


def checkpoint_from_oscar(
    k_file: OscarFile,
    v_file: OscarFile,
    info: ModelInfo,
    quantizer: QuantizerConfig,
    windows: WindowConfig | None = None,
) -> Checkpoint:
    """A checkpoint of method ``oscar`` from a K file and a V file.

    Args:
        k_file, v_file: loaded files.
        info: the model they are for; the files do not name it, only their shapes are compared.
        quantizer: group size and clips, which the files do not carry.
        windows: default windows.

    Raises:
        CheckpointError: layers, heads or dims differ from the model's.
    """
    for file in (k_file, v_file):
        _check_fits(file, info)
    calibration = {
        "source": "converted from OSCAR's files",
        **{
            f"{side}_{name}": value
            for side, file in (("k", k_file), ("v", v_file))
            for name, value in (
                ("file", file.path.name),
                ("sha256", file.sha256()),
                ("objective", file.objective),
                ("format_version", file.format_version),
            )
        },
    }
    manifest = Manifest(
        method="oscar",
        base=None,
        model=info,
        quantizer=quantizer,
        windows=windows or WindowConfig(),
        calibration=calibration,
        objective=None,
    )
    layers = {
        layer_id: LayerRotations(k_file.rotations[layer_id], v_file.rotations[layer_id], None)
        for layer_id in range(info.num_layers)
    }
    checkpoint = Checkpoint(manifest, layers)
    checkpoint.validate()
    return checkpoint


def _check_fits(file: OscarFile, info: ModelInfo) -> None:
    ids = list(file.rotations)
    if ids != list(range(info.num_layers)):
        raise CheckpointError(
            f"{file.path} has {len(ids)} layers numbered {ids[0]} to {ids[-1]}, but every one of "
            f"the {info.num_layers} layers of the {info.architecture} model needs a rotation; "
            "files of hybrid models and of other models do not fit."
        )
    shapes = ((info.head_dim,) * 2, (info.num_kv_heads, info.head_dim, info.head_dim))
    for layer_id, rotation in file.rotations.items():
        if tuple(rotation.shape) not in shapes:
            raise CheckpointError(
                f"layer {layer_id} of {file.path} has a rotation of shape "
                f"{list(rotation.shape)}, but the model needs {list(shapes[0])} or "
                f"{list(shapes[1])}; it was made for another model."
            )


def save_oscar_files(
    checkpoint: Checkpoint, directory: str | os.PathLike[str], drop_mean: bool = False
) -> tuple[Path, Path]:
    """Write a checkpoint's rotations as OSCAR's v2 files, one rotation per KV head.

    Args:
        checkpoint: any with rotations.
        directory: made when missing; gets K_FILE_NAME and V_FILE_NAME.
        drop_mean: write the rotations although the key mean is lost.

    Returns:
        Paths of the K file and of the V file.

    Raises:
        CheckpointError: no rotations (rtn), or a key mean and not `drop_mean`.
    """
    if any(
        layer.k_rotation is None or layer.v_rotation is None
        for layer in checkpoint.layers.values()
    ):
        raise CheckpointError("the checkpoint has no rotations (method rtn), so nothing to write.")
    if not drop_mean and any(layer.k_mean is not None for layer in checkpoint.layers.values()):
        raise CheckpointError(
            "the checkpoint centres keys, and OSCAR's format has no place for the key mean; give "
            "--drop-mean to write the rotations alone, which serve worse than the checkpoint."
        )
    paths = Path(directory) / K_FILE_NAME, Path(directory) / V_FILE_NAME
    for field, path in zip(("k_rotation", "v_rotation"), paths, strict=True):
        buffer = io.BytesIO()
        torch.save(_v2_document(checkpoint, field), buffer)
        write_atomically(path, buffer.getvalue())
    return paths


def _v2_document(checkpoint: Checkpoint, field: str) -> dict[str, Any]:
    num_kv_heads = checkpoint.manifest.model.num_kv_heads
    return {
        "format_version": 2,
        "objective": f"sglang_kvquant_{checkpoint.manifest.method}",
        "source_grouping": "per_kv_head",
        "layers": {
            layer_id: {
                "layer_id": layer_id,
                "rotation": per_head(getattr(layer, field), num_kv_heads).clone(),
            }
            for layer_id, layer in checkpoint.layers.items()
        },
    }
