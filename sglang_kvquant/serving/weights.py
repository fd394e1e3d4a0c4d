"""Apply a checkpoint to a loaded model: fold R_V into the weights, prepare every layer's write.

Runs once, after SGLang has finished loading. Where the linear layers are unquantized R_V costs
nothing at run time; where they are packed or quantized it is applied to v and undone on the
attention output instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ..checkpoint import Checkpoint, LayerRotations
from ..config import WindowConfig
from ..patches.base import AttentionPart, fold_value_rotation, slice_heads
from ..patches.registry import find_attention_parts
from ..reference.write import LayerTransform
from . import compat

logger = logging.getLogger(__name__)

APPLIED_ATTRIBUTE = "_kvq_applied"
"""Attribute of the model that says its weights were folded, and with what."""


@dataclass(slots=True)
class AppliedRotations:
    """What was done to a model; lives on the model.

    Attributes:
        checkpoint: where the rotations came from.
        windows: BF16 windows to serve with.
        parts: attention layers of this rank, in layer order.
        transforms: write step of each layer by global layer id, on the model's device.
        folded: True when R_V is in the weights of every layer, False when applied online.
        max_requests: running requests that were budgeted; set when the pool is sized.
    """

    checkpoint: Checkpoint
    windows: WindowConfig
    parts: list[AttentionPart]
    transforms: dict[int, LayerTransform]
    folded: bool
    max_requests: int | None = None


def applied_rotations(model: torch.nn.Module) -> AppliedRotations:
    """What :func:`apply_rotations` left on a model; raises when it never ran."""
    applied = getattr(model, APPLIED_ATTRIBUTE, None)
    if not isinstance(applied, AppliedRotations):
        raise compat.HookError(
            "the rotations were not applied to this model's weights; --kv-quant cannot serve it."
        )
    return applied


@torch.no_grad()
def apply_rotations(
    model: torch.nn.Module, checkpoint: Checkpoint, windows: WindowConfig
) -> AppliedRotations:
    """Fold or prepare the rotations of every layer, once.

    Raises:
        RuntimeError: a second call for the same model, or folding changed a layer's output.
        ValueError: an architecture without a patch, or layers that do not fit the checkpoint.
    """
    if hasattr(model, APPLIED_ATTRIBUTE):
        raise RuntimeError("the value rotation is already folded into this model's weights")
    parts = find_attention_parts(model)
    for part in parts:
        _check_shape(part, checkpoint)
    folded = all(
        compat.is_unquantized(linear) for part in parts for linear in (part.qkv_proj, part.o_proj)
    )
    transforms = {part.layer_id: _apply_layer(part, checkpoint, folded) for part in parts}
    applied = AppliedRotations(checkpoint, windows, parts, transforms, folded)
    setattr(model, APPLIED_ATTRIBUTE, applied)
    how = "folded into the weights" if folded else "applied online: the linear layers are packed"
    logger.info("kvquant: value rotation %s, %d layers", how, len(parts))
    return applied


def _check_shape(part: AttentionPart, checkpoint: Checkpoint) -> None:
    """What SGLang built must be what config.json said, which the checkpoint was matched with."""
    info = checkpoint.manifest.model
    if part.layer_id not in checkpoint.layers:
        raise ValueError(f"the checkpoint has no layer {part.layer_id}; calibrate this model.")
    if part.head_dim != info.head_dim or part.num_kv_heads > info.num_kv_heads:
        raise ValueError(
            f"SGLang built layer {part.layer_id} with {part.num_kv_heads} KV heads of "
            f"{part.head_dim}, the checkpoint is for {info.num_kv_heads} of {info.head_dim}; "
            "correct head_dim and num_key_value_heads in the model's config.json."
        )


def _apply_layer(part: AttentionPart, checkpoint: Checkpoint, fold: bool) -> LayerTransform:
    local = local_rotations(
        checkpoint.layers[part.layer_id],
        compat.first_kv_head(part.qkv_proj),
        part.num_kv_heads,
        part.device,
    )
    v_rotation = local.v_rotation
    if fold and v_rotation is not None:
        fold_value_rotation(part, v_rotation)
        v_rotation = None
    return LayerTransform.build(
        local.k_rotation, local.k_mean, v_rotation, checkpoint.manifest.quantizer
    )


def local_rotations(
    layer: LayerRotations, first_kv_head: int, num_kv_heads: int, device: torch.device
) -> LayerRotations:
    """The part of a layer's rotations that belongs to the KV heads of one rank.

    Rotations come back per head, fp32 [num_kv_heads, head_dim, head_dim], on `device`.
    """
    heads = slice(first_kv_head, first_kv_head + num_kv_heads)
    k_mean = None if layer.k_mean is None else layer.k_mean[heads].float().to(device).contiguous()
    return LayerRotations(
        slice_heads(layer.k_rotation, heads, num_kv_heads, device),
        slice_heads(layer.v_rotation, heads, num_kv_heads, device),
        k_mean,
    )
