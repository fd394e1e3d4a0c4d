"""Requests to a running server that would replace, export or hand on its weights.

The value rotation is folded into the loaded weights. Weights loaded later would lack it and be
served wrongly without a sign of it; exported ones would carry it unnoticed. SGLang's requests for
that are therefore answered with a failure, on every rank alike, before any collective starts.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

from sglang_kvquant.serving import compat

MESSAGE = (
    "this server runs with --kv-quant, whose rotation is folded into the loaded weights: weights "
    "can be neither updated nor exported while it runs; restart it with the new weights and a "
    "checkpoint calibrated for them, or serve without --kv-quant."
)


def _refuse(answer_class: str | None, original: Callable, *args: Any, **kwargs: Any) -> Any:
    if answer_class is None:
        raise ValueError(MESSAGE)
    return pkgutil.resolve_name(answer_class)(success=False, message=MESSAGE)


def _targets() -> dict[compat.Target, str | None]:
    version = compat.sglang_version()
    return {t: answer for t, answer in compat.REFUSED_REQUESTS.items() if version in t.versions}


@functools.cache
def _hook(answer_class: str | None) -> Callable:
    return functools.partial(_refuse, answer_class)


def install() -> None:
    """Register the refusals; they take effect when SGLang applies its hooks."""
    for target, answer_class in _targets().items():
        compat.register_hook(target, _hook(answer_class))


def verify() -> None:
    """Raise HookError unless every refusal is in place in this process."""
    missing = [target.path for target in _targets() if not compat.is_hooked(target)]
    if missing:
        raise compat.HookError(
            f"--kv-quant could not refuse weight updates ({', '.join(missing)}); install SGLang "
            f"{' or '.join(compat.SUPPORTED_VERSIONS)} or serve without --kv-quant."
        )
