"""The checkpoint: one safetensors file with a model's rotations and everything they depend on.

Tensors, all fp32, for every layer i of the model:

    layers.{i}.k_rotation   [num_kv_heads, head_dim, head_dim] or, shared, [head_dim, head_dim]
    layers.{i}.v_rotation   likewise
    layers.{i}.k_mean       [num_kv_heads, head_dim]; absent when keys are not centred

Keys are stored as (k - k_mean) k_rotation, values as v v_rotation. The metadata hold one JSON
document, the manifest. Loading checks every field; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize

from .atomic import write_atomically
from .config import (
    DATA_FREE_METHODS,
    KVQuantOptions,
    QuantizerConfig,
    WindowConfig,
)
from .manifest import CheckpointError, Manifest
from .model_info import ModelInfo
from .rotation import ORTHOGONALITY_TOLERANCE, hadamard, orthogonality_error

__all__ = [
    "MANIFEST_KEY",
    "Checkpoint",
    "CheckpointError",
    "LayerRotations",
    "Manifest",
    "check_matches",
    "data_free_checkpoint",
    "default_checkpoint_path",
    "load_checkpoint",
    "resolve_checkpoint",
    "save_checkpoint",
]

MANIFEST_KEY = "sglang_kvquant"
"""Key of the safetensors metadata that holds the manifest."""

_TENSOR_NAME = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(k_rotation|v_rotation|k_mean)")
_TORCH_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files written by torch.save: zip archives, and pickles of protocols 2 to 5."""


class LayerRotations(NamedTuple):
    """What is done to one layer's keys and values; fp32 CPU tensors, None for the identity."""

    k_rotation: torch.Tensor | None  # [num_kv_heads, head_dim, head_dim] or [head_dim, head_dim]
    v_rotation: torch.Tensor | None  # likewise
    k_mean: torch.Tensor | None  # [num_kv_heads, head_dim], subtracted before the rotation


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Rotations of every layer of one model, with their manifest."""

    manifest: Manifest
    layers: dict[int, LayerRotations]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors under their names in the file; identities and absent means are left out."""
        return {
            f"layers.{layer_id}.{field}": tensor
            for layer_id, layer in self.layers.items()
            for field, tensor in layer._asdict().items()
            if tensor is not None
        }

    def validate(self) -> None:
        """Raise CheckpointError unless the manifest and every tensor could be saved and served."""
        _encode_manifest(self.manifest)
        _check_layers(self.layers, self.manifest)

    def fingerprint(self) -> str:
        """sha256 of manifest and tensors: equal exactly when two checkpoints are."""
        digest = hashlib.sha256(json.dumps(self.manifest.to_json(), sort_keys=True).encode())
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def _check_layers(layers: dict[int, LayerRotations], manifest: Manifest) -> None:
    """Raise CheckpointError unless the tensors are complete, well shaped, finite, orthogonal."""
    model = manifest.model
    if sorted(layers) != list(range(model.num_layers)):
        missing = sorted(set(range(model.num_layers)) - set(layers))
        extra = sorted(set(layers) - set(range(model.num_layers)))
        raise CheckpointError(
            f"it must have layers 0 to {model.num_layers - 1}: missing {missing[:5]}, "
            f"unknown {extra[:5]}"
        )
    centred = layers[0].k_mean is not None
    for layer_id, layer in layers.items():
        rotated = (layer.k_rotation is not None, layer.v_rotation is not None)
        if rotated != ((False, False) if manifest.method == "rtn" else (True, True)):
            raise CheckpointError(f"layer {layer_id} lacks a rotation, or has one under rtn")
        if (layer.k_mean is not None) != centred:
            raise CheckpointError(f"layers 0 and {layer_id} differ in having a k_mean")
        for field, tensor in layer._asdict().items():
            if tensor is not None:
                _check_tensor(f"layers.{layer_id}.{field}", tensor, model)


def _check_tensor(name: str, tensor: torch.Tensor, model: ModelInfo) -> None:
    _check_shape(name, tuple(tensor.shape), model)
    if tensor.dtype != torch.float32:
        raise CheckpointError(f"{name} is {tensor.dtype}, not torch.float32")
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{name} has values that are not finite")
    if name.endswith("_rotation"):
        error = orthogonality_error(tensor)
        if error > ORTHOGONALITY_TOLERANCE:
            raise CheckpointError(
                f"{name} is not orthogonal: R R^T differs from the identity by {error:.1e}, more "
                f"than {ORTHOGONALITY_TOLERANCE:.0e}"
            )


def _check_shape(name: str, shape: tuple[int, ...], model: ModelInfo) -> None:
    heads, dim = model.num_kv_heads, model.head_dim
    allowed = [(heads, dim)] if name.endswith("k_mean") else [(heads, dim, dim), (dim, dim)]
    if shape not in allowed:
        wanted = " or ".join(str(list(s)) for s in allowed)
        raise CheckpointError(f"{name} has shape {list(shape)}, expected {wanted}")


def save_checkpoint(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint atomically; missing parent directories are made.

    Raises:
        CheckpointError: the checkpoint is one that :func:`load_checkpoint` would refuse.
        OSError: the file cannot be written.
    """
    document = _encode_manifest(checkpoint.manifest)
    _check_layers(checkpoint.layers, checkpoint.manifest)
    # safetensors refuses tensors that share storage, as all layers of a Hadamard rotation do.
    tensors = {
        name: tensor.contiguous().clone() for name, tensor in sorted(checkpoint.tensors().items())
    }
    write_atomically(path, serialize(tensors, metadata={MANIFEST_KEY: document}))


def _encode_manifest(manifest: Manifest) -> str:
    try:
        document = json.dumps(manifest.to_json(), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest is not plain JSON: {error}") from error
    Manifest.from_json(json.loads(document))
    return document


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, checking every field and tensor.

    Raises:
        CheckpointError: the file is missing, unreadable, damaged, hostile, not a checkpoint, or
            written by a newer version; one sentence that names the file.
    """
    path = Path(path)
    try:
        _check_container(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            manifest = Manifest.from_json(_decode_manifest(file.metadata()))
            layers = _read_layers(file, manifest)
        _check_layers(layers, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used as a checkpoint: {error}.") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint at {path}; check the path.") from error
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {error}; copy or calibrate it again."
        ) from error
    return Checkpoint(manifest, layers)


def is_torch_file(head: bytes) -> bool:
    """Whether the first 9 bytes of a file are those of a PyTorch archive or pickle.

    A safetensors file begins with the length of its JSON header, whose low bytes may be those of
    a pickle (a header of 640 bytes is 80 02 …); byte 8, the first of the JSON, tells them apart.
    """
    return head.startswith(_TORCH_MAGICS) and head[8:9] != b"{"


def _check_container(path: Path) -> None:
    if path.is_dir():
        raise CheckpointError("it is a directory; give the safetensors file in it")
    with path.open("rb") as file:
        head = file.read(9)
    if len(head) < 9:
        raise CheckpointError("it is empty or truncated; copy or calibrate it again")
    if is_torch_file(head):
        raise CheckpointError(
            "it is a PyTorch file, which may contain code; rotations published by OSCAR become a "
            "checkpoint with `sglang-kvquant convert --from-oscar K_FILE V_FILE --model MODEL "
            "--output FILE`"
        )


def _decode_manifest(metadata: dict[str, str] | None) -> Any:
    if not metadata or MANIFEST_KEY not in metadata:
        raise CheckpointError(
            "it is a safetensors file without a manifest of this program; make one with "
            "`sglang-kvquant calibrate`"
        )

    def refuse(constant: str) -> None:
        raise CheckpointError(f"its manifest contains {constant}")

    try:
        return json.loads(metadata[MANIFEST_KEY], parse_constant=refuse)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"its manifest is not JSON: {error}") from error


def _read_layers(file: Any, manifest: Manifest) -> dict[int, LayerRotations]:
    """Tensors of the file by layer; names and shapes are checked before anything is allocated."""
    empty = LayerRotations(None, None, None)
    # An rtn checkpoint has no tensors at all: its layers follow from the manifest.
    ids = range(manifest.model.num_layers if manifest.method == "rtn" else 0)
    layers = dict.fromkeys(ids, empty)
    for name in file.keys():  # noqa: SIM118 - not a mapping
        match = _TENSOR_NAME.fullmatch(name)
        if not match:
            raise CheckpointError(f"it has a tensor {name[:80]!r} that this version does not know")
        _check_shape(name, tuple(file.get_slice(name).get_shape()), manifest.model)
        layer_id, field = int(match.group(1)), match.group(2)
        layer = layers.get(layer_id, empty)
        layers[layer_id] = layer._replace(**{field: file.get_tensor(name)})
    return dict(sorted(layers.items()))


def check_matches(
    checkpoint: Checkpoint, info: ModelInfo, method: str, check_weights: bool = True
) -> None:
    """Raise CheckpointError unless the checkpoint was made for this model and method.

    Args:
        checkpoint: a loaded checkpoint.
        info: the model about to be served, of the whole model and not of a rank.
        method: value of ``--kv-quant``.
        check_weights: False only when the weights are dummies, which have no files to hash.
    """
    made_for = checkpoint.manifest.model
    if checkpoint.manifest.method != method:
        raise CheckpointError(
            f"the checkpoint was made for method {checkpoint.manifest.method}, not {method}; "
            f"give a checkpoint of {method}, or choose {checkpoint.manifest.method}."
        )
    ours, theirs = made_for.to_json(), info.to_json()
    differences = [
        f"{name} {ours[name]} instead of {theirs[name]}"
        for name in ours
        if name != "weights_hash" and ours[name] != theirs[name]
    ]
    if differences:
        raise CheckpointError(
            f"the checkpoint was made for another model ({', '.join(differences)}); "
            "calibrate this model."
        )
    if not check_weights or made_for.weights_hash == info.weights_hash:
        return
    if info.weights_hash is None:
        raise CheckpointError(
            "the checkpoint is bound to the weights it was made from, but the model directory has "
            "no safetensors files to compare with; serve the safetensors version of the model."
        )
    raise CheckpointError(
        "the checkpoint was made from other weights of the same shape (another fine-tune, "
        "revision or quantization); calibrate this model."
    )


def default_checkpoint_path(model_path: str, method: str) -> Path:
    """Where ``calibrate`` saves and the server looks when no file is named.

    Directory ``$SGLANG_KVQUANT_HOME``, else ``~/.cache/sglang-kvquant``. A model is known by its
    Hugging Face name, also when given as a directory of the Hugging Face cache; any other
    directory by its name and a hash of its absolute path.
    """
    home = os.environ.get("SGLANG_KVQUANT_HOME")
    root = Path(home).expanduser() if home else Path.home() / ".cache" / "sglang-kvquant"
    directory = Path(model_path).expanduser()
    if not directory.is_dir():
        return root / model_path.replace("/", "--") / f"{method}.safetensors"
    absolute = Path(os.path.abspath(directory))
    cached = re.search(r"/models--([^/]+)/snapshots/[^/]+$", absolute.as_posix())
    if cached:
        return root / cached.group(1) / f"{method}.safetensors"
    real = absolute.resolve()
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:8]
    return root / f"{real.name}-{digest}" / f"{method}.safetensors"


def data_free_checkpoint(
    method: str, info: ModelInfo, group_size: int | None = None
) -> Checkpoint:
    """Checkpoint of ``rtn`` (no rotation) or ``quarot`` (Hadamard), made from the shape alone.

    Raises:
        ValueError: another method, a head_dim that is not served, or a group size that does not
            divide it.
    """
    if method not in DATA_FREE_METHODS:
        raise ValueError(f"method {method} needs calibration; data-free are {DATA_FREE_METHODS}")
    quantizer = QuantizerConfig.for_method(method, info.head_dim, group_size)
    rotation = None if method == "rtn" else hadamard(info.head_dim, torch.float32)
    layer = LayerRotations(rotation, rotation, None)
    manifest = Manifest(
        method=method,
        base=None,
        model=info,
        quantizer=quantizer,
        windows=WindowConfig(),
        calibration={},
        objective=None,
    )
    return Checkpoint(manifest, dict.fromkeys(range(info.num_layers), layer))


def resolve_checkpoint(
    options: KVQuantOptions,
    model_path: str,
    revision: str | None = None,
    check_weights: bool = True,
) -> Checkpoint:
    """The checkpoint that a user's options mean for a model, checked against that model.

    Args:
        options: method and, for calibrated methods, the file or None for the default place.
        model_path: directory or Hugging Face name.
        revision: of a Hugging Face name.
        check_weights: as in :func:`check_matches`.

    Raises:
        ValueError: the model cannot be described.
        CheckpointError: no file there (the message names the command that makes it), a file that
            cannot be loaded, or one made for something else.
    """
    info = ModelInfo.from_model_path(model_path, revision)
    if options.method in DATA_FREE_METHODS:
        return data_free_checkpoint(options.method, info)
    given = options.checkpoint
    path = (
        Path(given).expanduser() if given else default_checkpoint_path(model_path, options.method)
    )
    if not path.exists():
        command = [
            "sglang-kvquant",
            "calibrate",
            "--model",
            model_path,
            "--method",
            options.method,
        ]
        command += ["--output", str(given)] if given else []
        raise CheckpointError(
            f"there is no checkpoint at {path}; make it with `{shlex.join(command)}`."
        )
    checkpoint = load_checkpoint(path)
    try:
        check_matches(checkpoint, info, options.method, check_weights)
    except CheckpointError as error:
        raise CheckpointError(f"{path} does not fit: {error}") from error
    return checkpoint
