"""Write step: centre, rotate, quantize, pack, scatter to slots and to the BF16 windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import Clip, QuantizerConfig
from ..layout import PackedKV, WindowKV, pack_codes
from ..quantizer import quantize
from ..rotation import rotate_heads, rotated_mean


@dataclass(frozen=True, slots=True)
class LayerTransform:
    """What happens to one layer's keys and values before they are stored.

    Attributes:
        k_rotation: fp32 [num_kv_heads, head_dim, head_dim], or None for the identity.
        k_offset: fp32 [num_kv_heads, head_dim], the rotated mean (mean @ R_K); None for no mean.
        v_rotation: like k_rotation; None also when R_V is folded into the weights.
        quantizer: group size and clips.
    """

    k_rotation: torch.Tensor | None
    k_offset: torch.Tensor | None
    v_rotation: torch.Tensor | None
    quantizer: QuantizerConfig

    @classmethod
    def build(
        cls,
        k_rotation: torch.Tensor | None,
        k_mean: torch.Tensor | None,
        v_rotation: torch.Tensor | None,
        quantizer: QuantizerConfig,
    ) -> LayerTransform:
        """Precompute the rotated mean in fp64; arguments as the attributes, k_mean un-rotated."""
        offset = k_mean
        if k_mean is not None and k_rotation is not None:
            offset = rotated_mean(k_mean.double(), k_rotation.double()).to(k_rotation.dtype)
        return cls(k_rotation, offset, v_rotation, quantizer)


def rotate_kv(
    k: torch.Tensor, v: torch.Tensor, transform: LayerTransform
) -> tuple[torch.Tensor, torch.Tensor]:
    """k' = k R_K - mean R_K and v' = v R_V, in fp32.

    Args:
        k: post-RoPE keys, [num_tokens, num_kv_heads, head_dim], any float dtype.
        v: values, same shape (already v R_V when R_V is folded into the weights).
    """
    k_rot = k.float()
    if transform.k_rotation is not None:
        k_rot = rotate_heads(k_rot, transform.k_rotation)
    if transform.k_offset is not None:
        k_rot = k_rot - transform.k_offset
    v_rot = v.float()
    if transform.v_rotation is not None:
        v_rot = rotate_heads(v_rot, transform.v_rotation)
    return k_rot, v_rot


def write_packed(
    packed: PackedKV,
    k_rot: torch.Tensor,
    v_rot: torch.Tensor,
    quantizer: QuantizerConfig,
    out_cache_loc: torch.Tensor,
) -> None:
    """Quantize rotated rows into their slots.

    Args:
        packed: buffers of the layer, written in place.
        k_rot: fp32 [num_tokens, num_kv_heads, head_dim].
        v_rot: likewise.
        quantizer: group size and clips.
        out_cache_loc: int64 [num_tokens], slots; repeated slots (the dummy slot 0) may be
            written in any order.
    """
    page, offset = out_cache_loc // packed.page_size, out_cache_loc % packed.page_size
    sides: tuple[tuple[torch.Tensor, Clip, torch.Tensor, torch.Tensor], ...] = (
        (k_rot, quantizer.k_clip, packed.k_codes, packed.k_meta),
        (v_rot, quantizer.v_clip, packed.v_codes, packed.v_meta),
    )
    for rows, clip, codes, meta in sides:
        q = quantize(rows, clip, quantizer.group_size)
        codes[page, :, offset] = pack_codes(q.codes)
        meta[page, :, offset] = torch.stack([q.scale, q.zero], dim=-1)


def write_window(
    buffer_k: torch.Tensor,
    buffer_v: torch.Tensor,
    k_rot: torch.Tensor,
    v_rot: torch.Tensor,
    index: torch.Tensor,
) -> None:
    """Copy rotated rows to a ring or to sink groups.

    Args:
        buffer_k: [num_rows, num_kv_heads, num_columns, head_dim], written in place.
        buffer_v: likewise.
        k_rot: [num_tokens, num_kv_heads, head_dim].
        v_rot: likewise.
        index: int64 [num_tokens], row * num_columns + column; negative means do not write.
    """
    num_columns = buffer_k.shape[2]
    if num_columns == 0:
        return
    keep = (index >= 0).nonzero().squeeze(-1)
    row, column = index[keep] // num_columns, index[keep] % num_columns
    buffer_k[row, :, column] = k_rot[keep].to(buffer_k.dtype)
    buffer_v[row, :, column] = v_rot[keep].to(buffer_v.dtype)


def write_kv(
    packed: PackedKV,
    window: WindowKV,
    k: torch.Tensor,
    v: torch.Tensor,
    transform: LayerTransform,
    out_cache_loc: torch.Tensor,
    ring_index: torch.Tensor | None,
    sink_index: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole write of one layer; returns k' and v' in fp32.

    Args:
        packed, window: buffers of the layer, written in place.
        k, v: [num_tokens, num_kv_heads, head_dim].
        transform: rotations, mean and quantizer of the layer.
        out_cache_loc: int64 [num_tokens], slots.
        ring_index: int64 [num_tokens] as in :func:`write_window`; None writes no ring. An extend
            step must read the old window first, so it passes None here and writes the ring after.
        sink_index: likewise for sink groups.
    """
    k_rot, v_rot = rotate_kv(k, v, transform)
    write_packed(packed, k_rot, v_rot, transform.quantizer, out_cache_loc)
    if ring_index is not None:
        write_window(window.ring_k, window.ring_v, k_rot, v_rot, ring_index)
    if sink_index is not None:
        write_window(window.sink_k, window.sink_v, k_rot, v_rot, sink_index)
    return k_rot, v_rot
