"""The refusal matrix: what SGLang can do that a server with --kv-quant does not do.

Every row is a feature that would be served wrongly, or was never tested. A feature that a later
SGLang adds is unknown here; that is why only tested releases are served at all
(``compat.SUPPORTED_VERSIONS``) and why adding one means reading its new fields against this table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sglang_kvquant.serving import compat, options

DROP = "drop it, or serve without --kv-quant"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One row.

    Attributes:
        fields: fields of ServerArgs that are read; the row fails loudly when one is missing.
        applies: whether the arguments ask for the feature. Sees raw arguments before ServerArgs
            exists and resolved ones after.
        what: the user's setting, for the message; ``{field}`` is replaced by its value.
        why: what would go wrong.
        remedy: what to do.
        versions: releases that have the feature.
    """

    fields: tuple[str, ...]
    applies: Callable[[Any], bool]
    what: str
    why: str
    remedy: str = DROP
    versions: tuple[str, ...] = compat.SUPPORTED_VERSIONS

    def sentence(self, args: Any) -> str:
        values = {name: getattr(args, name) for name in self.fields}
        what = self.what.format(**values)
        return f"{what} cannot be combined with --kv-quant: {self.why}; {self.remedy}."


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def on(field: str, why: str, remedy: str = DROP, versions: Iterable[str] | None = None) -> Refusal:
    """Row of a switch, or of an option whose empty value means off."""
    rows = compat.SUPPORTED_VERSIONS if versions is None else tuple(versions)
    return Refusal(
        (field,), lambda args: bool(getattr(args, field)), _flag(field), why, remedy, rows
    )


def above(field: str, limit: int, why: str, remedy: str = DROP, **kwargs: Any) -> Refusal:
    """Row of a number that must not exceed a limit."""
    what = f"{_flag(field)} {{{field}}}"
    return Refusal(
        (field,), lambda args: (getattr(args, field) or 0) > limit, what, why, remedy, **kwargs
    )


def outside(field: str, allowed: tuple, why: str, remedy: str = DROP, **kwargs: Any) -> Refusal:
    """Row of a choice of which only some values are served."""
    what = f"{_flag(field)} {{{field}}}"
    return Refusal(
        (field,), lambda args: getattr(args, field) not in allowed, what, why, remedy, **kwargs
    )


ONLY_17 = ("0.5.17",)
ONLY_23 = ("0.5.23",)

_OTHER_CACHE = "it moves or shares KV pages in BF16 layout, which the packed cache does not have"
_SHARED_SLOTS = "it addresses KV slots in a way that the BF16 windows do not follow"
_ROTATED = "the value rotation is folded into the loaded weights, which it would bypass"
_UNTESTED = "it was never tested with a packed cache"
_GRAPHS = "attention over the packed cache is not verified inside such a graph"

_ROPE_KEYS = frozenset(
    ("rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings")
)


def _other_backend(args: Any) -> bool:
    ours = compat.backend_name(options.device_of(args))
    return args.attention_backend not in (None, ours)


def _is_amd(args: Any) -> bool:
    """ROCm calls its device cuda too."""
    import torch

    return args.device != "cpu" and torch.version.hip is not None


def _split_backends(args: Any) -> bool:
    ours = compat.backend_name(options.device_of(args))
    chosen = (args.prefill_attention_backend, args.decode_attention_backend)
    return any(backend not in (None, ours) for backend in chosen)


def _page_size(args: Any) -> bool:
    cpu = options.device_of(args) == "cpu"
    allowed = (options.CPU_PAGE_SIZE,) if cpu else options.CUDA_PAGE_SIZES
    return args.page_size is not None and args.page_size not in allowed


def graph_backend(args: Any, phase: str) -> str | None:
    """Backend of a phase's CUDA graph: from the explicit configuration or the per-phase flag."""
    whole = args.cuda_graph_config
    if isinstance(whole, str):
        whole = json.loads(whole)
    entry = whole.get(phase) if isinstance(whole, dict) else getattr(whole, phase, None)
    explicit = entry.get("backend") if isinstance(entry, dict) else getattr(entry, "backend", None)
    return explicit or getattr(args, f"cuda_graph_backend_{phase}")


def _overrides_model(args: Any) -> bool:
    overrides = args.json_model_override_args or "{}"
    overrides = json.loads(overrides) if isinstance(overrides, str) else overrides
    return not _ROPE_KEYS.issuperset(overrides)


def _environment(name: str) -> Callable[[Any], bool]:
    return lambda args: os.environ.get(name, "").strip().lower() in ("1", "true", "t", "yes", "y")


def env(name: str, why: str, **kwargs: Any) -> Refusal:
    """Row of an environment variable."""
    return Refusal((), _environment(name), f"{name}=1", why, "unset it", **kwargs)


ATTENTION = (
    outside(
        "device",
        (None, "cuda", "cpu"),
        "its kernels run on NVIDIA GPUs and on CPUs only",
        "choose --device cuda or cpu",
    ),
    Refusal(
        ("device",),
        _is_amd,
        "an AMD GPU",
        "its kernels were only tested on NVIDIA GPUs",
        "serve without --kv-quant",
    ),
    Refusal(
        ("attention_backend", "device"),
        _other_backend,
        "--attention-backend {attention_backend}",
        "only this plugin's own backend can read the packed cache",
        "drop --attention-backend: the right one is chosen for you",
    ),
    Refusal(
        ("prefill_attention_backend", "decode_attention_backend", "device"),
        _split_backends,
        "--prefill-attention-backend or --decode-attention-backend",
        "only this plugin's own backend can read the packed cache",
        "drop them: the right one is chosen for you",
    ),
    Refusal(
        ("page_size", "device"),
        _page_size,
        "--page-size {page_size}",
        f"a GPU serves {options.CUDA_PAGE_SIZES} and a CPU {options.CPU_PAGE_SIZE}",
        "choose one of these, or drop it",
    ),
    Refusal(
        ("cuda_graph_config", "cuda_graph_backend_prefill"),
        lambda args: graph_backend(args, "prefill") not in (None, "disabled"),
        "a CUDA graph of the prefill",
        _GRAPHS,
        "drop that setting: prefill runs without a graph",
    ),
    Refusal(
        ("cuda_graph_config", "cuda_graph_backend_decode"),
        lambda args: graph_backend(args, "decode") not in (None, "full", "disabled"),
        "a breakable or piecewise CUDA graph of the decode",
        _GRAPHS,
        "drop that setting: full decode graphs are supported",
    ),
    on("enable_torch_compile", _GRAPHS),
    on("enable_deterministic_inference", "its fixed split sizes are not implemented here"),
    on("rl_on_policy_target", "a 2-bit cache cannot match a trainer bit for bit"),
    on("enable_mis", "multi-item scoring needs the flashinfer backend"),
    on("enable_mixed_chunk", _UNTESTED),
    on("enable_two_batch_overlap", "it runs several attention backends on one cache"),
    on("enable_pdmux", "it runs several attention backends on one cache"),
    on("is_embedding", "an embedding is computed without reading the cache, so nothing is saved"),
    on("enable_nvidia_megakernel", "it replaces the attention backend", versions=ONLY_23),
    on("enable_amd_monokernel", "it replaces the attention backend", versions=ONLY_23),
    on("enable_layernorm_sp", _UNTESTED, versions=ONLY_23),
)

CACHE = (
    outside(
        "kv_cache_dtype",
        ("auto", "bfloat16", "bf16"),
        "the cache is stored in 2 bits and the windows in BF16",
        "drop --kv-cache-dtype",
    ),
    on("quantization_param_path", "the packed cache has scales of its own"),
    on("enable_hierarchical_cache", _OTHER_CACHE),
    on("hicache_storage_backend", _OTHER_CACHE),
    on("enable_lmcache", _OTHER_CACHE),
    on("enable_flexkv", _OTHER_CACHE),
    on("enable_unified_cache_external_linker", _OTHER_CACHE, versions=ONLY_23),
    on("enable_kv_cache_sharding", _OTHER_CACHE, versions=ONLY_23),
    outside(
        "disaggregation_mode", ("null", None), _OTHER_CACHE, "serve prefill and decode together"
    ),
    on("disaggregation_decode_enable_offload_kvcache", _OTHER_CACHE),
    on("enable_pd_role_switch", _OTHER_CACHE, versions=ONLY_23),
    on("enable_hisparse", _OTHER_CACHE),
    on("enable_unified_memory", _OTHER_CACHE),
    on("enable_page_major_kv_layout", _OTHER_CACHE),
    on("prefill_only_disable_kv_cache", "it runs without the cache that --kv-quant is about"),
    on("radix_cache_backend", "another prefix cache need not honour the BF16 windows"),
    on("enable_streaming_session", _SHARED_SLOTS),
    on("enable_session_radix_cache", _SHARED_SLOTS),
    on("enable_memory_saver", "the windows and the packed cache are not in its memory regions"),
    outside("kv_canary", ("none", None), "it hashes KV rows that are not stored here as such"),
    on("speculative_algorithm", "rejected tokens would stay in the BF16 windows"),
    outside("decoupled_spec_role", ("null", None), "rejected tokens would stay in the windows"),
    on("dllm_algorithm", "a diffusion model rewrites tokens that are already quantized"),
)

WEIGHTS = (
    on("enable_lora", "adapters are trained without the rotation that is folded into the weights"),
    on("lora_paths", "adapters are trained without the rotation that is folded into the weights"),
    on("uno_lora_path", "rejected tokens would stay in the BF16 windows", versions=ONLY_23),
    outside(
        "load_format",
        ("auto", "safetensors", "dummy"),
        "only weights that a checkpoint can be compared with are served",
        "use a model in safetensors files and drop --load-format",
    ),
    on("custom_weight_loader", _ROTATED),
    on("checkpoint_engine_wait_weights_before_ready", _ROTATED),
    on("remote_instance_weight_loader_start_seed_via_transfer_engine", _ROTATED),
    outside("weight_cache_mode", ("off", None), "another server would share the rotated weights"),
    outside("startup_weight_load_mode", ("serial",), _ROTATED, versions=ONLY_23),
    above("cpu_offload_gb", 0, _ROTATED),
    above("offload_group_size", 0, _ROTATED),
    on("torchao_config", "it quantizes weights before the rotation is folded", versions=ONLY_17),
    on("modelopt_quant", "it quantizes weights before the rotation is folded"),
    on("quantize_and_serve", "it quantizes weights before the rotation is folded"),
    outside(
        "model_impl",
        ("auto", "sglang"),
        "only SGLang's own model classes are known here",
        "drop --model-impl",
    ),
    Refusal(
        ("json_model_override_args",),
        _overrides_model,
        "--json-model-override-args",
        "the checkpoint is compared with config.json, which it overrides",
        f"override only {', '.join(sorted(_ROPE_KEYS))}, or edit config.json",
    ),
    on("enable_multimodal", "image and audio tokens were never calibrated"),
    on("language_only", "image and audio tokens were never calibrated"),
    on("encoder_only", "image and audio tokens were never calibrated"),
    on("language_model_only", "image and audio tokens were never calibrated", versions=ONLY_23),
)

PARALLEL = (
    above("pp_size", 1, "pipeline stages were never tested with a packed cache", "use --tp-size"),
    above("dcp_size", 1, "it shards the KV cache over ranks in BF16 layout", "use --tp-size"),
    above("attn_cp_size", 1, "it shards the sequence over ranks", "use --tp-size"),
    on("enable_prefill_cp", "it shards the sequence over ranks", "use --tp-size"),
    on(
        "enable_dp_attention", "its padded batches were never tested", "use --tp-size or --dp-size"
    ),
    above(
        "attn_dp_size",
        1,
        "its padded batches were never tested",
        "use --tp-size or --dp-size",
        versions=ONLY_23,
    ),
    above("dwdp_size", 1, _UNTESTED),
    on("ep_join_mode", _UNTESTED),
    on("elastic_ep_backend", _UNTESTED),
    on("use_ray", "its actors were never tested to load this plugin", "start without Ray"),
)

ENVIRONMENT = (
    env("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "the pool would be sized without the windows"),
    env("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", _SHARED_SLOTS, versions=ONLY_17),
    env("SGLANG_RUST_SERVER", _UNTESTED),
)

TABLE = ATTENTION + CACHE + WEIGHTS + PARALLEL + ENVIRONMENT
