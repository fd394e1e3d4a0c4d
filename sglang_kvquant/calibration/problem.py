"""Attention of one layer under quantized keys and values, and the losses of OptR on it.

All KV heads at once. Whatever does not depend on a rotation is computed once: of a query's softmax
only the quantized keys move; the kept ones (sinks, recent tokens) enter through their log-sum-exp
and their readout.

Letters in shape comments: H num_kv_heads, B num_sequences, G query heads per KV head, N scored
queries, M keys that some query reads quantized, D head_dim.

Source: OptR (arXiv 2608.02691), equations 12 to 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .capture import LayerTraces
from .settings import OptRSettings

MASKED_LOGIT = -1e9  # finite: it is multiplied by a probability that is exactly 0
CUDA_PART_BYTES = 1 << 29  # attention weights held at once on a GPU


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One layer's scored queries over its quantizable keys; fp32, all without gradient.

    Attributes:
        q: queries times sm_scale, [H, B, G * N, D].
        k: centred keys that some query reads quantized, [H, B, M, D].
        v: their values, [H, B, M, D].
        p: BF16 probabilities of those keys, 0 where the query keeps them, [H, B, G * N, M].
        lse, lse_kept: log-sum-exp of all BF16 logits and of the kept keys, [H, B, G * N].
        p_dot_logits: sum over quantized keys of p times the BF16 logit, [H, B, G * N].
        out: BF16 readout of all keys, [H, B, G * N, D].
        out_kept: likewise of a softmax over the kept keys alone (0 if there are none).
        kept: bool [G * N, M - band]: of the columns from `band` on, those a query keeps.
        band: all queries read the columns before it quantized.
        metric: error term per query head, [H, G, D, D]: e metric e^T = ||e W_O^T||^2 / d_model.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    p: torch.Tensor
    lse: torch.Tensor
    lse_kept: torch.Tensor
    p_dot_logits: torch.Tensor
    out: torch.Tensor
    out_kept: torch.Tensor
    kept: torch.Tensor
    band: int
    metric: torch.Tensor

    def select(self, sequences: torch.Tensor | slice) -> AttentionProblem:
        """The same problem on some sequences."""
        names = ("q", "k", "v", "p", "lse", "lse_kept", "p_dot_logits", "out", "out_kept")
        return replace(self, **{name: getattr(self, name)[:, sequences] for name in names})

    def parts(self) -> Iterator[tuple[slice, AttentionProblem]]:
        """Split by sequences: a part's attention fits the CPU's cache, or GPU memory."""
        num_sequences, size = self.q.shape[1], 1
        if self.q.is_cuda:
            size = max(1, CUDA_PART_BYTES // (4 * self.p[:, 0].numel()))
        for begin in range(0, num_sequences, size):
            rows = slice(begin, begin + size)
            yield rows, self.select(rows)

    def metric_times(self, e: torch.Tensor) -> torch.Tensor:
        """e @ metric of each query head: [H, B, G * N, D] to the same."""
        by_head = e.unflatten(2, (self.metric.shape[1], -1))  # [H, B, G, N, D]
        return (by_head @ self.metric.unsqueeze(1)).flatten(2, 3)


def build_problem(
    traces: LayerTraces, mean: torch.Tensor, settings: OptRSettings
) -> AttentionProblem:
    """Everything of a layer's loss that no rotation changes.

    A query t keeps key s in BF16 iff s < sink_tokens or s >= t + 1 - recent_tokens.

    Args:
        traces: one layer.
        mean: key mean, [H, D].
        settings: windows and scored queries.
    """
    num_kv_heads, seq_len = traces.k.shape[1:3]
    device, group = traces.k.device, traces.q.shape[1] // num_kv_heads
    positions = settings.query_positions(seq_len).to(device)  # [N]
    last_read = positions - settings.recent_tokens  # last position read quantized, [N]
    columns = slice(settings.sink_tokens, int(last_read[-1]) + 1)
    position = torch.arange(seq_len, device=device)
    future = (position > positions.unsqueeze(1)).repeat(group, 1)  # [G * N, seq_len]
    kept = (position[columns] > last_read.unsqueeze(1)).repeat(group, 1)  # [G * N, M]
    band = max(int(last_read[0]) + 1 - settings.sink_tokens, 0)
    q = traces.q[:, :, positions].float().unflatten(1, (num_kv_heads, group)).flatten(2, 3)
    q = (q * traces.sm_scale).transpose(0, 1).contiguous()  # [H, B, G * N, D]
    k = (traces.k.double() - mean.to(device).double().unsqueeze(1)).float().transpose(0, 1)
    v = traces.v.float().transpose(0, 1)  # [H, B, seq_len, D]
    per_sequence = [  # one sequence's full attention at a time
        _bf16_attention(q[:, b], k[:, b], v[:, b], columns, future, kept)
        for b in range(q.shape[1])
    ]
    p, lse, lse_kept, p_dot_logits, out, out_kept = (
        torch.stack(tensors, dim=1) for tensors in zip(*per_sequence, strict=True)
    )
    return AttentionProblem(
        q=q,
        k=k[:, :, columns].contiguous(),
        v=v[:, :, columns].contiguous(),
        p=p,
        lse=lse,
        lse_kept=lse_kept,
        p_dot_logits=p_dot_logits,
        out=out,
        out_kept=out_kept,
        kept=kept[:, band:],
        band=band,
        metric=error_metric(traces, settings.objective),
    )


def _bf16_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: slice,
    future: torch.Tensor,
    kept: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """(p, lse, lse_kept, p_dot_logits, out, out_kept) of one sequence, as in the problem.

    Args:
        q: [H, G * N, D]; k, v: [H, seq_len, D].
        columns: keys that some query reads quantized.
        future: bool [G * N, seq_len].
        kept: bool [G * N, M].
    """
    logits = (q @ k.mT).masked_fill(future, -torch.inf)  # [H, G * N, seq_len]
    lse = torch.logsumexp(logits, dim=-1)
    p_all = torch.exp(logits - lse.unsqueeze(-1))
    p = p_all[..., columns].masked_fill(kept, 0.0)  # [H, G * N, M]
    p_dot_logits = (p * logits[..., columns].masked_fill(kept, 0.0)).sum(-1)
    out = p_all @ v
    logits[..., columns].masked_fill_(~kept, -torch.inf)
    lse_kept = torch.logsumexp(logits, dim=-1)
    out_kept = torch.nan_to_num(torch.softmax(logits, dim=-1)) @ v  # NaN where nothing is kept
    return p, lse, lse_kept, p_dot_logits, out, out_kept


def error_metric(traces: LayerTraces, objective: str) -> torch.Tensor:
    """Quadratic form of the error term per query head: fp32 [H, G, D, D].

    ``output``: W_O,j^T W_O,j / d_model, so that ||e W_O^T||^2 costs D x D instead of D x d_model;
    ``readout``: I / D.
    """
    num_kv_heads, head_dim = traces.k.shape[1], traces.k.shape[-1]
    group = traces.q.shape[1] // num_kv_heads
    if objective == "readout":
        eye = torch.eye(head_dim, device=traces.k.device) / head_dim
        return eye.expand(num_kv_heads, group, -1, -1)
    weight = traces.o_weight.detach().to(traces.k.device).double()
    by_head = weight.unflatten(1, (num_kv_heads, group, head_dim)).permute(1, 2, 0, 3)
    return (by_head.mT @ by_head / weight.shape[0]).float()


class _WithGradient(torch.autograd.Function):
    """A per-head loss [H] whose gradient in x [H, …] was computed beside it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, loss: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * grad.view(-1, 1, 1, 1), None, None


def quantized_attention(
    k_eff: torch.Tensor, problem: AttentionProblem
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over quantized and kept keys (equation 12).

    Args:
        k_eff: effective keys, [H, B, M, D].
        problem: the same sequences.

    Returns:
        Probabilities of the quantized keys [H, B, G * N, M], 0 where kept; log-sum-exp
        [H, B, G * N]; sum of problem.p times the new logits [H, B, G * N].
    """
    logits = problem.q @ k_eff.mT  # [H, B, G * N, M]
    logits[..., problem.band :].masked_fill_(problem.kept, MASKED_LOGIT)
    p_dot_logits = (problem.p * logits).sum(-1)
    top = torch.maximum(logits.amax(-1), problem.lse_kept)  # [H, B, G * N]
    weights = logits.sub_(top.unsqueeze(-1)).exp_()
    total = weights.sum(-1) + torch.exp(problem.lse_kept - top)
    return weights.div_(total.unsqueeze(-1)), top + total.log(), p_dot_logits


def key_loss(k_eff: torch.Tensor, problem: AttentionProblem, lambda_k: float) -> torch.Tensor:
    """L_K of every KV head (equation 14): [H], differentiable in k_eff [H, B, M, D].

    The gradient is computed by hand, part by part, which keeps the attention in the CPU's cache.
    """
    loss = torch.zeros(k_eff.shape[0], device=k_eff.device)
    gradient = torch.empty_like(k_eff)
    for rows, part in problem.parts():
        weights, lse, p_dot_logits = quantized_attention(k_eff.detach()[:, rows], part)
        kl = lse - part.lse + part.p_dot_logits - p_dot_logits
        # Kept logits are unchanged: together they are one more key with logit lse_kept.
        out = weights @ part.v + torch.exp(part.lse_kept - lse).unsqueeze(-1) * part.out_kept
        e = out - part.out  # [H, b, G * N, D]
        metric_e = part.metric_times(e)
        loss += (kl + lambda_k * (metric_e * e).sum(-1)).sum(dim=(1, 2))
        if k_eff.requires_grad:
            # d L / d logit_s = p~_s (1 + g . (v_s - out)) - p_s with g = 2 lambda (metric e)
            g = metric_e.mul_(2 * lambda_k)
            d_logits = (g @ part.v.mT).sub_((g * out).sum(-1, keepdim=True) - 1)
            d_logits.mul_(weights).sub_(part.p)  # [H, b, G * N, M]
            gradient[:, rows] = d_logits.mT @ part.q
    count = problem.q.shape[1] * problem.q.shape[2]
    return _WithGradient.apply(k_eff, loss / count, gradient / count)


def value_problem(problem: AttentionProblem, k_eff: torch.Tensor) -> AttentionProblem:
    """The problem as the value loss needs it: under quantized keys.

    Its `p` are the probabilities under k_eff [H, B, M, D], its `out` their readout of `v`.
    """
    p, out = torch.empty_like(problem.p), torch.empty_like(problem.out)
    for rows, part in problem.parts():
        p[:, rows] = quantized_attention(k_eff[:, rows], part)[0]
        out[:, rows] = p[:, rows] @ part.v
    return replace(problem, p=p, out=out)


def value_loss(readout: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    """L_V of every KV head (equation 16): [H], differentiable in readout.

    Args:
        readout: of the effective values under problem.p, [H, B, G * N, D].
        problem: from :func:`value_problem`, the same sequences.
    """
    e = readout - problem.out  # kept values are exact and cancel
    return (problem.metric_times(e) * e).sum(-1).mean(dim=(1, 2))
