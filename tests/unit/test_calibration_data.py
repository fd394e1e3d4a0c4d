"""Text in every accepted form to disjoint sequences."""

from __future__ import annotations

import json
import lzma

import pytest
import torch

from sglang_kvquant.calibration.data import (
    DEFAULT_TEXT,
    CalibrationTokens,
    cut_sequences,
    load_tokens,
    read_documents,
    tokenize,
)
from sglang_kvquant.calibration.errors import CalibrationError

transformers = pytest.importorskip("transformers")

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture
def tokenizer(tiny_model):
    return transformers.AutoTokenizer.from_pretrained(tiny_model())


def test_plain_text_and_xz_give_the_same_document(tmp_path) -> None:
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.xz"
    plain.write_text("schön\n", encoding="utf-8")
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert read_documents(plain) == read_documents(packed) == ["schön\n"]


def test_jsonl_rows(tmp_path) -> None:
    file = tmp_path / "rows.jsonl.xz"
    rows = [{"text": "one"}, {"messages": CHAT}, {"prompt": "hi", "completion": "hello"}]
    file.write_bytes(lzma.compress("\n\n".join(map(json.dumps, rows)).encode()))
    assert read_documents(file) == ["one", CHAT, CHAT]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\nnot json', "Line 2 of .* is not JSON"),
        ('{"prompt": "a"}', 'Line 1 of .* has none of "text"'),
        ("[1]", "Line 1 of .* has none"),
        ('{"messages": ["a"]}', "Line 1 of .* has none"),
    ],
)
def test_bad_jsonl_is_refused(tmp_path, content: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(CalibrationError, match=message):
        read_documents(file)


def test_unreadable_files_are_refused(tmp_path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\x00abc")
    (tmp_path / "broken.txt.xz").write_bytes(b"not xz")
    for name in ("latin.txt", "broken.txt.xz", "missing.txt"):
        with pytest.raises(CalibrationError, match="cannot be read as text"):
            read_documents(tmp_path / name)


def test_chats_go_through_the_template(tokenizer) -> None:
    ids = tokenize(tokenizer, [CHAT, "end"]).tolist()
    expected = "<|user|>hi</s><|assistant|>hello</s></s>end</s>"
    assert tokenizer.decode(ids) == expected
    tokenizer.chat_template = None
    with pytest.raises(CalibrationError, match="no chat template"):
        tokenize(tokenizer, [CHAT])


def test_sequences_are_disjoint_windows_of_the_stream() -> None:
    stream = torch.arange(1000)
    tokens = cut_sequences(stream, 50, 8, 4, seed=3, prefix=[-1], source="x")
    assert tokens.train.shape == (8, 50) and tokens.heldout.shape == (4, 50)
    assert bool((tokens.all()[:, 0] == -1).all())
    body = tokens.all()[:, 1:]
    assert bool((body.diff(dim=1) == 1).all())
    assert body.unique().numel() == body.numel()
    assert bool((body[:, 0] % 49 == 0).all())
    again = cut_sequences(stream, 50, 8, 4, seed=3, prefix=[-1], source="x")
    other = cut_sequences(stream, 50, 8, 4, seed=4, prefix=[-1], source="x")
    assert again.sha256() == tokens.sha256() != other.sha256()


def test_too_little_text_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"x has 599 tokens, but 8 \+ 4 sequences"):
        cut_sequences(torch.arange(599), 50, 8, 4, 0, [], "x")
    assert cut_sequences(torch.arange(600), 50, 8, 4, 0, [], "x").all().unique().numel() == 600


def test_default_text_is_long_enough_for_the_default_options(tokenizer) -> None:
    text = DEFAULT_TEXT.read_text(encoding="utf-8")
    assert len(text) > 60_000
    # Four characters per token is what a vocabulary of 16,000 entries or more achieves.
    assert len(text) / 4 > (8 + 4) * 1024
    tokens = load_tokens(tokenizer, seq_len=1024, num_sequences=8, num_heldout=4)
    assert tokens.source == "default_text.txt" and tokens.seed == 0


def test_beginning_of_text_token_opens_every_sequence(tokenizer, monkeypatch) -> None:
    without = load_tokens(tokenizer, seq_len=32, num_sequences=2, num_heldout=1)
    assert bool((without.train[:, 0] != tokenizer.bos_token_id).any())
    plain_call = type(tokenizer).__call__

    def with_bos(self, text, add_special_tokens=True, **kwargs):
        encoded = plain_call(self, text, add_special_tokens=False, **kwargs)
        if add_special_tokens:
            encoded["input_ids"] = [self.bos_token_id, *encoded["input_ids"]]
        return encoded

    monkeypatch.setattr(type(tokenizer), "__call__", with_bos)
    tokens = load_tokens(tokenizer, seq_len=32, num_sequences=2, num_heldout=1)
    assert bool((tokens.all()[:, 0] == tokenizer.bos_token_id).all())
    assert tokens.train.shape == (2, 32)


def test_token_tensors_are_checked() -> None:
    rows = [torch.arange(8), torch.arange(8)]
    tokens = CalibrationTokens.from_sequences(rows, rows[:1])
    assert tokens.train.shape == (2, 8) and tokens.heldout.shape == (1, 8)
    with pytest.raises(ValueError, match="same length"):
        CalibrationTokens.from_sequences([torch.arange(8), torch.arange(9)], rows)
    with pytest.raises(ValueError, match="must be integers"):
        CalibrationTokens(torch.zeros(2, 8), tokens.heldout)
    with pytest.raises(CalibrationError, match="At least one"):
        load_tokens(None, num_heldout=0)
