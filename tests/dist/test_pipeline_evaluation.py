"""Evaluation under a pipeline gives one process's numbers, also of what is no mean over samples."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchmetrics import MeanMetric
from torchmetrics.functional.classification import multiclass_f1_score

from lightning_par.pipeline_parallel import SCHEDULES
from tests.dist.models import VOCABULARY, TinyGPT, token_data
from tests.dist.parity import SINGLE, Layout
from tests.dist.ranks import Ranks

NUM_SAMPLES, BATCH = 24, 4
"""Samples in all, and in a batch of one data rank."""


def piped(world_size: int = 2, **options: Any) -> Layout:
    return Layout("piped", world_size, {"pipeline_parallel_size": 2, **options})


class NonLinear(TinyGPT):
    """Measures what the mean over parts of a batch would get wrong."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        self.perplexity = MeanMetric()
        self.written: dict[str, list[list[int]]] = defaultdict(list)

    def _measure(self, kind: str, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        index, tokens = batch
        logits, targets = self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        perplexity = F.cross_entropy(logits, targets).exp()
        self.perplexity.update(perplexity)
        self.log(f"{kind}_perplexity", self.perplexity)
        f1 = multiclass_f1_score(logits, targets, VOCABULARY, average="macro")
        self.log_dict({f"{kind}_exp": perplexity, f"{kind}_f1": f1}, sync_dist=True)
        self.log(f"{kind}_largest", logits.std(), reduce_fx="max", sync_dist=True)
        self.written[f"{kind} {batch_idx}"].append(index.tolist())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._measure("val", batch, batch_idx)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._measure("test", batch, batch_idx)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        """Each sample's place among those of its batch, and the score of the batch as a whole."""
        index, tokens = batch
        scores = self(tokens[:, :-1]).logsumexp(-1).mean(-1)
        self.written[f"predict {batch_idx}"].append(index.tolist())
        return {"index": index, "place": scores.argsort().argsort(), "spread": scores.std()}


def loader(layout: Layout, batch_size: int, num_samples: int, num_ranks: int) -> DataLoader[Any]:
    """Batches of each rank; for one process those of `num_ranks` ranks in turn."""
    data = token_data(num_samples)
    if layout.strategy is not None:
        return DataLoader(data, batch_size)
    shares = [range(rank, num_samples, num_ranks) for rank in range(num_ranks)]
    starts = range(0, len(shares[0]), batch_size)
    order = [index for start in starts for share in shares for index in share[start : start + batch_size]]
    return DataLoader(Subset(data, order), batch_size)


def evaluate(layout: Layout, batch_size: int = BATCH, num_samples: int = NUM_SAMPLES, num_ranks: int = 1) -> Any:
    torch.manual_seed(0)
    module, trainer = NonLinear(), layout.trainer()
    batches = loader(layout, batch_size, num_samples, num_ranks)
    metrics = {**trainer.validate(module, batches, verbose=False)[0], **trainer.test(module, batches, verbose=False)[0]}
    predictions = trainer.predict(module, batches)
    return metrics, predictions, dict(module.written), int(os.environ["RANK"])


def in_turns(by_rank: list[list[Any]]) -> list[Any]:
    """One of each rank's, then the next."""
    longest = max(map(len, by_rank))
    return [items[number] for number in range(longest) for items in by_rank if number < len(items)]


ONE_REPLICA = [*({"schedule": schedule} for schedule in SCHEDULES), {"zero_stage": 1}]
TWO_REPLICAS = [{}, {"zero_stage": 3}, {"schedule": "zbv"}, {"schedule": "interleaved_1f1b", "zero_stage": 3}]
CASES = [(2, options) for options in ONE_REPLICA] + [(4, options) for options in TWO_REPLICAS]


@pytest.mark.parametrize(("world_size", "options"), CASES, ids=[f"{n} {list(o.values())}" for n, o in CASES])
def test_a_step_sees_whole_batches_once(ranks: Ranks, world_size: int, options: dict[str, Any]) -> None:
    num_replicas = world_size // 2
    (expected,) = ranks(1, evaluate, SINGLE, num_ranks=num_replicas)
    results = ranks(world_size, evaluate, piped(world_size, **options))
    metrics, predictions, written, _ = expected
    for seen, *_ in results:
        assert seen == pytest.approx(metrics, rel=1e-5)
    torch.testing.assert_close(in_turns([seen for _, seen, _, _ in results[:num_replicas]]), predictions)
    torch.testing.assert_close(in_turns([seen for _, seen, _, _ in results[num_replicas:]]), predictions)
    # The rank of a replica with the last stage has finished each step once, with the whole batch.
    finished = [seen for _, _, seen, _ in results if seen]
    assert len(finished) == num_replicas
    for kind in ("val", "test", "predict"):
        num_batches = NUM_SAMPLES // BATCH // num_replicas
        calls = [[calls for calls in seen[f"{kind} {idx}"]] for idx in range(num_batches) for seen in finished]
        assert calls == [written[f"{kind} {idx}"] for idx in range(NUM_SAMPLES // BATCH)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_predictions_come_once_per_sample_in_the_order_of_the_dataset(ranks: Ranks, world_size: int) -> None:
    num_samples = 23  # the last batches are smaller, and the replicas' differ
    num_replicas = world_size // 2
    results = ranks(world_size, evaluate, piped(world_size), num_samples=num_samples)
    by_replica = [[batch["index"].tolist() for batch in predictions] for _, predictions, _, _ in results[:num_replicas]]
    samples = [[index for batch in batches for index in batch] for batches in by_replica]
    assert in_turns(samples) == list(range(num_samples))


@pytest.mark.parametrize("options", [{}, {"schedule": "dualpipev"}], ids=["1f1b", "dualpipev"])
def test_the_knob_cuts_batches_into_parts(ranks: Ranks, options: dict[str, Any]) -> None:
    """A mean over batches then is one over their parts, as in one process with smaller batches."""
    whole, parts = (ranks(1, evaluate, SINGLE, batch_size)[0][0] for batch_size in (2 * BATCH, BATCH))
    results = ranks(2, evaluate, piped(num_eval_microbatches=2, **options), 2 * BATCH)
    for metrics, *_ in results:
        assert metrics == pytest.approx(parts, rel=1e-5)
        assert metrics["val_perplexity"] != pytest.approx(whole["val_perplexity"], rel=1e-5)
