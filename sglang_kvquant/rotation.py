"""Orthogonal rotations: construction, checks, application, folding into weights.

Rotations act on row vectors: k' = (k - mean) R_K, q' = q R_K, v' = v R_V, o = o' R_V^T.
A rotation is [head_dim, head_dim] when shared by all heads, [num_kv_heads, head_dim, head_dim]
when each KV head has its own.
"""

from __future__ import annotations

import torch

ORTHOGONALITY_TOLERANCE = 5e-3
"""Largest |R R^T - I| accepted from a file: a BF16 cast of an orthogonal matrix reaches 2.5e-3."""


def hadamard(n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Sylvester's Hadamard matrix divided by sqrt(n): orthogonal and symmetric, [n, n]."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two, got {n}")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)], dim=0
        )
    return (matrix / n**0.5).to(dtype)


def orthogonality_error(rotation: torch.Tensor) -> float:
    """Largest absolute entry of R R^T - I over all matrices of [..., n, n], in fp64."""
    r = rotation.double()
    eye = torch.eye(r.shape[-1], dtype=torch.float64, device=r.device)
    return float((r @ r.transpose(-1, -2) - eye).abs().max())


def skew_exp(generator: torch.Tensor) -> torch.Tensor:
    """exp(A - A^T), orthogonal for any A; [..., n, n] to the same (OptR, equation 11)."""
    return torch.linalg.matrix_exp(generator - generator.transpose(-1, -2))


def per_head(rotation: torch.Tensor, num_heads: int) -> torch.Tensor:
    """View a shared or per-head rotation as [num_heads, head_dim, head_dim]."""
    if rotation.dim() == 2:
        return rotation.expand(num_heads, -1, -1)
    if rotation.shape[0] != num_heads:
        raise ValueError(f"rotation has {rotation.shape[0]} heads, expected {num_heads}")
    return rotation


def rotate_heads(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate rows head by head.

    Args:
        x: [num_tokens, num_heads, head_dim].
        rotation: [num_kv_heads, head_dim, head_dim] or [head_dim, head_dim], same dtype as x;
            num_heads may be a multiple of num_kv_heads (query heads of a KV head are adjacent).

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    if rotation.dim() == 2:
        return x @ rotation
    num_kv_heads = rotation.shape[0]
    if x.shape[1] % num_kv_heads:
        raise ValueError(f"{x.shape[1]} heads are not a multiple of {num_kv_heads} rotations")
    grouped = x.unflatten(1, (num_kv_heads, -1))  # [num_tokens, num_kv_heads, group, head_dim]
    num_tokens, _, group, head_dim = grouped.shape
    by_head = grouped.transpose(0, 1).reshape(num_kv_heads, num_tokens * group, head_dim)
    rotated = torch.bmm(by_head, rotation)  # [num_kv_heads, num_tokens * group, head_dim]
    return rotated.view(num_kv_heads, num_tokens, group, head_dim).transpose(0, 1).reshape(x.shape)


def rotated_mean(mean: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """mean @ R per head: [num_kv_heads, head_dim]; (k - mean) R = k R - mean R (OptR, eq. 20)."""
    return rotate_heads(mean.unsqueeze(0), rotation).squeeze(0)


def fold_value_weight(weight: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rows of a value projection that produce v R_V instead of v (OptR, equation 29).

    Args:
        weight: [num_kv_heads * head_dim, in_features], or a bias [num_kv_heads * head_dim].
        rotation: [num_kv_heads, head_dim, head_dim].

    Returns:
        The folded tensor, computed in fp64, in the dtype of weight.
    """
    num_kv_heads, head_dim, _ = rotation.shape
    rows = weight.double().reshape(num_kv_heads, head_dim, -1)  # [heads, head_dim, in]
    folded = rotation.double().transpose(1, 2) @ rows
    return folded.reshape(weight.shape).to(weight.dtype)


def fold_output_weight(weight: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Output projection that takes o R_V instead of o (OptR, equation 29).

    Args:
        weight: [hidden_size, num_q_heads * head_dim].
        rotation: [num_kv_heads, head_dim, head_dim]; num_q_heads a multiple of num_kv_heads.

    Returns:
        The folded tensor, computed in fp64, in the dtype of weight.
    """
    num_kv_heads, head_dim, _ = rotation.shape
    columns = weight.double().unflatten(1, (num_kv_heads, -1, head_dim))
    folded = torch.einsum("onge,ned->ongd", columns, rotation.double())  # [hidden, kv, group, d]
    return folded.reshape(weight.shape).to(weight.dtype)
