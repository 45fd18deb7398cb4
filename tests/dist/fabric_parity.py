"""A loop of Fabric's that trains what :func:`tests.dist.parity.train` trains, and records it alike."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par.fabric import HybridStrategy
from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import BATCH, EPOCHS, Layout, Outcome, Recorder, Scenario, train_loader


def fabric_of(layout: Layout, **options: Any) -> Fabric:
    """A launched Fabric on this layout's ranks."""
    strategy = "auto" if layout.strategy is None else HybridStrategy(**layout.strategy)
    fabric = Fabric(accelerator="cpu", devices=layout.world_size, strategy=strategy, **options)
    fabric.launch()
    return fabric


def loss_of(module: TinyGPT, batch: Any) -> Tensor:
    """The step function."""
    return module.loss(batch)


def train_by_fabric(layout: Layout, scenario: Scenario) -> Outcome:
    """One loop for every layout; call it on every rank of it."""
    options = scenario.trainer
    window = options.get("accumulate_grad_batches", scenario.micro_batches)
    fabric = fabric_of(layout, precision=options.get("precision"))
    torch.manual_seed(0)
    module = TinyGPT(**scenario.model)
    configured = module.configure_optimizers()
    scheduler = configured["lr_scheduler"]["scheduler"]
    model, optimizer = fabric.setup(module, configured["optimizer"])
    assert optimizer.optimizer is configured["optimizer"]
    loader = fabric.setup_dataloaders(
        train_loader(layout, token_data(scenario.num_samples), BATCH // scenario.micro_batches)
    )
    recorder, outcome = Recorder(), Outcome()
    recorder.outcome = outcome
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader):
            steps = (number + 1) % window == 0 or number + 1 == len(loader)
            with fabric.no_backward_sync(model, enabled=not steps):
                loss = fabric.strategy.step(model, batch, loss_of)
                fabric.backward(loss / window)
            outcome.local_losses.append(loss.item())
            outcome.losses.append(fabric.all_reduce(loss.detach().clone()).item())
            if not steps:
                continue
            recorder.see_gradients(module, configured["optimizer"])
            outcome.clip_norms.append(_clip(fabric, model, optimizer, options))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        outcome.metrics["val_loss"] = _validate(layout, fabric, model)
    recorder.see_end(module, configured["optimizer"])
    return outcome


def _clip(fabric: Fabric, model: Any, optimizer: Any, options: Any) -> float | None:
    bound = options.get("gradient_clip_val")
    if bound is None:
        return None
    if options.get("gradient_clip_algorithm") == "value":
        fabric.clip_gradients(model, optimizer, clip_val=bound)
        return None
    return float(fabric.clip_gradients(model, optimizer, max_norm=bound))


def _validate(layout: Layout, fabric: Fabric, model: Any) -> float:
    data = DataLoader(token_data(16, seed=1), batch_size=8 // layout.data_parallel_size)
    model.eval()
    with torch.no_grad():
        losses = [fabric.strategy.step(model, batch, loss_of) for batch in fabric.setup_dataloaders(data)]
    model.train()
    return fabric.all_reduce(torch.stack(losses).mean()).item()


