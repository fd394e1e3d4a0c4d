"""Every row of the refusal matrix refuses a real ServerArgs, and nothing else does."""

import dataclasses
import json

import pytest

sglang = pytest.importorskip("sglang")

from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_kvquant.checkpoint import data_free_checkpoint, save_checkpoint  # noqa: E402
from sglang_kvquant.config import KVQuantOptions  # noqa: E402
from sglang_kvquant.model_info import ModelInfo  # noqa: E402
from sglang_kvquant.serving import compat, refusals  # noqa: E402
from sglang_kvquant.serving.refusal_table import ENVIRONMENT, TABLE, Refusal  # noqa: E402

pytestmark = pytest.mark.sglang

OPTIONS = KVQuantOptions("quarot")
VERSION = compat.sglang_version()

# What a user would write to meet a row, by the row's setting; a switch needs no entry.
TRIGGERS = {
    "--device {device}": {"device": "xpu"},
    "an AMD GPU": {"device": "cuda"},
    "--attention-backend {attention_backend}": {"attention_backend": "triton"},
    "--prefill-attention-backend or --decode-attention-backend": {
        "decode_attention_backend": "triton"
    },
    "--page-size {page_size}": {"page_size": 64},
    "a CUDA graph of the prefill": {"cuda_graph_backend_prefill": "breakable"},
    "a breakable or piecewise CUDA graph of the decode": {
        "cuda_graph_config": {"decode": {"backend": "breakable"}}
    },
    "--rl-on-policy-target": {"rl_on_policy_target": "fsdp"},
    "--kv-cache-dtype {kv_cache_dtype}": {"kv_cache_dtype": "fp8_e4m3"},
    "--quantization-param-path": {"quantization_param_path": "scales.json"},
    "--hicache-storage-backend": {"hicache_storage_backend": "file"},
    "--disaggregation-mode {disaggregation_mode}": {"disaggregation_mode": "prefill"},
    "--radix-cache-backend": {"radix_cache_backend": "mine"},
    "--kv-canary {kv_canary}": {"kv_canary": "log"},
    "--speculative-algorithm": {"speculative_algorithm": "NGRAM"},
    "--decoupled-spec-role {decoupled_spec_role}": {"decoupled_spec_role": "verifier"},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--lora-paths": {"lora_paths": ["a=b"]},
    "--uno-lora-path": {"uno_lora_path": "adapter"},
    "--load-format {load_format}": {"load_format": "gguf"},
    "--custom-weight-loader": {"custom_weight_loader": ["mine.load"]},
    "--weight-cache-mode {weight_cache_mode}": {"weight_cache_mode": "daemon"},
    "--startup-weight-load-mode {startup_weight_load_mode}": {
        "startup_weight_load_mode": "overlap"
    },
    "--cpu-offload-gb {cpu_offload_gb}": {"cpu_offload_gb": 1},
    "--offload-group-size {offload_group_size}": {"offload_group_size": 1},
    "--torchao-config": {"torchao_config": "int4wo-128"},
    "--modelopt-quant": {"modelopt_quant": "fp8"},
    "--model-impl {model_impl}": {"model_impl": "transformers"},
    "--json-model-override-args": {"json_model_override_args": '{"num_hidden_layers": 1}'},
    "--ep-join-mode": {"ep_join_mode": "scale"},
    "--elastic-ep-backend": {"elastic_ep_backend": "mooncake"},
}


def trigger(row: Refusal) -> dict:
    if row.what in TRIGGERS:
        return TRIGGERS[row.what]
    (field,) = row.fields
    return {field: 2} if field.endswith("_size") else {field: True}


def here(row: Refusal) -> bool:
    return VERSION in row.versions


def server_args(**given) -> ServerArgs:
    """Real ServerArgs; the model name makes 0.5.17 leave them unresolved."""
    return ServerArgs(**{"model_path": "dummy", "device": "cpu", **given})


def refusal(args, options=OPTIONS) -> str:
    with pytest.raises(ValueError) as caught:
        refusals.check_arguments(args, options)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def test_plain_arguments_are_served():
    refusals.check_arguments(server_args(), OPTIONS)
    ours = {"attention_backend": "torch_native", "page_size": 1, "kv_cache_dtype": "bfloat16"}
    refusals.check_arguments(server_args(**ours, cuda_graph_backend_prefill="disabled"), OPTIONS)
    gpu = {"device": "cuda", "attention_backend": compat.BACKEND_NAME, "tp_size": 2, "dp_size": 2}
    for page_size in (16, 32, 64, 128):
        refusals.check_arguments(server_args(**gpu, page_size=page_size), OPTIONS)
    rope = json.dumps({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    refusals.check_arguments(server_args(json_model_override_args=rope), OPTIONS)


@pytest.mark.parametrize(
    "row", [row for row in TABLE if here(row) and row.fields], ids=lambda row: row.what
)
def test_row_refuses(row, monkeypatch):
    if row.what == "an AMD GPU":
        monkeypatch.setattr("torch.version.hip", "6.4")
    args = server_args(**trigger(row))
    assert row.applies(args) and not row.applies(server_args(device="cpu"))
    if row.what.startswith("--page-size"):
        assert row.applies(server_args(device="cuda", page_size=1))
    assert refusal(args) == row.sentence(args)
    for part in (row.why, row.remedy, "cannot be combined with --kv-quant"):
        assert part in row.sentence(args)


@pytest.mark.parametrize("row", [r for r in ENVIRONMENT if here(r)], ids=lambda row: row.what)
def test_environment_row_refuses(row, monkeypatch):
    name = row.what.partition("=")[0]
    for value in ("1", "true", "True"):
        monkeypatch.setenv(name, value)
        assert refusal(server_args()) == row.sentence(server_args())
    for value in ("0", "false", ""):
        monkeypatch.setenv(name, value)
        refusals.check_arguments(server_args(), OPTIONS)


@pytest.mark.parametrize(
    "config", [{"prefill": {"backend": "full"}}, {"prefill": {"backend": "breakable"}}]
)
def test_a_prefill_graph_from_the_explicit_configuration(config):
    both = {"cuda_graph_config": config, "cuda_graph_backend_prefill": "disabled"}
    assert "a CUDA graph of the prefill" in refusal(server_args(**both))


def test_every_field_of_a_row_exists_exactly_where_the_row_says():
    """A field that vanished would make a row pass silently; one that came back, be missed."""
    fields = compat.server_args_defaults()
    for row in TABLE:
        assert row.versions and set(row.versions) <= set(compat.SUPPORTED_VERSIONS)
        for name in row.fields:
            assert (name in fields) == here(row), (name, row.versions)


def test_a_vanished_field_is_an_error_and_not_a_pass():
    defaults = compat.server_args_defaults()
    del defaults["enable_lora"]
    args = dataclasses.make_dataclass("Args", defaults)(**{**defaults, "device": "cpu"})
    with pytest.raises(RuntimeError, match=r"has no ServerArgs\.enable_lora"):
        refusals.check_arguments(args, OPTIONS)


@pytest.mark.parametrize("version", ["0.5.16", "0.5.18", "0.5.24", "0.6.0"])
def test_untested_versions_are_refused(version, monkeypatch):
    monkeypatch.setattr(compat, "sglang_version", lambda: version)
    with pytest.raises(ValueError, match=rf"{version}: install one of 0.5.17, 0.5.23"):
        refusals.check_version()


def model_args(path, **given) -> ServerArgs:
    args = server_args(load_format="dummy", **given)
    args.model_path = str(path)  # afterwards: 0.5.17 resolves a real model on construction
    return args


def test_a_served_model_and_its_checkpoint_pass(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_KVQUANT_HOME", str(tmp_path))
    model = tiny_model("LlamaForCausalLM")
    refusals.check_model(model_args(model), KVQuantOptions("quarot"))
    refusals.check_model(model_args(model), KVQuantOptions("optr", optr_file(model, tmp_path)))


def optr_file(model, directory) -> str:
    """An untrained checkpoint that calls itself OptR."""
    made = data_free_checkpoint("quarot", ModelInfo.from_model_path(str(model)))
    manifest = dataclasses.replace(made.manifest, method="optr", base="quarot")
    path = directory / "made.safetensors"
    save_checkpoint(dataclasses.replace(made, manifest=manifest), path)
    return str(path)


def test_a_missing_checkpoint_names_the_command(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_KVQUANT_HOME", str(tmp_path))
    model = tiny_model("LlamaForCausalLM")
    with pytest.raises(ValueError) as caught:
        refusals.check_model(model_args(model), KVQuantOptions("optr"))
    assert f"`sglang-kvquant calibrate --model {model} --method optr`" in str(caught.value)


def test_a_checkpoint_of_another_model_or_method_is_refused(tiny_model, tmp_path):
    path = optr_file(tiny_model("LlamaForCausalLM"), tmp_path)
    other = model_args(tiny_model("LlamaForCausalLM", num_kv_heads=4))
    with pytest.raises(ValueError, match="made for another model"):
        refusals.check_model(other, KVQuantOptions("optr", path))
    with pytest.raises(ValueError, match="made for method optr, not oscar"):
        refusals.check_model(
            model_args(tiny_model("LlamaForCausalLM")), KVQuantOptions("oscar", path)
        )


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM .* is not served"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "DeepseekV2ForCausalLM .* is not served"),
        ({"text_config": {}}, "multimodal models"),
        ({"head_dim": 80}, "head_dim 80 is not served"),
        ({"head_dim": 96}, "head_dim 96 is not served"),
        ({"use_sliding_window": True}, "has sliding-window layers"),
        ({"is_encoder_decoder": True}, "is an encoder-decoder model"),
        (
            {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
            "declares a quantized KV cache",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_models_that_are_not_served(change, sentence, tmp_path):
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"architectures": ["Qwen2ForCausalLM"], **shape, "head_dim": 64, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=sentence) as caught:
        refusals.check_model(model_args(tmp_path), OPTIONS)
    assert "\n" not in str(caught.value)


def test_a_kv_dtype_declared_beside_config_json_is_refused(tmp_path):
    declared = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="declares a quantized KV cache"):
        refusals.check_config(tmp_path)
