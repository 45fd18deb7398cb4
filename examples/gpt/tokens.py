"""Token files on disk: built once per text, memory-mapped by every run and every rank."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from examples.gpt.corpus import Corpus
from examples.gpt.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer

__all__ = ["BlockDataset", "TokenFiles", "default_cache_dir"]

TRAIN, VALIDATION = "train", "validation"
_RECORD_FILE = "corpus.json"
_FORMAT = 1  # raise it when the files' layout changes, so that old ones are built anew


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/lightning_par``, or ``~/.cache/lightning_par``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_par"


class TokenFiles:
    """A folder with one file of tokens per split, the tokenizer, and a record of what went in.

    The folder's name is the hash of the text and of the settings, so a changed text gets another
    folder. It is filled under a temporary name and renamed when complete: a reader never sees half
    of it, and of several writers the first one wins.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def build(cls, corpus: Corpus, tokenizer: str, vocab_size: int, cache_dir: Path) -> TokenFiles:
        """Tokenize ``corpus`` unless that was done before."""
        digest = corpus.digest(_FORMAT, tokenizer, vocab_size)
        files = cls(cache_dir / digest[:32])
        if not files.complete:
            cache_dir.mkdir(parents=True, exist_ok=True)
            _publish(files, lambda folder: _write(folder, corpus, digest, tokenizer, vocab_size))
        return files

    @property
    def complete(self) -> bool:
        """Whether all files are there, at full length."""
        try:
            lengths = {split: self.path(split).stat().st_size for split in (TRAIN, VALIDATION)}
            return lengths == {split: self.num_tokens(split) * self.dtype.itemsize for split in lengths}
        except (OSError, ValueError, KeyError):
            return False

    @cached_property
    def record(self) -> dict[str, Any]:
        """Source, hash, tokenizer, token counts, and the sorted list of documents."""
        return json.loads((self.folder / _RECORD_FILE).read_text())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token on disk."""
        return np.dtype(self.record["dtype"])

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made these tokens."""
        bpe = self.record["tokenizer"] == "bpe"
        return BPETokenizer.load(self.folder) if bpe else ByteTokenizer()

    def path(self, split: str) -> Path:
        """The file with the tokens of ``split``."""
        return self.folder / f"{split}.bin"

    def num_tokens(self, split: str) -> int:
        """Number of tokens in ``split``."""
        return self.record["num_tokens"][split]


class BlockDataset(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive blocks of a token file that do not overlap, each with the tokens that follow.

    Item ``i`` is ``(x_T, y_T)``: int64 tensors of shape ``[block_size]``, ``y`` being ``x`` one
    token later. What is left at the end and fills no block is not used.
    """

    def __init__(self, files: TokenFiles, split: str, block_size: int) -> None:
        self.files = files
        self.split = split
        self.block_size = block_size

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a loader's worker process without the mapped tokens."""
        return BlockDataset, (self.files, self.split, self.block_size)

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.memmap(self.files.path(self.split), dtype=self.files.dtype, mode="r")

    def __len__(self) -> int:
        return (self.files.num_tokens(self.split) - 1) // self.block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.block_size
        window = self._tokens[start : start + self.block_size + 1].astype(np.int64)
        tokens = torch.from_numpy(window)
        return tokens[:-1], tokens[1:]


def _publish(files: TokenFiles, write: Callable[[Path], None]) -> None:
    """Fill a folder beside the final one, then rename it: the last step, and an atomic one."""
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=files.folder.parent))
    try:
        write(scratch)
        scratch.chmod(0o755)
        if files.folder.exists() and not TokenFiles(files.folder).complete:
            shutil.rmtree(files.folder, ignore_errors=True)  # damaged
        try:
            scratch.replace(files.folder)
        except OSError:
            if not TokenFiles(files.folder).complete:  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(folder: Path, corpus: Corpus, digest: str, tokenizer: str, vocab_size: int) -> None:
    encoder: Tokenizer = ByteTokenizer()
    if tokenizer == "bpe":
        texts = (document.read() for document in corpus.documents if not document.held_out)
        encoder = BPETokenizer.train(texts, vocab_size)
    encoder.save(folder)
    end_of_document = encoder.encode(b"\n")
    counts = {TRAIN: 0, VALIDATION: 0}
    with (folder / f"{TRAIN}.bin").open("wb") as train, (folder / f"{VALIDATION}.bin").open("wb") as validation:
        for document in corpus.documents:
            tokens = encoder.encode(document.read())
            split, file = (VALIDATION, validation) if document.held_out else (TRAIN, train)
            for part in (tokens, end_of_document):
                file.write(part.tobytes())
                counts[split] += part.size
    record = {
        "source": corpus.source,
        "sha256": digest,
        "tokenizer": tokenizer,
        "vocab_size": encoder.vocab_size,
        "dtype": end_of_document.dtype.name,
        "num_tokens": counts,
        "documents": [{"name": document.name, "held_out": document.held_out} for document in corpus.documents],
    }
    (folder / _RECORD_FILE).write_text(json.dumps(record, indent=1))
