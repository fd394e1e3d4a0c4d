"""What a user can choose: methods, quantizer parameters, BF16 windows.

Every object here is frozen and validates itself, so that an impossible combination cannot travel
further than the command line. Nothing here imports torch or sglang.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

METHODS = ("none", "rtn", "quarot", "oscar", "optr", "rolaq")
"""Values of ``--kv-quant``; ``none`` leaves SGLang exactly as it is."""

DATA_FREE_METHODS = ("rtn", "quarot")
"""Methods that need no checkpoint."""

CALIBRATED_METHODS = ("oscar", "optr")
"""Methods that read rotations from a checkpoint."""

HEAD_DIMS = (64, 128, 256)
"""Head dimensions that are served: Hadamard matrices and OSCAR need powers of two."""

GROUP_SIZES = (32, 64, 128)

DEFAULT_SINK_TOKENS = 64
DEFAULT_RECENT_TOKENS = 256

ClipKind = Literal["none", "percentile", "maxscale"]


@dataclass(frozen=True, slots=True)
class Clip:
    """How a row is clipped before its range is measured.

    Attributes:
        kind: ``none``; ``percentile`` (OSCAR: symmetric clamp of the whole head row at
            ``sorted(|row|)[floor(ratio * D)]``); ``maxscale`` (QuaRot, RotateKV: each group's
            minimum and maximum are multiplied by the ratio). The two ratios mean different
            things, so the kind always travels with the number.
        ratio: in (0, 1); ignored and required to be 1.0 for ``none``.
    """

    kind: ClipKind = "none"
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("none", "percentile", "maxscale"):
            raise ValueError(f"clip kind must be none, percentile or maxscale, got {self.kind!r}")
        if self.kind == "none":
            if self.ratio != 1.0:
                raise ValueError(f"clip kind none takes ratio 1.0, got {self.ratio}")
        elif not 0.0 < self.ratio < 1.0:
            raise ValueError(f"clip ratio must be in (0, 1), got {self.ratio}")


NO_CLIP = Clip()
OSCAR_K_CLIP = Clip("percentile", 0.96)
OSCAR_V_CLIP = Clip("percentile", 0.92)


@dataclass(frozen=True, slots=True)
class QuantizerConfig:
    """The 2-bit quantizer of one model: one definition for serving, calibration and evaluation.

    Attributes:
        group_size: elements of a head row that share a scale and a zero.
        k_clip: clip of the rotated, centred key rows.
        v_clip: clip of the rotated value rows.
    """

    group_size: int = 128
    k_clip: Clip = OSCAR_K_CLIP
    v_clip: Clip = OSCAR_V_CLIP

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size must be one of {GROUP_SIZES}, got {self.group_size}")

    @classmethod
    def for_method(
        cls, method: str, head_dim: int, group_size: int | None = None
    ) -> QuantizerConfig:
        """Default quantizer of a method: plain min/max for ``rtn``, OSCAR's clips otherwise.

        Args:
            method: one of METHODS except ``none``.
            head_dim: elements of a head row.
            group_size: elements per scale; the largest of GROUP_SIZES that divides head_dim
                when not given.

        Raises:
            ValueError: head_dim is not served, or group_size does not divide it.
        """
        check_head_dim(head_dim)
        if group_size is None:
            group_size = max(g for g in GROUP_SIZES if head_dim % g == 0)
        if head_dim % group_size:
            raise ValueError(f"group_size {group_size} does not divide head_dim {head_dim}")
        if method == "rtn":
            return cls(group_size, NO_CLIP, NO_CLIP)
        return cls(group_size)

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> QuantizerConfig:
        """Inverse of :meth:`to_json`; unknown or missing keys raise ValueError."""
        try:
            k_clip, v_clip = Clip(**value["k_clip"]), Clip(**value["v_clip"])
            return cls(**{**value, "k_clip": k_clip, "v_clip": v_clip})
        except (TypeError, KeyError) as error:
            raise ValueError(f"quantizer description is not understood: {error}") from error


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """Tokens kept in BF16 beside the packed cache: the first and the most recent of a request."""

    sink_tokens: int = DEFAULT_SINK_TOKENS
    recent_tokens: int = DEFAULT_RECENT_TOKENS

    def __post_init__(self) -> None:
        for name in ("sink_tokens", "recent_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 4096:
                raise ValueError(f"{name} must be an integer from 0 to 4096, got {value!r}")


@dataclass(frozen=True, slots=True)
class KVQuantOptions:
    """The user's command line. Travels to SGLang's scheduler processes inside ServerArgs.

    Attributes:
        method: one of METHODS except ``none``.
        checkpoint: path of the checkpoint; None means the default place of that model and method.
        sink_tokens: None means the checkpoint's value, or the default.
        recent_tokens: likewise.
    """

    method: str
    checkpoint: str | None = None
    sink_tokens: int | None = None
    recent_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS or self.method == "none":
            raise ValueError(f"--kv-quant must be one of {METHODS}, got {self.method!r}")
        if self.method == "rolaq":
            raise ValueError(
                "--kv-quant rolaq is not available: this version serves no MLA models; "
                "use rtn, quarot, oscar or optr with a GQA model."
            )
        if self.method in DATA_FREE_METHODS and self.checkpoint is not None:
            raise ValueError(
                f"--kv-quant {self.method} needs no rotations, so --kv-quant-checkpoint would be "
                "ignored; drop it, or choose oscar or optr."
            )
        self.windows()

    def windows(self, default: WindowConfig | None = None) -> WindowConfig:
        """Windows to serve: the user's numbers where given, else those of `default`."""
        base = default or WindowConfig()
        sink = base.sink_tokens if self.sink_tokens is None else self.sink_tokens
        recent = base.recent_tokens if self.recent_tokens is None else self.recent_tokens
        return WindowConfig(sink, recent)


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError with a sentence for the user when head_dim is not served."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim {head_dim} is not served: the rotations need a power of two, one of "
            f"{HEAD_DIMS}; serve this model without --kv-quant."
        )
