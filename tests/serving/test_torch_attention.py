"""The fast torch operations against sglang_kvquant.reference, over plans of real traffic."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_kvquant.config import Clip, QuantizerConfig, WindowConfig
from sglang_kvquant.layout import (
    GQALayout,
    PackedKV,
    WindowKV,
    pack_codes,
    unpack_columns,
)
from sglang_kvquant.reference import attention as reference
from sglang_kvquant.reference import write as reference_write
from sglang_kvquant.reference.write import LayerTransform
from sglang_kvquant.serving.torch_attention import TorchOps
from sglang_kvquant.serving.windows import StepPlan, WindowTables

NUM_SLOTS, NUM_ROWS, CONTEXT = 1024, 5, 256


FP32_SUMS = 5e-6
"""fp32 sums of a few hundred terms in another order, relative to the largest output."""

FP16_QUERIES = 2e-3
"""The kernels multiply codes with queries that were rounded to 16 bits."""


class Cache:
    """One layer's buffers, twice: one set written by the operations, one by the reference."""

    def __init__(self, layout: GQALayout, windows: WindowConfig) -> None:
        self.layout, self.windows = layout, windows
        self.tables = WindowTables(windows, NUM_ROWS, NUM_SLOTS, 8, layout.page_size, "cpu")
        self.req_to_token = torch.randint(0, NUM_SLOTS, (NUM_ROWS, CONTEXT), dtype=torch.int32)
        self.sets = [self.allocate(), self.allocate()]
        self.next_page = 1

    def allocate(self) -> tuple[PackedKV, WindowKV]:
        ring = self.layout.window_shape(NUM_ROWS, self.windows.recent_tokens)
        sink = self.layout.window_shape(8, self.windows.sink_tokens)
        packed = PackedKV.allocate(self.layout, NUM_SLOTS // self.layout.page_size, "cpu")
        return packed, WindowKV(*(torch.zeros(s) for s in (ring, ring, sink, sink)))

    def give_slots(self, row: int, begin: int, end: int) -> torch.Tensor:
        page_size = self.layout.page_size
        for position in range(begin, end):
            if position % page_size == 0:
                self.req_to_token[row, position] = self.next_page * page_size
                self.next_page += 1
            else:
                self.req_to_token[row, position] = self.req_to_token[row, position - 1] + 1
        return self.req_to_token[row, begin:end]

    def plan(
        self, rows: list[int], counts: list[int], lengths: dict[int, int], decode: bool
    ) -> StepPlan:
        before, locs = [lengths[row] for row in rows], []
        for row, count in zip(rows, counts, strict=True):
            locs.append(self.give_slots(row, lengths[row], lengths[row] + count))
            lengths[row] += count
        loc, row_tensor = torch.cat(locs).long(), torch.tensor(rows)
        if decode:
            lens = torch.tensor([lengths[row] for row in rows])
            return self.tables.plan_decode(
                row_tensor, lens, loc, self.req_to_token, int(lens.max())
            )
        return self.tables.plan_extend(
            row_tensor,
            torch.tensor(before),
            torch.tensor(counts),
            loc,
            self.req_to_token,
            before,
            counts,
        )


CASES = [
    (GQALayout(2, 64, 64, 1), 3, WindowConfig(8, 16)),
    (GQALayout(3, 64, 32, 4), 1, WindowConfig(8, 16)),
    (GQALayout(2, 128, 64, 16), 4, WindowConfig(16, 8)),
    (GQALayout(1, 256, 128, 1), 2, WindowConfig(0, 8)),
    (GQALayout(2, 64, 64, 1), 2, WindowConfig(8, 0)),
    (GQALayout(2, 64, 64, 4), 2, WindowConfig(0, 0)),
]


def random_transform(layout: GQALayout, rotated: bool = True) -> LayerTransform:
    quantizer = QuantizerConfig(layout.group_size, Clip("percentile", 0.96), Clip("maxscale", 0.9))
    if not rotated:
        return LayerTransform.build(None, None, None, quantizer)
    shape = (layout.num_kv_heads, layout.head_dim, layout.head_dim)
    k_rotation, v_rotation = (torch.linalg.qr(torch.randn(shape))[0] for _ in range(2))
    return LayerTransform.build(k_rotation, torch.randn(shape[:2]), v_rotation, quantizer)


def run_traffic(
    ops, layout, group, windows, transform, num_steps, tolerance, dtype=torch.float32
) -> None:
    """Random extend and decode steps; buffers must equal the reference's, outputs nearly."""
    cache = Cache(layout, windows)
    (packed, window), (ref_packed, ref_window) = cache.sets
    lengths = {row: 0 for row in range(1, NUM_ROWS)}
    sm_scale = layout.head_dim**-0.5
    cache.tables.note_new_rows(list(lengths))
    for step in range(num_steps):
        rows = random.sample(sorted(lengths), random.randrange(1, NUM_ROWS))
        decode = step % 2 == 1 and all(lengths[row] for row in rows)
        counts = [1 if decode else random.randrange(1, 12) for _ in rows]
        plan = cache.plan(rows, counts, lengths, decode)
        num_tokens = sum(counts)
        q = torch.randn(num_tokens, layout.num_kv_heads * group, layout.head_dim, dtype=dtype)
        k, v = torch.randn(2, num_tokens, layout.num_kv_heads, layout.head_dim, dtype=dtype)
        q_rot = ops.rotate_query(q, transform)
        rotated = ops.write_kv(packed, window, k, v, transform, plan.write, with_ring=decode)
        ref_k, ref_v = reference_write.write_kv(
            ref_packed,
            ref_window,
            k,
            v,
            transform,
            plan.write.out_cache_loc,
            plan.write.ring_index if decode else None,
            plan.write.sink_index,
        )
        cached = (ref_packed, ref_window, plan.read, sm_scale, torch.float64)
        if decode:
            ours = ops.decode(q_rot, packed, window, plan, sm_scale)
            expected, _ = reference.decode(q_rot.double(), *cached)
        else:
            k_rot, v_rot = rotated
            assert torch.equal(k_rot, ref_k) and torch.equal(v_rot, ref_v)
            ours = ops.extend(q_rot, k_rot, v_rot, packed, window, plan, sm_scale)
            expected, _ = reference.extend(q_rot, ref_k, ref_v, plan.extend.qo_indptr, *cached)
            ops.write_ring(window, k_rot, v_rot, plan.write)
            reference_write.write_window(
                ref_window.ring_k, ref_window.ring_v, ref_k, ref_v, plan.write.ring_index
            )
        ops.finish_step()
        largest = max(1.0, float(expected.abs().max()))
        assert float((ours - expected).abs().max()) < tolerance * largest
        for mine, theirs in ((packed, ref_packed), (window, ref_window)):
            for name in mine.__slots__:
                first = 1 if name.startswith("ring") else 0  # row 0 is the dummy row
                assert torch.equal(getattr(mine, name)[first:], getattr(theirs, name)[first:]), (
                    name
                )


@pytest.mark.parametrize(("layout", "group", "windows"), CASES)
@pytest.mark.parametrize("rotated", [True, False])
@torch.inference_mode()
def test_traffic_equals_the_reference(layout, group, windows, rotated):
    run_traffic(
        TorchOps(), layout, group, windows, random_transform(layout, rotated), 30, FP32_SUMS
    )


class PlannedCausal:
    """Stands for another project's kernel: refuses tensors that do not fit its plan."""

    name = "a test's kernel"

    num_calls = num_pieces = 0

    def plan(self, chunks) -> None:
        assert torch.equal(chunks.qo_indptr.cpu(), chunks.qo_indptr_cpu)
        assert chunks.max_extend_len == int(chunks.qo_indptr_cpu.diff().max())
        self.chunks = chunks

    def __call__(self, q, k, v):
        chunks = self.chunks
        self.num_calls += 1
        assert q.dtype == chunks.dtype
        assert q.shape[1:] == (chunks.num_q_heads, chunks.head_dim)
        assert k.shape == (q.shape[0], chunks.num_kv_heads, chunks.head_dim)
        out, lse = [], []
        for begin, end in zip(chunks.qo_indptr_cpu[:-1], chunks.qo_indptr_cpu[1:], strict=True):
            mask = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
            keys, values = (t[begin:end].transpose(0, 1).double() for t in (k, v))
            part = reference.attend(q[begin:end].double(), keys, values, chunks.sm_scale, mask)
            out.append(part[0].to(q.dtype))
            lse.append(part[1].float())
        return torch.cat(out), torch.cat(lse)

    def attend_piece(self, q, k, v, piece, sm_scale):
        self.num_pieces += 1
        out, lse = [], []
        for index in range(len(piece.kv_begin)):
            new = slice(*piece.qo_indptr[index : index + 2].tolist())
            cached = slice(*piece.kv_indptr[index : index + 2].tolist())
            keys, values = (t[cached].transpose(0, 1).double() for t in (k, v))
            part = reference.attend(q[new].double(), keys, values, sm_scale)
            out.append(part[0].to(q.dtype))
            lse.append(part[1].float())
        return torch.cat(out), torch.cat(lse)


@pytest.mark.parametrize(("layout", "group", "windows"), CASES[:2] + CASES[4:5])
@pytest.mark.parametrize("causal", [None, PlannedCausal()])
@torch.inference_mode()
def test_kernels_take_the_same_steps(layout, group, windows, causal):
    """The wiring of the kernels, interpreted; without rotations no product is rounded."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled on this machine; tests/kernels runs them")
    kernel_ops = pytest.importorskip("sglang_kvquant.serving.kernel_ops")
    ops = kernel_ops.KernelOps(CONTEXT, causal)
    transform = random_transform(layout, rotated=False)
    if causal is None:
        run_traffic(ops, layout, group, windows, transform, 6, FP16_QUERIES)
        return
    calls = causal.num_calls
    run_traffic(ops, layout, group, windows, transform, 6, FP16_QUERIES, torch.float16)
    assert causal.num_calls > calls and causal.num_pieces == 0


@pytest.mark.parametrize(("least", "unpacks"), [(1, True), (1000, False)])
@torch.inference_mode()
def test_kernels_unpack_a_prefix_that_many_tokens_read(least, unpacks, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled on this machine; tests/kernels runs them")
    kernel_ops = pytest.importorskip("sglang_kvquant.serving.kernel_ops")
    long_prefix = pytest.importorskip("sglang_kvquant.kernels.long_prefix")
    monkeypatch.setattr(long_prefix, "MIN_NEW_TOKENS", least)
    monkeypatch.setattr(kernel_ops, "PIECE_TOKENS", 16)
    kernel = PlannedCausal()
    ops = kernel_ops.KernelOps(CONTEXT, kernel, kernel)
    layout, group, windows = CASES[0]
    transform = random_transform(layout, rotated=False)
    run_traffic(ops, layout, group, windows, transform, 8, FP16_QUERIES, torch.float16)
    assert (kernel.num_pieces > 0) == unpacks


def test_ring_write_needs_the_write_of_its_step():
    layout, windows = GQALayout(2, 64, 64, 1), WindowConfig(8, 16)
    cache, transform, ops = Cache(layout, windows), random_transform(layout), TorchOps()
    packed, window = cache.sets[0]
    k, v = torch.randn(2, 3, 2, 64).unbind()
    plans = []
    for row in (1, 2):
        cache.tables.note_new_rows([row])
        plans.append(
            cache.tables.plan_extend(
                torch.tensor([row]),
                torch.tensor([0]),
                torch.tensor([3]),
                cache.give_slots(row, 0, 3),
                cache.req_to_token,
                [0],
                [3],
            )
        )
    k_rot, v_rot = ops.write_kv(packed, window, k, v, transform, plans[0].write, with_ring=False)
    with pytest.raises(RuntimeError, match="same step"):
        ops.write_ring(window, k_rot, v_rot, plans[1].write)


def test_codes_of_a_decode_step_are_made_before_the_next_step():
    layout, windows = GQALayout(2, 64, 64, 1), WindowConfig(8, 16)
    cache, transform, ops = Cache(layout, windows), random_transform(layout), TorchOps()
    packed, window = cache.sets[0]
    k, v = torch.randn(2, 1, 2, 64).unbind()
    lengths = {1: 0}
    cache.tables.note_new_rows([1])
    first = cache.plan([1], [1], lengths, decode=False)
    ops.write_kv(packed, window, k, v, transform, first.write, with_ring=False)
    second = cache.plan([1], [1], lengths, decode=True)
    ops.write_kv(packed, window, k, v, transform, second.write, with_ring=True)
    third = cache.plan([1], [1], lengths, decode=True)
    with pytest.raises(RuntimeError, match="before the last one was finished"):
        ops.write_kv(packed, window, k, v, transform, third.write, with_ring=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_columns_are_the_codes_of_the_layout(head_dim):
    codes = torch.randint(0, 4, (3, 11, head_dim), dtype=torch.uint8)
    columns = unpack_columns(pack_codes(codes))
    assert torch.equal(columns, codes.transpose(1, 2).short())
