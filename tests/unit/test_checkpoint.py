"""Checkpoints: what is saved comes back, and nothing else is ever accepted."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_kvquant import checkpoint as checkpoint_module
from sglang_kvquant.checkpoint import (
    MANIFEST_KEY,
    Checkpoint,
    CheckpointError,
    LayerRotations,
    Manifest,
    check_matches,
    data_free_checkpoint,
    default_checkpoint_path,
    is_torch_file,
    load_checkpoint,
    resolve_checkpoint,
    save_checkpoint,
)
from sglang_kvquant.config import KVQuantOptions, QuantizerConfig, WindowConfig
from sglang_kvquant.model_info import ModelInfo
from sglang_kvquant.rotation import hadamard, skew_exp

LAYERS, Q_HEADS, KV_HEADS, DIM = 2, 4, 2, 64
INFO = ModelInfo("LlamaForCausalLM", LAYERS, Q_HEADS, KV_HEADS, DIM, 128, "ab" * 32)


def rotation(seed: int, heads: int = KV_HEADS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return skew_exp(torch.randn(heads, DIM, DIM, generator=generator).double()).float()


def objective() -> dict:
    table = [[0.5 + layer + head for head in range(KV_HEADS)] for layer in range(LAYERS)]
    return {
        "name": "loss",
        "k_before": table,
        "k_after": table,
        "v_before": table,
        "v_after": table,
    }


def make(method: str = "optr", info: ModelInfo = INFO) -> Checkpoint:
    manifest = Manifest(
        method=method,
        base="quarot",
        model=info,
        quantizer=QuantizerConfig(64),
        windows=WindowConfig(16, 32),
        calibration={"seed": 3, "data": "sha256:00", "steps": [20, 40]},
        objective=objective(),
    )
    layers = {
        i: LayerRotations(rotation(i), rotation(10 + i), torch.full((KV_HEADS, DIM), 0.5 + i))
        for i in range(LAYERS)
    }
    return Checkpoint(manifest, layers)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "optr.safetensors"
    save_checkpoint(make(), path)
    return path


def rewrite(path, edit_manifest=None, edit_tensors=None) -> None:
    """Replace a file by one whose manifest (a dict) or tensors (by name) were edited in place."""
    with safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()[MANIFEST_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if edit_manifest:
        edit_manifest(manifest)
    if edit_tensors:
        edit_tensors(tensors)
    save_file(tensors, path, metadata={MANIFEST_KEY: json.dumps(manifest)})


def assert_refused(path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert message.endswith(".")


def test_round_trip(saved):
    loaded = load_checkpoint(saved)
    assert loaded.manifest == make().manifest
    assert loaded.fingerprint() == make().fingerprint()
    for layer_id, layer in make().layers.items():
        for ours, theirs in zip(layer, loaded.layers[layer_id], strict=True):
            assert torch.equal(ours, theirs)
    assert os.listdir(saved.parent) == [saved.name]


def test_saved_file_has_ordinary_permissions(tmp_path):
    old = os.umask(0o027)
    try:
        save_checkpoint(make(), tmp_path / "new" / "directory" / "file")
    finally:
        os.umask(old)
    assert (tmp_path / "new" / "directory" / "file").stat().st_mode & 0o777 == 0o640


def test_shared_rotations_and_no_mean_round_trip(tmp_path):
    full = make("oscar")
    layers = dict.fromkeys(
        range(LAYERS), LayerRotations(rotation(1, 1)[0], rotation(2, 1)[0], None)
    )
    path = tmp_path / "file"
    save_checkpoint(Checkpoint(full.manifest, layers), path)
    layer = load_checkpoint(path).layers[1]
    assert layer.k_rotation.shape == (DIM, DIM)
    assert layer.k_mean is None


def test_rotation_with_determinant_minus_one_is_served(tmp_path):
    base = make()
    flipped = base.layers[0].k_rotation.clone()
    flipped[:, :, 0] *= -1
    assert torch.linalg.det(flipped[0]) < 0
    base.layers[0] = base.layers[0]._replace(k_rotation=flipped)
    save_checkpoint(base, tmp_path / "file")
    assert torch.equal(load_checkpoint(tmp_path / "file").layers[0].k_rotation, flipped)


def test_fingerprint_sees_every_part():
    base = make()
    other_tensor = Checkpoint(base.manifest, dict(base.layers))
    changed = base.layers[1].k_mean.clone()
    changed[0, 0] += 1e-6
    other_tensor.layers[1] = base.layers[1]._replace(k_mean=changed)
    other_clip = Checkpoint(replace(base.manifest, quantizer=QuantizerConfig(32)), base.layers)
    prints = {c.fingerprint() for c in (base, other_tensor, other_clip)}
    assert len(prints) == 3


@pytest.mark.parametrize("stage", ["write", "rename"])
def test_failed_save_leaves_the_old_file_and_nothing_else(saved, monkeypatch, stage):
    before = saved.read_bytes()

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync" if stage == "write" else "replace", fail)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(make("oscar"), saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_save_to_a_directory_is_refused(tmp_path):
    with pytest.raises(OSError, match="is a directory"):
        save_checkpoint(make(), tmp_path)
    assert os.listdir(tmp_path) == []


def drop(key):
    return lambda manifest: manifest.pop(key)


def put(*path_and_value):
    *path, last, value = path_and_value

    def edit(manifest):
        for key in path:
            manifest = manifest[key]
        manifest[last] = value

    return edit


def model(key, value):
    """Another model; without the objective, whose table would be refused first."""

    def edit(manifest):
        manifest["model"][key] = value
        manifest["objective"] = None

    return edit


MANIFEST_DAMAGE = [
    (put("format_version", 2), "upgrade sglang-kvquant"),
    (put("format_version", "1"), "format_version"),
    (put("format_version", True), "format_version"),
    (put("surprise", 1), "unknown keys: surprise"),
    (drop("calibration"), "keys: calibration"),
    (put("method", "magic"), "method 'magic'"),
    (put("method", "none"), "method 'none'"),
    (put("method", 7), "method is 7"),
    (put("base", 7), "base is 7"),
    (put("tool_version", None), "tool_version"),
    (put("calibration", []), "calibration"),
    (put("model", []), "model description"),
    (put("model", "num_layers", 0), "num_layers"),
    (model("num_layers", 3), r"missing \[2\]"),
    (model("num_layers", 1), r"unknown \[1\]"),
    (put("model", "num_layers", True), "num_layers"),
    (model("num_kv_heads", 4), "has shape"),
    (put("model", "head_dim", 128), "has shape"),
    (put("model", "head_dim", 80), "head_dim 80 is not served"),
    (put("model", "extra", 1), "model description"),
    (put("model", "weights_hash", "zz"), "weights_hash"),
    (put("quantizer", "group_size", 48), "group_size"),
    (put("quantizer", "group_size", 64.0), "not numbers"),
    (put("quantizer", "group_size", 128), "does not divide"),
    (put("quantizer", "bits", 2), "quantizer description"),
    (put("quantizer", "k_clip", {"kind": "percentile", "ratio": 2.0}), "clip ratio"),
    (put("quantizer", "k_clip", {"kind": "percentile", "ratio": "0.9"}), "understood"),
    (put("quantizer", "v_clip", {"kind": "round", "ratio": 0.5}), "clip kind"),
    (put("windows", "sink_tokens", -1), "sink_tokens"),
    (put("windows", "sink_tokens", 1.5), "sink_tokens"),
    (put("windows", "other", 1), "understood"),
    (put("windows", None), "understood"),
    (put("objective", {"name": "x"}), "objective"),
    (put("objective", "name", 1), "name of its objective"),
    (put("objective", "k_before", [[1.0, 2.0]]), "shape"),
    (put("objective", "k_before", [[1.0, 2.0], [3.0]]), "table of numbers"),
    (put("objective", "v_after", [[1.0, 2.0], [3.0, "x"]]), "table of numbers"),
    (put("objective", "k_after", [[1.0, 2.0], [3.0, float("nan")]]), "contains NaN"),
    (put("calibration", "loss", float("inf")), "contains Infinity"),
]


@pytest.mark.parametrize(("edit", "words"), MANIFEST_DAMAGE)
def test_damaged_manifest(saved, edit, words):
    rewrite(saved, edit_manifest=edit)
    assert_refused(saved, words)


def set_tensor(name, value):
    return lambda tensors: tensors.update({name: value})


def scaled(tensors):
    tensors["layers.1.k_rotation"] = tensors["layers.1.k_rotation"] * 1.01


def not_a_number(tensors):
    tensors["layers.0.v_rotation"][1, 2, 3] = float("nan")


TENSOR_DAMAGE = [
    (scaled, "layers.1.k_rotation is not orthogonal"),
    (not_a_number, "layers.0.v_rotation has values that are not finite"),
    (set_tensor("layers.0.k_mean", torch.full((KV_HEADS, DIM), float("inf"))), "not finite"),
    (set_tensor("layers.0.k_mean", torch.zeros(DIM)), "k_mean has shape"),
    (set_tensor("layers.0.k_rotation", torch.eye(DIM)[None]), "k_rotation has shape"),
    (set_tensor("layers.0.k_rotation", torch.eye(DIM).double()), "is torch.float64"),
    (set_tensor("layers.0.k_rotation", torch.eye(DIM).bfloat16()), "is torch.bfloat16"),
    (set_tensor("layers.2.k_rotation", torch.eye(DIM)), "unknown"),
    (set_tensor("layers.01.k_rotation", torch.eye(DIM)), "does not know"),
    (set_tensor("layers.0.threshold", torch.ones(1)), "does not know"),
    (lambda tensors: tensors.pop("layers.1.v_rotation"), "layer 1 lacks a rotation"),
    (lambda tensors: tensors.pop("layers.1.k_mean"), "differ in having a k_mean"),
]


@pytest.mark.parametrize(("edit", "words"), TENSOR_DAMAGE)
def test_damaged_tensors(saved, edit, words):
    rewrite(saved, edit_tensors=edit)
    assert_refused(saved, words)


def test_bf16_cast_of_a_rotation_is_within_tolerance(saved):
    def cast(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16().float()

    rewrite(saved, edit_tensors=cast)
    load_checkpoint(saved)


def pickled(path) -> bytes:
    return pickle.dumps(os.getcwd)


def torch_file(path) -> bytes:
    torch.save({"a": torch.ones(2)}, path)
    return path.read_bytes()


CONTAINERS = {
    "empty": (lambda path: b"", "empty or truncated"),
    "short": (lambda path: b"1234", "empty or truncated"),
    "truncated": (lambda path: path.read_bytes()[:-100], "copy or calibrate it again"),
    "cut in the header": (lambda path: path.read_bytes()[:200], "cannot be read"),
    "random": (
        lambda path: torch.randint(256, (9999,)).byte().numpy().tobytes(),
        "cannot be read",
    ),
    "huge header": (lambda path: b"\xff" * 8 + path.read_bytes()[8:], "cannot be read"),
    "large header": (lambda path: (1 << 40).to_bytes(8, "little") + b"{}", "cannot be read"),
    "pickle": (pickled, "may contain code"),
    "torch": (torch_file, "sglang-kvquant convert --from-oscar"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_file_that_is_not_a_checkpoint(saved, kind):
    make_bytes, words = CONTAINERS[kind]
    saved.write_bytes(make_bytes(saved))
    assert_refused(saved, words)


def test_every_truncation_is_refused(saved):
    data = saved.read_bytes()
    for length in [*range(0, 64), *range(64, len(data), 4999), len(data) - 1]:
        saved.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            load_checkpoint(saved)


def test_safetensors_file_of_something_else(saved):
    save_file({"weight": torch.ones(2)}, saved)
    assert_refused(saved, "without a manifest")
    save_file({"weight": torch.ones(2)}, saved, metadata={MANIFEST_KEY: "[" * 100_000})
    assert_refused(saved, "not JSON")
    save_file({"weight": torch.ones(2)}, saved, metadata={MANIFEST_KEY: "[]"})
    assert_refused(saved, "not a JSON object")


def test_path_that_cannot_be_read(tmp_path):
    assert_refused(tmp_path / "absent", "there is no checkpoint")
    assert_refused(tmp_path, "is a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_read_permission(saved):
    saved.chmod(0)
    assert_refused(saved, "[Pp]ermission")


def test_unloadable_checkpoints_are_not_written(tmp_path):
    base = make()
    bad_layers = {**base.layers, 0: base.layers[0]._replace(k_rotation=torch.ones(DIM, DIM))}
    bad = [
        Checkpoint(base.manifest, bad_layers),
        Checkpoint(base.manifest, {0: base.layers[0]}),
        Checkpoint(replace(base.manifest, calibration={"x": torch.ones(1)}), base.layers),
        Checkpoint(replace(base.manifest, calibration={"x": float("nan")}), base.layers),
        Checkpoint(replace(base.manifest, method="none"), base.layers),
    ]
    for checkpoint in bad:
        with pytest.raises(CheckpointError):
            save_checkpoint(checkpoint, tmp_path / "file")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (replace(INFO, architecture="Qwen3ForCausalLM"), "architecture LlamaForCausalLM instead"),
        (replace(INFO, num_layers=3), "num_layers 2 instead of 3"),
        (replace(INFO, num_q_heads=8), "num_q_heads 4 instead of 8"),
        (replace(INFO, num_kv_heads=4), "num_kv_heads 2 instead of 4"),
        (replace(INFO, head_dim=128), "head_dim 64 instead of 128"),
        (replace(INFO, hidden_size=256), "hidden_size 128 instead of 256"),
        (replace(INFO, weights_hash="cd" * 32), "other weights"),
        (replace(INFO, weights_hash=None), "no safetensors"),
    ],
)
def test_other_models_are_refused(info, words):
    with pytest.raises(CheckpointError, match=words):
        check_matches(make(), info, "optr")


def test_matching():
    check_matches(make(), INFO, "optr")
    check_matches(make(), replace(INFO, weights_hash=None), "optr", check_weights=False)
    with pytest.raises(CheckpointError, match="method optr, not oscar"):
        check_matches(make(), INFO, "oscar")
    with pytest.raises(CheckpointError, match="num_layers"):
        check_matches(make(), replace(INFO, num_layers=3), "optr", check_weights=False)


@pytest.mark.parametrize("method", ["rtn", "quarot"])
def test_data_free_checkpoints_save_and_load(tmp_path, method):
    checkpoint = data_free_checkpoint(method, INFO)
    save_checkpoint(checkpoint, tmp_path / "file")
    loaded = load_checkpoint(tmp_path / "file")
    assert loaded.fingerprint() == checkpoint.fingerprint()
    assert sorted(loaded.layers) == [0, 1]
    if method == "rtn":
        assert loaded.layers[1] == LayerRotations(None, None, None)
        assert loaded.manifest.quantizer.k_clip.kind == "none"
    else:
        assert torch.equal(loaded.layers[1].k_rotation, hadamard(DIM, torch.float32))
        assert loaded.layers[1].k_mean is None


def test_data_free_refusals():
    with pytest.raises(ValueError, match="needs calibration"):
        data_free_checkpoint("optr", INFO)
    with pytest.raises(ValueError, match="head_dim 96 is not served"):
        data_free_checkpoint("rtn", replace(INFO, head_dim=96))
    with pytest.raises(ValueError, match="does not divide"):
        data_free_checkpoint("quarot", INFO, group_size=128)
    assert data_free_checkpoint("quarot", INFO, group_size=32).manifest.quantizer.group_size == 32


def test_default_path(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_KVQUANT_HOME", str(tmp_path / "home"))
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    path = default_checkpoint_path(str(model), "optr")
    assert path.parent.parent == tmp_path / "home"
    assert path.name == "optr.safetensors"
    monkeypatch.chdir(tmp_path)
    assert default_checkpoint_path("models/tiny/", "optr") == path
    assert default_checkpoint_path("models/../models/tiny", "optr") == path
    other = tmp_path / "others" / "tiny"
    other.mkdir(parents=True)
    assert default_checkpoint_path(str(other), "optr") != path
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    by_name = default_checkpoint_path("org/name", "optr")
    assert default_checkpoint_path(str(snapshot), "optr") == by_name
    monkeypatch.delenv("SGLANG_KVQUANT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_checkpoint_path("org/name", "optr") == (
        tmp_path / ".cache" / "sglang-kvquant" / "org--name" / "optr.safetensors"
    )


def test_resolve(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_KVQUANT_HOME", str(tmp_path / "home"))
    model = str(tiny_model("LlamaForCausalLM"))
    assert resolve_checkpoint(KVQuantOptions("quarot"), model).manifest.method == "quarot"

    command = f"sglang-kvquant calibrate --model {model} --method optr"
    with pytest.raises(CheckpointError, match="there is no checkpoint") as caught:
        resolve_checkpoint(KVQuantOptions("optr"), model)
    assert f"`{command}`" in str(caught.value)
    given = tmp_path / "my file"
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(KVQuantOptions("optr", str(given)), model)
    assert f"`{command} --output '{given}'`" in str(caught.value)

    info = ModelInfo.from_model_path(model)
    ours = make(info=info)
    save_checkpoint(ours, default_checkpoint_path(model, "optr"))
    resolved = resolve_checkpoint(KVQuantOptions("optr"), model)
    assert resolved.fingerprint() == ours.fingerprint()

    save_checkpoint(make(info=replace(info, weights_hash="ab" * 32)), given)
    with pytest.raises(CheckpointError, match=r"my file does not fit: .*other weights"):
        resolve_checkpoint(KVQuantOptions("optr", str(given)), model)
    resolve_checkpoint(KVQuantOptions("optr", str(given)), model, check_weights=False)


def test_every_public_name_exists():
    assert all(hasattr(checkpoint_module, name) for name in checkpoint_module.__all__)


def test_a_header_length_like_a_pickles_magic_is_no_pickle(tmp_path):
    """640 is 80 02 in little-endian: the first bytes of a pickle of protocol 2."""
    for length in (640, 896, 1152):
        head = length.to_bytes(8, "little") + b"{"
        assert head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04"))
        assert not is_torch_file(head)
    assert is_torch_file(pickle.dumps([1, 2, 3])[:9])
    torch.save([1], tmp_path / "archive.pt")
    assert is_torch_file((tmp_path / "archive.pt").read_bytes()[:9])
