"""Error measures of quantized KV caches on held-out token windows.

Immediate error (OptR, Appendix B): with full-precision activations coming in, only the measured
layer's cache is quantized; ||dy||^2 of the post-W_O output is averaged over query positions, query
heads (each through its own slice of W_O), KV heads and sequences.

End to end: the whole model runs on quantized caches in every layer. KL divergence from the full
precision next-token distribution and negative log-likelihood at every scored position (all but
the last of a window), and the relative squared error of the residual stream after every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..reference.write import LayerTransform
from .simulate import (
    LayerAttention,
    ReadRule,
    plain_attention,
    quantized_layers,
    replaced_attention,
    simulated_attention,
)

Transforms = Mapping[int, LayerTransform]

LOGIT_ROWS = 512
"""Positions per step through the output head: bounds logits to LOGIT_ROWS x vocabulary."""


@dataclass(slots=True)
class OutputErrors:
    """Sums of ||dy||^2 per layer and KV head, over all query positions and over late ones.

    Late positions are those at or after sink_tokens + recent_tokens: the first position that can
    read a quantized token.
    """

    total: torch.Tensor  # fp64 [num_layers, num_kv_heads]
    late: torch.Tensor  # fp64, likewise
    num_total: int = 0  # query positions times query heads of a KV head
    num_late: int = 0

    def mean(self) -> torch.Tensor:
        """Mean over query positions, query heads of the group and sequences."""
        return self.total / self.num_total

    def late_mean(self) -> torch.Tensor:
        return self.late / max(self.num_late, 1)


@dataclass(slots=True)
class Scores:
    """End-to-end measures of one method, a list entry per window."""

    kl: list[torch.Tensor] = field(default_factory=list)  # fp32 [seq_len - 1], nats
    nll: list[torch.Tensor] = field(default_factory=list)  # fp32 [seq_len - 1], nats
    residual_error: torch.Tensor | float = 0.0  # fp64 [num_layers]
    residual_norm: torch.Tensor | float = 0.0  # fp64 [num_layers]


def output_gram(model: Any, num_q_heads: int, head_dim: int) -> list[torch.Tensor]:
    """W_O,j^T W_O,j of every layer: fp32 [num_q_heads, head_dim, head_dim] each.

    ||dy||^2 = d_o gram d_o^T, without going through hidden_size.
    """
    grams = []
    for layer in model.base_model.layers:
        weight = layer.self_attn.o_proj.weight.detach().double()  # [hidden, heads * head_dim]
        columns = weight.unflatten(1, (num_q_heads, head_dim)).transpose(0, 1)
        grams.append((columns.transpose(1, 2) @ columns).float())
    return grams


class Evaluator:
    """Runs one model over token windows, plain and under several methods."""

    def __init__(
        self,
        model: Any,
        methods: Mapping[str, Transforms],
        rule: ReadRule,
        num_kv_heads: int,
    ) -> None:
        """
        Args:
            model: causal language model of transformers, in eval mode.
            methods: transforms of every layer, on the model's device, by name.
            rule: which positions are read unquantized.
            num_kv_heads: of the model.
        """
        self.model = model
        self.methods = dict(methods)
        self.rule = rule
        self.num_kv_heads = num_kv_heads
        self.num_layers = len(model.base_model.layers)
        self.output_errors = {name: self._no_errors() for name in self.methods}
        self.scores = {name: Scores() for name in ("none", *self.methods)}
        config = model.config
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        self._grams = output_gram(model, config.num_attention_heads, head_dim)

    def _no_errors(self) -> OutputErrors:
        def zeros() -> torch.Tensor:
            shape = (self.num_layers, self.num_kv_heads)
            return torch.zeros(shape, dtype=torch.float64, device=self.model.device)

        return OutputErrors(zeros(), zeros())

    @torch.no_grad()
    def run(
        self,
        tokens: torch.Tensor,
        advance: Callable[[], None] = lambda: None,
        end_to_end: bool = True,
    ) -> None:
        """Measure a batch of windows; call again for the next ones.

        Args:
            tokens: int64 [num_windows, seq_len].
            advance: called after each pass: one plain, then one per method.
            end_to_end: False measures the immediate error only.
        """
        tokens = tokens.to(self.model.device)
        plain, plain_residuals = self._forward(tokens, self._measuring(tokens.shape))
        advance()
        if not end_to_end:
            return
        self._score("none", tokens, plain, plain, plain_residuals, plain_residuals)
        for name, transforms in self.methods.items():
            attention = quantized_layers(transforms, self.rule)
            hidden, residuals = self._forward(tokens, attention)
            self._score(name, tokens, plain, hidden, plain_residuals, residuals)
            advance()

    def _measuring(self, shape: torch.Size) -> LayerAttention:
        """Plain attention that also adds up every method's immediate output error."""
        num_windows, seq_len = shape
        windows = self.rule.windows
        first = min(windows.sink_tokens + windows.recent_tokens, seq_len)
        group = self.model.config.num_attention_heads // self.num_kv_heads
        for errors in self.output_errors.values():
            errors.num_total += num_windows * seq_len * group
            errors.num_late += num_windows * (seq_len - first) * group

        def attention(
            layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
        ) -> torch.Tensor:
            exact = plain_attention(q.float(), k.float(), v.float(), sm_scale)
            for name, transforms in self.methods.items():
                out = simulated_attention(q, k, v, transforms[layer_id], self.rule, sm_scale)
                delta = out - exact  # [windows, num_q_heads, seq_len, head_dim]
                squared = ((delta @ self._grams[layer_id]) * delta).sum(-1).double()
                by_head = squared.unflatten(1, (self.num_kv_heads, group)).sum(dim=(0, 2))
                errors = self.output_errors[name]
                errors.total[layer_id] += by_head.sum(-1)  # [num_kv_heads, seq_len] before
                errors.late[layer_id] += by_head[:, first:].sum(-1)
            return exact.to(q.dtype)

        return attention

    def _forward(
        self, tokens: torch.Tensor, attention: LayerAttention
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Final normed hidden states and the residual stream after every layer."""
        residuals: list[torch.Tensor] = []

        def keep(module: Any, args: Any, output: Any) -> None:
            residuals.append(output if isinstance(output, torch.Tensor) else output[0])

        hooks = [layer.register_forward_hook(keep) for layer in self.model.base_model.layers]
        try:
            with replaced_attention(self.model, attention):
                output = self.model.base_model(input_ids=tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return output.last_hidden_state, residuals

    def _score(
        self,
        name: str,
        tokens: torch.Tensor,
        plain: torch.Tensor,
        hidden: torch.Tensor,
        plain_residuals: list[torch.Tensor],
        residuals: list[torch.Tensor],
    ) -> None:
        scores = self.scores[name]
        for window in range(tokens.shape[0]):
            kl, nll = self._next_token(tokens[window], plain[window], hidden[window])
            scores.kl.append(kl.cpu())
            scores.nll.append(nll.cpu())
        pairs = list(zip(plain_residuals, residuals, strict=True))
        scores.residual_error += torch.stack([_squared_norm(ours - full) for full, ours in pairs])
        scores.residual_norm += torch.stack([_squared_norm(full) for full, _ in pairs])

    def _next_token(
        self, tokens: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """KL from the plain distribution and NLL of the text, fp32 [seq_len - 1] each."""
        kl, nll = [], []
        head = self.model.get_output_embeddings()
        for begin in range(0, len(tokens) - 1, LOGIT_ROWS):
            rows = slice(begin, min(begin + LOGIT_ROWS, len(tokens) - 1))
            log_q = head(hidden[rows]).float().log_softmax(-1)  # [rows, vocab]
            if plain is hidden:
                kl.append(torch.zeros(log_q.shape[0], device=log_q.device))
            else:
                log_p = head(plain[rows]).float().log_softmax(-1)
                kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
            target = tokens[rows.start + 1 : rows.stop + 1].unsqueeze(-1)
            nll.append(-log_q.gather(-1, target).squeeze(-1))
        return torch.cat(kl), torch.cat(nll)


def _squared_norm(x: torch.Tensor) -> torch.Tensor:
    return x.float().square().sum(dtype=torch.float64)
