"""The command line: what it prints, how it fails, and what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from sglang_kvquant import __version__, cli
from sglang_kvquant.checkpoint import (
    Checkpoint,
    LayerRotations,
    Manifest,
    load_checkpoint,
    save_checkpoint,
)
from sglang_kvquant.config import QuantizerConfig, WindowConfig
from sglang_kvquant.model_info import ModelInfo
from sglang_kvquant.rotation import hadamard

DIM, HEADS, LAYERS = 64, 2, 2


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("LlamaForCausalLM"))


@pytest.fixture
def optr(tmp_path, model):
    """A saved checkpoint with a key mean and a held-out table, for the tiny Llama."""
    info = ModelInfo.from_model_path(model)
    before = [[4.0, 1.0], [2.0, 8.0]]
    objective = {
        "name": "output error",
        "k_before": before,
        "k_after": [[1.0, 1.0], [1.0, 2.0]],
        "v_before": before,
        "v_after": [[8.0, 1.0], [2.0, 8.0]],
    }
    manifest = Manifest(
        method="optr",
        base="quarot",
        model=info,
        quantizer=QuantizerConfig(64),
        windows=WindowConfig(16, 32),
        calibration={"data_sha256": "f" * 64, "seed": 3, "text": "long words " * 30},
        objective=objective,
    )
    rotations = hadamard(DIM, torch.float32).repeat(HEADS, 1, 1)
    layer = LayerRotations(rotations, rotations, torch.ones(HEADS, DIM))
    path = tmp_path / "optr.safetensors"
    save_checkpoint(Checkpoint(manifest, dict.fromkeys(range(LAYERS), layer)), path)
    return path


def run(capsys, *argv) -> tuple[int, str, str]:
    status = cli.main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_version_and_help_name_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize("argv", [[], ["unknown"], ["inspect"], ["convert", "--output", "x"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_user_error_is_one_sentence(tmp_path, capsys):
    status, out, err = run(capsys, "inspect", tmp_path / "absent")
    assert status == 2
    assert out == ""
    assert err.startswith("sglang-kvquant: error: there is no checkpoint at ")
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path, capsys):
    status, _, err = run(capsys, "inspect", tmp_path / "absent", "--debug")
    assert status == 2
    assert "Traceback" in err
    assert "FileNotFoundError" in err


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError("x", name="transformers"), 2, "sglang-kvquant[calibration]"),
        (OSError("disk full"), 2, "disk full"),
    ],
)
def test_errors_of_a_command(monkeypatch, capsys, error, status, words):
    def fail(args):
        raise error

    from sglang_kvquant.commands import inspect

    monkeypatch.setattr(inspect, "run", fail)
    got, _, err = run(capsys, "inspect", "FILE")
    assert got == status
    assert words in err


def test_other_errors_are_not_hidden(monkeypatch):
    from sglang_kvquant.commands import inspect

    def fail(args):
        raise ModuleNotFoundError(
            "No module named 'sglang_kvquant.gone'", name="sglang_kvquant.gone"
        )

    monkeypatch.setattr(inspect, "run", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["inspect", "FILE"])


def test_inspect_fits_a_terminal_and_says_what_matters(optr, capsys):
    status, out, _ = run(capsys, "inspect", optr)
    assert status == 0
    lines = out.splitlines()
    assert all(len(line) < 80 for line in lines if not line.startswith("/"))
    for words in (
        "optr, base quarot",
        "LlamaForCausalLM, 2 layers, 4 query / 2 KV heads, head_dim 64, hidden 128",
        "2 bits, group 64; clip K percentile 0.96, V percentile 0.92",
        "16 sink and 32 recent tokens in BF16",
        "K per KV head, V per KV head; keys centred",
        # 16 + 4 bytes a row, K and V, 2 heads, 2 layers; BF16: 128 bytes a row
        "160, BF16 1,024: 6.40x smaller (20 B a key or value row)",
        "data_sha256:",
        "seed: 3",
    ):
        assert words in " ".join(out.split())
    table = [" ".join(line.split()) for line in lines]
    left, right = "0 2.00e+00 1.00e+00 0.500 0.250 1.000", "2.00e+00 2.83e+00 1.414 1.000 2.000"
    assert f"{left} {right}" in table
    left, right = "1 4.00e+00 1.41e+00 0.354 0.250 0.500", "4.00e+00 4.00e+00 1.000 1.000 1.000"
    assert f"{left} {right}" in table
    assert "keys: 0.420 of before over all 4 heads, 0.250 to 1.000; 0 worse" in lines
    assert "values: 1.189 of before over all 4 heads, 1.000 to 2.000; 1 worse" in lines


def test_inspect_json(optr, capsys):
    status, out, _ = run(capsys, "inspect", optr, "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["bytes_per_token"] == 160
    assert facts["bf16_bytes_per_token"] == 1024
    assert facts["fingerprint"] == load_checkpoint(optr).fingerprint()
    assert facts["orthogonality_error"] < 1e-6
    assert facts["objective_ratio"]["v"]["heads_worse"] == 1


def test_inspect_rtn(tmp_path, model, capsys):
    from sglang_kvquant.checkpoint import data_free_checkpoint

    path = tmp_path / "rtn"
    save_checkpoint(data_free_checkpoint("rtn", ModelInfo.from_model_path(model)), path)
    status, out, _ = run(capsys, "inspect", path)
    assert status == 0
    assert "clip K none, V none" in out
    assert run(capsys, "inspect", path, "--json")[0] == 0


def test_convert_there_and_back(optr, tmp_path, model, capsys):
    status, _, err = run(capsys, "convert", "--to-oscar", optr, "--output", tmp_path / "o")
    assert status == 2
    assert "--drop-mean" in err
    status, out, err = run(
        capsys, "convert", "--to-oscar", optr, "--output", tmp_path / "o", "--drop-mean"
    )
    assert status == 0
    assert "K clip percentile 0.96" in err
    k_path, v_path = (line.split()[-1] for line in out.splitlines())

    status, out, _ = run(capsys, "inspect", k_path)
    assert status == 0
    assert "OSCAR's rotations for keys, format version 2" in out
    assert "[2, 64, 64]" in out
    status, out, _ = run(capsys, "inspect", v_path, "--json")
    assert json.loads(out)["side"] == "v"

    common = ("--model", model, "--output", tmp_path / "back")
    status, _, err = run(capsys, "convert", "--from-oscar", k_path, v_path, *common)
    assert status == 0
    assert "name no model" in err
    back, original = load_checkpoint(tmp_path / "back"), load_checkpoint(optr)
    assert back.manifest.method == "oscar"
    assert back.manifest.quantizer == original.manifest.quantizer
    assert torch.equal(back.layers[1].k_rotation, original.layers[1].k_rotation)

    options = ("--k-clip", "0", "--v-clip", "0.9", "--group-size", "32")
    status, *_ = run(capsys, "convert", "--from-oscar", tmp_path / "o", *common, *options)
    assert status == 0
    quantizer = load_checkpoint(tmp_path / "back").manifest.quantizer
    assert (quantizer.group_size, quantizer.k_clip.kind, quantizer.v_clip.ratio) == (
        32,
        "none",
        0.9,
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--from-oscar", "a", "b"], "needs --model"),
        (["--from-oscar", "a", "b", "c", "--model", "m"], "one directory"),
        (["--from-oscar", "a", "b", "--model", "m", "--drop-mean"], "--drop-mean has no meaning"),
        (["--to-oscar", "a", "--k-clip", "0.9"], "--k-clip has no meaning"),
        (["--to-oscar", "a", "--model", "m"], "--model has no meaning"),
        (["--to-oscar", "/absent"], "there is no checkpoint"),
        (["--from-oscar", "/absent", "--model", "MODEL"], "no directory"),
        (["--from-oscar", "/absent", "/absent", "--model", "MODEL"], "cannot be read"),
        (["--from-oscar", "a", "b", "--model", "MODEL", "--group-size", "48"], "group_size"),
        (["--from-oscar", "a", "b", "--model", "MODEL", "--k-clip", "1.5"], "clip ratio"),
    ],
)
def test_convert_refusals(argv, words, model, tmp_path, capsys):
    argv = [model if arg == "MODEL" else arg for arg in argv]
    status, _, err = run(capsys, "convert", *argv, "--output", tmp_path / "out")
    assert status == 2
    assert words in err
    assert not (tmp_path / "out").exists()


def test_converted_files_of_another_shape_are_refused(optr, tmp_path, tiny_model, capsys):
    run(capsys, "convert", "--to-oscar", optr, "--output", tmp_path / "o", "--drop-mean")
    other = tiny_model("LlamaForCausalLM", num_layers=3)
    status, _, err = run(
        capsys, "convert", "--from-oscar", tmp_path / "o", "--model", other, "--output", "out"
    )
    assert status == 2
    assert "3 layers" in err


def fresh_process(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


HEAVY = ("torch", "sglang", "transformers", "triton")
LOADED = f"; import sys; print([name for name in {HEAVY} if name in sys.modules])"


@pytest.mark.parametrize(
    "module", ["sglang_kvquant", "sglang_kvquant.config", "sglang_kvquant.model_info"]
)
def test_light_modules_import_neither_torch_nor_sglang(module):
    assert fresh_process(f"import {module}{LOADED}") == "[]"


def test_building_the_parser_imports_neither_torch_nor_sglang():
    code = f"from sglang_kvquant.cli import build_parser; build_parser(){LOADED}"
    assert fresh_process(code) == "[]"


def test_no_module_outside_serving_imports_sglang(repository):
    """Every module but plugin, serving and patches; kernels need Triton and are left out here."""
    package = repository / "sglang_kvquant"
    apart = ("serving", "patches", "kernels", "plugin", "__main__")
    modules = sorted(
        ".".join(["sglang_kvquant", *path.relative_to(package).with_suffix("").parts])
        for path in package.rglob("*.py")
        if not path.relative_to(package).with_suffix("").parts[0].startswith(apart)
    )
    assert "sglang_kvquant.reference.attention" in modules
    assert "sglang_kvquant.calibration.capture" in modules
    names = [name.removesuffix(".__init__") for name in modules]
    imports = f"import importlib, sys; [importlib.import_module(name) for name in {names}]"
    code = f"{imports}; print('sglang' in sys.modules)"
    assert fresh_process(code) == "False"
