"""OSCAR's rotation files, as published and as damaged."""

from __future__ import annotations

import pickle

import pytest
import torch

from sglang_kvquant.checkpoint import (
    Checkpoint,
    CheckpointError,
    LayerRotations,
    data_free_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from sglang_kvquant.config import NO_CLIP, OSCAR_K_CLIP, OSCAR_V_CLIP, Clip, QuantizerConfig
from sglang_kvquant.model_info import ModelInfo
from sglang_kvquant.oscar_format import (
    checkpoint_from_oscar,
    find_oscar_files,
    load_oscar_file,
    load_oscar_pair,
    save_oscar_files,
)
from sglang_kvquant.rotation import hadamard, orthogonality_error, skew_exp

LAYERS, HEADS, DIM = 3, 2, 64
INFO = ModelInfo("LlamaForCausalLM", LAYERS, 4, HEADS, DIM, 128, "ab" * 32)
K_NAME, V_NAME = "k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"


def rotation(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return skew_exp(torch.randn(*shape, generator=generator).double()).float()


def v1(objective: str, layers=range(LAYERS), key=int) -> dict:
    entries = {
        key(i): {
            "layer_id": i,
            "rotation": rotation(DIM, DIM, seed=i),
            "eigenvalues": torch.arange(DIM).float(),
        }
        for i in layers
    }
    return {
        "format_version": 1,
        "objective": objective,
        "source_grouping": "layer",
        "layers": entries,
    }


def v2(key=int, seed: int = 0) -> dict:
    entries = {
        key(i): {"layer_id": i, "rotation": rotation(HEADS, DIM, DIM, seed=seed + i)}
        for i in range(LAYERS)
    }
    return {
        "format_version": 2,
        "objective": "cov_eig_hadamard_perhead",
        "source_grouping": "per_kv_head",
        "layers": entries,
    }


@pytest.fixture
def write(tmp_path):
    def write(document, name: str = K_NAME):
        torch.save(document, tmp_path / name)
        return tmp_path / name

    return write


@pytest.mark.parametrize("key", [int, str])
def test_v1(write, key):
    document = v1("qqt_r_h_pbr", key=key)
    file = load_oscar_file(write(document))
    assert (file.side, file.format_version, list(file.rotations)) == ("k", 1, [0, 1, 2])
    assert torch.equal(file.rotations[2], document["layers"][key(2)]["rotation"])


@pytest.mark.parametrize("key", [int, str])
def test_v2(write, key):
    document = v2(key)
    file = load_oscar_file(write(document, "v_perhead.pt"))
    assert (file.side, file.format_version) == ("v", 2)
    assert torch.equal(file.rotations[1], document["layers"][key(1)]["rotation"])


def test_layers_are_sorted_by_number_not_by_text(write):
    file = load_oscar_file(write(v1("qqt", layers=range(12), key=str)))
    assert list(file.rotations) == list(range(12))


def test_shape_decides_not_the_format_version(write):
    document = v2()
    document["format_version"] = 1
    assert load_oscar_file(write(document)).rotations[0].shape == (HEADS, DIM, DIM)


def test_layers_that_alias_one_storage(write):
    shared = hadamard(DIM, torch.float32)
    document = v1("hadamard")
    for entry in document["layers"].values():
        entry["rotation"] = shared
        del entry["eigenvalues"]
    path = write(document, "k_rotation_hadamard.pt")
    assert path.stat().st_size < 2 * shared.nbytes
    file = load_oscar_file(path)
    assert all(torch.equal(r, shared) for r in file.rotations.values())


def test_determinant_minus_one_and_bf16_casts_load(write):
    document = v1("qqt")
    flipped = document["layers"][0]["rotation"]
    flipped[:, 0] *= -1
    assert torch.linalg.det(flipped) * torch.linalg.det(document["layers"][1]["rotation"]) < 0
    for entry in document["layers"].values():
        entry["rotation"] = entry["rotation"].bfloat16()
    file = load_oscar_file(write(document))
    assert file.rotations[0].dtype == torch.float32
    assert 1e-4 < orthogonality_error(file.rotations[0]) < 5e-3


def test_extra_calibration_key_is_kept(write):
    document = {**v2(), "calibration": {"generation": 7}}
    assert load_oscar_file(write(document)).calibration == {"generation": 7}


def damaged_rotation(value):
    def damage(document):
        document["layers"][1]["rotation"] = value
        return document

    return damage


def changed(**fields):
    return lambda document: {**document, **fields}


def nan_rotation() -> torch.Tensor:
    value = torch.eye(DIM)
    value[3, 4] = float("nan")
    return value


DAMAGE = [
    (lambda document: torch.eye(DIM), "bare tensor"),
    (lambda document: [1, 2], "no dictionary of layers"),
    (lambda document: {"layers": 3}, "no dictionary of layers"),
    (changed(format_version=3), "format_version is 3"),
    (changed(format_version=None), "format_version is None"),
    (changed(layers={}), "has no layers"),
    (changed(layers={"x": {"rotation": torch.eye(2)}}), "layer key 'x'"),
    (changed(layers={-1: {"rotation": torch.eye(2)}}), "layer key -1"),
    (changed(layers={0: {"rotation": torch.eye(2)}, "0": {"rotation": torch.eye(2)}}), "twice"),
    (changed(layers={0: torch.eye(2)}), "no rotation tensor"),
    (changed(layers={0: {"layer_id": 1, "rotation": torch.eye(2)}}), "calls itself 1"),
    (damaged_rotation(torch.eye(DIM).long()), "float type"),
    (damaged_rotation(torch.ones(DIM)), "shape"),
    (damaged_rotation(torch.ones(DIM, DIM - 1)), "shape"),
    (damaged_rotation(torch.ones(0, 0)), "shape"),
    (damaged_rotation(torch.ones(1).expand(1 << 20, 1 << 20)), "shape"),
    (damaged_rotation(torch.ones(1).expand(1 << 20, 64, 64)), "shape"),
    (damaged_rotation(nan_rotation()), "not finite"),
    (damaged_rotation(torch.eye(DIM) * 1.01), "not orthogonal"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_damaged_file(write, damage, words):
    path = write(damage(v1("qqt")))
    with pytest.raises(CheckpointError, match=words) as caught:
        load_oscar_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


class Hostile:
    """Unpickling runs a command that leaves a trace."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


@pytest.mark.parametrize("container", ["torch", "legacy torch", "pickle"])
def test_code_is_refused_and_not_run(tmp_path, container):
    trace, path = tmp_path / "trace", tmp_path / K_NAME
    document = {**v1("qqt"), "calibration": Hostile(trace)}
    if container == "pickle":
        path.write_bytes(pickle.dumps(document, protocol=2))
    else:
        torch.save(document, path, _use_new_zipfile_serialization=container == "torch")
    with pytest.raises(CheckpointError, match="not unpickled"):
        load_oscar_file(path)
    assert not trace.exists()
    if container == "torch":  # the file would have run code: what the refusal protects from
        torch.load(path, weights_only=False)
        assert trace.exists()


def test_files_that_are_not_pytorch_files(tmp_path, write):
    whole = write(v1("qqt")).read_bytes()
    path = tmp_path / "file.pt"
    noise = torch.randint(256, (5000,)).byte().numpy().tobytes()
    for content in (b"", b"PK\x03\x04", whole[:-200], whole[: len(whole) // 2], noise, b"text\n"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged"):
            load_oscar_file(path)
    with pytest.raises(CheckpointError, match="is a directory"):
        load_oscar_file(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_oscar_file(tmp_path / "absent.pt")


def test_pair_is_told_by_objective_before_name(write):
    k_path, v_path = write(v1("qqt"), "one.pt"), write(v1("sst"), "k_misnamed.pt")
    k_file, v_file = load_oscar_pair(k_path, v_path)
    assert (k_file.side, v_file.side) == ("k", "v")
    with pytest.raises(CheckpointError, match="give the K file first"):
        load_oscar_pair(v_path, k_path)
    unknown = write(v1("hadamard"), "both.pt")
    load_oscar_pair(unknown, unknown)


def test_pair_in_a_directory(tmp_path, write):
    write(v1("qqt"), "a.pt"), write(v2(), "v_perhead.pt")
    k_file, v_file = find_oscar_files(tmp_path)
    assert (k_file.path.name, v_file.path.name) == ("a.pt", "v_perhead.pt")
    write(v2(), "k_perhead.pt")
    with pytest.raises(CheckpointError, match=r"exactly one K file, found a\.pt, k_perhead\.pt"):
        find_oscar_files(tmp_path)


def test_directories_without_a_pair(tmp_path, write):
    with pytest.raises(CheckpointError, match="exactly one K file, found none"):
        find_oscar_files(tmp_path)
    write(v1("qqt"))
    with pytest.raises(CheckpointError, match="exactly one V file, found none"):
        find_oscar_files(tmp_path)
    write(torch.eye(512), "layer_0.pt")
    with pytest.raises(CheckpointError, match="MLA"):
        find_oscar_files(tmp_path)


def convert(write, k_document, v_document, info=INFO, quantizer=None):
    k_file, v_file = load_oscar_pair(write(k_document), write(v_document, V_NAME))
    return checkpoint_from_oscar(k_file, v_file, info, quantizer or QuantizerConfig(64))


def test_checkpoint_from_v1_and_v2(tmp_path, write):
    documents = v1("qqt_r_h_pbr"), v2(str, seed=20)
    quantizer = QuantizerConfig(32, Clip("percentile", 0.9), NO_CLIP)
    save_checkpoint(convert(write, *documents, quantizer=quantizer), tmp_path / "file")
    loaded = load_checkpoint(tmp_path / "file")
    assert loaded.manifest.method == "oscar"
    assert loaded.manifest.quantizer == quantizer
    assert loaded.manifest.model == INFO
    assert loaded.manifest.calibration["k_objective"] == "qqt_r_h_pbr"
    for i, layer in loaded.layers.items():
        assert torch.equal(layer.k_rotation, documents[0]["layers"][i]["rotation"])
        assert torch.equal(layer.v_rotation, documents[1]["layers"][str(i)]["rotation"])
        assert layer.k_mean is None


@pytest.mark.parametrize("layers", [[0, 1], [0, 2, 3], [0, 1, 2, 3], [3, 7, 11]])
def test_layers_that_are_not_the_models(write, layers):
    with pytest.raises(CheckpointError, match="every one of the 3 layers"):
        convert(write, v1("qqt", layers=layers), v1("sst"))


@pytest.mark.parametrize("changes", [{"head_dim": 128}, {"num_kv_heads": 4}])
def test_shapes_that_are_not_the_models(write, changes):
    info = ModelInfo(**{**INFO.to_json(), **changes})
    with pytest.raises(CheckpointError, match="made for another model"):
        convert(write, v2(), v2(seed=9), info)


def test_export_writes_v2_that_loads_back(tmp_path):
    layers = {
        i: LayerRotations(rotation(HEADS, DIM, DIM, seed=i), rotation(DIM, DIM, seed=9 + i), None)
        for i in range(LAYERS)
    }
    manifest = data_free_checkpoint("quarot", INFO).manifest
    paths = save_oscar_files(Checkpoint(manifest, layers), tmp_path / "out")
    raw = torch.load(paths[0], weights_only=True)
    assert raw["format_version"] == 2
    assert raw["source_grouping"] == "per_kv_head"
    assert list(raw["layers"]) == [0, 1, 2]
    assert raw["layers"][2]["layer_id"] == 2
    k_file, v_file = find_oscar_files(tmp_path / "out")
    for i, layer in layers.items():
        assert torch.equal(k_file.rotations[i], layer.k_rotation)
        assert torch.equal(v_file.rotations[i], layer.v_rotation.expand(HEADS, DIM, DIM))
    again = checkpoint_from_oscar(k_file, v_file, INFO, QuantizerConfig(64))
    assert again.manifest.quantizer.k_clip == OSCAR_K_CLIP
    assert again.manifest.quantizer.v_clip == OSCAR_V_CLIP


def test_export_of_views_carries_no_other_layers(tmp_path):
    stack = rotation(LAYERS, HEADS, DIM, DIM)
    layers = {i: LayerRotations(stack[i], stack[i], None) for i in range(LAYERS)}
    manifest = data_free_checkpoint("quarot", INFO).manifest
    path, _ = save_oscar_files(Checkpoint(manifest, layers), tmp_path)
    assert path.stat().st_size < 1.5 * stack.nbytes


def test_export_refuses_to_lose_the_mean_unasked(tmp_path):
    base = data_free_checkpoint("quarot", INFO)
    layers = {i: layer._replace(k_mean=torch.ones(HEADS, DIM)) for i, layer in base.layers.items()}
    centred = Checkpoint(base.manifest, layers)
    with pytest.raises(CheckpointError, match="--drop-mean"):
        save_oscar_files(centred, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save_oscar_files(centred, tmp_path / "out", drop_mean=True)
    with pytest.raises(CheckpointError, match="no rotations"):
        save_oscar_files(data_free_checkpoint("rtn", INFO), tmp_path / "rtn")
