"""What a checkpoint must match: a model's attention shape and a hash of some of its weights.

Everything is read from config.json and straight from the safetensors files, so that calibration
and every server process get the same answer without building the model. No torch, no sglang.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

GQA_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
)
"""Architectures whose attention is known here; Phi-4 models are Phi3ForCausalLM."""

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
HASHED_BYTES = 1 << 18  # of either end of a tensor

_HASHED_TENSOR = re.compile(
    r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|o_proj|qkv_proj)\."
)
_INT_FIELDS = ("num_layers", "num_q_heads", "num_kv_heads", "head_dim", "hidden_size")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Identity of a model, as far as a checkpoint depends on it.

    Attributes:
        architecture: first entry of ``architectures`` in config.json.
        num_layers: decoder layers.
        num_q_heads: query heads of the whole model, not of a rank.
        num_kv_heads: KV heads of the whole model.
        head_dim: elements of a head row.
        hidden_size: width of the residual stream.
        weights_hash: sha256 of some attention weights (:func:`hash_weights`); None when the model
            directory has no safetensors files.
    """

    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    weights_hash: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.architecture, str) or not self.architecture:
            raise ValueError(f"architecture must be a name, got {self.architecture!r}")
        for name in _INT_FIELDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads {self.num_q_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}"
            )
        if self.weights_hash is not None and not (
            isinstance(self.weights_hash, str) and re.fullmatch("[0-9a-f]{64}", self.weights_hash)
        ):
            raise ValueError(f"weights_hash must be a sha256 or null, got {self.weights_hash!r}")

    @classmethod
    def from_model_path(cls, path: str, revision: str | None = None) -> ModelInfo:
        """Describe the model in a directory, or under a Hugging Face name.

        Args:
            path: directory with config.json, or a name such as ``org/model``: taken from the local
                cache when complete there, else downloaded.
            revision: branch, tag or commit of a Hugging Face name.

        Raises:
            ValueError: nothing usable there, or an architecture outside GQA_ARCHITECTURES.
        """
        directory = resolve_model_path(path, revision)
        config = _read_json(directory / "config.json")
        fields = _attention_shape(config, directory)
        return cls(**fields, weights_hash=hash_weights(directory, fields["num_layers"]))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> ModelInfo:
        """Inverse of :meth:`to_json`; unknown or missing keys raise ValueError."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            raise ValueError(f"the model description must have exactly the keys {sorted(names)}")
        return cls(**value)


def resolve_model_path(path: str, revision: str | None = None) -> Path:
    """Local directory of a model given as a directory or as a Hugging Face name."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ValueError(
            f"{path} is a file, but a model is a directory with config.json and safetensors "
            "files; GGUF and other single-file models are not served with --kv-quant."
        )
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) or path.startswith("."):
        raise ValueError(f"there is no model directory {path}; check the path.")
    return _hub_snapshot(path, revision)


def _hub_snapshot(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"there is no model directory {name}, and huggingface_hub is not installed to fetch "
            "it; check the path, or pip install huggingface_hub."
        ) from error
    patterns = ["*.json", "*.safetensors"]
    for local_only in (True, False):
        try:
            found = Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=patterns,
                    local_files_only=local_only,
                )
            )
        # The hub client raises many types for "not cached", "no such name" and "no network".
        except Exception as error:
            if not local_only:
                raise ValueError(
                    f"{name} is neither a model directory nor a model that can be fetched from "
                    f"Hugging Face ({type(error).__name__}); check the name or download it first."
                ) from error
            continue
        if not local_only or ((found / "config.json").is_file() and _weight_files(found)):
            return found
    raise AssertionError("unreachable")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; a model directory must have it.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object.")
    return value


def _attention_shape(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Fields of ModelInfo, except the hash, from config.json."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in GQA_ARCHITECTURES:
        raise ValueError(
            f"architecture {name} of {directory} is not served with --kv-quant: only "
            f"{', '.join(GQA_ARCHITECTURES)} are; serve this model without it."
        )
    if "text_config" in config:
        raise ValueError(
            f"{directory} nests its language model in text_config; multimodal models are not "
            "served with --kv-quant; serve this model without it."
        )
    keys = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    missing = [key for key in keys if not isinstance(config.get(key), int) or config[key] < 1]
    if missing:
        raise ValueError(f"{directory / 'config.json'} has no usable {', '.join(missing)}.")
    num_layers, num_q_heads, hidden_size = (config[key] for key in keys)
    num_kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    return {
        "architecture": name,
        "num_layers": num_layers,
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_q_heads if num_kv_heads is None else num_kv_heads,
        "head_dim": hidden_size // num_q_heads if head_dim is None else head_dim,
        "hidden_size": hidden_size,
    }


def hash_weights(directory: Path, num_layers: int) -> str | None:
    """sha256 that tells models of one shape apart.

    Covers name, dtype, shape and the first and last HASHED_BYTES of the key, value and output
    projections (or of the fused one) of the first, the middle and the last layer, in the order
    of their names: the same however the weights are split into files.

    Returns:
        64 hexadecimal digits, or None when there are no safetensors files.

    Raises:
        ValueError: a safetensors file is damaged, or has no such projections.
    """
    files = _weight_files(directory)
    if not files:
        return None
    wanted = {0, num_layers // 2, num_layers - 1}
    entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in files:
        start, header = read_safetensors_header(path)
        for name, entry in header.items():
            match = _HASHED_TENSOR.search(name)
            if match and int(match.group(1)) in wanted:
                entries[name] = (path, start, entry)
    if not entries:
        raise ValueError(
            f"the safetensors files in {directory} have no self_attn projections of layers "
            f"{sorted(wanted)}; this is not a complete model of a served architecture."
        )
    digest = hashlib.sha256()
    for name in sorted(entries):
        path, start, entry = entries[name]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        with path.open("rb") as file:
            _hash_span(digest, file, start, entry["data_offsets"])
    return digest.hexdigest()


def _hash_span(digest: Any, file: BinaryIO, start: int, offsets: list[int]) -> None:
    begin, end = offsets
    head_end = min(end, begin + HASHED_BYTES)
    for first, last in ((begin, head_end), (max(head_end, end - HASHED_BYTES), end)):
        file.seek(start + first)
        data = file.read(last - first)
        if len(data) != last - first:
            raise ValueError(f"{file.name} is truncated; download or copy the model again.")
        digest.update(data)


def _weight_files(directory: Path) -> list[Path]:
    """Safetensors files of a model: those of its index if it has one, else all of them."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map; download or copy the model again.")
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise ValueError(f"{index} names files outside its directory; it is not trusted.")
        return [directory / name for name in names]
    whole = directory / "model.safetensors"
    return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


def read_safetensors_header(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Byte at which the data begins, and name -> {dtype, shape, data_offsets}.

    Raises:
        ValueError: the file is missing, truncated or not a safetensors file.
    """
    try:
        size = os.path.getsize(path)
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError("its header length is impossible")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError("it is shorter than its header says")
            _ = entry["dtype"], entry["shape"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}.") from error
    return 8 + length, header
