"""What the server and its workers send and hold, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_par.communication import CommunicationCounter
from lightning_par.process_group import rank_label
from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import ALL, BATCH, SINGLE, Layout, Recorder, differences, layouts, report, tensors, train_loader
from tests.dist.ranks import OneProcess, RankError, Ranks

FLOAT = 4
LENGTH = 4


class SilentGPT(TinyGPT):
    """Logs nothing, so that only the layout communicates."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class CountSecondStep(Callback):
    """Counts what the second step moves, and reads what is held after it."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.counter: CommunicationCounter = trainer.strategy.count_communication()
            self.counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if args[-1] == 1:
            self.counter.__exit__(None, None, None)
            self.state = trainer.strategy.model_state_bytes()


def measure(layout: Layout) -> dict[str, Any]:
    count, module = CountSecondStep(), SilentGPT()
    trainer = layout.trainer(max_steps=2, callbacks=[count])
    trainer.fit(module, DataLoader(token_data(8 * layout.data_parallel_size), 4))
    return {
        "sent": count.counter.bytes_by_axis("send").get("dp_replicate", 0),
        "state": count.state,
        "expected": trainer.strategy.expected_model_state_bytes(),
        "parameters": trainer.strategy.total_num_parameters,
        "tensors": len(list(module.parameters())),
    }


@layouts("ps2", "ps4")
def test_the_servers_traffic_grows_with_its_workers(ranks: Ranks, layout: Layout) -> None:
    seen = ranks(layout.world_size, measure, layout)
    server = (layout.strategy or {}).get("server_rank", 0)
    psi = seen[0]["parameters"] * FLOAT
    flags = seen[0]["tensors"]  # a byte for each: whether the worker has used it
    for rank, one in enumerate(seen):
        num_receivers = layout.world_size - 1
        assert one["sent"] == (num_receivers * psi if rank == server else psi + flags)


@layouts("ps2", "ps2+1")
def test_the_server_alone_holds_optimizer_state(ranks: Ranks, layout: Layout) -> None:
    server, *workers = ranks(layout.world_size, measure, layout)
    psi = server["parameters"] * FLOAT
    steps = FLOAT * server["tensors"]  # Adam counts them in a tensor each
    assert server["state"] == {"parameters": psi, "gradients": psi, "optimizer": 2 * psi + steps}
    assert server["expected"] == 4 * psi
    for worker in workers:
        assert worker["state"] == {"parameters": psi, "gradients": 0, "optimizer": 0}
        assert worker["expected"] == psi


class Thaw(BaseFinetuning):
    """Freezes the blocks for an epoch."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            pl_module.net.blocks.requires_grad_(True)


class WholeOptimizer(TinyGPT):
    """Its optimizer has the frozen parameters too."""

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def thawed(layout: Layout) -> Any:
    recorder = Recorder()
    torch.manual_seed(0)
    trainer = layout.trainer(max_epochs=2, callbacks=[Thaw(), recorder])
    trainer.fit(WholeOptimizer(num_blocks=1), train_loader(layout, token_data(2 * BATCH), BATCH))
    return recorder.outcome


@pytest.mark.parametrize("name", ["dp2", "ps2", "zero1x2", "zero3x2", "tp2", "dp2xtp2", "zero2x2 half off"])
def test_what_is_thawed_later_is_trained_on_all_ranks(ranks: Ranks, one_process: OneProcess, name: str) -> None:
    whole = tensors(ranks(ALL[name].world_size, thawed, ALL[name]))
    found = differences(whole, tensors([one_process(thawed)]), 1e-5)
    assert not found, report(found)


class BatchNormed(LightningModule):
    """Has statistics that only ranks with data know."""

    def __init__(self, by_hand: bool = False, lbfgs: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LENGTH, LENGTH), nn.BatchNorm1d(LENGTH))
        self.automatic_optimization = not by_hand
        self._lbfgs = lbfgs

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return (torch.optim.LBFGS if self._lbfgs else torch.optim.SGD)(self.parameters(), lr=0.1)


def statistics_in_a_file(layout: Layout, path: str) -> Tensor:
    torch.manual_seed(0)
    module = BatchNormed()
    trainer = layout.trainer(max_epochs=1)
    trainer.fit(module, train_loader(layout, TensorDataset(torch.randn(8, LENGTH) + 3), 4))
    trainer.save_checkpoint(path)
    return torch.load(path)["state_dict"]["net.1.running_mean"] if trainer.is_global_zero else module.net[1].running_mean


def test_a_server_without_data_saves_its_workers_statistics(ranks: Ranks, tmp_path: Any) -> None:
    layout = Layout("ps1+1", 2, {"sync": "parameter_server", "dedicated": True})
    saved, of_worker = ranks(2, statistics_in_a_file, layout, str(tmp_path / "a.ckpt"))
    (expected,) = ranks(1, statistics_in_a_file, SINGLE, str(tmp_path / "b.ckpt"))
    torch.testing.assert_close(saved, of_worker)
    torch.testing.assert_close(saved, expected)


def refused(layout: Layout, module: dict[str, bool]) -> None:
    data = DataLoader(TensorDataset(torch.randn(8, LENGTH)), 4)
    layout.trainer(max_epochs=1).fit(BatchNormed(**module), data)


@pytest.mark.parametrize(
    ("strategy", "module", "words"),
    [
        ({}, {"lbfgs": True}, "LBFGS asks for the loss several times a step"),
        ({"dedicated": True}, {"by_hand": True}, "BatchNormed optimizes by hand .* Use dedicated=False"),
    ],
)
def test_refuses_in_words_on_all_ranks(
    ranks: Ranks, strategy: dict[str, Any], module: dict[str, bool], words: str
) -> None:
    layout = Layout("refused", 2, {"sync": "parameter_server", **strategy})
    with pytest.raises(RankError, match=words) as caught:
        ranks(2, refused, layout, module)
    assert {failure.rank for failure in caught.value.failures if not failure.is_secondary} == {0, 1}


def fails_on_the_worker(layout: Layout) -> None:
    class Failing(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("the worker's own words")

    layout.trainer(max_epochs=1).fit(Failing(num_blocks=1), DataLoader(token_data(8), 4))


def test_an_error_of_a_worker_reaches_a_server_without_data(ranks: Ranks) -> None:
    layout = Layout("ps1+1", 2, {"sync": "parameter_server", "dedicated": True})
    with pytest.raises(RankError, match="the worker's own words") as caught:
        ranks(2, fails_on_the_worker, layout)
    assert {failure.rank for failure in caught.value.failures if not failure.is_secondary} == {0, 1}


class LosesARank(TinyGPT):
    """One rank fails in its second step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == self._rank:
            raise ValueError(f"lost: {rank_label()}")
        return super().training_step(batch, batch_idx)


def lose(layout: Layout, rank: int) -> None:
    layout.trainer(max_epochs=1).fit(LosesARank(rank), DataLoader(token_data(32), 4))


@pytest.mark.parametrize(("rank", "role"), [(0, "parameter server"), (1, "worker")])
def test_a_lost_rank_ends_the_job_with_its_role(ranks: Ranks, rank: int, role: str) -> None:
    with pytest.raises(RankError, match=rf"lost: rank {rank} of 2 \({role}, "):
        ranks(2, lose, ALL["ps2"], rank)
