"""Folding R_V: outputs stay, wrong rotations are refused, every rank takes its own heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang_kvquant.patches.base import (
    AttentionPart,
    check_attention,
    fold_value_rotation,
    value_path,
)

from sglang_kvquant.checkpoint import LayerRotations

pytest.importorskip("sglang")

from sglang_kvquant.serving import compat
from sglang_kvquant.serving.weights import local_rotations

pytestmark = pytest.mark.sglang

HEAD_DIM, HIDDEN = 64, 96


class Linear(torch.nn.Module):
    """Weights of a linear layer, with what SGLang's QKVParallelLinear knows about its rank."""

    def __init__(self, weight, bias=None, **fields):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.bias = None if bias is None else torch.nn.Parameter(bias)
        for name, value in fields.items():
            setattr(self, name, value)


def attention(num_q_heads, num_kv_heads, **fields):
    values = {
        "layer_id": 3,
        "tp_q_head_num": num_q_heads,
        "tp_k_head_num": num_kv_heads,
        "tp_v_head_num": num_kv_heads,
        "head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
    }
    return SimpleNamespace(**{**values, **fields})


class Layer:
    """The weights of a whole layer and its part on every rank, laid out as SGLang does."""

    def __init__(self, num_q_heads, num_kv_heads, dtype=torch.float64, bias=True):
        self.num_q_heads, self.num_kv_heads = num_q_heads, num_kv_heads
        rows = (num_q_heads + 2 * num_kv_heads) * HEAD_DIM
        self.qkv = torch.randn(rows, HIDDEN).to(dtype)
        self.bias = torch.randn(rows).to(dtype) if bias else None
        self.o = torch.randn(HIDDEN, num_q_heads * HEAD_DIM).to(dtype)

    def part(self, rank=0, size=1):
        if size >= self.num_kv_heads:
            local_kv, replicas = 1, size // self.num_kv_heads
        else:
            local_kv, replicas = self.num_kv_heads // size, 1
        local_q = self.num_q_heads // size
        q = torch.arange(rank * local_q, (rank + 1) * local_q)
        first = rank // replicas * local_kv
        kv = torch.arange(first, first + local_kv)
        heads = torch.cat([q, self.num_q_heads + kv, self.num_q_heads + self.num_kv_heads + kv])
        rows = (heads.unsqueeze(1) * HEAD_DIM + torch.arange(HEAD_DIM)).flatten()
        columns = (q.unsqueeze(1) * HEAD_DIM + torch.arange(HEAD_DIM)).flatten()
        qkv = Linear(
            self.qkv[rows],
            None if self.bias is None else self.bias[rows],
            tp_rank=rank,
            num_kv_heads=local_kv,
            num_kv_head_replicas=replicas,
        )
        return AttentionPart(3, attention(local_q, local_kv), qkv, Linear(self.o[:, columns]))


def rotations(num_kv_heads):
    return torch.linalg.qr(torch.randn(num_kv_heads, HEAD_DIM, HEAD_DIM).double())[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 2), (9, 3), (8, 8), (6, 1)])
def test_fold_keeps_the_output(dtype, num_q_heads, num_kv_heads):
    part = Layer(num_q_heads, num_kv_heads, dtype).part()
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    before = value_path(part, x)
    query_key_rows = part.qkv_proj.weight[: part.value_rows.start].clone()
    fold_value_rotation(part, rotations(num_kv_heads))
    error = float((value_path(part, x) - before).norm() / before.norm())
    assert error < 4 * torch.finfo(dtype).eps + 1e-12
    assert torch.equal(part.qkv_proj.weight[: part.value_rows.start], query_key_rows)


def test_folded_values_are_rotated():
    layer = Layer(4, 2)
    plain, folded, rotation = layer.part(), layer.part(), rotations(2)
    fold_value_rotation(folded, rotation)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)

    def values(part):
        rows = part.value_rows
        v = x @ part.qkv_proj.weight[rows].T + part.qkv_proj.bias[rows]
        return v.unflatten(1, (2, HEAD_DIM))

    expected = torch.einsum("nhd,hde->nhe", values(plain), rotation)
    assert torch.allclose(values(folded), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_that_is_no_rotation_is_refused(dtype):
    with pytest.raises(RuntimeError, match="changed the output of layer 3"):
        fold_value_rotation(Layer(4, 2, dtype).part(), rotations(2) * 1.1)


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "sizes"),
    [(8, 8, (1, 2, 4, 8)), (16, 2, (1, 2, 4, 8)), (40, 10, (1, 2, 5, 10)), (8, 1, (1, 2, 8))],
)
@pytest.mark.parametrize("shared", [False, True])
def test_every_rank_folds_its_own_heads(num_q_heads, num_kv_heads, sizes, shared, monkeypatch):
    """The sum over tensor-parallel ranks is the unfolded output of the whole layer."""
    layer = Layer(num_q_heads, num_kv_heads, bias=False)
    rotation = rotations(num_kv_heads)
    checkpoint = LayerRotations(
        rotation.float(), rotation[0] if shared else rotation, torch.randn(num_kv_heads, HEAD_DIM)
    )
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    whole = value_path(layer.part(), x)
    for size in sizes:
        total = torch.zeros_like(whole)
        for rank in range(size):
            part = layer.part(rank, size)
            first = compat.first_kv_head(part.qkv_proj)
            local = local_rotations(checkpoint, first, part.num_kv_heads, torch.device("cpu"))
            assert torch.equal(local.k_mean, checkpoint.k_mean[first : first + part.num_kv_heads])
            assert local.k_rotation.shape == (part.num_kv_heads, HEAD_DIM, HEAD_DIM)
            fold_value_rotation(part, local.v_rotation.double())
            total += value_path(part, x)
        # local_rotations keeps fp32.
        assert torch.allclose(total, whole, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"v_head_dim": 32}, "values of another shape"),
        ({"tp_v_head_num": 1}, "values of another shape"),
        ({"sliding_window_size": 4096}, "sliding window"),
        ({"logit_cap": 30.0}, "caps its logits"),
        ({"is_cross_attention": True}, "not causal"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "not causal"),
        ({"tp_q_head_num": 8}, "other heads"),
    ],
)
def test_attention_that_is_not_implemented_is_refused(fields, message):
    first = AttentionPart(0, attention(4, 2), None, None)
    with pytest.raises(ValueError, match=message):
        check_attention(AttentionPart(3, attention(4, 2, **fields), None, None), first)


def test_unknown_architecture_is_refused():
    from sglang_kvquant.patches.registry import find_attention_parts

    class MixtralForCausalLM(torch.nn.Module):
        pass

    with pytest.raises(ValueError, match="MixtralForCausalLM, which --kv-quant does not know"):
        find_attention_parts(MixtralForCausalLM())
