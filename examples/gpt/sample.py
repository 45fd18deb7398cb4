"""Show what the model has learnt: a sample of text at the end of a fit."""

from __future__ import annotations

import lightning.pytorch as pl
import torch

__all__ = ["SampleText"]


class SampleText(pl.Callback):
    """Continue a prompt and print the result, on rank 0, when training ends.

    All ranks compute: with sharded parameters a forward is collective. The module must have
    ``generate`` as :class:`~examples.gpt.module.GPTModule` has, the data module ``encode`` and
    ``decode``.

    Args:
        prompt: the beginning of the text.
        num_tokens: how many tokens to add.
        top_k: draw from this many of the likeliest tokens; 1 is greedy.
        temperature: divides the logits before the draw.
        seed: of the draw, the same on all ranks.
    """

    def __init__(
        self,
        prompt: str = "def ",
        num_tokens: int = 200,
        top_k: int = 20,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> None:
        if not prompt:
            raise ValueError("prompt must not be empty: the model continues at least one token")
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.top_k = top_k
        self.temperature = temperature
        self.seed = seed

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Generate on all ranks, print on the first."""
        data = trainer.datamodule
        device = pl_module.device
        prompt_BT = torch.tensor([data.encode(self.prompt)], device=device)
        with trainer.precision_plugin.forward_context():
            tokens_BT = pl_module.generate(
                prompt_BT,
                self.num_tokens,
                top_k=self.top_k,
                temperature=self.temperature,
                generator=torch.Generator(device).manual_seed(self.seed),
            )
        if trainer.is_global_zero:
            print(f"\nA sample after {trainer.global_step} steps:\n")
            print(data.decode(tokens_BT[0].tolist()), flush=True)
