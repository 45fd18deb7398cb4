"""What is logged for each micro-batch reaches Lightning as if the step had seen the whole batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision

from lightning_par.pipeline_parallel.microbatches import split
from lightning_par.trainer.pipeline_logging import LogEntry, LogRecorder, replay

pytestmark = pytest.mark.unit

VALUES = torch.tensor([[0.1, 1.0], [0.9, 1.0], [0.8, 0.0], [0.2, 0.0], [0.7, 1.0], [0.4, 1.0], [0.6, 1.0], [0.3, 0.0]])


class Logging(LightningModule):
    """Logs everything there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.accuracy = BinaryAccuracy()
        self.sum, self.max = SumMetric(), MaxMetric()
        self.updated_only, self.validated = MeanMetric(), MeanMetric()
        self.both = MetricCollection({"accuracy": BinaryAccuracy(), "precision": BinaryPrecision()}, prefix="both/")
        self.unnamed = [MeanMetric()]
        self.history: list[dict[str, Any]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores, targets = batch.unbind(1)
        self.log("mean", scores.mean(), prog_bar=True, on_step=True, on_epoch=True)
        self.log("sum", scores.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("max", scores.max(), False, True, True, True, torch.max)
        self.log(name="min", value=scores.min().reshape(1), reduce_fx="MIN", on_epoch=True, on_step=True)
        self.log("number", 3, on_epoch=True, sync_dist=True)
        positive = scores[targets > 0]
        self.log("weighted", positive.mean(), batch_size=len(positive), on_step=True, on_epoch=True)
        self.log_dict({"bf16": scores.amax().bfloat16(), "int": targets.max().long()}, on_epoch=True, reduce_fx=max)
        self.accuracy(scores, targets.long())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.sum(scores)
        self.max(scores)
        self.log_dict({"metric/sum": self.sum, "metric/max": self.max}, on_step=True, on_epoch=True)
        self.updated_only.update(scores)
        self.log("updated", self.updated_only, on_epoch=True)
        self.both.update(scores, targets.long())
        self.log_dict(self.both, on_step=False, on_epoch=True)
        return self.weight * scores.mean()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("validated", batch[:, 0].mean())
        self.validated.update(batch[:, 0])
        self.log("validated_metric", self.validated, metric_attribute="validated")

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append({**self.trainer.callback_metrics, **self.trainer.progress_bar_metrics})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InParts(Logging):
    """Does so for two micro-batches, on two objects, as stages of a pipeline do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.stack(self._run("training_step", batch, batch_idx)).mean()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._run("validation_step", batch, batch_idx)

    def _run(self, step: str, batch: Tensor, batch_idx: int) -> list[Any]:
        stage = copy.copy(self)
        recorder = LogRecorder()
        with recorder.recording([self, stage]):
            calls = zip((self, stage), split(batch, 2), strict=True)
            results = [getattr(Logging, step)(module, part, batch_idx) for module, part in calls]
        assert not {"log", "log_dict"} & (vars(self).keys() | vars(stage).keys())
        replay(self, pickle.loads(pickle.dumps(recorder.take())))
        assert recorder.take() == []
        return results


def run(module: LightningModule, **steps: int) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **({"max_epochs": 1, "num_sanity_val_steps": 0} | steps),  # type: ignore[arg-type]
    )
    loader: Any = DataLoader(VALUES, batch_size=4)  # type: ignore[arg-type]
    trainer.fit(module, loader, [loader, loader])
    return trainer


def logged(module: Logging) -> list[dict[str, float]]:
    trainer = run(module)
    return [{key: float(value) for key, value in step.items()} for step in [*module.history, trainer.callback_metrics]]


def test_everything_is_logged_as_for_the_whole_batch() -> None:
    whole, in_parts = logged(Logging()), logged(InParts())
    assert [list(step) for step in in_parts] == [list(step) for step in whole]
    for one, other in zip(in_parts, whole, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert {"mean_epoch", "weighted_epoch", "both/precision", "validated/dataloader_idx_1"} <= set(whole[-1])


def record(*calls: tuple[Any, dict[str, Any]], module: Logging | None = None) -> LogEntry:
    recorder = LogRecorder()
    module = module or Logging()
    with recorder.recording([module]):
        for value, options in calls:
            module.log("key", value, **options)
    (entry,) = recorder.take()
    return entry


def test_a_mean_counts_the_samples_that_the_user_counts() -> None:
    entry = record((1.0, {"batch_size": 1}), (4.0, {"batch_size": torch.tensor(3)}))
    assert (entry.value.item(), entry.options["batch_size"]) == (3.25, 4)
    entry = record((1.0, {"batch_size": 0}), (4.0, {"batch_size": 0}))
    assert (entry.value.item(), entry.options["batch_size"]) == (2.5, 0)


def test_a_value_is_kept_as_it_was_when_logged() -> None:
    value = torch.ones((), requires_grad=True).clone()
    recorder, module = LogRecorder(), Logging()
    with recorder.recording([module]):
        module.log("key", value)
        value.detach().add_(5)
    assert recorder.take()[0].value.item() == 1


def test_a_stage_that_leaves_early_logs_and_counts_nothing() -> None:
    recorder, module = LogRecorder(), Logging()
    with recorder.recording([module]):
        module.log("key", 1.0)
        module.sum(2.0)
        with recorder.unfinished():
            module.log("key", 7.0)
            module.log("other", 7.0)
            assert module.sum(7.0).isnan()
            module.sum.update(7.0)
            module.sum.reset()
            assert list(module.both(*VALUES.T.long())) == ["both/accuracy", "both/precision"]
            module.both.update(*VALUES.T.long())
        module.sum.update(3.0)
    (entry,) = recorder.take()
    assert (entry.name, entry.value, module.sum.compute(), module.sum.update_count) == ("key", 1.0, 5.0, 2)
    assert not module.both._groups_checked
    module.sum.reset()
    assert module.sum.compute() == 0


def test_log_is_put_back_after_an_exception_and_the_users_own_too() -> None:
    module, own = Logging(), print
    vars(module)["log"] = own
    recorder = LogRecorder()
    with pytest.raises(ZeroDivisionError), recorder.recording([module]):
        module.log("key", 1 / 0)
    assert module.log is own
    recorder.clear()
    assert recorder.take() == []


def test_a_metric_that_only_its_attribute_names_is_found() -> None:
    module = Logging()
    module.holder = nn.Module()
    vars(module.holder)["metric"] = metric = MeanMetric()
    entry = record((metric, {"metric_attribute": "holder.metric"}), module=module)
    assert (entry.metric, entry.value) == ("holder.metric", None)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ("text", {}, "values cannot be logged"),
        ({"a": 1}, {}, "values cannot be logged"),
        (None, {}, "values cannot be logged"),
        (torch.zeros(3), {}, "must have a single element"),
        (1.0, {"reduce_fx": "median"}, "reduce_fx={min,max,mean,sum}"),
        (1.0, {"reduce_fx": torch.median}, "reduce_fx={min,max,mean,sum}"),
        (1.0, {"sync_dist_group": object()}, "sync_dist_group=...\\) can't be used under a pipeline"),
        (MeanMetric(), {}, "no attribute of the LightningModule"),
        (1.0, {"progbar": True}, "unexpected keyword argument 'progbar'"),
    ],
)
def test_what_cannot_be_logged_is_refused_when_replayed(value: Any, options: dict[str, Any], message: str) -> None:
    refuse_in_a_step([record((value, options), (value, options))], message)


def test_a_key_logged_in_two_ways_is_refused_when_replayed() -> None:
    recorder, module = LogRecorder(), Logging()
    with recorder.recording([module]):
        for _ in range(2):
            module.log("key", 1.0)
            module.log("key", 1.0, prog_bar=True)
    refuse_in_a_step(recorder.take(), "twice in `training_step` with different arguments")


def refuse_in_a_step(entries: list[LogEntry], message: str) -> None:
    class Refused(Logging):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            with pytest.raises((ValueError, TypeError, MisconfigurationException), match=message):
                replay(self, pickle.loads(pickle.dumps(entries)))
            return self.weight.sum()

    run(Refused(), max_steps=1, limit_val_batches=0)
