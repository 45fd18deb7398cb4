"""Who sees which data, what is logged of it, and what callbacks decide from that."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torchmetrics import MeanMetric, SumMetric

from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import ALL, Layout, layouts, train_loader
from tests.dist.ranks import OneProcess, RankError, Ranks

Sample = tuple[Tensor, ...]


def rank() -> int:
    return int(os.environ["RANK"])


def data_rank(layout: Layout) -> int:
    """Whose share of the data this rank reads; a rank that sees none of its own looks at the first's."""
    on_axis = rank() // layout.tensor_parallel_size
    if not layout.idle_ranks:
        return on_axis
    idle = layout.idle_ranks.start // layout.tensor_parallel_size
    return 0 if on_axis == idle else on_axis - (on_axis > idle)


# Which samples a rank sees


class Augmented(Dataset[Sample]):
    """Samples with a random number each, as an augmentation would draw it."""

    def __init__(self, num_samples: int) -> None:
        self._data = token_data(num_samples)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Sample:
        return *self._data[index], torch.rand(())


class Watching(TinyGPT):
    """Keeps the sample numbers and augmentations of each training batch."""

    def on_fit_start(self) -> None:
        self.seen: list[tuple[list[int], list[float]]] = []

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        index, tokens, noise = batch
        self.seen.append((index.tolist(), noise.tolist()))
        return self.loss((index, tokens))


def batches_seen(layout: Layout, num_workers: int) -> list[tuple[list[int], list[float]]]:
    seed_everything(0, workers=True)
    module = Watching(num_blocks=1)
    # Forked, as a user's loader on Linux forks: whatever the ranks themselves are started by.
    context = "fork" if num_workers else None
    loader = DataLoader(Augmented(32), 2, shuffle=True, num_workers=num_workers, multiprocessing_context=context)
    layout.trainer(max_epochs=1).fit(module, loader)
    return module.seen


@pytest.mark.parametrize(
    ("name", "num_workers"), [("dp2", 2), ("zero3x2", 0), ("tp2", 0), ("tp2", 2), ("zero3x2xtp2", 2)]
)
def test_replicas_split_the_data_and_ranks_of_a_replica_share_it(ranks: Ranks, name: str, num_workers: int) -> None:
    layout = ALL[name]
    seen = ranks(layout.world_size, batches_seen, layout, num_workers)
    size = layout.tensor_parallel_size
    for position, batches in enumerate(seen):
        assert batches == seen[position - position % size]
    replicas = [batch for batches in seen[::size] for batch in batches]
    assert sorted(index for indices, _ in replicas for index in indices) == list(range(32))
    if num_workers:
        assert len({noise for _, noises in replicas for noise in noises}) == 32


class Stream(IterableDataset[Sample]):
    """An iterable dataset, whose length nobody knows."""

    def __init__(self, num_samples: int) -> None:
        self._data = token_data(num_samples)

    def __iter__(self) -> Any:
        return (self._data[index] for index in range(len(self._data)))


def fit_streams(layout: Layout, num_train: list[int], num_val: list[int]) -> tuple[int, float, list[str]]:
    train, val = (DataLoader(Stream(lengths[data_rank(layout)]), batch_size=2) for lengths in (num_train, num_val))
    trainer = layout.trainer(max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(TinyGPT(num_blocks=1), train, val)
    loss = trainer.callback_metrics["val_loss"].item()
    return trainer.global_step, loss, [str(warning.message) for warning in caught]


@layouts("dp2", "zero3x2", "dp2xtp2")
def test_streams_of_different_lengths_end_together(ranks: Ranks, layout: Layout) -> None:
    results = ranks(layout.world_size, fit_streams, layout, [10, 6], [4, 8])
    steps, losses, messages = zip(*results, strict=True)
    assert set(steps) == {2 * 3}
    assert len(set(losses)) == 1
    about_ranks = [message for message in messages[0] if "rank" in message and "ended" in message]
    assert any("[1]" in message and "3 batches" in message for message in about_ranks)
    assert any("[0]" in message and "2 batches" in message for message in about_ranks)


def fit_own_split(layout: Layout) -> None:
    part = Subset(token_data(10), range(6 if data_rank(layout) == 0 else 4))
    trainer = layout.trainer(max_epochs=1, use_distributed_sampler=False)
    trainer.fit(TinyGPT(num_blocks=1), DataLoader(part, batch_size=2))


@layouts("dp2", "zero3x2", "dp2xtp2")
def test_an_own_split_of_different_lengths_is_refused_on_all_ranks(ranks: Ranks, layout: Layout) -> None:
    with pytest.raises(RankError) as caught:
        ranks(layout.world_size, fit_own_split, layout)
    failures = caught.value.failures
    assert len(failures) == layout.world_size
    assert all("[3, 2]" in failure.headline for failure in failures)


def predictions(layout: Layout, num_samples: int) -> list[tuple[int, list[int]]]:
    torch.manual_seed(0)
    loader = DataLoader(token_data(num_samples), batch_size=2)
    batches = layout.trainer().predict(TinyGPT(num_blocks=1), loader)
    if rank() in layout.idle_ranks:
        assert batches == [None] * len(batches)
        return []
    return [
        (index, tokens)
        for indices, outputs in batches
        for index, tokens in zip(indices.tolist(), outputs.tolist(), strict=True)
    ]


@layouts("dp2", "zero3x2", "tp2", "zero3x2xtp2", "ps2+1")
def test_predict_returns_each_sample_once(ranks: Ranks, one_process: OneProcess, layout: Layout) -> None:
    # In batches of two that is three for one replica and two for the other.
    num_samples = 9
    expected = one_process(predictions, num_samples)
    results = ranks(layout.world_size, predictions, layout, num_samples)
    replicas = results[:: layout.tensor_parallel_size]
    assert sorted(pair for result in replicas for pair in result) == expected
    for position, result in enumerate(results):
        assert result == results[position - position % layout.tensor_parallel_size]


# What is logged


def losses_of_stages(layout: Layout) -> dict[str, float]:
    torch.manual_seed(0)
    module = TinyGPT(num_blocks=1)
    batch = 4 // layout.data_parallel_size
    loader = DataLoader(token_data(12, seed=1), batch_size=batch)
    losses = {"untrained": layout.trainer().validate(module, loader)[0]["val_loss"]}
    trainer = layout.trainer(max_epochs=1)
    trainer.fit(module, train_loader(layout, token_data(8), 4), loader)
    losses["fit"] = trainer.callback_metrics["val_loss"].item()
    losses["validate"] = trainer.validate(module, loader)[0]["val_loss"]
    losses["test"] = trainer.test(module, loader)[0]["test_loss"]
    losses["new trainer"] = layout.trainer().validate(module, loader)[0]["val_loss"]
    return losses


@layouts("dp2", "zero2x2", "zero3x2", "zero3x2xtp2", "ps2+1")
def test_the_validation_loss_is_the_same_from_every_stage(
    ranks: Ranks, one_process: OneProcess, layout: Layout
) -> None:
    expected = one_process(losses_of_stages)
    results = ranks(layout.world_size, losses_of_stages, layout)
    trained = [expected[stage] for stage in ("fit", "validate", "test", "new trainer")]
    assert trained == pytest.approx([expected["fit"]] * 4, rel=1e-6)
    for result in results:
        assert result == pytest.approx(expected, rel=1e-5)


class Logging(TinyGPT):
    """Logs numbers whose reduction over batches of different sizes is known."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.metric_mean = MeanMetric()
        self.metric_sum = SumMetric()

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        index, tokens = batch
        self.loss((index, tokens))
        values = index.float()
        self.log("mean", values.mean(), sync_dist=True)
        self.log("count", float(len(index)), reduce_fx="sum", sync_dist=True)
        self.log("integer_sum", index.sum(), reduce_fx="sum", sync_dist=True)
        self.log("largest", values.max(), reduce_fx="max", sync_dist=True)
        self.log("smallest", values.min(), reduce_fx="min", sync_dist=True)
        self.metric_mean.update(values)
        self.metric_sum.update(values)
        self.log("metric_mean", self.metric_mean)
        self.log("metric_sum", self.metric_sum)


def metrics_of_three_and_two(layout: Layout) -> dict[str, float]:
    part = [range(3), range(3, 5)][data_rank(layout)]
    trainer = layout.trainer(use_distributed_sampler=False)
    trainer.validate(Logging(), DataLoader(Subset(token_data(5), part), batch_size=3))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@layouts("dp2", "zero3x2", "dp2xtp2", "ps2+1", "ps2+1 last")
def test_metrics_of_batches_of_three_and_two_are_exact(ranks: Ranks, layout: Layout) -> None:
    expected = {
        "mean": 2.0,
        "count": 5.0,
        "integer_sum": 10.0,
        "largest": 4.0,
        "smallest": 0.0,
        "metric_mean": 2.0,
        "metric_sum": 10.0,
    }
    assert ranks(layout.world_size, metrics_of_three_and_two, layout) == [expected] * layout.world_size


REDUCTIONS: list[tuple[Any, float]] = [
    ("mean", 1.5),
    (None, 1.5),
    ("avg", 1.5),
    (dist.ReduceOp.AVG, 1.5),
    ("sum", 3.0),
    (dist.ReduceOp.SUM, 3.0),
    ("max", 2.0),
    ("min", 1.0),
]


def reductions(layout: Layout) -> list[float]:
    """Reduce 1 and 2 over two replicas, as integers and as floats."""
    trainer = layout.trainer()
    trainer.validate(TinyGPT(num_blocks=1), DataLoader(token_data(4), batch_size=2), verbose=False)
    value = torch.tensor(data_rank(layout) + 1)
    results = []
    for operation, _ in REDUCTIONS:
        for number in (value, value.float()):
            results.append(trainer.strategy.reduce(number, reduce_op=operation).item())
            assert number.item() == data_rank(layout) + 1, "reduce must not change its argument"
    return results


@layouts("dp2", "dp2xtp2", "ps2+1")
def test_reductions_are_over_replicas_and_averages_right_on_gloo(ranks: Ranks, layout: Layout) -> None:
    expected = [value for _, value in REDUCTIONS for _ in range(2)]
    assert ranks(layout.world_size, reductions, layout) == [expected] * layout.world_size


class OwnKeys(TinyGPT):
    """Logs one key only where the rank's data asks for it."""

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if rank() == 1:
            self.log("only_here", 1.0, sync_dist=True)
        self.log("late", 1.0, sync_dist=True)


def validate_own_keys(layout: Layout) -> None:
    layout.trainer().validate(OwnKeys(num_blocks=1), DataLoader(token_data(4), batch_size=2))


@layouts("dp2", "zero3x2", "tp2")
def test_different_keys_are_refused_with_the_keys(ranks: Ranks, layout: Layout) -> None:
    with pytest.raises(RankError) as caught:
        ranks(layout.world_size, validate_own_keys, layout, timeout=20)
    failures = caught.value.failures
    assert len(failures) == layout.world_size
    assert all("only_here" in failure.headline for failure in failures)


# What callbacks decide


class Disagreeing(TinyGPT):
    """Logs a score that gets better on the first rank and worse on the last."""

    def on_validation_epoch_end(self) -> None:
        direction = 1.0 if rank() == 0 else -1.0
        self.log("own_score", direction * self.current_epoch)


def train_with_callbacks(layout: Layout, monitor: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    stopping = EarlyStopping(monitor, patience=1)
    checkpoints = ModelCheckpoint(folder / layout.name, monitor=monitor, save_top_k=2)
    trainer = layout.trainer(
        max_epochs=5,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[stopping, checkpoints],
    )
    batch = 8 // layout.data_parallel_size
    val_loader = DataLoader(token_data(8, seed=1), batch_size=batch)
    # One batch an epoch: in what order it is seen does not matter.
    train_loader = DataLoader(token_data(16), batch_size=16 // layout.data_parallel_size)
    trainer.fit(Disagreeing(num_blocks=1, learning_rate=0.1), train_loader, val_loader)
    return {
        "stopped_epoch": stopping.stopped_epoch,
        "steps": trainer.global_step,
        "saved": sorted(Path(path).name for path in checkpoints.best_k_models),
        "best": Path(checkpoints.best_model_path).name,
        "last": Path(checkpoints.last_model_path).name,
        "score": float(stopping.best_score),
    }


@pytest.mark.parametrize(
    ("name", "monitor"),
    [("dp2", "val_loss"), ("ps2+1", "val_loss"), ("zero3x2", "train_loss_epoch"), ("tp2", "val_loss"), ("zero3x2xtp2", "train_loss_epoch")],
)
def test_callbacks_decide_as_in_one_process(
    ranks: Ranks, one_process: OneProcess, tmp_path_factory: pytest.TempPathFactory, name: str, monitor: str
) -> None:
    layout = ALL[name]
    folder = tmp_path_factory.getbasetemp() / monitor
    expected = one_process(train_with_callbacks, monitor, folder)
    results = ranks(layout.world_size, train_with_callbacks, layout, monitor, folder)
    score = expected.pop("score")
    assert math.isfinite(score)
    for result in results:
        assert result.pop("score") == pytest.approx(score, rel=1e-5)
        assert result == expected
    assert sorted(path.name for path in (folder / name).iterdir()) == expected["saved"]


@layouts("zero3x2", "dp2xtp2")
def test_callbacks_decide_together_when_the_ranks_disagree(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    results = ranks(layout.world_size, train_with_callbacks, layout, "own_score", tmp_path)
    steps = {result["steps"] for result in results}
    assert len(steps) == 1
    saved = {tuple(result["saved"]) for result in results}
    assert len(saved) == 1
    assert sorted(path.name for path in (tmp_path / layout.name).iterdir()) == list(saved.pop())
