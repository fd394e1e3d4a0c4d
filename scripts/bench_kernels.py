"""Measure the kernels on one GPU: time, bytes moved, share of copy bandwidth, ratio to BF16.

    python scripts/bench_kernels.py [--cases decode_32k_32,…] [--json FILE]

Every ratio is against a baseline of the same run. Times are medians over CUDA-graph replays, with
inputs that rotate through more memory than the L2 cache holds where one layer's cache is smaller
than that. BF16 baselines: PyTorch's flash attention (the query heads of a KV head as its query
rows) and a Triton split-KV kernel of the structure of SGLang's; FlashInfer when it is installed.
A baseline that is missing is named in the output.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from sglang_kvquant.kernels.causal import ChunkPlan, FA3Causal, choose_chunk_attention
from sglang_kvquant.kernels.decode import DecodeWorkspace, decode
from sglang_kvquant.kernels.extend import extend
from sglang_kvquant.kernels.long_prefix import PIECE_TOKENS, LongPrefix, plan_pieces
from sglang_kvquant.kernels.rotate_query import rotate_query
from sglang_kvquant.kernels.write import write_kv

from sglang_kvquant.config import QuantizerConfig
from sglang_kvquant.layout import GQALayout, PackedKV, ReadPlan, WindowKV
from sglang_kvquant.reference.write import LayerTransform

L2_BYTES = 60 << 20


@dataclass(frozen=True)
class Shape:
    """Qwen3-8B's attention unless said otherwise."""

    kv_len: int
    batch: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64


DECODE_CASES = {
    "decode_32k_32": Shape(32768, 32),
    "decode_128k_8": Shape(131072, 8),
    "decode_4k_1": Shape(4096, 1),
    "decode_1k_64": Shape(1024, 64),
    "decode_8k_32": Shape(8192, 32),
    "decode_32k_1": Shape(32768, 1),
    "decode_128k_1": Shape(131072, 1),
    "decode_32k_32_page1": Shape(32768, 32, page_size=1),
}
QUICK_CASES = ("decode_32k_32", "decode_128k_8", "decode_4k_1", "decode_1k_64")
PARTS = ("decode", "write", "extend")
# New tokens and cached tokens of one request.
EXTEND_CASES = ((8192, 0), (1024, 32768), (8192, 131072), (256, 32768), (64, 32768), (16, 32768))


def median_us(step: Callable[[int], None], variants: int, repeats: int = 20) -> float:
    """Median time of step(i) in a CUDA graph, i cycling through `variants` input sets."""
    step(0)
    torch.cuda.synchronize()
    graphs = []
    for i in range(variants):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(i)
        graphs.append(graph)
    times = []
    for i in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # A short sleep keeps the launch of the graph out of the measured interval.
        torch.cuda._sleep(20000)
        begin.record()
        graphs[i % variants].replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[3:])[repeats // 2]


def copy_bandwidth_gbs() -> float:
    """Device-to-device copy of 4 GiB, bytes read and written. Not in a graph: there it would
    become a copy-engine node, which is slower."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return 2 * source.nbytes / sorted(times[2:])[5] / 1e3


@dataclass
class Cache:
    packed: PackedKV
    window: WindowKV
    plan: ReadPlan
    q: torch.Tensor


def make_cache(shape: Shape, sinks: int = 64, recent: int = 256) -> Cache:
    layout = GQALayout(
        shape.num_kv_heads, shape.head_dim, min(shape.head_dim, 128), shape.page_size
    )
    pages = -(-shape.kv_len // shape.page_size)
    packed = PackedKV.allocate(layout, pages * shape.batch + 1, "cuda")
    for codes in (packed.k_codes, packed.v_codes):
        codes.random_(0, 256)
    for meta in (packed.k_meta, packed.v_meta):
        meta[..., 0] = torch.rand(meta.shape[:-1], device="cuda") * 0.5 + 0.3
        meta[..., 1] = -1.5 * meta[..., 0]
    ring = torch.randn(layout.window_shape(shape.batch, recent), device="cuda").bfloat16()
    sink = torch.randn(layout.window_shape(shape.batch, sinks), device="cuda").bfloat16()
    order = torch.randperm(pages * shape.batch, device="cuda").int() + 1
    lens = torch.full((shape.batch,), shape.kv_len, dtype=torch.int32, device="cuda")
    rows = torch.arange(shape.batch, dtype=torch.int32, device="cuda")
    plan = ReadPlan(
        order.view(shape.batch, pages),
        lens,
        rows,
        (lens - recent).clamp(min=0),
        rows[:, None].repeat(1, sinks).contiguous(),
    )
    q = torch.randn(shape.batch, shape.num_q_heads, shape.head_dim, device="cuda").bfloat16()
    return Cache(packed, WindowKV(ring, ring.clone(), sink, sink.clone()), plan, q)


@triton.jit
def _bf16_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    lens_ptr,
    o_ptr,
    lse_ptr,
    scale,
    num_kv_heads,
    num_splits,
    stride_indices,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    batch, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(lens_ptr + batch)
    per_split = tl.cdiv(tl.cdiv(kv_len, num_splits), BLOCK_N) * BLOCK_N
    begin = split * per_split
    end = tl.minimum(begin + per_split, kv_len)
    offs_h, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, D)
    mask_h = offs_h < GROUP
    q_row = (batch * num_kv_heads + head) * GROUP + offs_h
    q = tl.load(q_ptr + q_row[:, None] * D + offs_d[None, :], mask=mask_h[:, None], other=0.0)
    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < end
        slot = tl.load(indices_ptr + batch * stride_indices + offs_n, mask=mask_n, other=0)
        row = (slot.to(tl.int64) * num_kv_heads + head) * D
        k = tl.load(k_ptr + row[None, :] + offs_d[:, None], mask=mask_n[None, :], other=0.0)
        logits = tl.where(mask_n[None, :], tl.dot(q, k) * scale, float("-inf"))
        v = tl.load(v_ptr + row[:, None] + offs_d[None, :], mask=mask_n[:, None], other=0.0)
        m_new = tl.maximum(m_i, tl.max(logits, 1))
        p = tl.exp2(logits - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
    part = q_row * num_splits + split
    if begin < end:
        tl.store(o_ptr + part[:, None] * D + offs_d[None, :], acc / l_i[:, None], mask_h[:, None])
        tl.store(lse_ptr + part, m_i + tl.log2(l_i), mask=mask_h)
    else:
        tl.store(lse_ptr + part, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=mask_h)


@triton.jit
def _bf16_merge_kernel(o_ptr, lse_ptr, out_ptr, num_splits, D: tl.constexpr):
    row, offs_d = tl.program_id(0), tl.arange(0, D)
    m_i, l_i, acc = float("-inf"), 0.0, tl.zeros([D], tl.float32)
    for split in range(num_splits):
        lse = tl.load(lse_ptr + row * num_splits + split)
        if lse > float("-inf"):
            o = tl.load(o_ptr + (row * num_splits + split) * D + offs_d)
            m_new = tl.maximum(m_i, lse)
            weight, alpha = tl.exp2(lse - m_new), tl.exp2(m_i - m_new)
            l_i, acc, m_i = l_i * alpha + weight, acc * alpha + o * weight, m_new
    tl.store(out_ptr + row * D + offs_d, (acc / l_i).to(tl.bfloat16))


def bf16_times(shape: Shape) -> dict[str, float]:
    """Times of the BF16 baselines in microseconds; one that cannot run is left out."""
    group = shape.num_q_heads // shape.num_kv_heads
    slots = shape.batch * shape.kv_len
    sets = _variants(2 * slots * shape.num_kv_heads * shape.head_dim * 2)
    dims = (sets, slots, shape.num_kv_heads, shape.head_dim)
    k = torch.empty(dims, dtype=torch.bfloat16, device="cuda").normal_()
    v = torch.empty(dims, dtype=torch.bfloat16, device="cuda").normal_()
    q = torch.randn(shape.batch, shape.num_q_heads, shape.head_dim, device="cuda").bfloat16()
    scale = shape.head_dim**-0.5
    times = {}

    def dense(i: int) -> None:
        shape_k = (shape.batch, shape.kv_len, shape.num_kv_heads, shape.head_dim)
        query = q.view(shape.batch, shape.num_kv_heads, group, shape.head_dim)
        torch.nn.functional.scaled_dot_product_attention(
            query, k[i].view(shape_k).transpose(1, 2), v[i].view(shape_k).transpose(1, 2)
        )

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        times["torch flash"] = median_us(dense, sets)
    order = torch.randperm(slots // 64, device="cuda").int()
    table = (order[:, None] * 64 + torch.arange(64, device="cuda").int()).view(shape.batch, -1)
    lens = torch.full((shape.batch,), shape.kv_len, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    for block_n, warps in ((32, 4), (64, 4), (128, 8)):
        programs = shape.batch * shape.num_kv_heads
        for factor in (2, 6):
            splits = max(1, min(132 * factor // programs, shape.kv_len // block_n, 128))
            o = torch.empty(q.shape[0] * q.shape[1] * splits * shape.head_dim, device="cuda")
            lse = torch.empty(q.shape[0] * q.shape[1] * splits, device="cuda")

            def paged(i, splits=splits, o=o, lse=lse, block_n=block_n, warps=warps):
                _bf16_split_kernel[(shape.batch, shape.num_kv_heads, splits)](
                    q,
                    k[i],
                    v[i],
                    table,
                    lens,
                    o,
                    lse,
                    scale * math.log2(math.e),
                    shape.num_kv_heads,
                    splits,
                    table.stride(0),
                    GROUP=group,
                    D=shape.head_dim,
                    BLOCK_H=16,
                    BLOCK_N=block_n,
                    num_warps=warps,
                    num_stages=3 if block_n < 128 else 2,
                )
                _bf16_merge_kernel[(q.shape[0] * q.shape[1],)](
                    o, lse, out, splits, D=shape.head_dim, num_warps=2
                )

            us = median_us(paged, sets)
            times["triton"] = min(us, times.get("triton", us))
    return times


def _variants(nbytes: int) -> int:
    return max(1, min(16, -(-4 * L2_BYTES // nbytes)))


def packed_bytes(shape: Shape, sinks: int = 64, recent: int = 256) -> tuple[int, int]:
    """Bytes that a decode step must read: packed middle, and BF16 windows."""
    layout = GQALayout(shape.num_kv_heads, shape.head_dim, min(shape.head_dim, 128))
    window = min(sinks + recent, shape.kv_len)
    middle = shape.kv_len - window
    return (
        shape.batch * middle * layout.bytes_per_token,
        shape.batch * window * layout.bf16_bytes_per_token,
    )


def decode_us(shape: Shape, sinks: int, recent: int) -> tuple[float, int, int]:
    """Time of a decode call, and the bytes it must read: packed, and BF16 windows."""
    nbytes, window_bytes = packed_bytes(shape, sinks, recent)
    count = _variants(nbytes + window_bytes)
    caches = [make_cache(shape, sinks, recent) for _ in range(count)]
    q = caches[0].q
    space = DecodeWorkspace.allocate(
        shape.batch,
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.kv_len,
        sinks + recent,
        "cuda",
    )
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], device="cuda")
    scale = shape.head_dim**-0.5

    def step(i: int) -> None:
        c = caches[i]
        decode(c.q, c.packed, c.window, c.plan, scale, workspace=space, out=out, lse=lse)

    return median_us(step, count), nbytes, window_bytes


def bench_decode(shape: Shape, bandwidth: float, baselines: bool = True) -> dict:
    """One decode case with the default windows, and the packed part without any window."""
    us, middle_bytes, window_bytes = decode_us(shape, 64, 256)
    packed_us, all_bytes, _ = decode_us(shape, 0, 0)
    gbs = (middle_bytes + window_bytes) / us / 1e3
    packed_gbs = all_bytes / packed_us / 1e3
    result = {
        "us": us,
        "packed_us": packed_us,
        "bytes": middle_bytes + window_bytes,
        "packed_bytes": all_bytes,
        "gbs": gbs,
        "packed_gbs": packed_gbs,
        "share_of_copy": gbs / bandwidth,
        "packed_share_of_copy": packed_gbs / bandwidth,
    }
    torch.cuda.empty_cache()
    if baselines:
        result["bf16_us"] = bf16_times(shape)
        result["speedup"] = min(result["bf16_us"].values()) / us
    return result


def bench_write(num_tokens: int, heads: int = 8, head_dim: int = 128) -> dict:
    """Write of K and V of one layer, and rotation of the queries."""
    layout = GQALayout(heads, head_dim, head_dim, 64)
    packed = PackedKV.allocate(layout, num_tokens // 64 + 2, "cuda")
    window = WindowKV(
        *(
            torch.empty(layout.window_shape(64, n), dtype=torch.bfloat16, device="cuda")
            for n in (256, 256, 64, 64)
        )
    )
    k = torch.randn(num_tokens, heads, head_dim, device="cuda").bfloat16()
    q = torch.randn(num_tokens, 4 * heads, head_dim, device="cuda").bfloat16()
    rotation = torch.linalg.qr(torch.randn(heads, head_dim, head_dim, device="cuda"))[0]
    rotation = rotation.contiguous().bfloat16()
    offset = torch.randn(heads, head_dim, device="cuda")
    transform = LayerTransform(
        rotation, offset, None, QuantizerConfig.for_method("optr", head_dim)
    )
    loc = torch.arange(1, num_tokens + 1, device="cuda")
    ring = torch.arange(num_tokens, device="cuda") % (256 * 64)
    sink = torch.full_like(ring, -1)
    k_out, v_out, q_out = torch.empty_like(k), torch.empty_like(k), torch.empty_like(q)
    write_us = median_us(
        lambda i: write_kv(
            packed, window, k, k, transform, loc, ring, sink, k_out=k_out, v_out=v_out
        ),
        1,
    )
    rotate_us = median_us(lambda i: rotate_query(q, rotation, heads, q_out), 1)
    nbytes = 2 * k.nbytes + num_tokens * layout.bytes_per_token
    return {"us": write_us, "rotate_query_us": rotate_us, "gbs": nbytes / write_us / 1e3}


def bench_extend(num_new: int, prefix: int, heads: int = 8, group: int = 4) -> dict:
    """One request: our own kernel, FlashAttention 3 for the chunk and the prefix if SGLang brings
    it, and PyTorch's causal flash attention where there is no prefix."""
    shape = Shape(max(prefix, 1), 1, heads * group, heads)
    cache = make_cache(shape)
    cache.plan.kv_lens.fill_(prefix)
    cache.plan.ring_begin.fill_(max(prefix - 256, 0))
    q = torch.randn(num_new, heads * group, shape.head_dim, device="cuda").bfloat16()
    k, v = (torch.randn(num_new, heads, shape.head_dim, device="cuda").bfloat16() for _ in "kv")
    bounds = torch.tensor([0, num_new], dtype=torch.int32, device="cuda")
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    scale = shape.head_dim**-0.5

    def step(i: int, **kernels: Any) -> None:
        extend(
            q,
            k,
            v,
            bounds,
            cache.packed,
            cache.window,
            cache.plan,
            scale,
            has_prefix=prefix > 0,
            out=out,
            lse=lse,
            **kernels,
        )

    def dense(i: int) -> None:
        torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
        )

    us = median_us(step, 1)
    flops = 4 * num_new * (prefix + num_new / 2) * heads * group * shape.head_dim
    result = {"us": us, "tflops": flops / us / 1e6}
    fa3 = choose_chunk_attention(torch.device("cuda"))
    if isinstance(fa3, FA3Causal):
        heads_and_dim = (heads * group, heads, shape.head_dim)
        fa3.plan(ChunkPlan(bounds, bounds.cpu(), num_new, *heads_and_dim, scale, q.dtype))
        result["fa3_chunk_us"] = median_us(lambda i: step(i, causal=fa3), 1)
        if prefix:
            pieces = plan_pieces([0, num_new], [prefix], PIECE_TOKENS, q.device)
            space = torch.empty(2, PIECE_TOKENS, heads, shape.head_dim, device="cuda").bfloat16()
            unpacked = LongPrefix(pieces, fa3, space[0], space[1])
            result["fa3_us"] = median_us(lambda i: step(i, causal=fa3, prefix=unpacked), 1)
    if prefix == 0:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            result["torch_flash_us"] = median_us(dense, 1)
    return result


def environment() -> dict:
    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": git("rev-parse", "--short", "HEAD"),
    }


def print_decode(name: str, r: dict) -> None:
    line = (
        f"{name:22s} {r['us']:9.1f} us {r['gbs']:6.0f} GB/s {r['share_of_copy']:6.1%} of copy | "
        f"no window {r['packed_us']:9.1f} us {r['packed_share_of_copy']:6.1%}"
    )
    if "speedup" in r:
        best = min(r["bf16_us"], key=r["bf16_us"].get)
        line += f" | BF16 {r['bf16_us'][best]:9.1f} us ({best}) ratio {r['speedup']:5.2f}x"
    print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", help="comma-separated names; default: all")
    parser.add_argument("--quick", action="store_true", help="the four cases with a goal")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=pathlib.Path, help="write every number to this file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_kernels needs a CUDA GPU; none was found.", file=sys.stderr)
        return 2
    report: dict = {"environment": environment(), "decode": {}, "write": {}, "extend": {}}
    print(report["environment"])
    bandwidth = report["copy_gbs"] = copy_bandwidth_gbs()
    print(f"copy bandwidth {bandwidth:.0f} GB/s (bytes read and written)", flush=True)
    names = list(QUICK_CASES) if args.quick else list(DECODE_CASES)
    if args.cases:
        names = args.cases.split(",")
    for name in names if "decode" in args.parts else ():
        result = bench_decode(DECODE_CASES[name], bandwidth, not args.no_baselines)
        report["decode"][name] = result
        print_decode(name, result)
        torch.cuda.empty_cache()
    for num_tokens in (1, 64, 8192) if "write" in args.parts else ():
        result = report["write"][str(num_tokens)] = bench_write(num_tokens)
        print(
            f"write {num_tokens:6d} tokens   {result['us']:8.1f} us   "
            f"rotate_query {result['rotate_query_us']:8.1f} us",
            flush=True,
        )
    for num_new, prefix in EXTEND_CASES if "extend" in args.parts else ():
        result = report["extend"][f"{num_new}+{prefix}"] = bench_extend(num_new, prefix)
        names = {"fa3_chunk_us": "chunk by FA3", "fa3_us": "all by FA3", "torch_flash_us": "torch"}
        others = [
            f"  {text} {result[key]:8.1f} us" for key, text in names.items() if key in result
        ]
        print(
            f"extend {num_new:6d} tokens after {prefix:6d}: {result['us']:8.1f} us "
            f"{result['tflops']:6.0f} TFLOP/s" + "".join(others),
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
