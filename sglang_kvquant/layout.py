"""Byte layout of the packed KV cache and of the BF16 windows: the one place that knows it.

A head row of D codes becomes W = D/8 little-endian 16-bit words. Word j holds the codes of the
dims j, j + W, …, j + 7W, lowest bits first, so that field f of all words together is the
contiguous run of dims [f*W, (f+1)*W):

    byte 2j                             byte 2j + 1
    bits 0-1  2-3   4-5    6-7          bits 0-1  2-3    4-5    6-7
    dim  j    j+W   j+2W   j+3W         dim  j+4W j+5W   j+6W   j+7W

Per group of `group_size` consecutive dims two fp16 numbers follow the storage equation
x ~ zero + scale * code: first the scale, then the zero, so that a group's pair is one 32-bit load.

Buffers are paged, head-major inside a page, so that the tokens of one head are contiguous:
[num_pages, num_kv_heads, page_size, …]. A slot is a token position: page * page_size + offset.
Slot 0 is SGLang's dummy slot for padded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import GROUP_SIZES, check_head_dim

BITS_PER_CODE = 2
MAX_CODE = 3
CODES_PER_BYTE = 4
CODES_PER_WORD = 8
META_BYTES_PER_GROUP = 4
BF16_BYTES = 2


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack 2-bit codes of head rows into bytes.

    Args:
        codes: uint8 [..., head_dim], values 0 to 3; head_dim a multiple of 8.

    Returns:
        uint8 [..., head_dim // 4], in the order of this module's diagram.
    """
    head_dim = codes.shape[-1]
    if head_dim % CODES_PER_WORD:
        raise ValueError(f"head_dim must be a multiple of {CODES_PER_WORD}, got {head_dim}")
    fields = codes.unflatten(-1, (2, 4, head_dim // CODES_PER_WORD))  # [..., byte, field, word]
    packed = fields[..., 0, :] | (fields[..., 1, :] << 2)  # [..., byte, word]
    packed = packed | (fields[..., 2, :] << 4) | (fields[..., 3, :] << 6)
    return packed.transpose(-1, -2).flatten(-2)  # [..., head_dim // 4]


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_codes`: uint8 [..., head_dim // 4] to uint8 [..., head_dim]."""
    words = packed.contiguous().view(torch.int16)  # [..., head_dim // 8], little-endian
    fields = [(words >> shift) & MAX_CODE for shift in range(0, 16, BITS_PER_CODE)]
    return torch.stack(fields, dim=-2).flatten(-2).to(torch.uint8)


def unpack_columns(packed: torch.Tensor) -> torch.Tensor:
    """Codes of many rows of each head, a token per column: what a CPU unpacks fastest.

    Args:
        packed: uint8 [num_heads, length, head_dim // 4].

    Returns:
        int16 [num_heads, head_dim, length].
    """
    words = packed.contiguous().view(torch.int16).transpose(1, 2).contiguous()
    shifts = torch.arange(0, 16, BITS_PER_CODE, dtype=torch.int16, device=packed.device)
    fields = words.unsqueeze(1) >> shifts.view(-1, 1, 1)  # [num_heads, 8, head_dim // 8, length]
    return fields.bitwise_and_(MAX_CODE).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class GQALayout:
    """Shapes and sizes of one layer's cache on one rank.

    Attributes:
        num_kv_heads: KV heads held by this rank.
        head_dim: elements of a key row and of a value row.
        group_size: elements per (scale, zero) pair.
        page_size: tokens per page of SGLang's allocator.
    """

    num_kv_heads: int
    head_dim: int
    group_size: int
    page_size: int = 1

    def __post_init__(self) -> None:
        check_head_dim(self.head_dim)
        if self.group_size not in GROUP_SIZES or self.head_dim % self.group_size:
            raise ValueError(f"group_size {self.group_size} does not fit head_dim {self.head_dim}")
        if self.num_kv_heads < 1 or self.page_size < 1:
            raise ValueError("num_kv_heads and page_size must be positive")

    @property
    def num_groups(self) -> int:
        return self.head_dim // self.group_size

    @property
    def packed_row_bytes(self) -> int:
        """Bytes of one key or value row: codes and metadata."""
        return self.head_dim // CODES_PER_BYTE + self.num_groups * META_BYTES_PER_GROUP

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer, keys and values of all local heads."""
        return 2 * self.num_kv_heads * self.packed_row_bytes

    @property
    def bf16_bytes_per_token(self) -> int:
        """Bytes of one token in one layer of an unquantized BF16 cache; also of a window row."""
        return 2 * self.num_kv_heads * self.head_dim * BF16_BYTES

    def codes_shape(self, num_pages: int) -> tuple[int, int, int, int]:
        return (num_pages, self.num_kv_heads, self.page_size, self.head_dim // CODES_PER_BYTE)

    def meta_shape(self, num_pages: int) -> tuple[int, int, int, int, int]:
        return (num_pages, self.num_kv_heads, self.page_size, self.num_groups, 2)

    def window_shape(self, num_rows: int, num_tokens: int) -> tuple[int, int, int, int]:
        """Shape of a BF16 buffer: rings have a row per request, sinks a row per group."""
        return (num_rows, self.num_kv_heads, num_tokens, self.head_dim)


@dataclass(frozen=True, slots=True)
class PackedKV:
    """One layer's packed buffers; V is in the frame of R_V, K centred and in that of R_K."""

    k_codes: torch.Tensor  # uint8 [num_pages, num_kv_heads, page_size, head_dim // 4]
    k_meta: torch.Tensor  # fp16 [num_pages, num_kv_heads, page_size, num_groups, 2]
    v_codes: torch.Tensor  # uint8, shaped like k_codes
    v_meta: torch.Tensor  # fp16, shaped like k_meta

    @classmethod
    def allocate(cls, layout: GQALayout, num_pages: int, device: torch.device | str) -> PackedKV:
        codes, meta = layout.codes_shape(num_pages), layout.meta_shape(num_pages)

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(codes, torch.uint8),
            zeros(meta, torch.float16),
            zeros(codes, torch.uint8),
            zeros(meta, torch.float16),
        )

    @property
    def page_size(self) -> int:
        return self.k_codes.shape[2]

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.k_codes, self.k_meta, self.v_codes, self.v_meta))


@dataclass(frozen=True, slots=True)
class WindowKV:
    """One layer's BF16 copies: a ring of recent tokens per request, sink groups shared by prefix.

    Row r of a ring is request row r (SGLang's req_pool_idx; row 0 takes padded tokens), column
    position % recent_tokens. Column j of a sink group is position j.
    """

    ring_k: torch.Tensor  # bf16 [num_rows, num_kv_heads, recent_tokens, head_dim]
    ring_v: torch.Tensor  # bf16, shaped like ring_k
    sink_k: torch.Tensor  # bf16 [num_groups, num_kv_heads, sink_tokens, head_dim]
    sink_v: torch.Tensor  # bf16, shaped like sink_k

    @property
    def recent_tokens(self) -> int:
        return self.ring_k.shape[2]

    @property
    def sink_tokens(self) -> int:
        return self.sink_k.shape[2]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Which tokens each request of a batch reads, and from where. Shared by decode and extend.

    Position p of request b is read from
      the sink buffer, if p < sink_tokens and sink_group[b, p] >= 0;
      else the ring, if p >= ring_begin[b];
      else the packed cache at slot page_table[b, p // page_size] * page_size + p % page_size.
    Entries of page_table beyond a request's length are never read and may hold anything.
    """

    page_table: torch.Tensor  # int32 [batch, max_pages]
    kv_lens: torch.Tensor  # int32 [batch]; tokens in the cache that the queries attend to
    ring_row: torch.Tensor  # int32 [batch]
    ring_begin: torch.Tensor  # int32 [batch]; at least kv_len - recent_tokens, at most kv_len
    sink_group: torch.Tensor  # int32 [batch, sink_tokens]; -1: no BF16 copy
