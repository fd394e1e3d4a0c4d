"""``evaluate`` from the command line: input, checkpoints, files it writes, errors it shows."""

from __future__ import annotations

import dataclasses
import json
import lzma
import re

import pytest
import torch

from sglang_kvquant.checkpoint import (
    Checkpoint,
    LayerRotations,
    data_free_checkpoint,
    default_checkpoint_path,
    save_checkpoint,
)
from sglang_kvquant.cli import main
from sglang_kvquant.config import QuantizerConfig
from sglang_kvquant.evaluation.data import EvaluationError, cut_windows, read_token_file
from sglang_kvquant.evaluation.methods import load_methods
from sglang_kvquant.model_info import ModelInfo
from sglang_kvquant.rotation import hadamard


@pytest.fixture
def model_path(tiny_model, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("SGLANG_KVQUANT_HOME", str(tmp_path / "home"))
    return str(tiny_model("LlamaForCausalLM"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "held-out.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    return path


def learned_checkpoint(model_path: str, steps: int, base: str = "quarot") -> Checkpoint:
    """What ``calibrate --method optr`` makes, with a Hadamard rotation and zero mean."""
    info = ModelInfo.from_model_path(model_path)
    free = data_free_checkpoint("quarot", info)
    manifest = dataclasses.replace(
        free.manifest,
        method="optr",
        base=base,
        quantizer=QuantizerConfig.for_method("optr", info.head_dim),
        calibration={"seed": 7, "settings": {"steps": steps}},
    )
    rotation = hadamard(info.head_dim, torch.float32)
    layer = LayerRotations(rotation, rotation, torch.zeros(info.num_kv_heads, info.head_dim))
    return Checkpoint(manifest, dict.fromkeys(range(info.num_layers), layer))


def run(model_path, text, *more: str) -> int:
    options = ["--seq-len", "96", "--num-windows", "2", "--sink-tokens", "4", "--recent-tokens"]
    command = ["evaluate", "--model", model_path, "--data", str(text), *options, "16"]
    return main([*command, "--device", "cpu", *more])


def test_table_json_figures_and_report(model_path, text, tmp_path, capsys):
    file = tmp_path / "optr.safetensors"
    save_checkpoint(learned_checkpoint(model_path, 80), file)
    output, report = tmp_path / "deep" / "out.json", tmp_path / "report"
    status = run(
        model_path,
        text,
        *("--methods", "quarot,optr", "--checkpoint", f"optr={file}"),
        *("--output", str(output), "--report", str(report)),
    )
    assert status == 0
    table = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in table if not line.startswith(("numbers", "report"))) <= 80
    results = json.loads(output.read_text())
    # Plain INT2 is always measured: percentages are relative to it.
    assert list(results["methods"]) == ["rtn", "quarot", "optr"]
    assert results["data"]["num_windows"] == 2 and results["data"]["seq_len"] == 96
    assert re.fullmatch("[0-9a-f]{64}", results["data"]["sha256"])
    assert results["command"].startswith("sglang-kvquant")
    assert results["methods"]["optr"]["origin"]["calibration"]["seed"] == 7
    assert results["methods"]["optr"]["origin"]["checkpoint"] == str(file)
    # A Hadamard rotation and a zero mean are QuaRot.
    ours, quarot = (results["methods"][name] for name in ("optr", "quarot"))
    assert ours["kl"]["mean"] == pytest.approx(quarot["kl"]["mean"], rel=1e-3)
    images = sorted(path.name for path in report.glob("*.png"))
    assert images == [
        "output_error_per_head.png",
        "output_error_per_layer.png",
        "residual_error_per_layer.png",
    ]
    assert all((report / name).read_bytes().startswith(b"\x89PNG\r\n") for name in images)
    page = (report / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r"(src|href)\s*=\s*['\"](?!data:)", page)


def test_default_places_and_centred_bases(model_path, text, capsys):
    save_checkpoint(
        learned_checkpoint(model_path, 80), default_checkpoint_path(model_path, "optr")
    )
    centred = default_checkpoint_path(model_path, "quarot+c")
    save_checkpoint(learned_checkpoint(model_path, 0), centred)
    assert run(model_path, text, "--methods", "rtn,optr,quarot+c") == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == ["unquantized", "rtn", "optr", "quarot+c"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "optr"], r"calibrate --model \S+ --method optr`"),
        (["--methods", "oscar"], r"calibrate --model \S+ --method oscar`"),
        (["--methods", "oscar+c"], r"--method optr --base oscar --steps 0 --output \S+oscar\+c"),
        (["--methods", "oscar-per-head"], r"--method oscar --base oscar-per-head --output"),
        (["--methods", "fancy"], "there is no method fancy"),
        (["--methods", "none,rtn"], "always measured"),
        (["--methods", "rtn,rtn"], "each method once"),
        (["--methods", "rtn", "--checkpoint", "optr=x"], "--methods does not name"),
        (["--methods", "rtn", "--checkpoint", "rtn=x"], "would be ignored"),
        (["--methods", "optr", "--checkpoint", "optr"], "NAME=FILE"),
        (["--methods", "rtn", "--seq-len", "9000"], "9000"),
        (["--methods", "rtn", "--max-tokens", "50"], "50 tokens"),
        (["--methods", "rtn", "--num-windows", "0"], "--num-windows"),
        (["--methods", "rtn", "--data", "/nowhere/text"], "cannot be read"),
        (["--methods", "rtn", "--recent-tokens", "-1"], "recent_tokens"),
    ],
)
def test_user_errors_are_one_sentence(model_path, text, capsys, options, message):
    assert run(model_path, text, *options) == 2
    shown = capsys.readouterr()
    assert re.search(message, shown.err), shown.err
    assert "Traceback" not in shown.err and not shown.out


def test_a_name_must_be_what_the_file_holds(model_path, tmp_path):
    info = ModelInfo.from_model_path(model_path)
    file = str(tmp_path / "file.safetensors")
    save_checkpoint(learned_checkpoint(model_path, 80), file)
    for name, message in (
        ("oscar", "holds method optr, not oscar"),
        ("quarot+c", "learned for 80 steps, not quarot without learning"),
    ):
        with pytest.raises(ValueError, match=message):
            load_methods([name], {name: file}, model_path, info)
    other_model = dataclasses.replace(info, num_layers=3)
    with pytest.raises(ValueError, match="made for another model"):
        load_methods(["optr"], {"optr": file}, model_path, other_model)
    assert list(load_methods(["mine"], {"mine": file}, model_path, info)) == ["mine"]


def test_windows_are_disjoint_and_spread_over_the_text():
    stream = torch.arange(1000)
    windows = cut_windows(stream, 100, 4, "text", []).tokens
    assert windows[:, 0].tolist() == [0, 250, 500, 750]
    assert windows.shape == (4, 100)
    with_prefix = cut_windows(stream, 100, 4, "text", [7777]).tokens
    assert with_prefix[:, 0].tolist() == [7777] * 4
    assert with_prefix[1, 1:].tolist() == list(range(250, 349))
    whole = cut_windows(stream, 250, 4, "text", []).tokens
    assert whole.flatten().tolist() == list(range(1000))
    with pytest.raises(EvaluationError, match="1000 tokens, but 4 windows of 251"):
        cut_windows(stream, 251, 4, "text", [])


def test_hash_tells_texts_apart():
    a = cut_windows(torch.arange(100), 50, 2, "a", [])
    assert a.sha256() == cut_windows(torch.arange(100), 50, 2, "b", []).sha256()
    assert a.sha256() != cut_windows(torch.arange(1, 101), 50, 2, "a", []).sha256()


def test_token_files_are_little_endian_words(tmp_path):
    data = bytes([1, 0, 0, 2, 255, 255])
    (tmp_path / "t.bin").write_bytes(data)
    (tmp_path / "t.bin.xz").write_bytes(lzma.compress(data))
    for name in ("t.bin", "t.bin.xz"):
        assert read_token_file(tmp_path / name).tolist() == [1, 512, 65535]
    with pytest.raises(EvaluationError, match="cannot be read"):
        read_token_file(tmp_path / "missing.bin")
