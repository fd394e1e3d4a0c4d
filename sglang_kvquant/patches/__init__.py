"""Weight patches per model architecture. Their sources live in the folder ``model_patches``.

A wheel carries them as ``sglang_kvquant/patches/_src``; a checkout finds them beside the package.
"""

from pathlib import Path

_here = Path(__file__).resolve().parent
_candidates = (_here / "_src", _here.parent.parent / "model_patches")
_sources = next((path for path in _candidates if path.is_dir()), None)
if _sources is None:
    raise ImportError("sglang_kvquant is installed without its model patches; reinstall it")
__path__.append(str(_sources))
