"""Cases shared by the kernel tests: random caches whose unused parts are hostile."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from sglang_kvquant.layout import GQALayout, PackedKV, ReadPlan, WindowKV, pack_codes


@dataclass(frozen=True)
class AttentionCase:
    packed: PackedKV
    window: WindowKV
    plan: ReadPlan
    layout: GQALayout


def _random_packed(layout: GQALayout, num_pages: int, device: str, gen: torch.Generator):
    """Random codes, plausible metadata. Made on the CPU, so that a GPU sees the same."""
    sides = []
    for _ in range(2):
        codes = torch.randint(
            0,
            4,
            (num_pages, layout.num_kv_heads, layout.page_size, layout.head_dim),
            generator=gen,
            dtype=torch.uint8,
        )
        shape = layout.meta_shape(num_pages)
        scale = 0.2 + torch.rand(shape[:-1], generator=gen)
        zero = -1.5 * scale + 0.1 * torch.randn(shape[:-1], generator=gen)
        sides += [pack_codes(codes), torch.stack([scale, zero], dim=-1).half()]
    return PackedKV(*(side.to(device) for side in sides))


def _random_plan(layout, kv_lens, sinks, recent, num_pages, missing_sinks, gen, hit):
    """Distinct random pages per request, hostile numbers everywhere else."""
    batch = len(kv_lens)
    per_request = [-(-n // layout.page_size) for n in kv_lens]
    order = 1 + torch.randperm(num_pages - 1, generator=gen)[: sum(per_request)]
    table = torch.full((batch, max([*per_request, 1]) + 3), 2**31 - 1, dtype=torch.int32)
    table[:, -1] = -(2**31)
    begin = 0
    for request, count in enumerate(per_request):
        table[request, :count] = order[begin : begin + count].int()
        begin += count
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    ring_begin = (lens - recent).clamp(min=0)
    if hit:  # a ring that has fewer rows than it could: the rest is read from the packed cache
        ring_begin = torch.minimum(ring_begin + 3, lens)
    sink_group = torch.arange(batch, dtype=torch.int32)[:, None].repeat(1, sinks)
    if missing_sinks and sinks:
        sink_group[:, 1::3] = -1
        sink_group[0] = -1
    row = torch.randperm(batch, generator=gen).int() + 1
    return ReadPlan(table, lens, row, ring_begin, sink_group)


def _poison(packed: PackedKV, plan: ReadPlan) -> None:
    """NaN scales and zeros in every slot that the plan's cached positions do not use."""
    used = torch.zeros(packed.k_codes.shape[0], packed.page_size, dtype=torch.bool)
    for request, kv_len in enumerate(plan.kv_lens.tolist()):
        position = torch.arange(kv_len)
        page = plan.page_table[request, position // packed.page_size].long()
        used[page, position % packed.page_size] = True
    unused = (~used)[:, None, :, None, None].to(packed.k_meta.device)
    for meta in (packed.k_meta, packed.v_meta):
        meta.masked_fill_(unused, float("nan"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def make_case(device):
    """Build an AttentionCase; see the arguments."""

    def build(
        kv_lens: list[int],
        num_kv_heads: int = 2,
        head_dim: int = 128,
        group_size: int = 128,
        page_size: int = 16,
        sinks: int = 8,
        recent: int = 32,
        dtype: torch.dtype = torch.float32,
        missing_sinks: bool = False,
        hit: bool = False,
        seed: int = 0,
    ) -> AttentionCase:
        gen = torch.Generator().manual_seed(seed)
        layout = GQALayout(num_kv_heads, head_dim, group_size, page_size)
        num_pages = sum(-(-n // page_size) for n in kv_lens) + 5
        packed = _random_packed(layout, num_pages, "cpu", gen)
        plan = _random_plan(layout, kv_lens, sinks, recent, num_pages, missing_sinks, gen, hit)
        _poison(packed, plan)
        ring = layout.window_shape(len(kv_lens) + 1, recent)
        sink = layout.window_shape(len(kv_lens), sinks)
        buffers = [torch.randn(s, generator=gen).to(dtype) for s in (ring, ring, sink, sink)]
        for request, kv_len in enumerate(kv_lens):  # rows that no position maps to
            if kv_len < recent:
                for ring_buffer in buffers[:2]:
                    ring_buffer[plan.ring_row[request], :, kv_len:] = float("nan")
        window = WindowKV(*(b.to(device) for b in buffers))
        packed = PackedKV(
            *(getattr(packed, f.name).to(device) for f in dataclasses.fields(packed))
        )
        plan = ReadPlan(*(getattr(plan, f.name).to(device) for f in dataclasses.fields(plan)))
        return AttentionCase(packed, window, plan, layout)

    return build
