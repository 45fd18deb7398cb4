"""Modules under a pipeline as they are written without one, and what a pipeline costs: bytes, memory, forwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_par.communication import CommunicationCounter
from tests.dist.models import BLOCK, VOCABULARY, WIDTH, Block, TinyGPT, token_data
from tests.dist.parity import SINGLE, Layout, differences, report, train_loader
from tests.dist.ranks import Ranks
from tests.pipeline_models import VisionTransformer, gpt2, llama

NUM_BLOCKS = 4
BATCH = 8


def piped(world_size: int = 2, **options: Any) -> Layout:
    """A layout of two pipeline ranks."""
    return Layout("pp2", world_size, {"pipeline_parallel_size": 2, **options})


PP2 = piped()
PP2_ZERO3 = piped(4, zero_stage=3)


def final_state(trainer: Trainer) -> dict[str, Tensor]:
    """Whole weights on rank 0. A collective."""
    return {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


def check_equal(actual: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 1e-5) -> None:
    assert expected
    found = differences(actual, expected, tolerance)
    assert not found, report(found)


class KeepLosses(Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


# Modules of others


class Causal(LightningModule):
    """A language model of Hugging Face in a few lines."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch, labels=batch["input_ids"]).loss
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Classifier(Causal):
    """Classifies images; each has a weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (images, extra), labels = batch
        losses = F.cross_entropy(self.model(images), labels, reduction="none")
        loss = (losses * extra["weight"]).mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


class Tokens(Dataset[Any]):
    """Padded sequences with their mask."""

    def __len__(self) -> int:
        return 3 * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        mask = torch.arange(12) < 12 - index % 4
        return {"input_ids": torch.randint(1, VOCABULARY, (12,), generator=generator), "attention_mask": mask.long()}


class Images(Dataset[Any]):
    """Images, each with a weight, and labels; nested."""

    def __len__(self) -> int:
        return 3 * BATCH

    def __getitem__(self, index: int) -> Any:
        image = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))
        return (image, {"weight": torch.tensor(1.0 + index % 3), "name": f"image {index}"}), index % 10


def as_encoding(samples: list[dict[str, Tensor]]) -> Any:
    """A batch as a tokenizer gives it."""
    from transformers import BatchEncoding

    return BatchEncoding({name: torch.stack([sample[name] for sample in samples]) for name in samples[0]})


MODULES: dict[str, tuple[Callable[[], LightningModule], Dataset[Any], Any]] = {
    "llama": (lambda: Causal(llama(tied=False).network), Tokens(), as_encoding),
    "gpt2_tied": (lambda: Causal(gpt2(tied=True).network), Tokens(), None),
    "vision_transformer": (lambda: Classifier(VisionTransformer()), Images(), None),
}


def fit_module(layout: Layout, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    make, data, collate = MODULES[name]
    module = make()
    loader = train_loader(layout, data, BATCH)
    loader.collate_fn = collate or loader.collate_fn
    trainer = layout.trainer(max_epochs=2)
    trainer.fit(module, loader)
    return final_state(trainer), dict(trainer.callback_metrics)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", PP2),
        ("llama", PP2_ZERO3),
        ("gpt2_tied", piped(schedule="zbv")),
        ("vision_transformer", PP2),
        ("vision_transformer", piped(schedule="interleaved_1f1b")),
    ],
    ids=["llama", "llama-zero3", "gpt2_tied-zbv", "vision_transformer", "vision_transformer-interleaved"],
)
def test_modules_of_others_train_as_in_one_process(ranks: Ranks, name: str, layout: Layout) -> None:
    state, metrics = ranks(1, fit_module, SINGLE, name)[0]
    results = ranks(layout.world_size, fit_module, layout, name)
    check_equal(results[0][0], state)
    for _, seen in results:
        check_equal({"loss_epoch": seen["loss_epoch"]}, {"loss_epoch": metrics["loss_epoch"]})


# Random numbers


class NoisyBlock(nn.Module):
    """Drops half, and remembers what."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(mask)
        return x + self.layers(x) * mask


class Denoiser(LightningModule):
    """Predicts the noise that it has added; its noise is drawn, or given."""

    def __init__(self, given: list[Tensor] | None = None, drops: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[NoisyBlock() if drops else Block() for _ in range(NUM_BLOCKS)])
        self.out = nn.Linear(WIDTH, WIDTH)
        self.given = given
        self.drawn: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        clean = F.one_hot(batch[1] % WIDTH, WIDTH).float()
        noise = torch.randn_like(clean) if self.given is None else self.given[batch_idx]
        self.drawn.append(noise)
        return F.mse_loss(self.out(self.blocks(clean + noise)), noise)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_denoiser(layout: Layout, given: list[Tensor] | None = None, drops: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    module, losses = Denoiser(given, drops), KeepLosses()
    trainer = layout.trainer(max_epochs=1, callbacks=[losses])
    trainer.fit(module, train_loader(layout, token_data(5 * BATCH), BATCH))
    blocks = [block for block in module.blocks if isinstance(block, NoisyBlock)]
    return {"drawn": module.drawn, "losses": losses.losses, "masks": [block.masks for block in blocks]}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_all_stages_draw_the_same_noise_before_the_blocks(ranks: Ranks, schedule: str) -> None:
    first, last = ranks(2, fit_denoiser, piped(schedule=schedule, num_microbatches=4))
    calls = 4 * (1 if schedule == "1f1b" else 2)
    assert len(first["drawn"]) == len(last["drawn"]) == 5 * calls
    unique = [list(dict.fromkeys(map(tensor_key, drawn["drawn"]))) for drawn in (first, last)]
    assert sorted(unique[0]) == sorted(unique[1])
    assert len(unique[0]) == 5 * 4, "micro-batches, and steps, have noise of their own"
    if schedule == "1f1b":
        noise = [torch.cat(first["drawn"][start : start + 4]) for start in range(0, 5 * 4, 4)]
        expected = ranks(1, fit_denoiser, SINGLE, noise)[0]["losses"]
        assert first["losses"] == last["losses"] == pytest.approx(expected, rel=1e-5)


def tensor_key(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_stages_and_micro_batches_drop_different_values(ranks: Ranks) -> None:
    results = ranks(2, fit_denoiser, piped(num_microbatches=4), drops=True)
    masks = [tensor_key(mask) for result in results for block in result["masks"] for mask in block]
    assert len(masks) == NUM_BLOCKS * 5 * 4
    assert len(set(masks)) == len(masks)


# Precision and activations


class CountedBlock(Block):
    """Counts its forwards."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        # On meta tensors it gives shapes, for a block of another stage; without a graph it is part of a check.
        CountedBlock.calls += torch.is_grad_enabled() and not x.is_meta
        return F.dropout(super().forward(x), 0.2, self.training)


class Counted(TinyGPT):
    """With blocks that count."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(CountedBlock() for _ in range(NUM_BLOCKS))


def fit_counted(layout: Layout) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(0)
    CountedBlock.calls = 0
    trainer = layout.trainer(max_epochs=1, gradient_clip_val=0.5)
    trainer.fit(Counted(), train_loader(layout, token_data(2 * BATCH), BATCH))
    return final_state(trainer), CountedBlock.calls


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (PP2, True),
        (PP2, "selective"),
        (piped(schedule="interleaved_1f1b"), True),
        (piped(schedule="zbv"), True),
        (piped(schedule="zbv"), "selective"),
        (PP2_ZERO3, True),
        (Layout("zero3x2", 2, {"zero_stage": 3}), "selective"),
        (Layout("dp2", 2, {}), True),
    ],
    ids=["pp2", "pp2-sel", "interleaved", "zbv", "zbv-sel", "pp2xzero3x2", "zero3x2-sel", "dp2"],
)
def test_activations_are_computed_again_to_the_same_end(ranks: Ranks, layout: Layout, choice: Any) -> None:
    again = Layout(layout.name, layout.world_size, {**(layout.strategy or {}), "activation_checkpointing": choice})
    kept, recomputed = (ranks(layout.world_size, fit_counted, each) for each in (layout, again))
    check_equal(recomputed[0][0], kept[0][0], 1e-6)
    for (_, once), (_, twice) in zip(kept, recomputed, strict=True):
        assert once > 0
        assert twice == 2 * once


def fit_in_precision(layout: Layout, precision: Any) -> list[float]:
    torch.manual_seed(0)
    losses = KeepLosses()
    trainer = layout.trainer(max_epochs=3, precision=precision, callbacks=[losses])
    trainer.fit(TinyGPT(NUM_BLOCKS, tied=True), train_loader(layout, token_data(2 * BATCH), BATCH))
    dtypes = {parameter.dtype for parameter in trainer.strategy.lightning_module.parameters()}
    assert dtypes == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    return losses.losses


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("layout", [PP2, piped(schedule="zbv"), PP2_ZERO3], ids=["pp2", "zbv", "pp2xzero3x2"])
def test_low_precision_stays_near_one_process(ranks: Ranks, layout: Layout, precision: str) -> None:
    (expected,) = ranks(1, fit_in_precision, SINGLE, precision)
    results = ranks(layout.world_size, fit_in_precision, layout, precision)
    if layout.data_parallel_size == 1:
        assert results[0] == results[1] == pytest.approx(expected, rel=5e-2)
    means = torch.tensor(results).mean(0).tolist()
    assert means == pytest.approx(expected, rel=5e-2)
    assert means[-1] < means[0] - 0.2, "it should learn"


# What it costs


class SilentGPT(TinyGPT):
    """Logs nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class CountStep(Callback):
    """Counts the communication of one step, after those that are verified."""

    STEP = 4

    def __init__(self) -> None:
        self.counter: CommunicationCounter | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.STEP:
            self.counter = trainer.strategy.count_communication()
            self.counter.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == self.STEP:
            assert self.counter is not None
            self.counter.__exit__(None, None, None)


def traffic(layout: Layout) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    count = CountStep()
    trainer = layout.trainer(max_steps=5, callbacks=[count])
    trainer.fit(SilentGPT(NUM_BLOCKS), train_loader(layout, token_data(5 * BATCH), BATCH))
    assert count.counter is not None
    calls = {kind: count.counter.calls(kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")}
    return count.counter.bytes_by_axis("send"), calls


@pytest.mark.parametrize(("schedule", "boundaries"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3), ("zbv", 2)])
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_each_boundary_is_crossed_once_forward_and_once_backward(
    ranks: Ranks, schedule: str, boundaries: int, num_microbatches: int
) -> None:
    results = ranks(2, traffic, piped(schedule=schedule, num_microbatches=num_microbatches))
    hidden = BATCH // num_microbatches * BLOCK * WIDTH * 4
    # A V has its two middle stages on one rank, where nothing is sent.
    assert sum(sent.get("pp", 0) for sent, _ in results) == 2 * boundaries * num_microbatches * hidden
    assert all(sent.keys() <= {"pp"} for sent, _ in results)


def test_zero1_reduces_once_a_step_and_zero3_gathers_for_each_use(ranks: Ranks) -> None:
    def calls(stage: int, num_microbatches: int) -> dict[str, int]:
        layout = piped(4, zero_stage=stage, num_microbatches=num_microbatches, find_unused_parameters=False)
        _, by_kind = ranks(4, traffic, layout)[0]
        return {kind: by_axis.get("dp_shard", 0) for kind, by_axis in by_kind.items()}

    few, many = calls(1, 2), calls(1, 4)
    assert few == many
    assert few["reduce_scatter"] == few["all_gather"] == NUM_BLOCKS // 2 + 1, "the units of a stage: blocks and rest"
    few, many = calls(3, 2), calls(3, 4)
    assert many["all_gather"] == 2 * few["all_gather"] > 2 * 2 * NUM_BLOCKS // 2
    assert many["reduce_scatter"] == 2 * few["reduce_scatter"] == 4 * (NUM_BLOCKS // 2 + 1)


class Alive(TinyGPT):
    """Counts which results of its last block here are alive, at each new one."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.peak = 0
        self._outputs: list[weakref.ref[Tensor]] = []

    def on_train_start(self) -> None:
        block = [block for block in self.net.blocks if isinstance(block, Block)][-1]
        block.register_forward_hook(self._count)

    def _count(self, block: nn.Module, args: Any, output: Tensor) -> None:
        self._outputs.append(weakref.ref(output))
        self.peak = max(self.peak, sum(output() is not None for output in self._outputs))


def peak_alive(layout: Layout) -> int:
    module = Alive()
    layout.trainer(max_steps=4).fit(module, train_loader(layout, token_data(4 * BATCH), BATCH))
    return module.peak


def test_1f1b_keeps_results_of_as_many_micro_batches_as_ranks(ranks: Ranks) -> None:
    first, last = ranks(2, peak_alive, piped(schedule="1f1b", num_microbatches=8))
    assert first == 2
    assert last == 1
    first, _ = ranks(2, peak_alive, piped(schedule="gpipe", num_microbatches=8))
    assert first == 8


# Compiled blocks


class CompiledInPlace(SilentGPT):
    """Compiles its blocks in place."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        for block in self.net.blocks:
            block.compile(backend="eager")


class Compiled(SilentGPT):
    """Wraps its blocks in compiled ones."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.net.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in self.net.blocks)


COMPILED = {"plain": lambda: SilentGPT(NUM_BLOCKS), "in_place": CompiledInPlace, "wrapped": Compiled}


def fit_compiled(layout: Layout, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    trainer = layout.trainer(max_epochs=1)
    trainer.fit(COMPILED[kind](), train_loader(layout, token_data(4 * BATCH), BATCH))
    return final_state(trainer)


@pytest.mark.parametrize("kind", ["in_place", "wrapped"])
@pytest.mark.parametrize("layout", [PP2, piped(schedule="interleaved_1f1b")], ids=["pp2", "interleaved"])
def test_compiled_blocks(ranks: Ranks, layout: Layout, kind: str) -> None:
    (expected,) = ranks(1, fit_compiled, SINGLE, "plain")
    actual = ranks(2, fit_compiled, layout, kind)[0]
    check_equal({name.replace("_orig_mod.", ""): value for name, value in actual.items()}, expected)


class PlansItsSteps(TinyGPT):
    """Asks for the number of steps, which only a fit has, where optimizers are made."""

    def __init__(self) -> None:
        super().__init__(num_blocks=NUM_BLOCKS)

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (steps + 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def validate_then_fit(layout: Layout, path: str) -> list[float]:
    """Losses in validation before and after a fit, and after one that goes on from its checkpoint."""
    torch.manual_seed(0)
    module, data = PlansItsSteps(), token_data(2 * BATCH)
    losses = []
    for epochs, resume_from in ((1, None), (2, path)):
        trainer = layout.trainer(max_epochs=epochs)
        val_data = DataLoader(token_data(BATCH, seed=1), BATCH // layout.data_parallel_size)
        losses.append(trainer.validate(module, val_data, verbose=False)[0]["val_loss"])
        trainer.fit(module, train_loader(layout, data, BATCH), ckpt_path=resume_from)
        if resume_from is None:
            trainer.save_checkpoint(path)
    losses.append(trainer.validate(module, val_data, verbose=False)[0]["val_loss"])
    return losses


def test_validation_before_a_fit_asks_for_no_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    (expected,) = ranks(1, validate_then_fit, SINGLE, str(tmp_path / "single.ckpt"))
    for layout in (PP2, PP2_ZERO3):
        found = ranks(layout.world_size, validate_then_fit, layout, str(tmp_path / f"{layout.world_size}.ckpt"))
        assert found == [pytest.approx(expected, rel=1e-5)] * layout.world_size
