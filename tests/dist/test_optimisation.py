"""Gradients, optimizers and schedules under every layout: what is skipped, and what steps."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.dist.models import WIDTH, TinyGPT, token_data
from tests.dist.parity import Layout, differences, layouts, report, train_loader
from tests.dist.pieces import Pieces, assemble, pieces
from tests.dist.ranks import OneProcess, RankError, Ranks

Sample = tuple[Tensor, ...]


def loader(layout: Layout, num_samples: int, global_batch: int) -> DataLoader[Sample]:
    return train_loader(layout, token_data(num_samples), global_batch)


# Steps that do not happen


class NoLoss(TinyGPT):
    """Finds nothing to learn in the second batch."""

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def fit_without_loss(layout: Layout) -> None:
    layout.trainer(max_epochs=1).fit(NoLoss(num_blocks=1), loader(layout, 16, 4))


@layouts("dp2", "zero1x2", "zero3x2", "tp2")
def test_no_loss_is_one_clear_error_on_all_ranks(ranks: Ranks, layout: Layout) -> None:
    with pytest.raises(RankError) as caught:
        ranks(layout.world_size, fit_without_loss, layout)
    failures = caught.value.failures
    assert len(failures) == layout.world_size
    (headline,) = {failure.headline for failure in failures}
    assert "None" in headline


class Overflow(Callback):
    """Puts an infinity into one gradient of the last rank at the second step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.weights: list[Pieces] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last = trainer.global_rank == trainer.world_size - 1
        # Skipped steps count, too, but not as global steps.
        if last and len(self.scales) == 1:
            gradient = pl_module.net.blocks[0].up.weight.grad
            part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            part.view(-1)[0] = math.inf

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        self.weights.append(pieces(pl_module.named_parameters()))


def overflow_once(layout: Layout) -> tuple[list[float], list[Pieces]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
    overflow = Overflow()
    trainer = layout.trainer(
        max_epochs=1,
        callbacks=[overflow],
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        gradient_clip_val=1.0,
    )
    torch.manual_seed(0)
    trainer.fit(TinyGPT(num_blocks=1), loader(layout, 32, 8))
    return overflow.scales, overflow.weights


@layouts("dp2", "zero3x2", "tp2", "zero3x2xtp2")
def test_an_overflow_on_one_rank_is_skipped_on_all(ranks: Ranks, layout: Layout) -> None:
    scales, parts = zip(*ranks(layout.world_size, overflow_once, layout), strict=True)
    assert set(map(tuple, scales)) == {(2.0**8, 2.0**7, 2.0**7, 2.0**7)}
    first, second, third, fourth = (assemble(step) for step in zip(*parts, strict=True))
    assert not differences(second, first, 0.0)
    for before, after in ((second, third), (third, fourth)):
        assert differences(after, before, 0.0).keys() == before.keys()
        assert all(weight.isfinite().all() for weight in after.values())


# Several optimizers, and schedules


class Perceptron(nn.Module):
    """Two layers, which a plan can split."""

    def __init__(self, num_out: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Adversaries(LightningModule):
    """A generator and a critic, each with its own optimizer, schedule and turn."""

    tp_plan = {"*.up": "colwise", "*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Perceptron(WIDTH)
        self.critic = Perceptron(1)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        for turn, loss_of in enumerate((self.generator_loss, self.critic_loss)):
            optimizer, schedule = self.optimizers()[turn], self.lr_schedulers()[turn]
            self.toggle_optimizer(optimizer)
            loss = loss_of(real)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            schedule.step()
            self.untoggle_optimizer(optimizer)
            self.log(f"loss_{turn}", loss, sync_dist=True)

    def generator_loss(self, real: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.generator(real.flip(-1)))).mean()

    def critic_loss(self, real: Tensor) -> Tensor:
        fake = self.generator(real.flip(-1)).detach()
        return (F.softplus(self.critic(fake)) + F.softplus(-self.critic(real))).mean()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.AdamW(self.generator.parameters(), lr=1e-2, eps=1e-3),
            torch.optim.SGD(self.critic.parameters(), lr=1e-1, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]


class Losses(Callback):
    """Keeps the two losses of each step, and the weights at the end."""

    def __init__(self) -> None:
        self.losses: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name in ("loss_0", "loss_1"):
            self.losses[f"{name} of step {batch_idx}"] = trainer.callback_metrics[name].item()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = pieces(pl_module.named_parameters())


def fit_adversaries(layout: Layout) -> tuple[dict[str, float], Pieces]:
    torch.manual_seed(0)
    losses = Losses()
    data = torch.utils.data.TensorDataset(torch.randn(40, WIDTH))
    module = Adversaries()
    trainer = layout.trainer(max_epochs=1, callbacks=[losses])
    trainer.fit(module, train_loader(layout, data, 8))
    assert trainer.global_step == 2 * 5
    return losses.losses, losses.weights


@layouts("dp2", "zero2x2", "zero3x2", "zero3x2xtp2")
def test_two_optimizers_with_manual_steps_equal_one_process(
    ranks: Ranks, one_process: OneProcess, layout: Layout
) -> None:
    losses, weights = one_process(fit_adversaries)
    results = ranks(layout.world_size, fit_adversaries, layout)
    for rank_losses, _ in results:
        assert rank_losses == pytest.approx(losses, rel=1e-5)
    found = differences(assemble([parts for _, parts in results]), assemble([weights]), 1e-5)
    assert not found, report(found)


class Plateau(TinyGPT):
    """Lowers its learning rate when the validation loss does not fall, as with this rate."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=2.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Rates(Callback):
    """Keeps the rate of each step, and checks that the schedule drives the optimizer that steps."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        assert trainer.lr_scheduler_configs[0].scheduler.optimizer is optimizer
        self.rates.append(optimizer.param_groups[0]["lr"])


def rates_on_plateau(layout: Layout) -> list[float]:
    torch.manual_seed(0)
    rates = Rates()
    trainer = layout.trainer(max_epochs=5, callbacks=[rates])
    val_loader = DataLoader(token_data(8, seed=1), batch_size=8 // layout.data_parallel_size)
    trainer.fit(Plateau(num_blocks=1), loader(layout, 8, 8), val_loader)
    return rates.rates


@layouts("dp2", "zero3x2", "tp2", "dp2xtp2")
def test_a_plateau_schedule_follows_the_metric_of_one_process(
    ranks: Ranks, one_process: OneProcess, layout: Layout
) -> None:
    expected = one_process(rates_on_plateau)
    assert len(set(expected)) > 1
    for actual in ranks(layout.world_size, rates_on_plateau, layout):
        assert actual == pytest.approx(expected)


# Gradients that only some ranks have


class SometimesUsed(TinyGPT):
    """Passes through an extra layer only when the batch holds a certain sample."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Sample) -> Tensor:
        index, tokens = batch
        loss = super().loss((index, tokens))
        share = (index == 0).float().mean()
        if share > 0:
            loss = loss + share * self.extra(self.net.positions.weight[:1]).square().mean()
        return loss


class Weights(Callback):
    """Keeps this rank's part of the trained weights."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = pieces(pl_module.named_parameters())


def fit_sometimes_used(layout: Layout) -> Pieces:
    torch.manual_seed(0)
    keep = Weights()
    trainer = layout.trainer(max_epochs=1, callbacks=[keep])
    trainer.fit(SometimesUsed(), loader(layout, 16, 8))
    return keep.weights


@layouts("dp2", "zero1x2", "zero2x2", "zero3x2", "dp2xtp2")
def test_a_parameter_that_one_replica_uses_is_trained_as_in_one_process(
    ranks: Ranks, one_process: OneProcess, layout: Layout
) -> None:
    expected = assemble([one_process(fit_sometimes_used)])
    actual = assemble(ranks(layout.world_size, fit_sometimes_used, layout))
    found = differences(actual, expected, 1e-5)
    assert not found, report(found)


# What a hook may ask for


class KeepNorms(Callback):
    """Asks for the norm of all gradients before each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        own = [p.grad for p in pl_module.parameters() if p.grad is not None]
        ask = getattr(trainer.strategy, "gradient_norm", None)
        self.norms.append(float(torch.nn.utils.get_total_norm(own) if ask is None else ask()))


def norms_of(layout: Layout) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    keep = KeepNorms()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layout.trainer(max_epochs=1, callbacks=[keep]).fit(TinyGPT(num_blocks=2, tied=True), loader(layout, 48, 16))
    return keep.norms, [str(one.message) for one in caught if "own stages" in str(one.message)]


@layouts("dp2", "zero3x2", "tp2", "pp2", "zero2x2 half off", "zero3x2xtp2")
def test_the_gradient_norm_that_a_hook_asks_for(ranks: Ranks, one_process: OneProcess, layout: Layout) -> None:
    expected, _ = one_process(norms_of)
    found = ranks(layout.world_size, norms_of, layout)
    assert [norms for norms, _ in found] == [pytest.approx(expected, rel=1e-5)] * layout.world_size
    (told, *_) = [words for _, words in found]
    if layout.pipeline_parallel_size > 1:
        assert len(told) == 1
        assert "KeepNorms.on_before_optimizer_step may look at gradients" in told[0]
    else:
        assert told == []
