"""The types of the example's own groups, ``model`` and ``data``, read off the classes' arguments."""

from __future__ import annotations

from omegaconf import OmegaConf

from examples.gpt.data import TextData
from examples.gpt.model import GPTConfig
from examples.gpt.module import GPTModule
from examples.gpt.tokenizer import DEFAULT_VOCAB_SIZES
from lightning_par.config import ConfigError, register_schemas, schema_of
from lightning_par.config.errors import nearest

__all__ = ["register"]


def register() -> None:
    """Make ``gpt/schema/model``, ``data`` and ``text`` known to Hydra, and the resolver they use."""
    register_schemas(
        {
            "model": schema_of(GPTModule, nested={"network": schema_of(GPTConfig)}),
            "data": schema_of(TextData),
            "text": schema_of(TextData, required=["path"]),
        },
        group="gpt/schema",
    )
    OmegaConf.register_new_resolver("gpt.vocab_size", _default_vocab_size, replace=True)


def _default_vocab_size(tokenizer: str) -> int:
    """``${gpt.vocab_size:bpe}``: the vocabulary a tokenizer has unless told otherwise."""
    if tokenizer not in DEFAULT_VOCAB_SIZES:
        match = nearest(tokenizer, DEFAULT_VOCAB_SIZES)
        raise ConfigError(
            f"data.tokenizer={tokenizer}: there is no such tokenizer"
            + (f". Did you mean data.tokenizer={match}?" if match else "")
            + f"\nTokenizers: {', '.join(DEFAULT_VOCAB_SIZES)}"
        )
    return DEFAULT_VOCAB_SIZES[tokenizer]
