"""write_kv: bytes against the quantizer, windows and rotations against the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sglang_kvquant.kernels.write import write_kv

from sglang_kvquant.config import Clip, QuantizerConfig
from sglang_kvquant.layout import GQALayout, PackedKV, WindowKV
from sglang_kvquant.reference import write as reference
from sglang_kvquant.rotation import hadamard

CLIPS = {
    "none": Clip(),
    "oscar": Clip("percentile", 0.96),
    "low": Clip("percentile", 0.6),
    "top": Clip("percentile", 0.999),
    "maxscale": Clip("maxscale", 0.9),
}
HEADS = 3
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def rows_with_edges(num_tokens: int, head_dim: int, gen: torch.Generator) -> torch.Tensor:
    """Random rows, and rows of ties, constants, zeros, one outlier, huge and tiny numbers."""
    x = torch.randn(num_tokens, HEADS, head_dim, generator=gen)
    x[0] = torch.randint(-2, 3, (HEADS, head_dim), generator=gen).float()  # ties
    x[1] = 0.75
    x[2] = 0.0
    x[3, :, 5] = 300.0
    x[4] *= 1e30
    x[5] *= 1e-6
    x[6] = x[6].sign()
    return x


def buffers(layout: GQALayout, num_slots: int, dtype: torch.dtype, device: str):
    num_pages = num_slots // layout.page_size + 1
    packed = PackedKV.allocate(layout, num_pages, device)
    for tensor, fill in zip(dataclasses.astuple(packed), (0xA5, 7.0, 0x5A, 9.0), strict=True):
        tensor.fill_(fill)
    shapes = [layout.window_shape(4, 5)] * 2 + [layout.window_shape(3, 2)] * 2
    window = WindowKV(*(torch.full(s, -7.0, dtype=dtype, device=device) for s in shapes))
    return packed, window


def run_both(transform, k, v, layout, windows: bool = True, emit: bool = True):
    """The kernel, and the reference on the kernel's own rotated rows."""
    device, num_tokens = str(k.device), k.shape[0]
    gen = torch.Generator().manual_seed(1)
    num_slots = 4 * num_tokens
    loc = (torch.randperm(num_slots - 1, generator=gen)[:num_tokens] + 1).to(device)
    ring = torch.full((num_tokens,), -1)
    sink = torch.full((num_tokens,), -1)
    ring[2:9] = torch.randperm(20, generator=gen)[:7]
    sink[4:8] = torch.randperm(6, generator=gen)[:4]
    index = (ring.to(device), sink.to(device)) if windows else (None, None)
    got = buffers(layout, num_slots, k.dtype, device)
    want = buffers(layout, num_slots, k.dtype, device)
    emitted = write_kv(*got, k, v, transform, loc, *index, emit=emit)
    if emitted is None:
        return got, want, emitted, loc, index
    reference.write_packed(
        want[0], emitted[0].float(), emitted[1].float(), transform.quantizer, loc
    )
    if windows:
        reference.write_window(want[1].ring_k, want[1].ring_v, *emitted, index[0])
        reference.write_window(want[1].sink_k, want[1].sink_v, *emitted, index[1])
    return got, want, emitted, loc, index


def assert_same_bytes(got, want):
    for got_part, want_part in zip(got, want, strict=True):
        for field in dataclasses.fields(got_part):
            a, b = getattr(got_part, field.name), getattr(want_part, field.name)
            assert torch.equal(a, b), field.name


def transforms(kind: str, head_dim: int, group_size: int, clip: Clip, device: str, v_side: bool):
    quantizer = QuantizerConfig(group_size, clip, clip)
    gen = torch.Generator().manual_seed(3)
    eye = torch.eye(head_dim)
    rotation = {
        "identity": None,
        "permutation": torch.stack(
            [eye[torch.randperm(head_dim, generator=gen)] for _ in range(HEADS)]
        ),
        "shared": eye[torch.randperm(head_dim, generator=gen)],
        "hadamard": hadamard(head_dim, torch.float32),
        "dense": torch.linalg.qr(torch.randn(HEADS, head_dim, head_dim, generator=gen))[0],
    }[kind]
    mean = torch.randn(HEADS, head_dim, generator=gen).round(decimals=1)
    rotation = None if rotation is None else rotation.contiguous().to(device)
    return reference.LayerTransform.build(
        rotation, mean.to(device), rotation if v_side else None, quantizer
    )


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    ("head_dim", "group_size", "page_size"),
    [(128, 128, 16), (128, 32, 1), (64, 64, 64), (256, 128, 4), (64, 32, 1)],
)
def test_bytes_equal_the_quantizer(clip, head_dim, group_size, page_size, device):
    """fp32 input, no rotation: kernel and quantizer see the same numbers."""
    gen = torch.Generator().manual_seed(0)
    layout = GQALayout(HEADS, head_dim, group_size, page_size)
    k = rows_with_edges(21, head_dim, gen).to(device)
    v = rows_with_edges(21, head_dim, gen).to(device)
    transform = transforms("identity", head_dim, group_size, CLIPS[clip], device, False)
    got, want, emitted, _, _ = run_both(transform, k, v, layout)
    assert torch.equal(emitted[0], k - transform.k_offset)
    assert torch.equal(emitted[1], v)
    assert_same_bytes(got, want)


def test_many_tokens(device):
    """Prefill sizes take larger blocks; rows without a rotation then pass through a product."""
    gen = torch.Generator().manual_seed(0)
    layout = GQALayout(HEADS, 64, 32, 16)
    k, v = (rows_with_edges(1100, 64, gen).to(device) for _ in "kv")
    transform = transforms("identity", 64, 32, CLIPS["oscar"], device, False)
    got, want, emitted, _, _ = run_both(transform, k, v, layout)
    assert torch.equal(emitted[1], v)
    assert_same_bytes(got, want)


def test_values_at_the_boundaries(device):
    """Values within a few units in the last place of (code + 0.5) * scale, for many scales.

    Row by row: minimum 0 and maximum fp16(3 s) fix zero 0 and scale s; the rest are neighbours of
    the three boundaries. The quotient's own rounding decides, so a comparison with a rounded
    product would fail here.
    """
    head_dim, heads = 64, HEADS
    bits = torch.arange(0x0001, 0x7000, 41, dtype=torch.int32).to(torch.int16)
    step = bits.view(torch.float16).float()  # every exponent, many significands
    step = step[: len(step) // heads * heads].view(-1, heads)
    x = torch.zeros(*step.shape, head_dim)
    x[..., 1] = 3.0 * step
    for i, boundary in enumerate((0.5, 1.5, 2.5)):
        centre = (boundary * step).unsqueeze(-1).view(torch.int32)
        around = centre + torch.arange(-9, 10, dtype=torch.int32)
        x[..., 2 + 19 * i : 21 + 19 * i] = around.view(torch.float32)
    layout = GQALayout(heads, head_dim, 64, 16)
    transform = transforms("identity", head_dim, 64, CLIPS["none"], device, False)
    transform = dataclasses.replace(transform, k_offset=None)
    got, want, _, _, _ = run_both(transform, x.to(device), (-x).to(device), layout)
    assert_same_bytes(got, want)


@pytest.mark.parametrize("kind", ["permutation", "shared", "hadamard", "dense"])
@pytest.mark.parametrize("v_side", [False, True])
def test_rotations(kind, v_side, device):
    gen = torch.Generator().manual_seed(0)
    layout = GQALayout(HEADS, 64, 64, 4)
    k = rows_with_edges(19, 64, gen)
    v = torch.randn(19, HEADS, 64, generator=gen)
    k[4:6] = torch.randn(2, HEADS, 64, generator=gen)
    transform = transforms(kind, 64, 64, CLIPS["oscar"], device, v_side)
    got, want, emitted, _, _ = run_both(transform, k.to(device), v.to(device), layout)
    assert_same_bytes(got, want)
    exact = [t.double() for t in (k.to(device), v.to(device))]
    double = dataclasses.replace(
        transform,
        k_rotation=transform.k_rotation.double(),
        v_rotation=None if transform.v_rotation is None else transform.v_rotation.double(),
    )
    for rows, rotation, offset, out in zip(
        exact,
        (double.k_rotation, double.v_rotation),
        (double.k_offset, None),
        emitted,
        strict=True,
    ):
        rotated = rows if rotation is None else reference.rotate_heads(rows, rotation)
        rotated = rotated if offset is None else rotated - offset
        bound = 1e-6 * (1 + rows.abs().amax(-1, keepdim=True) * 8)
        assert ((out.double() - rotated).abs() <= bound).all()


def test_untouched_and_optional_parts(device):
    """Without windows and without emission only the named slots change."""
    gen = torch.Generator().manual_seed(0)
    layout = GQALayout(HEADS, 64, 64, 4)
    k = torch.randn(17, HEADS, 64, generator=gen).to(device)
    transform = transforms("shared", 64, 64, CLIPS["oscar"], device, False)
    silent, fresh, none, loc, _ = run_both(transform, k, k, layout, windows=False, emit=False)
    spoken, _, emitted, _, _ = run_both(transform, k, k, layout, windows=False)
    assert none is None and emitted is not None
    assert_same_bytes(silent, spoken)
    assert_same_bytes(silent[1:], fresh[1:])
    untouched = torch.ones(fresh[0].k_codes.shape[0] * 4, dtype=torch.bool, device=device)
    untouched[loc] = False
    for field in dataclasses.fields(PackedKV):
        a = getattr(silent[0], field.name).transpose(1, 2).flatten(0, 1)
        b = getattr(fresh[0], field.name).transpose(1, 2).flatten(0, 1)
        assert torch.equal(a[untouched], b[untouched]), field.name


def test_strided_input_and_padding(device):
    """Views into a fused QKV row; several padded tokens that share slot 0."""
    gen = torch.Generator().manual_seed(0)
    layout = GQALayout(HEADS, 64, 64, 1)
    qkv = torch.randn(20, 9 * 64, generator=gen).to(device)
    k = qkv[:, 3 * 64 : 6 * 64].unflatten(1, (HEADS, 64))
    v = qkv[:, 6 * 64 :].unflatten(1, (HEADS, 64))
    k, v = (torch.cat([t, t[:1].expand(3, -1, -1)]) for t in (k, v))
    transform = transforms("identity", 64, 64, CLIPS["oscar"], device, False)
    got, want = (buffers(layout, 64, k.dtype, device) for _ in range(2))
    loc = torch.cat([torch.arange(1, 21), torch.zeros(3, dtype=torch.long)]).to(device)
    write_kv(*got, k, v, transform, loc, None, None)
    reference.write_kv(*want, k, v, transform, loc, None, None)
    assert_same_bytes(got, want)
    assert write_kv(*got, k[:0], v[:0], transform, loc[:0], None, None)[0].shape == (0, HEADS, 64)


def test_wrong_rotation_is_noticed(device):
    """The comparison fails when the kernel is given another head order."""
    gen = torch.Generator().manual_seed(0)
    layout = GQALayout(HEADS, 64, 64, 4)
    k = torch.randn(17, HEADS, 64, generator=gen).to(device)
    transform = transforms("dense", 64, 64, CLIPS["oscar"], device, False)
    flipped = dataclasses.replace(transform, k_rotation=transform.k_rotation.flip(0).contiguous())
    _, _, right, _, _ = run_both(transform, k, k, layout)
    _, _, wrong, _, _ = run_both(flipped, k, k, layout)
    assert not torch.allclose(right[0], wrong[0], atol=0.1)


def test_errors(device):
    layout = GQALayout(HEADS, 64, 64, 4)
    packed, window = buffers(layout, 16, torch.float32, device)
    k = torch.zeros(2, HEADS, 64, device=device)
    transform = transforms("dense", 64, 64, CLIPS["none"], device, False)
    loc = torch.zeros(2, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match="packed buffers hold"):
        write_kv(packed, window, k[:, :2], k[:, :2], transform, loc, None, None)
    with pytest.raises(TypeError, match="float64"):
        write_kv(packed, window, k.double(), k.double(), transform, loc, None, None)
    bad = dataclasses.replace(transform, k_rotation=transform.k_rotation[:2])
    with pytest.raises(ValueError, match="rotation must be contiguous"):
        write_kv(packed, window, k, k, bad, loc, None, None)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["identity", "hadamard", "dense"])
@pytest.mark.parametrize("num_tokens", [1, 17, 3000])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bf16_on_gpu(kind, num_tokens, head_dim, device):
    """bf16 operands, fp32 accumulation. The emitted rows are rounded to bf16, so bytes are
    compared on rotations whose fp32 results are bf16 numbers, values on all."""
    gen = torch.Generator().manual_seed(0)
    layout = GQALayout(HEADS, head_dim, min(head_dim, 128), 64)
    k = torch.randn(max(num_tokens, 9), HEADS, head_dim, generator=gen)[:num_tokens]
    k = k.bfloat16().to(device)
    transform = transforms(kind, head_dim, layout.group_size, CLIPS["oscar"], device, False)
    transform = dataclasses.replace(transform, k_offset=None)
    packed, window = buffers(layout, 4 * num_tokens + 64, torch.bfloat16, device)
    want, _ = buffers(layout, 4 * num_tokens + 64, torch.bfloat16, device)
    loc = torch.arange(1, num_tokens + 1, device=device)
    k_rot, v_rot = write_kv(packed, window, k, k, transform, loc, None, None)
    exact = k.double()
    if transform.k_rotation is not None:
        exact = reference.rotate_heads(exact, transform.k_rotation.bfloat16().double())
    error = (k_rot.double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-5).all()
    assert torch.equal(v_rot, k)
    rows = k.float() if kind == "identity" else exact.float()
    reference.write_packed(want, rows, k.float(), transform.quantizer, loc)
    assert torch.equal(packed.v_codes, want.v_codes) and torch.equal(packed.v_meta, want.v_meta)
    differing = (packed.k_codes != want.k_codes).float().mean()
    # fp32 summation order may move a value across a boundary; identity has no sums.
    assert differing <= (0.0 if kind == "identity" else 2e-3)
