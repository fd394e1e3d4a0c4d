"""Hyperparameters of OptR."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS, WindowConfig
from .errors import CalibrationError

MIN_QUANTIZED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class OptRSettings:
    """Hyperparameters of OptR.

    The paper (Table A) takes lr 0.02, constant, and the last 64 queries. The defaults here score
    queries over the whole sequence with a smaller, decaying step: of the settings tried they gave
    the lowest error per layer on every model measured (docs/accuracy.md).

    Attributes:
        steps: Adam steps for the keys and again for the values; 0 only centres the keys.
        lr: learning rate of the generators A.
        lr_schedule: ``constant``, or ``cosine`` down to 0 at the last step.
        lambda_k: weight of the output error in the key loss.
        num_queries: query positions scored per sequence.
        query_selection: ``last`` positions, or ``spread`` evenly from the first one that reads
            quantized keys to the last.
        sink_tokens: first positions kept in BF16.
        recent_tokens: positions kept in BF16 up to and with the query's own.
        selection_every: steps between held-out evaluations.
        batch_sequences: sequences drawn per step; None takes all of them.
        learn_keys: learn R_K; otherwise it stays the base.
        learn_values: likewise R_V.
        objective: error term: ``output`` after W_O, ``readout`` before it (ablation, Table 4).
        proximal: weight of mean(S^2) of the generator S = A - A^T, which pulls to the base.
        seed: of the draws of batch_sequences.
    """

    steps: int = 80
    lr: float = 0.005
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    lambda_k: float = 1.0
    num_queries: int = 128
    query_selection: Literal["last", "spread"] = "spread"
    sink_tokens: int = DEFAULT_SINK_TOKENS
    recent_tokens: int = DEFAULT_RECENT_TOKENS
    selection_every: int = 20
    batch_sequences: int | None = None
    learn_keys: bool = True
    learn_values: bool = True
    objective: Literal["output", "readout"] = "output"
    proximal: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        WindowConfig(self.sink_tokens, self.recent_tokens)  # validates both
        if self.steps < 0 or self.num_queries < 1 or self.selection_every < 1:
            raise ValueError("steps must be >= 0, num_queries and selection_every >= 1")
        if self.lr <= 0 or self.lambda_k < 0 or self.proximal < 0:
            raise ValueError("lr must be positive, lambda_k and proximal not negative")
        if self.batch_sequences is not None and self.batch_sequences < 1:
            raise ValueError(f"batch_sequences must be positive, got {self.batch_sequences}")
        choices: dict[str, tuple[str, ...]] = {
            "lr_schedule": ("constant", "cosine"),
            "query_selection": ("last", "spread"),
            "objective": ("output", "readout"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if self.lr_schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def query_positions(self, seq_len: int) -> torch.Tensor:
        """Scored query positions of sequences of seq_len tokens: int64 [N], ascending."""
        first = self.sink_tokens + self.recent_tokens  # reads one quantized key
        if seq_len < first + MIN_QUANTIZED_TOKENS:
            raise CalibrationError(
                f"Sequences of {seq_len} tokens are too short: {self.sink_tokens} sink and "
                f"{self.recent_tokens} recent tokens stay in BF16, so at least "
                f"{first + MIN_QUANTIZED_TOKENS} are needed; give a longer --seq-len or smaller "
                "windows."
            )
        if self.query_selection == "last":
            return torch.arange(max(seq_len - self.num_queries, 0), seq_len)
        count = min(self.num_queries, seq_len - first)
        return torch.linspace(first, seq_len - 1, count, dtype=torch.float64).round().long()
