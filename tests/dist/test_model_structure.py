"""Modules as users write them: frozen, built late, compiled, in any precision."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from tests.dist.models import GPT, TinyGPT, token_data
from tests.dist.parity import LAYOUTS, Layout, differences, layouts, report, train_loader
from tests.dist.pieces import Pieces, Weights, assemble, pieces
from tests.dist.ranks import OneProcess, RankError, Ranks

EVERY_KIND = ("dp2", "zero2x2", "zero3x2", "tp2", "zero3_hsdp2x2", "dp2xtp2", "zero3x2xtp2")


def loader(layout: Layout) -> DataLoader[Any]:
    return train_loader(layout, token_data(24), 8)


def val_loader(layout: Layout) -> DataLoader[Any]:
    return DataLoader(token_data(16, seed=1), batch_size=8 // layout.data_parallel_size)


class Snapshots(Callback):
    """This rank's part of the weights before and after training."""

    def __init__(self) -> None:
        self.before: Pieces = {}
        self.after: Pieces = {}
        self.trainable: set[str] = set()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = pieces(pl_module.named_parameters())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after = pieces(pl_module.named_parameters())
        parameters = pl_module.named_parameters()
        self.trainable = {name for name, parameter in parameters if parameter.requires_grad}


def fit(layout: Layout, module: LightningModule, **options: Any) -> Snapshots:
    snapshots = Snapshots()
    trainer = layout.trainer(max_epochs=1, callbacks=[snapshots], **options)
    trainer.fit(module, loader(layout))
    return snapshots


# Frozen


class FrozenBlock(TinyGPT):
    """A whole block without anything to train, and half of the rest."""

    def __init__(self) -> None:
        super().__init__(frozen=True)
        self.net.blocks[1].requires_grad_(False)


def fit_frozen(layout: Layout) -> tuple[Pieces, Pieces, set[str]]:
    torch.manual_seed(0)
    snapshots = fit(layout, FrozenBlock())
    return snapshots.before, snapshots.after, snapshots.trainable


@layouts("zero3x2", "dp2xtp2")
def test_frozen_parameters_keep_every_bit_and_stay_frozen(
    ranks: Ranks, one_process: OneProcess, layout: Layout
) -> None:
    _, expected, trainable = one_process(fit_frozen)
    befores, afters, still_trainable = zip(*ranks(layout.world_size, fit_frozen, layout), strict=True)
    assert all(names == trainable for names in still_trainable)
    before, after = assemble(befores), assemble(afters)
    assert differences(after, before, 0.0).keys() == trainable
    found = differences(after, assemble([expected]), 1e-5)
    assert not found, report(found)


# Initial weights


class BuiltLate(TinyGPT):
    """Builds its network in `configure_model`, where the Trainer asks for it, on any device."""

    def __init__(self, device: str) -> None:
        super().__init__(num_blocks=1)
        self._device_name = device
        self.times_built = 0
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.times_built += 1
            with torch.device(self._device_name):
                self.net = GPT(num_blocks=2)


def initial_weights(layout: Layout, how: str) -> Pieces:
    """The weights at the start of a fit; each rank has another seed, the one process the first rank's."""
    torch.manual_seed(int(os.environ["RANK"]))
    module = TinyGPT() if how == "init" else BuiltLate(how)
    return fit(layout, module, limit_train_batches=1).before


INITIAL = [(name, "init") for name in EVERY_KIND] + [("zero3x2", "cpu"), ("dp2xtp2", "cpu")]


@pytest.mark.parametrize(("name", "how"), INITIAL)
def test_initial_weights_are_those_of_one_process(ranks: Ranks, one_process: OneProcess, name: str, how: str) -> None:
    layout = LAYOUTS[name]
    expected = assemble([one_process(initial_weights, how)])
    actual = assemble(ranks(layout.world_size, initial_weights, layout, how))
    assert not differences(actual, expected, 0.0)


@pytest.fixture(scope="module")
def meta_weights(ranks: Ranks) -> Weights:
    """What one rank starts with when the module is built without memory."""
    return assemble(ranks(1, initial_weights, LAYOUTS["one rank"], "meta"))


@layouts("dp2", "zero3x2", "tp2", "zero3x2xtp2")
def test_initial_weights_of_a_meta_module_do_not_depend_on_the_layout(
    ranks: Ranks, meta_weights: Weights, layout: Layout
) -> None:
    assert all(weight.isfinite().all() for weight in meta_weights.values())
    assert meta_weights["net.head.weight"].std() > 0
    actual = assemble(ranks(layout.world_size, initial_weights, layout, "meta"))
    assert not differences(actual, meta_weights, 0.0)


def built_and_kept(layout: Layout) -> tuple[int, list[Pieces]]:
    torch.manual_seed(0)
    module = BuiltLate("cpu")
    snapshots = Snapshots()
    trainer = layout.trainer(max_epochs=1, callbacks=[snapshots])
    trainer.fit(module, loader(layout))
    kept = [snapshots.after]
    for run in (trainer.validate, trainer.test, layout.trainer().validate):
        run(module, val_loader(layout), verbose=False)
        kept.append(pieces(module.named_parameters()))
    return module.times_built, kept


@layouts("dp2", "zero2x2", "zero3x2", "tp2", "zero3x2xtp2")
def test_stages_after_a_fit_build_nothing_anew(ranks: Ranks, layout: Layout) -> None:
    times_built, kept = zip(*ranks(layout.world_size, built_and_kept, layout), strict=True)
    assert set(times_built) == {1}
    trained, *later = (assemble(stage) for stage in zip(*kept, strict=True))
    assert all(not differences(weights, trained, 0.0) for weights in later)


def is_forgotten(layout: Layout) -> bool:
    module = TinyGPT(num_blocks=1)
    trainer = layout.trainer(max_epochs=1)
    trainer.fit(module, loader(layout))
    gone = weakref.ref(module)
    del module, trainer
    gc.collect()
    return gone() is None


@layouts("dp2", "zero3x2", "tp2")
def test_a_module_is_freed_with_its_trainer(ranks: Ranks, layout: Layout) -> None:
    assert all(ranks(layout.world_size, is_forgotten, layout))


# Compiled


class CompiledBlocks(TinyGPT):
    """Compiles its blocks in the two ways there are: wrapped in another module, and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0] = torch.compile(self.net.blocks[0], backend="eager")
        self.net.blocks[1].compile(backend="eager")


def fit_compiled(layout: Layout, make: type[TinyGPT]) -> tuple[Pieces, list[str]]:
    torch.manual_seed(0)
    snapshots = Snapshots()
    trainer = layout.trainer(max_epochs=1, callbacks=[snapshots])
    trainer.fit(make(), loader(layout))
    state = trainer.strategy.lightning_module_state_dict()
    return {name.replace("_orig_mod.", ""): w for name, w in snapshots.after.items()}, list(state)


@layouts("dp2", "zero3x2", "tp2")
def test_compiled_blocks_train_alike_and_keep_their_names(
    ranks: Ranks, one_process: OneProcess, layout: Layout
) -> None:
    expected, names = one_process(fit_compiled, TinyGPT)
    results = ranks(layout.world_size, fit_compiled, layout, CompiledBlocks)
    found = differences(assemble([parts for parts, _ in results]), assemble([expected]), 1e-5)
    assert not found, report(found)
    assert sorted(results[0][1]) == sorted(names)


def fit_compiled_whole(layout: Layout) -> Pieces:
    torch.manual_seed(0)
    snapshots = Snapshots()
    module = torch.compile(TinyGPT(), backend="eager")
    layout.trainer(max_epochs=1, callbacks=[snapshots]).fit(module, loader(layout))
    return snapshots.after


@layouts("dp2", "zero3x2", "tp2")
def test_a_compiled_lightning_module_is_one_clear_error(ranks: Ranks, layout: Layout) -> None:
    with pytest.raises(RankError) as caught:
        ranks(layout.world_size, fit_compiled_whole, layout)
    failures = caught.value.failures
    assert len(failures) == layout.world_size
    assert all("compile" in failure.headline for failure in failures)


# Precision and evaluation

# What the parity matrix leaves out: each with the type and the tolerance of its weights.
PRECISIONS = {
    "bf16-true": (torch.bfloat16, 5e-2),
    "16-true": (torch.float16, 1e-2),
    "64-true": (torch.float64, 1e-10),
}
IN_PRECISION = [
    (name, precision) for precision in ("bf16-true", "64-true") for name in ("dp2", "zero3x2", "zero3x2xtp2")
]


def fit_in_precision(layout: Layout, precision: str) -> tuple[float, Pieces]:
    torch.manual_seed(0)
    snapshots = Snapshots()
    trainer = layout.trainer(max_epochs=1, callbacks=[snapshots], precision=precision, gradient_clip_val=0.2)
    # Without Adam, whose squares of half-precision gradients are mostly zero.
    trainer.fit(TinyGPT(optimizer="sgd", learning_rate=0.1), loader(layout), val_loader(layout))
    return trainer.callback_metrics["val_loss"].item(), snapshots.after


@pytest.mark.parametrize(("name", "precision"), [*IN_PRECISION, ("zero3x2", "16-true")])
def test_precision_is_what_was_asked_for(ranks: Ranks, one_process: OneProcess, name: str, precision: str) -> None:
    layout = LAYOUTS[name]
    dtype, tolerance = PRECISIONS[precision]
    expected_loss, expected = one_process(fit_in_precision, precision)
    losses, parts = zip(*ranks(layout.world_size, fit_in_precision, layout, precision), strict=True)
    weights = assemble(parts)
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert losses == pytest.approx([expected_loss] * layout.world_size, rel=tolerance)
    found = differences(weights, assemble([expected]), tolerance)
    assert not found, report(found)


def grad_modes(layout: Layout) -> dict[str, Any]:
    """Whether each stand-alone loop asks for inference mode, and whether its steps have it."""
    inside: list[bool] = []

    class Looking(TinyGPT):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            inside.append(torch.is_inference_mode_enabled() or torch.is_grad_enabled())
            return super().loss(batch)

    trainer, module = layout.trainer(), Looking(num_blocks=1)
    trainer.validate(module, val_loader(layout), verbose=False)
    trainer.test(module, val_loader(layout), verbose=False)
    trainer.predict(module, val_loader(layout))
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return {"asked": [loop.inference_mode for loop in loops], "inside": any(inside)}


@layouts("dp2", "zero3x2", "tp2")
def test_evaluation_runs_without_gradients_and_without_inference_mode(ranks: Ranks, layout: Layout) -> None:
    # Asked of the loops, too: on gloo Lightning itself takes no_grad, so the steps alone prove little.
    for modes in ranks(layout.world_size, grad_modes, layout):
        assert modes == {"asked": [False] * 3, "inside": False}
