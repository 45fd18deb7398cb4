"""What a user sees of Lightning under a pipeline: evaluation, logging, callbacks, checkpoints and refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_par.engine import engine_of
from tests.dist.models import VOCABULARY, TinyGPT, token_data
from tests.dist.parity import BATCH, LAYOUTS, SINGLE, Layout, differences, report, train_loader
from tests.dist.ranks import RankError, Ranks

NUM_BLOCKS = 4


def piped(world_size: int = 2, **options: Any) -> Layout:
    """A layout of two pipeline ranks."""
    return Layout("pp2", world_size, {"pipeline_parallel_size": 2, **options})


PP2 = piped()


def final_state(trainer: Trainer) -> dict[str, Tensor]:
    """Whole weights and optimizer moments on rank 0, as a checkpoint has them. A collective."""
    strategy = trainer.strategy
    weights = strategy.lightning_module_state_dict()
    optimizer = strategy.optimizer_state(trainer.optimizers[0])
    moments = {
        f"{key} of {position}": torch.as_tensor(value)
        for position, state in optimizer.get("state", {}).items()
        for key, value in state.items()
    }
    return {name: value.detach().clone() for name, value in {**weights, **moments}.items()}


def check_equal(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert expected
    found = differences(actual, expected, tolerance)
    assert not found, report(found)


# Checkpoints

LAYOUTS_BY_NAME = {
    **LAYOUTS,
    "single": SINGLE,
    "pp2": PP2,
    "pp2_interleaved": piped(schedule="interleaved_1f1b"),
    "pp2_zbv": piped(schedule="zbv"),
    "pp2xps2": piped(4, sync="parameter_server", server_rank=1),
    "pp2xzero3x2": piped(4, zero_stage=3),
}
FIRST, ALL = 1, 2
"""Epochs before the checkpoint, and in all."""


class Saver(Callback):
    """Saves at the end of each epoch."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is not None:
            trainer.save_checkpoint(self._path)


def fit_in_parts(
    layout: Layout, epochs: int, save_to: str | None = None, resume_from: str | None = None
) -> dict[str, Tensor]:
    torch.manual_seed(0 if resume_from is None else 1)
    module = TinyGPT(NUM_BLOCKS, tied=True)
    trainer = layout.trainer(max_epochs=epochs, callbacks=[Saver(save_to)], gradient_clip_val=0.5)
    trainer.fit(module, train_loader(layout, token_data(3 * BATCH), BATCH), ckpt_path=resume_from)
    return final_state(trainer)


@pytest.fixture(scope="module")
def uninterrupted(ranks: Ranks) -> dict[str, Tensor]:
    """All steps in one process."""
    return ranks(1, fit_in_parts, SINGLE, ALL)[0]


@pytest.mark.parametrize(
    ("saved_under", "resumed_under"),
    [
        ("pp2", "single"),
        ("single", "pp2"),
        ("pp2_interleaved", "dp2"),
        ("pp2_zbv", "tp2"),
        ("tp2", "pp2_zbv"),
        ("pp2xps2", "single"),
        ("pp2xzero3x2", "pp2_interleaved"),
    ],
)
def test_resumes_under_another_layout(
    ranks: Ranks, uninterrupted: dict[str, Tensor], tmp_path: Path, saved_under: str, resumed_under: str
) -> None:
    first, second = LAYOUTS_BY_NAME[saved_under], LAYOUTS_BY_NAME[resumed_under]
    path = str(tmp_path / "half.ckpt")
    ranks(first.world_size, fit_in_parts, first, FIRST, save_to=path)
    check_equal(ranks(second.world_size, fit_in_parts, second, ALL, resume_from=path)[0], uninterrupted)


def structure(content: Any) -> Any:
    """Names, types and shapes of what a checkpoint holds."""
    if isinstance(content, dict):
        return {key: structure(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [structure(value) for value in content]
    return tuple(content.shape) if isinstance(content, Tensor) else type(content)


def test_the_file_is_that_of_plain_lightning(ranks: Ranks, tmp_path: Path) -> None:
    paths = {layout.name: tmp_path / f"{layout.name}.ckpt" for layout in (SINGLE, PP2)}
    for layout in (SINGLE, PP2):
        ranks(layout.world_size, fit_in_parts, layout, FIRST, save_to=str(paths[layout.name]))
    plain, piped_one = (torch.load(path, weights_only=True) for path in paths.values())
    for content in (plain, piped_one):
        del content["loops"]  # of which Lightning keeps more where there is a DistributedSampler
        content["callbacks"] = sorted(content["callbacks"])
    assert structure(piped_one) == structure(plain)
    assert list(piped_one["state_dict"]) == list(plain["state_dict"])
    assert [group["params"] for group in piped_one["optimizer_states"][0]["param_groups"]] == [
        group["params"] for group in plain["optimizer_states"][0]["param_groups"]
    ]
    restored = TinyGPT.load_from_checkpoint(paths["pp2"])
    check_equal(restored.state_dict(), plain["state_dict"])
    assert restored.net.head.weight is restored.net.tokens.weight


def test_names_that_do_not_fit_are_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "renamed.ckpt"
    ranks(1, fit_in_parts, SINGLE, FIRST, save_to=str(path))
    content = torch.load(path, weights_only=True)
    content["state_dict"]["net.nrom.weight"] = content["state_dict"].pop("net.norm.weight")
    torch.save(content, path)
    failures = refused(ranks, fit_in_parts, PP2, ALL, resume_from=str(path))
    assert all("net.norm.weight" in headline and "net.nrom.weight" in headline for headline in failures)


def refused(ranks: Ranks, function: Any, layout: Layout, *args: Any, **kwargs: Any) -> list[str]:
    """What each rank said, of which none has merely waited for another."""
    with pytest.raises(RankError) as caught:
        ranks(layout.world_size, function, layout, *args, timeout=40, **kwargs)
    failures = caught.value.failures
    assert {failure.rank for failure in failures if not failure.is_secondary} == set(range(layout.world_size)), caught
    return [failure.headline for failure in failures]


# Evaluation


class Whole(TinyGPT):
    """Counts the sanity check's batches."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.num_sane = 0

    def on_validation_batch_end(self, *args: Any) -> None:
        self.num_sane += self.trainer.sanity_checking


def evaluate(layout: Layout, fits: bool, batch_size: int, num_samples: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module, trainer = Whole(), layout.trainer(max_epochs=1)
    data = DataLoader(token_data(num_samples), batch_size // layout.data_parallel_size)
    if fits:
        trainer.fit(module, train_loader(layout, token_data(16), 8), data)
    validated = trainer.validate(module, data, verbose=False)[0]
    tested = trainer.test(module, data, verbose=False)[0]
    predicted = trainer.predict(module, data)
    assert predicted is not None
    samples = [pair for indices, outputs in predicted for pair in zip(indices.tolist(), outputs.tolist(), strict=True)]
    return {"metrics": {**validated, **tested}, "num_sane": module.num_sane, "samples": samples}


@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("layout", [PP2, piped(schedule="zbv", num_eval_microbatches=3)], ids=["pp2", "zbv"])
def test_evaluates_as_one_process(ranks: Ranks, layout: Layout, fits: bool) -> None:
    # 23 samples: batches of 8, 8 and 7, of which the last has another number of micro-batches.
    (expected,) = ranks(1, evaluate, SINGLE, fits, 8, 23)
    for seen in ranks(2, evaluate, layout, fits, 8, 23):
        check_equal(seen["metrics"], expected["metrics"])
        assert seen["num_sane"] == expected["num_sane"] == (2 if fits else 0)
        assert seen["samples"] == expected["samples"]


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_replicas_of_unequal_length_predict_each_sample_once(ranks: Ranks, zero_stage: int) -> None:
    (expected,) = ranks(1, evaluate, SINGLE, False, 4, 11)
    seen = [result["samples"] for result in ranks(4, evaluate, piped(4, zero_stage=zero_stage), False, 4, 11)]
    assert seen[:2] == seen[2:], "stages of a replica differ"
    assert sorted(seen[0] + seen[1]) == expected["samples"]


class Telling(TinyGPT):
    """Returns more than the loss."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        _, tokens = batch
        logits = self(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss, "logits": logits, "more": {"tokens": tokens, "temperature": 0.5}, "name": "telling"}


class KeepOutputs(Callback):
    """What callbacks are given after each batch."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.outputs.append({**outputs, "logits": outputs["logits"].detach()})


def outputs_of_steps(layout: Layout) -> list[Any]:
    torch.manual_seed(0)
    keeper = KeepOutputs()
    trainer = layout.trainer(max_epochs=1, callbacks=[keeper])
    trainer.fit(Telling(NUM_BLOCKS), train_loader(layout, token_data(20), 8))
    return keeper.outputs


@pytest.mark.parametrize("layout", [PP2, piped(schedule="zbv")], ids=["pp2", "zbv"])
def test_outputs_of_a_step_are_whole_on_all_ranks(ranks: Ranks, layout: Layout) -> None:
    (expected,) = ranks(1, outputs_of_steps, SINGLE)
    for seen in ranks(2, outputs_of_steps, layout):
        assert len(seen) == len(expected) == 3
        for actual, wanted in zip(seen, expected, strict=True):
            assert actual.pop("name") == wanted["name"]
            others = {key: value for key, value in wanted.items() if key != "name"}
            torch.testing.assert_close(actual, others, rtol=1e-5, atol=1e-5)


# Logging and callbacks


class Measured(TinyGPT):
    """Logs a metric object by step and by epoch, and lets the schedule follow the validation loss."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")
        self.val_accuracy = MulticlassAccuracy(VOCABULARY, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        _, tokens = batch
        logits = self(tokens[:, :-1])
        self.accuracy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log_dict({"loss": loss, "rate": 0.5}, on_epoch=True, on_step=True)
        self.log("largest", logits.max(), on_epoch=True, on_step=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        _, tokens = batch
        logits, targets = self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        self.val_accuracy(logits, targets)
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, targets), sync_dist=True, batch_size=len(tokens))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.03, eps=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class KeepMetrics(Callback):
    """All that callbacks can read after each epoch, and the accuracies of its steps."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self._steps: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = len(self._steps)
        self._steps[f"accuracy of step {step}"] = float(trainer.callback_metrics["accuracy_step"])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append({**metrics, **self._steps, "learning rate": rate})
        self._steps = {}


def run_callbacks(layout: Layout, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    keeper, stopper = KeepMetrics(), EarlyStopping("val_loss", patience=2)
    saver = ModelCheckpoint(folder, monitor="val_accuracy", mode="max", save_top_k=1)
    trainer = layout.trainer(max_epochs=8, callbacks=[keeper, stopper, saver], enable_checkpointing=True)
    # Random tokens: the validation loss soon rises.
    val_loader = DataLoader(token_data(20, seed=1), 8 // layout.data_parallel_size)
    trainer.fit(Measured(), train_loader(layout, token_data(32), 16), val_loader)
    assert saver.best_model_score is not None
    return {
        "epochs": keeper.seen,
        "stopped": (stopper.stopped_epoch, trainer.current_epoch, trainer.should_stop),
        "best": (Path(saver.best_model_path).name, float(saver.best_model_score)),
    }


@pytest.mark.parametrize("layout", [PP2, piped(schedule="zbv"), piped(4)], ids=["pp2", "zbv", "pp2xdp2"])
def test_callbacks_see_the_same_on_all_ranks(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    (expected,) = ranks(1, run_callbacks, SINGLE, str(tmp_path / "one"))
    results = ranks(layout.world_size, run_callbacks, layout, str(tmp_path / "pipeline"))
    rates = [epoch["learning rate"] for epoch in expected["epochs"]]
    assert rates[-1] < rates[0]
    assert expected["stopped"][0] > 0, "it should stop early"
    # Under a data axis what is logged without sync_dist is each replica's own.
    own = ("largest", "loss", "accuracy_step", "accuracy of") if layout.data_parallel_size > 1 else ()
    for seen in results:
        assert seen["stopped"] == expected["stopped"]
        assert seen["best"] == (expected["best"][0], pytest.approx(expected["best"][1], rel=1e-5))
        for actual, wanted in zip(seen["epochs"], expected["epochs"], strict=True):
            shared = [name for name in wanted if not name.startswith(own)]
            assert actual.keys() == wanted.keys()
            check_equal({name: actual[name] for name in shared}, {name: wanted[name] for name in shared})
    half = layout.world_size // 2
    assert results[:half] == results[half:], "stages of a replica differ"


# Shapes


class Ragged(Dataset[Tensor]):
    """Batches of different lengths of sequence: one item is one batch."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        generator = torch.Generator().manual_seed(2)
        self._batches = [torch.randint(0, VOCABULARY, shape, generator=generator) for shape in shapes]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Tensor:
        return self._batches[index]


class Counting(TinyGPT):
    """Counts the calls of its steps with micro-batches, by batch."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.calls: Counter[tuple[str, int]] = Counter()

    def _loss_of(self, kind: str, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls[kind, batch_idx] += 1
        return self.loss((torch.empty(0), batch))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss_of("train", batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss_of("val", batch, batch_idx), batch_size=len(batch))


TRAIN_SHAPES = [(8, 9), (8, 17), (8, 5), (8, 9), (6, 9), (3, 9), (1, 7)]
VAL_SHAPES = [(5, 9), (16, 17), (1, 4)]


def fit_ragged(layout: Layout) -> tuple[dict[str, Tensor], dict[str, float], Counter[tuple[str, int]]]:
    torch.manual_seed(0)
    module = Counting()
    trainer = layout.trainer(max_epochs=1, num_sanity_val_steps=0, use_distributed_sampler=False)
    loaders = [DataLoader(Ragged(shapes), batch_size=None) for shapes in (TRAIN_SHAPES, VAL_SHAPES)]
    trainer.fit(module, *loaders)
    return final_state(trainer), {k: float(v) for k, v in trainer.callback_metrics.items()}, module.calls


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_eval_microbatches", "val"),
    [
        ("gpipe", 1, 1, [1, 1, 1]),
        ("1f1b", 1, 4, [1, 4, 1]),
        ("interleaved_1f1b", 2, 4, [1, 4, 1]),
        ("dualpipev", 2, 1, [1, 1, 1]),
    ],
)
def test_batches_of_any_size_and_length(
    ranks: Ranks, schedule: str, num_stages: int, num_eval_microbatches: int, val: list[int]
) -> None:
    train = [4, 4, 4, 4, 3, 3, 1]
    state, metrics, _ = ranks(1, fit_ragged, SINGLE)[0]
    options = {"schedule": schedule, "num_microbatches": 4, "num_eval_microbatches": num_eval_microbatches}
    results = ranks(2, fit_ragged, piped(**options))
    check_equal(results[0][0], state)
    for _, seen, calls in results:
        check_equal(seen, metrics)
        # One call for each micro-batch and stage of the rank, and not one more to find out shapes.
        expected = {("train", index): num_stages * count for index, count in enumerate(train)}
        expected |= {("val", index): num_stages * count for index, count in enumerate(val)}
        assert calls == expected


# One module under one layout after another


def fit_in_turns(layouts: list[Layout]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = TinyGPT(NUM_BLOCKS, tied=True)
    for layout in layouts:
        options: dict[str, Any] = {}
        if layout.strategy is None:
            options["plugins"] = [LightningEnvironment()]  # this process by itself
            engine = engine_of(module)
            if engine is not None:
                engine.remove()
        trainer = layout.trainer(max_epochs=1, **options)
        trainer.fit(module, train_loader(layout, token_data(2 * BATCH), BATCH))
    assert module.net.head.weight is module.net.tokens.weight
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("first", [PP2, piped(schedule="zbv")], ids=["pp2", "zbv"])
def test_a_module_comes_whole_out_of_a_pipeline(ranks: Ranks, first: Layout) -> None:
    (expected,) = ranks(1, fit_in_turns, [SINGLE] * 4)
    for seen in ranks(2, fit_in_turns, [first, LAYOUTS["dp2"], first, SINGLE]):
        check_equal(seen, expected)


# Refusals


class ByHand(TinyGPT):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.automatic_optimization = False


class OwnBackward(TinyGPT):
    """Runs its own backward."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Skipping(TinyGPT):
    """Skips a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return loss if batch_idx < 1 else None


class EmbeddingAgain(TinyGPT):
    """Uses its embedding after the blocks, not by a tied head."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) @ self.net.tokens(torch.arange(VOCABULARY)).T.mean(0).mean() * 0.1


class SharedBlocks(TinyGPT):
    """Shares weights between blocks."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.net.blocks[3].up.weight = self.net.blocks[0].up.weight


class Augmenting(TinyGPT):
    """Gets batches that differ between ranks."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        index, tokens = batch
        return index, (tokens + self.trainer.global_rank) % VOCABULARY


class Raising(TinyGPT):
    """Fails after the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.loss(batch)
        raise KeyError("a column that is not there")


class Joined(TinyGPT):
    """Its optimizer looks at all parameters together."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


REFUSED: dict[str, tuple[type[LightningModule], dict[str, Any], dict[str, Any], str]] = {
    "manual_optimization": (ByHand, {}, {}, "optimizes by hand"),
    "own_backward": (OwnBackward, {"num_blocks": 4}, {}, "overrides backward"),
    "skipped_step": (Skipping, {"num_blocks": 4}, {}, "can't be skipped by returning None"),
    "too_few_blocks": (TinyGPT, {"num_blocks": 3}, {"schedule": "zbv"}, "3 blocks can't be cut into 4 stages"),
    "too_few_microbatches": (TinyGPT, {"num_blocks": 4}, {"num_microbatches": 1}, "num_microbatches=1 does not fit"),
    "unequal_rounds": (
        TinyGPT,
        {"num_blocks": 4},
        {"schedule": "interleaved_1f1b", "num_microbatches": 5},
        "num_microbatches=5 does not fit",
    ),
    "unknown_blocks": (TinyGPT, {"num_blocks": 4}, {"pipeline_blocks": "net.layers"}, 'it has "net.blocks"'),
    "wrong_split": (TinyGPT, {"num_blocks": 4}, {"pipeline_split": [3, 2]}, "must have 2 numbers"),
    "embedding_again": (EmbeddingAgain, {"num_blocks": 4}, {}, "net.tokens after the blocks"),
    "shared_blocks": (SharedBlocks, {}, {}, "net.blocks.0 and net.blocks.3 share the parameter up.weight"),
    "other_batches": (Augmenting, {"num_blocks": 4}, {}, "seed_everything"),
    "all_together": (Joined, {"num_blocks": 4}, {}, "LBFGS looks at several parameters together"),
    "any_error": (Raising, {"num_blocks": 4}, {}, "a column that is not there"),
}


def fit_briefly(layout: Layout, name: str) -> None:
    kind, model, options, _ = REFUSED[name]
    layout = piped(**{**options, **layout.strategy})  # type: ignore[dict-item]
    layout.trainer(max_epochs=1).fit(kind(**model), train_loader(layout, token_data(32), 8))


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_in_words_on_all_ranks(ranks: Ranks, name: str) -> None:
    headlines = refused(ranks, fit_briefly, PP2, name)
    assert all(REFUSED[name][-1] in headline for headline in headlines), headlines
