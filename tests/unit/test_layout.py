"""Byte order and sizes of the packed cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvquant.layout import GQALayout, PackedKV, pack_codes, unpack_codes


def codes_of(text: str) -> torch.Tensor:
    return torch.tensor([int(c) for c in text.replace(" ", "")], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("codes", "packed"),
    [
        ("1230 3210", [0b00_11_10_01, 0b00_01_10_11]),
        ("1000 0000", [0b00_00_00_01, 0]),
        ("0001 0000", [0b01_00_00_00, 0]),
        ("0000 1000", [0, 0b00_00_00_01]),
        ("0000 0003", [0, 0b11_00_00_00]),
        # Two words: dims 0, 2, 4, 6 in byte 0; 8, 10, 12, 14 in byte 1; the odd dims follow.
        ("10 20 30 00  30 20 10 00", [0b00_11_10_01, 0b00_01_10_11, 0, 0]),
        ("01 02 03 00  03 02 01 00", [0, 0, 0b00_11_10_01, 0b00_01_10_11]),
    ],
)
def test_literal_bytes(codes, packed):
    assert pack_codes(codes_of(codes)).tolist() == packed
    assert torch.equal(unpack_codes(torch.tensor(packed, dtype=torch.uint8)), codes_of(codes))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_field_of_all_words_is_a_contiguous_run_of_dims(head_dim):
    codes = torch.randint(0, 4, (3, 2, head_dim), dtype=torch.uint8)
    words = pack_codes(codes).view(torch.int16).int() & 0xFFFF  # little-endian, [3, 2, D / 8]
    width = head_dim // 8
    for field in range(8):
        expected = codes[..., field * width : (field + 1) * width]
        assert torch.equal((words >> (2 * field)) & 3, expected.int())


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 32), st.integers(0, 2**32 - 1))
def test_unpack_inverts_pack(num_words, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 4, (2, 8 * num_words), dtype=torch.uint8, generator=generator)
    packed = pack_codes(codes)
    assert packed.shape == (2, 2 * num_words)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_codes(packed), codes)


def test_pack_refuses_a_row_that_is_not_whole_words():
    with pytest.raises(ValueError, match="multiple of 8"):
        pack_codes(torch.zeros(12, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("head_dim", "group_size", "row_bytes"),
    [(64, 32, 24), (64, 64, 20), (128, 32, 48), (128, 64, 40), (128, 128, 36), (256, 128, 72)],
)
def test_bytes_per_row(head_dim, group_size, row_bytes):
    layout = GQALayout(3, head_dim, group_size, 16)
    assert layout.packed_row_bytes == row_bytes
    assert layout.bytes_per_token == 2 * 3 * row_bytes
    assert layout.bf16_bytes_per_token == 2 * 3 * head_dim * 2
    packed = PackedKV.allocate(layout, num_pages=5, device="cpu")
    assert packed.nbytes() == 5 * 16 * layout.bytes_per_token
    assert packed.page_size == 16


@pytest.mark.parametrize("head_dim", [80, 96])
def test_head_dims_that_are_not_served(head_dim):
    with pytest.raises(ValueError, match="is not served"):
        GQALayout(2, head_dim, 32)


@pytest.mark.parametrize(
    "arguments", [(2, 64, 128), (2, 128, 16), (0, 128, 128), (2, 128, 128, 0)]
)
def test_layouts_that_do_not_exist(arguments):
    with pytest.raises(ValueError, match=r"group_size|positive"):
        GQALayout(*arguments)
