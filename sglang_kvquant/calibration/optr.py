"""OptR: key mean and per-head orthogonal corrections, learned through INT2 attention.

Algorithm 1 of OptR (arXiv 2608.02691) for all KV heads of a layer at once: heads share no term of
the loss and Adam works element by element, so this equals learning them one by one.

Letters in shape comments: H num_kv_heads, B num_sequences, M quantized keys, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from ..config import Clip, QuantizerConfig
from ..quantizer import fake_quantize
from ..rotation import skew_exp
from .capture import LayerTraces
from .problem import AttentionProblem, build_problem, key_loss, quantized_attention, value_loss
from .settings import OptRSettings


def key_mean(traces: LayerTraces) -> torch.Tensor:
    """Mean post-RoPE key over all sequences and positions (equation 19): fp64 [H, D]."""
    return traces.k.double().mean(dim=(0, 2))


def effective(
    x: torch.Tensor, rotation: torch.Tensor, clip: Clip, group_size: int
) -> torch.Tensor:
    """Q_2(x R) R^T (equation 4): x [H, B, M, D], rotation [H, D, D]; straight-through in R."""
    rotated = torch.bmm(x.flatten(1, 2), rotation)  # [H, B * M, D]
    return torch.bmm(fake_quantize(rotated, clip, group_size), rotation.mT).view(x.shape)


class Learned(NamedTuple):
    rotation: torch.Tensor  # fp64 [H, D, D], base times correction
    before: torch.Tensor  # held-out loss of the base, fp32 [H] on the CPU
    after: torch.Tensor  # held-out loss of the selected rotation, never above `before`


def learn_rotation(
    loss: Callable[[torch.Tensor, AttentionProblem], torch.Tensor],
    side: Literal["k", "v"],
    base: torch.Tensor,
    train: AttentionProblem,
    heldout: AttentionProblem,
    clip: Clip,
    group_size: int,
    settings: OptRSettings,
) -> Learned:
    """Learn base @ exp(A - A^T) of every head; per head, the best held-out candidate is kept.

    Args:
        loss: per-head loss of effective keys or values.
        side: which tensor of the problems is rotated and quantized.
        base: fp64 [H, D, D].
        train, heldout: the layer's problems.
        clip, group_size: quantizer of this side.
        settings: hyperparameters; candidates are step 0, every selection_every steps, and the last.
    """
    steps = (
        settings.steps if getattr(settings, f"learn_{'keys' if side == 'k' else 'values'}") else 0
    )
    generator = torch.zeros(base.shape, device=base.device, requires_grad=True)
    best, start = torch.zeros_like(generator), base.float()
    optimizer = torch.optim.Adam([generator], lr=settings.lr)
    random = torch.Generator().manual_seed(settings.seed)
    before = after = torch.full((base.shape[0],), torch.inf, device=base.device)

    def losses(problem: AttentionProblem) -> torch.Tensor:
        rotation = start @ skew_exp(generator)
        return loss(effective(getattr(problem, side), rotation, clip, group_size), problem)

    for step in range(steps + 1):
        if step in (0, steps) or step % settings.selection_every == 0:
            with torch.no_grad():
                now = losses(heldout)
                best = torch.where((now < after)[:, None, None], generator, best)
                after = torch.minimum(now, after)
                before = now if step == 0 else before
        if step == steps:
            break
        optimizer.param_groups[0]["lr"] = settings.learning_rate(step)
        optimizer.zero_grad()
        with torch.enable_grad():
            total = losses(_draw(train, settings, random)).sum()
            if settings.proximal:
                skew = generator - generator.mT
                total = total + settings.proximal * skew.square().mean(dim=(1, 2)).sum()
            total.backward()
        optimizer.step()
    rotation = base @ skew_exp(best.detach().double())
    return Learned(rotation, before.cpu(), after.cpu())


def _draw(
    train: AttentionProblem, settings: OptRSettings, random: torch.Generator
) -> AttentionProblem:
    num_sequences = train.q.shape[1]
    if settings.batch_sequences is None or settings.batch_sequences >= num_sequences:
        return train
    chosen = torch.randperm(num_sequences, generator=random)[: settings.batch_sequences]
    return train.select(chosen.to(train.q.device))


class OptRLayer(NamedTuple):
    k_mean: torch.Tensor  # fp64 [H, D]
    keys: Learned
    values: Learned


def learn_layer(
    train: LayerTraces,
    heldout: LayerTraces,
    k_base: torch.Tensor,
    v_base: torch.Tensor,
    quantizer: QuantizerConfig,
    settings: OptRSettings,
) -> OptRLayer:
    """Algorithm 1 for one layer: key mean, key rotations, then value rotations under them.

    Args:
        train: traces to learn from; their keys also give the mean.
        heldout: traces to select with.
        k_base, v_base: fp64 [H, D, D].
        quantizer: group size and clips.
        settings: hyperparameters.
    """
    mean = key_mean(train)
    problems = [build_problem(traces, mean, settings) for traces in (train, heldout)]
    size = quantizer.group_size

    def loss_k(k_eff: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
        return key_loss(k_eff, problem, settings.lambda_k)

    keys = learn_rotation(loss_k, "k", k_base, *problems, quantizer.k_clip, size, settings)
    rotation = keys.rotation.float()
    for problem in problems:
        k_eff = effective(problem.k, rotation, quantizer.k_clip, size)
        for rows, part in problem.parts():
            problem.p[:, rows] = quantized_attention(k_eff[:, rows], part)[0]
    values = learn_rotation(value_loss, "v", v_base, *problems, quantizer.v_clip, size, settings)
    return OptRLayer(mean, keys, values)
