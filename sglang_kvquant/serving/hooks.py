"""What the hooks of a scheduler process do; where they go is listed in compat.py."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator
from sglang.srt.runtime_context import get_exec, get_schedule

from ..checkpoint import resolve_checkpoint
from ..config import KVQuantOptions
from ..layout import GQALayout
from . import compat
from .metrics import MetricsHook
from .pool import PackedKVPool
from .sizing import CacheShape, plan_budget
from .weights import AppliedRotations, applied_rotations, apply_rotations

logger = logging.getLogger(__name__)


def runtime_hooks(options: KVQuantOptions) -> dict[compat.Target, Callable]:
    """Hook function of every runtime target, for a scheduler process with these options."""
    prefix_cap, metrics = PrefixCap(), MetricsHook()

    def load_model(original: Callable, runner: Any) -> Any:
        # Everything about the checkpoint is refused before any weight is read.
        if runner.is_draft_worker:
            raise ValueError("--kv-quant serves no draft models; drop the speculative options.")
        args = compat.resolved(runner.server_args)
        checkpoint = resolve_checkpoint(
            options, args.model_path, args.revision, check_weights=args.load_format != "dummy"
        )
        result = original(runner)
        windows = options.windows(checkpoint.manifest.windows)
        apply_rotations(runner.model, checkpoint, windows)
        prefix_cap.recent_tokens = windows.recent_tokens
        return result

    def build_and_watch(original: Callable, kvc: Any, **kwargs: Any) -> PackedKVPool:
        metrics.pool = build_pool(kvc, kwargs["sizes"])
        return metrics.pool

    return {
        compat.LOAD_MODEL: load_model,
        compat.BUILD_POOL: build_and_watch,
        compat.POOL_CONFIGURATOR: lambda original, kvc: PackedPoolConfigurator(kvc),
        compat.MAX_NUM_REQS: resolve_max_num_reqs,
        compat.PREFIX_CAP_BASE: prefix_cap,
        compat.PREFIX_CAP_UNIFIED: prefix_cap,
        compat.ROW_ALLOC: compat.alloc_rows_and_notify,
        compat.LOG_STATS: metrics,
    }


class PrefixCap:
    """How many tokens at the end of a request are never taken from the prefix cache.

    The packed cache of a hit has no BF16 rows of its most recent tokens: these are prefilled again
    into the ring of the request, so that decoding sees the same window as after a cold start.
    """

    def __init__(self) -> None:
        self.recent_tokens = 0

    def __call__(self, original: Callable, *args: Any, **kwargs: Any) -> int:
        return max(original(*args, **kwargs), self.recent_tokens)


def cache_shape(kvc: Any, applied: AppliedRotations) -> CacheShape:
    """Sizes of this rank's cache, read off the attention layers that were built."""
    layers = [part.attn for part in applied.parts]
    layout = GQALayout(
        num_kv_heads=layers[0].tp_k_head_num,
        head_dim=layers[0].head_dim,
        group_size=applied.checkpoint.manifest.quantizer.group_size,
        page_size=kvc.page_size,
    )
    window_dtype = torch.float32 if kvc.model_dtype == torch.float32 else torch.bfloat16
    return CacheShape(layout, len(layers), applied.windows, window_dtype)


class PackedPoolConfigurator(MemoryPoolConfigurator):
    """Pool sizes by packed bytes, windows included; replaces SGLang's for this server."""

    def __init__(self, kvc: Any) -> None:
        self.applied = applied_rotations(kvc.model)
        self.shape = cache_shape(kvc, self.applied)

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        requested = get_schedule().max_running_requests
        budget = plan_budget(self.shape, available_bytes, requested)
        self.applied.max_requests = budget.max_requests
        return MemoryPoolConfig(max_total_num_tokens=budget.max_tokens)

    def calculate_pool_sizes_from_max_tokens(
        self, max_total_num_tokens: int, page_size: int
    ) -> MemoryPoolConfig:
        tokens = max_total_num_tokens // page_size * page_size
        return MemoryPoolConfig(max_total_num_tokens=tokens)


def resolve_max_num_reqs(original: Callable, kvc: Any, token_capacity: int) -> int:
    """Cap the number of request rows at the number of windows in the budget."""
    limit = applied_rotations(kvc.model).max_requests
    if limit is None:
        raise compat.HookError("SGLang sized its request rows before the packed cache was sized.")
    return min(original(kvc, token_capacity), limit)


def build_pool(kvc: Any, sizes: Any) -> PackedKVPool:
    """Allocate the packed pool."""
    if kvc.post_capture_kv_active:
        raise ValueError(
            "--kv-quant allocates its cache before CUDA graphs are captured; unset "
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING."
        )
    applied = applied_rotations(kvc.model)
    pool = PackedKVPool(
        cache_shape(kvc, applied),
        sizes.max_total_num_tokens,
        sizes.max_running_requests,
        kvc.device,
        start_layer=kvc.layer_info.start_layer,
        enable_memory_saver=get_exec().features.enable_memory_saver,
    )
    shape = pool.shape
    logger.info(
        "kvquant: %s, %d layers, %d KV heads of %d on this rank: %d bytes per token (BF16: %d), "
        "%d tokens; windows of %d sink and %d recent tokens for %d running requests: %.1f MiB",
        applied.checkpoint.manifest.method,
        shape.num_layers,
        shape.layout.num_kv_heads,
        shape.layout.head_dim,
        shape.num_layers * shape.layout.bytes_per_token,
        shape.num_layers * shape.layout.bf16_bytes_per_token,
        pool.size,
        shape.windows.sink_tokens,
        shape.windows.recent_tokens,
        pool.max_requests,
        pool.window_nbytes() / 2**20,
    )
    return pool
