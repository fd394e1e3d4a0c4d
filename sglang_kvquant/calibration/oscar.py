"""OSCAR's rotations from post-RoPE traces, as its released code computes them.

Everything is float64 and un-centred. Two recipes:

- per layer (``qqt`` keys, ``sst`` values, composition ``r_h_pbr``): the matrices average over the
  KV heads and R = U H P, with U the eigenvectors in ascending order, H the normalized Hadamard
  matrix, and P a permutation of the columns of U H that sends the i-th largest eigenvalue to the
  bit-reversed position of i;
- per head (``cov_eig_hadamard_perhead``): R_h = U_h H with U_h the eigenvectors, descending, of
  the head's own key (value) second moment; no permutation.

Source: OSCAR (arXiv 2605.17757), rotation/compute_kv_rotation.py and fit_perhead_rotation.py.
"""

from __future__ import annotations

import torch

from ..rotation import hadamard
from .capture import LayerTraces


def second_moments(x: torch.Tensor) -> torch.Tensor:
    """X_h^T X_h / rows of every KV head, over all sequences, tokens and heads of its group.

    Args:
        x: [num_sequences, num_kv_heads, group * seq_len, head_dim], any float dtype.

    Returns:
        fp64 [num_kv_heads, head_dim, head_dim].
    """
    total = torch.zeros(x.shape[1], x.shape[-1], x.shape[-1], dtype=torch.float64, device=x.device)
    for sequence in x:  # one sequence at a time bounds the fp64 copy
        rows = sequence.double()  # [num_kv_heads, rows, head_dim]
        total += rows.transpose(1, 2) @ rows
    return total / (x.shape[0] * x.shape[2])


def query_moments(traces: LayerTraces) -> torch.Tensor:
    """Second moments of each KV head's query heads: fp64 [num_kv_heads, head_dim, head_dim]."""
    num_kv_heads = traces.k.shape[1]
    grouped = traces.q.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # [seqs, kv, group * len, d]
    return second_moments(grouped)


def weighted_value_moments(traces: LayerTraces, moments: torch.Tensor) -> torch.Tensor:
    """Second moments of the values, each token weighted by w_t = k_t M_h k_t^T.

    The weights of a head are normalized to sum to the number of tokens. This is the ``sst``
    objective of the released code: per-token weights, no softmax.

    Args:
        traces: one layer.
        moments: M_h, fp64 [num_kv_heads, head_dim, head_dim], from :func:`query_moments`.

    Returns:
        fp64 [num_kv_heads, head_dim, head_dim].
    """
    total = torch.zeros_like(moments)
    weight_sum = torch.zeros(moments.shape[0], dtype=torch.float64, device=moments.device)
    for k, v in zip(traces.k, traces.v, strict=True):  # [num_kv_heads, seq_len, head_dim]
        keys, values = k.double(), v.double()
        weight = ((keys @ moments) * keys).sum(-1)  # [num_kv_heads, seq_len]
        total += (values * weight.unsqueeze(-1)).transpose(1, 2) @ values
        weight_sum += weight.sum(-1)
    # sum_t w_t v_t^T v_t / T with weights scaled to sum to T: the two T cancel.
    return total / weight_sum[:, None, None]


def bit_reversal(n: int) -> torch.Tensor:
    """Bit-reversed index of 0 … n-1, n a power of two: int64 [n]."""
    bits = n.bit_length() - 1
    return torch.tensor([int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(n)])


def compose_r_h_pbr(covariance: torch.Tensor) -> torch.Tensor:
    """R = U H P of one symmetric matrix: fp64 [head_dim, head_dim] to the same."""
    head_dim = covariance.shape[-1]
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)  # ascending
    order = torch.argsort(eigenvalues, descending=True, stable=True).cpu()  # [head_dim]
    perm = torch.empty_like(order)
    perm[bit_reversal(head_dim)] = order
    mixed = eigenvectors @ hadamard(head_dim).to(covariance.device)
    return mixed[:, perm.to(covariance.device)]


def layer_rotations(traces: LayerTraces) -> tuple[torch.Tensor, torch.Tensor]:
    """OSCAR's layer-shared (R_K, R_V): two fp64 [head_dim, head_dim]."""
    moments = query_moments(traces)
    k_rotation = compose_r_h_pbr(moments.mean(0))
    v_rotation = compose_r_h_pbr(weighted_value_moments(traces, moments).mean(0))
    return k_rotation, v_rotation


def head_rotations(traces: LayerTraces) -> tuple[torch.Tensor, torch.Tensor]:
    """OSCAR's per-head (R_K, R_V): two fp64 [num_kv_heads, head_dim, head_dim]."""
    return _eigen_hadamard(second_moments(traces.k)), _eigen_hadamard(second_moments(traces.v))


def _eigen_hadamard(covariance: torch.Tensor) -> torch.Tensor:
    eigenvectors = torch.linalg.eigh(covariance).eigenvectors.flip(-1)  # descending
    return eigenvectors @ hadamard(covariance.shape[-1]).to(covariance.device)
