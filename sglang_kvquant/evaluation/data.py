"""Held-out text to token windows."""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..calibration.data import read_documents, tokenize
from ..calibration.errors import CalibrationError


class EvaluationError(ValueError):
    """Bad input of an evaluation: one sentence that says what, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Token windows to score.

    Attributes:
        tokens: int64 [num_windows, seq_len].
        source: file name of the text.
    """

    tokens: torch.Tensor
    source: str

    def sha256(self) -> str:
        digest = hashlib.sha256(str(tuple(self.tokens.shape)).encode())
        digest.update(self.tokens.contiguous().numpy().tobytes())
        return digest.hexdigest()


def read_token_file(path: Path) -> torch.Tensor:
    """A file of little-endian uint16 tokens, optionally ``.xz``: int64 [num_tokens]."""
    try:
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except (OSError, lzma.LZMAError) as error:
        raise EvaluationError(f"{path} cannot be read as a token file: {error}.") from error
    return torch.from_numpy(np.frombuffer(data, dtype="<u2").astype(np.int64))


def read_stream(tokenizer: Any, path: Path) -> torch.Tensor:
    """Tokens of a text or .jsonl file, each also as .xz: int64 [num_tokens]."""
    try:
        return tokenize(tokenizer, read_documents(path))
    except CalibrationError as error:
        raise EvaluationError(str(error)) from error


def cut_windows(
    stream: torch.Tensor, seq_len: int, num_windows: int, source: str, prefix: list[int]
) -> Windows:
    """Disjoint windows spread evenly over a token stream, each begun with `prefix`.

    Args:
        stream: int64 [num_tokens].
        seq_len: tokens of a window, the prefix included.
        num_windows: how many.
        source: name for messages.
        prefix: tokens that the model expects before a text, or none.

    Raises:
        EvaluationError: the stream is too short.
    """
    body = seq_len - len(prefix)
    if len(stream) < num_windows * body:
        raise EvaluationError(
            f"{source} has {len(stream)} tokens, but {num_windows} windows of {seq_len} need "
            f"{num_windows * body}; give more text with --data, or a smaller --num-windows or "
            "--seq-len."
        )
    starts = [i * (len(stream) // num_windows) for i in range(num_windows)]
    start = torch.tensor(prefix, dtype=torch.int64)
    return Windows(torch.stack([torch.cat([start, stream[s : s + body]]) for s in starts]), source)


def load_windows(
    tokenizer: Any, path: Path, seq_len: int, num_windows: int, max_tokens: int | None = None
) -> Windows:
    """Windows of the first `max_tokens` tokens (all by default) of a text file."""
    stream = read_stream(tokenizer, path)[:max_tokens]
    return cut_windows(stream, seq_len, num_windows, path.name, text_prefix(tokenizer))


def text_prefix(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, when the tokenizer puts one before a text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a").input_ids[:1] == [bos] else []
