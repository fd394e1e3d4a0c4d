"""Real servers on CPU: exactness, windows, prefix hits, retraction, agreement with the simulation.

Models are tiny and random, so every step is decided by small differences; answers are compared by
the logprobs of whole distributions, not only by their tokens.
"""

from __future__ import annotations

import json
import random
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("sglang")

import contextlib

from sglang_kvquant.checkpoint import LayerRotations, load_checkpoint
from sglang_kvquant.config import WindowConfig
from sglang_kvquant.evaluation.simulate import ReadRule, quantized_layers, replaced_attention
from sglang_kvquant.quantizer import dequantize, quantize
from sglang_kvquant.reference.write import LayerTransform, rotate_kv
from sglang_kvquant.rotation import per_head, rotate_heads

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SINK, RECENT = 24, 32
FP32_LOGPROB = 5e-4
"""Logprobs of two fp32 computations of the same formula in another order."""

BASELINE = ("--attention-backend", "torch_native", "--max-running-requests", "16")


def packed_arguments(checkpoint, sink=SINK, recent=RECENT, requests=16) -> tuple[str, ...]:
    return (
        "--kv-quant",
        "optr",
        "--kv-quant-checkpoint",
        str(checkpoint),
        "--kv-quant-sink-tokens",
        str(sink),
        "--kv-quant-recent-tokens",
        str(recent),
        "--max-running-requests",
        str(requests),
    )


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def assert_same(ours, theirs, tolerance=FP32_LOGPROB) -> None:
    """Equal tokens and, at every step, equal logprobs of the best ones."""
    assert ours.tokens == theirs.tokens
    for mine, other in zip(ours.top, theirs.top, strict=True):
        for token in mine.keys() & other.keys():
            assert mine[token] == pytest.approx(other[token], abs=tolerance)


def largest_gap(ours, theirs) -> float:
    """Largest difference of logprobs of the first step, which both compute on equal tokens."""
    mine, other = ours.top[0], theirs.top[0]
    shared = mine.keys() & other.keys()
    return max((abs(mine[t] - other[t]) for t in shared), default=float("inf"))


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("LlamaForCausalLM")


@pytest.fixture(scope="module")
def checkpoint(model, random_checkpoint):
    return random_checkpoint(model)


PROMPTS = [prompt(length, length) for length in (1, 7, 40, 130, 300)]


@pytest.fixture(scope="module")
def stock_answers(start_server, model):
    """What SGLang without --kv-quant says, with the plugin installed."""
    server = start_server(model, *BASELINE)
    answers = [server.generate(p, 24) for p in PROMPTS]
    long = server.generate_all([prompt(200, seed) for seed in range(12)], 150)
    server.close()
    assert "kvquant" not in server.log_text()
    return answers, long


def test_all_tokens_in_the_windows_is_the_plain_model(
    start_server, model, checkpoint, stock_answers
):
    """Rotation, centring and folding cancel; so do windows, slots and rows under retraction."""
    answers, long = stock_answers
    server = start_server(model, *packed_arguments(checkpoint, sink=0, recent=4096, requests=12))
    for p, expected in zip(PROMPTS, answers, strict=True):
        assert_same(server.generate(p, 24), expected)
    # 12 x 350 tokens do not fit in 4,096 slots: some requests are retracted and prefilled again.
    for ours, expected in zip(
        server.generate_all([prompt(200, seed) for seed in range(12)], 150), long, strict=True
    ):
        assert_same(ours, expected)
    assert "retract" in server.log_text().lower()
    server.flush()


@pytest.mark.parametrize("variant", ["identity", "permuted"])
def test_identity_quantizer_is_the_plain_model_and_a_wrong_rotation_is_not(
    start_server, model, checkpoint, stock_answers, repository, variant
):
    launcher = (str(repository / "tests" / "serving" / "variant_server.py"),)
    server = start_server(
        model,
        *packed_arguments(checkpoint, sink=8, recent=16),
        launcher=launcher,
        env={"KVQUANT_VARIANT": variant},
    )
    ours = [server.generate(p, 24) for p in PROMPTS]
    if variant == "identity":
        for answer, expected in zip(ours, stock_answers[0], strict=True):
            assert_same(answer, expected)
        again = server.generate(PROMPTS[-1], 24)
        assert again.cached_tokens == 300 - 16
        assert_same(again, stock_answers[0][-1])
    else:
        gaps = [largest_gap(a, b) for a, b in zip(ours[2:], stock_answers[0][2:], strict=True)]
        assert min(gaps) > 20 * FP32_LOGPROB


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("Qwen2ForCausalLM", None),
        ("Qwen3ForCausalLM", None),
        ("Phi3ForCausalLM", None),
        ("LlamaForCausalLM", "online"),
    ],
)
def test_every_architecture_is_the_plain_model(
    start_server, tiny_model, random_checkpoint, repository, architecture, variant
):
    """QKV biases, QK-norms, fused weights in the file, and R_V applied online: all cancel."""
    transformers = pytest.importorskip("transformers")
    # SGLang's Qwen2 takes hidden_size / num_heads for the head dimension.
    model = tiny_model(architecture, hidden_size=256)
    options: dict = {}
    if variant:
        launcher = repository / "tests" / "serving" / "variant_server.py"
        options = {"launcher": (str(launcher),), "env": {"KVQUANT_VARIANT": variant}}
    server = start_server(
        model, *packed_arguments(random_checkpoint(model), sink=8, recent=4096), **options
    )
    assert ("applied online" in server.log_text()) == (variant == "online")
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for tokens in PROMPTS[2:4]:
        answer = server.generate(tokens, 16)
        with torch.no_grad():
            logits = plain(torch.tensor([tokens + answer.tokens])).logits[0]
        logprobs = logits.float().log_softmax(-1)[len(tokens) - 1 :]
        for step, top in enumerate(answer.top):
            for token, value in top.items():
                assert value == pytest.approx(float(logprobs[step, token]), abs=FP32_LOGPROB)


@dataclass(frozen=True)
class Tree:
    """Codes of a prefix that another request computed.

    When a prompt is prefilled again over a prefix that the tree holds already, SGLang replaces the
    new slots by the tree's. Overlap scheduling does so after it has launched the first decode
    step, which therefore still reads the slots of its own request.
    """

    codes: list[tuple[torch.Tensor, torch.Tensor]]
    length: int
    first_query: int


class Oracle:
    """The model in transformers, with attention that follows the history of one request.

    Args:
        model: directory.
        checkpoint: file.
        window_dtype: of the windows.
    """

    def __init__(self, model, checkpoint) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        loaded = load_checkpoint(checkpoint)
        self.quantizer = loaded.manifest.quantizer
        heads = loaded.manifest.model.num_kv_heads
        self.transforms = {
            i: LayerTransform.build(
                per_head(layer.k_rotation, heads),
                layer.k_mean,
                per_head(layer.v_rotation, heads),
                self.quantizer,
            )
            for i, layer in loaded.layers.items()
            if isinstance(layer, LayerRotations)
        }

    @torch.no_grad()
    def logprobs(self, tokens: list[int], exact: torch.Tensor, tree: Tree | None = None):
        """Next-token logprobs, [num_tokens, vocab], when query t reads key s from its unquantized
        copy where exact[t, s], and from its codes elsewhere. Leaves the codes in `self.codes`."""
        self.codes: list[tuple[torch.Tensor, torch.Tensor]] = []
        from_tree = torch.zeros_like(exact)
        if tree is not None:
            from_tree[tree.first_query :, : tree.length] = True
        own, causal = ~exact & ~from_tree, torch.ones_like(exact).tril()

        def attention(layer_id, q, k, v, sm_scale):
            transform = self.transforms[layer_id]
            k_rot, v_rot = rotate_kv(k[0].transpose(0, 1), v[0].transpose(0, 1), transform)
            group = self.quantizer.group_size
            k_low = dequantize(quantize(k_rot, self.quantizer.k_clip, group), group)
            v_low = dequantize(quantize(v_rot, self.quantizer.v_clip, group), group)
            self.codes.append((k_low, v_low))
            k_tree, v_tree = k_low.clone(), v_low.clone()
            if tree is not None:
                k_tree[: tree.length], v_tree[: tree.length] = (
                    x[: tree.length] for x in tree.codes[layer_id]
                )
            repeat = q.shape[1] // k.shape[1]

            def per_query_head(x):  # [num_tokens, kv_heads, d] -> [q_heads, num_tokens, d]
                return x.repeat_interleave(repeat, dim=1).transpose(0, 1)

            sources = [
                (exact, k_rot, v_rot),
                (own, k_low, v_low),
                (~exact & from_tree, k_tree, v_tree),
            ]
            q_rot = rotate_heads(q[0].transpose(0, 1).contiguous(), transform.k_rotation)
            q_rot = q_rot.transpose(0, 1) * sm_scale
            logits = sum(
                (q_rot @ per_query_head(keys).transpose(1, 2)) * mask for mask, keys, _ in sources
            )
            weights = logits.masked_fill(~causal, float("-inf")).softmax(-1)
            out = sum((weights * mask) @ per_query_head(values) for mask, _, values in sources)
            back = transform.v_rotation.transpose(1, 2).contiguous()
            out = rotate_heads(out.transpose(0, 1).contiguous(), back)
            return out.transpose(0, 1).unsqueeze(0)

        with replaced_attention(self.model, attention):
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)


def exact_reads(
    total: int, prompt_len: int, chunks: list[tuple[int, int]], sink: int, recent: int
) -> torch.Tensor:
    """DESIGN's rule for one sequence, bool [total, total].

    Args:
        total: tokens, generated ones included.
        prompt_len: tokens that were prefilled; later ones were decoded.
        chunks: (begin, first): a chunk from `begin` up to the next one, computed by a request
            whose first own position is `first`.
        sink, recent: windows.
    """
    exact = torch.zeros(total, total, dtype=torch.bool)
    exact[:, :sink] = True
    bounds = [*(begin for begin, _ in chunks), prompt_len]
    for (begin, first), end in zip(chunks, bounds[1:], strict=True):
        exact[begin:end, begin:end] = True
        exact[begin:end, max(first, begin - recent) : begin] = True
    for t in range(prompt_len, total):
        exact[t, max(0, t + 1 - recent) :] = True
    return exact


@pytest.fixture(scope="module")
def oracle(model, checkpoint):
    pytest.importorskip("transformers")
    return Oracle(model, checkpoint)


@pytest.fixture(scope="module")
def server(start_server, model, checkpoint):
    """Windows much shorter than the requests, so that most is read from codes."""
    return start_server(
        model,
        *packed_arguments(checkpoint),
        "--chunked-prefill-size",
        "128",
        "--enable-metrics",
    )


def check_against_oracle(oracle, prompt_tokens, answer, chunks, tree=None) -> None:
    """Teacher-forced logprobs of every generated token, and of the four next best."""
    tokens = prompt_tokens + answer.tokens
    exact = exact_reads(len(tokens), len(prompt_tokens), chunks, SINK, RECENT)
    logprobs = oracle.logprobs(tokens, exact, tree)
    for step, top in enumerate(answer.top):
        row = logprobs[len(prompt_tokens) - 1 + step]
        for token, value in top.items():
            assert value == pytest.approx(float(row[token]), abs=FP32_LOGPROB), step


def all_chunks(length: int, first: int = 0, size: int = 128) -> list[tuple[int, int]]:
    return [(begin, first) for begin in range(first, length, size)]


@pytest.mark.parametrize("length", [1, 30, 60, 128])
def test_cold_request(server, oracle, length):
    server.flush()
    tokens = prompt(length, 1000 + length)
    answer = server.generate(tokens, 60)
    assert answer.cached_tokens == 0
    check_against_oracle(oracle, tokens, answer, [(0, 0)])


def test_served_logprobs_equal_the_offline_simulation(server, oracle):
    """The same tokens through sglang_kvquant.evaluation, as `evaluate` computes them."""
    server.flush()
    tokens = prompt(100, 4)
    answer = server.generate(tokens, 80)
    rule = ReadRule(WindowConfig(SINK, RECENT), prefill_len=100)
    layers = quantized_layers(oracle.transforms, rule)
    with torch.no_grad(), replaced_attention(oracle.model, layers):
        logits = oracle.model(torch.tensor([tokens + answer.tokens]), use_cache=False).logits[0]
    logprobs = logits.float().log_softmax(-1)[99:]
    for step, top in enumerate(answer.top):
        for token, value in top.items():
            assert value == pytest.approx(float(logprobs[step, token]), abs=FP32_LOGPROB), step


def test_chunked_prefill(server, oracle):
    server.flush()
    tokens = prompt(300, 5)
    answer = server.generate(tokens, 40)
    check_against_oracle(oracle, tokens, answer, all_chunks(300))


def test_prefix_hit(server, oracle):
    """The hit ends `recent` tokens early; decoding then sees the windows of a cold request."""
    server.flush()
    tokens = prompt(120, 6)
    cold = server.generate(tokens, 40)
    check_against_oracle(oracle, tokens, cold, [(0, 0)])
    codes = oracle.codes
    for _ in range(2):
        hit = server.generate(tokens, 40)
        assert hit.cached_tokens == 120 - RECENT
        chunks = [(0, 0), (120 - RECENT, 120 - RECENT)]
        check_against_oracle(oracle, tokens, hit, chunks, Tree(codes, 120, 121))
    longer = tokens + prompt(30, 7)
    answer = server.generate(longer, 60)
    assert answer.cached_tokens == 150 - RECENT
    chunks = [(0, 0), (150 - RECENT, 150 - RECENT)]
    check_against_oracle(oracle, longer, answer, chunks, Tree(codes, 120, 151))


def test_prefix_inside_the_sinks_equals_the_cold_run(server):
    """A hit that lies in the shared sink rows loses nothing at all."""
    server.flush()
    tokens = prompt(SINK + RECENT, 8)
    cold = server.generate(tokens, 40)
    hit = server.generate(tokens, 40)
    assert hit.cached_tokens == SINK
    assert_same(hit, cold)


def test_concurrent_requests_with_shared_prefixes(server, oracle):
    """16 at once: each reads what it would read alone."""
    server.flush()
    base = prompt(100, 9)
    server.generate(base, 1)
    prompts = [base[: 40 + 4 * i] + prompt(40, 100 + i) for i in range(16)]
    answers = server.generate_all(prompts, 50)
    for i, (tokens, answer) in enumerate(zip(prompts, answers, strict=True)):
        hit = answer.cached_tokens
        assert hit == min(40 + 4 * i, len(tokens) - RECENT)
        # Chunks are cut where the batch's 128 tokens end, which the answer does not tell.
        if len(tokens) - hit <= 128:
            decoded = check_decode_only(oracle, tokens, answer, hit)
            assert decoded


def check_decode_only(oracle, tokens, answer, hit) -> bool:
    """Compare under each possible place where the batch's token limit cut this prompt."""
    everything = tokens + answer.tokens
    for cut in [None, *range(hit + 1, len(tokens))]:
        chunks = [(0, 0), (hit, hit)] + ([] if cut is None else [(cut, hit)])
        exact = exact_reads(len(everything), len(tokens), chunks, SINK, RECENT)
        logprobs = oracle.logprobs(everything, exact)[len(tokens) - 1 : -1]
        got = logprobs.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1)
        if torch.allclose(got, answer.logprobs, atol=FP32_LOGPROB):
            return True
    return False


def test_metrics_are_beside_sglangs_own(server):
    text = server.call("/metrics")
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("kvquant_")
    }
    assert values["kvquant_bytes_per_token"] == 2 * 2 * 2 * (16 + 4)
    assert values["kvquant_pool_tokens"] == 4096
    assert values["kvquant_running_requests_limit"] == 16
    assert values["kvquant_sink_groups_stolen_total"] >= 0
    assert "sglang:" in text


def test_soak_with_aborts_leaks_nothing(server):
    """500 mixed requests; SGLang checks its slots whenever it is idle, as flush needs it."""
    server.flush()
    rng = random.Random(11)
    bases = [prompt(rng.randrange(10, 150), 200 + i) for i in range(6)]

    def one(i: int) -> None:
        base = bases[i % 6]
        tokens = base[: rng.randrange(len(base) + 1)] + prompt(rng.randrange(1, 60), 300 + i)
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": rng.choice([1, 2, 8, 30])},
            "rid": f"soak-{i}",
        }
        if i % 7 == 0:
            body["sampling_params"].update(max_new_tokens=2000, ignore_eos=True)
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(server.call, "/generate", body)
                server.call("/abort_request", {"rid": f"soak-{i}"})
                while not answer.done():
                    server.call("/abort_request", {"rid": f"soak-{i}"})
                    with contextlib.suppress(TimeoutError, urllib.error.HTTPError):
                        answer.result(timeout=0.2)
            return
        server.call("/generate", body)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(500)))
    server.flush()
    log = server.log_text()
    assert "leak" not in log.lower() and "Scheduler hit an exception" not in log
    info = json.loads(server.call("/server_info"))
    assert info["max_total_num_tokens"] == 4096
