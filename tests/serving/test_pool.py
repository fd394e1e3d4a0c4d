"""Memory budget, buffers, and what the pool refuses to be used for."""

from __future__ import annotations

import pytest
import torch

from sglang_kvquant.config import WindowConfig
from sglang_kvquant.layout import GQALayout
from sglang_kvquant.serving.sizing import (
    BYTES_PER_TABLE_SLOT,
    CacheShape,
    num_sink_groups,
    plan_budget,
)

QWEN3_8B = CacheShape(GQALayout(8, 128, 128, 64), 36, WindowConfig(64, 256))
SMALL = CacheShape(GQALayout(2, 64, 64, 1), 2, WindowConfig(8, 16), torch.float32)
GIB = 2**30


def test_bytes_of_qwen3_8b():
    assert QWEN3_8B.bytes_per_token == 20_736 + BYTES_PER_TABLE_SLOT
    assert QWEN3_8B.window_row_bytes == 147_456
    assert QWEN3_8B.window_bytes(0) == (256 + 2 * 64) * 147_456


@pytest.mark.parametrize("requests", [None, 1, 64, 200])
@pytest.mark.parametrize("shape", [QWEN3_8B, SMALL])
def test_budget_is_kept_and_used(shape, requests):
    available = 60 * GIB
    budget = plan_budget(shape, available, requests)
    if requests is not None:
        assert budget.max_requests == requests
    page_size = shape.layout.page_size
    assert budget.max_tokens % page_size == 0
    allocated = (budget.max_tokens + page_size) * shape.bytes_per_token
    used = allocated + shape.window_bytes(budget.max_requests)
    assert available - page_size * shape.bytes_per_token < used <= available


def test_chosen_requests_take_a_fifth_of_a_small_budget():
    budget = plan_budget(QWEN3_8B, 10 * GIB, None)
    assert 1 < budget.max_requests < 256
    assert QWEN3_8B.window_bytes(budget.max_requests) <= 2 * GIB
    assert QWEN3_8B.window_bytes(budget.max_requests + 1) > 2 * GIB


def test_chosen_requests_do_not_depend_on_how_heads_are_split():
    """Tensor-parallel ranks that hold the same number of heads get the same numbers; the choice
    scales with the budget and not with the rank."""
    half = CacheShape(GQALayout(4, 128, 128, 64), 36, WindowConfig(64, 256))
    whole, split = plan_budget(QWEN3_8B, 20 * GIB, None), plan_budget(half, 10 * GIB, None)
    assert whole.max_requests == split.max_requests


def test_no_windows_need_no_memory():
    shape = CacheShape(GQALayout(8, 128, 128, 64), 36, WindowConfig(0, 0))
    assert shape.window_bytes(500) == 0 and num_sink_groups(500, shape.windows) == 0
    assert plan_budget(shape, GIB, None).max_requests == 256


def test_windows_that_leave_no_room_are_refused():
    with pytest.raises(ValueError, match="lower --max-running-requests"):
        plan_budget(QWEN3_8B, 10 * GIB, 4000)


@pytest.fixture
def pool():
    pytest.importorskip("sglang")
    from sglang_kvquant.serving.pool import PackedKVPool

    return PackedKVPool(SMALL, 100, 3, "cpu", start_layer=5)


@pytest.mark.sglang
def test_pool_has_the_bytes_it_was_budgeted(pool):
    tokens = sum(packed.nbytes() for packed in pool.packed)
    assert tokens == 101 * SMALL.num_layers * SMALL.layout.bytes_per_token
    assert pool.window_nbytes() == SMALL.window_bytes(3)
    assert pool.get_kv_size_bytes() == tokens + SMALL.window_bytes(3)
    assert pool.mem_usage == pool.get_kv_size_bytes() / GIB
    assert (pool.size, pool.page_size, pool.dtype) == (100, 1, torch.uint8)
    assert pool.tables.slot_tag.shape == (101,) and pool.tables.ring_start.shape == (4,)


@pytest.mark.sglang
def test_pool_is_none_of_the_classes_that_others_read_as_bf16(pool):
    from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, MLATokenToKVPool

    assert isinstance(pool, KVCache)
    assert not isinstance(pool, MHATokenToKVPool | MLATokenToKVPool)


@pytest.mark.sglang
def test_pool_finds_layers_by_global_id(pool):
    assert pool.layer(5) == (pool.packed[0], pool.windows[0])
    assert pool.layer(6) == (pool.packed[1], pool.windows[1])


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("set_kv_buffer", (None, None, None, None)),
        ("get_key_buffer", (5,)),
        ("get_value_buffer", (5,)),
        ("get_kv_buffer", (5,)),
        ("get_cpu_copy", (None,)),
        ("load_cpu_copy", (None, None)),
        ("move_kv_cache", (None, None)),
        ("register_layer_transfer_counter", (None,)),
    ],
)
def test_pool_refuses_foreign_use(pool, method, arguments):
    with pytest.raises(NotImplementedError, match="packed KV cache"):
        getattr(pool, method)(*arguments)
