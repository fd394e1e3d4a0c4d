"""rotate_query against fp64 products."""

from __future__ import annotations

import pytest
import torch
from sglang_kvquant.kernels.rotate_query import rotate_query

from sglang_kvquant.rotation import hadamard, rotate_heads

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def rotation_of(kind: str, heads: int, head_dim: int, device: str) -> torch.Tensor:
    gen = torch.Generator().manual_seed(0)
    if kind == "shared":
        return hadamard(head_dim, torch.float32).to(device)
    dense = torch.randn(heads, head_dim, head_dim, generator=gen)
    return torch.linalg.qr(dense)[0].contiguous().to(device)


@pytest.mark.parametrize("kind", ["shared", "per head"])
@pytest.mark.parametrize(("group", "heads"), [(1, 3), (4, 2), (7, 1), (16, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp32(kind, group, heads, head_dim, device):
    gen = torch.Generator().manual_seed(1)
    fused = torch.randn(9, heads * group + 2, head_dim, generator=gen).to(device)
    q = fused[:, 1:-1]  # strided, as a view into a fused QKV row
    rotation = rotation_of(kind, heads, head_dim, device)
    got = rotate_query(q, rotation, heads)
    want = rotate_heads(q.double(), rotation.double())
    # fp32 sums of head_dim products of size |q| / sqrt(head_dim)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    flipped = rotation.flip(-1).contiguous()
    assert (rotate_query(q, flipped, heads) - got).abs().max() > 0.1


def test_identity_empty_and_errors(device):
    q = torch.randn(4, 6, 64, device=device)
    assert rotate_query(q, None, 2) is q
    out = torch.zeros_like(q)
    assert rotate_query(q, None, 2, out) is out and torch.equal(out, q)
    rotation = rotation_of("per head", 2, 64, device)
    assert rotate_query(q[:0], rotation, 2).shape == (0, 6, 64)
    with pytest.raises(ValueError, match="multiple"):
        rotate_query(q, rotation, 4)
    with pytest.raises(ValueError, match="rotation"):
        rotate_query(q, rotation[:1], 2)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 3000])
def test_bf16_on_gpu(num_tokens, device):
    q = torch.randn(num_tokens, 32, 128, device=device).bfloat16()
    rotation = rotation_of("per head", 8, 128, device)
    want = rotate_heads(q.double(), rotation.bfloat16().double())
    got = rotate_query(q, rotation, 8)
    # one rounding to bf16 of an fp32 sum
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-5).all()
