"""``sglang-kvquant calibrate`` on tiny models: the file, resuming, refusals, what is printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_kvquant.calibration import recipe as recipe_module
from sglang_kvquant.calibration.capture import collect_traces
from sglang_kvquant.calibration.data import load_tokens
from sglang_kvquant.calibration.errors import CalibrationError
from sglang_kvquant.calibration.recipe import Recipe, calibrate, calibrate_traces, load_model
from sglang_kvquant.calibration.report import objective_table
from sglang_kvquant.calibration.settings import OptRSettings
from sglang_kvquant.checkpoint import check_matches, default_checkpoint_path, load_checkpoint
from sglang_kvquant.cli import main
from sglang_kvquant.config import QuantizerConfig
from sglang_kvquant.model_info import GQA_ARCHITECTURES, ModelInfo

transformers = pytest.importorskip("transformers")

SMALL = ["--seq-len", "400", "--num-sequences", "3", "--num-heldout", "1"]
FAST = ["--steps", "2", "--num-queries", "8", *SMALL]


@pytest.mark.parametrize("architecture", GQA_ARCHITECTURES)
def test_optr_checkpoint(tiny_model, tmp_path, capsys, architecture: str) -> None:
    model, output = str(tiny_model(architecture)), tmp_path / "c.safetensors"
    argv = ["calibrate", "--model", model, "--method", "optr", "--output", str(output), *FAST]
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert "GiB beside the model's weights" in printed.err
    assert f"--kv-quant optr --kv-quant-checkpoint {output}" in printed.out
    assert max(map(len, printed.out.split("Saved in")[0].splitlines())) <= 80
    checkpoint = load_checkpoint(output)
    info = ModelInfo.from_model_path(model)
    check_matches(checkpoint, info, "optr")
    manifest = checkpoint.manifest
    assert manifest.base == "quarot" and manifest.calibration["settings"]["steps"] == 2
    assert manifest.calibration["data"] == "default_text.txt"
    assert len(manifest.objective["k_after"]) == info.num_layers
    assert checkpoint.layers[0].k_rotation.shape == (2, 64, 64)
    assert checkpoint.layers[0].k_mean.shape == (2, 64)
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]  # no work files


@pytest.mark.parametrize(("base", "shape"), [("oscar", (64, 64)), ("oscar-per-head", (2, 64, 64))])
def test_oscar_checkpoint_in_the_default_place(
    tiny_model, tmp_path, monkeypatch, capsys, base: str, shape: tuple[int, ...]
) -> None:
    monkeypatch.setenv("SGLANG_KVQUANT_HOME", str(tmp_path))
    model = str(tiny_model())
    argv = ["calibrate", "--model", model, "--method", "oscar", "--base", base, *SMALL]
    assert main(argv) == 0
    first = capsys.readouterr().out
    assert "replacing" not in first and "--kv-quant-checkpoint" not in first
    checkpoint = load_checkpoint(default_checkpoint_path(model, "oscar"))
    assert checkpoint.manifest.objective is None
    assert checkpoint.layers[1].k_rotation.shape == shape
    assert checkpoint.layers[1].k_mean is None
    assert main(argv) == 0
    assert "replacing the one there" in capsys.readouterr().out
    again = load_checkpoint(default_checkpoint_path(model, "oscar"))
    assert again.fingerprint() == checkpoint.fingerprint()


@pytest.fixture
def small_run(tiny_model):
    """(model, tokens, recipe, info) of a run that takes a second."""
    path = str(tiny_model(num_layers=4))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokens = load_tokens(tokenizer, seq_len=400, num_sequences=3, num_heldout=1)
    settings = OptRSettings(steps=2, num_queries=8)
    recipe = Recipe("optr", "quarot", QuantizerConfig.for_method("optr", 64), settings)
    return load_model(path), tokens, recipe, ModelInfo.from_model_path(path)


def test_killed_run_continues_and_gives_the_same_bits(small_run, tmp_path, monkeypatch) -> None:
    whole = calibrate(*small_run)

    def kill(layer_id: int, *_args) -> None:
        if layer_id == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(*small_run, work_root=tmp_path, on_layer=kill)
    solved: list[torch.Size] = []
    solve = recipe_module.solve_layer
    monkeypatch.setattr(
        recipe_module, "solve_layer", lambda *args: solved.append(args[0].k.shape) or solve(*args)
    )
    resumed = calibrate(*small_run, work_root=tmp_path)
    assert len(solved) == 1
    assert resumed.fingerprint() == whole.fingerprint()


def test_collected_traces_give_the_same_checkpoint(small_run) -> None:
    model, tokens, recipe, info = small_run
    traces = collect_traces(model, tokens.all())
    from_traces = calibrate_traces(traces, tokens, recipe, info)
    assert from_traces.fingerprint() == calibrate(*small_run).fingerprint()


def test_solved_layers_of_other_settings_are_not_used(small_run, tmp_path) -> None:
    model, tokens, recipe, info = small_run
    calibrate(model, tokens, recipe, info, work_root=tmp_path)
    other = replace(recipe, settings=replace(recipe.settings, lr=0.5))
    mixed = calibrate(model, tokens, other, info, work_root=tmp_path)
    assert mixed.fingerprint() == calibrate(model, tokens, other, info).fingerprint()


def test_damaged_work_file_is_solved_again(small_run, tmp_path) -> None:
    whole = calibrate(*small_run, work_root=tmp_path)
    files = sorted(tmp_path.rglob("layer_*.safetensors"))
    assert len(files) == 4
    files[0].write_bytes(files[0].read_bytes()[:100])
    files[1].write_bytes(b"")
    assert calibrate(*small_run, work_root=tmp_path).fingerprint() == whole.fingerprint()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-len", "327", "--num-sequences", "8"], "Sequences of 327 tokens are too short"),
        (["--seq-len", "328", "--num-sequences", "3"], "984 calibration tokens are too few"),
        (["--method", "oscar", "--base", "quarot"], "--method oscar has no base quarot"),
        (["--method", "oscar", "--steps", "5"], "--steps would be ignored"),
        (["--data", "missing.txt"], "missing.txt cannot be read as text"),
        (["--num-sequences", "8000"], "give more text with --data"),
        (["--lr", "0"], "lr must be positive"),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (
            ["--seq-len", "5000", "--num-sequences", "2"],
            "longer than this model's context of 4096",
        ),
    ],
)
def test_refusals_are_one_sentence(tiny_model, tmp_path, capsys, options, message: str) -> None:
    output = tmp_path / "c.safetensors"
    argv = ["calibrate", "--model", str(tiny_model()), "--output", str(output), *options]
    assert main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1] and "Traceback" not in "".join(error)
    assert not output.exists()


def test_head_dim_and_architecture_are_refused(tiny_model, tmp_path, capsys) -> None:
    path = str(tiny_model(head_dim=96))
    assert main(["calibrate", "--model", path, "--output", str(tmp_path / "c")]) == 2
    assert "head_dim 96 is not served" in capsys.readouterr().err
    assert main(["calibrate", "--model", str(tmp_path), "--output", str(tmp_path / "c")]) == 2


def test_too_few_tokens_are_refused_in_the_library(small_run) -> None:
    model, tokens, recipe, info = small_run
    few = replace(tokens, train=tokens.train[:2])
    with pytest.raises(CalibrationError, match="800 calibration tokens are too few"):
        calibrate(model, few, recipe, info)


def test_table_fits_a_terminal(tmp_path: Path) -> None:
    layers, heads = 3, 40
    before = [[1.0] * heads for _ in range(layers)]
    after = [[0.5 + 0.01 * h for h in range(heads)] for _ in range(layers)]
    table = objective_table(
        {"k_before": before, "k_after": after, "v_before": before, "v_after": before}
    )
    lines = table.splitlines()
    assert max(map(len, lines)) <= 80
    assert "0.890@39" in lines[2] and "1.000@0" in lines[2]
    assert lines[-1].endswith("values 1.000")
