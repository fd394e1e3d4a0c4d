"""Attention and write step in torch, fast enough to serve from a CPU. Equal to reference/ up to
the rounding of fp32 sums.

Softmax attention over a set of keys does not depend on their order. So a request's keys are read
as a few pieces, each a view of a window or one gather from the packed cache, and the indices of
all pieces are worked out once per forward step, not per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..config import QuantizerConfig
from ..layout import PackedKV, ReadPlan, WindowKV, pack_codes, unpack_columns
from ..quantizer import assign_codes, choose_qparams, clip_rows
from ..reference.write import LayerTransform, rotate_kv
from ..rotation import rotate_heads
from .windows import StepPlan, WritePlan


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
    # int64 [num_kv_heads * num_packed], rows of the packed buffers, head by head; None when
    # nothing is read from the packed cache.
    packed_rows: torch.Tensor | None


def locate(plan: ReadPlan, request: int, packed: PackedKV, recent_tokens: int) -> Sources:
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
    middle = position[~in_sink & ~in_ring]
    if not len(middle):
        return Sources(tuple(pieces), None)
    page = plan.page_table[request, middle // packed.page_size].long()
    num_kv_heads = packed.k_codes.shape[1]
    head = torch.arange(num_kv_heads, device=page.device).unsqueeze(1)  # [num_kv_heads, 1]
    rows = (page * num_kv_heads + head) * packed.page_size + middle % packed.page_size
    return Sources(tuple(pieces), rows.flatten())


def _runs(index: torch.Tensor) -> list[tuple[int, int]]:
    """Maximal runs [begin, end) of consecutive integers in an ascending tensor."""
    breaks = (index.diff() != 1).nonzero().squeeze(-1) + 1
    bounds = [0, *breaks.tolist(), len(index)]
    return [(int(index[begin]), int(index[end - 1]) + 1) for begin, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class WindowPlaces:
    """Tokens of a step that go to a window, with their row and column."""

    token: torch.Tensor | None  # int64 [num_kept]; None for all tokens
    row: torch.Tensor  # int64 [num_kept]
    column: torch.Tensor  # int64 [num_kept]

    @classmethod
    def of(cls, index: torch.Tensor, num_columns: int) -> WindowPlaces | None:
        """From an index of WritePlan; None when no token goes there."""
        num_tokens, token = len(index), (index >= 0).nonzero().squeeze(-1)
        if not len(token):
            return None
        index = index[token]
        kept = None if len(token) == num_tokens else token
        return cls(kept, index // num_columns, index % num_columns)

    def store(
        self,
        buffer_k: torch.Tensor,
        buffer_v: torch.Tensor,
        k_rot: torch.Tensor,
        v_rot: torch.Tensor,
    ) -> None:
        """As reference.write.write_window."""
        if self.token is not None:
            k_rot, v_rot = k_rot[self.token], v_rot[self.token]
        buffer_k[self.row, :, self.column] = k_rot.to(buffer_k.dtype)
        buffer_v[self.row, :, self.column] = v_rot.to(buffer_v.dtype)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the new tokens of a step go."""

    page: torch.Tensor  # int64 [num_tokens]
    offset: torch.Tensor  # int64 [num_tokens]
    ring: WindowPlaces | None
    sink: WindowPlaces | None


@dataclass(frozen=True, slots=True)
class LayerRows:
    """New rows of one layer that are still to be stored in its packed cache."""

    packed: PackedKV
    k_rot: torch.Tensor  # fp32 [num_tokens, num_kv_heads, head_dim]
    v_rot: torch.Tensor  # likewise


def _write_packed(layers: list[LayerRows], quantizer: QuantizerConfig, places: Places) -> None:
    """Like reference.write.write_packed, for keys and values of several layers in one pass."""
    group_size = quantizer.group_size
    k_rows = torch.stack([layer.k_rot for layer in layers])
    v_rows = torch.stack([layer.v_rot for layer in layers])
    rows = torch.stack(
        [
            clip_rows(k_rows, quantizer.k_clip, group_size),
            clip_rows(v_rows, quantizer.v_clip, group_size),
        ]
    )  # [2, num_layers, num_tokens, num_kv_heads, head_dim]
    scale, zero = choose_qparams(rows, group_size)
    codes = pack_codes(assign_codes(rows, scale, zero, group_size))
    meta = torch.stack([scale, zero], dim=-1)
    page, offset = places.page, places.offset
    for i, layer in enumerate(layers):
        packed = layer.packed
        packed.k_codes[page, :, offset], packed.v_codes[page, :, offset] = codes[:, i].unbind()
        packed.k_meta[page, :, offset], packed.v_meta[page, :, offset] = meta[:, i].unbind()


class TorchOps:
    """The three steps of serving in torch; see :class:`.ops.AttentionOps`."""

    name = "torch"
    supports_cuda_graph = False

    def __init__(self) -> None:
        # What the last plans mean for this implementation: worked out by a step's first layer.
        self._plan: ReadPlan | None = None
        self._sources: list[Sources] = []
        self._write: WritePlan | None = None
        self._places: Places | None = None
        # Rows of a decode step, whose codes are made for all layers at once: the step itself
        # reads its tokens from the ring, and small tensors cost as much as larger ones.
        self._pending: list[LayerRows] = []
        self._quantizer: QuantizerConfig | None = None

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
        places = self._place(write, packed, window)
        k_rot, v_rot = rotate_kv(k, v, transform)
        rows = LayerRows(packed, k_rot, v_rot)
        if with_ring and window.recent_tokens:
            self._pending.append(rows)
            self._quantizer = transform.quantizer
        else:
            _write_packed([rows], transform.quantizer, places)
        if with_ring and places.ring is not None:
            places.ring.store(window.ring_k, window.ring_v, k_rot, v_rot)
        if places.sink is not None:
            places.sink.store(window.sink_k, window.sink_v, k_rot, v_rot)
        return k_rot, v_rot

    def write_ring(
        self, window: WindowKV, k_rot: torch.Tensor, v_rot: torch.Tensor, write: WritePlan
    ) -> None:
        if self._write is not write or self._places is None:
            raise RuntimeError("write_ring must follow write_kv of the same step")
        if self._places.ring is not None:
            self._places.ring.store(window.ring_k, window.ring_v, k_rot, v_rot)

    def finish_step(self) -> None:
        if self._pending:
            assert self._places is not None and self._quantizer is not None
            _write_packed(self._pending, self._quantizer, self._places)
            self._pending = []

    def _place(self, write: WritePlan, packed: PackedKV, window: WindowKV) -> Places:
        if self._write is not write or self._places is None:
            if self._pending:
                raise RuntimeError("a step began before the last one was finished")
            loc = write.out_cache_loc
            self._places = Places(
                loc // packed.page_size,
                loc % packed.page_size,
                WindowPlaces.of(write.ring_index, window.recent_tokens),
                WindowPlaces.of(write.sink_index, window.sink_tokens),
            )
            self._write = write
        return self._places

    def _locate_all(self, plan: ReadPlan, packed: PackedKV, window: WindowKV) -> list[Sources]:
        if plan is not self._plan:
            self._sources = [
                locate(plan, request, packed, window.recent_tokens)
                for request in range(plan.kv_lens.shape[0])
            ]
            self._plan = plan
        return self._sources

    def decode(
        self,
        q: torch.Tensor,
        packed: PackedKV,
        window: WindowKV,
        plan: StepPlan,
        sm_scale: float,
    ) -> torch.Tensor:
        """As reference.attention.decode, without the log-sum-exp."""
        sources = self._locate_all(plan.read, packed, window)
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        for request, source in enumerate(sources):
            pieces = _read(source, packed, window)
            out[request] = _attend(q[request : request + 1], pieces, sm_scale)[0]
        return out

    def extend(
        self,
        q: torch.Tensor,
        k_rot: torch.Tensor,
        v_rot: torch.Tensor,
        packed: PackedKV,
        window: WindowKV,
        plan: StepPlan,
        sm_scale: float,
    ) -> torch.Tensor:
        """As reference.attention.extend, without the log-sum-exp."""
        assert plan.extend is not None
        sources = self._locate_all(plan.read, packed, window)
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        for source, (begin, end) in zip(
            sources, pairwise(plan.extend.qo_indptr_cpu.tolist()), strict=True
        ):
            if begin == end:
                continue
            k, v = (x[begin:end].transpose(0, 1) for x in (k_rot, v_rot))
            pieces = [*_read(source, packed, window), DenseKV(k, v, causal=True)]
            out[begin:end] = _attend(q[begin:end], pieces, sm_scale)
        return out


@dataclass(frozen=True, slots=True)
class DenseKV:
    """Keys and values as they are, fp32 [num_kv_heads, length, head_dim].

    Attributes:
        causal: query i sees only the first i + 1 of them.
    """

    k: torch.Tensor
    v: torch.Tensor
    causal: bool = False

    def logits(self, q: torch.Tensor, group: int) -> torch.Tensor:
        """q k^T of queries ordered [num_kv_heads, num_queries * group, head_dim]."""
        logits = q @ self.k.transpose(1, 2)  # [num_kv_heads, num_queries * group, length]
        if self.causal and self.k.shape[1] > 1:
            length = self.k.shape[1]
            seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
            logits.masked_fill_(~seen.repeat_interleave(group, dim=0), float("-inf"))
        return logits

    def values(self, weights: torch.Tensor) -> torch.Tensor:
        """weights v: [num_kv_heads, num_queries * group, head_dim]."""
        return weights @ self.v

    @property
    def length(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True, slots=True)
class CodedKV:
    """Keys and values as codes. Scales and zeros are applied after the dot products:
    q k = scale (q codes) + zero sum(q), and w v = (w scale) codes + sum(w zero)."""

    k_codes: torch.Tensor  # fp32 [num_kv_heads, num_groups, group_size, length]
    k_meta: torch.Tensor  # fp32 [2, num_kv_heads, num_groups, 1, length], scale and zero
    v_codes: torch.Tensor  # like k_codes
    v_meta: torch.Tensor  # like k_meta

    @classmethod
    def gather(cls, packed: PackedKV, rows: torch.Tensor) -> CodedKV:
        """Read rows, int64 [num_kv_heads * length], with one flat index: far faster than two."""
        num_kv_heads, parts = packed.k_codes.shape[1], []
        for codes, meta in ((packed.k_codes, packed.k_meta), (packed.v_codes, packed.v_meta)):
            row_codes = codes.view(-1, codes.shape[3]).index_select(0, rows)
            row_meta = meta.view(-1, *meta.shape[3:]).index_select(0, rows)
            columns = unpack_columns(row_codes.unflatten(0, (num_kv_heads, -1))).float()
            numbers = row_meta.unflatten(0, (num_kv_heads, -1)).permute(3, 0, 2, 1)
            parts.append(columns.unflatten(1, (numbers.shape[2], -1)))
            parts.append(numbers.float().contiguous().unsqueeze(-2))
        return cls(*parts)

    def logits(self, q: torch.Tensor, group: int) -> torch.Tensor:
        """As DenseKV.logits."""
        grouped = q.unflatten(-1, (self.k_codes.shape[1], -1)).transpose(1, 2)
        scale, zero = self.k_meta
        dots = grouped @ self.k_codes  # [heads, num_groups, queries, length]
        return (dots * scale + grouped.sum(-1, keepdim=True) * zero).sum(1)

    def values(self, weights: torch.Tensor) -> torch.Tensor:
        """As DenseKV.values."""
        scale, zero = self.v_meta
        w = weights.unsqueeze(1)  # [heads, 1, queries, length]
        out = (w * scale) @ self.v_codes.transpose(2, 3) + w @ zero.transpose(2, 3)
        return out.transpose(1, 2).flatten(2)  # [heads, queries, head_dim]

    @property
    def length(self) -> int:
        return self.k_codes.shape[3]


def _read(source: Sources, packed: PackedKV, window: WindowKV) -> list[DenseKV | CodedKV]:
    """The cached keys and values of a request, in no particular order."""
    pieces: list[DenseKV | CodedKV] = []
    for piece in source.pieces:
        k, v = (window.sink_k, window.sink_v) if piece.is_sink else (window.ring_k, window.ring_v)
        columns = slice(piece.begin, piece.end)
        pieces.append(DenseKV(k[piece.row, :, columns].float(), v[piece.row, :, columns].float()))
    if source.packed_rows is not None:
        pieces.append(CodedKV.gather(packed, source.packed_rows))
    return pieces


def _attend(q: torch.Tensor, pieces: Sequence[DenseKV | CodedKV], sm_scale: float) -> torch.Tensor:
    """Softmax attention of one request over all pieces.

    Args:
        q: fp32 [num_queries, num_q_heads, head_dim], query heads of a KV head adjacent.
        pieces: at least one.
        sm_scale: factor of the logits.

    Returns:
        fp32 [num_queries, num_q_heads, head_dim].
    """
    num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads = (pieces[0].k if isinstance(pieces[0], DenseKV) else pieces[0].k_codes).shape[0]
    group = num_q_heads // num_kv_heads
    by_head = q.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    by_head = by_head.reshape(num_kv_heads, -1, head_dim) * sm_scale  # [heads, queries*group, d]
    weights = torch.cat([piece.logits(by_head, group) for piece in pieces], dim=-1).softmax(-1)
    parts = weights.split([piece.length for piece in pieces], dim=-1)
    out = pieces[0].values(parts[0])
    for piece, part in zip(pieces[1:], parts[1:], strict=True):
        out = out + piece.values(part)
    out = out.view(num_kv_heads, num_queries, group, head_dim).transpose(0, 1)
    return out.reshape(num_queries, num_q_heads, head_dim)
