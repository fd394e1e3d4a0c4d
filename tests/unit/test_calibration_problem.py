"""OptR's losses against a literal implementation: full attention, full W_O, autograd."""

from __future__ import annotations

import pytest
import torch

from sglang_kvquant.calibration.capture import LayerTraces
from sglang_kvquant.calibration.problem import (
    build_problem,
    key_loss,
    value_loss,
    value_problem,
)
from sglang_kvquant.calibration.settings import OptRSettings

NUM_SEQUENCES, NUM_Q_HEADS, NUM_KV_HEADS, SEQ_LEN, HEAD_DIM, HIDDEN = 2, 4, 2, 40, 8, 24
GROUP = NUM_Q_HEADS // NUM_KV_HEADS


def make_traces(seed: int = 0) -> LayerTraces:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return LayerTraces(
        q=normal(NUM_SEQUENCES, NUM_Q_HEADS, SEQ_LEN, HEAD_DIM) * 2,
        k=normal(NUM_SEQUENCES, NUM_KV_HEADS, SEQ_LEN, HEAD_DIM) + 1.5,
        v=normal(NUM_SEQUENCES, NUM_KV_HEADS, SEQ_LEN, HEAD_DIM),
        o_weight=normal(HIDDEN, NUM_Q_HEADS * HEAD_DIM),
        sm_scale=0.4,
    )


def is_kept(settings: OptRSettings, t: int, s: int) -> bool:
    return s < settings.sink_tokens or s >= t + 1 - settings.recent_tokens


def literal_losses(
    traces: LayerTraces,
    mean: torch.Tensor,
    settings: OptRSettings,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(L_K, L_V) per KV head: loops over sequences, heads and queries; fp64.

    dk, dv: errors of keys and values at every position, [seqs, kv heads, seq_len, head_dim]; they
    apply to the positions that a query reads quantized.
    """
    key_losses = torch.zeros(NUM_KV_HEADS, dtype=torch.float64)
    value_losses = torch.zeros(NUM_KV_HEADS, dtype=torch.float64)
    positions = settings.query_positions(SEQ_LEN).tolist()
    count = NUM_SEQUENCES * GROUP * len(positions)
    for b in range(NUM_SEQUENCES):
        for j in range(NUM_Q_HEADS):
            h = j // GROUP
            w_o = traces.o_weight[:, j * HEAD_DIM : (j + 1) * HEAD_DIM]  # [hidden, head_dim]
            for t in positions:
                q = traces.q[b, j, t] * traces.sm_scale
                k, v = traces.k[b, h, : t + 1] - mean[h], traces.v[b, h, : t + 1]
                quantized = torch.tensor(
                    [not is_kept(settings, t, s) for s in range(t + 1)], dtype=torch.float64
                ).unsqueeze(1)
                p = torch.softmax(k @ q, dim=0)
                p_k = torch.softmax((k + quantized * dk[b, h, : t + 1]) @ q, dim=0)
                kl = (p * (p.log() - p_k.log())).sum()
                e_k = (p_k - p) @ v @ w_o.T
                e_v = p_k.detach() @ (quantized * dv[b, h, : t + 1]) @ w_o.T
                key_losses[h] = key_losses[h] + (
                    kl + settings.lambda_k * e_k.square().sum() / HIDDEN
                )
                value_losses[h] = value_losses[h] + e_v.square().sum() / HIDDEN
    return key_losses / count, value_losses / count


CASES = [
    OptRSettings(sink_tokens=4, recent_tokens=8, num_queries=6),
    OptRSettings(sink_tokens=4, recent_tokens=8, num_queries=6, lambda_k=3.0),
    OptRSettings(sink_tokens=0, recent_tokens=0, num_queries=6),
    OptRSettings(sink_tokens=0, recent_tokens=8, num_queries=40),  # some queries keep every key
    OptRSettings(sink_tokens=5, recent_tokens=1, num_queries=7, query_selection="spread"),
]


@pytest.mark.parametrize("settings", CASES)
def test_losses_and_gradients_equal_the_literal_formulas(settings: OptRSettings) -> None:
    traces, mean = make_traces(), torch.randn(NUM_KV_HEADS, HEAD_DIM, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    dk, dv = (
        torch.randn(traces.k.shape, generator=generator, dtype=torch.float64) * 0.3
        for _ in range(2)
    )
    dk.requires_grad_(), dv.requires_grad_()
    expected = literal_losses(traces, mean, settings, dk, dv)
    expected_grads = [
        torch.autograd.grad(loss.sum(), x)[0] for loss, x in zip(expected, (dk, dv), strict=True)
    ]

    problem = build_problem(traces, mean, settings)
    columns = slice(settings.sink_tokens, settings.sink_tokens + problem.k.shape[2])
    head_first = [x.detach().float().transpose(0, 1)[:, :, columns] for x in (dk, dv)]
    k_eff = (problem.k + head_first[0]).requires_grad_()
    v_eff = (problem.v + head_first[1]).requires_grad_()
    loss_k = key_loss(k_eff, problem, settings.lambda_k)
    under_keys = value_problem(problem, k_eff.detach())
    loss_v = value_loss(under_keys.p @ v_eff, under_keys)
    for loss, want, x, want_grad in zip(
        (loss_k, loss_v), expected, (k_eff, v_eff), expected_grads, strict=True
    ):
        torch.testing.assert_close(loss, want.detach().float(), rtol=2e-4, atol=1e-6)
        (grad,) = torch.autograd.grad(loss.sum(), x)
        want_grad = want_grad.transpose(0, 1)[:, :, columns].float()
        torch.testing.assert_close(grad, want_grad, rtol=1e-3, atol=2e-6)
