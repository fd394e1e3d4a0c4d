"""Describing a model from its files, without building it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_kvquant import model_info
from sglang_kvquant.model_info import GQA_ARCHITECTURES, ModelInfo, hash_weights


@pytest.fixture
def llama(tiny_model, tmp_path):
    """A private copy that a test may damage."""
    return shutil.copytree(tiny_model("LlamaForCausalLM"), tmp_path / "model")


def edit_config(directory, **changes) -> None:
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "DELETE"}))


def shard(directory, parts: int = 3) -> None:
    """Split model.safetensors into files with an index, in an order unlike the original."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        names = sorted(tensors, reverse=True)[part::parts]
        save_file({n: tensors[n] for n in names}, directory / name)
        weight_map.update(dict.fromkeys(names, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("architecture", GQA_ARCHITECTURES)
def test_shape_of_every_architecture(tiny_model, architecture):
    info = ModelInfo.from_model_path(str(tiny_model(architecture)))
    hidden = 256 if architecture == "Phi3ForCausalLM" else 128
    assert info == ModelInfo(architecture, 2, 4, 2, 64, hidden, info.weights_hash)
    assert info.weights_hash
    assert ModelInfo.from_json(json.loads(json.dumps(info.to_json()))) == info


def test_defaults_of_missing_config_fields(llama):
    edit_config(llama, head_dim=None, num_key_value_heads="DELETE", hidden_size=256)
    info = ModelInfo.from_model_path(str(llama))
    assert (info.head_dim, info.num_kv_heads) == (64, 4)


def test_hash_does_not_depend_on_sharding(llama):
    whole = hash_weights(llama, 2)
    shard(llama)
    assert hash_weights(llama, 2) == whole


def test_hash_ignores_files_beside_the_index(llama):
    shard(llama)
    expected = hash_weights(llama, 2)
    save_file({"layers.0.self_attn.k_proj.weight": torch.ones(1)}, llama / "other.safetensors")
    assert hash_weights(llama, 2) == expected


@pytest.mark.parametrize("name", ["k_proj", "v_proj", "o_proj"])
@pytest.mark.parametrize("layer", [0, 1])
def test_hash_sees_one_changed_element(llama, name, layer):
    before = hash_weights(llama, 2)
    tensors = load_file(llama / "model.safetensors")
    tensors[f"model.layers.{layer}.self_attn.{name}.weight"][-1, -1] += 1.0
    save_file(tensors, llama / "model.safetensors")
    assert hash_weights(llama, 2) != before


@pytest.mark.parametrize(("element", "seen"), [(0, True), (-1, True), (500, False)])
def test_hash_reads_both_ends_of_a_large_tensor(tmp_path, monkeypatch, element, seen):
    monkeypatch.setattr(model_info, "HASHED_BYTES", 64)
    weight = torch.zeros(1000)
    hashes = []
    for value in (0.0, 1.0):
        weight[element] = value
        tensors = {"model.layers.0.self_attn.k_proj.weight": weight}
        save_file(tensors, tmp_path / "model.safetensors")
        hashes.append(hash_weights(tmp_path, 1))
    assert (hashes[0] != hashes[1]) == seen


def test_hash_sees_the_dtype(tiny_model):
    hashes = {
        ModelInfo.from_model_path(str(tiny_model(dtype=dtype))).weights_hash
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(hashes) == 2


def test_no_safetensors_gives_no_hash(llama):
    (llama / "model.safetensors").unlink()
    assert ModelInfo.from_model_path(str(llama)).weights_hash is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM .* not served"),
        ({"architectures": None}, "architecture None"),
        ({"text_config": {}}, "text_config"),
        ({"num_hidden_layers": "DELETE"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": "64"}, "head_dim must be"),
    ],
)
def test_config_that_is_not_served(llama, changes, words):
    edit_config(llama, **changes)
    with pytest.raises(ValueError, match=words):
        ModelInfo.from_model_path(str(llama))


def test_paths_that_are_not_models(tmp_path):
    with pytest.raises(ValueError, match="no model directory"):
        ModelInfo.from_model_path(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        ModelInfo.from_model_path(str(tmp_path))
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        ModelInfo.from_model_path(str(tmp_path))
    with pytest.raises(ValueError, match="is a file"):
        ModelInfo.from_model_path(str(tmp_path / "config.json"))


def test_name_that_the_hub_does_not_have(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    tried = []

    def download(name, *, local_files_only, **options):
        tried.append(local_files_only)
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(ValueError, match="neither a model directory nor"):
        ModelInfo.from_model_path("nobody/nothing")
    assert tried == [True, False]


def test_name_in_the_local_hub_cache(monkeypatch, llama):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(
        hub, "snapshot_download", lambda name, *, local_files_only, **_: str(llama)
    )
    assert ModelInfo.from_model_path("org/model") == ModelInfo.from_model_path(str(llama))


@pytest.mark.parametrize("damage", ["truncated", "empty", "random", "huge header", "no attention"])
def test_damaged_weights(llama, damage):
    path = llama / "model.safetensors"
    data = path.read_bytes()
    if damage == "no attention":
        save_file({"model.embed_tokens.weight": torch.ones(2)}, path)
    else:
        content = {
            "truncated": data[: len(data) // 2],
            "empty": b"",
            "random": torch.randint(0, 256, (4096,), dtype=torch.uint8).numpy().tobytes(),
            "huge header": b"\xff" * 7 + b"\x00" + data[8:],
        }
        path.write_bytes(content[damage])
    with pytest.raises(ValueError, match="safetensors"):
        ModelInfo.from_model_path(str(llama))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd"])
def test_index_may_not_leave_its_directory(llama, name):
    index = {"weight_map": {"model.layers.0.self_attn.k_proj.weight": name}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside its directory"):
        ModelInfo.from_model_path(str(llama))


def test_real_model(shared_data):
    info = ModelInfo.from_model_path(str(shared_data / "models" / "gqa128"))
    assert (info.num_layers, info.num_q_heads, info.num_kv_heads, info.head_dim) == (8, 8, 2, 128)
