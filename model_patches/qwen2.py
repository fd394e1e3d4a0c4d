"""Qwen2: fused qkv_proj and o_proj in Qwen2Attention, with a bias on q, k and v."""

from __future__ import annotations

from sglang_kvquant.patches.base import ModelPatch


class Qwen2Patch(ModelPatch):
    architecture = "Qwen2ForCausalLM"

    def attention_class(self) -> type:
        from sglang.srt.models.qwen2 import Qwen2Attention

        return Qwen2Attention
