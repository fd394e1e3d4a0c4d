"""What every architecture shares: finding attention layers, folding R_V, checking the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvquant.rotation import fold_output_weight, fold_value_weight, per_head

MAX_SKEW = 0.05
"""Relative output error accepted from a rotation that is orthogonal up to BF16 rounding."""

PROBE_ROWS = 16
"""Random inputs on which a folded layer is compared with the original one."""


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """The modules of one attention layer on one rank.

    Attributes:
        layer_id: global id of the layer.
        attn: SGLang's RadixAttention.
        qkv_proj: fused projection, output rows q, k, v.
        o_proj: output projection, columns by query head.
    """

    layer_id: int
    attn: Any
    qkv_proj: Any
    o_proj: Any

    @property
    def num_q_heads(self) -> int:
        return self.attn.tp_q_head_num

    @property
    def num_kv_heads(self) -> int:
        return self.attn.tp_k_head_num

    @property
    def head_dim(self) -> int:
        return self.attn.head_dim

    @property
    def device(self) -> torch.device:
        return next(self.qkv_proj.parameters()).device

    @property
    def value_rows(self) -> slice:
        """Rows of the fused projection that produce v."""
        begin = (self.num_q_heads + self.num_kv_heads) * self.head_dim
        return slice(begin, begin + self.num_kv_heads * self.head_dim)


class ModelPatch:
    """How one architecture is patched. A subclass names the class of its attention layers."""

    architecture: str

    def attention_class(self) -> type:
        """SGLang's attention module of this architecture."""
        raise NotImplementedError

    def attention_parts(self, model: torch.nn.Module) -> list[AttentionPart]:
        """Attention layers of this rank in layer order.

        Raises:
            ValueError: no such layer, one of another shape, or one that this backend cannot serve.
        """
        parts = [
            AttentionPart(module.attn.layer_id, module.attn, module.qkv_proj, module.o_proj)
            for module in model.modules()
            if isinstance(module, self.attention_class())
        ]
        if not parts:
            raise ValueError(f"{type(model).__name__} has no attention layer that is known here")
        for part in parts:
            check_attention(part, parts[0])
        return sorted(parts, key=lambda part: part.layer_id)


def check_attention(part: AttentionPart, first: AttentionPart) -> None:
    """Raise ValueError for attention that the packed cache does not implement."""
    attn, where = part.attn, f"layer {part.layer_id}"
    shape = (part.num_q_heads, part.num_kv_heads, part.head_dim)
    if shape != (first.num_q_heads, first.num_kv_heads, first.head_dim):
        raise ValueError(f"{where} has other heads than layer {first.layer_id}")
    if attn.v_head_dim != part.head_dim or attn.tp_v_head_num != part.num_kv_heads:
        raise ValueError(f"{where} has values of another shape than its keys")
    if attn.sliding_window_size is not None and attn.sliding_window_size > 0:
        raise ValueError(f"{where} has a sliding window, which --kv-quant does not serve")
    if attn.logit_cap:
        raise ValueError(f"{where} caps its logits, which --kv-quant does not serve")
    if attn.is_cross_attention or attn.attn_type.value != "decoder":
        raise ValueError(f"{where} is not causal self-attention")


def slice_heads(
    rotation: torch.Tensor | None, heads: slice, num_kv_heads: int, device: torch.device
) -> torch.Tensor | None:
    """Rotation of each KV head of a rank: fp32 [num_kv_heads, head_dim, head_dim].

    Args:
        rotation: of all KV heads of the model, or one shared by them, or None.
        heads: global KV heads of the rank.
        num_kv_heads: their number.
        device: of the result.
    """
    if rotation is None:
        return None
    if rotation.dim() == 3:
        if heads.stop > rotation.shape[0]:
            raise ValueError(f"rotations of {rotation.shape[0]} heads, rank needs {heads}")
        rotation = rotation[heads]
    return per_head(rotation, num_kv_heads).float().to(device).contiguous()


@torch.no_grad()
def fold_value_rotation(part: AttentionPart, rotation: torch.Tensor) -> None:
    """Make a layer produce v R_V and consume attention outputs in that frame.

    W_v and its bias become R_V^T W_v, W_o becomes W_o R_V, in fp64 (OptR, equation 29).

    Args:
        part: a layer with unquantized linear layers, changed in place.
        rotation: [num_kv_heads, head_dim, head_dim] of this rank.

    Raises:
        RuntimeError: the layer's output is not what it was, beyond the rounding of its dtype.
    """
    probe = torch.randn(
        PROBE_ROWS,
        part.qkv_proj.weight.shape[1],
        generator=torch.Generator().manual_seed(part.layer_id),
        dtype=torch.float64,
    ).to(part.device)
    before = value_path(part, probe)
    for tensor in (part.qkv_proj.weight, getattr(part.qkv_proj, "bias", None)):
        if tensor is not None:
            rows = tensor.data[part.value_rows]
            rows.copy_(fold_value_weight(rows, rotation))
    part.o_proj.weight.data.copy_(fold_output_weight(part.o_proj.weight.data, rotation))
    after = value_path(part, probe)
    error = float((after - before).norm() / before.norm().clamp(min=1e-30))
    allowed = fold_tolerance(part.qkv_proj.weight.dtype, rotation)
    if not error <= allowed:
        raise RuntimeError(
            f"folding the value rotation changed the output of layer {part.layer_id} by "
            f"{error:.1e} of its norm ({allowed:.1e} is rounding); the rotation in the checkpoint "
            "is not orthogonal or the layer is laid out in a way that is not known here."
        )


def value_path(part: AttentionPart, x: torch.Tensor) -> torch.Tensor:
    """Output of a layer whose every query attends to its own token: o_proj(expand(v_proj(x))).

    Args:
        part: the layer.
        x: fp64 [num_tokens, hidden_size].

    Returns:
        fp64 [num_tokens, hidden_size], without the output bias and before the sum over ranks.
    """
    v = x @ part.qkv_proj.weight[part.value_rows].double().T
    bias = getattr(part.qkv_proj, "bias", None)
    if bias is not None:
        v = v + bias[part.value_rows].double()
    heads = v.unflatten(1, (part.num_kv_heads, part.head_dim))  # [tokens, kv_heads, head_dim]
    group = part.num_q_heads // part.num_kv_heads
    out = heads.repeat_interleave(group, dim=1).flatten(1)  # [tokens, q_heads * head_dim]
    return out @ part.o_proj.weight.double().T


def fold_tolerance(dtype: torch.dtype, rotation: torch.Tensor) -> float:
    """Relative error that rounding both weights once can cause, and up to MAX_SKEW more for a
    rotation that was itself rounded (OSCAR's files hold BF16 values)."""
    r = rotation.double()
    eye = torch.eye(r.shape[-1], dtype=torch.float64, device=r.device)
    excess = torch.linalg.matrix_norm(r @ r.transpose(-1, -2) - eye, ord=2).max()
    return 4 * torch.finfo(dtype).eps + min(2 * float(excess), MAX_SKEW) + 1e-7
