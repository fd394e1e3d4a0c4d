"""The steps of serving as kernels on CUDA, behind :class:`.ops.AttentionOps`."""

from __future__ import annotations

import torch

from ..kernels.causal import ChunkAttention, ChunkPlan
from ..kernels.decode import DecodeWorkspace, decode
from ..kernels.extend import extend
from ..kernels.long_prefix import (
    PIECE_TOKENS,
    LongPrefix,
    PrefixAttention,
    plan_pieces,
    worth_unpacking,
)
from ..kernels.rotate_query import rotate_query
from ..kernels.write import write_kv
from ..layout import PackedKV, WindowKV
from ..reference.write import LayerTransform
from .windows import ExtendLens, StepPlan, WritePlan


class KernelOps:
    """Kernels for write, decode and extend.

    When the model computes in 16 bits, the causal part of an extend step and a prefix that many
    new tokens read go to the given kernels, else to our own; the name says which.

    Args:
        max_context_len: longest sequence, which sizes the splits of decode.
        causal: attention of the current chunk; None for our own kernel.
        prefix: attention to an unpacked prefix; None to read it packed always. Needs causal.
    """

    supports_cuda_graph = True

    def __init__(
        self,
        max_context_len: int,
        causal: ChunkAttention | None = None,
        prefix: PrefixAttention | None = None,
    ) -> None:
        self.max_context_len = max_context_len
        chunk = "our own kernel" if causal is None else causal.name
        also = "" if prefix is None else " and a long prefix"
        self.name = f"kernels, the current chunk of a prefill{also} by {chunk}"
        # Captured steps keep the workspace of their batch size, so none is ever replaced.
        self._workspaces: dict[int, DecodeWorkspace] = {}
        self._causal, self._prefix = causal, prefix
        self._planned: ExtendLens | None = None
        self._long_prefix: LongPrefix | None = None  # of the planned step
        self._unpacked: tuple[torch.Tensor, torch.Tensor] | None = None

    def rotate_query(self, q: torch.Tensor, transform: LayerTransform) -> torch.Tensor:
        rotation = transform.k_rotation
        if rotation is None:
            return q
        return rotate_query(q, rotation, rotation.shape[0])

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
        return write_kv(
            packed,
            window,
            k,
            v,
            transform,
            write.out_cache_loc,
            write.ring_index if with_ring else None,
            write.sink_index,
            emit=not with_ring,
        )

    def write_ring(
        self, window: WindowKV, k_rot: torch.Tensor, v_rot: torch.Tensor, write: WritePlan
    ) -> None:
        num_columns = window.recent_tokens
        if num_columns == 0:
            return
        # Tokens that are not kept go to row 0, SGLang's dummy: selecting the others would make the
        # host wait for their number.
        index = write.ring_index.clamp(min=0)
        row = torch.div(index, num_columns, rounding_mode="floor")
        row = row.where(write.ring_index >= 0, 0)
        column = index % num_columns
        window.ring_k[row, :, column] = k_rot.to(window.ring_k.dtype)
        window.ring_v[row, :, column] = v_rot.to(window.ring_v.dtype)

    def finish_step(self) -> None:
        pass

    def _workspace(self, q: torch.Tensor, packed: PackedKV, window: WindowKV) -> DecodeWorkspace:
        batch, num_q_heads, head_dim = q.shape
        if batch not in self._workspaces:
            # All steps follow each other on one stream, so workspaces may share buffers.
            spaces = self._workspaces.values()
            largest = max(spaces, key=lambda space: space.o_parts.numel(), default=None)
            self._workspaces[batch] = DecodeWorkspace.allocate(
                batch,
                num_q_heads,
                packed.k_codes.shape[1],
                head_dim,
                self.max_context_len,
                window.sink_tokens + window.recent_tokens,
                q.device,
                reuse=largest,
            )
        return self._workspaces[batch]

    def decode(
        self,
        q: torch.Tensor,
        packed: PackedKV,
        window: WindowKV,
        plan: StepPlan,
        sm_scale: float,
    ) -> torch.Tensor:
        workspace = self._workspace(q, packed, window)
        out, _ = decode(q, packed, window, plan.read, sm_scale, workspace=workspace)
        return out

    def _plan_prefix(
        self, lens: ExtendLens, q: torch.Tensor, num_kv_heads: int
    ) -> LongPrefix | None:
        """How to unpack the cached tokens of this step; None to read them packed."""
        if self._prefix is None:
            return None
        if self._unpacked is None:  # by the first prefill of all: memory is short later, not then
            rows = min(PIECE_TOKENS, self.max_context_len)
            shape = (2, rows, num_kv_heads, q.shape[2])
            k, v = torch.empty(shape, dtype=q.dtype, device=q.device)
            self._unpacked = (k, v)
        if not worth_unpacking(lens.qo_indptr_cpu.diff().tolist(), lens.prefix_lens_cpu):
            return None
        k, v = self._unpacked
        bounds = lens.qo_indptr_cpu.tolist()
        pieces = plan_pieces(bounds, lens.prefix_lens_cpu, k.shape[0], q.device)
        return LongPrefix(pieces, self._prefix, k, v)

    def _plan_dense(
        self, lens: ExtendLens, q: torch.Tensor, num_kv_heads: int, sm_scale: float
    ) -> tuple[ChunkAttention | None, LongPrefix | None]:
        """The dense kernels, planned for this step; None to use our own."""
        if self._causal is None or q.dtype == torch.float32:
            return None, None
        if self._planned is not lens:
            _, num_q_heads, head_dim = q.shape
            self._causal.plan(
                ChunkPlan(
                    lens.qo_indptr,
                    lens.qo_indptr_cpu,
                    lens.max_extend_len,
                    num_q_heads,
                    num_kv_heads,
                    head_dim,
                    sm_scale,
                    q.dtype,
                )
            )
            self._long_prefix = self._plan_prefix(lens, q, num_kv_heads)
            self._planned = lens
        return self._causal, self._long_prefix

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
        lens = plan.extend
        assert lens is not None
        causal, prefix = self._plan_dense(lens, q, k_rot.shape[1], sm_scale)
        out, _ = extend(
            q,
            k_rot,
            v_rot,
            lens.qo_indptr,
            packed,
            window,
            plan.read,
            sm_scale,
            max_extend_len=lens.max_extend_len,
            has_prefix=lens.has_prefix,
            causal=causal,
            prefix=prefix,
        )
        return out
