"""OSCAR's formulas against literal loops, in fp64."""

from __future__ import annotations

import pytest
import torch

from sglang_kvquant.calibration import oscar
from sglang_kvquant.calibration.capture import LayerTraces
from sglang_kvquant.rotation import hadamard, orthogonality_error

SEQS, Q_HEADS, KV_HEADS, LENGTH, DIM = 2, 6, 2, 20, 16
GROUP = Q_HEADS // KV_HEADS


@pytest.fixture
def traces() -> LayerTraces:
    q = torch.randn(SEQS, Q_HEADS, LENGTH, DIM) * torch.linspace(0.2, 3.0, DIM)
    k = torch.randn(SEQS, KV_HEADS, LENGTH, DIM) + 0.7
    v = torch.randn(SEQS, KV_HEADS, LENGTH, DIM) * torch.linspace(2.0, 0.1, DIM)
    return LayerTraces(q, k, v, torch.randn(8, Q_HEADS * DIM), DIM**-0.5)


def literal_query_moment(traces: LayerTraces, head: int) -> torch.Tensor:
    total, rows = torch.zeros(DIM, DIM, dtype=torch.float64), 0
    for b in range(SEQS):
        for j in range(head * GROUP, (head + 1) * GROUP):
            for t in range(LENGTH):
                row = traces.q[b, j, t].double()
                total += torch.outer(row, row)
                rows += 1
    return total / rows


def literal_sst(traces: LayerTraces, head: int) -> torch.Tensor:
    moment = literal_query_moment(traces, head)
    rows = [(traces.k[b, head, t].double(), traces.v[b, head, t].double())
            for b in range(SEQS) for t in range(LENGTH)]  # fmt: skip
    weights = torch.stack([k @ moment @ k for k, _ in rows])
    weights = weights * len(rows) / weights.sum()
    products = [w * torch.outer(v, v) for w, (_, v) in zip(weights, rows, strict=True)]
    return torch.stack(products).sum(0) / len(rows)


def literal_r_h_pbr(covariance: torch.Tensor) -> torch.Tensor:
    eigenvalues, u = torch.linalg.eigh(covariance)
    descending = sorted(range(DIM), key=lambda i: -float(eigenvalues[i]))
    perm = [0] * DIM
    for i, eigen_index in enumerate(descending):
        reversed_bits = int(format(i, "04b")[::-1], 2)
        perm[reversed_bits] = eigen_index
    p = torch.zeros(DIM, DIM, dtype=torch.float64)
    for column, source in enumerate(perm):
        p[source, column] = 1.0  # I[:, perm]
    return u @ hadamard(DIM) @ p


def test_moments(traces: LayerTraces) -> None:
    moments = oscar.query_moments(traces)
    expected = torch.stack([literal_query_moment(traces, h) for h in range(KV_HEADS)])
    torch.testing.assert_close(moments, expected)
    values = oscar.weighted_value_moments(traces, moments)
    expected = torch.stack([literal_sst(traces, h) for h in range(KV_HEADS)])
    torch.testing.assert_close(values, expected)


def test_layer_rotations(traces: LayerTraces) -> None:
    k_rotation, v_rotation = oscar.layer_rotations(traces)
    qqt = sum(literal_query_moment(traces, h) for h in range(KV_HEADS)) / KV_HEADS
    sst = sum(literal_sst(traces, h) for h in range(KV_HEADS)) / KV_HEADS
    for rotation, covariance in ((k_rotation, qqt), (v_rotation, sst)):
        assert rotation.dtype == torch.float64
        assert orthogonality_error(rotation) < 1e-12
        # Equal up to the sign of each eigenvector, that is, of each row of H P.
        mixed = torch.linalg.eigh(covariance).eigenvectors.T @ rotation
        wanted = torch.linalg.eigh(covariance).eigenvectors.T @ literal_r_h_pbr(covariance)
        signs = torch.sign((mixed * wanted).sum(1, keepdim=True))
        torch.testing.assert_close(mixed, signs * wanted)


def test_head_rotations(traces: LayerTraces) -> None:
    for rotations, x in zip(oscar.head_rotations(traces), (traces.k, traces.v), strict=True):
        for head in range(KV_HEADS):
            rows = x[:, head].reshape(-1, DIM).double()
            rotation = rotations[head]
            assert orthogonality_error(rotation) < 1e-12
            # R H = U: it diagonalizes the head's own second moment, largest first.
            u = rotation @ hadamard(DIM)
            diagonal = u.T @ (rows.T @ rows / len(rows)) @ u
            off = diagonal - diagonal.diag().diag()
            assert off.abs().max() < 1e-10 * diagonal.abs().max()
            assert bool((diagonal.diag().diff() <= 1e-12).all())


def test_layer_rotation_does_not_depend_on_the_scale_of_the_keys(traces: LayerTraces) -> None:
    scaled = LayerTraces(traces.q, traces.k * 3, traces.v, traces.o_weight, traces.sm_scale)
    for a, b in zip(oscar.layer_rotations(traces), oscar.layer_rotations(scaled), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_bit_reversal_is_an_involution(n: int) -> None:
    index = oscar.bit_reversal(n)
    assert index[index].tolist() == list(range(n))


def test_bit_reversal_of_eight() -> None:
    assert oscar.bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
