"""extend: error against an fp64 oracle on the same bytes, and the merge with another kernel."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from sglang_kvquant.kernels.extend import extend

from sglang_kvquant.kernels import causal as other_kernels
from sglang_kvquant.layout import ReadPlan
from sglang_kvquant.reference import attention as reference

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def chunk(case, new_lens: list[int], group: int, dtype=torch.float32):
    """Queries, keys and values of the new tokens, and qo_indptr."""
    gen = torch.Generator().manual_seed(11)
    device, layout, total = case.plan.kv_lens.device, case.layout, sum(new_lens)
    rows = [
        torch.randn(total, heads, layout.head_dim, generator=gen).bfloat16().to(dtype).to(device)
        for heads in (layout.num_kv_heads * group, layout.num_kv_heads, layout.num_kv_heads)
    ]
    bounds = torch.tensor([0, *new_lens]).cumsum(0).int().to(device)
    return (*rows, bounds)


def check(case, new_lens, group, dtype=torch.float32, atol=2e-4, **options):
    """Absolute bound: |v| stays below about 5 here, so atol / 5 is relative to the values."""
    q, k, v, bounds = chunk(case, new_lens, group, dtype)
    sm_scale = case.layout.head_dim**-0.5
    arguments = (bounds, case.packed, case.window, case.plan, sm_scale)
    want, want_lse = reference.extend(
        q.double(), k.double(), v.double(), *arguments, torch.float64
    )
    got, got_lse = extend(q, k, v, *arguments, **options)
    assert got.dtype == dtype
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=atol)
    torch.testing.assert_close(got_lse.double(), want_lse, atol=atol, rtol=1e-5)
    return got, got_lse


@pytest.mark.parametrize("group", [1, 4, 7])
def test_ragged(group, make_case):
    check(make_case([70, 0, 1, 130]), [5, 33, 1, 2], group)


@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 64), (64, 32), (128, 32), (256, 128)])
def test_shapes(head_dim, group_size, make_case):
    check(make_case([60, 33], head_dim=head_dim, group_size=group_size), [9, 4], 2)


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (5, 7), (64, 256)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_windows(sinks, recent, page_size, make_case):
    case = make_case(
        [100, 3, 33], sinks=sinks, recent=recent, page_size=page_size, missing_sinks=True, hit=True
    )
    check(case, [3, 4, 40], 2)


def test_no_prefix(make_case):
    case = make_case([0, 0])
    told = check(case, [17, 40], 2, has_prefix=False)
    found = check(case, [17, 40], 2, max_extend_len=40)
    assert torch.equal(told[0], found[0])


def reference_causal(bounds, layout, sm_scale):
    """Another kernel for the current chunk, with natural-log lse."""

    def run(q, k, v):
        parts = []
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            mask = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).tril()
            keys, values = (t[begin:end].transpose(0, 1).double() for t in (k, v))
            parts.append(reference.attend(q[begin:end].double(), keys, values, sm_scale, mask))
        out = torch.cat([p[0] for p in parts]).to(q.dtype)
        return out, torch.cat([p[1] for p in parts]).float()

    return run


def test_merge_with_another_kernel(make_case):
    case = make_case([90, 0, 40])
    lens = [6, 20, 1]
    bounds = chunk(case, lens, 4)[3]
    causal = reference_causal(bounds, case.layout, case.layout.head_dim**-0.5)
    check(case, lens, 4, causal=causal, atol=2e-3 if torch.cuda.is_available() else 2e-4)
    fresh = make_case([0, 0, 0])
    check(fresh, lens, 4, causal=causal, has_prefix=False)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("kernel", "module"), [("FA3Causal", "sgl_kernel"), ("FlashInferCausal", "flashinfer")]
)
def test_other_kernels(kernel, module, head_dim, make_case):
    """FlashAttention 3 and FlashInfer, alone and merged with a prefix, grouped queries."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    if kernel == "FA3Causal":
        if importlib.util.find_spec("sgl_kernel.flash_ops") is None:
            pytest.skip("this sgl_kernel has no flash_ops")
        attention = other_kernels.FA3Causal()
    else:
        attention = other_kernels.FlashInferCausal(torch.device("cuda"))
    lens = [6, 300, 1]
    for prefixes in ([90, 0, 40], [0, 0, 0]):
        case = make_case(prefixes, head_dim=head_dim)
        q, k, _, bounds = chunk(case, lens, 4, torch.bfloat16)
        heads = (q.shape[1], k.shape[1], head_dim)
        attention.plan(
            other_kernels.ChunkPlan(
                bounds, bounds.cpu(), max(lens), *heads, head_dim**-0.5, q.dtype
            )
        )
        options = {"causal": attention, "has_prefix": any(prefixes)}
        check(case, lens, 4, torch.bfloat16, atol=2e-2, **options)


def test_empty_requests_and_neighbours(make_case):
    """A request without new tokens writes nothing; the others do not depend on it."""
    case = make_case([50, 20, 30])
    q, k, v, bounds = chunk(case, [4, 0, 5], 2)
    out = torch.full_like(q, 7.0)
    got = extend(q, k, v, bounds, case.packed, case.window, case.plan, 0.1, out=out)
    assert got[0] is out and not (out == 7.0).all(-1).any()
    last = ReadPlan(*(getattr(case.plan, f.name)[2:] for f in dataclasses.fields(ReadPlan)))
    alone = extend(q[4:], k[4:], v[4:], bounds[2:] - 4, case.packed, case.window, last, 0.1)
    assert torch.equal(alone[0], out[4:]) and torch.equal(alone[1], got[1][4:])


def test_future_tokens_are_invisible(make_case):
    case = make_case([20])
    q, k, v, bounds = chunk(case, [12], 2)
    arguments = (bounds, case.packed, case.window, case.plan, 0.1)
    before = extend(q, k, v, *arguments)[0]
    k[7:], v[7:] = 9.0, -9.0
    after = extend(q, k, v, *arguments)[0]
    assert torch.equal(before[:7], after[:7]) and not torch.equal(before[7:], after[7:])


def test_errors(make_case):
    case = make_case([20])
    q, k, v, bounds = chunk(case, [3], 2)
    rest = (bounds, case.packed, case.window, case.plan, 1.0)
    with pytest.raises(ValueError, match="k_rot"):
        extend(q, k[:2], v, *rest)
    with pytest.raises(ValueError, match="qo_indptr"):
        extend(q, k, v, bounds.long(), *rest[1:])


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [1, 64])
def test_bf16_on_gpu(head_dim, page_size, make_case):
    case = make_case(
        [3000, 0, 17, 500],
        num_kv_heads=4,
        head_dim=head_dim,
        group_size=min(head_dim, 128),
        page_size=page_size,
        sinks=64,
        recent=256,
        dtype=torch.bfloat16,
        hit=True,
    )
    check(case, [500, 1000, 1, 64], 4, torch.bfloat16, atol=2e-2)
