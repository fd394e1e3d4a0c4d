"""Decode attention in Triton: runs wherever Triton does, for every dtype, and in its interpreter.

Three launches: the packed middle (split over the sequence), the BF16 window (sinks and ring, its
own splits), and the merge of all partial results by their log-sum-exp.

How codes reach the tensor cores without being converted: `word & (3 << e)` is, read as an fp16
number, the subnormal code * 2^(e - 24), exactly. So one AND per two codes yields an operand, the
factor 2^(e - 24) goes into the query (keys) or leaves with the accumulator (values), and scale and
zero are applied to logits and probabilities, never to elements:
    logit[t, h] = scale_k[t] * (q_h . codes_t) + zero_k[t] * sum(q_h)
    out[h] = sum_t (p[t, h] * scale_v[t]) * codes_t + sum_t p[t, h] * zero_v[t]
"""

# Triton has no starred tuples, and its static loops need a name.
# ruff: noqa: RUF005, B007

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..layout import PackedKV, ReadPlan, WindowKV
from .write import dot_dtype

if TYPE_CHECKING:
    from .decode import DecodeWorkspace

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SHIFT_BITS = tl.constexpr(10)  # an fp16 subnormal has ten bits: five fields before a shift

# fp16 operands: the largest query element becomes 2^12 to 2^13, probabilities at most 2^13.
QUERY_HEADROOM = tl.constexpr(4096.0)
PROBABILITY_HEADROOM = tl.constexpr(8192.0)
SMALLEST_SCALE = tl.constexpr(5.9604644775390625e-08)  # the smallest positive fp16

MIN_SPLIT_TOKENS = 128
PACKED_BLOCK_N = 64
PACKED_STAGES = 3
WINDOW_BLOCK_N = 32


@triton.jit
def _shifted(words, TWO_LANES: tl.constexpr):
    """Bring fields 5 to 7 into the ten bits of an fp16 subnormal."""
    if TWO_LANES:
        # Bits that cross into the lower lane land above its field 7 and are masked off later.
        return tl.inline_asm_elementwise(
            "shr.b32 $0, $1, 10;", "=r,r", [words], dtype=tl.uint16, is_pure=True, pack=2
        )
    else:
        return words >> tl.full(words.shape, SHIFT_BITS, tl.uint16)


@triton.jit
def _masked(words, INSTRUCTION: tl.constexpr, MASK: tl.constexpr, TWO_LANES: tl.constexpr):
    """words & MASK, read as fp16 numbers; in one instruction for two lanes where PTX is there."""
    if TWO_LANES:
        return tl.inline_asm_elementwise(
            INSTRUCTION, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        bits = words & tl.full(words.shape, MASK, tl.uint16)
        return bits.to(tl.float16, bitcast=True)


@triton.jit
def _field(words, shifted, FIELD: tl.constexpr, TWO_LANES: tl.constexpr):
    """Codes of one field as fp16 subnormals code * 2^(exponent - 24), see _field_weight."""
    if FIELD == 0:
        return _masked(words, "and.b32 $0, $1, 0x00030003;", 0x003, TWO_LANES)
    elif FIELD == 1:
        return _masked(words, "and.b32 $0, $1, 0x000C000C;", 0x00C, TWO_LANES)
    elif FIELD == 2:
        return _masked(words, "and.b32 $0, $1, 0x00300030;", 0x030, TWO_LANES)
    elif FIELD == 3:
        return _masked(words, "and.b32 $0, $1, 0x00C000C0;", 0x0C0, TWO_LANES)
    elif FIELD == 4:
        return _masked(words, "and.b32 $0, $1, 0x03000300;", 0x300, TWO_LANES)
    elif FIELD == 5:
        return _masked(shifted, "and.b32 $0, $1, 0x00030003;", 0x003, TWO_LANES)
    elif FIELD == 6:
        return _masked(shifted, "and.b32 $0, $1, 0x000C000C;", 0x00C, TWO_LANES)
    else:
        return _masked(shifted, "and.b32 $0, $1, 0x00300030;", 0x030, TWO_LANES)


@triton.jit
def _field_weight(FIELD: tl.constexpr):
    """2^_exponent: 4^FIELD for the fields before the shift, 4^(FIELD - 5) after it."""
    return 4.0**FIELD if FIELD < 5 else 4.0 ** (FIELD - 5)


@triton.jit
def _power_of_two_below(x):
    """The power of two of x's fp32 exponent (x positive and normal)."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _scale_and_zero(pair):
    """Split a 32-bit metadata pair into two fp32 numbers: low half scale, high half zero."""
    scale = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, zero


@triton.jit
def _split_range(
    packed_begin,
    packed_end,
    split,
    num_splits,
    MIN_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tokens [begin, end) of one split; begin is a multiple of BLOCK_N."""
    first = packed_begin // BLOCK_N * BLOCK_N
    per_split = tl.maximum(tl.cdiv(packed_end - first, num_splits), MIN_TOKENS)
    per_split = tl.cdiv(per_split, BLOCK_N) * BLOCK_N
    begin = first + split * per_split
    return begin, tl.minimum(begin + per_split, packed_end)


@triton.jit
def _load_pages(table_ptr, start, pos, mask, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of every token of a tile: one load where a tile lies inside a page."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + start // PAGE_SIZE).to(tl.int64)
    else:
        return tl.load(table_ptr + pos // PAGE_SIZE, mask=mask, other=0).to(tl.int64)


@triton.jit
def _decode_packed_kernel(
    q_ptr,
    stride_q_batch,
    stride_q_head,
    k_codes_ptr,
    k_meta_ptr,
    v_codes_ptr,
    v_meta_ptr,
    page_table_ptr,
    stride_table,
    kv_lens_ptr,
    ring_begin_ptr,
    o_ptr,
    lse_ptr,
    sm_scale,
    num_kv_heads,
    num_splits,
    num_parts,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TWO_LANES: tl.constexpr,
):
    """Grid (KV heads, splits, batch): partial attention over [SINKS, ring_begin).

    A lane is a 16-bit container: a word of eight fields, or for head_dim 64, whose eight words are
    fewer than the sixteen rows of an MMA, a byte of four fields widened to 16 bits.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    batch = tl.program_id(2)
    # A padded row may hold any ring_begin, so the length bounds it.
    packed_end = tl.minimum(tl.load(ring_begin_ptr + batch), tl.load(kv_lens_ptr + batch))
    begin, end = _split_range(SINKS, packed_end, split, num_splits, MIN_TOKENS, BLOCK_N)
    if begin >= end:
        return

    BYTE_LANES: tl.constexpr = HEAD_DIM == 64
    NUM_LANES: tl.constexpr = 16 if BYTE_LANES else HEAD_DIM // 8
    NUM_FIELDS: tl.constexpr = 4 if BYTE_LANES else 8
    FIELD_STRIDE: tl.constexpr = 8 if BYTE_LANES else NUM_LANES
    NUM_GROUPS: tl.constexpr = HEAD_DIM // GROUP_SIZE
    # Lanes of both byte parities share a field, but not a group.
    MIXED: tl.constexpr = BYTE_LANES and NUM_GROUPS == 2
    FIELDS_PER_GROUP: tl.constexpr = NUM_FIELDS if MIXED else NUM_FIELDS // NUM_GROUPS
    GROUP_STRIDE: tl.constexpr = 0 if MIXED else FIELDS_PER_GROUP

    lane = tl.arange(0, NUM_LANES)
    dim = lane // 2 + 32 * (lane % 2) if BYTE_LANES else lane
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < GROUP
    q_row = q_ptr + batch.to(tl.int64) * stride_q_batch + (head * GROUP + offs_h) * stride_q_head

    largest = tl.zeros([BLOCK_H], tl.float32)
    for f in tl.static_range(NUM_FIELDS):
        q = tl.load(
            q_row[None, :] + (dim + f * FIELD_STRIDE)[:, None], mask=mask_h[None, :], other=0.0
        )
        largest = tl.maximum(largest, tl.max(tl.abs(q.to(tl.float32)), axis=0))
    unit = _power_of_two_below(tl.maximum(largest, 1e-30))
    to_operand = QUERY_HEADROOM / unit
    logit_unit = unit * (sm_scale * LOG2E * 16777216.0 / QUERY_HEADROOM)

    queries = ()
    query_sums = ()
    group_sum = tl.zeros([BLOCK_H], tl.float32)
    if MIXED:
        even_sum = tl.zeros([BLOCK_H], tl.float32)
        odd_sum = tl.zeros([BLOCK_H], tl.float32)
    for f in tl.static_range(NUM_FIELDS):
        q = tl.load(
            q_row[None, :] + (dim + f * FIELD_STRIDE)[:, None], mask=mask_h[None, :], other=0.0
        )
        q = q.to(tl.float32)
        queries = queries + ((q * (to_operand / _field_weight(f))[None, :]).to(tl.float16),)
        q = q * (sm_scale * LOG2E)
        if MIXED:
            even_sum += tl.sum(tl.where((lane % 2 == 0)[:, None], q, 0.0), axis=0)
            odd_sum += tl.sum(tl.where((lane % 2 == 1)[:, None], q, 0.0), axis=0)
        else:
            group_sum += tl.sum(q, axis=0)
            if (f + 1) % FIELDS_PER_GROUP == 0:
                query_sums = query_sums + (group_sum,)
                group_sum = tl.zeros([BLOCK_H], tl.float32)
    if MIXED:
        query_sums = (even_sum, odd_sum)

    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    largest_scale = tl.full([1], SMALLEST_SCALE, tl.float32)
    acc = ()
    for n in tl.static_range(NUM_FIELDS):
        acc = acc + (tl.zeros([NUM_LANES, BLOCK_H], tl.float32),)
    zeros = ()
    for n in tl.static_range(NUM_GROUPS):
        zeros = zeros + (tl.zeros([BLOCK_H], tl.float32),)

    table_ptr = page_table_ptr + batch.to(tl.int64) * stride_table
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        pos = start + tl.arange(0, BLOCK_N)
        mask_n = (pos >= SINKS) & (pos < end)
        page = _load_pages(table_ptr, start, pos, mask_n, PAGE_SIZE, BLOCK_N)
        row = (page * num_kv_heads + head) * PAGE_SIZE + pos % PAGE_SIZE
        k_words = tl.load(
            k_codes_ptr + row[:, None] * NUM_LANES + lane[None, :], mask=mask_n[:, None], other=0
        ).to(tl.uint16)
        v_words = tl.load(
            v_codes_ptr + row[:, None] * NUM_LANES + lane[None, :], mask=mask_n[:, None], other=0
        ).to(tl.uint16)

        logits = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
        for g in tl.static_range(NUM_GROUPS):
            pair = tl.load(k_meta_ptr + row * NUM_GROUPS + g, mask=mask_n, other=0)
            scale, zero = _scale_and_zero(pair)
            words = tl.where((lane % 2 == g)[None, :], k_words, 0) if MIXED else k_words
            shifted = _shifted(words, TWO_LANES)
            dots = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
            for i in tl.static_range(FIELDS_PER_GROUP):
                dots = tl.dot(
                    _field(words, shifted, g * GROUP_STRIDE + i, TWO_LANES),
                    queries[g * GROUP_STRIDE + i],
                    acc=dots,
                )
            logits += dots * (scale[:, None] * logit_unit[None, :])
            logits += zero[:, None] * query_sums[g][None, :]
        logits = tl.where(mask_n[:, None], logits, float("-inf"))

        m_new = tl.maximum(m_i, tl.max(logits, axis=0))
        p = tl.exp2(logits - m_new[None, :])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=0)
        m_i = m_new

        tile_scale = tl.full([1], SMALLEST_SCALE, tl.float32)
        for g in tl.static_range(NUM_GROUPS):
            pair = tl.load(v_meta_ptr + row * NUM_GROUPS + g, mask=mask_n, other=0)
            scale, zero = _scale_and_zero(pair)
            tile_scale = tl.maximum(tile_scale, tl.max(scale, axis=0))
        new_scale = tl.maximum(largest_scale, tile_scale)
        rescale = alpha * (largest_scale / new_scale)
        largest_scale = new_scale
        to_half = PROBABILITY_HEADROOM / new_scale

        new_zeros = ()
        new_acc = ()
        for g in tl.static_range(NUM_GROUPS):
            pair = tl.load(v_meta_ptr + row * NUM_GROUPS + g, mask=mask_n, other=0)
            scale, zero = _scale_and_zero(pair)
            new_zeros = new_zeros + (zeros[g] * alpha + tl.sum(p * zero[:, None], axis=0),)
            weights = (p * (scale * to_half)[:, None]).to(tl.float16)  # [BLOCK_N, BLOCK_H]
            words = tl.where((lane % 2 == g)[None, :], v_words, 0) if MIXED else v_words
            words = tl.trans(words)  # [NUM_LANES, BLOCK_N]
            shifted = _shifted(words, TWO_LANES)
            if MIXED and g == 1:
                both = ()
                for i in tl.static_range(NUM_FIELDS):
                    both = both + (
                        tl.dot(_field(words, shifted, i, TWO_LANES), weights, acc=new_acc[i]),
                    )
                new_acc = both
            else:
                for i in tl.static_range(FIELDS_PER_GROUP):
                    scaled = acc[g * GROUP_STRIDE + i] * rescale[None, :]
                    bits = _field(words, shifted, g * GROUP_STRIDE + i, TWO_LANES)
                    new_acc = new_acc + (tl.dot(bits, weights, acc=scaled),)
        zeros = new_zeros
        acc = new_acc

    part = (batch.to(tl.int64) * num_kv_heads * GROUP + head * GROUP + offs_h) * num_parts + split
    value_unit = largest_scale * (16777216.0 / PROBABILITY_HEADROOM) / l_i
    for f in tl.static_range(NUM_FIELDS):
        value = acc[f] * (value_unit / _field_weight(f))[None, :]
        if MIXED:
            zero = tl.where((lane % 2 == 0)[:, None], zeros[0][None, :], zeros[1][None, :])
        else:
            zero = zeros[f // FIELDS_PER_GROUP][None, :]
        value += zero / l_i[None, :]
        target = o_ptr + part[None, :] * HEAD_DIM + (dim + f * FIELD_STRIDE)[:, None]
        tl.store(target, value, mask=mask_h[None, :])
    tl.store(lse_ptr + part, m_i + tl.log2(l_i), mask=mask_h)


@triton.jit
def _dequantized(
    codes_ptr,
    meta_ptr,
    row,
    mask_n,
    offs_d,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    """zero + scale * code of dims offs_d of packed rows: fp32 [rows, dims]."""
    NUM_WORDS: tl.constexpr = HEAD_DIM // 8
    NUM_GROUPS: tl.constexpr = HEAD_DIM // GROUP_SIZE
    mask = mask_n[:, None]
    words = tl.load(
        codes_ptr + row[:, None] * NUM_WORDS + (offs_d % NUM_WORDS)[None, :], mask=mask, other=0
    )
    codes = (words.to(tl.int32) >> (2 * (offs_d // NUM_WORDS))[None, :]) & 3
    meta = meta_ptr + row[:, None] * NUM_GROUPS + (offs_d // GROUP_SIZE)[None, :]
    scale, zero = _scale_and_zero(tl.load(meta, mask=mask, other=0))
    return zero + scale * codes.to(tl.float32)


@triton.jit
def _window_sources(
    index,
    mask_n,
    num_first,
    ring_first,
    ring_begin,
    ring_row_index,
    sink_group_ptr,
    table_ptr,
    head,
    num_kv_heads,
    recent_tokens,
    SINKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Where each window token lies: rows in ring, sinks and packed cache, and which one holds.

    Window tokens are numbered: the first num_first positions, then those from ring_first on.
    """
    first = mask_n & (index < num_first)
    pos = tl.where(index < num_first, index, index - num_first + ring_first)
    from_sink = first & (index < 0)
    sink_row = index.to(tl.int64)
    if SINKS > 0:
        group = tl.load(sink_group_ptr + index, mask=first, other=-1)
        from_sink = first & (group >= 0)
        sink_row = (group.to(tl.int64) * num_kv_heads + head) * SINKS + index
    from_ring = mask_n & (pos >= ring_begin) & (from_sink == 0)
    ring_row = (ring_row_index * num_kv_heads + head) * recent_tokens
    ring_row = ring_row + pos % tl.maximum(recent_tokens, 1)
    from_packed = first & (pos < ring_begin) & (from_sink == 0)
    page = tl.load(table_ptr + pos // PAGE_SIZE, mask=from_packed, other=0).to(tl.int64)
    packed_row = (page * num_kv_heads + head) * PAGE_SIZE + pos % PAGE_SIZE
    return ring_row, sink_row, packed_row, from_ring, from_sink, from_packed


@triton.jit
def _window_rows(
    ring_ptr,
    sink_ptr,
    codes_ptr,
    meta_ptr,
    ring_row,
    sink_row,
    packed_row,
    from_ring,
    from_sink,
    from_packed,
    any_packed,
    offs_d,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    """Dims offs_d of a tile's rows, each row from its own source: [tokens, dims]."""
    ring = ring_ptr + ring_row[:, None] * HEAD_DIM + offs_d[None, :]
    rows = tl.load(ring, mask=from_ring[:, None], other=0.0)
    sink = sink_ptr + sink_row[:, None] * HEAD_DIM + offs_d[None, :]
    sink = tl.load(sink, mask=from_sink[:, None], other=0.0)
    rows = tl.where(from_sink[:, None], sink, rows)
    if any_packed:
        packed = _dequantized(
            codes_ptr, meta_ptr, packed_row, from_packed, offs_d, HEAD_DIM, GROUP_SIZE
        )
        rows = tl.where(from_packed[:, None], packed.to(rows.dtype), rows)
    return rows


@triton.jit
def _decode_window_kernel(
    q_ptr,
    stride_q_batch,
    stride_q_head,
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
    kv_lens_ptr,
    ring_row_ptr,
    ring_begin_ptr,
    sink_group_ptr,
    o_ptr,
    lse_ptr,
    sm_scale,
    num_kv_heads,
    num_splits,
    num_parts,
    recent_tokens,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Grid (KV heads, window splits, batch): positions below SINKS and from ring_begin on.

    A first position without a BF16 copy is read from the ring or from the packed cache here, so
    the packed kernel has no such case.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    batch = tl.program_id(2)
    kv_len = tl.load(kv_lens_ptr + batch)
    ring_begin = tl.minimum(tl.load(ring_begin_ptr + batch), kv_len)
    num_first = tl.minimum(kv_len, SINKS)
    ring_first = tl.maximum(ring_begin, num_first)
    total = num_first + kv_len - ring_first
    window_splits = num_parts - num_splits
    per_split = tl.cdiv(tl.cdiv(total, window_splits), BLOCK_N) * BLOCK_N
    begin = split * per_split
    end = tl.minimum(begin + per_split, total)
    if begin >= end:
        return
    ring_row_index = tl.load(ring_row_ptr + batch).to(tl.int64)

    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < GROUP
    offs_d = tl.arange(0, HEAD_DIM)
    q_row = q_ptr + batch.to(tl.int64) * stride_q_batch + (head * GROUP + offs_h) * stride_q_head
    q = tl.load(q_row[:, None] + offs_d[None, :], mask=mask_h[:, None], other=0.0).to(DOT_DTYPE)

    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)
    for start in range(begin, end, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        mask_n = index < end
        ring_row, sink_row, packed_row, from_ring, from_sink, from_packed = _window_sources(
            index,
            mask_n,
            num_first,
            ring_first,
            ring_begin,
            ring_row_index,
            sink_group_ptr + batch * SINKS,
            page_table_ptr + batch.to(tl.int64) * stride_table,
            head,
            num_kv_heads,
            recent_tokens,
            SINKS,
            PAGE_SIZE,
        )
        any_packed = tl.max(from_packed.to(tl.int32), axis=0) > 0

        k = _window_rows(
            ring_k_ptr,
            sink_k_ptr,
            k_codes_ptr,
            k_meta_ptr,
            ring_row,
            sink_row,
            packed_row,
            from_ring,
            from_sink,
            from_packed,
            any_packed,
            offs_d,
            HEAD_DIM,
            GROUP_SIZE,
        )
        v = _window_rows(
            ring_v_ptr,
            sink_v_ptr,
            v_codes_ptr,
            v_meta_ptr,
            ring_row,
            sink_row,
            packed_row,
            from_ring,
            from_sink,
            from_packed,
            any_packed,
            offs_d,
            HEAD_DIM,
            GROUP_SIZE,
        )
        logits = tl.dot(q, tl.trans(k).to(DOT_DTYPE), input_precision="ieee")
        logits = tl.where(mask_n[None, :], logits * (sm_scale * LOG2E), float("-inf"))
        m_new = tl.maximum(m_i, tl.max(logits, axis=1))
        p = tl.exp2(logits - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(DOT_DTYPE), v.to(DOT_DTYPE), acc=acc, input_precision="ieee")
        m_i = m_new

    q_heads = num_kv_heads * GROUP
    part = (batch.to(tl.int64) * q_heads + head * GROUP + offs_h) * num_parts + num_splits + split
    target = o_ptr + part[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(target, acc / l_i[:, None], mask=mask_h[:, None])
    tl.store(lse_ptr + part, m_i + tl.log2(l_i), mask=mask_h)


@triton.jit
def _merge_range(
    o_ptr,
    lse_ptr,
    row,
    first,
    count,
    m_i,
    l_i,
    acc,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Fold partial results [first, first + count) of one head row into the running merge."""
    offs_d = tl.arange(0, HEAD_DIM)
    for start in range(0, count, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        mask = part < count
        lse = tl.load(lse_ptr + row + first + part, mask=mask, other=float("-inf"))
        source = o_ptr + (row + first + part)[:, None] * HEAD_DIM + offs_d[None, :]
        o = tl.load(source, mask=mask[:, None], other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse, axis=0))
        weight = tl.exp2(lse - m_new)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(weight, axis=0)
        acc = acc * alpha + tl.sum(o * weight[:, None], axis=0)
        m_i = m_new
    return m_i, l_i, acc


@triton.jit
def _merge_kernel(
    o_ptr,
    lse_ptr,
    kv_lens_ptr,
    ring_begin_ptr,
    out_ptr,
    out_lse_ptr,
    num_q_heads,
    num_splits,
    num_parts,
    SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW_BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid (query heads, batch): only the splits that were written are read."""
    batch = tl.program_id(1)
    kv_len = tl.load(kv_lens_ptr + batch)
    ring_begin = tl.minimum(tl.load(ring_begin_ptr + batch), kv_len)
    begin, end = _split_range(SINKS, ring_begin, 0, num_splits, MIN_TOKENS, BLOCK_N)
    used = 0
    if ring_begin > SINKS:
        used = tl.cdiv(ring_begin - begin, tl.maximum(end - begin, 1))
    num_first = tl.minimum(kv_len, SINKS)
    total = num_first + kv_len - tl.maximum(ring_begin, num_first)
    per_split = tl.cdiv(tl.cdiv(total, num_parts - num_splits), WINDOW_BLOCK_N) * WINDOW_BLOCK_N
    window_used = tl.cdiv(total, tl.maximum(per_split, 1))

    offs_d = tl.arange(0, HEAD_DIM)
    out_row = batch.to(tl.int64) * num_q_heads + tl.program_id(0)
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    if kv_len > 0:
        row = out_row * num_parts
        m_i, l_i, acc = _merge_range(
            o_ptr, lse_ptr, row, num_splits, window_used, m_i, l_i, acc, HEAD_DIM, BLOCK_S
        )
        m_i, l_i, acc = _merge_range(
            o_ptr, lse_ptr, row, 0, used, m_i, l_i, acc, HEAD_DIM, BLOCK_S
        )
        acc = acc / l_i
    tl.store(out_ptr + out_row * HEAD_DIM + offs_d, acc.to(out_ptr.dtype.element_ty))
    tl.store(out_lse_ptr + out_row, (m_i + tl.log2(l_i)) * LN2)


def launch_merge(
    plan: ReadPlan,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink_tokens: int,
) -> None:
    """Merge the parts that the other two launches wrote."""
    batch, num_q_heads, head_dim = out.shape
    _merge_kernel[(num_q_heads, batch)](
        workspace.o_parts,
        workspace.lse_parts,
        plan.kv_lens,
        plan.ring_begin,
        out,
        lse,
        num_q_heads,
        workspace.num_splits,
        workspace.num_splits + workspace.window_splits,
        SINKS=sink_tokens,
        HEAD_DIM=head_dim,
        MIN_TOKENS=MIN_SPLIT_TOKENS,
        BLOCK_N=PACKED_BLOCK_N,
        WINDOW_BLOCK_N=WINDOW_BLOCK_N,
        BLOCK_S=8,
        num_warps=1,
    )


def launch_packed(
    q: torch.Tensor,
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    sm_scale: float,
    workspace: DecodeWorkspace,
    group: int,
) -> None:
    """Partial results of the packed middle into parts [0, num_splits)."""
    batch, _, head_dim = q.shape
    num_kv_heads = packed.k_codes.shape[1]
    lanes = torch.uint8 if head_dim == 64 else torch.uint16
    _decode_packed_kernel[(num_kv_heads, workspace.num_splits, batch)](
        q,
        q.stride(0),
        q.stride(1),
        packed.k_codes.view(lanes),
        packed.k_meta.view(torch.int32),
        packed.v_codes.view(lanes),
        packed.v_meta.view(torch.int32),
        plan.page_table,
        plan.page_table.stride(0),
        plan.kv_lens,
        plan.ring_begin,
        workspace.o_parts,
        workspace.lse_parts,
        sm_scale,
        num_kv_heads,
        workspace.num_splits,
        workspace.num_splits + workspace.window_splits,
        SINKS=window.sink_tokens,
        GROUP=group,
        HEAD_DIM=head_dim,
        GROUP_SIZE=head_dim // packed.k_meta.shape[3],
        PAGE_SIZE=packed.page_size,
        MIN_TOKENS=MIN_SPLIT_TOKENS,
        BLOCK_H=8 if group <= 8 else 16,
        BLOCK_N=PACKED_BLOCK_N,
        NUM_STAGES=PACKED_STAGES,
        TWO_LANES=q.is_cuda and torch.version.hip is None,
        num_warps=1,
    )


def launch_window(
    q: torch.Tensor,
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    sm_scale: float,
    workspace: DecodeWorkspace,
    group: int,
) -> None:
    """Partial results of the BF16 windows into parts [num_splits, num_parts)."""
    batch, _, head_dim = q.shape
    num_kv_heads = packed.k_codes.shape[1]
    _decode_window_kernel[(num_kv_heads, workspace.window_splits, batch)](
        q,
        q.stride(0),
        q.stride(1),
        packed.k_codes.view(torch.uint16),
        packed.k_meta.view(torch.int32),
        packed.v_codes.view(torch.uint16),
        packed.v_meta.view(torch.int32),
        window.ring_k,
        window.ring_v,
        window.sink_k,
        window.sink_v,
        plan.page_table,
        plan.page_table.stride(0),
        plan.kv_lens,
        plan.ring_row,
        plan.ring_begin,
        plan.sink_group,
        workspace.o_parts,
        workspace.lse_parts,
        sm_scale,
        num_kv_heads,
        workspace.num_splits,
        workspace.num_splits + workspace.window_splits,
        window.recent_tokens,
        SINKS=window.sink_tokens,
        GROUP=group,
        HEAD_DIM=head_dim,
        GROUP_SIZE=head_dim // packed.k_meta.shape[3],
        PAGE_SIZE=packed.page_size,
        BLOCK_H=16,
        BLOCK_N=WINDOW_BLOCK_N,
        DOT_DTYPE=dot_dtype(window.ring_k.dtype),
        num_warps=4,
        num_stages=1,
    )
