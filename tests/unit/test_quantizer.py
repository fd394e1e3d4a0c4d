"""The quantizer against an independent numpy version, its error bounds and its gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvquant.config import NO_CLIP, OSCAR_K_CLIP, OSCAR_V_CLIP, Clip
from sglang_kvquant.quantizer import (
    FP16_MAX,
    clip_rows,
    clip_threshold,
    dequantize,
    fake_quantize,
    percentile_index,
    quantize,
)

CLIPS = [NO_CLIP, OSCAR_K_CLIP, OSCAR_V_CLIP, Clip("maxscale", 0.8)]
SHAPES = [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (256, 32), (256, 64), (256, 128)]


def numpy_quantize(row: np.ndarray, clip: Clip, group_size: int):
    """One row, element by element, in float32: (codes, scales, zeros)."""
    row = row.astype(np.float32)
    groups = row.reshape(-1, group_size).copy()
    if clip.kind == "percentile":
        threshold = np.sort(np.abs(row))[math.floor(clip.ratio * len(row))]
        groups = np.clip(groups, -threshold, threshold)
    codes, scales, zeros = [], [], []
    for group in groups:
        if clip.kind == "maxscale":
            ratio = np.float32(clip.ratio)
            group = np.clip(group, group.min() * ratio, group.max() * ratio)
        low, high = group.min(), group.max()
        scale = np.float16(min((high - low) / np.float32(3), np.float32(FP16_MAX)))
        zero = np.float16(np.clip(low, -FP16_MAX, FP16_MAX))
        for x in group:
            steps = (x - np.float32(zero)) / np.float32(scale) if scale > 0 else np.float32(-0.5)
            codes.append(int(min(max(np.floor(steps + np.float32(0.5)), 0), 3)))
        scales.append(scale)
        zeros.append(zero)
    return codes, scales, zeros


def rows_of(kind: str, head_dim: int, num_rows: int = 6) -> torch.Tensor:
    x = torch.randn(num_rows, head_dim)
    if kind == "offset":
        return x + 40.0
    if kind == "outlier":
        x[:, 7] = 90.0
        return x
    if kind == "constant":
        return torch.full_like(x, 0.3337)
    if kind == "zero":
        return torch.zeros_like(x)
    if kind == "tiny":
        return x * 1e-8
    if kind == "large":
        return x * 1e4
    if kind == "few values":
        return x.round()
    return x


@pytest.mark.parametrize(
    "kind",
    ["gaussian", "offset", "outlier", "constant", "zero", "tiny", "large", "few values"],
)
@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 32), (128, 128), (256, 64)])
def test_equals_the_numpy_version_bit_for_bit(kind, clip, head_dim, group_size):
    x = rows_of(kind, head_dim)
    q = quantize(x, clip, group_size)
    for row, codes, scale, zero in zip(x, *q, strict=True):
        expected = numpy_quantize(row.numpy(), clip, group_size)
        assert codes.tolist() == expected[0]
        assert scale.numpy().tobytes() == np.array(expected[1]).tobytes()
        # 0.0 and -0.0 are one number here: which of two equal minima is taken is not specified.
        assert zero.tolist() == [float(z) for z in expected[2]]


def test_literal_example():
    x = torch.tensor([0.0, 0.4, 0.6, 1.4, 1.5, 2.4, 2.6, 3.0]).repeat(8)
    q = quantize(x, NO_CLIP, 64)
    assert (float(q.zero), float(q.scale)) == (0.0, 1.0)
    assert q.codes[:8].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # halves round up
    assert dequantize(q, 64)[:8].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("head_dim", "group_size"), SHAPES)
def test_shapes_and_dtypes(head_dim, group_size):
    q = quantize(torch.randn(3, 2, head_dim).bfloat16(), OSCAR_K_CLIP, group_size)
    assert (q.codes.shape, q.codes.dtype) == ((3, 2, head_dim), torch.uint8)
    for meta in (q.scale, q.zero):
        assert (meta.shape, meta.dtype) == ((3, 2, head_dim // group_size), torch.float16)
    assert int(q.codes.max()) <= 3


def rounding(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """Bound of what fp16 costs at either end of a group: fp64 [..., num_groups, 1]."""
    groups = x.double().unflatten(-1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    return 2.0**-11 * (low.abs() + (high - low)) + 4 * 2.0**-25


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.floats(-1e3, 1e3),
    st.floats(1e-6, 1e3),
    st.sampled_from(SHAPES),
)
def test_error_is_at_most_half_a_step_plus_rounding(seed, offset, spread, shape):
    head_dim, group_size = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, head_dim, generator=generator) * spread + offset
    q = quantize(x, NO_CLIP, group_size)
    error = (dequantize(q, group_size, torch.float64) - x.double()).abs()
    step = q.scale.double().unsqueeze(-1)
    slack = 1e-6 * x.abs().max().double()  # fp32 arithmetic of the codes
    bound = step / 2 + rounding(x, group_size) + slack
    assert bool((error.unflatten(-1, (-1, group_size)) <= bound).all())


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES))
def test_no_other_code_is_nearer(seed, shape):
    head_dim, group_size = shape
    x = torch.randn(4, head_dim, generator=torch.Generator().manual_seed(seed))
    q = quantize(x, NO_CLIP, group_size)
    groups = x.double().unflatten(-1, (-1, group_size)).unsqueeze(-1)  # [4, groups, size, 1]
    levels = q.zero.double()[..., None, None] + q.scale.double()[..., None, None] * torch.arange(4)
    distance = (groups - levels).abs()
    chosen = distance.gather(-1, q.codes.long().unflatten(-1, (-1, group_size)).unsqueeze(-1))
    assert bool((chosen.squeeze(-1) <= distance.amin(-1) + 1e-6).all())


def test_error_has_no_bias():
    x = torch.rand(20_000, 64) * 6 - 3
    error = dequantize(quantize(x, NO_CLIP, 64), 64).double() - x.double()
    assert abs(float(error.mean())) < 4 * float(error.std()) / error.numel() ** 0.5


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("value", [1e5, 1e30, 3e38])
def test_huge_values_saturate_and_stay_finite(clip, value):
    x = torch.randn(4, 128).sign() * value
    x[0] = value
    x[1] = -value
    q = quantize(x, clip, 64)
    for meta in (q.scale, q.zero):
        assert bool(meta.isfinite().all())
        assert float(meta.abs().max()) <= FP16_MAX
    assert bool(dequantize(q, 64).isfinite().all())
    # All far above the range read as the top level, all far below as the bottom one.
    assert bool((dequantize(q, 64)[2:].sign() == x[2:].sign()).all())


def test_largest_fp16_is_reached_without_overflow():
    x = torch.zeros(64)
    x[0] = FP16_MAX
    q = quantize(x, NO_CLIP, 64)
    assert abs(float(dequantize(q, 64)[0]) - FP16_MAX) <= 3 * 16  # three steps of half an ulp


@pytest.mark.parametrize("value", [0.0, 1.0, -0.3337, 1e-9, 65504.0])
def test_constant_row_is_its_fp16_value(value):
    x = torch.full((64,), value)
    q = quantize(x, NO_CLIP, 32)
    assert not q.scale.any()
    assert not q.codes.any()
    assert torch.equal(dequantize(q, 32), x.half().float())


def test_range_below_the_smallest_fp16_reads_as_the_minimum():
    x = torch.full((64,), 0.25)
    x[1] += 2.0**-24
    q = quantize(x, NO_CLIP, 64)
    assert not q.codes.any()
    assert bool((dequantize(q, 64) == 0.25).all())


def test_single_outlier_is_contained_by_the_percentile():
    x = torch.randn(8, 128)
    calm = (dequantize(quantize(x, OSCAR_K_CLIP, 128), 128) - x)[:, 1:].square().mean()
    x[:, 0] = 1000.0
    clipped = (dequantize(quantize(x, OSCAR_K_CLIP, 128), 128) - x)[:, 1:].square().mean()
    free = (dequantize(quantize(x, NO_CLIP, 128), 128) - x)[:, 1:].square().mean()
    assert clipped < 1.5 * calm
    assert free > 2 * calm


@pytest.mark.parametrize(
    ("ratio", "head_dim", "index", "num_clipped"),
    [
        (0.96, 64, 61, 2),
        (0.92, 64, 58, 5),
        (0.96, 128, 122, 5),
        (0.92, 128, 117, 10),
        (0.96, 256, 245, 10),
        (0.92, 256, 235, 20),
        (0.999, 64, 63, 0),
        (0.001, 64, 0, 63),
    ],
)
def test_percentile_clips_an_exact_number_of_elements(ratio, head_dim, index, num_clipped):
    assert percentile_index(ratio, head_dim) == index
    x = torch.randn(50, head_dim)
    clip = Clip("percentile", ratio)
    expected = x.abs().sort(dim=-1).values[:, index]
    assert torch.equal(clip_threshold(x, clip).squeeze(-1), expected)
    changed = (clip_rows(x, clip, 32) != x).sum(-1)
    assert changed.tolist() == [num_clipped] * 50


def test_percentile_is_of_the_whole_row_not_of_a_group():
    x = torch.cat([torch.randn(4, 64), 0.01 * torch.randn(4, 64)], dim=-1)
    changed = clip_rows(x, OSCAR_V_CLIP, 64) != x
    assert bool(changed[:, :64].sum() == 40)
    assert not changed[:, 64:].any()


def test_maxscale_shrinks_each_group():
    x = torch.randn(4, 128)
    groups = clip_rows(x, Clip("maxscale", 0.5), 32).unflatten(-1, (-1, 32))
    before = x.unflatten(-1, (-1, 32))
    assert torch.equal(groups.amax(-1), before.amax(-1) * 0.5)
    assert torch.equal(groups.amin(-1), before.amin(-1) * 0.5)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_straight_through_gradient_is_the_clamps(clip):
    x = torch.randn(5, 3, 128, requires_grad=True)
    upstream = torch.randn(5, 3, 128)
    out = fake_quantize(x, clip, 64)
    assert torch.equal(out.detach(), dequantize(quantize(x.detach(), clip, 64), 64))
    (gradient,) = torch.autograd.grad(out, x, upstream)

    if clip.kind == "none":
        low, high = torch.tensor(-math.inf), torch.tensor(math.inf)
    elif clip.kind == "percentile":
        high = clip_threshold(x.detach(), clip)
        low = -high
    else:
        groups = x.detach().unflatten(-1, (-1, 64))
        high = (groups.amax(-1) * clip.ratio).repeat_interleave(64, dim=-1)
        low = (groups.amin(-1) * clip.ratio).repeat_interleave(64, dim=-1)
    (expected,) = torch.autograd.grad(torch.clamp(x, low, high), x, upstream)
    assert torch.equal(gradient, expected)
    if clip.kind == "percentile":
        assert int((gradient == 0).sum()) == 15 * (127 - percentile_index(clip.ratio, 128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fake_quantize_keeps_the_dtype(dtype):
    x = torch.randn(2, 64, dtype=dtype)
    out = fake_quantize(x, NO_CLIP, 64)
    assert out.dtype == dtype
    assert torch.equal(out, dequantize(quantize(x, NO_CLIP, 64), 64).to(dtype))


def test_rows_do_not_depend_on_their_neighbours():
    x = torch.randn(9, 4, 128)
    whole = quantize(x, OSCAR_K_CLIP, 64)
    one = quantize(x[5:6, 2:3].contiguous(), OSCAR_K_CLIP, 64)
    for a, b in zip(whole, one, strict=True):
        assert torch.equal(a[5:6, 2:3], b)
