"""Rotations change nothing that a model computes, to fp64 accuracy; wrong ones do."""

from __future__ import annotations

import pytest
import torch

from sglang_kvquant.config import QuantizerConfig
from sglang_kvquant.reference.attention import attend
from sglang_kvquant.reference.write import LayerTransform, rotate_kv
from sglang_kvquant.rotation import (
    ORTHOGONALITY_TOLERANCE,
    fold_output_weight,
    fold_value_weight,
    hadamard,
    orthogonality_error,
    per_head,
    rotate_heads,
    rotated_mean,
    skew_exp,
)

GQA = [(4, 4), (4, 2), (8, 1), (9, 3)]  # query heads, KV heads


def random_rotation(*shape: int) -> torch.Tensor:
    return skew_exp(torch.randn(*shape, dtype=torch.float64))


def permuted(rotation: torch.Tensor) -> torch.Tensor:
    """Still orthogonal, but not the rotation that the other side was given."""
    return rotation.roll(1, dims=-1)


@pytest.mark.parametrize("n", [1, 2, 64, 128, 256])
def test_hadamard(n):
    matrix = hadamard(n)
    assert orthogonality_error(matrix) < 1e-13
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix.abs(), torch.full_like(matrix, 1 / n**0.5))
    assert bool((matrix[0] > 0).all())


def test_hadamard_signs_are_sylvesters():
    signs = (hadamard(4) * 2).int().tolist()
    assert signs == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


@pytest.mark.parametrize("n", [0, 3, 80, 96])
def test_hadamard_needs_a_power_of_two(n):
    with pytest.raises(ValueError, match="power of two"):
        hadamard(n)


def test_skew_exp_is_a_rotation_for_any_generator():
    rotation = skew_exp(10 * torch.randn(3, 64, 64, dtype=torch.float64))
    assert orthogonality_error(rotation) < 1e-11
    assert torch.allclose(torch.linalg.det(rotation), torch.ones(3, dtype=torch.float64))
    assert torch.equal(skew_exp(torch.zeros(8, 8)), torch.eye(8))


def test_orthogonality_error_finds_the_one_bad_matrix():
    rotations = random_rotation(3, 64, 64)
    assert orthogonality_error(rotations) < 1e-12
    rotations[2, 5] *= 1.01
    assert orthogonality_error(rotations) == pytest.approx(0.0201, rel=1e-6)


def test_tolerance_admits_bf16_casts_and_nothing_much_worse():
    for n in (64, 128, 256):
        cast = random_rotation(2, n, n).bfloat16()
        assert orthogonality_error(cast) < ORTHOGONALITY_TOLERANCE
    assert orthogonality_error(torch.eye(64) * 1.003) > ORTHOGONALITY_TOLERANCE


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), GQA)
def test_rotate_heads_takes_the_rotation_of_each_query_heads_kv_head(num_q_heads, num_kv_heads):
    x = torch.randn(5, num_q_heads, 64, dtype=torch.float64)
    rotation = random_rotation(num_kv_heads, 64, 64)
    out = rotate_heads(x, rotation)
    group = num_q_heads // num_kv_heads
    for head in range(num_q_heads):
        assert torch.allclose(out[:, head], x[:, head] @ rotation[head // group], atol=1e-12)
    shared = rotate_heads(x, rotation[0])
    assert torch.allclose(shared, rotate_heads(x, per_head(rotation[0], num_kv_heads)), atol=1e-12)


def test_head_counts_that_do_not_fit():
    with pytest.raises(ValueError, match="not a multiple"):
        rotate_heads(torch.randn(2, 5, 64), torch.randn(2, 64, 64))
    with pytest.raises(ValueError, match="expected 4"):
        per_head(torch.randn(2, 64, 64), 4)


def logits_of(q, k):
    """[num_q_heads, num_queries, num_keys], query heads of a KV head adjacent."""
    group = q.shape[1] // k.shape[1]
    return torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1))


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), GQA)
@pytest.mark.parametrize("shared", [False, True])
def test_rotated_centred_keys_keep_the_softmax(num_q_heads, num_kv_heads, shared):
    q = torch.randn(7, num_q_heads, 64, dtype=torch.float64)
    k = torch.randn(11, num_kv_heads, 64, dtype=torch.float64) + 3.0
    mean = k.mean(0)
    rotation = random_rotation(64, 64) if shared else random_rotation(num_kv_heads, 64, 64)
    centred = rotate_heads(k - mean, rotation)
    assert torch.allclose(
        centred, rotate_heads(k, rotation) - rotated_mean(mean, rotation), atol=1e-12
    )
    plain, rotated = logits_of(q, k), logits_of(rotate_heads(q, rotation), centred)
    common = logits_of(q, mean[None])  # the same for every key of a query
    assert torch.allclose(plain, rotated + common, atol=1e-11)
    assert torch.allclose(plain.softmax(-1), rotated.softmax(-1), atol=1e-11)
    wrong = logits_of(rotate_heads(q, permuted(rotation)), centred)
    assert not torch.allclose(plain.softmax(-1), wrong.softmax(-1), atol=1e-3)


def test_mixing_centred_and_plain_keys_changes_the_softmax():
    """Why windows hold centred keys too."""
    q = torch.randn(7, 2, 64, dtype=torch.float64)
    k = torch.randn(11, 2, 64, dtype=torch.float64) + 1.0
    mixed = torch.cat([k[:5], k[5:] - k.mean(0)])
    assert not torch.allclose(
        logits_of(q, k).softmax(-1), logits_of(q, mixed).softmax(-1), atol=1e-2
    )


def attention_block(x, weights, num_q_heads, num_kv_heads, head_dim, v_bias=None):
    """Whole attention of one sequence, without RoPE: [num_tokens, hidden_size]."""
    q, k, v = (x @ w.T for w in weights[:3])
    if v_bias is not None:
        v = v + v_bias
    q = q.unflatten(-1, (num_q_heads, head_dim))
    k, v = (t.unflatten(-1, (num_kv_heads, head_dim)).transpose(0, 1) for t in (k, v))
    causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    out, _ = attend(q, k, v, head_dim**-0.5, causal)
    return out.flatten(1) @ weights[3].T


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), GQA)
@pytest.mark.parametrize("bias", [False, True])
def test_folded_value_rotation_leaves_the_block_output_unchanged(num_q_heads, num_kv_heads, bias):
    head_dim, hidden = 64, 96
    shapes = [(num_q_heads, hidden), (num_kv_heads, hidden), (num_kv_heads, hidden)]
    weights = [torch.randn(n * head_dim, h, dtype=torch.float64) / 8 for n, h in shapes]
    weights.append(torch.randn(hidden, num_q_heads * head_dim, dtype=torch.float64) / 8)
    v_bias = torch.randn(num_kv_heads * head_dim, dtype=torch.float64) if bias else None
    x = torch.randn(13, hidden, dtype=torch.float64)
    heads = (num_q_heads, num_kv_heads, head_dim)
    expected = attention_block(x, weights, *heads, v_bias)
    rotation = random_rotation(num_kv_heads, head_dim, head_dim)

    def folded(v_side, o_side):
        new_bias = fold_value_weight(v_bias, v_side) if bias else None
        v_weight = fold_value_weight(weights[2], v_side)
        o_weight = fold_output_weight(weights[3], o_side)
        return attention_block(x, [*weights[:2], v_weight, o_weight], *heads, new_bias)

    assert float((folded(rotation, rotation) - expected).abs().max()) < 1e-10
    assert float((folded(rotation, permuted(rotation)) - expected).abs().max()) > 1e-3
    if num_kv_heads > 1:  # a rotation of the right kind on the wrong head
        other_heads = rotation.roll(1, dims=0)
        assert float((folded(rotation, other_heads) - expected).abs().max()) > 1e-3


def test_folds_produce_rotated_values():
    rotation = random_rotation(2, 64, 64)
    weight, bias = (torch.randn(128, *s, dtype=torch.float64) for s in ((96,), ()))
    x = torch.randn(5, 96, dtype=torch.float64)
    v = (x @ weight.T + bias).unflatten(-1, (2, 64))
    folded = x @ fold_value_weight(weight, rotation).T + fold_value_weight(bias, rotation)
    assert torch.allclose(folded.unflatten(-1, (2, 64)), rotate_heads(v, rotation), atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_folds_keep_dtype_and_shape(dtype):
    rotation = random_rotation(2, 64, 64).float()
    for fold, shape in ((fold_value_weight, (128, 96)), (fold_value_weight, (128,))):
        weight = torch.randn(shape).to(dtype)
        assert fold(weight, rotation).shape == shape
        assert fold(weight, rotation).dtype == dtype
    weight = torch.randn(96, 256).to(dtype)
    assert fold_output_weight(weight, rotation).shape == (96, 256)
    assert fold_output_weight(weight, rotation).dtype == dtype


def test_transform_equals_its_definition():
    k = torch.randn(6, 2, 64) + 2.0
    v = torch.randn(6, 2, 64)
    k_rotation, v_rotation = random_rotation(2, 64, 64).float(), random_rotation(2, 64, 64).float()
    mean = k.mean(0)
    config = QuantizerConfig(64)
    k_rot, v_rot = rotate_kv(k, v, LayerTransform.build(k_rotation, mean, v_rotation, config))
    expected = rotate_heads((k - mean).double(), k_rotation.double())
    assert torch.allclose(k_rot.double(), expected, atol=1e-5)
    assert torch.allclose(v_rot, rotate_heads(v, v_rotation))
    k_rot, v_rot = rotate_kv(k, v, LayerTransform.build(None, mean, None, config))
    assert torch.equal(k_rot, k - mean)
    assert torch.equal(v_rot, v)
    k_rot, _ = rotate_kv(k.bfloat16(), v, LayerTransform.build(None, None, None, config))
    assert k_rot.dtype == torch.float32
