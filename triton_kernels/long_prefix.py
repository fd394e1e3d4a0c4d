"""Cached tokens written out in 16 bits, so that another kernel can attend to them.

A long chunk reads every cached token thousands of times. Then unpacking once and leaving the
products to a dense kernel is several times faster than unpacking inside the attention; a chunk of
a few tokens is faster on the packed bytes. A piece is as many tokens as the workspace holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from ..layout import PackedKV, ReadPlan, WindowKV
from .decode_triton import _scale_and_zero
from .extend_triton import _group_codes, launch_merge_two

PIECE_TOKENS = 32768
# On an H200 unpacking a token costs as much as about 40 new tokens save; rounded up.
MIN_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PrefixPiece:
    """Consecutive cached tokens of consecutive requests.

    Attributes:
        requests: rows of the read plan; one without cached tokens may lie between others.
        tokens: new tokens of these requests.
        qo_indptr: int32 [len(requests) + 1], first new token of each, counted from tokens.start.
        kv_begin: int32 [len(requests)], position of each request's first token in this piece.
        kv_indptr: int32 [len(requests) + 1], where each request's tokens begin in the workspace.
        max_extend_len, max_cached_len: longest run of new and of cached tokens.
        num_cached: tokens in the workspace.
    """

    requests: slice
    tokens: slice
    qo_indptr: torch.Tensor
    kv_begin: torch.Tensor
    kv_indptr: torch.Tensor
    max_extend_len: int
    max_cached_len: int
    num_cached: int


class PrefixAttention(Protocol):
    """Full attention of new tokens to unpacked ones; out and the log-sum-exp (natural, fp32)."""

    def attend_piece(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        piece: PrefixPiece,
        sm_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class LongPrefix:
    """How the cached tokens of one step are attended to, the same for every layer.

    Attributes:
        pieces: all cached tokens, in order.
        attention: the dense kernel.
        k, v: workspace [piece_tokens, num_kv_heads, head_dim] in the dtype of the queries.
    """

    pieces: Sequence[PrefixPiece]
    attention: PrefixAttention
    k: torch.Tensor
    v: torch.Tensor


def worth_unpacking(new_lens: Sequence[int], prefix_lens: Sequence[int]) -> bool:
    """Whether cached tokens are read often enough, on average, to pay for unpacking them."""
    reads = sum(new * cached for new, cached in zip(new_lens, prefix_lens, strict=True))
    return reads > 0 and reads >= MIN_NEW_TOKENS * sum(prefix_lens)


def _split(prefix_lens: Sequence[int], piece_tokens: int) -> list[list[tuple[int, int, int]]]:
    """(request, first position, number) of each piece; no gap between the requests of a piece."""
    pieces: list[list[tuple[int, int, int]]] = []
    room = 0
    for request, cached in enumerate(prefix_lens):
        begin = 0
        while begin < cached:
            if room == 0:
                pieces.append([])
                room = piece_tokens
            piece = pieces[-1]
            without = range(piece[-1][0] + 1, request) if piece else ()
            piece += [(skipped, 0, 0) for skipped in without]
            take = min(room, cached - begin)
            piece.append((request, begin, take))
            begin, room = begin + take, room - take
    return pieces


def plan_pieces(
    qo_indptr: Sequence[int], prefix_lens: Sequence[int], piece_tokens: int, device: torch.device
) -> list[PrefixPiece]:
    """Split the cached tokens of a step into pieces; one copy to the device for all of them.

    Args:
        qo_indptr: [batch + 1], first new token of each request, on the host.
        prefix_lens: [batch], cached tokens of each request.
        piece_tokens: tokens that the workspace holds.
        device: of the pieces' tensors.
    """
    plans, numbers = _split(prefix_lens, piece_tokens), []
    for plan in plans:
        first = qo_indptr[plan[0][0]]
        indptr = [0]
        for _, _, count in plan:
            indptr.append(indptr[-1] + count)
        numbers += [qo_indptr[request] - first for request, _, _ in plan]
        numbers += [qo_indptr[plan[-1][0] + 1] - first, *(begin for _, begin, _ in plan), *indptr]
    flat = torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
    pieces, used = [], 0
    for plan in plans:
        count = len(plan)
        first, last = plan[0][0], plan[-1][0]
        bounds = qo_indptr[first : last + 2]
        qo, kv_begin, kv_indptr = flat[used : used + 3 * count + 2].split(
            [count + 1, count, count + 1]
        )
        used += 3 * count + 2
        pieces.append(
            PrefixPiece(
                slice(first, last + 1),
                slice(bounds[0], bounds[-1]),
                qo,
                kv_begin,
                kv_indptr,
                max(end - begin for begin, end in itertools.pairwise(bounds)),
                max(number for _, _, number in plan),
                sum(number for _, _, number in plan),
            )
        )
    return pieces


def merge_long_prefix(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    prefix: LongPrefix,
    sm_scale: float,
) -> None:
    """Merge attention to the cached tokens into that to the current chunk, in place.

    Args:
        out: attention to the current chunk, contiguous [num_tokens, num_q_heads, head_dim].
        lse: its log-sum-exp, fp32, contiguous [num_tokens, num_q_heads].
        q: rotated queries, shaped like out.
        packed, window, plan: the cache of this layer and what each request reads of it.
        prefix: pieces, kernel and workspace.
        sm_scale: factor of the logits.
    """
    for piece in prefix.pieces:
        k, v = prefix.k[: piece.num_cached], prefix.v[: piece.num_cached]
        unpack_piece(packed, window, plan, piece, k, v)
        part, part_lse = prefix.attention.attend_piece(q[piece.tokens], k, v, piece, sm_scale)
        target, target_lse = out[piece.tokens], lse[piece.tokens]
        launch_merge_two(target, target_lse, part, part_lse.contiguous(), target, target_lse)


@triton.jit
def _unpacked_rows(
    codes_ptr,
    meta_ptr,
    ring_ptr,
    sink_ptr,
    packed_row,
    ring_row,
    sink_row,
    from_packed,
    from_ring,
    from_sink,
    any_window,
    GROUP_INDEX: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One quantizer group of a tile's rows, each row from its own source: fp32 [tokens, dims]."""
    NUM_GROUPS: tl.constexpr = HEAD_DIM // GROUP_SIZE
    FIELDS: tl.constexpr = 8 // NUM_GROUPS
    codes = _group_codes(
        codes_ptr,
        packed_row,
        from_packed,
        GROUP_INDEX * FIELDS,
        FIELDS,
        HEAD_DIM // 8,
        BLOCK_N,
        tl.float32,
    )
    pair = tl.load(meta_ptr + packed_row * NUM_GROUPS + GROUP_INDEX, mask=from_packed, other=0)
    scale, zero = _scale_and_zero(pair)
    rows = codes * scale[:, None] + zero[:, None]
    if any_window:
        dims = (GROUP_INDEX * GROUP_SIZE + tl.arange(0, GROUP_SIZE))[None, :]
        ring = tl.load(
            ring_ptr + ring_row[:, None] * HEAD_DIM + dims, mask=from_ring[:, None], other=0.0
        )
        sink = tl.load(
            sink_ptr + sink_row[:, None] * HEAD_DIM + dims, mask=from_sink[:, None], other=0.0
        )
        rows = tl.where(from_ring[:, None], ring.to(tl.float32), rows)
        rows = tl.where(from_sink[:, None], sink.to(tl.float32), rows)
    return rows


# A piece's rows begin anywhere in the plan: their addresses must not make new variants.
@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=[
        "page_table_ptr",
        "ring_row_ptr",
        "ring_begin_ptr",
        "sink_group_ptr",
        "kv_begin_ptr",
        "kv_indptr_ptr",
    ],
)
def _unpack_kernel(
    k_codes_ptr,
    k_meta_ptr,
    v_codes_ptr,
    v_meta_ptr,
    ring_k_ptr,
    ring_v_ptr,
    sink_k_ptr,
    sink_v_ptr,
    page_table_ptr,
    stride_table,
    ring_row_ptr,
    ring_begin_ptr,
    sink_group_ptr,
    kv_begin_ptr,
    kv_indptr_ptr,
    k_out_ptr,
    v_out_ptr,
    num_kv_heads,
    recent_tokens,
    SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (blocks of cached tokens, KV heads, requests)."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    first = tl.load(kv_indptr_ptr + request)
    count = tl.load(kv_indptr_ptr + request + 1) - first
    if tl.program_id(0) * BLOCK_N >= count:
        return
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = index < count
    pos = tl.load(kv_begin_ptr + request) + index
    ring_begin = tl.load(ring_begin_ptr + request)

    from_sink = mask_n & (pos < 0)
    sink_row = pos.to(tl.int64)
    if SINKS > 0:
        in_sinks = mask_n & (pos < SINKS)
        group = tl.load(sink_group_ptr + request * SINKS + pos, mask=in_sinks, other=-1)
        from_sink = in_sinks & (group >= 0)
        sink_row = (group.to(tl.int64) * num_kv_heads + head) * SINKS + pos
    from_ring = mask_n & (pos >= ring_begin) & (from_sink == 0)
    ring_row = (tl.load(ring_row_ptr + request).to(tl.int64) * num_kv_heads + head) * recent_tokens
    ring_row = ring_row + pos % tl.maximum(recent_tokens, 1)
    from_packed = mask_n & (pos < ring_begin) & (from_sink == 0)
    table_ptr = page_table_ptr + request.to(tl.int64) * stride_table
    page = tl.load(table_ptr + pos // PAGE_SIZE, mask=from_packed, other=0).to(tl.int64)
    packed_row = (page * num_kv_heads + head) * PAGE_SIZE + pos % PAGE_SIZE
    any_window = tl.max((from_sink | from_ring).to(tl.int32), axis=0) > 0

    target = ((first + index).to(tl.int64) * num_kv_heads + head)[:, None] * HEAD_DIM
    for n in tl.static_range(HEAD_DIM // GROUP_SIZE):
        dims = (n * GROUP_SIZE + tl.arange(0, GROUP_SIZE))[None, :]
        k = _unpacked_rows(
            k_codes_ptr,
            k_meta_ptr,
            ring_k_ptr,
            sink_k_ptr,
            packed_row,
            ring_row,
            sink_row,
            from_packed,
            from_ring,
            from_sink,
            any_window,
            n,
            HEAD_DIM,
            GROUP_SIZE,
            BLOCK_N,
        )
        tl.store(k_out_ptr + target + dims, k.to(k_out_ptr.dtype.element_ty), mask=mask_n[:, None])
        v = _unpacked_rows(
            v_codes_ptr,
            v_meta_ptr,
            ring_v_ptr,
            sink_v_ptr,
            packed_row,
            ring_row,
            sink_row,
            from_packed,
            from_ring,
            from_sink,
            any_window,
            n,
            HEAD_DIM,
            GROUP_SIZE,
            BLOCK_N,
        )
        tl.store(v_out_ptr + target + dims, v.to(v_out_ptr.dtype.element_ty), mask=mask_n[:, None])


def unpack_piece(
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    piece: PrefixPiece,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Write the cached keys and values of a piece, in the rotated frame, request after request.

    Args:
        packed, window: buffers of the layer.
        plan: what each request reads; only positions inside the piece are looked at.
        piece: which tokens.
        k_out, v_out: contiguous [num_cached, num_kv_heads, head_dim]; values are rounded once.
    """
    num_kv_heads, head_dim = k_out.shape[1:]
    sink_group = plan.sink_group[piece.requests]
    if not (k_out.is_contiguous() and v_out.is_contiguous() and sink_group.is_contiguous()):
        raise ValueError("k_out, v_out and sink_group must be contiguous")
    table = plan.page_table[piece.requests]
    block_n = 32
    grid = (triton.cdiv(piece.max_cached_len, block_n), num_kv_heads, len(piece.kv_begin))
    _unpack_kernel[grid](
        packed.k_codes.view(torch.uint16),
        packed.k_meta.view(torch.int32),
        packed.v_codes.view(torch.uint16),
        packed.v_meta.view(torch.int32),
        window.ring_k,
        window.ring_v,
        window.sink_k,
        window.sink_v,
        table,
        table.stride(0),
        plan.ring_row[piece.requests],
        plan.ring_begin[piece.requests],
        sink_group,
        piece.kv_begin,
        piece.kv_indptr,
        k_out,
        v_out,
        num_kv_heads,
        window.recent_tokens,
        SINKS=window.sink_tokens,
        HEAD_DIM=head_dim,
        GROUP_SIZE=head_dim // packed.k_meta.shape[3],
        PAGE_SIZE=packed.page_size,
        BLOCK_N=block_n,
        num_warps=4,
    )
