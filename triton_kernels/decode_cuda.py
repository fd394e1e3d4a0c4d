"""Launcher of decode.cu: BF16 decode attention in one launch on NVIDIA GPUs (sm_80 and newer)."""

from __future__ import annotations

import ctypes
import functools
import pathlib
from typing import TYPE_CHECKING

import torch

from ..layout import PackedKV, ReadPlan, WindowKV
from .nvrtc import Kernel, compile_cubin

if TYPE_CHECKING:
    from .decode import DecodeWorkspace

WARPS = 4
STAGES = 4
TILE = 32
HEADS_PER_CTA = 8
SOURCE = pathlib.Path(__file__).with_name("decode.cu")


class _Params(ctypes.Structure):
    """`Params` of decode.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("q", "k_codes", "k_meta", "v_codes", "v_meta"),
                *("ring_k", "ring_v", "sink_k", "sink_v"),
                *("page_table", "kv_lens", "ring_row", "ring_begin", "sink_group"),
                *("o_parts", "lse_parts", "counters", "out", "lse"),
            )
        ),
        *((name, ctypes.c_int64) for name in ("stride_q_batch", "stride_q_head", "stride_table")),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("num_kv_heads", "recent_tokens"),
                *("num_splits", "window_splits", "min_split_tokens"),
            )
        ),
        ("sm_scale", ctypes.c_float),
    )


def supports(q: torch.Tensor, window: WindowKV) -> bool:
    """Whether this kernel serves the call; the Triton kernels serve every other one."""
    return (
        q.is_cuda
        and torch.version.hip is None
        and q.dtype == window.ring_k.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and q.stride(0) % 8 == q.stride(1) % 8 == 0
        and q.data_ptr() % 16 == 0
    )


def _shared_bytes(head_dim: int, group_size: int) -> int:
    stage = 2 * TILE * (head_dim // 4 + 4 * (head_dim // group_size))
    return WARPS * STAGES * stage


def constants(q: torch.Tensor, packed: PackedKV, window: WindowKV) -> dict[str, int]:
    """The macros of decode.cu for one call."""
    head_dim = q.shape[2]
    return {
        "HEAD_DIM": head_dim,
        "GROUP_SIZE": head_dim // packed.k_meta.shape[3],
        "PAGE_SIZE": packed.page_size,
        "SINKS": window.sink_tokens,
        "GROUP": q.shape[1] // packed.k_codes.shape[1],
    }


def parameters_and_grid(
    q: torch.Tensor,
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    sm_scale: float,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[ctypes.Structure, tuple[int, int, int]]:
    """The kernel's only argument, and its grid."""
    batch, num_q_heads, _ = q.shape
    num_pages, num_kv_heads, page_size, _ = packed.k_codes.shape
    if num_pages * num_kv_heads * page_size >= 2**32:
        raise ValueError(
            "the packed cache has 2^32 head rows or more; the kernel counts in 32 bits"
        )
    pointers = (
        *(q, packed.k_codes, packed.k_meta, packed.v_codes, packed.v_meta),
        *(window.ring_k, window.ring_v, window.sink_k, window.sink_v),
        *(plan.page_table, plan.kv_lens, plan.ring_row, plan.ring_begin, plan.sink_group),
        *(workspace.o_parts, workspace.lse_parts, workspace.counters, out, lse),
    )
    parameters = _Params(
        *(tensor.data_ptr() for tensor in pointers),
        q.stride(0),
        q.stride(1),
        plan.page_table.stride(0),
        num_kv_heads,
        window.recent_tokens,
        workspace.num_splits,
        workspace.window_splits,
        workspace.min_split_tokens,
        sm_scale,
    )
    head_blocks = -(-(num_q_heads // num_kv_heads) // HEADS_PER_CTA)
    num_parts = workspace.num_splits + workspace.window_splits
    return parameters, (num_kv_heads * head_blocks, batch, num_parts)


@functools.cache
def _kernel(device: int, macros: tuple[tuple[str, int], ...]) -> Kernel:
    """The kernel for one set of constants; compiled on first use, about a second."""
    major, minor = torch.cuda.get_device_capability(device)
    options = tuple(f"-D{name}={value}" for name, value in macros)
    cubin = compile_cubin(SOURCE.read_text(), SOURCE.name, f"{major}{minor}", options)
    values = dict(macros)
    shared_bytes = _shared_bytes(values["HEAD_DIM"], values["GROUP_SIZE"])
    with torch.cuda.device(device):
        return Kernel(cubin, "decode_gqa", shared_bytes)


def launch(
    q: torch.Tensor,
    packed: PackedKV,
    window: WindowKV,
    plan: ReadPlan,
    sm_scale: float,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Whole decode attention of one layer; arguments as :func:`.decode.decode`, checked there."""
    kernel = _kernel(q.device.index, tuple(constants(q, packed, window).items()))
    parameters, grid = parameters_and_grid(q, packed, window, plan, sm_scale, workspace, out, lse)
    with torch.cuda.device(q.device):
        kernel.launch(grid, 32 * WARPS, parameters)
