"""Settings before Triton is imported, a seed per test, and tiny models of every architecture."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read when @triton.jit executes, so it cannot wait for the kernel tests.
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPOSITORY = Path(__file__).resolve().parent.parent

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The same random numbers for a test in any order and any selection of tests."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real models and texts: $SGLANG_KVQUANT_SHARED, or `shared` beside the checkout."""
    given = os.environ.get("SGLANG_KVQUANT_SHARED")
    path = Path(given) if given else REPOSITORY.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"real models and texts are not at {path}; set SGLANG_KVQUANT_SHARED")
    return path


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes, then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def write_tiny_model(
    directory: Path,
    architecture: str,
    *,
    num_layers: int = 2,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    hidden_size: int = 128,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """A random model of a served architecture, as a Hugging Face directory with a tokenizer."""
    import transformers

    name = architecture.removesuffix("ForCausalLM")
    fields = {
        "vocab_size": 264,  # 256 bytes and 5 special tokens, rounded up to a multiple of 8
        "hidden_size": num_q_heads * head_dim if name == "Phi3" else hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_q_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "initializer_range": 0.06,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 257,
        "tie_word_embeddings": False,
    }
    if name == "Phi3":
        fields["sliding_window"] = None
    config = getattr(transformers, f"{name}Config")(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config).to(dtype)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                # Fresh biases are zero and fresh norms one, which would hide a forgotten one.
                if parameter_name.endswith("proj.bias"):
                    parameter.normal_(std=0.5)
                elif "norm" in parameter_name:
                    parameter.uniform_(0.7, 1.3)
    model.save_pretrained(directory, safe_serialization=True)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model("LlamaForCausalLM", head_dim=64, …)`` gives a model directory.

    Keyword arguments are those of :func:`write_tiny_model`; equal calls share one directory, which
    must not be changed.
    """
    pytest.importorskip("transformers")
    made: dict[tuple, Path] = {}

    def make(architecture: str = "LlamaForCausalLM", **options) -> Path:
        key = (architecture, *sorted(options.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp(architecture)
            made[key] = write_tiny_model(directory, architecture, **options)
        return made[key]

    return make
