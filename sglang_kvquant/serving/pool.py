"""The packed KV pool: SGLang's slots and pages, two bits per element, BF16 windows beside them.

Allocator, radix tree, eviction and accounting are SGLang's own and see an ordinary pool: every
token is stored at its slot. The windows are copies, indexed by request row and by sink group.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import KVCache

from ..layout import PackedKV, WindowKV
from .sizing import CacheShape, num_sink_groups
from .windows import WindowTables

logger = logging.getLogger(__name__)


class PackedKVPool(KVCache):
    """KV pool of one rank.

    It derives from KVCache and not from MHATokenToKVPool, which host caches and disaggregation
    recognise by class and would read as BF16 rows. ``dtype`` is uint8, so that models do not take
    their fused path, which writes BF16 rows straight into a pool of that type.

    Args:
        shape: sizes of one rank.
        size: tokens, a multiple of the page size; one dummy page is added.
        max_requests: running requests; one dummy row is added.
        device: of all buffers.
        start_layer: global id of the first layer.
        enable_memory_saver: allocate inside SGLang's memory saver.
    """

    def __init__(
        self,
        shape: CacheShape,
        size: int,
        max_requests: int,
        device: str,
        start_layer: int = 0,
        enable_memory_saver: bool = False,
    ) -> None:
        page_size = shape.layout.page_size
        super().__init__(
            size,
            page_size,
            torch.uint8,
            shape.num_layers,
            device,
            enable_memory_saver,
            start_layer,
            start_layer + shape.num_layers,
        )
        if size % page_size:
            raise ValueError(f"size {size} is not a multiple of page_size {page_size}")
        self.shape, self.max_requests = shape, max_requests
        num_groups = num_sink_groups(max_requests, shape.windows)
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.packed = [
                PackedKV.allocate(shape.layout, size // page_size + 1, device)
                for _ in range(shape.num_layers)
            ]
            self.windows = [
                self._allocate_windows(max_requests + 1, num_groups)
                for _ in range(shape.num_layers)
            ]
            self.tables = WindowTables(
                shape.windows, max_requests + 1, size + page_size, num_groups, page_size, device
            )
        self._finalize_allocation_log(size)

    def _allocate_windows(self, num_rows: int, num_groups: int) -> WindowKV:
        layout, windows, dtype = self.shape.layout, self.shape.windows, self.shape.window_dtype
        ring = layout.window_shape(num_rows, windows.recent_tokens)
        sink = layout.window_shape(num_groups, windows.sink_tokens)

        def zeros(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return WindowKV(zeros(ring), zeros(ring), zeros(sink), zeros(sink))

    def layer(self, layer_id: int) -> tuple[PackedKV, WindowKV]:
        """Buffers of a layer by its global id."""
        local = layer_id - self.start_layer
        return self.packed[local], self.windows[local]

    def window_nbytes(self) -> int:
        return sum(
            t.nbytes for w in self.windows for t in (w.ring_k, w.ring_v, w.sink_k, w.sink_v)
        )

    def get_kv_size_bytes(self) -> int:
        """Bytes of codes, metadata and windows."""
        return sum(p.nbytes() for p in self.packed) + self.window_nbytes()

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("write BF16 rows into")

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse("read")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse("read")

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._refuse("read")

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("offload")

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("restore")

    def move_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("move tokens of")

    def register_layer_transfer_counter(self, layer_transfer_counter: Any) -> None:
        self._refuse("attach a host cache to")

    def _refuse(self, action: str) -> NoReturn:
        raise NotImplementedError(
            f"another part of SGLang tried to {action} the packed KV cache, which holds 2-bit "
            "codes in a rotated frame; please report the server's arguments."
        )
