"""States off the device under the Trainer: overlapped or not, on host or disk, before and after a fit."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_par.offload import OffloadPolicy
from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import ALL, BATCH, SINGLE, Layout, differences, report, train_loader
from tests.dist.pieces import Pieces, assemble, piece, pieces
from tests.dist.ranks import OneProcess, RankError, Ranks

OVERLAPPED = OffloadPolicy()


def layout_with(policy: OffloadPolicy, stage: int, world_size: int, **options: Any) -> Layout:
    return Layout("", world_size, {"zero_stage": stage, "offload": policy, **options})


def unseen(layout: Layout, model: dict[str, Any], options: dict[str, Any]) -> tuple[Pieces, Pieces, list[Any]]:
    """Final weights and moments of a run in which nobody looks at gradients, and what overlapped in it."""
    torch.manual_seed(0)
    module = TinyGPT(**model)
    flags: list[Any] = []

    def look(trainer: Any, _: Any) -> None:
        if layout.strategy is not None:
            for each in trainer.strategy.engine.offload._optimizers:
                flags[:] = [each.defers, each.takes_gradients, each.steps_in_backward]

    trainer = layout.trainer(max_epochs=2, callbacks=[LambdaCallback(on_train_end=look)], **options)
    trainer.fit(module, train_loader(layout, token_data(3 * BATCH), BATCH), DataLoader(token_data(8), 4))
    names = {parameter: name for name, parameter in module.named_parameters()}
    moments = {
        f"{names[parameter]}.{key}": piece(value)
        for parameter, state in trainer.optimizers[0].state.items()
        for key, value in state.items()
    }
    return pieces(module.named_parameters()), moments, flags


CLIP = {"gradient_clip_val": 0.2}


@pytest.mark.parametrize(
    ("stage", "world_size", "parameters", "strategy", "model", "options", "overlaps"),
    [
        (1, 1, False, {}, {"tied": True}, {}, [True, True, True]),
        (2, 2, False, {"find_unused_parameters": False}, {}, {}, [True, True, True]),
        (2, 2, False, {}, {"unused": True, "frozen": True}, {}, [True, True, False]),
        (3, 2, True, {}, {}, {"accumulate_grad_batches": 2, **CLIP}, [True, True, False]),
        (1, 2, False, {}, {"tied": True}, {"precision": "bf16-mixed", **CLIP}, [True, True, False]),
    ],
)
def test_what_overlaps_equals_what_does_not_to_the_bit(
    ranks: Ranks,
    one_process: OneProcess,
    stage: int,
    world_size: int,
    parameters: bool,
    strategy: dict[str, Any],
    model: dict[str, Any],
    options: dict[str, Any],
    overlaps: list[bool],
) -> None:
    runs = []
    for overlap in (True, False):
        layout = layout_with(OffloadPolicy(overlap=overlap, parameters=parameters), stage, world_size, **strategy)
        seen = ranks(world_size, unseen, layout, model, options)
        assert all(flags == (overlaps if overlap else [False] * 3) for _, _, flags in seen)
        runs.append([assemble([one[kind] for one in seen]) for kind in (0, 1)])
    for overlapped, plain in zip(*runs, strict=True):
        assert overlapped.keys() == plain.keys()
        assert all(torch.equal(overlapped[name], plain[name]) for name in plain)
    expected = one_process(unseen, model, options)
    tolerance = 5e-2 if "precision" in options else 1e-5
    found = differences(runs[0][0], assemble([expected[0]]), tolerance)
    found |= differences(runs[0][1], assemble([expected[1]]), tolerance)
    assert not found, report(found)


class Wide(LightningModule):
    """Mostly states: 64 MiB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024)) for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed goes back to the system
    return psutil.Process(os.getpid()).memory_info().rss


def resident(policy: OffloadPolicy) -> tuple[int, dict[str, Any]]:
    """Bytes that a fit leaves resident, and where its states are."""
    layout = layout_with(policy, 1, 1)
    module, data = Wide(), DataLoader(TensorDataset(torch.randn(4, 1024)), 2)
    before = resident_bytes()
    trainer = layout.trainer(max_epochs=2)
    trainer.fit(module, data)
    module.zero_grad()
    return resident_bytes() - before, trainer.strategy.model_state_by_place()


def test_the_disk_tier_frees_memory(ranks: Ranks, tmp_path: Path) -> None:
    ((on_host, host_places),) = ranks(1, resident, OffloadPolicy())
    ((on_disk, disk_places),) = ranks(1, resident, OffloadPolicy(device="disk", path=tmp_path))
    states = disk_places["disk"]["optimizer"]
    assert states == host_places["host"]["optimizer"] >= 3 * 64 * 2**20
    assert host_places["device"]["optimizer"] == disk_places["device"]["optimizer"] == 0
    assert on_host - on_disk > 0.7 * states


def placed(layout: Layout) -> tuple[dict[str, Any], int]:
    module, data = TinyGPT(), DataLoader(token_data(8), 4)
    trainer = layout.trainer(max_epochs=1)
    trainer.fit(module, data)
    return trainer.strategy.model_state_by_place(), trainer.strategy.total_num_parameters


def test_states_are_where_the_policy_says(ranks: Ranks) -> None:
    for places, psi in ranks(2, placed, layout_with(OVERLAPPED, 3, 2)):
        assert places["device"] == {"parameters": 2 * psi, "gradients": 0, "optimizer": 0}
        assert places["host"]["optimizer"] >= 6 * psi
    for places, psi in ranks(2, placed, layout_with(OffloadPolicy(parameters=True), 3, 2)):
        assert places["device"] == {"parameters": 0, "gradients": 0, "optimizer": 0}
        assert places["host"]["parameters"] == 2 * psi
        assert 4 * psi <= places["host"]["optimizer"] < 4.5 * psi, "a parameter on the host is its own master"


def fit_twice(layout: Layout) -> list[Any]:
    """Fit, validate, fit on, save by hand and predict."""
    torch.manual_seed(0)
    module = TinyGPT()
    losses = []
    for _ in range(2):
        trainer = layout.trainer(max_epochs=1, gradient_clip_val=0.5)
        loader = train_loader(layout, token_data(3 * BATCH), BATCH)
        trainer.fit(module, loader)
        losses.append(trainer.validate(module, DataLoader(token_data(8, seed=1), 4), verbose=False)[0]["val_loss"])
    return losses


@pytest.mark.parametrize("name", ["zero1x1 optimizer off", "zero3x2 all on disk"])
def test_goes_on_after_a_fit(ranks: Ranks, one_process: OneProcess, name: str) -> None:
    expected = one_process(fit_twice)
    for losses in ranks(ALL[name].world_size, fit_twice, ALL[name]):
        assert losses == pytest.approx(expected, rel=1e-5)


class ByHand(TinyGPT):
    """Optimizes inside of its step, with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        loss = self.loss(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("train_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        head = list(self.net.head.parameters())
        rest = [p for p in self.parameters() if all(p is not own for own in head)]
        return torch.optim.AdamW(rest, lr=1e-2, eps=1e-3), torch.optim.SGD(head, lr=0.1, momentum=0.9)


def by_hand(layout: Layout) -> float:
    torch.manual_seed(0)
    trainer = layout.trainer(max_epochs=2)
    trainer.fit(ByHand(), train_loader(layout, token_data(3 * BATCH), BATCH))
    return trainer.callback_metrics["train_loss"].item()


@pytest.mark.parametrize("name", ["zero2x2 half off", "zero3x2 all on disk"])
def test_manual_optimization(ranks: Ranks, one_process: OneProcess, name: str) -> None:
    assert ranks(2, by_hand, ALL[name]) == pytest.approx([one_process(by_hand)] * 2, rel=1e-5)


def average(layout: Layout) -> list[bool]:
    """A run with a callback that looks at weights after each batch."""
    found: list[bool] = []

    def look(trainer: Any, _: Any) -> None:
        found.extend(optimizer.defers for optimizer in trainer.strategy.engine.offload._optimizers)

    callbacks = [EMAWeightAveraging(decay=0.9), LambdaCallback(on_train_end=look)]
    trainer = layout.trainer(max_epochs=1, callbacks=callbacks)
    trainer.fit(TinyGPT(), train_loader(layout, token_data(BATCH), BATCH))
    return found


def test_nothing_is_put_off_while_a_callback_looks(ranks: Ranks) -> None:
    assert ranks(1, average, ALL["zero1x1 optimizer off"]) == [[False]]


def fit_again(layout: Layout) -> list[float]:
    """One Trainer fits on: its first optimizer is gone, whoever still holds it."""
    torch.manual_seed(0)
    module = TinyGPT()
    trainer = layout.trainer(max_epochs=1)
    losses = []
    for number in (1, 2):
        trainer.fit_loop.max_epochs = number
        trainer.fit(module, train_loader(layout, token_data(3 * BATCH), BATCH))
        losses.append(trainer.callback_metrics["train_loss_epoch"].item())
        first = trainer.optimizers  # noqa: F841
    return losses


def fit_then_plainly(layout: Layout) -> float:
    """Plain Lightning trains on what was trained with another strategy, whose Trainer is still there."""
    torch.manual_seed(0)
    module, trainers = TinyGPT(), []
    for each in (layout, SINGLE):
        trainers.append(each.trainer(max_epochs=1))
        trainers[-1].fit(module, train_loader(each, token_data(3 * BATCH), BATCH))
    return trainers[-1].callback_metrics["train_loss_epoch"].item()


def clamped(layout: Layout) -> float:
    """Changes weights by hand after a step by hand."""

    class Clamped(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-0.1, 0.1)

    torch.manual_seed(0)
    trainer = layout.trainer(max_epochs=2)
    trainer.fit(Clamped(), train_loader(layout, token_data(3 * BATCH), BATCH))
    return trainer.callback_metrics["train_loss"].item()


def seen_by_a_function(layout: Layout) -> list[float]:
    """Norms of gradients that a function given to Lightning's own callback finds."""
    norms = []

    def look(trainer: Any, module: Any, optimizer: Any) -> None:
        norms.append(sum(float(p.grad.norm()) for p in module.parameters() if p.grad is not None))

    torch.manual_seed(0)
    trainer = layout.trainer(max_epochs=1, callbacks=[LambdaCallback(on_before_optimizer_step=look)])
    trainer.fit(TinyGPT(), train_loader(layout, token_data(3 * BATCH), BATCH))
    return norms


@pytest.mark.parametrize("run", [fit_again, fit_then_plainly, clamped, seen_by_a_function])
def test_overlap_gives_way_to_whoever_looks(ranks: Ranks, one_process: OneProcess, run: Any) -> None:
    (found,) = ranks(1, run, ALL["zero1x1 optimizer off"])
    assert found == pytest.approx(one_process(run), rel=1e-5)


class FactoredGPT(TinyGPT):
    """Its optimizer looks at whole rows and columns."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def factored(layout: Layout) -> float:
    torch.manual_seed(0)
    trainer = layout.trainer(max_epochs=1)
    trainer.fit(FactoredGPT(), train_loader(layout, token_data(3 * BATCH), BATCH))
    return trainer.callback_metrics["train_loss_epoch"].item()


def test_optimizers_that_look_at_whole_parameters(ranks: Ranks, one_process: OneProcess) -> None:
    alone = ALL["zero1x1 optimizer off"]
    assert ranks(1, factored, alone) == pytest.approx([one_process(factored)], rel=1e-5)
    with pytest.raises(RankError, match="Adafactor looks at whole parameters, and each rank holds only parts"):
        ranks(2, factored, ALL["zero1x2 optimizer off"])
