"""The offline simulation computes what reference write and decode compute, token by token."""

from __future__ import annotations

import pytest
import torch

from sglang_kvquant.config import QuantizerConfig, WindowConfig
from sglang_kvquant.evaluation import simulate
from sglang_kvquant.evaluation.simulate import ReadRule, simulated_attention
from sglang_kvquant.layout import GQALayout, PackedKV, ReadPlan, WindowKV
from sglang_kvquant.reference.attention import decode, extend
from sglang_kvquant.reference.write import LayerTransform, rotate_kv, write_kv
from sglang_kvquant.rotation import rotate_heads, skew_exp

PAGE_SIZE = 4


def random_rotation(num_heads: int, head_dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return skew_exp(
        torch.randn(num_heads, head_dim, head_dim, generator=generator).double()
    ).float()


def signed_permutations(num_heads: int, head_dim: int, seed: int) -> torch.Tensor:
    """Rotations whose products are exact, so that no code or BF16 rounding hangs on sum order."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(head_dim, generator=generator) for _ in range(num_heads)]
    signs = torch.randint(0, 2, (num_heads, 1, head_dim), generator=generator) * 2.0 - 1.0
    return torch.stack([torch.eye(head_dim)[:, order] for order in orders]) * signs


def make_transform(num_kv_heads: int, head_dim: int, rotations=random_rotation) -> LayerTransform:
    generator = torch.Generator().manual_seed(3)
    return LayerTransform.build(
        rotations(num_kv_heads, head_dim, 1),
        torch.randn(num_kv_heads, head_dim, generator=generator),
        rotations(num_kv_heads, head_dim, 2),
        QuantizerConfig(32),
    )


def make_qkv(batch: int, num_q_heads: int, num_kv_heads: int, num_tokens: int, head_dim: int):
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(batch, heads, num_tokens, head_dim, generator=generator)

    offset = 3.0 * torch.randn(1, num_kv_heads, 1, head_dim, generator=generator)
    return draw(num_q_heads), draw(num_kv_heads) + offset, draw(num_kv_heads)


def served_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    transform: LayerTransform,
    rule: ReadRule,
    sm_scale: float,
) -> torch.Tensor:
    """One sequence, one token at a time, with the server's buffers: [num_q_heads, tokens, dim]."""
    num_kv_heads, num_tokens, head_dim = k.shape
    sink, recent = rule.windows.sink_tokens, rule.windows.recent_tokens
    layout = GQALayout(num_kv_heads, head_dim, transform.quantizer.group_size, PAGE_SIZE)
    num_pages = num_tokens // PAGE_SIZE + 2
    packed = PackedKV.allocate(layout, num_pages, "cpu")
    buffers = [
        torch.full(layout.window_shape(rows, tokens), float("nan"), dtype=rule.window_dtype)
        for rows, tokens in ((2, recent), (2, recent), (1, sink), (1, sink))
    ]
    window = WindowKV(*buffers)
    page_table = (torch.randperm(num_pages - 1)[: num_pages - 1] + 1).int().unsqueeze(0)
    rotated_q = rotate_heads(q.transpose(0, 1).contiguous(), transform.k_rotation)
    outs = []
    for t in range(num_tokens):
        slot = int(page_table[0, t // PAGE_SIZE]) * PAGE_SIZE + t % PAGE_SIZE
        plan = ReadPlan(
            page_table=page_table,
            kv_lens=torch.tensor([t + 1], dtype=torch.int32),
            ring_row=torch.tensor([1], dtype=torch.int32),
            ring_begin=torch.tensor([max(0, t + 1 - recent)], dtype=torch.int32),
            sink_group=torch.zeros(1, sink, dtype=torch.int32),
        )
        write_kv(
            packed,
            window,
            k[:, t : t + 1].transpose(0, 1),
            v[:, t : t + 1].transpose(0, 1),
            transform,
            torch.tensor([slot]),
            torch.tensor([recent + t % recent]) if recent else None,
            torch.tensor([t if t < sink else -1]) if sink else None,
        )
        if t >= rule.prefill_len:
            out, _ = decode(rotated_q[t : t + 1], packed, window, plan, sm_scale)
            outs.append(out)
    prompt = _served_prompt(rotated_q, k, v, transform, rule.prefill_len, packed, window, sm_scale)
    out = torch.cat([*prompt, *outs])
    return rotate_heads(out, transform.v_rotation.transpose(-1, -2)).transpose(0, 1)


def _served_prompt(rotated_q, k, v, transform, prefill_len, packed, window, sm_scale):
    """A cold request's prompt in one chunk: no cached prefix."""
    if prefill_len == 0:
        return []
    tokens = slice(0, prefill_len)
    k_rot, v_rot = rotate_kv(k[:, tokens].transpose(0, 1), v[:, tokens].transpose(0, 1), transform)
    empty = torch.zeros(1, dtype=torch.int32)
    plan = ReadPlan(
        empty.unsqueeze(0), empty, empty, empty, empty.new_zeros(1, window.sink_tokens)
    )
    indptr = torch.tensor([0, prefill_len], dtype=torch.int32)
    out, _ = extend(rotated_q[tokens], k_rot, v_rot, indptr, packed, window, plan, sm_scale)
    return [out]


@pytest.mark.parametrize(
    ("sink", "recent", "num_tokens", "prefill_len", "dtype"),
    [
        (0, 0, 40, 0, torch.float32),
        (4, 16, 75, 0, torch.float32),
        (4, 16, 75, 0, torch.bfloat16),
        (0, 16, 75, 0, torch.float32),
        (4, 0, 75, 0, torch.float32),
        (4, 16, 75, 30, torch.float32),
        (0, 0, 75, 30, torch.float32),
        (64, 256, 400, 0, torch.float32),
    ],
)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(6, 2), (2, 2)])
@pytest.mark.parametrize("chunk", [16, 256])
def test_equals_token_by_token_serving(
    monkeypatch, sink, recent, num_tokens, prefill_len, dtype, num_q_heads, num_kv_heads, chunk
):
    monkeypatch.setattr(simulate, "QUERY_CHUNK", chunk)
    transform = make_transform(num_kv_heads, 64, signed_permutations)
    rule = ReadRule(WindowConfig(sink, recent), prefill_len, dtype)
    q, k, v = make_qkv(1, num_q_heads, num_kv_heads, num_tokens, 64)
    simulated = simulated_attention(q, k, v, transform, rule, 0.125)[0]
    served = served_attention(q[0], k[0], v[0], transform, rule, 0.125)
    torch.testing.assert_close(simulated, served, rtol=1e-5, atol=2e-5)


def test_a_window_off_by_one_is_seen():
    """The comparison above would notice a window that is one token too long or too short."""
    transform = make_transform(2, 64, signed_permutations)
    q, k, v = make_qkv(1, 4, 2, 75, 64)
    served = served_attention(q[0], k[0], v[0], transform, ReadRule(WindowConfig(4, 16)), 0.125)
    for sink, recent in ((4, 15), (4, 17), (3, 16), (5, 16)):
        rule = ReadRule(WindowConfig(sink, recent))
        simulated = simulated_attention(q, k, v, transform, rule, 0.125)[0]
        assert (simulated - served).abs().max() > 1e-2


def test_sequences_of_a_batch_do_not_mix():
    transform = make_transform(2, 64)
    rule = ReadRule(WindowConfig(4, 16))
    q, k, v = make_qkv(3, 6, 2, 50, 64)
    together = simulated_attention(q, k, v, transform, rule, 0.125)
    for i in range(3):
        alone = simulated_attention(
            q[i : i + 1], k[i : i + 1], v[i : i + 1], transform, rule, 0.125
        )
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-5)


def other_heads_rotation(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    return rotate_heads(x, rotation.flip(0))


def test_identity_quantizer_is_plain_attention(monkeypatch):
    transform = make_transform(2, 64)
    q, k, v = make_qkv(2, 6, 2, 300, 64)
    rule = ReadRule(WindowConfig(4, 16), identity_quantizer=True)
    plain = simulate.plain_attention(q, k, v, 0.125)
    same = simulated_attention(q, k, v, transform, rule, 0.125)
    torch.testing.assert_close(same, plain, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(simulate, "rotate_heads", other_heads_rotation)
    permuted = simulated_attention(q, k, v, transform, rule, 0.125)
    assert (permuted - plain).abs().max() > 0.1


def test_query_chunks_cover_everything_once_and_split_at_the_prompt():
    for num_tokens, prefill_len in (
        (1, 0),
        (256, 0),
        (257, 0),
        (700, 300),
        (700, 256),
        (700, 700),
    ):
        chunks = list(simulate.query_chunks(num_tokens, prefill_len))
        assert [t for a, b in chunks for t in range(a, b)] == list(range(num_tokens))
        assert all(b - a <= simulate.QUERY_CHUNK for a, b in chunks)
        assert not any(a < prefill_len < b for a, b in chunks)


def tiny_model(architecture: str, **overrides):
    """A small randomly initialized model of transformers, in fp32 on the CPU."""
    import transformers

    config_class = getattr(transformers, f"{architecture}Config")
    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "sliding_window": None,
    }
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    return model_class(config_class(**{**shape, **overrides})).eval()


def logits_with(model, attention, tokens):
    with simulate.replaced_attention(model, attention), torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3", "Phi3"])
def test_model_with_identity_quantizer_equals_the_plain_model(architecture, monkeypatch):
    shape = {"hidden_size": 256} if architecture in ("Qwen2", "Phi3") else {}
    model = tiny_model(architecture, **shape)
    tokens = torch.randint(1, 128, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = model(input_ids=tokens, use_cache=False).logits
    transforms = {i: make_transform(2, 64) for i in range(3)}
    rule = ReadRule(WindowConfig(4, 16), identity_quantizer=True)
    attention = simulate.quantized_layers(transforms, rule)
    same = logits_with(model, attention, tokens)
    torch.testing.assert_close(same, plain, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(simulate, "rotate_heads", other_heads_rotation)
    permuted = logits_with(model, attention, tokens)
    assert (permuted - plain).abs().max() > 100 * (same - plain).abs().max()
    with torch.no_grad():
        after = model(input_ids=tokens, use_cache=False).logits
    assert torch.equal(after, plain), "the model's own attention must be back"


def test_a_sliding_window_is_refused():
    model = tiny_model("Phi3", hidden_size=256, sliding_window=32)
    transforms = {i: make_transform(2, 64) for i in range(3)}
    attention = simulate.quantized_layers(transforms, ReadRule(WindowConfig(4, 16)))
    with pytest.raises(ValueError, match="a sliding window, padding or a cache"):
        logits_with(model, attention, torch.ones(1, 90, dtype=torch.long))
