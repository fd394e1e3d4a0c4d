"""Architecture name to patch. An unknown architecture is an error, never a default mapping."""

from __future__ import annotations

import torch
from sglang_kvquant.patches.base import AttentionPart, ModelPatch
from sglang_kvquant.patches.llama import LlamaPatch
from sglang_kvquant.patches.phi3 import Phi3Patch
from sglang_kvquant.patches.qwen2 import Qwen2Patch
from sglang_kvquant.patches.qwen3 import Qwen3Patch

PATCHES: dict[str, ModelPatch] = {
    patch.architecture: patch for patch in (LlamaPatch(), Phi3Patch(), Qwen2Patch(), Qwen3Patch())
}


def find_attention_parts(model: torch.nn.Module) -> list[AttentionPart]:
    """Attention layers of a model that SGLang built.

    Raises:
        ValueError: SGLang built a class that no patch knows.
    """
    name = type(model).__name__
    if name not in PATCHES:
        raise ValueError(
            f"SGLang serves this model as {name}, which --kv-quant does not know; it serves "
            f"{', '.join(sorted(PATCHES))}."
        )
    return PATCHES[name].attention_parts(model)
