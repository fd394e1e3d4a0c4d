"""decode.cu on a CPU, lane by lane: the same source that NVRTC compiles, against the fp64 oracle.

The GPU tests of test_decode.py run the real thing; this keeps the CUDA path tested without one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import shutil
import subprocess

import pytest
import torch
from sglang_kvquant.kernels.decode import DecodeWorkspace

from sglang_kvquant.kernels import decode_cuda
from sglang_kvquant.reference import attention as reference

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_decode runs it on the GPU"),
]

HEADER = pathlib.Path(__file__).with_name("cuda_emulation.h")
RUNNER = f"""
#include "{HEADER}"
#define KVQUANT_EMULATION
#include "{decode_cuda.SOURCE}"
static Params parameters;
static void body() {{ decode_gqa(parameters); }}
extern "C" void run(const Params *p, int x, int y, int z, int threads) {{
    parameters = *p;
    emulation::body = body;
    gridDim = {{x, y, z}};
    for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) emulation::run_cta(threads);
}}
"""


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """Compile (once per set of constants) and run the kernel on CPU tensors."""
    built: dict[tuple, ctypes.CDLL] = {}

    def run(q, packed, window, plan, sm_scale, workspace, out, lse):
        macros = tuple(decode_cuda.constants(q, packed, window).items())
        if macros not in built:
            folder = tmp_path_factory.mktemp("emulated")
            (folder / "run.cpp").write_text(RUNNER)
            command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-o", "run.so"]
            command += [f"-D{name}={value}" for name, value in macros]
            subprocess.run([*command, "run.cpp"], cwd=folder, check=True)
            built[macros] = ctypes.CDLL(str(folder / "run.so"))
        parameters, grid = decode_cuda.parameters_and_grid(
            q, packed, window, plan, sm_scale, workspace, out, lse
        )
        built[macros].run(ctypes.byref(parameters), *grid, 32 * decode_cuda.WARPS)

    return run


def run_case(emulate, case, group: int, num_splits: int, window_splits: int, outlier: float = 20):
    """Kernel and oracle on one case; every part of the workspace starts as NaN."""
    gen = torch.Generator().manual_seed(7)
    batch, layout = case.plan.kv_lens.shape[0], case.layout
    q = torch.randn(batch, layout.num_kv_heads * group, layout.head_dim, generator=gen)
    q[..., 3] *= outlier
    q = q.bfloat16()
    space = DecodeWorkspace.with_splits(
        batch, q.shape[1], layout.head_dim, num_splits, window_splits, "cpu"
    )
    space = dataclasses.replace(space, min_split_tokens=128)
    space.o_parts.fill_(float("nan"))
    space.lse_parts.fill_(float("nan"))
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan"))
    sm_scale = layout.head_dim**-0.5
    emulate(q, case.packed, case.window, case.plan, sm_scale, space, out, lse)
    want, want_lse = reference.decode(
        q.double(), case.packed, case.window, case.plan, sm_scale, torch.float64
    )
    assert (space.counters == 0).all()
    return out.double(), lse.double(), want, want_lse


def check(emulate, case, group, num_splits=3, window_splits=2, missing=False):
    out, lse, want, want_lse = run_case(emulate, case, group, num_splits, window_splits)
    empty = case.plan.kv_lens == 0
    assert (out[empty] == 0).all() and (lse[empty] == float("-inf")).all()
    # bf16 of the output and of the windows' probabilities; values stay below about 5. Rows that
    # are dequantized to bf16 move logits by up to 2^-9 of sum |q| |k| / sqrt(head_dim).
    torch.testing.assert_close(out[~empty], want[~empty], atol=0.2 if missing else 2e-2, rtol=0)
    torch.testing.assert_close(
        lse[~empty], want_lse[~empty], atol=5e-2 if missing else 1e-4, rtol=1e-6
    )


@pytest.mark.parametrize("group", [1, 4, 11])
def test_group_ratios(emulate, make_case, group):
    check(emulate, make_case([300, 1, 0, 65], dtype=torch.bfloat16, page_size=4), group)


@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 64), (64, 32), (128, 32), (256, 128)])
def test_shapes(emulate, make_case, head_dim, group_size):
    case = make_case(
        [230, 40], 1, head_dim, group_size, page_size=1, dtype=torch.bfloat16, sinks=8, recent=16
    )
    check(emulate, case, 3)


@pytest.mark.parametrize("splits", [(1, 1), (5, 3)])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (32, 40), (5, 7)])
def test_windows_and_whole_pages(emulate, make_case, sinks, recent, splits):
    """Page size 32 with 0 or 32 sinks takes the path in which a tile is one run of a page."""
    case = make_case(
        [700, 33, 64, 3],
        1,
        page_size=32,
        sinks=sinks,
        recent=recent,
        dtype=torch.bfloat16,
        hit=True,
    )
    check(emulate, case, 4, *splits)


def test_missing_sinks(emulate, make_case):
    case = make_case([90, 20, 5], 2, dtype=torch.bfloat16, missing_sinks=True, hit=True)
    check(emulate, case, 2, missing=True)


def test_growing_scales(emulate, make_case):
    """Value scales that grow along the sequence force the accumulators to be rescaled."""
    case = make_case([512], 1, page_size=32, sinks=0, recent=0, dtype=torch.bfloat16)
    for page in case.plan.page_table[0, :16].tolist():
        case.packed.v_meta[page, ..., 0] *= 2.0 ** (page % 9 - 8)
    case.packed.v_meta[case.plan.page_table[0, 3], :, :4, :, 0] = 0.0
    check(emulate, case, 4)
    case.packed.v_meta.masked_fill_(~case.packed.v_meta.isfinite(), 0.0)
    case.packed.v_meta.mul_(1000.0)
    out, _, want, _ = run_case(emulate, case, 4, 2, 1)
    torch.testing.assert_close(out, want, atol=20.0, rtol=0)
