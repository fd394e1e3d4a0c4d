"""Rotate queries into the frame of the stored keys: q' = q R_K of the query head's KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .write import dot_dtype, rotation_stride


@triton.jit
def _rotate_query_kernel(
    q_ptr,
    stride_q_token,
    stride_q_head,
    rotation_ptr,
    stride_r_head,
    out_ptr,
    num_rows,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Grid (row blocks, KV heads, column blocks); rows are (token, query head of the KV head)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = (rows < num_rows)[:, None]
    offs_n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (rows // GROUP).to(tl.int64)
    q_head = head * GROUP + rows % GROUP
    q_rows = q_ptr + (token * stride_q_token + q_head * stride_q_head)[:, None]
    acc = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for start in tl.static_range(0, HEAD_DIM, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        q = tl.load(q_rows + offs_k[None, :], mask=mask_r, other=0.0)
        rotation = tl.load(
            rotation_ptr + head * stride_r_head + offs_k[:, None] * HEAD_DIM + offs_n[None, :]
        )
        acc = tl.dot(q.to(DOT_DTYPE), rotation.to(DOT_DTYPE), acc=acc, input_precision="ieee")
    out_row = token * (num_kv_heads * GROUP) + q_head
    out = out_ptr + out_row[:, None] * HEAD_DIM + offs_n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask_r)


def rotate_query(
    q: torch.Tensor,
    rotation: torch.Tensor | None,
    num_kv_heads: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries head by head, as :func:`sglang_kvquant.rotation.rotate_heads` does.

    Args:
        q: bf16, fp16 or fp32 [num_tokens, num_q_heads, head_dim]; token and head may be strided.
        rotation: [num_kv_heads, head_dim, head_dim] or [head_dim, head_dim], fp32 or the dtype of
            q; None is the identity and returns q itself.
        num_kv_heads: divides num_q_heads; query heads of a KV head are adjacent.
        out: contiguous, shaped like q; receives the result instead of a new tensor.

    Returns:
        [num_tokens, num_q_heads, head_dim] in the dtype of q; fp32 accumulation.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are not a multiple of {num_kv_heads}")
    if q.stride(-1) != 1:
        raise ValueError("q must be contiguous in the last dimension")
    if rotation is None:
        return q if out is None else out.copy_(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    group = num_q_heads // num_kv_heads
    num_rows = num_tokens * group
    # A few rows cannot fill the GPU: columns are then spread over programs as well.
    block_r, block_n = (16, 32) if num_rows <= 512 else (64, head_dim)
    _rotate_query_kernel[(triton.cdiv(num_rows, block_r), num_kv_heads, head_dim // block_n)](
        q,
        q.stride(0),
        q.stride(1),
        rotation,
        rotation_stride(rotation, num_kv_heads, head_dim),
        out,
        num_rows,
        num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
        BLOCK_K=min(head_dim, 64),
        DOT_DTYPE=dot_dtype(q.dtype),
        num_warps=4,
    )
    return out
