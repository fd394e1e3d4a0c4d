"""scripts/accuracy.py: disjoint data, ratios, verdicts, and a whole small run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys

import pytest
import torch


@pytest.fixture(scope="module")
def accuracy(repository):
    spec = importlib.util.spec_from_file_location("accuracy", repository / "scripts/accuracy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_given_for_both_uses_is_halved(accuracy, tmp_path):
    shared, other = tmp_path / "a.bin", tmp_path / "b.bin"
    shared.write_bytes(torch.arange(100, dtype=torch.int16).numpy().tobytes())
    other.write_bytes(torch.arange(200, 240, dtype=torch.int16).numpy().tobytes())
    args = argparse.Namespace(calibration=[shared, other], test=[shared])
    calibration, test = accuracy.read_texts(args, tokenizer=None)
    assert [name for name, _ in calibration] == ["a.bin", "b.bin"]
    assert calibration[0][1].tolist() == list(range(50))
    assert calibration[1][1].tolist() == list(range(200, 240))
    assert test[0][1].tolist() == list(range(50, 100))


def make_run(optr: float, base: float, centred: float) -> dict:
    """A run whose measures are `optr` for every optr, and so on."""

    def entry(value: float) -> dict:
        return {
            "output_mse": {"mean": value, "per_layer": [value, 4 * value]},
            "kl": {"mean": value / 10},
        }

    methods = {"rtn": entry(10.0)}
    for name in ("quarot", "oscar", "oscar-per-head"):
        methods |= {
            name: entry(base),
            f"{name}+c": entry(centred),
            f"optr({name})": entry(optr),
        }
    return {"methods": methods}


def test_ratios_and_verdicts(accuracy):
    runs = [make_run(0.4, 1.0, 0.5), make_run(0.5, 1.0, 0.5)]
    rows = {row["name"]: row for row in accuracy.compare(runs, accuracy.BOUNDS["smollm2"])}
    assert rows["MSE quarot / rtn"]["values"] == pytest.approx([0.1, 0.1])
    assert rows["MSE optr(quarot) / quarot"]["values"] == pytest.approx([0.4, 0.5])
    assert rows["MSE optr(quarot) / quarot"]["verdict"] == "FAIL"  # mean 0.45 is not below 0.45
    assert rows["MSE optr(oscar) / oscar"]["verdict"] == "pass"  # 0.5 at most
    assert rows["geo. MSE optr(oscar) / oscar+c"]["values"] == pytest.approx([0.8, 1.0])
    assert rows["geo. MSE optr(oscar) / oscar+c"]["verdict"] == "FAIL"
    assert rows["KL optr(oscar) / oscar"]["verdict"] == "pass"
    hard = rows["KL optr(quarot) / quarot+c"]
    assert hard["bound"] == 1.0 and hard["values"] == pytest.approx([0.8, 1.0])
    assert hard["verdict"] == "mean"  # 1.0 is not below 1.0
    assert rows["KL optr(oscar-per-head) / oscar-per-head+c"].get("bound") is None
    text = accuracy.format_rows(list(rows.values()))
    assert max(len(line) for line in text.splitlines()) <= 80


def test_every_bound_names_a_row(accuracy):
    names = {row["name"] for row in accuracy.compare([make_run(1.0, 1.0, 1.0)], {})}
    for bounds in accuracy.BOUNDS.values():
        assert set(bounds) <= names


@pytest.mark.slow
def test_whole_run(accuracy, tiny_model, tmp_path, monkeypatch, capsys):
    model = tiny_model("LlamaForCausalLM")
    tokens = tmp_path / "tokens.bin"
    words = torch.randint(0, 256, (6000,), dtype=torch.int16)
    tokens.write_bytes(words.numpy().tobytes())
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 100)
    output = tmp_path / "out.json"
    options = {
        "--model": str(model),
        "--seeds": "0,1",
        "--num-sequences": "8",
        "--num-heldout": "2",
        "--calibration-len": "160",
        "--num-windows": "2",
        "--seq-len": "120",
        "--device": "cpu",
        "--output": str(output),
        "--markdown": str(tmp_path / "tables.md"),
        "--checkpoints": str(tmp_path / "kept"),
    }
    settings = ("steps=4", "selection_every=2", "sink_tokens=4", "recent_tokens=16")
    command = ["accuracy.py", *(x for pair in options.items() for x in pair)]
    command += ["--calibration", str(tokens), str(text), "--test", str(tokens)]
    command += [x for setting in settings for x in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", command)
    assert accuracy.main() == 0
    results = json.loads(output.read_text())
    assert [run["seed"] for run in results["runs"]] == [0, 1]
    assert results["runs"][0]["calibration_sha256"] != results["runs"][1]["calibration_sha256"]
    assert all(run["objective_risen"] == 0 for run in results["runs"])
    assert len(results["runs"][0]["methods"]) == 10
    assert results["settings"]["steps"] == 4
    # Data-free methods do not depend on the seed.
    first, second = (run["methods"] for run in results["runs"])
    assert first["quarot"]["kl"] == second["quarot"]["kl"]
    assert first["optr(oscar)"]["kl"] != second["optr(oscar)"]["kl"]
    # Keys of a random model have a mean of their own, and learning moves the rotation.
    assert first["quarot+c"]["output_mse"]["mean"] != first["quarot"]["output_mse"]["mean"]
    assert first["optr(quarot)"]["output_mse"] != first["quarot+c"]["output_mse"]
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == 16
    tables = (tmp_path / "tables.md").read_text()
    assert tables.count("| optr(oscar) |") == 1 and "| KL optr(oscar) / oscar+c |" in tables
    assert "KL optr(oscar) / oscar+c" in capsys.readouterr().out
