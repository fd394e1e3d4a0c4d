"""Post-RoPE queries, keys and values of every layer of a transformers model.

The traces are taken in transformers' attention registry, the place where every model hands over
rotated queries and keys, so no model class is patched. Layers are visited one after another inside
a single forward pass over all sequences: only one layer's traces exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..model_info import ModelInfo
from .errors import CalibrationError

ATTENTION_NAME = "kvquant_override"

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class LayerTraces:
    """What one layer's attention saw, in the dtype and on the device of the model.

    Attributes:
        q: post-RoPE queries, [num_sequences, num_q_heads, seq_len, head_dim].
        k: post-RoPE keys, [num_sequences, num_kv_heads, seq_len, head_dim].
        v: values, like k.
        o_weight: output projection, [hidden_size, num_q_heads * head_dim].
        sm_scale: factor of the attention logits.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o_weight: torch.Tensor
    sm_scale: float

    def select(self, sequences: slice) -> LayerTraces:
        """The same layer restricted to some sequences (views, no copies)."""
        return LayerTraces(
            self.q[sequences], self.k[sequences], self.v[sequences], self.o_weight, self.sm_scale
        )

    def to(self, device: str | torch.device) -> LayerTraces:
        """A contiguous copy on `device`, independent of the forward pass it came from."""
        q, k, v = (t.detach().to(device).contiguous() for t in (self.q, self.k, self.v))
        return LayerTraces(q, k, v, self.o_weight.detach().to(device), self.sm_scale)


@contextmanager
def attention_override(model: Any, attention: AttentionFunction) -> Iterator[None]:
    """Run a transformers model with `attention` in place of its attention implementation.

    Args:
        model: a transformers model whose attention goes through AttentionInterface.
        attention: called as ``attention(module, query, key, value, attention_mask, **kwargs)``
            with post-RoPE query [batch, num_q_heads, seq_len, head_dim] and key, value
            [batch, num_kv_heads, seq_len, head_dim]; ``kwargs["scaling"]`` is the logit factor and
            ``module.layer_idx`` the layer. Returns out [batch, seq_len, num_q_heads, head_dim]
            and None, like transformers' own functions.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    previous = model.config._attn_implementation
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)
        # The registry is global: do not leave a closure (and the tensors it holds) in it.
        AttentionInterface.register(ATTENTION_NAME, sdpa_attention_forward)


def visit_layers(
    model: Any, tokens: torch.Tensor, visit: Callable[[int, LayerTraces], None]
) -> None:
    """Run the decoder over all sequences in one batch and call `visit` layer by layer.

    Args:
        model: a transformers causal language model.
        tokens: int64 [num_sequences, seq_len], no padding.
        visit: called with the layer index and its traces, in order, without gradient; the traces
            are freed when the layer is left unless `visit` keeps a reference.

    Raises:
        CalibrationError: the layer uses sliding-window attention, or its traces hold NaN or
            infinity.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attention(module, query, key, value, attention_mask, **kwargs):
        layer_id = module.layer_idx
        if attention_mask is not None:
            raise CalibrationError(
                f"Layer {layer_id} does not attend to all earlier tokens (sliding window), which "
                "is not served from a 2-bit cache; use a model with full attention, or sequences "
                "shorter than its window."
            )
        for name, tensor in (("queries", query), ("keys", key), ("values", value)):
            if not torch.isfinite(tensor).all():
                raise CalibrationError(
                    f"The {name} of layer {layer_id} hold NaN or infinity, so nothing can be "
                    "calibrated on them; check the model's weights or try --dtype float32."
                )
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        visit(layer_id, LayerTraces(query, key, value, module.o_proj.weight, scaling))
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)

    with attention_override(model, attention), torch.no_grad():
        model.base_model(input_ids=tokens.to(model.device), use_cache=False)


def collect_traces(
    model: Any, tokens: torch.Tensor, device: str | torch.device = "cpu"
) -> dict[int, LayerTraces]:
    """All layers' traces at once, for experiments that solve the same traces many times.

    Memory: num_layers * tokens.numel() * (num_q_heads + 2 num_kv_heads) * head_dim elements.
    """
    traces: dict[int, LayerTraces] = {}
    visit_layers(
        model, tokens, lambda layer_id, layer: traces.update({layer_id: layer.to(device)})
    )
    return traces


def peak_bytes(info: ModelInfo, num_sequences: int, seq_len: int, itemsize: int) -> int:
    """Estimate of the memory a calibration needs beside the model's weights.

    One layer's traces, their fp32 copies in the solver, and the widest activations of a decoder
    layer (taken as four MLP rows of four hidden sizes each).
    """
    num_tokens = num_sequences * seq_len
    heads = info.num_q_heads + 2 * info.num_kv_heads
    traces = num_tokens * heads * info.head_dim * (itemsize + 8)
    activations = num_tokens * info.hidden_size * 4 * 4 * itemsize
    return traces + activations
