"""Calibration text to token sequences."""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import CalibrationError

DEFAULT_TEXT = Path(__file__).with_name("default_text.txt")

MIN_SEQUENCES, MAX_SEQUENCES = 8, 24
"""How many sequences are learned from when the user does not say: as many as the text has."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CalibrationTokens:
    """Disjoint sequences of equal length.

    Attributes:
        train: int64 [num_sequences, seq_len].
        heldout: int64 [num_heldout, seq_len]; not used to learn, only to select.
        source: file name of the text, or what the caller calls it.
        seed: of the draw of the sequences, None when they were not drawn.
    """

    train: torch.Tensor
    heldout: torch.Tensor
    source: str = "tokens"
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("train", "heldout"):
            tokens = getattr(self, name)
            if tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
                raise ValueError(
                    f"{name} must be integers [num_sequences, seq_len], got {tokens.dtype} "
                    f"{tuple(tokens.shape)}"
                )
        if self.train.shape[1] != self.heldout.shape[1]:
            raise ValueError("train and held-out sequences must have the same length")

    @classmethod
    def from_sequences(
        cls, train: list[torch.Tensor], heldout: list[torch.Tensor], source: str = "tokens"
    ) -> CalibrationTokens:
        """From lists of 1-D integer tensors, all of one length."""
        if len({len(sequence) for sequence in (*train, *heldout)}) != 1:
            raise ValueError("calibration sequences must all have the same length")
        return cls(torch.stack(train).long(), torch.stack(heldout).long(), source)

    def all(self) -> torch.Tensor:
        """Train sequences, then held-out ones: [num_sequences + num_heldout, seq_len]."""
        return torch.cat([self.train, self.heldout])

    def sha256(self) -> str:
        digest = hashlib.sha256(str((tuple(self.train.shape), tuple(self.heldout.shape))).encode())
        digest.update(self.all().cpu().long().contiguous().numpy().tobytes())
        return digest.hexdigest()


def read_documents(path: Path) -> list[str | list[Message]]:
    """Documents of a file: plain strings, and chats as lists of messages.

    Plain text is one document; ``.jsonl`` has one per line, as ``{"text": …}``,
    ``{"messages": [{"role": …, "content": …}, …]}`` or ``{"prompt": …, "completion": …}``. Either
    may be compressed, with ``.xz`` after its name.

    Raises:
        CalibrationError: the file is missing, not UTF-8, or a line is not understood.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        text = data.decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{path} cannot be read as text ({error}); --data takes UTF-8 text or .jsonl, "
            "each also as .xz."
        ) from error
    name = path.with_suffix("").name if path.suffix == ".xz" else path.name
    if not name.endswith(".jsonl"):
        return [text]
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [_read_line(line, f"Line {n} of {path}") for n, line in lines]


def _read_line(line: str, where: str) -> str | list[Message]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CalibrationError(f"{where} is not JSON: {error}.") from error
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return row["text"]
        messages = row.get("messages")
        if isinstance(messages, list) and all(
            isinstance(m, dict) and "role" in m for m in messages
        ):
            return messages
        if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
            return [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
    raise CalibrationError(
        f'{where} has none of "text", "messages" or "prompt" with "completion"; give one of them.'
    )


def tokenize(tokenizer: Any, documents: list[str | list[Message]]) -> torch.Tensor:
    """All documents in one stream, separated by the end-of-text token: int64 [num_tokens]."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for document in documents:
        if not isinstance(document, str):
            if not getattr(tokenizer, "chat_template", None):
                raise CalibrationError(
                    "The data has chat messages, but this model's tokenizer has no chat template; "
                    'use rows of {"text": …} instead.'
                )
            document = tokenizer.apply_chat_template(document, tokenize=False)
        ids += tokenizer(document, add_special_tokens=False, verbose=False).input_ids + end
    return torch.tensor(ids, dtype=torch.int64)


def cut_sequences(
    stream: torch.Tensor,
    seq_len: int,
    num_sequences: int | None,
    num_heldout: int,
    seed: int,
    prefix: list[int],
    source: str,
) -> CalibrationTokens:
    """Disjoint windows of a token stream, drawn at random, each begun with `prefix`.

    Args:
        stream: int64 [num_tokens].
        seq_len: tokens per sequence, `prefix` included.
        num_sequences: sequences to learn from; None takes as many as the stream has beside the
            held-out ones, from MIN_SEQUENCES to MAX_SEQUENCES.
        num_heldout: sequences to select with.
        seed: of the choice among more windows than are needed.
        prefix: token ids that begin every sequence.
        source: name for messages.

    Raises:
        CalibrationError: the stream is too short.
    """
    body = seq_len - len(prefix)
    available = len(stream) // body
    if num_sequences is None:
        num_sequences = min(max(available - num_heldout, MIN_SEQUENCES), MAX_SEQUENCES)
    needed = num_sequences + num_heldout
    if available < needed:
        raise CalibrationError(
            f"{source} has {len(stream)} tokens, but {num_sequences} + {num_heldout} sequences of "
            f"{seq_len} need {needed * body}; give more text with --data, or smaller "
            "--num-sequences or --seq-len."
        )
    windows = stream[: available * body].view(available, body)
    chosen = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:needed]
    start = torch.tensor(prefix, dtype=torch.int64).expand(needed, -1)
    tokens = torch.cat([start, windows[chosen]], dim=1)
    return CalibrationTokens(tokens[:num_sequences], tokens[num_sequences:], source, seed)


def load_tokens(
    tokenizer: Any,
    path: str | Path | None = None,
    seq_len: int = 1024,
    num_sequences: int | None = None,
    num_heldout: int = 4,
    seed: int = 0,
) -> CalibrationTokens:
    """Sequences of a text file, or of the project's own text when `path` is None.

    Args:
        tokenizer: a transformers tokenizer. When it puts a beginning-of-text token before a
            text, every sequence begins with it.
        path: see :func:`read_documents`.
        seq_len: tokens per sequence.
        num_sequences, num_heldout: as in :func:`cut_sequences`.
        seed: of the choice among more windows than are needed.
    """
    if num_heldout < 1 or seq_len < 2 or (num_sequences is not None and num_sequences < 1):
        raise CalibrationError(
            "At least one sequence, one held-out sequence and two tokens per sequence are needed."
        )
    file = DEFAULT_TEXT if path is None else Path(path)
    stream = tokenize(tokenizer, read_documents(file))
    bos = tokenizer.bos_token_id
    starts_with_bos = bos is not None and tokenizer("a").input_ids[:1] == [bos]
    prefix = [bos] if starts_with_bos else []
    return cut_sequences(stream, seq_len, num_sequences, num_heldout, seed, prefix, file.name)
