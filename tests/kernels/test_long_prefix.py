"""Unpacking a prefix for a dense kernel: pieces, bit-exact values, and the merged attention."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from sglang_kvquant.kernels.extend import extend
from sglang_kvquant.kernels.long_prefix import (
    LongPrefix,
    plan_pieces,
    unpack_piece,
    worth_unpacking,
)

from sglang_kvquant.kernels import causal as other_kernels
from sglang_kvquant.kernels import long_prefix
from sglang_kvquant.layout import ReadPlan
from sglang_kvquant.reference import attention as reference

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def bounds_of(new_lens: list[int]) -> list[int]:
    return torch.tensor([0, *new_lens]).cumsum(0).tolist()


def test_pieces_cover_every_cached_token_once():
    new, cached = [3, 1, 2, 4, 5, 6], [0, 25, 0, 3, 19, 0]
    bounds = bounds_of(new)
    pieces = plan_pieces(bounds, cached, 16, torch.device("cpu"))
    seen = []
    for piece in pieces:
        requests = range(piece.requests.start, piece.requests.stop)
        assert 0 < piece.num_cached <= 16
        assert piece.tokens == slice(bounds[requests[0]], bounds[requests[-1] + 1])
        assert piece.qo_indptr.tolist() == [
            bounds[request] - bounds[requests[0]] for request in (*requests, requests[-1] + 1)
        ]
        counts = piece.kv_indptr.diff().tolist()
        assert piece.max_cached_len == max(counts) and piece.num_cached == sum(counts)
        assert piece.max_extend_len == max(new[request] for request in requests)
        for request, begin, count in zip(requests, piece.kv_begin.tolist(), counts, strict=True):
            seen += [(request, position) for position in range(begin, begin + count)]
    assert seen == [(request, p) for request, count in enumerate(cached) for p in range(count)]
    assert pieces[0].requests.start == 1 and pieces[-1].requests.stop == 5  # none at the ends
    assert all(piece.num_cached == 16 for piece in pieces[:-1])


def test_no_pieces_without_a_prefix():
    assert plan_pieces([0, 4, 9], [0, 0], 16, torch.device("cpu")) == []


def test_worth_unpacking():
    least = long_prefix.MIN_NEW_TOKENS
    assert worth_unpacking([least], [1000]) and not worth_unpacking([least - 1], [1000])
    assert not worth_unpacking([5000], [0])
    assert worth_unpacking([4 * least, 1], [1000, 2000]), "read often enough on average"
    assert not worth_unpacking([least, 1], [1000, 2000])


def read_pieces(case, piece_tokens: int, dtype: torch.dtype):
    """Unpacked keys and values of each request, put together from the pieces."""
    cached = case.plan.kv_lens.tolist()
    device, heads, dim = case.plan.kv_lens.device, case.layout.num_kv_heads, case.layout.head_dim
    parts: list[list] = [[] for _ in cached]
    for piece in plan_pieces(list(range(len(cached) + 1)), cached, piece_tokens, device):
        shape = (piece.num_cached + 2, heads, dim)
        k, v = torch.full((2, *shape), 7.0, dtype=dtype, device=device)
        unpack_piece(
            case.packed, case.window, case.plan, piece, k[1 : 1 + piece.num_cached], v[1:-1]
        )
        for tensor in (k, v):  # nothing outside the piece is touched
            assert bool((tensor[0] == 7).all()) and bool((tensor[-1] == 7).all())
        for index, request in enumerate(range(piece.requests.start, piece.requests.stop)):
            begin, end = (piece.kv_indptr[index : index + 2] + 1).tolist()
            parts[request].append((k[begin:end], v[begin:end]))
    return parts


def check_unpacked(case, piece_tokens: int, dtype: torch.dtype) -> None:
    for request, parts in enumerate(read_pieces(case, piece_tokens, dtype)):
        want = reference.gather_kv(case.packed, case.window, case.plan, request, torch.float32)
        for side in range(2):
            expected = want[side].transpose(0, 1).to(dtype)
            got = torch.cat([p[side] for p in parts]) if parts else expected[:0]
            assert torch.equal(got, expected)


@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 64), (64, 32), (128, 32), (256, 128)])
def test_unpacked_shapes(head_dim, group_size, make_case):
    case = make_case([60, 0, 33], head_dim=head_dim, group_size=group_size)
    check_unpacked(case, 50, torch.float32)


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (5, 7), (64, 256)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_unpacked_windows(sinks, recent, page_size, make_case):
    case = make_case(
        [100, 3, 33], sinks=sinks, recent=recent, page_size=page_size, missing_sinks=True, hit=True
    )
    for piece_tokens in (37, 1000):
        check_unpacked(case, piece_tokens, torch.float16)


class DensePiece:
    """Stands for another project's kernel: attention of each request to its unpacked tokens."""

    def attend_piece(self, q, k, v, piece, sm_scale):
        assert k.shape[0] == v.shape[0] == piece.num_cached == int(piece.kv_indptr[-1])
        assert q.shape[0] == int(piece.qo_indptr[-1])
        parts = []
        for index in range(len(piece.kv_begin)):
            new = slice(*piece.qo_indptr[index : index + 2].tolist())
            cached = slice(*piece.kv_indptr[index : index + 2].tolist())
            keys, values = (t[cached].transpose(0, 1).double() for t in (k, v))
            parts.append(reference.attend(q[new].double(), keys, values, sm_scale))
        out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return out.to(q.dtype), lse.float()


class CausalChunk(DensePiece):
    def __init__(self, bounds, sm_scale):
        self.bounds, self.sm_scale = bounds.tolist(), sm_scale

    def __call__(self, q, k, v):
        parts = []
        for begin, end in zip(self.bounds[:-1], self.bounds[1:], strict=True):
            mask = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).tril()
            keys, values = (t[begin:end].transpose(0, 1).double() for t in (k, v))
            parts.append(
                reference.attend(q[begin:end].double(), keys, values, self.sm_scale, mask)
            )
        out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return out.to(q.dtype), lse.float()


def run_extend(case, new_lens, group, dtype, piece_tokens, attention=None):
    """Extend through an unpacked prefix, and the reference in fp64."""
    gen = torch.Generator().manual_seed(11)
    layout, device = case.layout, case.plan.kv_lens.device
    q, k, v = (
        torch.randn(sum(new_lens), heads, layout.head_dim, generator=gen).to(device, dtype)
        for heads in (layout.num_kv_heads * group, layout.num_kv_heads, layout.num_kv_heads)
    )
    bounds = torch.tensor(bounds_of(new_lens), dtype=torch.int32, device=device)
    sm_scale = layout.head_dim**-0.5
    if attention is None:
        attention = CausalChunk(bounds, sm_scale)
    else:
        heads = (q.shape[1], layout.num_kv_heads, layout.head_dim)
        attention.plan(
            other_kernels.ChunkPlan(bounds, bounds.cpu(), max(new_lens), *heads, sm_scale, dtype)
        )
    pieces = plan_pieces(bounds.tolist(), case.plan.kv_lens.tolist(), piece_tokens, bounds.device)
    workspace = torch.full(
        (2, piece_tokens, layout.num_kv_heads, layout.head_dim), float("nan"), device=device
    ).to(dtype)
    arguments = (bounds, case.packed, case.window, case.plan, sm_scale)
    prefix = LongPrefix(pieces, attention, workspace[0], workspace[1])
    got = extend(q, k, v, *arguments, causal=attention, prefix=prefix)
    want = reference.extend(q.double(), k.double(), v.double(), *arguments, torch.float64)
    return got, want, (q, k, v, prefix, arguments)


@pytest.mark.parametrize("piece_tokens", [16, 64, 500])
def test_extend_over_an_unpacked_prefix(piece_tokens, make_case):
    case = make_case([70, 0, 1, 130], hit=True)
    got, want, _ = run_extend(case, [5, 33, 1, 2], 4, torch.float32, piece_tokens)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=2e-5)


def test_requests_do_not_depend_on_their_neighbours(make_case):
    case = make_case([50, 20, 30])
    (out, lse), _, (q, k, v, prefix, arguments) = run_extend(
        case, [4, 3, 5], 2, torch.float32, 1000
    )
    last = ReadPlan(*(getattr(case.plan, f.name)[2:] for f in dataclasses.fields(ReadPlan)))
    alone_pieces = plan_pieces([0, 5], [30], 1000, arguments[0].device)
    alone = extend(
        *(tensor[7:] for tensor in (q, k, v)),
        arguments[0][2:] - 7,
        case.packed,
        case.window,
        last,
        arguments[-1],
        causal=CausalChunk(torch.tensor([0, 5]), arguments[-1]),
        prefix=dataclasses.replace(prefix, pieces=alone_pieces),
    )
    assert torch.equal(alone[0], out[7:]) and torch.equal(alone[1], lse[7:])


def test_errors(make_case):
    case = make_case([20])
    _, _, (q, k, v, prefix, arguments) = run_extend(case, [3], 2, torch.float32, 32)
    with pytest.raises(ValueError, match="causal"):
        extend(q, k, v, *arguments, prefix=prefix)
    space = prefix.k.transpose(0, 1)[:, :20].transpose(0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        unpack_piece(
            case.packed, case.window, case.plan, prefix.pieces[0], space[:, :, ::2], prefix.v[:20]
        )


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [1, 64])
def test_unpacked_on_gpu(head_dim, page_size, make_case):
    case = make_case(
        [3000, 0, 17, 500],
        num_kv_heads=4,
        head_dim=head_dim,
        group_size=min(head_dim, 128),
        page_size=page_size,
        sinks=64,
        recent=256,
        dtype=torch.bfloat16,
        hit=True,
    )
    check_unpacked(case, 1024, torch.bfloat16)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_flash_attention_over_an_unpacked_prefix(head_dim, make_case):
    """FlashAttention 3, with requests that have no cached tokens between others."""
    if importlib.util.find_spec("sgl_kernel.flash_ops") is None:
        pytest.skip("this sgl_kernel has no flash_ops")
    case = make_case(
        [3000, 0, 17, 500],
        num_kv_heads=4,
        head_dim=head_dim,
        group_size=min(head_dim, 128),
        sinks=64,
        recent=256,
        dtype=torch.bfloat16,
    )
    attention = other_kernels.FA3Causal()
    results = []
    for piece_tokens in (1024, 8192):
        got, want, _ = run_extend(
            case, [300, 100, 1, 64], 4, torch.bfloat16, piece_tokens, attention
        )
        torch.testing.assert_close(got[0].double(), want[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(got[1].double(), want[1], atol=2e-2, rtol=1e-3)
        results.append(got[0].double())
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)
