"""Error measures against direct computations on tiny models."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_kvquant.checkpoint import Checkpoint, LayerRotations, data_free_checkpoint
from sglang_kvquant.config import WindowConfig
from sglang_kvquant.evaluation.methods import build_transforms
from sglang_kvquant.evaluation.metrics import Evaluator
from sglang_kvquant.evaluation.results import format_table, relative_rms, summarize
from sglang_kvquant.evaluation.simulate import (
    ReadRule,
    plain_attention,
    quantized_layers,
    replaced_attention,
    simulated_attention,
)
from sglang_kvquant.model_info import ModelInfo

SEQ_LEN = 80
RULE = ReadRule(WindowConfig(4, 16))


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture
def model_path(tiny_model):
    return str(tiny_model("Qwen3ForCausalLM", num_q_heads=6, num_kv_heads=2))


@pytest.fixture
def setup(model_path):
    """Model, its description, two methods' checkpoints, and three windows of tokens."""
    info = ModelInfo.from_model_path(model_path)
    checkpoints = {name: data_free_checkpoint(name, info) for name in ("rtn", "quarot")}
    tokens = torch.randint(0, 256, (3, SEQ_LEN))
    return load(model_path), info, checkpoints, tokens


def make_evaluator(setup, rule=RULE) -> Evaluator:
    model, info, checkpoints, _ = setup
    transforms = {name: build_transforms(c, "cpu") for name, c in checkpoints.items()}
    return Evaluator(model, transforms, rule, info.num_kv_heads)


def test_output_error_is_that_of_explicit_slices_of_the_output_projection(setup):
    model, _, checkpoints, tokens = setup
    evaluator = make_evaluator(setup)
    evaluator.run(tokens, end_to_end=False)
    transforms = build_transforms(checkpoints["quarot"], "cpu")
    total, late = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)

    def attention(layer_id, q, k, v, sm_scale):
        exact = plain_attention(q, k, v, sm_scale)
        delta = simulated_attention(q, k, v, transforms[layer_id], RULE, sm_scale) - exact
        weight = model.model.layers[layer_id].self_attn.o_proj.weight  # [hidden, 6 * 64]
        for j in range(6):
            dy = delta[:, j] @ weight[:, j * 64 : (j + 1) * 64].T  # [windows, seq_len, hidden]
            squared = dy.double().square().sum(-1)
            total[layer_id, j // 3] += squared.sum()
            late[layer_id, j // 3] += squared[:, 20:].sum()
        return exact

    with replaced_attention(model, attention), torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    errors = evaluator.output_errors["quarot"]
    torch.testing.assert_close(errors.mean(), total / (3 * SEQ_LEN * 3), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        errors.late_mean(), late / (3 * (SEQ_LEN - 20) * 3), rtol=1e-4, atol=0
    )
    assert float(errors.mean().min()) > 0


def test_scores_are_those_of_the_logits_and_hidden_states(setup):
    model, info, checkpoints, tokens = setup
    evaluator = make_evaluator(setup)
    evaluator.run(tokens)
    attention = quantized_layers(build_transforms(checkpoints["rtn"], "cpu"), RULE)
    with torch.no_grad():
        plain = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        with replaced_attention(model, attention):
            ours = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    log_p = plain.logits[:, :-1].double().log_softmax(-1)
    log_q = ours.logits[:, :-1].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    target = tokens[:, 1:].flatten()
    nll = torch.nn.functional.nll_loss(log_q.flatten(0, 1), target)
    summary = summarize(evaluator, checkpoints, info)
    entry = summary["methods"]["rtn"]
    assert entry["kl"]["mean"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert entry["kl"]["past_windows"] == pytest.approx(float(kl[:, 20:].mean()), rel=1e-4)
    assert entry["kl"]["per_window"] == pytest.approx(kl.mean(1).tolist(), rel=1e-4)
    assert entry["perplexity"] == pytest.approx(math.exp(float(nll)), rel=1e-5)
    plain_nll = torch.nn.functional.nll_loss(log_p.flatten(0, 1), target)
    assert summary["full_precision"]["nll"] == pytest.approx(float(plain_nll), rel=1e-5)
    # transformers' last hidden state is normed, so only the first layer's is the residual stream.
    error = (ours.hidden_states[1] - plain.hidden_states[1]).double().square().sum()
    norm = plain.hidden_states[1].double().square().sum()
    assert entry["residual_error"]["per_layer"][0] == pytest.approx(float(error / norm), rel=1e-3)
    assert entry["kl"]["mean"] > 1e-6


def test_queries_within_the_windows_have_no_error(setup):
    evaluator = make_evaluator(setup)
    evaluator.run(setup[3])
    for name in ("rtn", "quarot"):
        kl = torch.stack(evaluator.scores[name].kl)
        assert float(kl[:, :20].abs().max()) < 1e-5
        assert float(kl[:, 20:].mean()) > 1e-5


def test_identity_quantizer_has_no_error(setup):
    rule = ReadRule(WindowConfig(4, 16), identity_quantizer=True)
    evaluator, quantized = make_evaluator(setup, rule), make_evaluator(setup)
    for e in (evaluator, quantized):
        e.run(setup[3])
    for name in ("rtn", "quarot"):
        same, ours = evaluator.output_errors[name].mean(), quantized.output_errors[name].mean()
        assert bool((same < 1e-8 * ours).all())
        kl = torch.stack(evaluator.scores[name].kl)
        assert float(kl.abs().max()) < 1e-5


def test_batches_add_up(setup):
    together, apart = make_evaluator(setup), make_evaluator(setup)
    together.run(setup[3])
    for window in setup[3].split(1):
        apart.run(window)
    a, b = (summarize(e, setup[2], setup[1])["methods"]["quarot"] for e in (together, apart))
    assert a["output_mse"]["mean"] == pytest.approx(b["output_mse"]["mean"], rel=1e-4)
    assert a["kl"]["per_window"] == pytest.approx(b["kl"]["per_window"], rel=1e-3)
    assert a["residual_error"]["mean"] == pytest.approx(b["residual_error"]["mean"], rel=1e-3)


def test_windows_longer_than_the_text_quantize_nothing(setup):
    evaluator = make_evaluator(setup, ReadRule(WindowConfig(64, 64)))
    evaluator.run(setup[3])
    summary = summarize(evaluator, setup[2], setup[1])["methods"]["rtn"]
    assert summary["output_mse"]["mean"] < 1e-8
    assert summary["kl"]["past_windows"] is None


def test_a_centred_method_beats_its_base_when_keys_have_offsets(setup):
    """A constant added to every key costs range, and the key mean takes it away again."""
    checkpoints = setup[2]
    offset = 8.0 * torch.randn(2, 64)
    layer = checkpoints["quarot"].layers[0]
    centred = LayerRotations(layer.k_rotation, layer.v_rotation, offset)
    both = {
        "quarot": checkpoints["quarot"],
        "quarot+c": Checkpoint(checkpoints["quarot"].manifest, dict.fromkeys(range(2), centred)),
    }
    transforms = {name: build_transforms(c, "cpu") for name, c in both.items()}
    q, k, v = torch.randn(1, 6, 90, 64), torch.randn(1, 2, 90, 64), torch.randn(1, 2, 90, 64)
    k = k + offset.unsqueeze(1)
    exact = plain_attention(q, k, v, 0.125)
    error = {
        name: float((simulated_attention(q, k, v, t[0], RULE, 0.125) - exact).square().mean())
        for name, t in transforms.items()
    }
    assert error["quarot+c"] < 0.3 * error["quarot"]


def test_summary_bytes_and_table(setup):
    evaluator = make_evaluator(setup)
    evaluator.run(setup[3])
    summary = summarize(evaluator, setup[2], setup[1])
    entry = summary["methods"]["quarot"]
    # 2 layers, 2 KV heads, K and V, each 64 codes of 2 bits and 4 bytes for its one group.
    assert entry["bytes_per_token"] == 2 * 2 * 2 * (16 + 4)
    assert entry["bf16_bytes_per_token"] == 2 * 2 * 2 * 128
    assert entry["ratio"] == pytest.approx(6.4)
    assert torch.tensor(relative_rms(summary, "rtn")).sub(100).abs().max() < 1e-3
    ours = torch.tensor(entry["output_mse"]["per_head"])
    plain = torch.tensor(summary["methods"]["rtn"]["output_mse"]["per_head"])
    expected = 100 * (ours / plain).sqrt()
    torch.testing.assert_close(torch.tensor(relative_rms(summary, "quarot")), expected)
    table = format_table(summary)
    assert max(len(line) for line in table.splitlines()) <= 80
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["unquantized", "rtn", "quarot"]
    assert table.splitlines()[2].split()[2] == "100.0"
