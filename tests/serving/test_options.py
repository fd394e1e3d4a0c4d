"""The user's flags become KVQuantOptions, or one sentence."""

import argparse

import pytest

from sglang_kvquant import config
from sglang_kvquant.config import KVQuantOptions
from sglang_kvquant.serving import compat, options


def parse(*argv: str) -> KVQuantOptions | None:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return options.parse_options(vars(parser.parse_args(argv)))


@pytest.mark.parametrize("argv", [(), ("--kv-quant", "none")])
def test_without_a_method_there_are_no_options(argv):
    assert parse(*argv) is None


@pytest.mark.parametrize("method", ["rtn", "quarot", "oscar", "optr"])
def test_every_method_parses(method):
    assert parse("--kv-quant", method) == KVQuantOptions(method)


def test_all_flags_arrive():
    parsed = parse(
        *("--kv-quant", "optr", "--kv-quant-checkpoint", "file.safetensors"),
        *("--kv-quant-sink-tokens", "0", "--kv-quant-recent-tokens", "128"),
    )
    assert parsed == KVQuantOptions("optr", "file.safetensors", 0, 128)
    assert parsed.windows() == config.WindowConfig(0, 128)


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--kv-quant-checkpoint", "file"),
        ("--kv-quant-sink-tokens", "0"),
        ("--kv-quant-recent-tokens", "0"),
    ],
)
@pytest.mark.parametrize("method", [(), ("--kv-quant", "none")])
def test_a_flag_without_effect_is_an_error(flag, value, method):
    with pytest.raises(ValueError, match=f"{flag} would have no effect without --kv-quant"):
        parse(*method, flag, value)


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (("--kv-quant", "int3"), "int3 is not a method; choose one of none, rtn, quarot, oscar"),
        (("--kv-quant", "rolaq"), "rolaq is not available: this version serves no MLA models"),
        (("--kv-quant", "rtn", "--kv-quant-checkpoint", "f"), "needs no rotations"),
        (("--kv-quant", "rtn", "--kv-quant-sink-tokens", "-1"), "sink_tokens must be an integer"),
        (("--kv-quant", "rtn", "--kv-quant-recent-tokens", "4097"), "recent_tokens must be an"),
    ],
)
def test_impossible_options_are_one_sentence(argv, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)


def test_keyword_values_are_checked_like_flags():
    assert options.parse_options({"kv_quant": "rtn", "kv_quant_sink_tokens": 8}).sink_tokens == 8
    with pytest.raises(ValueError, match="sink_tokens must be an integer"):
        options.parse_options({"kv_quant": "rtn", "kv_quant_sink_tokens": "8"})


def test_help_names_defaults_bytes_and_the_first_step(capsys):
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for expected in (
        "36 bytes instead of 256",
        "sglang-kvquant calibrate --model MODEL --method optr",
        "none (default)",
        "~/.cache/sglang-kvquant",
        f"usually {config.DEFAULT_SINK_TOKENS}",
        f"usually {config.DEFAULT_RECENT_TOKENS}",
    ):
        assert expected in text


def sglang_args(**given) -> argparse.Namespace:
    unset = dict.fromkeys(("attention_backend", "page_size", "cuda_graph_backend_prefill"))
    return argparse.Namespace(**{"device": "cuda", **unset, **given})


def test_sglang_arguments_on_a_gpu():
    assert options.sglang_arguments(sglang_args(device="cuda:1")) == {
        "attention_backend": compat.BACKEND_NAME,
        "page_size": 64,
        "cuda_graph_backend_prefill": "disabled",
    }


def test_sglang_arguments_on_a_cpu():
    chosen = options.sglang_arguments(sglang_args(device="cpu"))
    assert chosen["attention_backend"] == compat.CPU_BACKEND_NAME
    assert chosen["page_size"] == 1


def test_what_the_user_gave_stays():
    given = {"attention_backend": "x", "page_size": 16, "cuda_graph_backend_prefill": "full"}
    assert options.sglang_arguments(sglang_args(**given)) == {}


def test_the_gpu_backend_is_unknown_to_stock_sglang():
    """A server process without this plugin must fail on the name, not serve BF16."""
    pytest.importorskip("sglang")
    import importlib

    source = importlib.util.find_spec("sglang.srt.layers.attention.attention_registry").origin
    with open(source) as file:
        assert f'"{compat.BACKEND_NAME}"' not in file.read()
