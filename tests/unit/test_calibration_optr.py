"""Learning: what is selected, what is repeatable, what is equivalent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_kvquant.calibration.capture import LayerTraces
from sglang_kvquant.calibration.errors import CalibrationError
from sglang_kvquant.calibration.optr import key_mean, learn_layer
from sglang_kvquant.calibration.recipe import Recipe, base_rotations, solve_layer
from sglang_kvquant.calibration.settings import OptRSettings
from sglang_kvquant.config import QuantizerConfig
from sglang_kvquant.quantizer import quantize
from sglang_kvquant.rotation import hadamard, orthogonality_error, per_head

SEQS, Q_HEADS, KV_HEADS, LENGTH, DIM, HIDDEN = 4, 4, 2, 96, 64, 48
SETTINGS = OptRSettings(
    steps=8,
    lr=0.02,
    lr_schedule="constant",
    num_queries=16,
    query_selection="last",
    sink_tokens=4,
    recent_tokens=16,
    selection_every=4,
)
QUANTIZER = QuantizerConfig.for_method("optr", DIM)


def make_traces(seed: int) -> LayerTraces:
    """Keys and values with outlier channels in Hadamard's frame, which learning can spread."""
    shape = torch.Generator().manual_seed(99)  # the same distribution for every seed
    scale = torch.ones(DIM)
    scale[:6] = 4.0
    frame = scale.unsqueeze(1) * hadamard(DIM, torch.float32).T
    o_weight = torch.randn(HIDDEN, Q_HEADS * DIM, generator=shape) * 0.1
    offset = torch.randn(1, KV_HEADS, 1, DIM, generator=shape) * 2
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(SEQS, Q_HEADS, LENGTH, DIM, generator=draw)
    k, v = (torch.randn(SEQS, KV_HEADS, LENGTH, DIM, generator=draw) @ frame for _ in range(2))
    return LayerTraces(q, k + offset, v, o_weight, DIM**-0.5)


@pytest.fixture(scope="module")
def train() -> LayerTraces:
    return make_traces(1)


@pytest.fixture(scope="module")
def heldout() -> LayerTraces:
    return make_traces(2)


@pytest.mark.parametrize("base", ["quarot", "oscar", "oscar-per-head"])
def test_held_out_losses_never_rise(train, heldout, base: str) -> None:
    result = solve_layer(train, heldout, Recipe("optr", base, QUANTIZER, SETTINGS))
    rotations, curves = result.rotations, result.curves
    assert curves is not None
    for side in ("k", "v"):
        before, after = curves[f"{side}_before"], curves[f"{side}_after"]
        assert all(a <= b for a, b in zip(after, before, strict=True))
    assert rotations.k_rotation.shape == rotations.v_rotation.shape == (KV_HEADS, DIM, DIM)
    assert orthogonality_error(rotations.k_rotation) < 1e-5
    assert orthogonality_error(rotations.v_rotation) < 1e-5
    torch.testing.assert_close(rotations.k_mean, train.k.mean(dim=(0, 2)))


def test_learning_finds_a_better_frame(train, heldout) -> None:
    settings = replace(SETTINGS, steps=24)
    curves = solve_layer(train, heldout, Recipe("optr", "quarot", QUANTIZER, settings)).curves
    assert curves is not None
    for side in ("k", "v"):
        for before, after in zip(curves[f"{side}_before"], curves[f"{side}_after"], strict=True):
            assert after < 0.7 * before


def test_zero_steps_only_centre(train, heldout) -> None:
    settings = replace(SETTINGS, steps=0)
    result = solve_layer(train, heldout, Recipe("optr", "oscar", QUANTIZER, settings))
    k_base, v_base = base_rotations(train, "oscar")
    torch.testing.assert_close(
        result.rotations.k_rotation, per_head(k_base, KV_HEADS).float(), rtol=0, atol=1e-7
    )
    torch.testing.assert_close(
        result.rotations.v_rotation, per_head(v_base, KV_HEADS).float(), rtol=0, atol=1e-7
    )
    assert result.curves["k_before"] == result.curves["k_after"]


def test_repeatable_bit_for_bit(train, heldout) -> None:
    recipe = Recipe("optr", "quarot", QUANTIZER, replace(SETTINGS, batch_sequences=2, seed=5))
    first, second = (solve_layer(train, heldout, recipe) for _ in range(2))
    assert first.curves == second.curves
    for a, b in zip(first.rotations, second.rotations, strict=True):
        assert torch.equal(a, b)
    other = solve_layer(train, heldout, replace(recipe, settings=replace(recipe.settings, seed=6)))
    assert not torch.equal(first.rotations.k_rotation, other.rotations.k_rotation)


def test_heads_are_learned_independently(train, heldout) -> None:
    """A layer with one KV head gives what that head gets in the whole layer."""

    def only(traces: LayerTraces, head: int) -> LayerTraces:
        group = Q_HEADS // KV_HEADS
        q = traces.q[:, head * group : (head + 1) * group]
        weight = traces.o_weight[:, head * group * DIM : (head + 1) * group * DIM]
        kv = slice(head, head + 1)
        return LayerTraces(q, traces.k[:, kv], traces.v[:, kv], weight, traces.sm_scale)

    settings = replace(SETTINGS, steps=1)  # rounding depends on shapes, and Adam amplifies it
    base = per_head(hadamard(DIM), KV_HEADS)
    whole = learn_layer(train, heldout, base, base, QUANTIZER, settings)
    one = learn_layer(only(train, 1), only(heldout, 1), base[:1], base[:1], QUANTIZER, settings)
    for a, b in ((whole.keys, one.keys), (whole.values, one.values)):
        torch.testing.assert_close(a.before[1:], b.before, rtol=1e-3, atol=0)
        torch.testing.assert_close(a.after[1:], b.after, rtol=1e-2, atol=0)
        assert b.after < 0.99 * b.before


def test_reported_loss_is_that_of_the_saved_rotation(train, heldout) -> None:
    """Recompute the held-out value loss from the result, with full attention and full W_O."""
    settings = replace(SETTINGS, steps=4)
    result = solve_layer(train, heldout, Recipe("optr", "quarot", QUANTIZER, settings))
    k_rot, v_rot, mean = (t.double() for t in result.rotations)
    group = Q_HEADS // KV_HEADS
    loss = torch.zeros(KV_HEADS, dtype=torch.float64)
    positions = settings.query_positions(LENGTH).tolist()
    for b in range(SEQS):
        for h in range(KV_HEADS):
            k, v = heldout.k[b, h].double() - mean[h], heldout.v[b, h].double()
            rows = [
                (x @ rotation, clip, rotation)
                for x, clip, rotation in (
                    (k, QUANTIZER.k_clip, k_rot[h]),
                    (v, QUANTIZER.v_clip, v_rot[h]),
                )
            ]
            k_hat, v_hat = (
                _dequantized(rotated.float(), clip).double() @ rotation.T
                for rotated, clip, rotation in rows
            )
            for t in positions:
                s = torch.arange(t + 1)
                packed = (s >= settings.sink_tokens) & (s < t + 1 - settings.recent_tokens)
                keys = torch.where(packed[:, None], k_hat[: t + 1], k[: t + 1])
                for j in range(h * group, (h + 1) * group):
                    p = torch.softmax(keys @ heldout.q[b, j, t].double() * heldout.sm_scale, 0)
                    e = (p * packed) @ (v_hat - v)[: t + 1]
                    w_o = heldout.o_weight[:, j * DIM : (j + 1) * DIM].double()
                    loss[h] += (e @ w_o.T).square().sum() / HIDDEN
    loss /= SEQS * group * len(positions)
    torch.testing.assert_close(
        torch.tensor(result.curves["v_after"], dtype=torch.float64), loss, rtol=5e-3, atol=0
    )


def _dequantized(x: torch.Tensor, clip) -> torch.Tensor:
    q = quantize(x, clip, QUANTIZER.group_size)
    step, zero = (
        t.float().repeat_interleave(QUANTIZER.group_size, dim=-1) for t in (q.scale, q.zero)
    )
    return zero + step * q.codes


def test_strong_proximal_weight_keeps_the_base(train, heldout) -> None:
    free = solve_layer(train, heldout, Recipe("optr", "quarot", QUANTIZER, SETTINGS))
    tied_settings = replace(SETTINGS, proximal=1e4, lr=0.001)
    tied = solve_layer(train, heldout, Recipe("optr", "quarot", QUANTIZER, tied_settings))
    base = hadamard(DIM, torch.float32)
    distance = [(r.rotations.k_rotation - base).norm() for r in (free, tied)]
    assert distance[1] < 0.2 * distance[0]


def test_switches_leave_a_side_at_the_base(train, heldout) -> None:
    settings = replace(SETTINGS, steps=4, learn_keys=False)
    result = solve_layer(train, heldout, Recipe("optr", "quarot", QUANTIZER, settings))
    base = per_head(hadamard(DIM), KV_HEADS).float()
    torch.testing.assert_close(result.rotations.k_rotation, base, rtol=0, atol=1e-7)
    assert not torch.allclose(result.rotations.v_rotation, base, atol=1e-3)


def test_scored_positions() -> None:
    settings = OptRSettings(num_queries=4, query_selection="last", sink_tokens=4, recent_tokens=8)
    assert settings.query_positions(30).tolist() == [26, 27, 28, 29]
    spread = replace(settings, query_selection="spread").query_positions(30)
    assert spread.tolist() == [12, 18, 23, 29]
    with pytest.raises(CalibrationError, match="too short"):
        settings.query_positions(19)
    assert settings.query_positions(20).tolist() == [16, 17, 18, 19]


def test_cosine_schedule_falls_to_zero() -> None:
    settings = OptRSettings(steps=10, lr=0.1, lr_schedule="cosine")
    rates = [settings.learning_rate(step) for step in range(11)]
    assert rates[0] == 0.1 and rates[5] == pytest.approx(0.05) and rates[10] == pytest.approx(0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": -1},
        {"lr": 0.0},
        {"num_queries": 0},
        {"selection_every": 0},
        {"lambda_k": -1.0},
        {"batch_sequences": 0},
        {"query_selection": "first"},
        {"objective": "reconstruction"},
        {"sink_tokens": -1},
    ],
)
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError):
        OptRSettings(**wrong)


def test_key_mean_is_over_all_positions(train) -> None:
    assert torch.equal(key_mean(train), train.k.double().mean(dim=(0, 2)))
