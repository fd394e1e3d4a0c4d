"""Decode and extend attention over packed keys and values with BF16 windows."""

from __future__ import annotations

import itertools

import torch

from ..layout import PackedKV, ReadPlan, WindowKV, unpack_codes
from ..quantizer import Quantized, dequantize


def gather_kv(
    packed: PackedKV, window: WindowKV, plan: ReadPlan, request: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Effective keys and values of one request, in position order.

    Returns:
        Two tensors [num_kv_heads, kv_len, head_dim] in `dtype`, in the rotated frame.
    """
    kv_len = int(plan.kv_lens[request])
    position = torch.arange(kv_len, device=packed.k_codes.device)  # [kv_len]
    page = plan.page_table[request, position // packed.page_size].long()
    offset = position % packed.page_size
    k = _dequantize_rows(packed.k_codes, packed.k_meta, page, offset, dtype)
    v = _dequantize_rows(packed.v_codes, packed.v_meta, page, offset, dtype)
    ring = position[int(plan.ring_begin[request]) :]
    if window.recent_tokens and len(ring):
        row, column = int(plan.ring_row[request]), ring % window.recent_tokens
        k[:, ring] = window.ring_k[row][:, column].to(dtype)
        v[:, ring] = window.ring_v[row][:, column].to(dtype)
    group = plan.sink_group[request, :kv_len].long()  # [min(kv_len, sink_tokens)]
    sink = (group >= 0).nonzero().squeeze(-1)  # positions with a BF16 copy
    if len(sink):
        k[:, sink] = window.sink_k[group[sink], :, sink].transpose(0, 1).to(dtype)
        v[:, sink] = window.sink_v[group[sink], :, sink].transpose(0, 1).to(dtype)
    return k, v


def _dequantize_rows(
    codes: torch.Tensor,
    meta: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows = unpack_codes(codes[page, :, offset])  # [kv_len, num_kv_heads, head_dim]
    scale, zero = meta[page, :, offset].unbind(-1)  # [kv_len, num_kv_heads, num_groups]
    group_size = rows.shape[-1] // scale.shape[-1]
    return dequantize(Quantized(rows, scale, zero), group_size, dtype).transpose(0, 1).contiguous()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one request, query heads of a KV head adjacent.

    Args:
        q: [num_queries, num_q_heads, head_dim].
        k, v: [num_kv_heads, kv_len, head_dim].
        mask: bool [num_queries, kv_len], True where a query may look; None for everywhere.

    Returns:
        out [num_queries, num_q_heads, head_dim] and lse [num_queries, num_q_heads], natural log.
        A query without any key gives zeros and -inf.
    """
    num_kv_heads = k.shape[0]
    grouped = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, q, d]
    logits = (grouped @ k.unsqueeze(1).transpose(-1, -2)) * sm_scale  # [kv_heads, group, q, kv]
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)  # [kv_heads, group, q]
    weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    out = (weights @ v.unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)  # [q, q_heads, d]
    return out, lse.permute(2, 0, 1).flatten(1)


def decode(
    q: torch.Tensor,
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    sm_scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token per request over its whole cache, the current token included.

    Args:
        q: rotated queries, [batch, num_q_heads, head_dim].
        packed, window: buffers of the layer.
        plan: what each request reads.
        sm_scale: factor of the logits.
        dtype: arithmetic of the whole step; fp64 for an oracle.

    Returns:
        out [batch, num_q_heads, head_dim], in the frame of R_V, and lse [batch, num_q_heads].
    """
    outs, lses = [], []
    for request in range(q.shape[0]):
        k, v = gather_kv(packed, window, plan, request, dtype)
        out, lse = attend(q[request : request + 1].to(dtype), k, v, sm_scale)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def extend(
    q: torch.Tensor,
    k_rot: torch.Tensor,
    v_rot: torch.Tensor,
    qo_indptr: torch.Tensor,
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    sm_scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Several new tokens per request: causal over the new tokens, full over the cached prefix.

    Args:
        q: rotated queries, [num_tokens, num_q_heads, head_dim].
        k_rot, v_rot: rotated, unquantized keys and values of the new tokens,
            [num_tokens, num_kv_heads, head_dim].
        qo_indptr: int32 [batch + 1], first token of each request.
        packed, window, sm_scale, dtype: as in :func:`decode`.
        plan: kv_lens are the prefix lengths; the windows are those before this step's writes.

    Returns:
        out [num_tokens, num_q_heads, head_dim] and lse [num_tokens, num_q_heads].
    """
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    bounds = qo_indptr.tolist()
    for request, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin == end:
            continue
        k_old, v_old = gather_kv(packed, window, plan, request, dtype)
        k = torch.cat([k_old, k_rot[begin:end].to(dtype).transpose(0, 1)], dim=1)
        v = torch.cat([v_old, v_rot[begin:end].to(dtype).transpose(0, 1)], dim=1)
        num_new, prefix_len = end - begin, k_old.shape[1]
        causal = torch.ones(num_new, prefix_len + num_new, dtype=torch.bool, device=q.device)
        causal = causal.tril(diagonal=prefix_len)  # [num_new, prefix_len + num_new]
        out[begin:end], lse[begin:end] = attend(q[begin:end].to(dtype), k, v, sm_scale, causal)
    return out, lse
