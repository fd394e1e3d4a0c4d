"""Everything that depends on a version of SGLang: hook targets, shims, defects worked around.

No other module names an SGLang target in a string. A target that moved upstream shows up here and
nowhere else: :func:`verify_hooks` fails in the attention backend's constructor, so that a server
whose hooks did not apply never answers a request.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import KVQuantOptions

SUPPORTED_VERSIONS = ("0.5.17", "0.5.23")

BACKEND_NAME = "kvquant"
"""Our attention backend on CUDA: a name that SGLang without this plugin rejects."""

CPU_BACKEND_NAME = "torch_native"
"""On CPU our factory stands under this name: SGLang sends any other one to Triton kernels that a
CPU cannot run (``support_triton`` in srt/utils/common.py)."""

OPTIONS_ATTRIBUTE = "_kvquant"
"""Attribute of ServerArgs that carries KVQuantOptions to the schedulers. The underscore passes
ServerArgs' read-only check (0.5.17) and survives its pickling (both versions)."""


@dataclass(frozen=True, slots=True)
class Target:
    """A symbol of SGLang that is hooked.

    Attributes:
        path: dotted path; every version it exists in was checked against it.
        kind: around or after, as in SGLang's HookType.
        why: what the hook is for.
        versions: releases in which it is hooked.
        process: main (parsing) or scheduler (serving).
    """

    path: str
    kind: str
    why: str
    versions: tuple[str, ...] = SUPPORTED_VERSIONS
    process: str = "scheduler"


LOAD_MODEL = Target(
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
    "around",
    "resolve the checkpoint before, fold the value rotation after the weights are final",
)
BUILD_POOL = Target(
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
    "around",
    "allocate the packed pool instead of a BF16 one",
)
POOL_CONFIGURATOR = Target(
    "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
    "around",
    "size the pool by packed bytes, windows included",
)
MAX_NUM_REQS = Target(
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs",
    "around",
    "cap running requests at the number of windows that were budgeted",
)
PREFIX_CAP_BASE = Target(
    "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.swa_reprefill_tail_tokens",
    "around",
    "prefill the last recent_tokens of a prefix hit again, so that their BF16 rows exist",
)
PREFIX_CAP_UNIFIED = Target(
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.swa_reprefill_tail_tokens",
    "around",
    "as above: this class overrides the base method",
)
ROW_ALLOC = Target(
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc",
    "around",
    "see which request rows get a new owner (0.5.23 offers register_on_alloc_rows)",
    versions=("0.5.17",),
)

LOG_STATS = Target(
    "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
    "around",
    "publish the cache's metrics beside SGLang's own",
)

RUNTIME_TARGETS = (
    LOAD_MODEL,
    BUILD_POOL,
    POOL_CONFIGURATOR,
    MAX_NUM_REQS,
    PREFIX_CAP_BASE,
    PREFIX_CAP_UNIFIED,
    ROW_ALLOC,
    LOG_STATS,
)


# Hooks and look-ups of every process that loads plugins, with and without --kv-quant.
ADD_CLI_ARGS = Target(
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "after",
    "add our flags to the command line and to --config files",
    process="main",
)
FROM_CLI_ARGS = Target(
    "sglang.srt.server_args.ServerArgs.from_cli_args",
    "around",
    "read our flags, refuse what they cannot be combined with, attach the options",
    process="main",
)
CHECK_SERVER_ARGS = Target(
    "sglang.srt.server_args.ServerArgs.check_server_args",
    "after",
    "repeat the refusals on the resolved configuration before any process is started",
    process="main",
)
LOAD_PLUGINS = Target(
    "sglang.srt.plugins.load_plugins",
    "after",
    "teach Engine our keyword arguments: Engine.__init__ calls it just before it needs them",
    process="main",
)
CONFIGURE_SCHEDULER = Target(
    "sglang.srt.managers.scheduler.configure_scheduler_process",
    "before",
    "install the runtime hooks: the first call of a scheduler process that sees ServerArgs",
)

LAUNCH_TARGETS = (ADD_CLI_ARGS, FROM_CLI_ARGS, CHECK_SERVER_ARGS, LOAD_PLUGINS)

_WEIGHT_MANAGER = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
)
_NO_UPDATES = "refuse new weights and exports: the loaded ones are folded with the rotation"
_IO_STRUCT = "sglang.srt.managers.io_struct"

REFUSED_REQUESTS: dict[Target, str | None] = {
    Target(f"{_WEIGHT_MANAGER}.update_weights_from_disk", "around", _NO_UPDATES): (
        f"{_IO_STRUCT}.UpdateWeightFromDiskReqOutput"
    ),
    Target(f"{_WEIGHT_MANAGER}.update_weights_from_distributed", "around", _NO_UPDATES): (
        f"{_IO_STRUCT}.UpdateWeightsFromDistributedReqOutput"
    ),
    Target(f"{_WEIGHT_MANAGER}.update_weights_from_tensor", "around", _NO_UPDATES): (
        f"{_IO_STRUCT}.UpdateWeightsFromTensorReqOutput"
    ),
    Target(f"{_WEIGHT_MANAGER}.update_weights_from_ipc", "around", _NO_UPDATES): (
        f"{_IO_STRUCT}.UpdateWeightsFromIPCReqOutput"
    ),
    Target(
        f"{_WEIGHT_MANAGER}.begin_weight_update", "around", _NO_UPDATES, versions=("0.5.23",)
    ): f"{_IO_STRUCT}.BeginWeightUpdateReqOutput",
    Target(
        "sglang.srt.managers.scheduler.Scheduler.send_weights_to_remote_instance",
        "around",
        _NO_UPDATES,
    ): f"{_IO_STRUCT}.SendWeightsToRemoteInstanceReqOutput",
    Target(f"{_WEIGHT_MANAGER}.save_remote_model", "around", _NO_UPDATES): None,
    Target(f"{_WEIGHT_MANAGER}.save_sharded_model", "around", _NO_UPDATES): None,
}
"""Requests to a running server that are answered with a failure, and the class of that answer
(None: the request fails with an exception)."""

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_GET_DEVICE = "sglang.srt.utils.common.get_device"
_RESOLVING_VIEW = {"0.5.23": "sglang.srt.arg_groups.overrides.resolving_view"}


class HookError(RuntimeError):
    """A hook is missing: serving on would mean serving something else than was asked for."""


def sglang_version() -> str:
    """Version of the installed SGLang, without a local suffix."""
    return version("sglang").split("+")[0]


def check_version() -> None:
    """Raise RuntimeError for an SGLang release that was never tested with this plugin."""
    found = sglang_version()
    if found not in SUPPORTED_VERSIONS:
        raise RuntimeError(
            f"--kv-quant was tested with SGLang {' and '.join(SUPPORTED_VERSIONS)}, not with "
            f"{found}; install one of these, or serve without --kv-quant."
        )


def backend_name(device: str) -> str:
    """Value of ``--attention-backend`` under which our backend is found on a device."""
    return CPU_BACKEND_NAME if device == "cpu" else BACKEND_NAME


def options_of(server_args: Any) -> KVQuantOptions | None:
    """KVQuantOptions that travel on a ServerArgs, or None when the server is a stock one."""
    from ..config import KVQuantOptions

    options = getattr(server_args, OPTIONS_ATTRIBUTE, None)
    if options is not None and not isinstance(options, KVQuantOptions):
        raise TypeError(f"ServerArgs.{OPTIONS_ATTRIBUTE} is {type(options)}, not KVQuantOptions")
    return options


def active_targets() -> tuple[Target, ...]:
    """Runtime targets that exist in the installed release."""
    found = sglang_version()
    return tuple(target for target in RUNTIME_TARGETS if found in target.versions)


def install_runtime_hooks(options: KVQuantOptions) -> None:
    """Hook a scheduler process, before it builds its model. Called once per process.

    Raises:
        HookError: a target is missing, or another plugin hooked it first.
        RuntimeError: an SGLang release that was never tested.
    """
    check_version()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import hooks
    from .backend import KVQuantAttnBackend

    functions = hooks.runtime_hooks(options)
    for target in active_targets():
        if target.path in HookRegistry._patched:
            raise HookError(
                f"{target.path} was hooked before --kv-quant could; remove the other "
                "plugin or serve without --kv-quant."
            )
        HookRegistry.register(target.path, functions[target], HookType(target.kind))
    HookRegistry.apply_hooks()
    for name in (BACKEND_NAME, CPU_BACKEND_NAME):
        ATTENTION_BACKENDS[name] = KVQuantAttnBackend
    verify_hooks()


def verify_hooks() -> None:
    """Raise HookError unless every runtime target is hooked in this process.

    SGLang only logs a hook that could not be applied, so nobody else would notice.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target in active_targets():
        try:
            function = pkgutil.resolve_name(target.path)
        except (ImportError, AttributeError):
            function = None
        if target.path not in HookRegistry._patched or not hasattr(function, "__wrapped__"):
            raise HookError(
                f"--kv-quant could not hook {target.path}, needed to {target.why}; install SGLang "
                f"{' or '.join(SUPPORTED_VERSIONS)} or serve without --kv-quant."
            )


def on_row_alloc(req_to_token_pool: Any, callback: Callable[[list[int]], None]) -> None:
    """Have `callback(rows)` called whenever request rows get a new owner."""
    if hasattr(req_to_token_pool, "register_on_alloc_rows"):
        req_to_token_pool.register_on_alloc_rows(callback)
    else:
        req_to_token_pool._kvquant_on_alloc_rows = callback


def alloc_rows_and_notify(original: Callable, pool: Any, reqs: list) -> list[int] | None:
    """AROUND hook of :data:`ROW_ALLOC`: report the rows that were assigned by this call."""
    newcomers = [req for req in reqs if req.req_pool_idx is None]
    rows = original(pool, reqs)
    callback = getattr(pool, "_kvquant_on_alloc_rows", None)
    if rows is not None and callback is not None and newcomers:
        callback([req.req_pool_idx for req in newcomers])
    return rows


def first_kv_head(qkv_proj: Any) -> int:
    """Global index of the first KV head that a rank's fused projection holds."""
    if hasattr(qkv_proj, "kv_tp_group"):  # 0.5.23
        from sglang.srt.distributed.utils import get_group_rank_size

        rank, _ = get_group_rank_size(qkv_proj.kv_tp_group)
    else:
        rank = qkv_proj.tp_rank
    return rank // qkv_proj.num_kv_head_replicas * qkv_proj.num_kv_heads


def is_unquantized(linear: Any) -> bool:
    """Whether a linear layer holds plain weights that may be multiplied by a rotation.

    A CPU with AMX packs weights into another layout after loading; those count as quantized.
    """
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    packed = getattr(linear, "use_intel_amx_backend", False)
    return isinstance(linear.quant_method, UnquantizedLinearMethod) and not packed


def fix_cpu_rotary(server_args: Any) -> bool:
    """Let a CPU server build RotaryEmbedding without vLLM; True when the fix was needed.

    Defect: ``RotaryEmbedding.__init__`` of SGLang 0.5.17 and 0.5.23 imports a kernel from vLLM
    unless the process was started with ``SGLANG_USE_CPU_ENGINE=1``, which in turn needs a CPU
    build of sgl_kernel. Symptom: every ``--device cpu`` server from PyPI packages, with or without
    this plugin, dies with "No module named 'vllm'". The native forward, which is used from then
    on, needs neither. Applied in the scheduler when the device is cpu and vllm is absent, where
    SGLang could not have started at all; idempotent.

    Remove when ``RotaryEmbedding`` builds on a CPU in every supported release.
    """
    if server_args.device != "cpu" or importlib.util.find_spec("vllm") is not None:
        return False
    from sglang.srt.layers.rotary_embedding import base

    if base._is_cpu:
        return False
    base._is_cpu = True
    return True


def register_hook(target: Target, hook: Callable) -> None:
    """Register a hook with SGLang, once. SGLang applies it when all plugins have registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registered = HookRegistry._hooks.get(target.path, ())
    if all(existing is not hook for _, existing, _ in registered):
        HookRegistry.register(target.path, hook, HookType(target.kind))


def apply_hook(target: Target, hook: Callable) -> None:
    """Register a hook and apply it now, where plugins were loaded earlier. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if not is_hooked(target):
        register_hook(target, hook)
        HookRegistry.apply_hooks()


def is_hooked(target: Target) -> bool:
    """Whether SGLang applied the hooks of a target in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return target.path in HookRegistry._patched


def is_imported(path: str) -> bool:
    """Whether the module that defines a dotted name, one level down, is already imported."""
    return path.rpartition(".")[0] in sys.modules


def load_plugins() -> None:
    """SGLang's own loader: runs every plugin once per process and applies the hooks."""
    pkgutil.resolve_name(LOAD_PLUGINS.path)()


def imported_engine() -> Any:
    """sglang.Engine when its module is imported, else None: importing it takes seconds."""
    return pkgutil.resolve_name(_ENGINE) if is_imported(_ENGINE) else None


def attach(server_args: Any, **attributes: Any) -> None:
    """Set attributes of ServerArgs that are not fields; their names start with an underscore."""
    for name, value in attributes.items():
        if not name.startswith("_"):
            raise ValueError(f"{name} would be taken for a field")
        setattr(server_args, name, value)


def server_args_defaults() -> dict[str, Any]:
    """Default of every ServerArgs field by name; None where there is none or a factory."""
    server_args_class = pkgutil.resolve_name(_SERVER_ARGS)
    if dataclasses.is_dataclass(server_args_class):  # 0.5.17
        missing: Any = dataclasses.MISSING
        fields: Any = dataclasses.fields(server_args_class)
    else:  # 0.5.23
        import msgspec

        missing = msgspec.NODEFAULT
        fields = msgspec.structs.fields(server_args_class)
    return {f.name: None if f.default is missing else f.default for f in fields}


def resolved(server_args: Any) -> Any:
    """ServerArgs seen after resolution; 0.5.17 resolves in place."""
    path = _RESOLVING_VIEW.get(sglang_version())
    return pkgutil.resolve_name(path)(server_args) if path else server_args


def default_device() -> str:
    """The device that SGLang takes when --device is not given."""
    return pkgutil.resolve_name(_GET_DEVICE)()
