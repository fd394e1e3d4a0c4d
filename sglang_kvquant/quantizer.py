"""The 2-bit quantizer: its only definition, shared by serving, calibration and evaluation.

Storage equation: x ~ zero + scale * code with code in {0, 1, 2, 3}. Both numbers are fp16 and
codes are chosen against the rounded numbers, so what is stored is the nearest stored value.

All arithmetic is fp32 and uses only comparisons, subtractions, divisions and one addition, each
correctly rounded and none contractible into a fused multiply-add. A kernel that performs the same
operations is therefore bit-exact to this file on every device.

Steps, per head row:
  1. clip (percentile over the whole row, or max-scaling per group, or none);
  2. per group: zero = fp16(min), scale = fp16((max - min) / 3), both saturated to fp16's range;
  3. code = clamp(floor((x - zero) / scale + 0.5), 0, 3), and 0 where scale is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from .config import Clip

FP16_MAX = 65504.0
MAX_CODE = 3


class Quantized(NamedTuple):
    codes: torch.Tensor  # uint8 [..., head_dim], values 0 to 3
    scale: torch.Tensor  # fp16 [..., head_dim // group_size]
    zero: torch.Tensor  # fp16 [..., head_dim // group_size]


def percentile_index(ratio: float, head_dim: int) -> int:
    """Index into the ascending |row| whose value is OSCAR's clip threshold."""
    return min(int(ratio * head_dim), head_dim - 1)


def clip_threshold(x: torch.Tensor, clip: Clip) -> torch.Tensor:
    """Percentile threshold of each row: fp32 [..., head_dim] to [..., 1]."""
    head_dim = x.shape[-1]
    index = percentile_index(clip.ratio, head_dim)
    if x.device.type == "cpu":
        # Either way selects an element, exactly; on a CPU numpy is four times as fast.
        rows = np.partition(x.detach().abs().numpy(), index, axis=-1)
        return torch.from_numpy(rows[..., index : index + 1].copy())
    num_above = head_dim - index
    # The k-th largest is found from the top: num_above is 3 to 20, far fewer than head_dim.
    return x.abs().topk(num_above, dim=-1, sorted=True).values[..., -1:]


def clip_rows(x: torch.Tensor, clip: Clip, group_size: int) -> torch.Tensor:
    """Clamp rows as `clip` says: fp32 [..., head_dim] to the same shape."""
    if clip.kind == "none":
        return x
    if clip.kind == "percentile":
        threshold = clip_threshold(x, clip)  # [..., 1]
        return torch.maximum(torch.minimum(x, threshold), -threshold)
    groups = x.unflatten(-1, (-1, group_size))  # [..., num_groups, group_size]
    low = groups.amin(-1, keepdim=True) * clip.ratio  # [..., num_groups, 1]
    high = groups.amax(-1, keepdim=True) * clip.ratio
    return torch.maximum(torch.minimum(groups, high), low).flatten(-2)


def choose_qparams(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero of each group of clipped rows: fp32 [..., head_dim] to two fp16 tensors."""
    groups = x.unflatten(-1, (-1, group_size))  # [..., num_groups, group_size]
    low, high = groups.amin(-1), groups.amax(-1)  # [..., num_groups]
    # On CUDA, division by a Python number is a multiplication by its rounded reciprocal.
    three = torch.full_like(low, 3.0)
    scale = ((high - low) / three).clamp(max=FP16_MAX).to(torch.float16)
    zero = low.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)
    return scale, zero


def assign_codes(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Nearest code of every element; values outside the range saturate.

    Args:
        x: fp32 [..., head_dim].
        scale: fp16 [..., num_groups].
        zero: fp16 [..., num_groups].
        group_size: elements per group.

    Returns:
        uint8 [..., head_dim].
    """
    groups = x.unflatten(-1, (-1, group_size))  # [..., num_groups, group_size]
    step, low = scale.float().unsqueeze(-1), zero.float().unsqueeze(-1)  # [..., num_groups, 1]
    steps = (groups - low) / step.where(step > 0, 1.0)
    codes = torch.floor(steps + 0.5).clamp(0, MAX_CODE)
    return codes.where(step > 0, 0.0).to(torch.uint8).flatten(-2)


def quantize(x: torch.Tensor, clip: Clip, group_size: int) -> Quantized:
    """Quantize head rows that are already centred and rotated.

    Args:
        x: any float dtype, [..., head_dim]; computed in fp32.
        clip: clipping of the rows.
        group_size: elements per group; must divide head_dim.
    """
    clipped = clip_rows(x.float(), clip, group_size)
    scale, zero = choose_qparams(clipped, group_size)
    return Quantized(assign_codes(clipped, scale, zero, group_size), scale, zero)


def dequantize(q: Quantized, group_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """zero + scale * code, computed in `dtype`: [..., head_dim]."""
    codes = q.codes.to(dtype).unflatten(-1, (-1, group_size))  # [..., num_groups, group_size]
    return torch.addcmul(
        q.zero.to(dtype).unsqueeze(-1), q.scale.to(dtype).unsqueeze(-1), codes
    ).flatten(-2)


class _StraightThrough(torch.autograd.Function):
    """Quantize-dequantize whose gradient is that of the clamp (OptR, equation 18)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, clip: Clip, group_size: int) -> torch.Tensor:  # type: ignore[override]
        clipped = clip_rows(x.float(), clip, group_size)
        scale, zero = choose_qparams(clipped, group_size)
        codes = assign_codes(clipped, scale, zero, group_size)
        ctx.save_for_backward(clipped == x)
        return dequantize(Quantized(codes, scale, zero), group_size).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[override]
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None


def fake_quantize(x: torch.Tensor, clip: Clip, group_size: int) -> torch.Tensor:
    """dequantize(quantize(x)), differentiable by the straight-through estimator.

    The gradient passes unchanged inside the clip range and is zero outside. Shape and dtype of x.

    Source: OptR (arXiv 2608.02691), equation 18.
    """
    return _StraightThrough.apply(x, clip, group_size)
