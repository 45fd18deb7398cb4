"""The text a GPT learns from, as a LightningDataModule."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from examples.gpt.corpus import Corpus, read_corpus, standard_library
from examples.gpt.tokenizer import DEFAULT_VOCAB_SIZES, NUM_BYTES, Tokenizer
from examples.gpt.tokens import TRAIN, VALIDATION, BlockDataset, TokenFiles, default_cache_dir

__all__ = ["TextData"]


class TextData(pl.LightningDataModule):
    """Blocks of tokens from a text.

    Args:
        path: a file, or a folder whose files are read; None: this Python's own standard library.
        pattern: which files of the folder, as a glob.
        tokenizer: ``bytes``, or ``bpe`` (trained on the text; needs the ``tokenizers`` package).
        vocab_size: size of the BPE's vocabulary; 256 for bytes.
        block_size: tokens in a sample.
        batch_size: samples in a batch *of one data-parallel rank*: an optimizer step sees
            ``batch_size x data-parallel ranks x accumulate_grad_batches`` samples.
        validation_fraction: part of the files held out for validation (of a single file: its end).
        num_workers: loader processes per rank; blocks are cut out of a memory map, so 0 is fast.
        cache_dir: where token files are kept; None: ``~/.cache/lightning_par``.

    Raises:
        ValueError: if an argument makes no sense, nothing lies at ``path``, or no text does.
    """

    def __init__(
        self,
        path: str | None = None,
        pattern: str = "**/*",
        tokenizer: str = "bytes",
        vocab_size: int | None = None,
        block_size: int = 128,
        batch_size: int = 16,
        validation_fraction: float = 0.05,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer_name = tokenizer
        self.block_size = block_size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self.vocab_size = _checked_vocab_size(tokenizer, vocab_size)
        _check_sizes(block_size, batch_size, num_workers, validation_fraction)
        self.corpus = _find(path, pattern, validation_fraction)
        self.files: TokenFiles | None = None

    def prepare_data(self) -> None:
        """Tokenize the text, once per text and machine."""
        self.check()

    def setup(self, stage: str) -> None:
        """Open the token files, on every rank."""
        self.check()

    def check(self) -> TokenFiles:
        """Build or find the token files and see that each split fills a block.

        Cheap once the tokens are cached, so a program can call it before it starts processes.

        Raises:
            ValueError: if a split is too short for one sample.
        """
        if self.files is None:
            files = TokenFiles.build(self.corpus, self.tokenizer_name, self.vocab_size, self.cache_dir)
            _check_lengths(files, self.block_size, self.corpus)
            self.files = files
        return self.files

    def check_network(self, vocab_size: int, block_size: int) -> None:
        """See that a network of these sizes can read this text.

        Raises:
            ValueError: if it knows fewer tokens than the text has, or takes shorter sequences.
        """
        if vocab_size < self.vocab_size:
            raise ValueError(
                f"model.network.vocab_size={vocab_size} is less than the {self.vocab_size} tokens of "
                f"data.tokenizer={self.tokenizer_name}: set model.network.vocab_size={self.vocab_size}"
            )
        if block_size < self.block_size:
            raise ValueError(
                f"data.block_size={self.block_size} is longer than model.network.block_size={block_size}, "
                "the longest sequence the network takes: set one to the other"
            )

    def sample_batch(self) -> tuple[Tensor, Tensor]:
        """A batch of the sizes that training has, for the planner; no text is read for it."""
        tokens_BT = torch.zeros(self.batch_size, self.block_size, dtype=torch.long)
        return tokens_BT, tokens_BT

    @property
    def record(self) -> dict[str, Any]:
        """What was read: source, content hash, tokenizer, token counts, sorted documents."""
        return self.check().record

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of this text."""
        return self.check().tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        return self.tokenizer.encode(text.encode()).tolist()

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(tokens)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled blocks of the training documents."""
        return self._loader(TRAIN, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Blocks of the held-out documents, in order."""
        return self._loader(VALIDATION, shuffle=False)

    def _loader(self, split: str, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            BlockDataset(self.check(), split, self.block_size),
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def _find(path: str | None, pattern: str, validation_fraction: float) -> Corpus:
    if path is None:
        return standard_library(validation_fraction)
    return read_corpus(path, pattern, validation_fraction)


def _checked_vocab_size(tokenizer: str, vocab_size: int | None) -> int:
    if tokenizer not in DEFAULT_VOCAB_SIZES:
        known = ", ".join(DEFAULT_VOCAB_SIZES)
        raise ValueError(f"data.tokenizer={tokenizer!r} must be one of {known}")
    size = DEFAULT_VOCAB_SIZES[tokenizer] if vocab_size is None else vocab_size
    if tokenizer == "bytes" and size != NUM_BYTES:
        raise ValueError(
            f"data.vocab_size={size}: the bytes tokenizer has {NUM_BYTES} tokens, no more, no less; "
            "leave data.vocab_size out, or take data.tokenizer=bpe"
        )
    if size < NUM_BYTES:
        raise ValueError(
            f"data.vocab_size={size}: a byte-level BPE starts from the {NUM_BYTES} bytes, "
            f"so its vocabulary needs {NUM_BYTES} or more"
        )
    return size


def _check_sizes(block_size: int, batch_size: int, num_workers: int, fraction: float) -> None:
    for name, value, least in (
        ("block_size", block_size, 1),
        ("batch_size", batch_size, 1),
        ("num_workers", num_workers, 0),
    ):
        if value < least:
            raise ValueError(f"data.{name}={value} must be at least {least}")
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"data.validation_fraction={fraction} must lie between 0 and 1")


def _check_lengths(files: TokenFiles, block_size: int, corpus: Corpus) -> None:
    for split in (TRAIN, VALIDATION):
        found, needed = files.num_tokens(split), block_size + 1
        if found < needed:
            raise ValueError(
                f"the {split} part of {corpus.source!r} has {found} tokens, but a sample of "
                f"data.block_size={block_size} needs {needed}: give more text, a smaller "
                "data.block_size, or another data.validation_fraction"
            )
