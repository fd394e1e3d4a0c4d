"""Attention and write step in torch, fast enough to serve from a CPU. Equal to reference/ up to
the rounding of fp32 sums.

Softmax attention over a set of keys does not depend on their order. So a request's keys are read
as a few pieces, each a view of a window or one gather from the packed cache, and the indices of
all pieces are worked out once per forward step, not per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layout import PackedKV, ReadPlan, WindowKV, pack_codes, unpack_codes
from ..quantizer import (
    Quantized,
    assign_codes,
    choose_qparams,
    clip_rows,
    dequantize,
)
from ..reference.write import LayerTransform, rotate_kv, write_window
from ..rotation import rotate_heads
from .windows import WritePlan


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive columns of one row of a window: `row` of the ring, or a sink group."""

    is_sink: bool
    row: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Where one request reads its keys: every cached position is in exactly one of them."""

    pieces: tuple[Piece, ...]
    page: torch.Tensor | None  # int64 [num_packed]; None when nothing is read from the packed cache
    offset: torch.Tensor | None  # int64 [num_packed]


def locate(plan: ReadPlan, request: int, page_size: int, recent_tokens: int) -> Sources:
    """Split the positions of one request by where they are read from, as ReadPlan defines it."""
    kv_len, ring_begin = int(plan.kv_lens[request]), int(plan.ring_begin[request])
    groups = plan.sink_group[request, :kv_len].long()  # [min(kv_len, sink_tokens)]
    position = torch.arange(kv_len, device=groups.device)
    in_sink = torch.zeros(kv_len, dtype=torch.bool, device=groups.device)
    in_sink[: len(groups)] = groups >= 0
    in_ring = ~in_sink & (position >= ring_begin)
    pieces = [
        Piece(True, group, begin, end)
        for group in groups[groups >= 0].unique().tolist()
        for begin, end in _runs((groups == group).nonzero().squeeze(-1))
    ]
    if bool(in_ring.any()):
        columns = (position[in_ring] % recent_tokens).sort().values
        row = int(plan.ring_row[request])
        pieces += [Piece(False, row, begin, end) for begin, end in _runs(columns)]
    packed = position[~in_sink & ~in_ring]
    if not len(packed):
        return Sources(tuple(pieces), None, None)
    page = plan.page_table[request, packed // page_size].long()
    return Sources(tuple(pieces), page, packed % page_size)


def _runs(index: torch.Tensor) -> list[tuple[int, int]]:
    """Maximal runs [begin, end) of consecutive integers in an ascending tensor."""
    breaks = (index.diff() != 1).nonzero().squeeze(-1) + 1
    bounds = [0, *breaks.tolist(), len(index)]
    return [
        (int(index[begin]), int(index[end - 1]) + 1)
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]


class TorchOps:
    """The three steps of serving in torch; see :class:`.ops.AttentionOps`."""

    name = "torch"
    supports_cuda_graph = False

    def __init__(self) -> None:
        self._plan: ReadPlan | None = None
        self._sources: list[Sources] = []

    def rotate_query(self, q: torch.Tensor, transform: LayerTransform) -> torch.Tensor:
        q = q.float()
        return q if transform.k_rotation is None else rotate_heads(q, transform.k_rotation)

    def write_kv(
        self,
        packed: PackedKV,
        window: WindowKV,
        k: torch.Tensor,
        v: torch.Tensor,
        transform: LayerTransform,
        write: WritePlan,
        with_ring: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_rot, v_rot = rotate_kv(k, v, transform)
        self._write_packed(packed, k_rot, v_rot, transform, write.out_cache_loc)
        if with_ring:
            write_window(window.ring_k, window.ring_v, k_rot, v_rot, write.ring_index)
        write_window(window.sink_k, window.sink_v, k_rot, v_rot, write.sink_index)
        return k_rot, v_rot

    def write_ring(
        self, window: WindowKV, k_rot: torch.Tensor, v_rot: torch.Tensor, ring_index: torch.Tensor
    ) -> None:
        write_window(window.ring_k, window.ring_v, k_rot, v_rot, ring_index)

    def _write_packed(
        self,
        packed: PackedKV,
        k_rot: torch.Tensor,
        v_rot: torch.Tensor,
        transform: LayerTransform,
        out_cache_loc: torch.Tensor,
    ) -> None:
        """Like reference.write.write_packed, keys and values in one pass."""
        quantizer = transform.quantizer
        group_size = quantizer.group_size
        rows = torch.stack(
            [
                clip_rows(k_rot, quantizer.k_clip, group_size),
                clip_rows(v_rot, quantizer.v_clip, group_size),
            ]
        )  # [2, num_tokens, num_kv_heads, head_dim]
        scale, zero = choose_qparams(rows, group_size)
        codes = pack_codes(assign_codes(rows, scale, zero, group_size))
        meta = torch.stack([scale, zero], dim=-1)
        page, offset = out_cache_loc // packed.page_size, out_cache_loc % packed.page_size
        packed.k_codes[page, :, offset], packed.v_codes[page, :, offset] = codes.unbind()
        packed.k_meta[page, :, offset], packed.v_meta[page, :, offset] = meta.unbind()

    def _locate_all(self, plan: ReadPlan, packed: PackedKV, window: WindowKV) -> list[Sources]:
        if plan is not self._plan:
            self._sources = [
                locate(plan, request, packed.page_size, window.recent_tokens)
                for request in range(plan.kv_lens.shape[0])
            ]
            self._plan = plan
        return self._sources

    def decode(
        self,
        q: torch.Tensor,
        packed: PackedKV,
        window: WindowKV,
        plan: ReadPlan,
        sm_scale: float,
    ) -> torch.Tensor:
        """As reference.attention.decode, without the log-sum-exp."""
        sources = self._locate_all(plan, packed, window)
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        for request, source in enumerate(sources):
            pairs = _read(source, packed, window)
            out[request] = _attend(q[request].unsqueeze(0), pairs, sm_scale, None)[0]
        return out

    def extend(
        self,
        q: torch.Tensor,
        k_rot: torch.Tensor,
        v_rot: torch.Tensor,
        qo_indptr: torch.Tensor,
        packed: PackedKV,
        window: WindowKV,
        plan: ReadPlan,
        sm_scale: float,
    ) -> torch.Tensor:
        """As reference.attention.extend, without the log-sum-exp."""
        sources = self._locate_all(plan, packed, window)
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        bounds = qo_indptr.tolist()
        for source, begin, end in zip(sources, bounds[:-1], bounds[1:], strict=True):
            if begin == end:
                continue
            new = (k_rot[begin:end].transpose(0, 1), v_rot[begin:end].transpose(0, 1))
            pairs = [*_read(source, packed, window), new]
            causal = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device)
            out[begin:end] = _attend(q[begin:end], pairs, sm_scale, causal.triu(1))
        return out


def _read(
    source: Sources, packed: PackedKV, window: WindowKV
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of a request by piece, each fp32 [num_kv_heads, length, head_dim]."""
    pairs = []
    for piece in source.pieces:
        k, v = (
            (window.sink_k, window.sink_v) if piece.is_sink else (window.ring_k, window.ring_v)
        )
        columns = slice(piece.begin, piece.end)
        pairs.append((k[piece.row, :, columns].float(), v[piece.row, :, columns].float()))
    if source.page is not None:
        where = (source.page, source.offset)
        pairs.append(
            (
                _dequantize(packed.k_codes, packed.k_meta, *where),
                _dequantize(packed.v_codes, packed.v_meta, *where),
            )
        )
    return pairs


def _dequantize(
    codes: torch.Tensor, meta: torch.Tensor, page: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    rows = unpack_codes(codes[page, :, offset])  # [length, num_kv_heads, head_dim]
    scale, zero = meta[page, :, offset].unbind(-1)  # [length, num_kv_heads, num_groups]
    group_size = rows.shape[-1] // scale.shape[-1]
    return dequantize(Quantized(rows, scale, zero), group_size).transpose(0, 1)


def _attend(
    q: torch.Tensor,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    sm_scale: float,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one request over all pieces.

    Args:
        q: fp32 [num_queries, num_q_heads, head_dim].
        pairs: keys and values, [num_kv_heads, length, head_dim] each.
        sm_scale: factor of the logits.
        hidden: bool [num_queries, length], keys of the last piece that a query must not see.

    Returns:
        fp32 [num_queries, num_q_heads, head_dim].
    """
    num_kv_heads, (num_queries, num_q_heads, head_dim) = pairs[0][0].shape[0], q.shape
    by_head = q.view(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1)
    by_head = by_head.reshape(num_kv_heads, -1, head_dim) * sm_scale  # [kv_heads, q * group, d]
    logits = [by_head @ k.transpose(1, 2) for k, _ in pairs]
    if hidden is not None and num_queries > 1:
        group = num_q_heads // num_kv_heads
        logits[-1].masked_fill_(hidden.repeat_interleave(group, dim=0), float("-inf"))
    weights = torch.cat(logits, dim=-1).softmax(-1).split([k.shape[1] for k, _ in pairs], dim=-1)
    out = sum(w @ v for w, (_, v) in zip(weights, pairs, strict=True))
    assert isinstance(out, torch.Tensor)
    out = out.view(num_kv_heads, num_queries, -1, head_dim).transpose(0, 1)
    return out.reshape(num_queries, num_q_heads, head_dim)
