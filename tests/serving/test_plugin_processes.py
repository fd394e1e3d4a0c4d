"""The plugin across processes: stock behaviour without it, failure where it is lost."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang_kvquant.serving import compat

pytestmark = pytest.mark.sglang

SERVE = ("-c", "from sglang.cli.main import main; main()", "serve")
LAUNCH = ("-m", "sglang.launch_server")
WITHOUT_US = {"SGLANG_PLUGINS": "somebody_else"}


def python(*arguments: str, env: dict | None = None, timeout: int = 120):
    """Run Python outside the repository; SGLang's warnings go to stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd="/", timeout=timeout
    )


def test_importing_the_plugin_is_cheap():
    code = (
        "import sys, sglang_kvquant.plugin; "
        "print([m for m in ('torch', 'sglang', 'transformers', 'triton') if m in sys.modules])"
    )
    assert python("-c", code).stdout.strip() == "[]"


DESCRIBE = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
heavy = [m for m in ("sglang.srt.managers.scheduler", "sglang.srt.entrypoints.engine")
         if m in sys.modules]
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
if hasattr(args, "resolve_once"):
    args.resolve_once()
args.check_server_args()
names = getattr(type(args), "__struct_fields__", None) or list(type(args).__dataclass_fields__)
stash = getattr(args, "_resolved_overrides", None)
print(json.dumps({
    "fields": {name: repr(getattr(args, name)) for name in names},
    "resolved": repr(stash),
    "extra": sorted(set(vars(args)) - set(names)),
    "hooks": sorted(HookRegistry._patched),
    "heavy": heavy,
}))
"""


@pytest.mark.slow
def test_without_kv_quant_a_server_is_configured_as_by_sglang_alone(tiny_model):
    """Resolved ServerArgs of a real model, field by field, with and without this plugin."""
    model = str(tiny_model("LlamaForCausalLM"))
    argv = ("--model-path", model, "--device", "cpu", "--random-seed", "1")
    described = []
    for env in (WITHOUT_US, {}):
        result = python("-c", DESCRIBE, *argv, "--mem-fraction-static", "0.5", env=env)
        assert result.returncode == 0, result.stderr
        described.append(json.loads(result.stdout.splitlines()[-1]))
    stock, ours = described
    assert stock["hooks"] == [] and ours["hooks"] == sorted(t.path for t in compat.LAUNCH_TARGETS)
    assert ours["heavy"] == stock["heavy"] == []
    for part in ("fields", "resolved", "extra"):
        assert ours[part] == stock[part]


@pytest.mark.parametrize("entry", [LAUNCH, SERVE], ids=["launch_server", "serve"])
def test_a_user_error_is_one_sentence_and_exit_code_2(entry, tiny_model):
    model = str(tiny_model("LlamaForCausalLM"))
    result = python(
        *entry, "--model-path", model, "--kv-quant", "optr", "--device", "cpu", "--pp-size", "2"
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr and "usage:" not in result.stderr
    (error,) = [line for line in result.stderr.splitlines() if "sglang: error: " in line]
    assert error.startswith("sglang: error: --pp-size 2 cannot be combined with --kv-quant")


EXCLUDED = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang
from sglang.srt.server_args import prepare_server_args
base = ["--model-path", "dummy", "--device", "cpu"]
for argv in (["--kv-quant", "rtn"], ["--config", sys.argv[1]]):
    try:
        prepare_server_args(base + argv)
        sys.exit("accepted")
    except SystemExit as error:
        assert error.code == 2, error
try:
    sglang.Engine(model_path="dummy", device="cpu", kv_quant="rtn")
except TypeError as error:
    print("rejected:", error)
"""


def test_excluded_by_sglang_plugins_our_options_are_unknown(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("kv-quant: rtn\n")
    result = python("-c", EXCLUDED, str(config), env=WITHOUT_US)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("unrecognized arguments: --kv-quant rtn") == 2
    assert "rejected: " in result.stdout and "kv_quant" in result.stdout


ARRIVE = """
import pickle, sys
if sys.argv[2] == "uninstalled":
    sys.modules["sglang_kvquant"] = None
else:
    import sglang.srt.managers.scheduler
with open(sys.argv[1], "rb") as file:
    args = pickle.load(file)
from sglang_kvquant.serving import compat, weight_requests
assert compat.options_of(args).method == "quarot"
assert compat.is_hooked(compat.CONFIGURE_SCHEDULER)
assert not any(compat.is_hooked(target) for target in compat.active_targets())
from sglang_kvquant import plugin
plugin._configure_scheduler(args)
compat.verify_hooks()
weight_requests.verify()
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
answer = SchedulerWeightUpdaterManager.update_weights_from_disk(None, None)
print("refused:", answer.success, answer.message)
"""


@pytest.fixture(scope="module")
def travelling_arguments(tmp_path_factory) -> str:
    """ServerArgs of a server with --kv-quant, as they are sent to its processes."""
    from sglang.srt.server_args import prepare_server_args

    compat.load_plugins()
    server_args = prepare_server_args(
        ["--model-path", "dummy", "--device", "cpu", "--kv-quant", "quarot"]
    )
    path = tmp_path_factory.mktemp("arguments") / "server_args.pickle"
    path.write_bytes(pickle.dumps(server_args))
    return str(path)


def test_a_scheduler_process_gets_the_options_and_the_hooks(travelling_arguments):
    result = python("-c", ARRIVE, travelling_arguments, "installed")
    assert result.returncode == 0, result.stderr
    assert "refused: False this server runs with --kv-quant" in result.stdout


@pytest.mark.parametrize(
    "state, env, error",
    [
        ("installed", WITHOUT_US, "the plugin of sglang-kvquant did not load in this process"),
        ("uninstalled", {}, "ModuleNotFoundError"),
    ],
)
def test_a_scheduler_process_without_the_plugin_cannot_start(
    state, env, error, travelling_arguments
):
    result = python("-c", ARRIVE, travelling_arguments, state, env=env)
    assert result.returncode == 1 and error in result.stderr


def test_the_plugin_is_registered_from_this_checkout_or_an_installation():
    from importlib.metadata import entry_points

    (entry,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "kvquant"]
    assert entry.value == "sglang_kvquant.plugin:register"
    assert Path(sys.modules["sglang_kvquant"].__file__).is_file()
