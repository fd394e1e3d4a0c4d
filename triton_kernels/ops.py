"""The kernels behind the signatures of :mod:`sglang_kvquant.reference`.

``write_kv``, ``decode`` and ``extend`` take the references' positional arguments; what they take
beyond those is keyword-only (workspaces, outputs, host-side bounds).
"""

from __future__ import annotations

from .causal import choose_chunk_attention
from .decode import DecodeWorkspace, decode
from .extend import extend
from .rotate_query import rotate_query
from .write import write_kv

__all__ = [
    "DecodeWorkspace",
    "choose_chunk_attention",
    "decode",
    "extend",
    "rotate_query",
    "write_kv",
]
