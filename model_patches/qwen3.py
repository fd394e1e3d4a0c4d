"""Qwen3: fused qkv_proj and o_proj in Qwen3Attention; q and k are normalized, v is not."""

from __future__ import annotations

from sglang_kvquant.patches.base import ModelPatch


class Qwen3Patch(ModelPatch):
    architecture = "Qwen3ForCausalLM"

    def attention_class(self) -> type:
        from sglang.srt.models.qwen3 import Qwen3Attention

        return Qwen3Attention
