"""scripts/bench_serving.py: medians, requests that fit, ratios, saved results."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_serving.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_serving", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_serving"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def row(input_len: int, latency: float, first: float) -> dict:
    return {"input_len": input_len, "output_len": 11, "latency": latency, "last_ttft": first}


def test_medians_per_context(bench):
    rows = [row(64, 1.2, 0.2), row(1024, 3.0, 1.0), row(64, 9.0, 0.3), row(64, 1.5, 0.4)]
    short, long = bench.median_points(rows)
    assert (short.context, short.repeats, short.first_token_s) == (64, 3, 0.3)
    assert short.decode_ms == pytest.approx(110)  # the medians of 100, 870 and 110 ms a token
    assert (long.context, long.repeats, long.decode_ms) == (1024, 1, pytest.approx(200))


@pytest.mark.parametrize(
    ("capacity", "running", "expected"), [(1000, 64, 9), (1000, 4, 4), (99, 64, 1)]
)
def test_requests_that_fit(bench, capacity, running, expected):
    assert bench.requests_that_fit(capacity, 110, running) == expected


def results(bench) -> list:
    def result(label, quantized, capacity, ms, load):
        points = [bench.Point(64, ms / 100, ms, 1)]
        return bench.Result(label, quantized, "x", capacity, points, bench.Load(2, 64, 8, *load))

    return [
        result("BF16 slow", False, 100, 8.0, (50.0, 40.0)),
        result("BF16 fast", False, 90, 4.0, (100.0, 60.0)),
        result("optr", True, 650, 2.0, (350.0, 90.0)),
    ]


def test_ratios_are_to_the_best_baseline(bench):
    text = bench.table(results(bench), [64, 128])
    assert "2.00 ms, first 20 ms (2.00×, 2.00×)" in text
    assert "| 128 | does not fit | does not fit | does not fit |" in text
    assert "| optr | 650 (6.50×) | 2 | 350 (3.50×) | 90 (1.50×) |" in text


def test_saved_results_come_back(bench, tmp_path):
    saved = results(bench)
    saved[0].load = None
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"results": [asdict(result) for result in saved]}))
    assert bench.load_results(path) == saved


def test_without_a_baseline_there_is_nothing_to_show(bench, tmp_path):
    record = {"facts": {}, "missing": {}, "results": [asdict(results(bench)[2])]}
    (tmp_path / "bench.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="no BF16 server"):
        bench.show(tmp_path)
