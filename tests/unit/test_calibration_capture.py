"""Traces are what attention really saw, for every served architecture."""

from __future__ import annotations

import pytest
import torch

from sglang_kvquant.calibration.capture import (
    ATTENTION_NAME,
    LayerTraces,
    attention_override,
    collect_traces,
    peak_bytes,
    visit_layers,
)
from sglang_kvquant.calibration.errors import CalibrationError
from sglang_kvquant.calibration.recipe import load_model
from sglang_kvquant.model_info import GQA_ARCHITECTURES, ModelInfo

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(3 * 24).reshape(3, 24) % 250


def attention_output(traces: LayerTraces) -> torch.Tensor:
    """What the layer adds to the residual stream, from its traces: [seqs, seq_len, hidden]."""
    num_q_heads, seq_len = traces.q.shape[1], traces.q.shape[2]
    k, v = (
        t.double().repeat_interleave(num_q_heads // t.shape[1], dim=1)
        for t in (traces.k, traces.v)
    )
    logits = traces.q.double() @ k.mT * traces.sm_scale
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    out = torch.softmax(logits.masked_fill(~causal, -torch.inf), dim=-1) @ v
    return out.transpose(1, 2).flatten(2) @ traces.o_weight.double().T


@pytest.mark.parametrize("architecture", GQA_ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_traces_reproduce_the_attention_output(tiny_model, architecture: str, dtype: str) -> None:
    path = tiny_model(architecture)
    info = ModelInfo.from_model_path(str(path))
    model = load_model(str(path), dtype)
    outputs: dict[int, torch.Tensor] = {}
    for layer_id, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(
            lambda _module, _args, output, i=layer_id: outputs.update({i: output[0]})
        )
    with torch.no_grad():
        before = model(TOKENS).logits
    traces = collect_traces(model, TOKENS)
    assert sorted(traces) == list(range(info.num_layers))
    for layer_id, layer in traces.items():
        assert layer.q.shape == (3, info.num_q_heads, 24, info.head_dim)
        assert layer.k.shape == layer.v.shape == (3, info.num_kv_heads, 24, info.head_dim)
        assert layer.q.dtype == getattr(torch, dtype)
        tolerance = 1e-5 if dtype == "float32" else 3e-2
        torch.testing.assert_close(
            attention_output(layer), outputs[layer_id].double(), rtol=tolerance, atol=tolerance
        )
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, before)  # the model is as it was


def test_layers_are_visited_in_order_and_one_at_a_time(tiny_model) -> None:
    import weakref

    model = load_model(str(tiny_model(num_layers=4)))
    seen: list[int] = []
    alive: list[weakref.ref] = []

    def visit(layer_id: int, traces: LayerTraces) -> None:
        assert [r for r in alive if r() is not None] == []
        seen.append(layer_id)
        alive.append(weakref.ref(traces.k))

    visit_layers(model, TOKENS, visit)
    assert seen == [0, 1, 2, 3]


def test_attention_is_restored_after_an_error(tiny_model) -> None:
    model = load_model(str(tiny_model()))

    def fail(*_args, **_kwargs):
        raise KeyError("stop")

    with pytest.raises(KeyError), attention_override(model, fail):
        assert model.config._attn_implementation == ATTENTION_NAME
        model(TOKENS)
    assert model.config._attn_implementation == "sdpa"
    model(TOKENS)


def test_nan_is_refused(tiny_model) -> None:
    model = load_model(str(tiny_model()))
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(CalibrationError, match=r"values of layer 1 hold NaN"):
        visit_layers(model, TOKENS, lambda *_: None)


def test_sliding_window_is_refused(tiny_model) -> None:
    model = load_model(str(tiny_model("Phi3ForCausalLM")))
    model.config.sliding_window = 8
    with pytest.raises(CalibrationError, match="sliding window"):
        visit_layers(model, TOKENS, lambda *_: None)


def test_selected_sequences_are_views() -> None:
    q, k = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 5, 8)
    traces = LayerTraces(q, k, k, torch.randn(6, 32), 0.5).select(slice(1, None))
    assert traces.q.shape[0] == 2
    assert traces.k.data_ptr() == k[1].data_ptr()


def test_peak_bytes_grows_with_tokens_and_width() -> None:
    info = ModelInfo("LlamaForCausalLM", 2, 4, 2, 64, 128)
    assert peak_bytes(info, 2, 100, 4) == 2 * peak_bytes(info, 1, 100, 4)
    traces = 100 * 8 * 64 * 4
    assert peak_bytes(info, 1, 100, 4) > traces
