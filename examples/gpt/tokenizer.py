"""From bytes to token ids and back: the bytes themselves, or a byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

__all__ = ["DEFAULT_VOCAB_SIZES", "BPETokenizer", "ByteTokenizer", "Tokenizer"]

NUM_BYTES = 256
DEFAULT_VOCAB_SIZES = {"bytes": NUM_BYTES, "bpe": 4096}
"""The known tokenizers, and the vocabulary each has unless told otherwise."""

_BPE_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """What the data module needs of a tokenizer."""

    vocab_size: int

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of ``text``, one-dimensional, in the smallest unsigned type that holds them."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of token ids; what is no valid UTF-8 becomes U+FFFD."""
        ...

    def save(self, folder: Path) -> None:
        """Write what ``load`` needs."""
        ...


class ByteTokenizer:
    """Every byte is a token: no training, no file, nothing that cannot be spelt."""

    vocab_size = NUM_BYTES

    def encode(self, text: bytes) -> np.ndarray:
        """The bytes as ``uint8``."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of these bytes."""
        return bytes(tokens).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing to keep."""


class BPETokenizer:
    """Byte-level byte-pair encoding, trained by the ``tokenizers`` package."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()
        self._dtype = np.uint16 if self.vocab_size <= np.iinfo(np.uint16).max + 1 else np.uint32

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> BPETokenizer:
        """Learn at most ``vocab_size`` tokens; fewer if the text has no more pairs to merge."""
        trained = _tokenizers().ByteLevelBPETokenizer()
        trained.train_from_iterator(
            (text.decode("utf-8", errors="replace") for text in texts),
            vocab_size=vocab_size,
            show_progress=False,
        )
        return cls(_tokenizers().Tokenizer.from_str(trained.to_str()))

    @classmethod
    def load(cls, folder: Path) -> BPETokenizer:
        """Read what ``save`` wrote."""
        return cls(_tokenizers().Tokenizer.from_file(str(folder / _BPE_FILE)))

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens as ``uint16``, or ``uint32`` for a vocabulary beyond 65,536."""
        ids = self._tokenizer.encode(text.decode("utf-8", errors="replace")).ids
        return np.asarray(ids, dtype=self._dtype)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of these tokens; ids beyond the vocabulary are left out."""
        return self._tokenizer.decode([token for token in tokens if token < self.vocab_size])

    def save(self, folder: Path) -> None:
        """Write the vocabulary and the merges."""
        self._tokenizer.save(str(folder / _BPE_FILE))


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ValueError(
            "data.tokenizer=bpe needs the tokenizers package: pip install tokenizers, or take data.tokenizer=bytes"
        ) from error
    return tokenizers
