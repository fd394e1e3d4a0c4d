"""Write step in one launch: rotate, centre, clip, quantize, pack and scatter keys and values.

Mirrors :mod:`sglang_kvquant.reference.write`. Given the same rotated rows, codes, scales and
zeros are bit-exact to :mod:`sglang_kvquant.quantizer`: scale and zero come from the same fp32
operations, each correctly rounded, and codes from comparisons that agree with the rounded
division.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..config import Clip
from ..layout import PackedKV, WindowKV
from ..reference.write import LayerTransform

FP16_MAX = tl.constexpr(65504.0)

CLIP_NONE = tl.constexpr(0)
CLIP_PERCENTILE = tl.constexpr(1)
CLIP_MAXSCALE = tl.constexpr(2)


@triton.jit
def _rotated_rows(
    x_ptr,
    stride_x_token,
    rotation_ptr,
    offs_t,
    mask_t,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Rows of one head times its rotation: fp32 [BLOCK_T, HEAD_DIM].

    Without a rotation many rows are multiplied by the identity, which is exact: the layout of a
    product keeps a row within four lanes, so that the reductions over rows that follow need few
    shuffles.
    """
    offs_d = tl.arange(0, HEAD_DIM)
    x_rows = x_ptr + offs_t[:, None].to(tl.int64) * stride_x_token
    if HAS_ROTATION or BLOCK_T > 16:
        rows = tl.zeros([BLOCK_T, HEAD_DIM], tl.float32)
        for start in tl.static_range(0, HEAD_DIM, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + offs_k[None, :], mask=mask_t[:, None], other=0.0)
            if HAS_ROTATION:
                matrix = tl.load(rotation_ptr + offs_k[:, None] * HEAD_DIM + offs_d[None, :])
            else:
                matrix = (offs_k[:, None] == offs_d[None, :]).to(tl.float32)
            rows = tl.dot(x.to(DOT_DTYPE), matrix.to(DOT_DTYPE), acc=rows, input_precision="ieee")
    else:
        rows = tl.load(x_rows + offs_d[None, :], mask=mask_t[:, None], other=0.0).to(tl.float32)
    return rows


@triton.jit
def _halves(x, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr):
    """Split the columns of x in two: [BLOCK_T, WIDTH] to two of [BLOCK_T, WIDTH / 2]."""
    return tl.split(tl.permute(tl.reshape(x, [BLOCK_T, 2, WIDTH // 2]), (0, 2, 1)))


@triton.jit
def _clip_threshold(rows, NUM_ABOVE: tl.constexpr, BLOCK_T: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The NUM_ABOVE-th largest |x| of each row, ties counted: fp32 [BLOCK_T].

    Values are sorted in stacks of four, so that a round looks at a quarter of them: it takes the
    largest top, and removes it from every stack that has it on top. Equal values in one stack come
    up again, so after at most NUM_ABOVE rounds the wanted rank is reached; rows that are done keep
    their value.
    """
    low, high = _halves(tl.abs(rows), BLOCK_T, HEAD_DIM)
    a, b = _halves(low, BLOCK_T, HEAD_DIM // 2)
    c, d = _halves(high, BLOCK_T, HEAD_DIM // 2)
    a, b = tl.maximum(a, b), tl.minimum(a, b)
    c, d = tl.maximum(c, d), tl.minimum(c, d)
    a, c = tl.maximum(a, c), tl.minimum(a, c)
    b, d = tl.maximum(b, d), tl.minimum(b, d)
    b, c = tl.maximum(b, c), tl.minimum(b, c)
    threshold = tl.zeros([BLOCK_T], tl.float32)
    missing = tl.full([BLOCK_T], NUM_ABOVE, tl.int32)
    for _ in tl.range(0, NUM_ABOVE):
        largest = tl.max(a, axis=1)
        threshold = tl.where(missing > 0, largest, threshold)
        top = a == largest[:, None]
        missing = missing - tl.sum(top.to(tl.int32), axis=1)
        a = tl.where(top, b, a)
        b = tl.where(top, c, b)
        c = tl.where(top, d, c)
        d = tl.where(top, -1.0, d)
    return threshold


@triton.jit
def _first_boundary(step):
    """The smallest fp32 d whose code is 1 or more: floor(d / step + 0.5) >= 1, rounded as written.

    It is step / 2, or the fp32 number below, whose quotient may round up to it. No such question
    arises at 1.5 and 2.5 steps: those products are exact, and half a unit in the last place of the
    quotient is less there than the distance to the next smaller d.
    """
    half = 0.5 * step
    below = (half.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    reaches = tl.floor(tl.div_rn(below, step) + 0.5) >= 1.0
    return tl.where(reaches, below, half)


@triton.jit
def _quantize_store(
    rows,
    codes_ptr,
    meta_ptr,
    stride_page,
    stride_head,
    slot,
    head,
    mask_t,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CLIP_KIND: tl.constexpr,
    CLIP_RATIO: tl.constexpr,
    NUM_ABOVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Quantize rows and store words and metadata at their slots.

    stride_page and stride_head count rows: a code row has HEAD_DIM / 8 words, a metadata row two
    numbers per group.
    """
    NUM_WORDS: tl.constexpr = HEAD_DIM // 8
    NUM_GROUPS: tl.constexpr = HEAD_DIM // GROUP_SIZE
    if CLIP_KIND == CLIP_PERCENTILE:
        threshold = _clip_threshold(rows, NUM_ABOVE, BLOCK_T, HEAD_DIM)[:, None]
        rows = tl.maximum(tl.minimum(rows, threshold), -threshold)
    groups = tl.reshape(rows, [BLOCK_T, NUM_GROUPS, GROUP_SIZE])
    low = tl.min(groups, axis=2)  # [BLOCK_T, NUM_GROUPS]
    high = tl.max(groups, axis=2)
    if CLIP_KIND == CLIP_MAXSCALE:
        low = low * CLIP_RATIO
        high = high * CLIP_RATIO
        groups = tl.maximum(tl.minimum(groups, high[:, :, None]), low[:, :, None])
        low = tl.min(groups, axis=2)
        high = tl.max(groups, axis=2)
    scale = tl.minimum(tl.div_rn(high - low, tl.full(low.shape, 3.0, tl.float32)), FP16_MAX)
    zero = tl.minimum(tl.maximum(low, -FP16_MAX), FP16_MAX)
    scale = scale.to(tl.float16)
    zero = zero.to(tl.float16)

    # Codes by comparison: the same as rounding the correctly rounded quotient, without a division
    # per element.
    step = scale.to(tl.float32)
    first = _first_boundary(tl.where(step > 0, step, 1.0))
    first = tl.where(step > 0, first, float("inf"))[:, :, None]
    second = tl.where(step > 0, 1.5 * step, float("inf"))[:, :, None]
    third = tl.where(step > 0, 2.5 * step, float("inf"))[:, :, None]
    distance = groups - zero.to(tl.float32)[:, :, None]
    codes = (distance >= first).to(tl.int32)
    codes += (distance >= second).to(tl.int32)
    codes += (distance >= third).to(tl.int32)

    fields = tl.reshape(codes, [BLOCK_T, 8, NUM_WORDS])
    shifts = 2 * tl.arange(0, 8)[None, :, None]
    words = tl.sum(fields << shifts, axis=1).to(tl.uint16)  # [BLOCK_T, NUM_WORDS]

    row = (slot // PAGE_SIZE) * stride_page + head * stride_head + slot % PAGE_SIZE
    offs_w = tl.arange(0, NUM_WORDS)
    tl.store(codes_ptr + row[:, None] * NUM_WORDS + offs_w[None, :], words, mask=mask_t[:, None])
    offs_g = tl.arange(0, NUM_GROUPS)
    meta = meta_ptr + row[:, None] * (2 * NUM_GROUPS) + 2 * offs_g[None, :]
    tl.store(meta, scale, mask=mask_t[:, None])
    tl.store(meta + 1, zero, mask=mask_t[:, None])


@triton.jit
def _copy_window(
    rows,
    buffer_ptr,
    index_ptr,
    num_columns,
    head,
    num_heads,
    offs_t,
    mask_t,
    HEAD_DIM: tl.constexpr,
):
    """Copy rows to [row, head, column] of a window buffer; a negative index writes nothing."""
    index = tl.load(index_ptr + offs_t, mask=mask_t, other=-1)
    row = (index // num_columns * num_heads + head) * num_columns + index % num_columns
    offs_d = tl.arange(0, HEAD_DIM)
    target = buffer_ptr + row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(target, rows.to(buffer_ptr.dtype.element_ty), mask=(index >= 0)[:, None])


@triton.jit
def _write_side(
    x_ptr,
    stride_x_token,
    stride_x_head,
    rotation_ptr,
    stride_r_head,
    offset_ptr,
    codes_ptr,
    meta_ptr,
    out_ptr,
    ring_ptr,
    sink_ptr,
    loc_ptr,
    ring_index_ptr,
    sink_index_ptr,
    num_tokens,
    num_heads,
    ring_columns,
    sink_columns,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_RING: tl.constexpr,
    HAS_SINK: tl.constexpr,
    EMIT: tl.constexpr,
    CLIP_KIND: tl.constexpr,
    CLIP_RATIO: tl.constexpr,
    NUM_ABOVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < num_tokens
    offs_d = tl.arange(0, HEAD_DIM)
    rows = _rotated_rows(
        x_ptr + head * stride_x_head,
        stride_x_token,
        rotation_ptr + head * stride_r_head,
        offs_t,
        mask_t,
        HEAD_DIM,
        BLOCK_T,
        BLOCK_K,
        HAS_ROTATION,
        DOT_DTYPE,
    )
    if HAS_OFFSET:
        rows = rows - tl.load(offset_ptr + head * HEAD_DIM + offs_d)[None, :]
    if EMIT:
        out_row = offs_t[:, None].to(tl.int64) * num_heads + head
        out = out_ptr + out_row * HEAD_DIM + offs_d[None, :]
        tl.store(out, rows.to(out_ptr.dtype.element_ty), mask=mask_t[:, None])
    if HAS_RING:
        _copy_window(
            rows, ring_ptr, ring_index_ptr, ring_columns, head, num_heads, offs_t, mask_t, HEAD_DIM
        )
    if HAS_SINK:
        _copy_window(
            rows, sink_ptr, sink_index_ptr, sink_columns, head, num_heads, offs_t, mask_t, HEAD_DIM
        )
    slot = tl.load(loc_ptr + offs_t, mask=mask_t, other=0).to(tl.int64)
    _quantize_store(
        rows,
        codes_ptr,
        meta_ptr,
        num_heads * PAGE_SIZE,
        PAGE_SIZE,
        slot,
        head,
        mask_t,
        HEAD_DIM,
        GROUP_SIZE,
        PAGE_SIZE,
        CLIP_KIND,
        CLIP_RATIO,
        NUM_ABOVE,
        BLOCK_T,
    )


@triton.jit
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    k_rotation_ptr,
    v_rotation_ptr,
    stride_kr_head,
    stride_vr_head,
    k_offset_ptr,
    k_codes_ptr,
    k_meta_ptr,
    v_codes_ptr,
    v_meta_ptr,
    k_out_ptr,
    v_out_ptr,
    ring_k_ptr,
    ring_v_ptr,
    sink_k_ptr,
    sink_v_ptr,
    loc_ptr,
    ring_index_ptr,
    sink_index_ptr,
    num_tokens,
    num_heads,
    ring_columns,
    sink_columns,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_K_ROTATION: tl.constexpr,
    HAS_V_ROTATION: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_RING: tl.constexpr,
    HAS_SINK: tl.constexpr,
    EMIT: tl.constexpr,
    K_CLIP_KIND: tl.constexpr,
    K_CLIP_RATIO: tl.constexpr,
    K_NUM_ABOVE: tl.constexpr,
    V_CLIP_KIND: tl.constexpr,
    V_CLIP_RATIO: tl.constexpr,
    V_NUM_ABOVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Grid (token blocks, KV heads, 2): keys in plane 0, values in plane 1."""
    if tl.program_id(2) == 0:
        _write_side(
            k_ptr,
            stride_k_token,
            stride_k_head,
            k_rotation_ptr,
            stride_kr_head,
            k_offset_ptr,
            k_codes_ptr,
            k_meta_ptr,
            k_out_ptr,
            ring_k_ptr,
            sink_k_ptr,
            loc_ptr,
            ring_index_ptr,
            sink_index_ptr,
            num_tokens,
            num_heads,
            ring_columns,
            sink_columns,
            HEAD_DIM,
            GROUP_SIZE,
            PAGE_SIZE,
            HAS_K_ROTATION,
            HAS_OFFSET,
            HAS_RING,
            HAS_SINK,
            EMIT,
            K_CLIP_KIND,
            K_CLIP_RATIO,
            K_NUM_ABOVE,
            BLOCK_T,
            BLOCK_K,
            DOT_DTYPE,
        )
    else:
        _write_side(
            v_ptr,
            stride_v_token,
            stride_v_head,
            v_rotation_ptr,
            stride_vr_head,
            k_offset_ptr,
            v_codes_ptr,
            v_meta_ptr,
            v_out_ptr,
            ring_v_ptr,
            sink_v_ptr,
            loc_ptr,
            ring_index_ptr,
            sink_index_ptr,
            num_tokens,
            num_heads,
            ring_columns,
            sink_columns,
            HEAD_DIM,
            GROUP_SIZE,
            PAGE_SIZE,
            HAS_V_ROTATION,
            False,
            HAS_RING,
            HAS_SINK,
            EMIT,
            V_CLIP_KIND,
            V_CLIP_RATIO,
            V_NUM_ABOVE,
            BLOCK_T,
            BLOCK_K,
            DOT_DTYPE,
        )


_DOT_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Operand type of the matrix units for activations of `dtype`."""
    if dtype not in _DOT_DTYPES:
        raise TypeError(f"the kernels take bfloat16, float16 or float32, got {dtype}")
    return _DOT_DTYPES[dtype]


def rotation_stride(rotation: torch.Tensor | None, num_kv_heads: int, head_dim: int) -> int:
    """Stride between heads of a rotation: 0 when it is shared; checks its shape and layout."""
    if rotation is None:
        return 0
    shared, single = (num_kv_heads, head_dim, head_dim), (head_dim, head_dim)
    if rotation.shape not in (shared, single) or not rotation.is_contiguous():
        raise ValueError(
            f"a rotation must be contiguous and of shape {shared} or {single}, "
            f"got {tuple(rotation.shape)}"
        )
    return head_dim * head_dim if rotation.dim() == 3 else 0


def _clip_arguments(clip: Clip, head_dim: int) -> tuple[int, float, int]:
    kind = {"none": 0, "percentile": 1, "maxscale": 2}[clip.kind]
    # The same integer as quantizer.clip_threshold takes from the top.
    num_above = head_dim - min(int(clip.ratio * head_dim), head_dim - 1)
    return kind, clip.ratio, num_above


def _check(
    packed: PackedKV, k: torch.Tensor, v: torch.Tensor, out_cache_loc: torch.Tensor
) -> tuple[int, int, int]:
    num_tokens, num_heads, head_dim = k.shape
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"k and v must agree, got {k.shape} {k.dtype} and {v.shape} {v.dtype}")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("k and v must be contiguous in the last dimension")
    expected = (num_heads, head_dim // 4)
    got = (packed.k_codes.shape[1], packed.k_codes.shape[3])
    if got != expected:
        raise ValueError(f"packed buffers hold (heads, row bytes) {got}, k needs {expected}")
    if out_cache_loc.shape != (num_tokens,):
        raise ValueError(f"out_cache_loc must be [{num_tokens}], got {out_cache_loc.shape}")
    return num_tokens, num_heads, head_dim


def write_kv(
    packed: PackedKV,
    window: WindowKV,
    k: torch.Tensor,
    v: torch.Tensor,
    transform: LayerTransform,
    out_cache_loc: torch.Tensor,
    ring_index: torch.Tensor | None,
    sink_index: torch.Tensor | None,
    *,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    emit: bool = True,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The whole write of one layer in one launch.

    Args:
        packed, window: buffers of the layer, written in place.
        k, v: bf16, fp16 or fp32 [num_tokens, num_kv_heads, head_dim]; token and head may be
            strided.
        transform: rotations (fp32, or already in the dtype of k), mean and quantizer.
        out_cache_loc: int64 [num_tokens], slots.
        ring_index: int64 [num_tokens], row * recent_tokens + column, negative for none; None
            writes no ring.
        sink_index: likewise for sink groups.
        k_out, v_out: contiguous, shaped like k; receive k' and v' instead of new tensors.
        emit: whether k' and v' are wanted; decode reads them back from the ring and passes False.

    Returns:
        k' and v' in the dtype of k, or None when not emitted. The products are taken in the dtype
        of k with fp32 accumulation; quantization sees the fp32 sums.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit.
    """
    num_tokens, num_heads, head_dim = _check(packed, k, v, out_cache_loc)
    if emit:
        k_out = k.new_empty(k.shape) if k_out is None else k_out
        v_out = v.new_empty(v.shape) if v_out is None else v_out
    if num_tokens == 0:
        return (k_out, v_out) if emit else None  # type: ignore[return-value]
    ring = ring_index is not None and window.recent_tokens > 0
    sink = sink_index is not None and window.sink_tokens > 0
    k_clip = _clip_arguments(transform.quantizer.k_clip, head_dim)
    v_clip = _clip_arguments(transform.quantizer.v_clip, head_dim)
    block_t = 16 if num_tokens <= 1024 else 64
    unused = packed.k_codes
    _write_kv_kernel[(triton.cdiv(num_tokens, block_t), num_heads, 2)](
        k,
        v,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        unused if transform.k_rotation is None else transform.k_rotation,
        unused if transform.v_rotation is None else transform.v_rotation,
        rotation_stride(transform.k_rotation, num_heads, head_dim),
        rotation_stride(transform.v_rotation, num_heads, head_dim),
        unused if transform.k_offset is None else transform.k_offset,
        packed.k_codes.view(torch.uint16),
        packed.k_meta,
        packed.v_codes.view(torch.uint16),
        packed.v_meta,
        k_out if emit else unused,
        v_out if emit else unused,
        window.ring_k if ring else unused,
        window.ring_v if ring else unused,
        window.sink_k if sink else unused,
        window.sink_v if sink else unused,
        out_cache_loc,
        ring_index if ring else unused,
        sink_index if sink else unused,
        num_tokens,
        num_heads,
        window.recent_tokens,
        window.sink_tokens,
        HEAD_DIM=head_dim,
        GROUP_SIZE=head_dim // packed.k_meta.shape[3],
        PAGE_SIZE=packed.page_size,
        HAS_K_ROTATION=transform.k_rotation is not None,
        HAS_V_ROTATION=transform.v_rotation is not None,
        HAS_OFFSET=transform.k_offset is not None,
        HAS_RING=ring,
        HAS_SINK=sink,
        EMIT=emit,
        K_CLIP_KIND=k_clip[0],
        K_CLIP_RATIO=k_clip[1],
        K_NUM_ABOVE=k_clip[2],
        V_CLIP_KIND=v_clip[0],
        V_CLIP_RATIO=v_clip[1],
        V_NUM_ABOVE=v_clip[2],
        BLOCK_T=block_t,
        BLOCK_K=min(head_dim, 64),
        DOT_DTYPE=dot_dtype(k.dtype),
        num_warps=4,
    )
    return (k_out, v_out) if emit else None  # type: ignore[return-value]
