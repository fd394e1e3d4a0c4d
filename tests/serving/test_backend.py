"""The backend fails closed, and captured steps read nothing that the scheduler may change."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_kvquant.checkpoint import data_free_checkpoint
from sglang_kvquant.config import KVQuantOptions, WindowConfig
from sglang_kvquant.layout import GQALayout
from sglang_kvquant.model_info import ModelInfo
from sglang_kvquant.reference.write import LayerTransform
from sglang_kvquant.serving import compat, weights
from sglang_kvquant.serving.backend import KVQuantAttnBackend
from sglang_kvquant.serving.pool import PackedKVPool
from sglang_kvquant.serving.sizing import CacheShape
from sglang_kvquant.serving.torch_attention import TorchOps

pytestmark = pytest.mark.sglang

WINDOWS = WindowConfig(8, 16)
SHAPE = CacheShape(GQALayout(2, 64, 64, 1), 1, WINDOWS, torch.float32)
INFO = ModelInfo("LlamaForCausalLM", 1, 4, 2, 64, 128)
REQUESTS, CONTEXT, SLOTS = 3, 128, 400


def model_runner(**changes) -> SimpleNamespace:
    checkpoint = data_free_checkpoint("quarot", INFO)
    layer = checkpoint.layers[0]
    rotation = layer.k_rotation.expand(2, 64, 64).contiguous()
    transform = LayerTransform.build(rotation, None, None, checkpoint.manifest.quantizer)
    model = torch.nn.Module()
    model._kvq_applied = weights.AppliedRotations(checkpoint, WINDOWS, [], {0: transform}, True)
    rows = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32)
    runner = SimpleNamespace(
        server_args=SimpleNamespace(_kvquant=KVQuantOptions("quarot")),
        token_to_kv_pool=PackedKVPool(SHAPE, SLOTS, REQUESTS, "cpu"),
        req_to_token_pool=SimpleNamespace(req_to_token=rows),
        model=model,
        device="cpu",
    )
    return SimpleNamespace(**{**vars(runner), **changes})


@pytest.fixture
def hooked(monkeypatch):
    """As in a scheduler process whose hooks applied."""
    monkeypatch.setattr(compat, "verify_hooks", lambda: None)


@pytest.fixture
def backend(hooked):
    return KVQuantAttnBackend(model_runner())


def test_no_hooks_no_service():
    with pytest.raises(compat.HookError, match="could not hook"):
        KVQuantAttnBackend(model_runner())


@pytest.mark.parametrize("missing", compat.active_targets(), ids=lambda t: t.path.split(".")[-1])
def test_one_missing_hook_is_enough(missing, monkeypatch):
    def wrapped():
        pass

    wrapped.__wrapped__ = wrapped
    real = compat.pkgutil.resolve_name
    paths = {target.path for target in compat.active_targets()}
    monkeypatch.setattr(
        compat.pkgutil, "resolve_name", lambda path: wrapped if path in paths else real(path)
    )
    monkeypatch.setattr(HookRegistry, "_patched", paths)
    compat.verify_hooks()
    monkeypatch.setattr(HookRegistry, "_patched", paths - {missing.path})
    with pytest.raises(compat.HookError, match=missing.path.split(".")[-1]):
        compat.verify_hooks()


def test_every_runtime_target_exists():
    for target in compat.active_targets():
        assert callable(compat.pkgutil.resolve_name(target.path)), target.path


def test_unknown_release_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.6.0")
    with pytest.raises(RuntimeError, match=r"tested with SGLang 0\.5\.17 and 0\.5\.23, not with"):
        compat.check_version()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_to_kv_pool": SimpleNamespace()}, "was built over a SimpleNamespace"),
        ({"server_args": SimpleNamespace()}, "start the server with --kv-quant"),
        ({"model": torch.nn.Module()}, "rotations were not applied"),
        (
            {"req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(9, 5))},
            "9 request rows, the windows 4",
        ),
    ],
)
def test_constructor_refuses(hooked, changes, message):
    with pytest.raises(compat.HookError, match=message):
        KVQuantAttnBackend(model_runner(**changes))


def test_options_of_another_class_are_refused():
    with pytest.raises(TypeError, match="not KVQuantOptions"):
        compat.options_of(SimpleNamespace(_kvquant={"method": "optr"}))


def test_weights_are_folded_once():
    model = model_runner().model
    with pytest.raises(RuntimeError, match="already folded"):
        weights.apply_rotations(model, data_free_checkpoint("quarot", INFO), WINDOWS)


def decode_batch(backend, rows: list[int], lengths: list[int]) -> SimpleNamespace:
    table = backend.req_to_token_pool.req_to_token
    locs = [int(table[row, length - 1]) for row, length in zip(rows, lengths, strict=True)]
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(rows),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        out_cache_loc=torch.tensor(locs),
    )


def extend_batch(backend, row: int, begin: int, end: int) -> SimpleNamespace:
    table = backend.req_to_token_pool.req_to_token
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        req_pool_indices=torch.tensor([row]),
        seq_lens=torch.tensor([end]),
        extend_prefix_lens=torch.tensor([begin]),
        extend_prefix_lens_cpu=[begin],
        extend_seq_lens=torch.tensor([end - begin]),
        extend_seq_lens_cpu=[end - begin],
        out_cache_loc=table[row, begin:end].clone(),
    )


ATTENTION = SimpleNamespace(
    layer_id=0, tp_q_head_num=4, tp_k_head_num=2, head_dim=64, scaling=0.125
)


def qkv(num_tokens: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(num_tokens, heads * 64) for heads in (4, 2, 2))


def fill(backend) -> None:
    """Give every row slots, and prefill two requests."""
    table = backend.req_to_token_pool.req_to_token
    table[1:] = torch.randperm(REQUESTS * CONTEXT).view(REQUESTS, CONTEXT) + 1
    backend.tables.note_new_rows([1, 2])
    for row, length in ((1, 40), (2, 60)):
        batch = extend_batch(backend, row, 0, length)
        backend.init_forward_metadata(batch)
        backend.forward(*qkv(length), ATTENTION, batch)


def test_extend_then_decode(backend):
    fill(backend)
    batch = decode_batch(backend, [2, 1], [61, 41])
    backend.init_forward_metadata(batch)
    q, k, v = qkv(2)
    out = backend.forward(q, k, v, ATTENTION, batch)
    assert out.shape == (2, 4 * 64) and out.dtype == q.dtype and bool(out.isfinite().all())


def test_idle_batch_needs_no_plan(backend):
    backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.IDLE))
    assert backend.plan is None


@pytest.mark.parametrize("kwargs", [{"sinks": torch.ones(4)}, {"save_kv_cache": False}])
def test_attention_it_does_not_know_is_refused(backend, kwargs):
    fill(backend)
    batch = decode_batch(backend, [1], [41])
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError):
        backend.forward(*qkv(1), ATTENTION, batch, **kwargs)


def test_verify_batches_are_refused(backend):
    with pytest.raises(NotImplementedError, match="serves no"):
        backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.PREBUILT))


def test_operations_that_cannot_be_captured_say_so(backend):
    with pytest.raises(ValueError, match="--disable-cuda-graph"):
        backend.init_cuda_graph_state(4, 4)


class CapturableOps(TorchOps):
    """Stands for kernels: what matters here is which tensors the backend hands out."""

    supports_cuda_graph = True


def test_replayed_steps_read_only_static_buffers(backend):
    """Snapshot rule: after _out_graph the scheduler may overwrite req_to_token and the tables."""
    fill(backend)
    backend.ops = CapturableOps()
    backend.init_cuda_graph_state(4, 4)
    padded = decode_batch(backend, [1, 2, 0, 0], [41, 61, 1, 1])
    backend.init_forward_metadata_out_graph(padded, in_capture=True)
    captured = backend.plan
    addresses = [
        getattr(part, f.name).data_ptr()
        for part in (captured.read, captured.write)
        for f in dataclasses.fields(part)
    ]
    step = decode_batch(backend, [1, 2, 0, 0], [42, 62, 1, 1])
    backend.init_forward_metadata_out_graph(step)
    replayed = backend.plan
    assert addresses == [
        getattr(part, f.name).data_ptr()
        for part in (replayed.read, replayed.write)
        for f in dataclasses.fields(part)
    ]
    before = [
        getattr(part, f.name).clone()
        for part in (replayed.read, replayed.write)
        for f in dataclasses.fields(part)
    ]
    backend.req_to_token_pool.req_to_token.fill_(99)
    backend.tables.slot_tag.fill_(-1)
    backend.tables.ring_start.fill_(0)
    after = [
        getattr(part, f.name)
        for part in (replayed.read, replayed.write)
        for f in dataclasses.fields(part)
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert replayed.read.kv_lens.tolist() == [42, 62, 1, 1]
    assert replayed.write.out_cache_loc[2:].tolist() == [0, 0]
    assert replayed.write.ring_index[:2].tolist() == [1 * 16 + 41 % 16, 2 * 16 + 61 % 16]


def test_static_plan_equals_the_eager_one(backend, hooked):
    other = KVQuantAttnBackend(model_runner())
    torch.manual_seed(1)
    fill(backend)
    torch.manual_seed(1)
    fill(other)
    other.ops = CapturableOps()
    other.init_cuda_graph_state(4, 4)
    batch = decode_batch(backend, [2, 1], [61, 41])
    backend.init_forward_metadata(batch)
    other.init_forward_metadata_out_graph(batch)
    eager, static = backend.plan, other.plan
    for name in ("kv_lens", "ring_row", "ring_begin", "sink_group"):
        assert torch.equal(getattr(eager.read, name), getattr(static.read, name)), name
    width = eager.read.page_table.shape[1]
    assert torch.equal(eager.read.page_table, static.read.page_table[:, :width])
    for f in dataclasses.fields(eager.write):
        assert torch.equal(getattr(eager.write, f.name), getattr(static.write, f.name)), f.name


@pytest.mark.skipif(compat.sglang_version() != "0.5.17", reason="0.5.23 registers a callback")
def test_rows_are_reported_when_they_get_a_new_owner():
    pool = SimpleNamespace(_kvquant_on_alloc_rows=(seen := []).extend)
    old, new = SimpleNamespace(req_pool_idx=4), SimpleNamespace(req_pool_idx=None)

    def alloc(pool, reqs):
        for req in reqs:
            req.req_pool_idx = req.req_pool_idx or 7
        return [req.req_pool_idx for req in reqs]

    assert compat.alloc_rows_and_notify(alloc, pool, [old, new]) == [4, 7]
    assert seen == [7]
    assert compat.alloc_rows_and_notify(lambda pool, reqs: None, pool, [new]) is None
    assert seen == [7]
