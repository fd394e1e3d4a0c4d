"""Entry point of SGLang's plugin group ``sglang.srt.plugins``.

SGLang calls :func:`register` in the main process before it parses arguments, and at the top of
every scheduler process. It logs and swallows whatever a plugin raises, so nothing here relies on
being called: ServerArgs carry an attribute that loads the plugins again when it is unpickled in a
scheduler and fails there when our hooks are missing, and on CUDA the attention backend has a name
that SGLang alone rejects.

Nothing but the standard library is imported until a hook runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from sglang_kvquant.serving import compat


def register() -> None:
    """Register the hooks of this process. Idempotent."""
    compat.register_hook(compat.ADD_CLI_ARGS, _add_cli_args)
    compat.register_hook(compat.FROM_CLI_ARGS, _from_cli_args)
    compat.register_hook(compat.CHECK_SERVER_ARGS, _check_server_args)
    compat.register_hook(compat.LOAD_PLUGINS, _teach_engine)
    # A scheduler process has imported that module before it gets here; anywhere else, hooking it
    # would import it.
    if compat.is_imported(compat.CONFIGURE_SCHEDULER.path):
        compat.register_hook(compat.CONFIGURE_SCHEDULER, _configure_scheduler)
    _teach_engine()


class Arrival:
    """Rides on ServerArgs beside the options; unpickling it in a scheduler verifies the plugin.

    Attributes:
        from_cli: the options came from a command line, so errors end the process with one line.
    """

    def __init__(self, from_cli: bool) -> None:
        self.from_cli = from_cli

    def __reduce__(self) -> tuple[Callable, tuple]:
        return _arrive, ()


def _arrive() -> Arrival:
    """Load SGLang's plugins and make sure that ours took, where a scheduler is about to run.

    Raises:
        HookError: this plugin did not load, or its hook did not apply.
    """
    if compat.is_imported(compat.CONFIGURE_SCHEDULER.path):
        compat.load_plugins()
        if compat.is_hooked(compat.CHECK_SERVER_ARGS):
            # Plugins may have loaded before the scheduler's module did.
            compat.apply_hook(compat.CONFIGURE_SCHEDULER, _configure_scheduler)
        if not compat.is_hooked(compat.CONFIGURE_SCHEDULER):
            raise compat.HookError(
                "--kv-quant was given but the plugin of sglang-kvquant did not load in this "
                "process, so the cache would not be quantized; look for its error in the log, and "
                "for SGLANG_PLUGINS or SGLANG_PLATFORM, which can exclude it."
            )
    return Arrival(from_cli=False)


def _add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    from sglang_kvquant.serving import options

    options.add_arguments(parser)


def _from_cli_args(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    from sglang_kvquant.serving import options, refusals

    try:
        chosen_options = options.parse_options(vars(args))
        if chosen_options is None:
            return original(cls, args)
        refusals.check_version()
        chosen = options.prepare(vars(args), chosen_options, refusals.check_arguments)
    except ValueError as error:
        _exit_with(error)
    server_args = original(cls, argparse.Namespace(**{**vars(args), **chosen}))
    _attach(server_args, chosen_options, from_cli=True)
    return server_args


def _engine_arguments(original: Callable) -> Callable:
    """Factory of ServerArgs that also takes our keyword arguments."""

    def build(**kwargs: Any) -> Any:
        from sglang_kvquant.serving import options, refusals

        chosen_options = options.parse_options(kwargs)
        kwargs = {name: kwargs[name] for name in kwargs if name not in options.KEYWORDS}
        if chosen_options is None:
            return original(**kwargs)
        refusals.check_version()
        chosen = options.prepare(kwargs, chosen_options, refusals.check_arguments)
        server_args = original(**{**kwargs, **chosen})
        _attach(server_args, chosen_options, from_cli=False)
        return server_args

    build._kvquant_original = original  # type: ignore[attr-defined]
    return build


def _teach_engine(result: None = None) -> None:
    """Give Engine our keyword arguments, if its module is imported and it has not got them.

    Its class attribute is set directly: SGLang's registry would take ServerArgs, a class, for the
    hooked function and replace it everywhere.
    """
    engine = compat.imported_engine()
    if engine is None or hasattr(engine.server_args_class, "_kvquant_original"):
        return
    engine.server_args_class = staticmethod(_engine_arguments(engine.server_args_class))


def _attach(server_args: Any, options: Any, from_cli: bool) -> None:
    compat.attach(
        server_args,
        **{compat.OPTIONS_ATTRIBUTE: options, "_kvquant_arrival": Arrival(from_cli)},
    )


def _check_server_args(result: None, server_args: Any) -> None:
    """Check the resolved configuration and the model, before any process is started."""
    options = compat.options_of(server_args)
    if options is None:
        return
    from sglang_kvquant.serving import refusals

    try:
        resolved = compat.resolved(server_args)
        refusals.check_arguments(resolved, options)
        refusals.check_model(resolved, options)
    except ValueError as error:
        arrival = getattr(server_args, "_kvquant_arrival", None)
        if arrival is not None and arrival.from_cli:
            _exit_with(error)
        raise


def _configure_scheduler(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Turn a scheduler process into one that serves from the packed cache."""
    compat.fix_cpu_rotary(server_args)
    options = compat.options_of(server_args)
    if options is None:
        return
    from sglang_kvquant.serving import refusals, weight_requests

    refusals.check_version()
    refusals.check_arguments(compat.resolved(server_args), options)
    weight_requests.install()
    compat.install_runtime_hooks(options)
    weight_requests.verify()


def _exit_with(error: ValueError) -> NoReturn:
    """One line for the user and the exit code of a bad command line, as argparse does it."""
    print(f"sglang: error: {error}", file=sys.stderr)
    sys.exit(2)
