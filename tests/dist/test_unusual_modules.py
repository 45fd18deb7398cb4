"""Modules with parts that most do not have: scalars, experts, batch norm, a head that is replaced between fits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import LAYOUTS, SINGLE, Layout, differences, layouts, report, train_loader
from tests.dist.pieces import Pieces, assemble, pieces
from tests.dist.ranks import RankError, Ranks

LENGTH = 4


class WithTemperature(TinyGPT):
    """Scales its logits by a parameter without dimensions, and has another that one rank never uses."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.sometimes = nn.Parameter(torch.tensor(0.5))
        self.never = nn.Parameter(torch.tensor(2.0))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        index, tokens = batch
        logits = self(tokens[:, :-1]) * self.temperature
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        per_sample = losses.view(len(index), -1).mean(1)
        if 0 in index:  # one sample, so on one rank only
            per_sample = per_sample + per_sample * self.sometimes * (index == 0)
        return per_sample.mean()


def temperature_weights(layout: Layout, accumulate: int) -> Pieces:
    torch.manual_seed(0)
    module = WithTemperature()
    trainer = layout.trainer(max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    trainer.fit(module, train_loader(layout, token_data(16), 8 // accumulate))
    return pieces(module.named_parameters())


@layouts("dp2", "zero1x2", "zero3x2", "dp2xtp2", "zero3x2xtp2")
def test_parameters_without_dimensions_train_as_in_one_process(ranks: Ranks, layout: Layout) -> None:
    (expected,) = ranks(1, temperature_weights, SINGLE, 1)
    actual = assemble(ranks(layout.world_size, temperature_weights, layout, 2))
    found = differences(actual, assemble([expected]), 1e-5)
    assert not found, report(found)
    assert actual["temperature"] != 1.5
    assert actual["never"] == 2.0, "a parameter without a gradient decayed"


class Experts(LightningModule):
    """Two experts of one size, of which each data rank uses one. Steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gate = nn.Linear(LENGTH, LENGTH)
        self.experts = nn.ModuleList([nn.Linear(LENGTH, 1), nn.Linear(LENGTH, 1)])
        self.idle = nn.Linear(LENGTH, 1)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (x,) = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        hidden, chosen = self.gate(x), self.chosen(len(x))
        outputs = [expert(hidden[chosen == number]) for number, expert in enumerate(self.experts) if number in chosen]
        self.manual_backward(torch.cat(outputs).square().mean())
        optimizer.step()

    def chosen(self, num_samples: int) -> Tensor:
        """The expert of each sample: in one process the ranks' samples take turns."""
        rank = getattr(self.trainer.strategy, "data_parallel_rank", None)
        return torch.arange(num_samples) % 2 if rank is None else torch.full((num_samples,), rank)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.5)


def expert_weights(layout: Layout) -> Pieces:
    torch.manual_seed(0)
    module = Experts()
    data = TensorDataset(torch.randn(16, LENGTH, generator=torch.Generator().manual_seed(1)))
    layout.trainer(max_epochs=2).fit(module, train_loader(layout, data, 8, ranks_together=2))
    return pieces(module.named_parameters())


@layouts("dp2", "zero1x2", "zero3x2", "ps2")
def test_experts_that_only_some_ranks_use_step_by_hand(ranks: Ranks, layout: Layout) -> None:
    (expected,) = ranks(1, expert_weights, SINGLE)
    found = differences(assemble(ranks(2, expert_weights, layout)), assemble([expected]), 1e-5)
    assert not found, report(found)


class BatchNormed(LightningModule):
    """A batch norm, whose statistics each rank of a plain data axis takes from its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LENGTH, LENGTH), nn.BatchNorm1d(LENGTH))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def predict_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def predictions_with_batch_norm(layout: Layout) -> tuple[int, Tensor]:
    torch.manual_seed(0)
    module = BatchNormed()
    samples = torch.randn(16, LENGTH)
    trainer = layout.trainer(max_epochs=1)
    trainer.fit(module, DataLoader(TensorDataset(samples), 4, shuffle=True))
    # Five samples over two ranks: the first makes a step more than the second.
    batches = trainer.predict(module, DataLoader(TensorDataset(samples[:5]), 1))
    return len(batches), module.net[1].running_mean


@layouts("dp2", "zero3x2")
def test_batch_norm_predicts_data_that_does_not_divide(ranks: Ranks, layout: Layout) -> None:
    (num_first, mean_first), (num_second, mean_second) = ranks(2, predictions_with_batch_norm, layout)
    assert (num_first, num_second) == (3, 2)
    assert torch.equal(mean_first, mean_second), "the ranks evaluate with different statistics"


def synchronised_batch_norm(layout: Layout) -> None:
    layout.trainer(max_epochs=1, sync_batchnorm=True).fit(BatchNormed(), DataLoader(TensorDataset(torch.randn(8, 4))))


def test_synchronised_batch_norm_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"sync_batchnorm=True\) is not supported") as caught:
        ranks(2, synchronised_batch_norm, LAYOUTS["dp2"])
    assert {failure.rank for failure in caught.value.failures if not failure.is_secondary} == {0, 1}


def weights_after_a_new_head(layout: Layout) -> Pieces:
    torch.manual_seed(0)
    module = TinyGPT(num_blocks=1)
    trainer = layout.trainer(max_epochs=1)
    trainer.fit(module, train_loader(layout, token_data(16), 8))
    module.net.head = nn.Linear(module.net.head.in_features, module.net.head.out_features, bias=False)
    nn.init.constant_(module.net.head.weight, 0.01)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, train_loader(layout, token_data(16), 8))
    return pieces(module.named_parameters())


@layouts("zero3x2", "tp2")
def test_a_module_may_change_between_two_fits(ranks: Ranks, layout: Layout) -> None:
    (expected,) = ranks(1, weights_after_a_new_head, SINGLE)
    found = differences(assemble(ranks(2, weights_after_a_new_head, layout)), assemble([expected]), 1e-5)
    assert not found, report(found)
