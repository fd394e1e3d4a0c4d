"""Llama: fused qkv_proj and o_proj in LlamaAttention."""

from __future__ import annotations

from sglang_kvquant.patches.base import ModelPatch


class LlamaPatch(ModelPatch):
    architecture = "LlamaForCausalLM"

    def attention_class(self) -> type:
        from sglang.srt.models.llama import LlamaAttention

        return LlamaAttention
