"""Decode attention: one query token per request over packed keys and values and BF16 windows.

Two implementations behind one function: decode_cuda (BF16 on NVIDIA GPUs, one launch) and
decode_triton (everything else, and the interpreter). In both, nothing is allocated when a
workspace and outputs are given, nothing reads the device from the host, and grids depend on
shapes only, so that the launches can be captured in a CUDA graph. Splits are sized per request on
the device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ..layout import PackedKV, ReadPlan, WindowKV
from . import decode_cuda, decode_triton

MAX_SPLITS = 256
WINDOW_SPLIT_TOKENS = 64
MAX_WINDOW_SPLITS = 16
CTAS_PER_SM = 4
WAVES = 2
RAGGED_SPLIT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial results of a decode step. Only the counters mean anything between steps."""

    o_parts: torch.Tensor  # fp32, at least batch * num_q_heads * num_parts * head_dim elements
    lse_parts: torch.Tensor  # fp32, at least batch * num_q_heads * num_parts elements
    counters: torch.Tensor  # int32, at least batch * num_q_heads; zero between steps
    num_splits: int  # of the packed middle, at most
    window_splits: int  # of the BF16 windows, at most
    min_split_tokens: int = 256  # a request is split no finer than this

    @classmethod
    def with_splits(
        cls,
        max_batch: int,
        num_q_heads: int,
        head_dim: int,
        num_splits: int,
        window_splits: int,
        device: torch.device | str,
    ) -> DecodeWorkspace:
        """Buffers for every batch up to max_batch, with given numbers of splits."""
        rows = max_batch * num_q_heads * (num_splits + window_splits)
        return cls(
            torch.empty(rows * head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.zeros(max_batch * num_q_heads, dtype=torch.int32, device=device),
            num_splits,
            window_splits,
        )

    @classmethod
    def allocate(
        cls,
        max_batch: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_kv_len: int,
        window_tokens: int,
        device: torch.device | str,
        reuse: DecodeWorkspace | None = None,
    ) -> DecodeWorkspace:
        """Buffers for every batch up to max_batch, with splits that fill the GPU at max_batch.

        Args:
            max_batch: requests of the largest step; a workspace per captured batch size splits
                small batches finer.
            num_q_heads, num_kv_heads, head_dim: of this rank.
            max_kv_len: upper bound of the tokens of a request, known on the host.
            window_tokens: sink_tokens + recent_tokens.
            device: where the cache is.
            reuse: a workspace whose buffers are shared when they are large enough; for steps that
                follow each other on one stream.
        """
        pairs = max_batch * num_kv_heads * -(-num_q_heads // num_kv_heads // 8)
        slots = CTAS_PER_SM * _num_sms(device)
        num_splits, min_tokens = choose_splits(pairs, slots, max_kv_len)
        window_splits = choose_window_splits(pairs, slots, window_tokens)
        rows = max_batch * num_q_heads * (num_splits + window_splits)
        space = reuse
        if reuse is None or not reuse.holds(rows, head_dim, max_batch * num_q_heads):
            space = cls.with_splits(
                max_batch, num_q_heads, head_dim, num_splits, window_splits, device
            )
        return dataclasses.replace(
            space,
            num_splits=num_splits,
            window_splits=window_splits,
            min_split_tokens=min_tokens,
        )

    def holds(self, rows: int, head_dim: int, num_counters: int) -> bool:
        """Whether the buffers are large enough for that many partial rows."""
        return (
            self.o_parts.numel() >= rows * head_dim
            and self.lse_parts.numel() >= rows
            and self.counters.numel() >= num_counters
        )


def _num_sms(device: torch.device | str) -> int:
    """Multiprocessors of the device; an H200's number for the interpreter."""
    if torch.device(device).type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_splits(pairs: int, slots: int, max_kv_len: int) -> tuple[int, int]:
    """Splits of the packed middle, and the fewest tokens of one.

    Args:
        pairs: (request, KV head) pairs of a full batch.
        slots: CTAs that the GPU holds at a time.
        max_kv_len: upper bound of the tokens of a request.

    Short splits cost more in start and merge than they gain once the pairs alone nearly fill the
    GPU. A full batch still gets a few splits, because one long request among short ones would
    otherwise be a single CTA's work.
    """
    min_tokens = 1024 if 2 * pairs >= slots else 256
    useful = -(-max_kv_len // min_tokens)
    ragged = -(-max_kv_len // RAGGED_SPLIT_TOKENS)
    wanted = max(WAVES * slots // max(pairs, 1), min(ragged, 8), 1)
    return min(wanted, useful, MAX_SPLITS), min_tokens


def choose_window_splits(pairs: int, slots: int, window_tokens: int) -> int:
    """CTAs that share the BF16 windows of a (request, KV head) pair."""
    useful = min(-(-window_tokens // WINDOW_SPLIT_TOKENS), MAX_WINDOW_SPLITS)
    return max(1, min(useful, WAVES * slots // max(pairs, 1)))


def _check(
    q: torch.Tensor, packed: PackedKV, plan: ReadPlan, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Check what a mistake in the caller could get wrong."""
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = packed.k_codes.shape[1]
    if num_q_heads % num_kv_heads or num_q_heads // num_kv_heads > 16:
        raise ValueError(
            f"1 to 16 query heads per KV head are supported, got {num_q_heads} for {num_kv_heads}"
        )
    if packed.k_codes.shape[3] * 4 != head_dim:
        raise ValueError(f"q has head_dim {head_dim}, cache {packed.k_codes.shape[3] * 4}")
    if q.stride(-1) != 1 or plan.page_table.stride(-1) != 1:
        raise ValueError("q and page_table must be contiguous in the last dimension")
    for name in ("page_table", "kv_lens", "ring_row", "ring_begin", "sink_group"):
        tensor = getattr(plan, name)
        if tensor.dtype != torch.int32 or tensor.shape[0] < batch:
            raise ValueError(
                f"{name} must be int32 with {batch} rows, got {tensor.dtype} {tensor.shape}"
            )
    if not plan.sink_group[:batch].is_contiguous():
        raise ValueError("sink_group must be contiguous")
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError("out must be contiguous, of the shape and dtype of q")
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError("lse must be contiguous fp32 [batch, num_q_heads]")


def decode(
    q: torch.Tensor,
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    sm_scale: float,
    *,
    workspace: DecodeWorkspace | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token per request over its whole cache, the current token included.

    Args:
        q: rotated queries, bf16, fp16 or fp32 [batch, num_q_heads, head_dim].
        packed, window: buffers of the layer.
        plan: what each request reads; a row with kv_len 0 gives zeros and -inf.
        sm_scale: factor of the logits.
        workspace: partial results; allocated here when not given. With a workspace, `out` and
            `lse` the call allocates nothing and can be captured. Steps that may run at the same
            time (two streams) need a workspace each.
        out: contiguous, shaped like q, in its dtype.
        lse: fp32 [batch, num_q_heads], contiguous.

    Returns:
        out, in the frame of R_V and in the dtype of q, and lse (natural log, fp32).

    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = packed.k_codes.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _check(q, packed, plan, out, lse)
    if workspace is None:
        workspace = DecodeWorkspace.allocate(
            max(batch, 1),
            num_q_heads,
            num_kv_heads,
            head_dim,
            plan.page_table.shape[1] * packed.page_size,
            window.sink_tokens + window.recent_tokens,
            q.device,
        )
    rows = batch * num_q_heads * (workspace.num_splits + workspace.window_splits)
    if not workspace.holds(rows, head_dim, batch * num_q_heads):
        raise ValueError("the decode workspace is smaller than this batch needs")
    if batch == 0:
        return out, lse
    if decode_cuda.supports(q, window):
        decode_cuda.launch(q, packed, window, plan, sm_scale, workspace, out, lse)
    else:
        group = num_q_heads // num_kv_heads
        decode_triton.launch_packed(q, packed, window, plan, sm_scale, workspace, group)
        decode_triton.launch_window(q, packed, window, plan, sm_scale, workspace, group)
        decode_triton.launch_merge(plan, workspace, out, lse, window.sink_tokens)
    return out, lse
