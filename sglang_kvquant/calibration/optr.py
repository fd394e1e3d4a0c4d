"""OptR: key mean and per-head orthogonal corrections, learned through INT2 attention.

Algorithm 1 of OptR (arXiv 2608.02691) for all KV heads of a layer at once: heads share no term of
the loss and Adam works element by element, so this equals learning them one by one.

Letters in shape comments: H num_kv_heads, B num_sequences, M quantized keys, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..config import Clip, QuantizerConfig
from ..quantizer import fake_quantize
from ..rotation import skew_exp
from .capture import LayerTraces
from .errors import CalibrationError
from .problem import AttentionProblem, build_problem, key_loss, value_loss, value_problem
from .settings import OptRSettings


def key_mean(traces: LayerTraces) -> torch.Tensor:
    """Mean post-RoPE key over all sequences and positions (equation 19): fp64 [H, D]."""
    return traces.k.double().mean(dim=(0, 2))


LossFunction = Callable[[torch.Tensor, AttentionProblem], torch.Tensor]


class Learned(NamedTuple):
    rotation: torch.Tensor  # fp64 [H, D, D], base times correction
    before: torch.Tensor  # held-out loss of the base, fp32 [H] on the CPU
    after: torch.Tensor  # held-out loss of the selected rotation, never above `before`


def learn_rotation(
    loss: LossFunction,
    base: torch.Tensor,
    train: AttentionProblem,
    heldout: AttentionProblem,
    settings: OptRSettings,
    steps: int,
) -> Learned:
    """Learn base @ exp(A - A^T) of every head; per head, the best held-out candidate is kept.

    Args:
        loss: per-head loss [H] of fp32 rotations [H, D, D] on a problem, differentiable.
        base: fp64 [H, D, D].
        train, heldout: the layer's problems.
        settings: hyperparameters. Candidates are step 0, every selection_every steps, the last.
        steps: Adam steps.

    Raises:
        CalibrationError: the loss of the base is not finite.
    """
    generator = torch.zeros(base.shape, device=base.device, requires_grad=True)
    best, start = torch.zeros_like(generator), base.float()
    optimizer = torch.optim.Adam([generator], lr=settings.lr)
    random = torch.Generator().manual_seed(settings.seed)
    before = after = torch.full((base.shape[0],), torch.inf, device=base.device)
    for step in range(steps + 1):
        if step in (0, steps) or step % settings.selection_every == 0:
            with torch.no_grad():
                now = loss(start @ skew_exp(generator), heldout)
            best = torch.where((now < after)[:, None, None], generator.detach(), best)
            after = torch.minimum(now, after)
            before = now if step == 0 else before
            if not torch.isfinite(before).all():
                raise CalibrationError("The loss of the base rotation is not finite.")
        if step == steps:
            break
        optimizer.param_groups[0]["lr"] = settings.learning_rate(step)
        optimizer.zero_grad()
        with torch.enable_grad():
            total = loss(start @ skew_exp(generator), _draw(train, settings, random)).sum()
            if settings.proximal:
                skew = generator - generator.mT
                total = total + settings.proximal * skew.square().mean(dim=(1, 2)).sum()
            total.backward()
        optimizer.step()
    return Learned(base @ skew_exp(best.double()), before.cpu(), after.cpu())


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

    def effective_keys(rotation: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
        rows = rotated_rows(problem.k, rotation, quantizer.k_clip, quantizer.group_size)
        return rows @ rotation.mT.unsqueeze(1)  # [H, B, M, D]

    def loss_k(rotation: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
        return key_loss(effective_keys(rotation, problem), problem, settings.lambda_k)

    def loss_v(rotation: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
        rows = rotated_rows(problem.v, rotation, quantizer.v_clip, quantizer.group_size)
        # (p V~') R^T instead of p (V~' R^T): there are fewer scored queries than keys.
        return value_loss(problem.p @ rows @ rotation.mT.unsqueeze(1), problem)

    steps = settings.steps if settings.learn_keys else 0
    keys = learn_rotation(loss_k, k_base, problems[0], problems[1], settings, steps)
    selected = keys.rotation.float()
    problems = [value_problem(p, effective_keys(selected, p)) for p in problems]
    steps = settings.steps if settings.learn_values else 0
    values = learn_rotation(loss_v, v_base, problems[0], problems[1], settings, steps)
    return OptRLayer(mean, keys, values)


def rotated_rows(
    x: torch.Tensor, rotation: torch.Tensor, clip: Clip, group_size: int
) -> torch.Tensor:
    """Q_2(x R), straight-through in R: x [H, B, M, D] and rotation [H, D, D] to [H, B, M, D]."""
    rotated = torch.bmm(x.flatten(1, 2), rotation)  # [H, B * M, D]
    return fake_quantize(rotated, clip, group_size).view(x.shape)
