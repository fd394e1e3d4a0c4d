"""Phi-3 and Phi-4: SGLang serves them as a subclass of Llama, with the same attention layer.

Their files carry q, k and v already fused, which SGLang splits by rank while loading; the loaded
layer looks like Llama's. Phi-4 has 10 KV heads, so tensor parallelism takes 1, 2, 5 or 10 ranks.
"""

from __future__ import annotations

from sglang_kvquant.patches.base import ModelPatch


class Phi3Patch(ModelPatch):
    architecture = "Phi3ForCausalLM"

    def attention_class(self) -> type:
        from sglang.srt.models.llama import LlamaAttention

        return LlamaAttention
