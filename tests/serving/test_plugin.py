"""The plugin in one process: flags, Engine keywords, what travels, and what is left alone."""

import copy
import pickle
import sys

import pytest

sglang = pytest.importorskip("sglang")

from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402

from sglang_kvquant import plugin  # noqa: E402
from sglang_kvquant.config import KVQuantOptions  # noqa: E402
from sglang_kvquant.serving import compat, weight_requests  # noqa: E402

pytestmark = pytest.mark.sglang

BASE = ("--model-path", "dummy", "--device", "cpu")


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """Load plugins as SGLang does; the entry point must lead here."""
    compat.load_plugins()
    assert all(compat.is_hooked(target) for target in compat.LAUNCH_TARGETS)


@pytest.fixture(scope="module")
def engine_class():
    pytest.importorskip("sglang.srt.entrypoints.engine")
    from sglang.srt.entrypoints.engine import Engine

    compat.load_plugins()  # what Engine.__init__ does first
    return Engine


def engine_arguments(engine_class, **kwargs) -> ServerArgs:
    """The ServerArgs that Engine(**kwargs) builds, without starting it."""
    engine = object.__new__(engine_class)
    return engine.server_args_class(**{"model_path": "dummy", "device": "cpu", **kwargs})


def fields_of(server_args: ServerArgs) -> dict:
    return {name: getattr(server_args, name) for name in compat.server_args_defaults()}


def test_flags_become_options_and_sglang_arguments():
    server_args = prepare_server_args(
        [*BASE, "--kv-quant", "optr", "--kv-quant-sink-tokens", "32"]
    )
    assert compat.options_of(server_args) == KVQuantOptions("optr", sink_tokens=32)
    assert server_args.attention_backend == "torch_native"
    assert server_args.page_size == 1
    assert server_args.cuda_graph_backend_prefill == "disabled"


def test_on_a_gpu_the_backend_has_a_name_of_ours():
    argv = ["--model-path", "dummy", "--device", "cuda", "--kv-quant", "rtn"]
    server_args = prepare_server_args(argv)
    assert server_args.attention_backend == "kvquant"
    assert server_args.page_size == 64
    assert prepare_server_args([*argv, "--page-size", "16"]).page_size == 16


def test_a_config_file_takes_the_flags(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "model-path: dummy\ndevice: cpu\nkv-quant: quarot\nkv-quant-recent-tokens: 0\n"
    )
    options = compat.options_of(prepare_server_args(["--config", str(config)]))
    assert options == KVQuantOptions("quarot", recent_tokens=0)
    # The command line wins, as for SGLang's own flags.
    overridden = prepare_server_args(["--config", str(config), "--kv-quant", "rtn"])
    assert compat.options_of(overridden).method == "rtn"


@pytest.mark.parametrize("argv", [(), ("--kv-quant", "none")])
def test_without_kv_quant_nothing_changes(argv):
    """Against ServerArgs built by SGLang alone from the same values."""
    server_args = prepare_server_args([*BASE, *argv])
    assert compat.options_of(server_args) is None
    assert not [name for name in vars(server_args) if name.startswith("_kvquant")]
    stock = ServerArgs(model_path="dummy", device="cpu")
    given = fields_of(server_args)
    assert given == fields_of(stock)


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (("--kv-quant", "int2"), "--kv-quant int2 is not a method"),
        (("--kv-quant", "rolaq"), "--kv-quant rolaq is not available"),
        (("--kv-quant-checkpoint", "f"), "--kv-quant-checkpoint would have no effect"),
        (("--kv-quant", "rtn", "--enable-lora"), "--enable-lora cannot be combined"),
        (("--kv-quant", "rtn", "--attention-backend", "triton"), "--attention-backend triton"),
    ],
)
def test_a_bad_command_line_ends_with_one_line(argv, sentence, capsys):
    with pytest.raises(SystemExit) as caught:
        prepare_server_args([*BASE, *argv])
    assert caught.value.code == 2
    errors = capsys.readouterr().err.strip()
    assert errors.startswith("sglang: error: ") and sentence in errors
    assert "\n" not in errors


def test_engine_keywords(engine_class):
    server_args = engine_arguments(
        engine_class, kv_quant="quarot", kv_quant_sink_tokens=0, kv_quant_recent_tokens=64
    )
    assert isinstance(server_args, ServerArgs)
    assert compat.options_of(server_args) == KVQuantOptions("quarot", None, 0, 64)
    assert server_args.attention_backend == "torch_native" and server_args.page_size == 1


def test_engine_without_keywords_is_stock(engine_class):
    ours = engine_arguments(engine_class, random_seed=1)
    assert fields_of(ours) == fields_of(
        ServerArgs(model_path="dummy", device="cpu", random_seed=1)
    )
    assert compat.options_of(engine_arguments(engine_class, kv_quant=None)) is None
    assert compat.options_of(engine_arguments(engine_class, kv_quant="none")) is None


@pytest.mark.parametrize(
    "kwargs, sentence",
    [
        ({"kv_quant": "int2"}, "is not a method"),
        ({"kv_quant_sink_tokens": 3}, "would have no effect"),
        ({"kv_quant": "rtn", "lora_paths": ["x"]}, "--lora-paths cannot be combined"),
        ({"kv_quant": "rtn", "kv_quant_sink_tokens": "3"}, "must be an integer"),
    ],
)
def test_engine_raises_value_errors(kwargs, sentence, engine_class):
    with pytest.raises(ValueError, match=sentence):
        engine_arguments(engine_class, **kwargs)


def test_engine_is_taught_once(engine_class):
    before = engine_class.server_args_class
    plugin._teach_engine()
    assert engine_class.server_args_class is before
    assert before._kvquant_original is ServerArgs


def test_registering_again_adds_nothing():
    def registered() -> dict:
        hooks = compat.LAUNCH_TARGETS
        return {target.path: list(HookRegistry._hooks[target.path]) for target in hooks}

    before = registered()
    assert all(len(entries) == 1 for entries in before.values())
    plugin.register()
    assert registered() == before


def test_options_survive_pickling_and_copies():
    server_args = prepare_server_args([*BASE, "--kv-quant", "quarot"])
    for copied in (pickle.loads(pickle.dumps(server_args)), copy.deepcopy(server_args)):
        assert compat.options_of(copied) == KVQuantOptions("quarot")
        assert fields_of(copied) == fields_of(server_args)


def test_something_else_in_the_place_of_options_is_an_error():
    server_args = ServerArgs(model_path="dummy", device="cpu")
    compat.attach(server_args, **{compat.OPTIONS_ATTRIBUTE: {"method": "rtn"}})
    with pytest.raises(TypeError, match="not KVQuantOptions"):
        compat.options_of(server_args)


def test_the_resolved_configuration_and_the_model_are_checked(tiny_model, tmp_path, monkeypatch):
    """What SGLang calls before it starts a process, on ServerArgs of a real model."""
    monkeypatch.setenv("SGLANG_KVQUANT_HOME", str(tmp_path))
    argv = ["--model-path", str(tiny_model("LlamaForCausalLM")), "--device", "cpu"]
    server_args = prepare_server_args(
        [*argv, "--kv-quant", "quarot", "--mem-fraction-static", "0.5"]
    )
    resolve(server_args)
    server_args.check_server_args()
    view = compat.resolved(server_args)
    assert (view.attention_backend, view.page_size) == ("torch_native", 1)
    assert view.cuda_graph_config.prefill.backend == "disabled"


def resolve(server_args: ServerArgs) -> None:
    """0.5.17 resolves on construction."""
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()


def test_a_missing_checkpoint_stops_the_launch(
    tiny_model, tmp_path, monkeypatch, capsys, engine_class
):
    monkeypatch.setenv("SGLANG_KVQUANT_HOME", str(tmp_path))
    model = str(tiny_model("LlamaForCausalLM"))
    server_args = prepare_server_args(
        ["--model-path", model, "--device", "cpu", "--kv-quant", "optr"]
    )
    resolve(server_args)
    with pytest.raises(SystemExit) as caught:
        server_args.check_server_args()
    assert caught.value.code == 2
    command = f"`sglang-kvquant calibrate --model {model} --method optr`"
    assert command in capsys.readouterr().err
    from_engine = engine_arguments(engine_class, model_path=model, kv_quant="optr")
    resolve(from_engine)
    with pytest.raises(ValueError) as error:
        from_engine.check_server_args()
    assert command in str(error.value)


@pytest.mark.parametrize("target", list(compat.REFUSED_REQUESTS), ids=lambda target: target.path)
def test_weight_requests_are_answered_with_a_failure(target):
    if compat.sglang_version() not in target.versions:
        pytest.skip("not in this release")
    answer_class = compat.REFUSED_REQUESTS[target]

    def original(*args):
        raise AssertionError("the request went through")

    if answer_class is None:
        with pytest.raises(ValueError, match="can be neither updated nor exported"):
            weight_requests._hook(answer_class)(original, object(), {})
        return
    answer = weight_requests._hook(answer_class)(original, object(), object())
    assert type(answer).__name__ == answer_class.rpartition(".")[2]
    assert answer.success is False and "--kv-quant" in answer.message


def test_unverified_refusals_of_weight_requests_are_an_error():
    if all(compat.is_hooked(target) for target in weight_requests._targets()):
        pytest.skip("already installed in this process")
    with pytest.raises(compat.HookError, match="could not refuse weight updates"):
        weight_requests.verify()


def test_arriving_in_a_process_without_a_scheduler_does_nothing(monkeypatch):
    monkeypatch.setattr(compat, "is_imported", lambda path: False)
    monkeypatch.setattr(compat, "load_plugins", lambda: pytest.fail("must not be called"))
    assert plugin._arrive().from_cli is False


def test_arriving_in_a_scheduler_without_the_plugin_fails(monkeypatch):
    monkeypatch.setattr(compat, "is_imported", lambda path: True)
    monkeypatch.setattr(compat, "is_hooked", lambda target: False)
    with pytest.raises(compat.HookError, match="SGLANG_PLUGINS"):
        plugin._arrive()


def test_on_a_gpu_resolution_keeps_what_was_chosen(tiny_model, tmp_path, monkeypatch):
    """SGLang's own resolution of a GPU server; only the size of the GPU's memory is made up."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.") and hasattr(module, "get_device_memory_capacity"):
            monkeypatch.setattr(module, "get_device_memory_capacity", lambda *_: 80_000)
    model = str(tiny_model("Qwen3ForCausalLM"))
    argv = ["--model-path", model, "--device", "cuda", "--tp-size", "2", "--kv-quant", "quarot"]
    server_args = prepare_server_args(argv)
    resolve(server_args)
    server_args.check_server_args()
    view = compat.resolved(server_args)
    assert (view.attention_backend, view.page_size) == ("kvquant", 64)
    assert view.cuda_graph_config.prefill.backend == "disabled"
    assert view.cuda_graph_config.decode.backend == "full"
