"""Extend attention: several new tokens per request, causal in BF16, over a packed prefix.

The current chunk can be left to another kernel that returns its log-sum-exp (:mod:`.causal`); the
prefix is then merged with it, read by our own kernel from the packed bytes, or unpacked in pieces
for another one (:mod:`.long_prefix`). A batch without any prefix is the chunk's kernel alone.
"""

from __future__ import annotations

import torch

from ..layout import PackedKV, ReadPlan, WindowKV
from .causal import CausalAttention
from .extend_triton import launch_extend, launch_merge_two
from .long_prefix import LongPrefix, merge_long_prefix


def extend(
    q: torch.Tensor,
    k_rot: torch.Tensor,
    v_rot: torch.Tensor,
    qo_indptr: torch.Tensor,
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    sm_scale: float,
    *,
    max_extend_len: int | None = None,
    has_prefix: bool = True,
    causal: CausalAttention | None = None,
    prefix: LongPrefix | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Several new tokens per request: causal over the new tokens, full over the cached prefix.

    Args:
        q: rotated queries, bf16, fp16 or fp32 [num_tokens, num_q_heads, head_dim].
        k_rot, v_rot: rotated, unquantized keys and values of the new tokens, contiguous
            [num_tokens, num_kv_heads, head_dim].
        qo_indptr: int32 [batch + 1], first token of each request; the last entry is num_tokens.
        packed, window: buffers of the layer; the windows are those before this step's writes.
        plan: kv_lens are the prefix lengths, 0 for a request without one.
        sm_scale: factor of the logits.
        max_extend_len: longest run of new tokens, known on the host; num_tokens when not given,
            which launches more programs than needed.
        has_prefix: False when the caller knows that every prefix is empty.
        causal: attention of the current chunk; the built-in kernel when None.
        prefix: how to unpack the cached tokens for another kernel; needs causal. None reads the
            packed bytes.
        out: contiguous, shaped like q, in its dtype.
        lse: fp32 [num_tokens, num_q_heads], contiguous.

    Returns:
        out, in the frame of R_V and in the dtype of q, and lse (natural log, fp32).

    Raises:
        ValueError: shapes, strides or dtypes do not fit, or prefix without causal.
    """
    _check(q, k_rot, v_rot, qo_indptr, packed, plan)
    num_tokens, batch = q.shape[0], qo_indptr.shape[0] - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if num_tokens == 0 or batch == 0:
        return out, lse
    longest = num_tokens if max_extend_len is None else max_extend_len
    arguments = (q, k_rot, v_rot, qo_indptr, packed, window, plan, sm_scale)
    if causal is None:
        if prefix is not None:
            raise ValueError("prefix is merged with the chunk's attention: pass causal as well")
        launch_extend(*arguments, out, lse, longest, has_prefix, True)
        return out, lse
    chunk, chunk_lse = causal(q, k_rot, v_rot)
    if not has_prefix:
        return chunk, chunk_lse
    if prefix is not None:
        out.copy_(chunk)
        lse.copy_(chunk_lse)
        merge_long_prefix(out, lse, q, packed, window, plan, prefix, sm_scale)
        return out, lse
    launch_extend(*arguments, out, lse, longest, True, False)
    launch_merge_two(out, lse, chunk, chunk_lse.contiguous(), out, lse)
    return out, lse


def _check(
    q: torch.Tensor,
    k_rot: torch.Tensor,
    v_rot: torch.Tensor,
    qo_indptr: torch.Tensor,
    packed: PackedKV,
    plan: ReadPlan,
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = packed.k_codes.shape[1]
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are not a multiple of {num_kv_heads}")
    if packed.k_codes.shape[3] * 4 != head_dim:
        raise ValueError(f"q has head_dim {head_dim}, cache {packed.k_codes.shape[3] * 4}")
    for name, tensor in (("k_rot", k_rot), ("v_rot", v_rot)):
        if tensor.shape != (num_tokens, num_kv_heads, head_dim) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous [{num_tokens}, {num_kv_heads}, {head_dim}], "
                f"got {tuple(tensor.shape)}"
            )
    if q.stride(-1) != 1 or plan.page_table.stride(-1) != 1:
        raise ValueError("q and page_table must be contiguous in the last dimension")
    batch = qo_indptr.shape[0] - 1
    if qo_indptr.dtype != torch.int32 or plan.kv_lens.shape[0] < batch:
        raise ValueError(f"qo_indptr must be int32 and the plan must have {batch} rows")
    if not plan.sink_group[:batch].is_contiguous():
        raise ValueError("sink_group must be contiguous")
