"""Every kernel has a reference, a test file and a benchmark; entry points keep its arguments."""

from __future__ import annotations

import inspect
import pathlib

import pytest

from sglang_kvquant import rotation
from sglang_kvquant.kernels import ops
from sglang_kvquant.reference import attention, write

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFERENCES = {
    "write_kv": write.write_kv,
    "decode": attention.decode,
    "extend": attention.extend,
    "rotate_query": rotation.rotate_heads,
}


@pytest.mark.parametrize("name", ["write_kv", "decode", "extend"])
def test_positional_arguments_are_the_references(name):
    def positional(function):
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind in kinds and p.name != "dtype"]

    assert positional(getattr(ops, name)) == positional(REFERENCES[name])


@pytest.mark.parametrize("name", REFERENCES)
def test_every_kernel_is_tested_and_measured(name):
    short = name.removesuffix("_kv")
    assert name in ops.__all__
    assert (ROOT / "tests" / "kernels" / f"test_{short}.py").is_file()
    benchmark = (ROOT / "scripts" / "bench_kernels.py").read_text()
    assert f"import {name}" in benchmark or f", {name}" in benchmark
