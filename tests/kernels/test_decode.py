"""decode: error against an fp64 oracle on the same bytes, and invariances."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang_kvquant.kernels import decode as kernel
from sglang_kvquant.layout import PackedKV, ReadPlan
from sglang_kvquant.reference import attention as reference

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def queries(case, group: int, dtype=torch.float32, scale: float = 1.0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(7)
    batch = case.plan.kv_lens.shape[0]
    shape = (batch, case.layout.num_kv_heads * group, case.layout.head_dim)
    q = scale * torch.randn(shape, generator=gen)
    q[..., 3] *= 20  # rotated queries have outliers
    # bf16 numbers, as in serving: the packed kernel's fp16 operands hold them exactly.
    return q.bfloat16().to(dtype).to(case.plan.kv_lens.device)


def tolerance(case, q, oracle, lse, p_eps: float, q_eps: float) -> tuple[float, torch.Tensor]:
    """Bounds of the kernel's rounding.

    Logits: |dl| <= q_eps * sm_scale * sum|q| * max|k| (operands, and the fp16 q of the packed
    part, whose smallest exact number is 2^-20 of the row's largest). Probabilities carry p_eps
    relative and exp(dl); outputs are averages of v, so |dout| <= (p_eps + 2 dl) * max|v|.
    """
    sm_scale = case.layout.head_dim**-0.5
    k_max = _largest(case, 0)
    v_max = _largest(case, 1)
    dl = q_eps * sm_scale * q.double().abs().sum(-1) * k_max  # [batch, heads]
    dl = dl + 2e-6 * (1 + lse.nan_to_num(neginf=0.0).abs())
    return (p_eps + 2 * dl).unsqueeze(-1) * v_max, dl


def _largest(case, side: int) -> float:
    meta = (case.packed.k_meta, case.packed.v_meta)[side].double().nan_to_num()
    rings = (case.window.ring_k, case.window.ring_v)[side].double().nan_to_num()
    packed = (meta[..., 1].abs() + 3 * meta[..., 0].abs()).max()
    return float(torch.maximum(packed, rings.abs().max() if rings.numel() else packed))


def check(case, group: int, dtype=torch.float32, p_eps=2**-11, q_eps=2**-20, **options):
    q = queries(case, group, dtype)
    sm_scale = case.layout.head_dim**-0.5
    want, want_lse = reference.decode(
        q.double(), case.packed, case.window, case.plan, sm_scale, torch.float64
    )
    got, got_lse = kernel.decode(q, case.packed, case.window, case.plan, sm_scale, **options)
    assert got.dtype == dtype and got_lse.dtype == torch.float32
    bound, lse_bound = tolerance(case, q, want, want_lse, p_eps, q_eps)
    empty = case.plan.kv_lens == 0
    assert (got[empty] == 0).all() and (got_lse[empty] == float("-inf")).all()
    error = (got.double() - want)[~empty].abs()
    assert (error <= bound[~empty]).all(), float((error / bound[~empty]).max())
    assert ((got_lse.double() - want_lse)[~empty].abs() <= lse_bound[~empty]).all()
    return got, got_lse


@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_group_ratios(group, make_case):
    check(make_case([70, 1, 0, 257], head_dim=128), group)


@pytest.mark.parametrize(
    ("head_dim", "group_size"),
    [(64, 64), (64, 32), (128, 32), (128, 64), (256, 128), (256, 32)],
)
def test_shapes(head_dim, group_size, make_case):
    check(make_case([150, 33], head_dim=head_dim, group_size=group_size), 2)


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("kv_lens", [[1], [63, 64, 65], [40, 8, 9, 330]])
def test_pages_and_lengths(page_size, kv_lens, make_case):
    check(make_case(kv_lens, page_size=page_size), 4)


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (8, 0), (0, 32), (5, 7), (64, 256)])
@pytest.mark.parametrize("missing", [False, True])
def test_windows(sinks, recent, missing, make_case):
    lens = [400, 3, 70, 33]
    case = make_case(lens, sinks=sinks, recent=recent, missing_sinks=missing, hit=True)
    check(case, 2)


def workspace(case, q, num_splits: int, window_splits: int) -> kernel.DecodeWorkspace:
    rows = q.shape[0] * q.shape[1] * (num_splits + window_splits)
    return kernel.DecodeWorkspace(
        torch.full((rows * q.shape[2],), float("nan"), device=q.device),
        torch.full((rows,), float("nan"), device=q.device),
        torch.zeros(rows, dtype=torch.int32, device=q.device),
        num_splits,
        window_splits,
        128,
    )


def test_split_count_changes_nothing(make_case):
    case = make_case([700, 90, 0], sinks=8, recent=64)
    q = queries(case, 4)
    results = [
        check(case, 4, workspace=workspace(case, q, *splits))
        for splits in ((1, 1), (3, 2), (6, 8), (40, 1))
    ]
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0], atol=2e-3, rtol=0)
        torch.testing.assert_close(lse, results[0][1], atol=1e-4, rtol=0)


def test_page_order_and_neighbours_change_nothing(make_case):
    """Moving pages, and dropping the other requests, gives the same bits."""
    case = make_case([200, 90], page_size=4)
    q = queries(case, 4)
    got = kernel.decode(q, case.packed, case.window, case.plan, 0.1)
    num_pages = case.packed.k_codes.shape[0]
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).to(q.device)
    moved = PackedKV(*(getattr(case.packed, f.name)[order] for f in dataclasses.fields(PackedKV)))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(num_pages, device=q.device)
    table = case.plan.page_table.clone()
    inside = (table >= 0) & (table < num_pages)
    table[inside] = inverse[table[inside].long()].int()
    again = kernel.decode(
        q, moved, case.window, dataclasses.replace(case.plan, page_table=table), 0.1
    )
    assert torch.equal(got[0], again[0]) and torch.equal(got[1], again[1])
    alone = ReadPlan(*(getattr(case.plan, f.name)[1:] for f in dataclasses.fields(ReadPlan)))
    shared = kernel.DecodeWorkspace.allocate(2, 8, 2, 128, 203, 40, q.device)
    both = kernel.decode(q, case.packed, case.window, case.plan, 0.1, workspace=shared)
    single = kernel.decode(q[1:], case.packed, case.window, alone, 0.1, workspace=shared)
    assert torch.equal(both[0][1:], single[0]) and torch.equal(both[1][1:], single[1])


def test_padded_rows_and_page_zero(make_case):
    """Graph padding: kv_len 1 in slot 0, or kv_len 0, any ring row, beside a real request."""
    case = make_case([130, 1, 0], page_size=1, recent=16)
    plan = case.plan
    plan.page_table[1, 0] = 0
    plan.ring_row[1:] = 0
    case.packed.k_meta[0] = 1.0
    case.packed.v_meta[0] = 1.0
    before = [getattr(case.packed, f.name).clone() for f in dataclasses.fields(PackedKV)]
    case.window.ring_k[0] = 0.5
    case.window.ring_v[0] = 0.25
    check(case, 4)
    for tensor, f in zip(before, dataclasses.fields(PackedKV), strict=True):
        assert torch.equal(tensor.nan_to_num(), getattr(case.packed, f.name).nan_to_num())


def test_extreme_numbers(make_case):
    """Scales from fp16's smallest to its largest, and queries of very different size."""
    case = make_case([300, 40], sinks=0, recent=0)
    case.packed.v_meta[..., 0] *= torch.logspace(
        -6, 4, case.packed.v_meta.shape[2], device=case.packed.v_meta.device
    ).half()[None, None, :, None]
    case.packed.v_meta[2, :, :4, :, 0] = 0.0
    q = queries(case, 4, scale=1e-3)
    q[0] *= 2.0**13
    q[1, 0] = 0.0
    q[1, 1] *= 1e-30
    want, want_lse = reference.decode(
        q.double(), case.packed, case.window, case.plan, 0.1, torch.float64
    )
    got, got_lse = kernel.decode(q, case.packed, case.window, case.plan, 0.1)
    bound, lse_bound = tolerance(case, q, want, want_lse, 2**-10, 2**-18)
    assert ((got.double() - want).abs() <= bound).all()
    assert ((got_lse.double() - want_lse).abs() <= lse_bound).all()


def test_wrong_scale_is_noticed(make_case):
    case = make_case([200], sinks=0, recent=0)
    case.packed.k_meta[..., 0] *= 1.05
    right = check(case, 2)
    case.packed.k_meta[..., 0] /= 1.05
    q = queries(case, 2)
    other = kernel.decode(q, case.packed, case.window, case.plan, 128**-0.5)
    assert (right[0] - other[0]).abs().max() > 1e-2


def test_errors(make_case):
    case = make_case([20])
    q = queries(case, 2)
    with pytest.raises(ValueError, match="query heads per KV head"):
        kernel.decode(q[:, :3], case.packed, case.window, case.plan, 1.0)
    with pytest.raises(ValueError, match="head_dim"):
        kernel.decode(q[..., :64], case.packed, case.window, case.plan, 1.0)
    long = dataclasses.replace(case.plan, kv_lens=case.plan.kv_lens.long())
    with pytest.raises(ValueError, match="kv_lens"):
        kernel.decode(q, case.packed, case.window, long, 1.0)
    with pytest.raises(ValueError, match="workspace"):
        kernel.decode(
            q, case.packed, case.window, case.plan, 1.0, workspace=workspace(case, q[:, :1], 1, 1)
        )


GPU_CASES = {
    "qwen3-8b 4k": dict(kv_lens=[4096] * 2, num_kv_heads=8, page_size=64, group=4),
    "ragged page 1": dict(kv_lens=[1, 17, 5000, 333, 64, 0], num_kv_heads=2, page_size=1, group=7),
    "one KV head": dict(kv_lens=[9000, 2], num_kv_heads=1, page_size=16, group=16),
    "d64": dict(kv_lens=[3000, 129], num_kv_heads=3, page_size=32, group=3, head_dim=64),
    "d256": dict(kv_lens=[3000, 129], num_kv_heads=2, page_size=64, group=8, head_dim=256),
    "g32": dict(kv_lens=[3000, 129], num_kv_heads=2, page_size=64, group=1, group_size=32),
    "256k": dict(kv_lens=[262144], num_kv_heads=1, page_size=64, group=4),
    "batch 256": dict(kv_lens=[1, 2, 300, 65] * 64, num_kv_heads=2, page_size=16, group=2),
}


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
@pytest.mark.parametrize("missing", [False, True])
def test_bf16_on_gpu(name, missing, make_case):
    options = dict(GPU_CASES[name])
    group = options.pop("group")
    head_dim = options.get("head_dim", 128)
    options.setdefault("group_size", min(head_dim, 128))
    case = make_case(
        sinks=64, recent=256, dtype=torch.bfloat16, missing_sinks=missing, hit=True, **options
    )
    # p and the output are rounded to bf16; window operands are bf16 numbers already, so q.k is
    # exact up to fp32 sums, except for first positions that are dequantized to bf16.
    check(case, group, torch.bfloat16, p_eps=2**-7, q_eps=2**-9 if missing else 2**-20)


@gpu
@pytest.mark.gpu
def test_cuda_graph_replay(make_case):
    """Captured once, replayed after lengths, pages and queries changed in place."""
    case = make_case([900, 500, 77], num_kv_heads=2, page_size=16, dtype=torch.bfloat16)
    other = make_case([300, 901, 0], num_kv_heads=2, page_size=16, dtype=torch.bfloat16, seed=5)
    q = queries(case, 4, torch.bfloat16)
    width = max(case.plan.page_table.shape[1], other.plan.page_table.shape[1])
    plan = dataclasses.replace(
        case.plan, page_table=torch.full((3, width), 2**31 - 1, dtype=torch.int32, device=q.device)
    )
    plan.page_table[:, : case.plan.page_table.shape[1]] = case.plan.page_table
    space = kernel.DecodeWorkspace.allocate(3, 8, 2, 128, width * 16, 40, q.device)
    out, lse = torch.empty_like(q), torch.empty(3, 8, device=q.device)

    def step():
        kernel.decode(q, case.packed, case.window, plan, 0.1, workspace=space, out=out, lse=lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    plan.page_table.fill_(2**31 - 1)
    plan.page_table[:, : other.plan.page_table.shape[1]] = other.plan.page_table
    for name in ("kv_lens", "ring_row", "ring_begin", "sink_group"):
        getattr(plan, name).copy_(getattr(other.plan, name))
    for name in ("k_codes", "k_meta", "v_codes", "v_meta"):
        source = getattr(other.packed, name)
        getattr(case.packed, name)[: source.shape[0]].copy_(source[: case.packed.k_codes.shape[0]])
    for name in ("ring_k", "ring_v", "sink_k", "sink_v"):
        getattr(case.window, name).copy_(getattr(other.window, name))
    q.mul_(-1.5)
    graph.replay()
    eager = kernel.decode(q, case.packed, case.window, plan, 0.1, workspace=space)
    assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])


@pytest.mark.parametrize("batch", [1, 8, 32, 64, 256])
@pytest.mark.parametrize("max_kv_len", [1, 1000, 4096, 131072])
def test_split_choice(batch, max_kv_len):
    """Enough CTAs to fill the GPU where there is work for them, and few where pairs suffice."""
    pairs, slots = 8 * batch, 528
    splits, min_tokens = kernel.choose_splits(pairs, slots, max_kv_len)
    assert 1 <= splits <= kernel.MAX_SPLITS
    assert splits == 1 or (splits - 1) * min_tokens < max_kv_len
    if max_kv_len == 131072:
        assert pairs * splits >= slots and max_kv_len / splits <= 16384
    assert 1 <= kernel.choose_window_splits(pairs, slots, 320) <= 5


def test_workspace_is_shared_when_large_enough():
    large = kernel.DecodeWorkspace.allocate(16, 8, 2, 64, 4096, 320, "cpu")
    small = kernel.DecodeWorkspace.allocate(2, 8, 2, 64, 256, 320, "cpu", reuse=large)
    assert small.o_parts is large.o_parts and small.counters is large.counters
    assert (small.num_splits, large.num_splits) == (1, 16)
    other = kernel.DecodeWorkspace.allocate(64, 8, 2, 64, 4096, 320, "cpu", reuse=small)
    assert other.o_parts is not large.o_parts
