"""Extend attention in Triton: packed prefix with BF16 windows, and the causal current chunk."""

# Triton has no starred tuples, and its static loops need a name.
# ruff: noqa: RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import PackedKV, ReadPlan, WindowKV
from .decode_triton import LN2, LOG2E, _scale_and_zero, _window_rows, _window_sources
from .write import dot_dtype


@triton.jit
def _softmax_step(logits, m_i, l_i):
    """Fold a tile of base-2 logits [rows, tokens] into the running softmax."""
    m_new = tl.maximum(m_i, tl.max(logits, axis=1))
    # A row may have seen no token yet: -inf - -inf must not become NaN.
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(logits - safe[:, None])
    alpha = tl.exp2(m_i - safe)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, axis=1)


@triton.jit
def _group_codes(
    codes_ptr,
    row,
    mask_n,
    FIRST_FIELD: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Codes of consecutive fields, so of consecutive dims: [tokens, NUM_FIELDS * NUM_WORDS]."""
    words = tl.load(
        codes_ptr + row[:, None] * NUM_WORDS + tl.arange(0, NUM_WORDS)[None, :],
        mask=mask_n[:, None],
        other=0,
    ).to(tl.int32)
    shifts = 2 * (FIRST_FIELD + tl.arange(0, NUM_FIELDS))
    codes = (words[:, None, :] >> shifts[None, :, None]) & 3
    return tl.reshape(codes, [BLOCK_N, NUM_FIELDS * NUM_WORDS]).to(tl.float32).to(DOT_DTYPE)


@triton.jit
def _extend_kernel(
    q_ptr,
    stride_q_token,
    stride_q_head,
    k_ptr,
    v_ptr,
    qo_indptr_ptr,
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
    out_ptr,
    lse_ptr,
    sm_scale,
    num_kv_heads,
    recent_tokens,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_CURRENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Grid (row blocks, KV heads, batch); rows are (new token, query head of the KV head).

    The head row is handled group by group of the quantizer, so that scale and zero stay outside
    the products: logit = sum over groups of scale * (q . codes) + zero * sum(q).
    """
    head = tl.program_id(1)
    batch = tl.program_id(2)
    q_begin = tl.load(qo_indptr_ptr + batch)
    num_new = tl.load(qo_indptr_ptr + batch + 1) - q_begin
    if tl.program_id(0) * BLOCK_M >= num_new * GROUP:
        return
    NUM_GROUPS: tl.constexpr = HEAD_DIM // GROUP_SIZE
    NUM_WORDS: tl.constexpr = HEAD_DIM // 8
    FIELDS: tl.constexpr = 8 // NUM_GROUPS
    offs_d = tl.arange(0, GROUP_SIZE)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    new = rows // GROUP
    mask_m = new < num_new
    token = (q_begin + new).to(tl.int64)
    q_head = head * GROUP + rows % GROUP
    q_rows = q_ptr + (token * stride_q_token + q_head * stride_q_head)[:, None]
    factor = sm_scale * LOG2E

    queries = ()
    sums = ()
    acc = ()
    for n in tl.static_range(NUM_GROUPS):
        part = tl.load(
            q_rows + (n * GROUP_SIZE + offs_d)[None, :], mask=mask_m[:, None], other=0.0
        )
        queries = queries + (part.to(DOT_DTYPE),)
        sums = sums + (tl.sum(part.to(tl.float32), axis=1) * factor,)
        acc = acc + (tl.zeros([BLOCK_M, GROUP_SIZE], tl.float32),)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)

    if HAS_PREFIX:
        kv_len = tl.load(kv_lens_ptr + batch)
        ring_begin = tl.minimum(tl.load(ring_begin_ptr + batch), kv_len)
        table_ptr = page_table_ptr + batch.to(tl.int64) * stride_table
        for start in range(SINKS, ring_begin, BLOCK_N):
            pos = start + tl.arange(0, BLOCK_N)
            mask_n = pos < ring_begin
            page = tl.load(table_ptr + pos // PAGE_SIZE, mask=mask_n, other=0).to(tl.int64)
            row = (page * num_kv_heads + head) * PAGE_SIZE + pos % PAGE_SIZE
            logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for g in tl.static_range(NUM_GROUPS):
                codes = _group_codes(
                    k_codes_ptr, row, mask_n, g * FIELDS, FIELDS, NUM_WORDS, BLOCK_N, DOT_DTYPE
                )
                pair = tl.load(k_meta_ptr + row * NUM_GROUPS + g, mask=mask_n, other=0)
                scale, zero = _scale_and_zero(pair)
                dots = tl.dot(queries[g], tl.trans(codes), input_precision="ieee")
                logits += dots * (scale * factor)[None, :] + sums[g][:, None] * zero[None, :]
            logits = tl.where(mask_n[None, :], logits, float("-inf"))
            p, alpha, m_i, l_i = _softmax_step(logits, m_i, l_i)
            new_acc = ()
            for g in tl.static_range(NUM_GROUPS):
                codes = _group_codes(
                    v_codes_ptr, row, mask_n, g * FIELDS, FIELDS, NUM_WORDS, BLOCK_N, DOT_DTYPE
                )
                pair = tl.load(v_meta_ptr + row * NUM_GROUPS + g, mask=mask_n, other=0)
                scale, zero = _scale_and_zero(pair)
                offset = tl.sum(p * zero[None, :], axis=1)
                scaled = acc[g] * alpha[:, None] + offset[:, None]
                weights = (p * scale[None, :]).to(DOT_DTYPE)
                new_acc = new_acc + (tl.dot(weights, codes, acc=scaled, input_precision="ieee"),)
            acc = new_acc

        num_first = tl.minimum(kv_len, SINKS)
        ring_first = tl.maximum(ring_begin, num_first)
        total = num_first + kv_len - ring_first
        ring_row_index = tl.load(ring_row_ptr + batch).to(tl.int64)
        for start in range(0, total, BLOCK_N):
            index = start + tl.arange(0, BLOCK_N)
            mask_n = index < total
            ring_row, sink_row, packed_row, from_ring, from_sink, from_packed = _window_sources(
                index,
                mask_n,
                num_first,
                ring_first,
                ring_begin,
                ring_row_index,
                sink_group_ptr + batch * SINKS,
                table_ptr,
                head,
                num_kv_heads,
                recent_tokens,
                SINKS,
                PAGE_SIZE,
            )
            any_packed = tl.max(from_packed.to(tl.int32), axis=0) > 0
            logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for g in tl.static_range(NUM_GROUPS):
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
                    g * GROUP_SIZE + offs_d,
                    HEAD_DIM,
                    GROUP_SIZE,
                ).to(DOT_DTYPE)
                logits = tl.dot(queries[g], tl.trans(k), acc=logits, input_precision="ieee")
            logits = tl.where(mask_n[None, :], logits * factor, float("-inf"))
            p, alpha, m_i, l_i = _softmax_step(logits, m_i, l_i)
            new_acc = ()
            for g in tl.static_range(NUM_GROUPS):
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
                    g * GROUP_SIZE + offs_d,
                    HEAD_DIM,
                    GROUP_SIZE,
                ).to(DOT_DTYPE)
                scaled = acc[g] * alpha[:, None]
                dots = tl.dot(p.to(DOT_DTYPE), v, acc=scaled, input_precision="ieee")
                new_acc = new_acc + (dots,)
            acc = new_acc

    if HAS_CURRENT:
        last = tl.minimum((tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUP + 1, num_new)
        for start in range(0, last, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask_n = offs_n < num_new
            source = ((q_begin + offs_n).to(tl.int64) * num_kv_heads + head)[:, None] * HEAD_DIM
            logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for g in tl.static_range(NUM_GROUPS):
                dims = (g * GROUP_SIZE + offs_d)[None, :]
                k = tl.load(k_ptr + source + dims, mask=mask_n[:, None], other=0.0).to(DOT_DTYPE)
                logits = tl.dot(queries[g], tl.trans(k), acc=logits, input_precision="ieee")
            visible = (offs_n[None, :] <= new[:, None]) & mask_n[None, :]
            logits = tl.where(visible, logits * factor, float("-inf"))
            p, alpha, m_i, l_i = _softmax_step(logits, m_i, l_i)
            new_acc = ()
            for g in tl.static_range(NUM_GROUPS):
                dims = (g * GROUP_SIZE + offs_d)[None, :]
                v = tl.load(v_ptr + source + dims, mask=mask_n[:, None], other=0.0).to(DOT_DTYPE)
                scaled = acc[g] * alpha[:, None]
                dots = tl.dot(p.to(DOT_DTYPE), v, acc=scaled, input_precision="ieee")
                new_acc = new_acc + (dots,)
            acc = new_acc

    out_row = token * (num_kv_heads * GROUP) + q_head
    norm = tl.where(l_i > 0, 1.0 / tl.where(l_i > 0, l_i, 1.0), 0.0)
    for n in tl.static_range(NUM_GROUPS):
        target = out_ptr + out_row[:, None] * HEAD_DIM + (n * GROUP_SIZE + offs_d)[None, :]
        value = (acc[n] * norm[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(target, value, mask=mask_m[:, None])
    lse = tl.where(l_i > 0, (m_i + tl.log2(tl.where(l_i > 0, l_i, 1.0))) * LN2, float("-inf"))
    tl.store(lse_ptr + out_row, lse, mask=mask_m)


@triton.jit
def _merge_two_kernel(
    a_ptr,
    a_lse_ptr,
    b_ptr,
    b_lse_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Merge two partial attentions row by row; a partial without keys has lse -inf."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = rows < num_rows
    offs = rows[:, None].to(tl.int64) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    a_lse = tl.load(a_lse_ptr + rows, mask=mask, other=float("-inf"))
    b_lse = tl.load(b_lse_ptr + rows, mask=mask, other=float("-inf"))
    top = tl.maximum(a_lse, b_lse)
    top = tl.where(top == float("-inf"), 0.0, top)
    a_weight = tl.exp2((a_lse - top) * LOG2E)
    b_weight = tl.exp2((b_lse - top) * LOG2E)
    total = a_weight + b_weight
    norm = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    a = tl.load(a_ptr + offs, mask=mask[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask[:, None], other=0.0).to(tl.float32)
    merged = a * (a_weight * norm)[:, None] + b * (b_weight * norm)[:, None]
    tl.store(out_ptr + offs, merged.to(out_ptr.dtype.element_ty), mask=mask[:, None])
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)) * LN2, float("-inf"))
    tl.store(lse_ptr + rows, lse, mask=mask)


def launch_extend(
    q: torch.Tensor,
    k_rot: torch.Tensor,
    v_rot: torch.Tensor,
    qo_indptr: torch.Tensor,
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    sm_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_extend_len: int,
    has_prefix: bool,
    has_current: bool,
) -> None:
    """One launch over the prefix, the current chunk, or both."""
    head_dim = q.shape[2]
    num_kv_heads = packed.k_codes.shape[1]
    group = q.shape[1] // num_kv_heads
    batch = qo_indptr.shape[0] - 1
    wide = q.dtype.itemsize == 2 and head_dim <= 128
    block_m = 128 if wide and max_extend_len * group > 64 else 32
    block_n = 64 if wide else 32
    _extend_kernel[(triton.cdiv(max_extend_len * group, block_m), num_kv_heads, batch)](
        q,
        q.stride(0),
        q.stride(1),
        k_rot,
        v_rot,
        qo_indptr,
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
        out,
        lse,
        sm_scale,
        num_kv_heads,
        window.recent_tokens,
        SINKS=window.sink_tokens,
        GROUP=group,
        HEAD_DIM=head_dim,
        GROUP_SIZE=head_dim // packed.k_meta.shape[3],
        PAGE_SIZE=packed.page_size,
        HAS_PREFIX=has_prefix,
        HAS_CURRENT=has_current,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        DOT_DTYPE=dot_dtype(q.dtype),
        num_warps=8 if block_m == 128 else 4,
        num_stages=2,
    )


def launch_merge_two(
    a: torch.Tensor,
    a_lse: torch.Tensor,
    b: torch.Tensor,
    b_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge two attentions [num_tokens, num_q_heads, head_dim]; `out` may be one of them."""
    num_rows, head_dim = a.shape[0] * a.shape[1], a.shape[2]
    block_r = 16
    _merge_two_kernel[(triton.cdiv(num_rows, block_r),)](
        a,
        a_lse,
        b,
        b_lse,
        out,
        lse,
        num_rows,
        HEAD_DIM=head_dim,
        BLOCK_R=block_r,
        num_warps=4,
    )
