"""Other projects' dense kernels for extend steps: BF16 or FP16, with the log-sum-exp.

For the current chunk, causal, both take (q, k, v), [num_tokens, heads, head_dim], and return the
output in the dtype of q and the log-sum-exp, fp32 [num_tokens, num_q_heads], natural log. Plan
once per batch, call once per layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .long_prefix import PrefixPiece

LN2 = 0.6931471805599453
FLASHINFER_WORKSPACE_BYTES = 128 * 2**20

CausalAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""(q, k, v) of the current chunk to out, in the dtype of q, and lse, fp32 and natural log."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A batch of chunks.

    Attributes:
        qo_indptr: int32 [batch + 1] on the device, first token of each request.
        qo_indptr_cpu: the same on the host, so that planning does not wait for the device.
        max_extend_len: longest chunk.
        num_q_heads, num_kv_heads, head_dim: of the tensors to come.
        sm_scale: factor of the logits.
        dtype: bf16 or fp16.
    """

    qo_indptr: torch.Tensor
    qo_indptr_cpu: torch.Tensor
    max_extend_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    dtype: torch.dtype


class ChunkAttention(Protocol):
    """A kernel that is planned per batch and called per layer."""

    name: str

    def plan(self, chunks: ChunkPlan) -> None: ...

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class FA3Causal:
    """FlashAttention 3 as SGLang ships it (sgl_kernel): compiled ahead, for sm_90."""

    name = "FlashAttention 3"

    def __init__(self) -> None:
        from sgl_kernel.flash_attn import flash_attn_varlen_func

        self._attention: Callable[..., Any] = flash_attn_varlen_func
        self._chunks: ChunkPlan | None = None

    def plan(self, chunks: ChunkPlan) -> None:
        self._chunks = chunks

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = self._chunks
        assert chunks is not None, "call plan first"
        out, lse, *_ = self._attention(
            q,
            k,
            v,
            cu_seqlens_q=chunks.qo_indptr,
            cu_seqlens_k=chunks.qo_indptr,
            max_seqlen_q=chunks.max_extend_len,
            max_seqlen_k=chunks.max_extend_len,
            softmax_scale=chunks.sm_scale,
            causal=True,
            return_softmax_lse=True,
        )
        return out, lse.t()  # it comes as [num_q_heads, num_tokens]

    def attend_piece(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        piece: PrefixPiece,
        sm_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`.long_prefix.PrefixAttention`; a request without tokens gets lse -inf."""
        out, lse, *_ = self._attention(
            q,
            k,
            v,
            cu_seqlens_q=piece.qo_indptr,
            cu_seqlens_k=piece.kv_indptr,
            max_seqlen_q=piece.max_extend_len,
            max_seqlen_k=piece.max_cached_len,
            softmax_scale=sm_scale,
            causal=False,
            return_softmax_lse=True,
        )
        return out, lse.t()


class FlashInferCausal:
    """FlashInfer's ragged prefill, which nvcc compiles at the first call (1 to 2 minutes)."""

    name = "FlashInfer"

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        space = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD")

    def plan(self, chunks: ChunkPlan) -> None:
        self._wrapper.plan(
            chunks.qo_indptr_cpu,
            chunks.qo_indptr_cpu,
            chunks.num_q_heads,
            chunks.num_kv_heads,
            chunks.head_dim,
            causal=True,
            sm_scale=chunks.sm_scale,
            q_data_type=chunks.dtype,
        )

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._wrapper.run(q, k, v, return_lse=True)
        return out, lse * LN2  # FlashInfer's logarithm is to base 2


def choose_chunk_attention(device: torch.device) -> ChunkAttention | None:
    """The fastest kernel that this machine has; None where only our own can run.

    FlashAttention 3 comes first on sm_90, where SGLang's own default is the same kernel; it is
    also ready at once, while FlashInfer compiles.
    """
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) == (9, 0) and _importable("sgl_kernel.flash_ops"):
        return FA3Causal()
    if importlib.util.find_spec("flashinfer") is not None:
        return FlashInferCausal(device)
    return None


def _importable(module: str) -> bool:
    """Whether a compiled module is installed; a package that does not import counts as absent."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
