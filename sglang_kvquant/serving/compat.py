"""The only place that knows SGLang's dotted names, with the versions they were checked against.

A hook in SGLang is a name, resolved when it is applied; SGLang logs a missing name and carries on.
So every name stands in one table here, and :func:`verify_hooks` turns a hook that did not take
into an error. Nothing heavy is imported at module level: SGLang is imported when a target is
resolved, not before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Literal

from sglang_kvquant.config import KVQuantOptions

SUPPORTED_VERSIONS = ("0.5.17", "0.5.23")
"""SGLang versions every target below was checked against; others are refused with --kv-quant."""

BACKEND_NAME = "kvquant"
"""Attention backend on CUDA: a name stock SGLang does not know, so a lost plugin cannot serve."""

CPU_BACKEND_NAME = "torch_native"
"""Attention backend on CPU: SGLang uses Triton helpers for every other name. Its factory is
replaced in the scheduler process when the options are set."""

_OPTIONS_ATTRIBUTE = "_kvquant"

Kind = Literal["before", "after", "around", "replace", "read"]


@dataclass(frozen=True, slots=True)
class Target:
    """One name in SGLang.

    Attributes:
        kind: how it is hooked; ``read`` means that it is only looked up.
        process: where the hook is installed: ``every`` process that loads plugins, or the
            ``scheduler`` children of a server started with --kv-quant.
        path: dotted name in the newest supported version.
        why: what the hook is for.
        older: dotted names in versions where they differ.
    """

    kind: Kind
    process: Literal["every", "scheduler"]
    path: str
    why: str
    older: tuple[tuple[str, str], ...] = ()

    def path_in(self, version: str) -> str:
        """Dotted name in a version; an unknown version gets the newest name."""
        return dict(self.older).get(version, self.path)


TARGETS: dict[str, Target] = {
    "add_cli_args": Target(
        "after", "every", "sglang.srt.server_args.ServerArgs.add_cli_args", "adds our flags"
    ),
    "from_cli_args": Target(
        "around",
        "every",
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "checks our flags and the features they cannot be combined with; attaches the options",
    ),
    "check_server_args": Target(
        "after",
        "every",
        "sglang.srt.server_args.ServerArgs.check_server_args",
        "repeats the checks on the resolved configuration, before any child process starts",
    ),
    "load_plugins": Target(
        "after",
        "every",
        "sglang.srt.plugins.load_plugins",
        "called by Engine.__init__ just before it builds ServerArgs: the moment to teach a "
        "freshly imported Engine our keyword arguments",
    ),
    "configure_scheduler_process": Target(
        "before",
        "every",
        "sglang.srt.managers.scheduler.configure_scheduler_process",
        "first call of a scheduler child that sees ServerArgs: installs the runtime hooks "
        "(registered only where that module is already imported)",
    ),
    "engine_class": Target(
        "read",
        "every",
        "sglang.srt.entrypoints.engine.Engine",
        "its class attribute server_args_class builds ServerArgs from keyword arguments",
    ),
    "server_args_class": Target(
        "read", "every", "sglang.srt.server_args.ServerArgs", "its fields and their defaults"
    ),
    "get_device": Target(
        "read",
        "every",
        "sglang.srt.utils.common.get_device",
        "what SGLang will use when --device is not given",
    ),
    "plugins_loader": Target(
        "read",
        "every",
        "sglang.srt.plugins.load_plugins",
        "called on arrival in a scheduler child",
    ),
    "resolving_view": Target(
        "read",
        "every",
        "sglang.srt.arg_groups.overrides.resolving_view",
        "the resolved value of a field; 0.5.17 resolves in place and needs no view",
        older=(("0.5.17", ""),),
    ),
}


def sglang_version() -> str:
    """Installed SGLang version without its local part, read without importing SGLang."""
    return metadata.version("sglang").split("+")[0]


def check_version() -> None:
    """Raise ValueError with a sentence for the user when this SGLang was never tested."""
    version = sglang_version()
    if version not in SUPPORTED_VERSIONS:
        raise ValueError(
            f"--kv-quant was not tested with SGLang {version}, and a hook that misses its place "
            f"would serve wrong answers; install one of {', '.join(SUPPORTED_VERSIONS)} "
            f"(pip install sglang=={SUPPORTED_VERSIONS[-1]})."
        )


def path_of(name: str) -> str:
    """Dotted SGLang name of a target in the installed version; empty where it does not exist."""
    return TARGETS[name].path_in(sglang_version())


def resolve(name: str) -> Any:
    """The object a target names. Imports its module.

    Raises:
        RuntimeError: SGLang has no such name.
    """
    path = path_of(name)
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            value: Any = import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name and ".".join(parts[:split]).startswith(error.name):
                continue
            raise
        for attribute in parts[split:]:
            if not hasattr(value, attribute):
                raise RuntimeError(f"SGLang {sglang_version()} has no {path} ({name})")
            value = getattr(value, attribute)
        return value
    raise RuntimeError(f"SGLang {sglang_version()} has no {path} ({name})")


def is_imported(name: str) -> bool:
    """Whether the module a target lives in is already imported."""
    parts = path_of(name).split(".")
    return ".".join(parts[:-1]) in sys.modules


def register_hook(name: str, hook: Callable) -> None:
    """Register a hook with SGLang's registry, once; it takes effect at the next apply_hooks()."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = TARGETS[name]
    if target.kind == "read":
        raise RuntimeError(f"{name} is a target to read, not to hook")
    path = path_of(name)
    if any(existing is hook for _, existing, _ in HookRegistry._hooks.get(path, ())):
        return
    HookRegistry.register(path, hook, HookType(target.kind))


def verify_hooks(names: tuple[str, ...]) -> None:
    """Raise RuntimeError unless every named hook was applied to its target."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [path_of(name) for name in names if path_of(name) not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            "sglang-kvquant is installed but its hooks did not take in this process "
            f"({', '.join(missing)}), so the cache would not be quantized; reinstall "
            "sglang-kvquant beside a supported SGLang, and see the log for the plugin's error."
        )


def attach_options(server_args: Any, options: KVQuantOptions) -> None:
    """Put the options on ServerArgs. A name that starts with an underscore is not a field: it
    passes the read-only guard and survives pickling and deep copies in both versions."""
    setattr(server_args, _OPTIONS_ATTRIBUTE, options)


def options_of(server_args: Any) -> KVQuantOptions | None:
    """The options a server was started with, or None for an ordinary SGLang server.

    Raises:
        TypeError: something else stands in their place.
    """
    options = getattr(server_args, _OPTIONS_ATTRIBUTE, None)
    if options is not None and not isinstance(options, KVQuantOptions):
        raise TypeError(f"ServerArgs.{_OPTIONS_ATTRIBUTE} is not KVQuantOptions: {options!r}")
    return options


def resolved(server_args: Any) -> Any:
    """A view of ServerArgs whose attributes are the resolved values."""
    return resolve("resolving_view")(server_args) if path_of("resolving_view") else server_args


def field_defaults() -> dict[str, Any]:
    """Name and default of every ServerArgs field; required fields and factories give None."""
    server_args_class = resolve("server_args_class")
    if hasattr(server_args_class, "__struct_fields__"):
        import msgspec

        fields = msgspec.structs.fields(server_args_class)
        return {f.name: None if f.default is msgspec.NODEFAULT else f.default for f in fields}
    import dataclasses

    return {
        f.name: None if f.default is dataclasses.MISSING else f.default
        for f in dataclasses.fields(server_args_class)
    }


def install_runtime_hooks(options: KVQuantOptions) -> None:
    """Register the hooks of a scheduler child that serves with `options`.

    The caller applies and verifies them.
    """
    raise RuntimeError("this build of sglang-kvquant carries no serving backend")
