"""What a loop of Fabric's meets beside training: set-up, checkpoints, collectives and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from tests.dist.fabric_parity import fabric_of, loss_of
from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import ALL, BATCH, SINGLE, Layout, Outcome, Recorder, differences, report, tensors
from tests.dist.ranks import OneProcess, Ranks
from tests.dist.test_parity import CLIP

STEPS = 3
"""Optimizer steps of each of the three runs, all on one batch."""
ROUND_TRIPS = [
    ("dp2", "zero3x2", "tp2"),
    ("zero3x2xtp2", "pp2", "zero1x2"),
    ("pp2xdp2", "dp2xtp2", "pp2 interleaved_1f1b"),
    ("single", "pp2xzero3x2", "single"),
    ("zero2x2", "ps4", "single"),
    ("tp2", "zero1x2 optimizer off", "dp2"),
]
MODEL = {"num_blocks": 4, "tied": True}


def data_of(layout: Layout) -> DataLoader[Any]:
    """One global batch an epoch, whatever the order of its samples."""
    return DataLoader(token_data(BATCH), BATCH // layout.data_parallel_size)


def fit(layout: Layout, epochs: int, save_to: str | None = None, resume_from: str | None = None) -> Outcome:
    """By the Trainer: steps on one batch, from a checkpoint or to one."""
    torch.manual_seed(0 if resume_from is None else 1)  # a resumed run must not profit from equal initial weights
    recorder = Recorder()
    trainer = layout.trainer(max_epochs=epochs, callbacks=[recorder], **CLIP)
    trainer.fit(TinyGPT(**MODEL), data_of(layout), ckpt_path=resume_from)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return recorder.outcome


def go_on_by_fabric(layout: Layout, resume_from: str, save_to: str) -> dict[str, Any]:
    """Steps on the same batch between two checkpoints; what the first had that was not asked for."""
    fabric = fabric_of(layout)
    torch.manual_seed(2)
    module = TinyGPT(**MODEL)
    configured = module.configure_optimizers()
    scheduler = configured["lr_scheduler"]["scheduler"]
    model, optimizer = fabric.setup(module, configured["optimizer"])
    state = {"net": model, "adam": optimizer, "warmup": scheduler}
    rest = fabric.load(resume_from, state)
    (batch,) = fabric.setup_dataloaders(data_of(layout))
    for _ in range(STEPS):
        fabric.backward(fabric.strategy.step(model, batch, loss_of))
        fabric.clip_gradients(model, optimizer, max_norm=CLIP["gradient_clip_val"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    fabric.save(save_to, {**state, "note": "by Fabric"})
    fabric.load(save_to, state)  # its own file, too
    assert fabric.load(save_to, {**state, "note": None}) == {}
    return {key: rest[key] for key in ("epoch", "global_step")}


@pytest.mark.parametrize(("first", "second", "third"), ROUND_TRIPS, ids=lambda name: name)
def test_trainer_to_fabric_to_trainer(
    ranks: Ranks, one_process: OneProcess, tmp_path: Path, first: str, second: str, third: str
) -> None:
    one, two, three = ({**ALL, "single": SINGLE}[name] for name in (first, second, third))
    a, b = str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")
    ranks(one.world_size, fit, one, STEPS, save_to=a)
    rests = ranks(two.world_size, go_on_by_fabric, two, a, b)
    assert rests[0] == {"epoch": STEPS, "global_step": STEPS}
    ends = ranks(three.world_size, fit, three, STEPS, resume_from=b)
    found = differences(_final(ends), _final([one_process(fit, 3 * STEPS)]), 1e-5)
    assert not found, report(found)
    # Plain torch reads it: under the loop's keys and the Trainer's, which share their tensors.
    content = torch.load(b, weights_only=True)
    assert list(content["state_dict"]) == list(TinyGPT(**MODEL).state_dict()) == list(content["net"])
    weight = "net.tokens.weight"
    assert content["state_dict"][weight].data_ptr() == content["net"][weight].data_ptr()
    assert content["note"] == "by Fabric"


def _final(outcomes: list[Outcome]) -> dict[str, Any]:
    return {name: value for name, value in tensors(outcomes).items() if name.startswith(("weight", "moment"))}


def set_up_in_every_way(layout: Layout) -> dict[str, Any]:
    """Losses after one step: by joint set-up, by one with state from before, and by separate set-up."""
    data = token_data(BATCH)[:]
    losses: dict[str, Any] = {}
    for way in ("joint", "stepped before", "separate"):
        fabric = fabric_of(layout)
        torch.manual_seed(0)
        module = TinyGPT(num_blocks=4)
        configured = module.configure_optimizers()
        optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        if way == "stepped before":
            module.loss(data).backward()
            optimizer.step()
            optimizer.zero_grad()
        groups = list(optimizer.param_groups)
        if way == "separate":
            model = fabric.setup_module(module)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
            wrapped = fabric.setup_optimizers(optimizer)
        else:
            model, wrapped = fabric.setup(module, optimizer)
            assert all(now is before for now, before in zip(optimizer.param_groups, groups, strict=True)) or (
                way == "stepped before"
            )
        assert wrapped.optimizer is optimizer
        rate = optimizer.param_groups[0]["lr"]
        for _ in range(2):
            fabric.backward(fabric.strategy.step(model, data, loss_of))
            wrapped.step()
            scheduler.step()
            wrapped.zero_grad()
        if way != "separate":
            assert optimizer.param_groups[0]["lr"] > rate  # the scheduler made before drives it
        losses[way] = fabric.strategy.step(model, data, loss_of).item()
    return losses


def set_up_in_one_process(layout: Layout) -> dict[str, Any]:
    """The same without Fabric."""
    data = token_data(BATCH)[:]
    losses = {}
    for way in ("joint", "stepped before", "separate"):
        torch.manual_seed(0)
        module = TinyGPT(num_blocks=4)
        configured = module.configure_optimizers()
        optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        if way == "stepped before":
            module.loss(data).backward()
            optimizer.step()
            optimizer.zero_grad()
        if way == "separate":
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(2):
            module.loss(data).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses[way] = module.loss(data).item()
    return losses


@pytest.mark.parametrize("name", ["dp2", "zero3x2", "zero2x2xtp2"])
def test_set_up_in_every_way(ranks: Ranks, one_process: OneProcess, name: str) -> None:
    expected = one_process(set_up_in_one_process)
    for losses in ranks(ALL[name].world_size, set_up_in_every_way, ALL[name]):
        assert losses == pytest.approx(expected, rel=1e-5)


def accumulate_without_switch(layout: Layout) -> tuple[Outcome, list[str]]:
    """Two backwards before a step, each with its own factor, and none of them told to skip a reduction."""
    fabric = fabric_of(layout)
    torch.manual_seed(0)
    module = TinyGPT(**MODEL)
    optimizer = module.configure_optimizers()["optimizer"]
    model, _ = fabric.setup(module, optimizer)
    recorder = Recorder()
    size, rank = layout.data_parallel_size, 0 if layout.strategy is None else fabric.strategy.data_parallel_rank
    index, tokens = token_data(BATCH)[:]
    for factor, part in ((0.25, slice(0, 8)), (0.75, slice(8, 16))):
        batch = index[part][rank::size], tokens[part][rank::size]
        if layout.strategy is None:
            fabric.backward(model.loss(batch) * factor)
        else:
            fabric.backward(fabric.strategy.step(model, batch, loss_of) * factor)
    recorder.see_gradients(module, optimizer)
    return recorder.outcome, _complaints_about_windows(fabric, model, batch)


def _complaints_about_windows(fabric: Fabric, model: Any, batch: Any) -> list[str]:
    """What is said of one window whose losses have different factors, or of which one is dropped."""
    complaints = []
    for factors in ((0.25, 0.5), (None, 0.5)):
        try:
            for factor in factors:
                with fabric.no_backward_sync(model, enabled=factor != 0.5):
                    loss = fabric.strategy.step(model, batch, loss_of)
                    if factor is not None:
                        fabric.backward(loss * factor)
        except (RuntimeError, ValueError, AttributeError) as error:
            complaints.append(str(error))
    return complaints


@pytest.mark.parametrize("name", ["zero2x2", "ps2", "pp2", "pp2xzero3x2", "pp2xdp2"])
def test_accumulates_without_the_switch(ranks: Ranks, name: str) -> None:
    layout = ALL[name]
    outcomes, complaints = zip(*ranks(layout.world_size, accumulate_without_switch, layout), strict=True)
    ((expected, _),) = ranks(1, accumulate_without_switch, SINGLE)
    found = differences(_gradients(list(outcomes)), _gradients([expected]), 1e-5)
    assert not found, report(found)
    if name == "pp2xdp2":  # the only one of these whose windows are reduced at once, with one factor
        differing, dropped = complaints[0]
        assert "multiplied by [0.25, 0.5]" in differing
        assert "was not given to fabric.backward" in dropped
    else:
        assert complaints[0] == []


def _gradients(outcomes: list[Outcome]) -> dict[str, Any]:
    return {name: value for name, value in tensors(outcomes).items() if name.startswith("gradient")}


def call_plainly(layout: Layout) -> tuple[Tensor, Tensor, float]:
    """Logits of a plain call in evaluation, in inference mode too, and the loss of one more step after it."""
    fabric = fabric_of(layout)
    torch.manual_seed(0)
    model = fabric.setup(TinyGPT(num_blocks=4))
    index, tokens = token_data(BATCH)[:]
    model.eval()
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    with torch.inference_mode():
        again = model(tokens[:, :-1])
    model.train()
    if layout.pipeline_parallel_size > 1:
        loss = fabric.strategy.step(model, (index, tokens), lambda module, batch: {"loss": loss_of(module, batch)})
        fabric.backward(loss["loss"])
        return logits, again.clone(), loss["loss"].item()
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    fabric.backward(loss)
    return logits, again.clone(), loss.item()


@pytest.mark.parametrize("name", ["zero3x2", "tp2", "pp2 zbv"])
def test_plain_calls(ranks: Ranks, one_process: OneProcess, name: str) -> None:
    expected = one_process(call_plainly)
    for outcome in ranks(2, call_plainly, ALL[name]):
        for actual, wanted in zip(outcome, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def talk(layout: Layout, folder: str) -> dict[str, Any]:
    """Collectives of Fabric's, by names and values of this rank."""
    fabric = fabric_of(layout)
    value = torch.tensor(float(fabric.strategy.data_parallel_rank + 1))
    with fabric.rank_zero_first():
        is_first = not any(Path(folder).iterdir())
        Path(folder, str(fabric.global_rank)).touch()
    result = {
        "mean": fabric.all_reduce(value.clone()).item(),
        "sum": fabric.all_reduce(value.clone(), reduce_op="sum").item(),
        "gathered": fabric.all_gather(value).tolist(),
        "told": fabric.broadcast(fabric.global_rank, src=1),
        "first": is_first,
        "integers": fabric.all_reduce(torch.tensor(fabric.strategy.data_parallel_rank)).item(),
    }
    changed = value.clone()
    fabric.all_reduce(changed, reduce_op="sum")
    result["in place"] = changed.item()
    return result


def test_collectives_count_a_batch_once(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(4, talk, ALL["dp2xtp2"], str(tmp_path))
    assert [result.pop("first") for result in results] == [True, False, False, False]
    same = {"mean": 1.5, "sum": 3.0, "gathered": [1.0, 2.0], "told": 1, "integers": 0.5, "in place": 3.0}
    assert results == [same] * 4


def mistakes(layout: Layout) -> dict[str, str]:
    """What is said of each mistake that this layout knows."""
    fabric = fabric_of(layout)
    said: dict[str, str] = {}

    def attempt(name: str, action: Any) -> None:
        try:
            action()
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    module = TinyGPT(num_blocks=4)
    batch = token_data(BATCH)[:]
    attempt("no module", lambda: fabric.backward(torch.zeros((), requires_grad=True)))
    attempt("not set up", lambda: fabric.strategy.step(module, batch, loss_of))
    early = torch.optim.AdamW(module.parameters())
    stranger = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    attempt("another's parameter", lambda: fabric.setup(module, stranger))
    model = fabric.setup_module(module)
    attempt("optimizer from before", lambda: fabric.setup_optimizers(early))
    attempt("set up again", lambda: fabric.setup(module, torch.optim.AdamW(module.parameters())))
    attempt("plain backward", lambda: fabric.strategy.step(model, batch, loss_of).backward())
    attempt("plain call", lambda: model(batch[1][:, :-1]).sum().backward())
    attempt("outer module", lambda: fabric.strategy.step(model, batch, lambda _, batch: model(batch[1]).sum()))
    attempt("no loss", lambda: fabric.strategy.step(model, batch, lambda module, batch: module(batch[1][:, :-1])))
    attempt("unset module", lambda: fabric.clip_gradients(TinyGPT(), early, max_norm=1.0))
    return said


@pytest.mark.parametrize("name", ["zero3x2", "pp2"])
def test_mistakes_are_told_in_words(ranks: Ranks, name: str) -> None:
    is_piped = name == "pp2"
    words = {
        "no module": "fabric.backward was called before a module was set up. Call model, optimizer = fabric.setup",
        "not set up": "fabric.strategy.step was given TinyGPT, which is not set up",
        "another's parameter": "AdamW has a parameter of shape (3,) in group 0 that is not one of TinyGPT's",
        "optimizer from before": "set up both together by model, optimizer = fabric.setup"
        if is_piped
        else "Set up both together by model, optimizer = fabric.setup",
        "set up again": "This module was set up before",
        "plain backward": "Call fabric.backward(loss)",
        "plain call": "Under a pipeline a plain call of the module can't be trained. Call loss = fabric.strategy.step("
        if is_piped
        else "requires you to call `fabric.backward(loss)`",
        "outer module": "step_fn called the module that fabric.setup returned. Let it call the module that it is given",
        "no loss": "a tensor of one element",
        "unset module": "fabric.clip_gradients was given TinyGPT, which is not set up",
    }
    for said in ranks(2, mistakes, ALL[name]):
        missing = {what: said[what] for what, text in words.items() if text not in said[what]}
        assert not missing
