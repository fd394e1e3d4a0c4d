"""The three steps that a device implements: write, decode, extend. Chosen once, explicitly."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from ..layout import PackedKV, WindowKV
from ..reference.write import LayerTransform
from .windows import StepPlan, WritePlan

logger = logging.getLogger(__name__)


class AttentionOps(Protocol):
    """One implementation of the steps; semantics are those of sglang_kvquant.reference.

    Attributes:
        name: for the log and for error messages.
        supports_cuda_graph: whether a decode step can be captured.
    """

    name: str
    supports_cuda_graph: bool

    def rotate_query(self, q: torch.Tensor, transform: LayerTransform) -> torch.Tensor:
        """q R_K of the query's KV head: [num_tokens, num_q_heads, head_dim], same shape."""

    def write_kv(
        self,
        packed: PackedKV,
        window: WindowKV,
        k: torch.Tensor,
        v: torch.Tensor,
        transform: LayerTransform,
        write: WritePlan,
        with_ring: bool,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Store new tokens, [num_tokens, num_kv_heads, head_dim].

        An extend step reads the old window first: it passes with_ring=False, gets the rotated k
        and v for its attention, and calls :meth:`write_ring` afterwards. What a decode step gets
        is not used.
        """

    def write_ring(
        self, window: WindowKV, k_rot: torch.Tensor, v_rot: torch.Tensor, write: WritePlan
    ) -> None:
        """Copy rotated rows to the rings; follows :meth:`write_kv` of the same step."""

    def finish_step(self) -> None:
        """Called after the last layer of every step; codes may be stored as late as this, except
        where the step itself reads them (a decode step without a ring does)."""

    def decode(
        self,
        q: torch.Tensor,
        packed: PackedKV,
        window: WindowKV,
        plan: StepPlan,
        sm_scale: float,
    ) -> torch.Tensor:
        """[batch, num_q_heads, head_dim] of rotated queries, in the frame of R_V."""

    def extend(
        self,
        q: torch.Tensor,
        k_rot: torch.Tensor,
        v_rot: torch.Tensor,
        packed: PackedKV,
        window: WindowKV,
        plan: StepPlan,
        sm_scale: float,
    ) -> torch.Tensor:
        """[num_tokens, num_q_heads, head_dim]: causal over new tokens, full over the prefix."""


def select_ops(device: torch.device | str, max_context_len: int) -> AttentionOps:
    """The implementation for a device, with a line in the log that names it.

    Args:
        device: of the cache.
        max_context_len: longest sequence that the server accepts.

    Raises:
        ValueError: a device without an implementation.
    """
    ops: AttentionOps
    kind = torch.device(device).type
    if kind == "cpu":
        from .torch_attention import TorchOps

        ops = TorchOps()
    elif kind == "cuda":
        from ..kernels.causal import FA3Causal, choose_chunk_attention
        from .kernel_ops import KernelOps

        chunk = choose_chunk_attention(torch.device(device))
        ops = KernelOps(max_context_len, chunk, chunk if isinstance(chunk, FA3Causal) else None)
    else:
        raise ValueError(f"--kv-quant runs on cuda and cpu, not on {kind}.")
    logger.info("kvquant: attention and cache writes on %s: %s", kind, ops.name)
    return ops
