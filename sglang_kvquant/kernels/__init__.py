"""Triton kernels. Their sources live in the top-level folder ``triton_kernels``.

That folder has no ``__init__.py`` and is never imported under its own name, because
``sglang-kernel`` ships OpenAI's package of that name, which SGLang looks for. A wheel carries the
sources as ``sglang_kvquant/kernels/_src``; a checkout finds them beside the package.
"""

from pathlib import Path

_here = Path(__file__).resolve().parent
_candidates = (_here / "_src", _here.parent.parent / "triton_kernels")
_sources = next((path for path in _candidates if path.is_dir()), None)
if _sources is None:
    raise ImportError("sglang_kvquant is installed without its kernels; reinstall it")
__path__.append(str(_sources))
