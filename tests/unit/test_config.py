"""Options and quantizer parameters: every impossible combination is refused with a sentence."""

from __future__ import annotations

import json

import pytest

from sglang_kvquant.config import (
    GROUP_SIZES,
    HEAD_DIMS,
    NO_CLIP,
    OSCAR_K_CLIP,
    OSCAR_V_CLIP,
    Clip,
    KVQuantOptions,
    QuantizerConfig,
    WindowConfig,
)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("method", ["rtn", "quarot", "oscar", "optr"])
def test_quantizer_of_every_served_shape(method, head_dim, group_size):
    if head_dim % group_size:
        with pytest.raises(ValueError, match="does not divide"):
            QuantizerConfig.for_method(method, head_dim, group_size)
        return
    config = QuantizerConfig.for_method(method, head_dim, group_size)
    clips = (NO_CLIP, NO_CLIP) if method == "rtn" else (OSCAR_K_CLIP, OSCAR_V_CLIP)
    assert (config.group_size, config.k_clip, config.v_clip) == (group_size, *clips)
    assert QuantizerConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 64), (128, 128), (256, 128)])
def test_default_group_is_the_largest_that_fits(head_dim, group_size):
    assert QuantizerConfig.for_method("optr", head_dim).group_size == group_size


@pytest.mark.parametrize("head_dim", [80, 96, 72, 1, 512])
def test_head_dims_that_are_not_served(head_dim):
    with pytest.raises(ValueError, match=f"head_dim {head_dim} is not served") as caught:
        QuantizerConfig.for_method("optr", head_dim)
    assert "serve this model without --kv-quant" in str(caught.value)


@pytest.mark.parametrize("group_size", [0, 16, 48, 256, -64])
def test_group_sizes_that_do_not_exist(group_size):
    with pytest.raises(ValueError, match="group_size"):
        QuantizerConfig(group_size)


@pytest.mark.parametrize(
    ("kind", "ratio"),
    [
        ("round", 0.5),
        ("none", 0.9),
        ("percentile", 0.0),
        ("percentile", 1.0),
        ("percentile", -0.5),
        ("percentile", float("nan")),
        ("maxscale", 2.0),
    ],
)
def test_clips_that_do_not_exist(kind, ratio):
    with pytest.raises(ValueError, match="clip"):
        Clip(kind, ratio)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"group_size": 64},
        {"group_size": 64, "k_clip": None, "v_clip": None},
        {"group_size": 64, "k_clip": {"kind": "none"}, "v_clip": {"kind": "none"}, "bits": 2},
        {"group_size": 64, "k_clip": {"kind": "none", "x": 1}, "v_clip": {"kind": "none"}},
    ],
)
def test_quantizer_descriptions_that_are_not_understood(value):
    with pytest.raises(ValueError, match="not understood"):
        QuantizerConfig.from_json(value)


@pytest.mark.parametrize("field", ["sink_tokens", "recent_tokens"])
@pytest.mark.parametrize("value", [-1, 4097, 1.0, True, None, "64"])
def test_windows_that_do_not_exist(field, value):
    with pytest.raises(ValueError, match=field):
        WindowConfig(**{field: value})


def test_windows_may_be_zero():
    assert WindowConfig(0, 0) == WindowConfig(sink_tokens=0, recent_tokens=0)


def test_options_override_the_checkpoint_one_by_one():
    stored = WindowConfig(16, 32)
    assert KVQuantOptions("optr").windows() == WindowConfig(64, 256)
    assert KVQuantOptions("optr").windows(stored) == stored
    assert KVQuantOptions("optr", sink_tokens=0).windows(stored) == WindowConfig(0, 32)
    assert KVQuantOptions("optr", recent_tokens=0).windows(stored) == WindowConfig(16, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "none"}, "must be one of"),
        ({"method": "int4"}, "must be one of"),
        ({"method": "rolaq"}, "no MLA models"),
        ({"method": "rtn", "checkpoint": "f"}, "drop it"),
        ({"method": "quarot", "checkpoint": "f"}, "drop it"),
        ({"method": "optr", "sink_tokens": -1}, "sink_tokens"),
        ({"method": "optr", "recent_tokens": 5000}, "recent_tokens"),
    ],
)
def test_options_that_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        KVQuantOptions(**arguments)
