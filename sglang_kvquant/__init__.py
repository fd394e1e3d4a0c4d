"""sglang-kvquant: serve language models from a rotated 2-bit KV cache with SGLang.

This module imports neither torch nor sglang, so that SGLang's plugin discovery stays cheap.
"""

__version__ = "0.1.0"
