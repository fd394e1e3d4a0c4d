"""Reference decode and extend against a dense fp64 computation that knows nothing of pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from sglang_kvquant.config import Clip, QuantizerConfig
from sglang_kvquant.layout import GQALayout, PackedKV, ReadPlan, WindowKV
from sglang_kvquant.quantizer import dequantize, quantize
from sglang_kvquant.reference.attention import attend, decode, extend, gather_kv
from sglang_kvquant.reference.write import LayerTransform, write_kv, write_window
from sglang_kvquant.rotation import skew_exp

HOSTILE = (2**31 - 1, -(2**31))


@dataclass(frozen=True)
class Shape:
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    group_size: int = 64
    page_size: int = 16
    sinks: int = 4
    recent: int = 16


@dataclass
class Cache:
    """A cache written through write_kv, and per request what its tokens must read as."""

    packed: PackedKV
    window: WindowKV
    plan: ReadPlan
    keys: list[torch.Tensor]  # fp64 [kv_len, num_kv_heads, head_dim], rotated
    values: list[torch.Tensor]


def random_transform(shape: Shape) -> LayerTransform:
    rotations = [
        skew_exp(torch.randn(shape.num_kv_heads, shape.head_dim, shape.head_dim).double()).float()
        for _ in range(2)
    ]
    mean = torch.randn(shape.num_kv_heads, shape.head_dim)
    config = QuantizerConfig(shape.group_size, Clip("percentile", 0.96), Clip("maxscale", 0.9))
    return LayerTransform.build(rotations[0], mean, rotations[1], config)


def empty_cache(shape: Shape, kv_lens: list[int], dtype: torch.dtype):
    """Buffers full of NaN scales, random codes and NaN window rows; a random page table."""
    layout = GQALayout(shape.num_kv_heads, shape.head_dim, shape.group_size, shape.page_size)
    counts = [-(-n // shape.page_size) for n in kv_lens]
    num_pages = sum(counts) + 4
    packed = PackedKV.allocate(layout, num_pages, "cpu")
    for codes, meta in ((packed.k_codes, packed.k_meta), (packed.v_codes, packed.v_meta)):
        codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8))
        meta.fill_(float("nan"))
    batch = len(kv_lens)
    rings = [layout.window_shape(batch + 1, shape.recent)] * 2
    sinks = [layout.window_shape(batch + 1, shape.sinks)] * 2
    window = WindowKV(*(torch.full(s, float("nan"), dtype=dtype) for s in rings + sinks))
    table = torch.empty(batch, max(counts) + 2, dtype=torch.int32)
    table[:, ::2], table[:, 1::2] = HOSTILE
    pages = (1 + torch.randperm(num_pages - 1)).tolist()
    for request, count in enumerate(counts):
        table[request, :count] = torch.tensor([pages.pop() for _ in range(count)])
    return packed, window, table


def build(
    shape: Shape,
    kv_lens: list[int],
    missing_sinks: bool = False,
    short_ring: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Cache:
    """Write random tokens of several requests.

    Args:
        missing_sinks: some positions, and all of the first request, have no BF16 copy.
        short_ring: tokens by which the ring holds less than it could, as after a prefix hit.
        dtype: of the windows.
    """
    packed, window, table = empty_cache(shape, kv_lens, dtype)
    transform = random_transform(shape)
    batch = len(kv_lens)
    rows, groups = torch.randperm(batch) + 1, torch.randperm(batch)
    ring_begin = torch.tensor([min(max(n - shape.recent, 0) + short_ring, n) for n in kv_lens])
    sink_group = groups[:, None].repeat(1, shape.sinks)
    if missing_sinks:
        sink_group[0], sink_group[:, 1::3] = -1, -1
    keys, values = [], []
    for request, kv_len in enumerate(kv_lens):
        k, v = (torch.randn(kv_len, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        position = torch.arange(kv_len)
        page = table[request, position // shape.page_size].long()
        slots = page * shape.page_size + position % shape.page_size
        in_ring = position >= ring_begin[request]
        columns = position % max(shape.recent, 1)
        ring_index = (rows[request] * shape.recent + columns).where(in_ring, torch.tensor(-1))
        in_sink = torch.zeros(kv_len, dtype=torch.bool)
        count = min(kv_len, shape.sinks)
        in_sink[:count] = sink_group[request, :count] >= 0
        sink_index = (groups[request] * shape.sinks + position).where(in_sink, torch.tensor(-1))
        k_rot, v_rot = write_kv(packed, window, k, v, transform, slots, ring_index, sink_index)
        exact = in_sink | (in_ring if shape.recent else torch.zeros_like(in_ring))
        config = transform.quantizer
        keys.append(stored(k_rot, config.k_clip, config.group_size, exact, dtype))
        values.append(stored(v_rot, config.v_clip, config.group_size, exact, dtype))
    plan = ReadPlan(
        table, torch.tensor(kv_lens).int(), rows.int(), ring_begin.int(), sink_group.int()
    )
    return Cache(packed, window, plan, keys, values)


def stored(rows, clip, group_size, exact, dtype) -> torch.Tensor:
    """What rows read back as: in `dtype` where `exact`, else through the quantizer; fp64."""
    coarse = dequantize(quantize(rows, clip, group_size), group_size, torch.float64)
    return rows.to(dtype).double().where(exact[:, None, None], coarse)


def dense(q, k, v, sm_scale, allowed=None):
    """Softmax attention, one head and one query at a time; rows are [tokens, heads, head_dim]."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    for query in range(len(q)):
        count = len(k) if allowed is None else allowed[query]
        for head in range(q.shape[1]):
            if count:
                logits = k[:count, head // group] @ q[query, head].double() * sm_scale
                out[query, head] = logits.softmax(0) @ v[:count, head // group]
                lse[query, head] = logits.exp().sum().log()
    return out, lse


LENGTHS = [1, 3, 17, 64, 65, 130]
CASES = {
    "defaults": Shape(),
    "no windows": Shape(sinks=0, recent=0),
    "sinks only": Shape(sinks=4, recent=0),
    "ring only": Shape(sinks=0, recent=16),
    "default windows": Shape(sinks=64, recent=256),
    "token pages": Shape(page_size=1),
    "large pages": Shape(page_size=64),
    "one kv head": Shape(num_q_heads=8, num_kv_heads=1),
    "mha": Shape(num_q_heads=2, num_kv_heads=2),
    "head_dim 128, group 32": Shape(head_dim=128, group_size=32),
    "head_dim 256": Shape(head_dim=256, group_size=128, page_size=1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("missing_sinks", [False, True])
def test_decode_equals_the_dense_computation(name, missing_sinks):
    shape = CASES[name]
    cache = build(shape, LENGTHS, missing_sinks)
    q = torch.randn(len(LENGTHS), shape.num_q_heads, shape.head_dim)
    sm_scale = shape.head_dim**-0.5
    out, lse = decode(q, cache.packed, cache.window, cache.plan, sm_scale, torch.float64)
    fast, _ = decode(q, cache.packed, cache.window, cache.plan, sm_scale)
    assert fast.dtype == torch.float32
    for b in range(len(LENGTHS)):
        expected = dense(q[b : b + 1], cache.keys[b], cache.values[b], sm_scale)
        torch.testing.assert_close(out[b : b + 1], expected[0], atol=1e-10, rtol=0)
        torch.testing.assert_close(lse[b : b + 1], expected[1], atol=1e-10, rtol=0)
        torch.testing.assert_close(fast[b : b + 1].double(), expected[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("short_ring", [0, 5])
def test_extend_equals_the_dense_computation(name, short_ring):
    shape = CASES[name]
    prefixes, new = [1, 17, 64, 130], [3, 0, 9, 1]
    cache = build(shape, prefixes, missing_sinks=True, short_ring=short_ring)
    indptr = torch.tensor([0, *new]).cumsum(0).int()
    q = torch.randn(sum(new), shape.num_q_heads, shape.head_dim)
    k, v = (torch.randn(sum(new), shape.num_kv_heads, shape.head_dim) for _ in range(2))
    sm_scale = shape.head_dim**-0.5
    out, lse = extend(
        q, k, v, indptr, cache.packed, cache.window, cache.plan, sm_scale, torch.float64
    )
    for b, (begin, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        keys = torch.cat([cache.keys[b], k[begin:end].double()])
        values = torch.cat([cache.values[b], v[begin:end].double()])
        allowed = [prefixes[b] + i + 1 for i in range(end - begin)]
        expected = dense(q[begin:end], keys, values, sm_scale, allowed)
        torch.testing.assert_close(out[begin:end], expected[0], atol=1e-10, rtol=0)
        torch.testing.assert_close(lse[begin:end], expected[1], atol=1e-10, rtol=0)


def test_extend_without_a_prefix():
    shape = Shape()
    cache = build(shape, [5])
    plan = replace(cache.plan, kv_lens=torch.zeros(1).int(), ring_begin=torch.zeros(1).int())
    q = torch.randn(7, shape.num_q_heads, shape.head_dim)
    k, v = (torch.randn(7, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    indptr = torch.tensor([0, 7]).int()
    out, lse = extend(q, k, v, indptr, cache.packed, cache.window, plan, 0.125, torch.float64)
    expected = dense(q, k.double(), v.double(), 0.125, list(range(1, 8)))
    torch.testing.assert_close(out, expected[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(lse, expected[1], atol=1e-10, rtol=0)


def test_windows_change_the_result():
    """Otherwise the tests above could not tell a window from the packed cache."""
    shape = Shape()
    cache = build(shape, [130])
    q = torch.randn(1, shape.num_q_heads, shape.head_dim)
    out, _ = decode(q, cache.packed, cache.window, cache.plan, 0.125)
    no_ring = replace(cache.plan, ring_begin=cache.plan.kv_lens)
    no_sink = replace(cache.plan, sink_group=torch.full_like(cache.plan.sink_group, -1))
    for plan in (no_ring, no_sink):
        other, _ = decode(q, cache.packed, cache.window, plan, 0.125)
        assert float((other - out).abs().max()) > 1e-3


def test_sinks_win_over_the_ring():
    shape = Shape(sinks=4, recent=16)
    cache = build(shape, [10])
    row = int(cache.plan.ring_row[0])
    cache.window.ring_k[row, :, :4] = float("nan")
    k, _ = gather_kv(cache.packed, cache.window, cache.plan, 0, torch.float64)
    assert bool(k.isfinite().all())


def test_unused_slots_really_are_poisoned():
    """A position beyond the length would be seen in the output."""
    cache = build(Shape(sinks=0, recent=0), [20])
    longer = replace(cache.plan, kv_lens=cache.plan.kv_lens + 1, ring_begin=cache.plan.kv_lens + 1)
    q = torch.randn(1, 4, 64)
    out, _ = decode(q, cache.packed, cache.window, longer, 0.125)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("prefix_len", [1, 6, 40])
def test_extend_equals_decode_token_by_token_inside_the_windows(prefix_len):
    """With every token in an unrounded window, a chunk and single steps see the same numbers."""
    shape = Shape(sinks=8, recent=64)
    num_new = 12
    cache = build(shape, [prefix_len], dtype=torch.float32)
    row, recent = int(cache.plan.ring_row[0]), shape.recent
    q = torch.randn(num_new, shape.num_q_heads, shape.head_dim)
    k, v = (torch.randn(num_new, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    indptr = torch.tensor([0, num_new]).int()
    at_once, lse_at_once = extend(
        q, k, v, indptr, cache.packed, cache.window, cache.plan, 0.125, torch.float64
    )
    sink_group = cache.plan.sink_group.clone()
    sink_group[:, prefix_len:] = -1  # new tokens are in the ring only
    for i in range(num_new):
        position = prefix_len + i
        index = torch.tensor([row * recent + position % recent])
        one = slice(i, i + 1)
        write_window(cache.window.ring_k, cache.window.ring_v, k[one], v[one], index)
        table = torch.ones(1, position // shape.page_size + 1, dtype=torch.int32)
        plan = ReadPlan(
            table, torch.tensor([position + 1]).int(), cache.plan.ring_row,
            torch.zeros(1).int(), sink_group,
        )  # fmt: skip
        out, lse = decode(q[one], cache.packed, cache.window, plan, 0.125, torch.float64)
        torch.testing.assert_close(out, at_once[one], atol=1e-10, rtol=0)
        torch.testing.assert_close(lse, lse_at_once[one], atol=1e-10, rtol=0)


@pytest.mark.parametrize("split", [1, 7, 29])
def test_parts_merge_by_their_log_sum_exp(split):
    q = torch.randn(3, 4, 64, dtype=torch.float64)
    k, v = (torch.randn(2, 30, 64, dtype=torch.float64) for _ in range(2))
    out, lse = attend(q, k, v, 0.125)
    parts = [
        attend(q, k[:, part], v[:, part], 0.125) for part in (slice(0, split), slice(split, 30))
    ]
    merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(o * (s - merged_lse).exp().unsqueeze(-1) for o, s in parts)
    torch.testing.assert_close(merged, out, atol=1e-12, rtol=0)
    torch.testing.assert_close(merged_lse, lse, atol=1e-12, rtol=0)


def test_query_without_keys():
    out, lse = attend(torch.randn(2, 4, 64), torch.zeros(2, 0, 64), torch.zeros(2, 0, 64), 1.0)
    assert not out.any()
    assert bool((lse == float("-inf")).all())


def test_write_touches_its_slots_and_rows_only():
    shape = Shape(page_size=4)
    layout = GQALayout(shape.num_kv_heads, shape.head_dim, shape.group_size, shape.page_size)
    packed = PackedKV.allocate(layout, 6, "cpu")
    window = WindowKV(*(torch.zeros(layout.window_shape(3, n)) for n in (16, 16, 4, 4)))
    k, v = (torch.randn(4, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    slots = torch.tensor([0, 0, 9, 22])  # two padded tokens on the dummy slot
    ring_index = torch.tensor([-1, -1, 2 * 16 + 3, -1])
    sink_index = torch.tensor([-1, -1, -1, 1 * 4 + 2])
    transform = random_transform(shape)
    k_rot, _ = write_kv(packed, window, k, v, transform, slots, ring_index, sink_index)
    touched = packed.k_meta.float().abs().sum(dim=(1, 3, 4)).flatten().nonzero().squeeze(-1)
    assert touched.tolist() == [0, 9, 22]
    assert window.ring_k.abs().sum(dim=(1, 3)).nonzero().tolist() == [[2, 3]]
    assert window.sink_v.abs().sum(dim=(1, 3)).nonzero().tolist() == [[1, 2]]
    assert torch.equal(window.ring_k[2, :, 3], k_rot[2])


def test_windows_of_no_columns_are_not_written():
    empty = torch.zeros(3, 2, 0, 64)
    write_window(empty, empty, torch.ones(2, 2, 64), torch.ones(2, 2, 64), torch.tensor([0, 1]))
