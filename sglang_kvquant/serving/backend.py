"""The attention backend: builds a step's plan, calls the device's operations, does no arithmetic.

SGLang's contract in short: ``init_forward_metadata`` runs once per step, then ``forward_decode``
or ``forward_extend`` once per layer. With CUDA graphs ``init_forward_metadata_out_graph`` runs
before every replay instead, outside the graph, and the captured layers may read only static
buffers: the scheduler may change ``req_to_token`` and our tables as soon as it has returned.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ..layout import ReadPlan
from ..reference.write import LayerTransform
from ..rotation import rotate_heads
from . import compat
from .ops import AttentionOps, select_ops
from .pool import PackedKVPool
from .weights import applied_rotations
from .windows import StepPlan, WritePlan


class KVQuantAttnBackend(AttentionBackend):
    """Attention over a packed cache with BF16 windows.

    Raises:
        HookError: the constructor refuses to serve unless every hook is in place, the pool is the
            packed one, and the weights of this model were folded exactly once.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        compat.verify_hooks()
        self.options = compat.options_of(model_runner.server_args)
        pool = model_runner.token_to_kv_pool
        if self.options is None or not isinstance(pool, PackedKVPool):
            raise compat.HookError(
                f"the attention backend of --kv-quant was built over a {type(pool).__name__}; "
                "start the server with --kv-quant METHOD and without --attention-backend."
            )
        applied = applied_rotations(model_runner.model)
        self.transforms: dict[int, LayerTransform] = applied.transforms
        self.token_to_kv_pool = pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.tables = pool.tables
        self.last_layer_id = pool.start_layer + pool.layer_num - 1
        if self.req_to_token_pool.req_to_token.shape[0] != pool.max_requests + 1:
            raise compat.HookError(
                f"SGLang has {self.req_to_token_pool.req_to_token.shape[0]} request rows, the "
                f"windows {pool.max_requests + 1}."
            )
        self.device = torch.device(model_runner.device)
        self.ops: AttentionOps = select_ops(
            self.device, self.req_to_token_pool.req_to_token.shape[1]
        )
        self.plan: StepPlan | None = None
        self._static: StepPlan | None = None
        compat.on_row_alloc(self.req_to_token_pool, self.tables.note_new_rows)

    def support_triton(self) -> bool:
        return self.device.type != "cpu"

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a step that runs eagerly."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.plan = None
        elif mode.is_decode():
            self.plan = self._plan_decode(forward_batch, self._max_len(forward_batch))
        elif mode.is_extend():
            self.plan = self._plan_extend(forward_batch)
        else:
            raise NotImplementedError(f"--kv-quant serves no {mode} batches")

    def _max_len(self, forward_batch: Any) -> int:
        lens = forward_batch.seq_lens_cpu
        return int((forward_batch.seq_lens if lens is None else lens).max())

    def _plan_decode(self, forward_batch: Any, max_len: int) -> StepPlan:
        return self.tables.plan_decode(
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.out_cache_loc,
            self.req_to_token_pool.req_to_token,
            max_len,
        )

    def _plan_extend(self, forward_batch: Any) -> StepPlan:
        return self.tables.plan_extend(
            forward_batch.req_pool_indices,
            forward_batch.extend_prefix_lens,
            forward_batch.extend_seq_lens,
            forward_batch.out_cache_loc,
            self.req_to_token_pool.req_to_token,
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers that captured decode steps read."""
        if not self.ops.supports_cuda_graph:
            raise ValueError(
                f"the {self.ops.name} operations of --kv-quant cannot be captured in CUDA graphs; "
                "start the server with --disable-cuda-graph."
            )
        pool, context = self.token_to_kv_pool, self.req_to_token_pool.req_to_token.shape[1]

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        max_pages = -(-context // pool.page_size)
        read = ReadPlan(
            page_table=zeros(max_bs, max_pages),
            kv_lens=zeros(max_bs),
            ring_row=zeros(max_bs),
            ring_begin=zeros(max_bs),
            sink_group=zeros(max_bs, pool.shape.windows.sink_tokens),
        )
        write = WritePlan(*(zeros(max_bs, dtype=torch.int64) for _ in range(3)))
        self._static = StepPlan(read, write)

    def init_forward_metadata_out_graph(
        self, forward_batch: Any, in_capture: bool = False
    ) -> None:
        """Plan a step and copy the plan to where its graph reads it."""
        if not forward_batch.forward_mode.is_decode():
            raise NotImplementedError("--kv-quant captures decode steps only")
        if self._static is None:
            raise RuntimeError("init_cuda_graph_state was not called")
        fresh = self._plan_decode(forward_batch, self.req_to_token_pool.req_to_token.shape[1])
        self.plan = self._static.first_rows(forward_batch.batch_size)
        self.plan.copy_(fresh)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One new token per request; q [batch, num_q_heads * head_dim], k and v likewise."""
        plan, transform, q, k, v = self._prepare(q, k, v, layer, save_kv_cache, kwargs)
        packed, window = self.token_to_kv_pool.layer(layer.layer_id)
        q_rot = self.ops.rotate_query(q, transform)
        self.ops.write_kv(packed, window, k, v, transform, plan.write, with_ring=True)
        out = self.ops.decode(q_rot, packed, window, plan, layer.scaling)
        return self._finish(out, transform, layer, q)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Several new tokens per request; q [num_tokens, num_q_heads * head_dim]."""
        plan, transform, q, k, v = self._prepare(q, k, v, layer, save_kv_cache, kwargs)
        packed, window = self.token_to_kv_pool.layer(layer.layer_id)
        q_rot = self.ops.rotate_query(q, transform)
        rotated = self.ops.write_kv(packed, window, k, v, transform, plan.write, with_ring=False)
        assert rotated is not None
        k_rot, v_rot = rotated
        out = self.ops.extend(q_rot, k_rot, v_rot, packed, window, plan, layer.scaling)
        # The new tokens overwrite ring columns that this step's queries still had to read.
        self.ops.write_ring(window, k_rot, v_rot, plan.write)
        return self._finish(out, transform, layer, q)

    def _prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> tuple[StepPlan, LayerTransform, torch.Tensor, torch.Tensor, torch.Tensor]:
        if not save_kv_cache or k is None or v is None:
            raise NotImplementedError("--kv-quant serves no model that shares KV between layers")
        given = [name for name, value in kwargs.items() if value is not None]
        if given:
            raise NotImplementedError(f"--kv-quant does not know the attention arguments {given}")
        if self.plan is None:
            raise RuntimeError("attention ran before init_forward_metadata")
        return (
            self.plan,
            self.transforms[layer.layer_id],
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_k_head_num, layer.head_dim),
        )

    def _finish(
        self, out: torch.Tensor, transform: LayerTransform, layer: Any, q: torch.Tensor
    ) -> torch.Tensor:
        """Leave the frame of R_V where o_proj does not: [num_tokens, num_q_heads * head_dim]."""
        if layer.layer_id == self.last_layer_id:
            self.ops.finish_step()
        if transform.v_rotation is not None:
            out = rotate_heads(out.float(), transform.v_rotation.transpose(-1, -2))
        return out.to(q.dtype).flatten(1)
