"""Prometheus metrics of the packed cache, beside SGLang's own under ``--enable-metrics``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .pool import PackedKVPool


class DeviceCounters:
    """Reads counters that live on the device without waiting for it.

    Every reading returns what the copy started by the previous reading brought, so on a GPU the
    numbers are one reading old. On CPU they are current.
    """

    def __init__(self, counters: dict[str, torch.Tensor]) -> None:
        self.counters = counters
        pinned = any(t.is_cuda for t in counters.values())
        self.host = torch.zeros(len(counters), dtype=torch.int64, pin_memory=pinned)

    def read(self) -> dict[str, int]:
        if not self.host.is_pinned():
            self._fetch()
        values = dict(zip(self.counters, self.host.tolist(), strict=True))
        if self.host.is_pinned():
            self._fetch()
        return values

    def _fetch(self) -> None:
        for slot, counter in zip(self.host, self.counters.values(), strict=True):
            slot.copy_(counter.squeeze(), non_blocking=True)


def constants(pool: PackedKVPool) -> dict[str, tuple[str, int]]:
    """What never changes while a server runs: name, text and value."""
    shape = pool.shape
    return {
        "bytes_per_token": (
            "Bytes of a token in the packed KV cache of this rank.",
            shape.num_layers * shape.layout.bytes_per_token,
        ),
        "bf16_bytes_per_token": (
            "Bytes of a token in an unquantized BF16 KV cache of this rank.",
            shape.num_layers * shape.layout.bf16_bytes_per_token,
        ),
        "pool_tokens": ("Tokens that the packed KV cache holds.", pool.size),
        "window_bytes": ("Bytes of all BF16 windows.", pool.window_nbytes()),
        "running_requests_limit": ("Running requests that have BF16 windows.", pool.max_requests),
        "sink_groups": ("Groups of BF16 sink tokens.", pool.tables.num_groups),
    }


class PoolMetrics:
    """Gauges and counters of one scheduler; exists from the first time SGLang logs statistics."""

    def __init__(self, pool: PackedKVPool, labels: dict[str, Any]) -> None:
        # Like SGLang's own: only after PROMETHEUS_MULTIPROC_DIR is set may this be imported.
        from prometheus_client import Counter, Gauge

        for name, (text, value) in constants(pool).items():
            gauge = Gauge(f"kvquant_{name}", text, labels.keys(), multiprocess_mode="mostrecent")
            gauge.labels(**labels).set(value)
        self.device = DeviceCounters(
            {
                "sink_groups_stolen": pool.tables.groups_stolen,
                "sink_fallback_tokens": pool.tables.sink_misses,
            }
        )
        texts = (
            "Sink groups that were given to another prefix.",
            "Sink tokens of prefix hits that were read from 2-bit codes: their group was stolen.",
        )
        self.totals = {
            name: Counter(f"kvquant_{name}", text, labels.keys()).labels(**labels)
            for name, text in zip(self.device.counters, texts, strict=True)
        }
        self.seen = dict.fromkeys(self.totals, 0)

    def update(self) -> None:
        for name, value in self.device.read().items():
            self.totals[name].inc(value - self.seen[name])
            self.seen[name] = value


class MetricsHook:
    """AROUND hook of SchedulerMetricsCollector.log_stats, which SGLang calls when it reports."""

    def __init__(self) -> None:
        self.pool: PackedKVPool | None = None
        self.metrics: PoolMetrics | None = None

    def __call__(self, original: Callable, collector: Any, *args: Any, **kwargs: Any) -> Any:
        if self.pool is not None:
            if self.metrics is None:
                self.metrics = PoolMetrics(self.pool, collector.labels)
            self.metrics.update()
        return original(collector, *args, **kwargs)
