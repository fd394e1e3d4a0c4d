"""How a memory budget becomes tokens of packed cache, BF16 windows and running requests.

    bytes = tokens * bytes_per_token + (R + 1) * ring_bytes + num_sink_groups(R) * sink_bytes

The +1 is SGLang's dummy request row. R, the number of running requests, is the user's value, or
as many as fit in a fifth of the budget. Every rank must reach the same R and the same number of
tokens: the budget that SGLang profiles is already the minimum over tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import WindowConfig
from ..layout import GQALayout

WINDOW_SHARE = 0.2
"""Part of the budget that windows may take when the user names no number of requests."""

DEFAULT_MAX_REQUESTS = 256
"""Running requests when the user names no number and the budget allows more."""

BYTES_PER_TABLE_SLOT = 8
"""The sink tag of a slot, for all layers together."""


def num_sink_groups(max_requests: int, windows: WindowConfig) -> int:
    """Sink groups for R running requests: one each, as many again for prefixes that only the
    radix cache holds, and two spare."""
    return 2 * max_requests + 2 if windows.sink_tokens else 0


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Everything that decides how many bytes the cache of one rank takes.

    Attributes:
        layout: of one layer on this rank.
        num_layers: layers on this rank.
        windows: sink and recent tokens.
        window_dtype: bf16, or fp32 for a model computed in fp32.
    """

    layout: GQALayout
    num_layers: int
    windows: WindowConfig
    window_dtype: torch.dtype = torch.bfloat16

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.layout.bytes_per_token + BYTES_PER_TABLE_SLOT

    @property
    def window_row_bytes(self) -> int:
        """Bytes of one token in the windows, all layers."""
        layout = self.layout
        elements = 2 * layout.num_kv_heads * layout.head_dim
        return self.num_layers * elements * self.window_dtype.itemsize

    def window_bytes(self, max_requests: int) -> int:
        """Bytes of all rings and sink groups for R running requests."""
        ring_tokens = (max_requests + 1) * self.windows.recent_tokens
        sink_tokens = num_sink_groups(max_requests, self.windows) * self.windows.sink_tokens
        return (ring_tokens + sink_tokens) * self.window_row_bytes


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """The result: how much of everything to allocate."""

    max_tokens: int
    max_requests: int


def plan_budget(
    shape: CacheShape, available_bytes: int, requested: int | None, limit: int | None = None
) -> CacheBudget:
    """Split a budget.

    Args:
        shape: sizes of one rank.
        available_bytes: budget of this rank, the same on all of them.
        requested: running requests the user asked for, per scheduler; None to choose.
        limit: largest choice when nothing was asked for (the largest captured batch).

    Raises:
        ValueError: the windows of the requested requests leave no room for tokens.
    """
    if requested is None:
        most = min(DEFAULT_MAX_REQUESTS, limit or DEFAULT_MAX_REQUESTS)
        share = int(available_bytes * WINDOW_SHARE)
        per_request = shape.window_bytes(1) - shape.window_bytes(0)
        fits = (share - shape.window_bytes(0)) // per_request if per_request else most
        requested = max(1, min(most, fits))
    left = available_bytes - shape.window_bytes(requested)
    # The dummy page is allocated on top of the tokens.
    tokens = left // shape.bytes_per_token - shape.layout.page_size
    tokens = tokens // shape.layout.page_size * shape.layout.page_size
    if tokens <= 0:
        windows = shape.windows
        raise ValueError(
            f"the windows of {requested} running requests ({windows.recent_tokens} recent and "
            f"{windows.sink_tokens} sink tokens each) need "
            f"{shape.window_bytes(requested) / 2**30:.2f} GiB, but the KV cache may take only "
            f"{available_bytes / 2**30:.2f} GiB; lower --max-running-requests or "
            "--kv-quant-recent-tokens, or raise --mem-fraction-static."
        )
    return CacheBudget(tokens, requested)
