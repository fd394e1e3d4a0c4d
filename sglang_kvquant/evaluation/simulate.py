"""What the server computes, inside a transformers model.

Keys and values of every layer go through the code that serves them (reference.write.rotate_kv,
quantizer.quantize) and every query reads each position as the decode kernels would: from its
unquantized copy inside the windows, from its 2-bit codes elsewhere. Errors propagate from layer
to layer, because each layer's keys and values come from the hidden states of the quantized model.

A query at position t reads key s from the unquantized copy exactly when

    s < sink_tokens   or   s >= t + 1 - recent_tokens   or   t < prefill_len.

The last term is a cold request's prompt, which attends to itself before anything is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..calibration.capture import attention_override
from ..config import Clip, WindowConfig
from ..quantizer import dequantize, quantize
from ..reference.write import LayerTransform, rotate_kv
from ..rotation import rotate_heads

QUERY_CHUNK = 256
"""Queries per step: bounds the logits to QUERY_CHUNK x sequence length per head."""

LayerAttention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(layer_id, q [batch, num_q_heads, num_tokens, head_dim], k, v [batch, num_kv_heads, …],
sm_scale) to the attention output, shaped like q."""


@dataclass(frozen=True, slots=True)
class ReadRule:
    """Which positions a query reads unquantized, and what such a copy looks like.

    Attributes:
        windows: sink and recent tokens.
        prefill_len: queries before this position read everything unquantized, as the prompt of a
            cold request does; 0 makes every query read as a decode step.
        window_dtype: dtype of the window copies, in the rotated frame: the server's model dtype.
        identity_quantizer: leave values as they are where the server would quantize them. The
            result must equal the plain model's; a check of the rotations, not a method.
    """

    windows: WindowConfig
    prefill_len: int = 0
    window_dtype: torch.dtype = torch.float32
    identity_quantizer: bool = False


@dataclass(frozen=True, slots=True)
class _Rows:
    """Both forms of a batch's keys and values; sequences and KV heads share the first axis."""

    k_exact: torch.Tensor  # fp32 [batch * num_kv_heads, num_tokens, head_dim]
    v_exact: torch.Tensor  # likewise
    k_packed: torch.Tensor  # likewise, dequantized
    v_packed: torch.Tensor  # likewise, dequantized


def simulated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    transform: LayerTransform,
    rule: ReadRule,
    sm_scale: float,
) -> torch.Tensor:
    """Causal attention of whole sequences over a quantized cache.

    Args:
        q: post-RoPE queries, [batch, num_q_heads, num_tokens, head_dim], any float dtype.
        k: post-RoPE keys, [batch, num_kv_heads, num_tokens, head_dim].
        v: values, shaped like k.
        transform: rotations, mean and quantizer of the layer, R_V not folded.
        rule: which positions are read unquantized.
        sm_scale: factor of the logits.

    Returns:
        fp32, shaped like q, in the frame of v.
    """
    batch, num_q_heads, num_tokens, head_dim = q.shape
    rows = _encode(k, v, transform, rule)
    tokens = q.float().permute(0, 2, 1, 3).reshape(-1, num_q_heads, head_dim)
    if transform.k_rotation is not None:
        tokens = rotate_heads(tokens, transform.k_rotation)
    num_heads = batch * k.shape[1]  # sequences join the head axis
    queries = (
        tokens.unflatten(0, (batch, num_tokens))
        .transpose(1, 2)
        .reshape(num_heads, -1, *q.shape[2:])
    )
    out = torch.empty_like(queries)  # [batch * num_kv_heads, group, num_tokens, head_dim]
    for begin, end in query_chunks(num_tokens, rule.prefill_len):
        keys, values, mask = _columns(rows, begin, end, rule)
        out[:, :, begin:end] = _attend(queries[:, :, begin:end], keys, values, mask, sm_scale)
    out = out.view(batch, num_q_heads, num_tokens, head_dim).transpose(1, 2)
    if transform.v_rotation is not None:
        back = transform.v_rotation.transpose(-1, -2).contiguous()
        flat = out.reshape(-1, num_q_heads, head_dim)
        out = rotate_heads(flat, back).unflatten(0, (batch, num_tokens))
    return out.transpose(1, 2)  # [batch, num_q_heads, num_tokens, head_dim]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """Softmax attention; the query heads of a KV head are rows of one problem, so that torch's
    fused kernel reads each key once.

    Args:
        q: [num_kv_heads, group, num_queries, head_dim].
        k, v: [num_kv_heads, num_columns, head_dim].
        mask: bool [num_queries, num_columns]; every query has a column.
    """
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.flatten(1, 2).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask.repeat(q.shape[1], 1),
        scale=sm_scale,
    )
    return attended.view(q.shape)


def query_chunks(num_tokens: int, prefill_len: int = 0) -> Iterator[tuple[int, int]]:
    """Ranges of at most QUERY_CHUNK queries, none on both sides of prefill_len."""
    begin = 0
    while begin < num_tokens:
        end = min(begin + QUERY_CHUNK, num_tokens)
        if begin < prefill_len < end:
            end = prefill_len
        yield begin, end
        begin = end


def _encode(k: torch.Tensor, v: torch.Tensor, transform: LayerTransform, rule: ReadRule) -> _Rows:
    """Rotate, quantize and dequantize the rows of a batch with the server's code."""
    batch, num_kv_heads, num_tokens, head_dim = k.shape

    def by_token(x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 1, 3).reshape(-1, num_kv_heads, head_dim)

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (batch, num_tokens)).transpose(1, 2).flatten(0, 1)

    def packed(x: torch.Tensor, clip: Clip) -> torch.Tensor:
        if rule.identity_quantizer:
            return x
        group_size = transform.quantizer.group_size
        return dequantize(quantize(x, clip, group_size), group_size)

    def window(x: torch.Tensor) -> torch.Tensor:
        return x.to(rule.window_dtype).float()

    k_rot, v_rot = rotate_kv(by_token(k), by_token(v), transform)
    return _Rows(
        by_head(window(k_rot)),
        by_head(window(v_rot)),
        by_head(packed(k_rot, transform.quantizer.k_clip)),
        by_head(packed(v_rot, transform.quantizer.v_clip)),
    )


def _columns(
    rows: _Rows, begin: int, end: int, rule: ReadRule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and mask of the queries [begin, end).

    Columns are the sinks, then the packed positions that some query of the chunk may read, then
    the unquantized positions that some query may read. A position appears in both of the last
    two when it leaves the window within the chunk; the mask gives every query one of them.
    """
    device = rows.k_exact.device
    t = torch.arange(begin, end, device=device).unsqueeze(1)  # [num_queries, 1]
    recent, sinks = rule.windows.recent_tokens, min(rule.windows.sink_tokens, end)
    if begin < rule.prefill_len:
        recent, sinks = end, 0
    packed = slice(sinks, max(sinks, end - recent))
    exact = slice(max(sinks, begin + 1 - recent), end)
    position = torch.arange(end, device=device).unsqueeze(0)  # [1, end]
    in_window = position >= t + 1 - recent  # [num_queries, end]
    causal = position <= t  # [num_queries, end]
    mask = torch.cat(
        [
            causal[:, :sinks],
            ~in_window[:, packed],
            (in_window & causal)[:, exact],
        ],
        dim=1,
    )
    keys = [rows.k_exact[:, :sinks], rows.k_packed[:, packed], rows.k_exact[:, exact]]
    values = [rows.v_exact[:, :sinks], rows.v_packed[:, packed], rows.v_exact[:, exact]]
    return torch.cat(keys, dim=1), torch.cat(values, dim=1), mask


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """Causal attention without quantization; shapes and dtype as :func:`simulated_attention`'s."""
    grouped = k.shape[1] != q.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=sm_scale, enable_gqa=grouped
    )


def quantized_layers(transforms: Mapping[int, LayerTransform], rule: ReadRule) -> LayerAttention:
    """A layer attention that simulates the server in every layer."""

    def attention(
        layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        return simulated_attention(q, k, v, transforms[layer_id], rule, sm_scale).to(q.dtype)

    return attention


@contextmanager
def replaced_attention(model: Any, attention: LayerAttention) -> Iterator[None]:
    """Run `attention` in place of the attention of every layer of a transformers model.

    Sequences must start at position 0, have no padding and no cache.

    Raises (when the model runs):
        ValueError: the sequences are longer than a layer's sliding window, or a cache is used.
    """

    def forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None or key.shape[2] != query.shape[2]:
            raise ValueError(
                f"layer {module.layer_idx} does not attend to exactly the earlier tokens of its "
                "sequence (a sliding window, padding or a cache), which is not simulated; use a "
                "model with full attention, or sequences shorter than its window."
            )
        sm_scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = attention(module.layer_idx, query, key, value, sm_scale)
        return out.transpose(1, 2).contiguous(), None

    with attention_override(model, forward):
        yield
