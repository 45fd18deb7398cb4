"""States off the device, without a second process: policies, tiers, and steps that equal plain ones to the bit."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_par import HybridStrategy, OffloadPolicy, ZeROStrategy
from lightning_par.offload import ModelOffload, OffloadedUnit, make_tier, num_on_device, offloaded
from lightning_par.offload.reach import update_reach
from lightning_par.offload.tiers import DiskTier, HostTier

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "gpu"}, "offload device='gpu' is unknown"),
        ({"device": "disk"}, 'device="disk" needs path='),
        ({"path": "/x"}, 'device="cpu" keeps none'),
        ({"fraction": 0}, "fraction=0 must be above 0"),
        ({"fraction": 1.5}, "fraction=1.5 must be above 0"),
        ({"fraction": True}, "fraction=True must be above 0"),
    ],
)
def test_policy_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OffloadPolicy(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_stage": 2, "offload": "optimiser"}, "offload='optimiser' is unknown"),
        ({"zero_stage": 2, "offload": True}, "offload=True is unknown"),
        ({"offload": "optimizer"}, "needs zero_stage 1, 2 or 3"),
        ({"zero_stage": 1, "offload": OffloadPolicy(device="disk", path="/no/such/folder")}, "is no existing folder"),
    ],
)
def test_strategy_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HybridStrategy(**options)


def test_words_stand_for_policies() -> None:
    assert ZeROStrategy(stage=1).offload_policy is None
    assert ZeROStrategy(stage=1, offload="optimizer").offload_policy == OffloadPolicy()
    assert ZeROStrategy(stage=3, offload="all").offload_policy == OffloadPolicy(parameters=True)


def test_what_is_used_first_stays_on_the_device() -> None:
    assert num_on_device([10, 10, 10, 10], 1.0) == 0
    assert num_on_device([10, 10, 10, 10], 0.5) == 2
    assert num_on_device([10, 10, 10, 10], 0.6) == 2
    assert num_on_device([100], 0.6) == 0
    assert num_on_device([100], 0.4) == 1
    assert num_on_device([], 0.5) == 0


@pytest.mark.parametrize(
    ("make", "reach"),
    [
        (optim.AdamW, "element"),
        (optim.SGD, "element"),
        (optim.Rprop, "element"),
        (optim.Adafactor, "tensor"),
        (optim.Muon, "tensor"),
        (optim.LBFGS, "model"),
    ],
)
def test_reach_of_an_update(make: Callable[..., Optimizer], reach: str) -> None:
    before = torch.get_rng_state()
    assert update_reach(make([nn.Parameter(torch.ones(4, 4))], lr=0.1)) == reach
    assert torch.equal(before, torch.get_rng_state())


class GlobalTrust(Optimizer):
    """Steps by a length that all parameters together decide."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm, alpha=self.param_groups[0]["lr"])


class Counting(Optimizer):
    """Keeps its count of steps in the parameter group, as schedule-free optimizers do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["k"])


class Net(nn.Module):
    """Three units of two parameters; the second has one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks[1].unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.pow(2).mean()


def units_of(module: Net) -> list[OffloadedUnit]:
    """The root, which holds none of its own, and the blocks."""
    blocks = [OffloadedUnit(block, list(block.parameters()), is_on_host=False) for block in module.blocks]
    return [OffloadedUnit(module, [], is_on_host=False), *blocks]


OVERLAPPED = {"defers": True, "takes_gradients": True, "steps_in_backward": True}


def train(
    policy: OffloadPolicy | None,
    make: Callable[..., Optimizer] = optim.AdamW,
    observed: dict[str, bool] | None = None,
    accumulate: int = 1,
    meddle: Callable[[int, Net, Optimizer], None] = lambda *_: None,
) -> tuple[Net, Optimizer]:
    """Six steps; without a policy, plain ones."""
    torch.manual_seed(0)
    module = Net()
    optimizer = make([{"params": [p for p in module.parameters() if p.ndim == n]} for n in (1, 2)], lr=1e-2)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    offload = None
    if policy is not None:
        offload = ModelOffload(policy, make_tier(policy, CPU), CPU, units_of(module), whole=[], can_take=True)
        offload.attach(optimizer)
        offload.observe(**(observed or dict.fromkeys(OVERLAPPED, False)))
    for step in range(6):
        optimizer.zero_grad()
        for part in range(accumulate):
            loss = module(torch.randn(16, 8)) / accumulate
            if offload is not None:
                offload.before_backward(is_first=part == 0, is_last=part == accumulate - 1)
            loss.backward()
        optimizer.step()
        schedule.step()
        meddle(step, module, optimizer)
    if offload is not None:
        offload.settle()
    return module, optimizer


def assert_same(one: tuple[Net, Optimizer], other: tuple[Net, Optimizer], exact: bool = True) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-7}
    for actual, expected in zip(one[0].parameters(), other[0].parameters(), strict=True):
        torch.testing.assert_close(actual, expected, **tolerance)
    states = one[1].state_dict()["state"], other[1].state_dict()["state"]
    torch.testing.assert_close(*states, **tolerance)


@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD, optim.NAdam, Counting])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_overlapped_steps_equal_plain_ones_to_the_bit(make: Any, accumulate: int) -> None:
    plain = train(OffloadPolicy(overlap=False), make, accumulate=accumulate)
    assert_same(train(OffloadPolicy(), make, OVERLAPPED, accumulate), plain)
    assert_same(train(OffloadPolicy(), make, {**OVERLAPPED, "steps_in_backward": False}, accumulate), plain)
    # And both are what torch's own step does, but for the digits of its fused kernel.
    assert_same(train(None, make, accumulate=accumulate), plain, exact=False)


def test_overlap_does_happen() -> None:
    seen: list[Any] = []

    def look(step: int, module: Net, optimizer: Optimizer) -> None:
        seen.append([parameter.grad is None for parameter in module.parameters()])

    train(OffloadPolicy(), observed=OVERLAPPED, meddle=look)
    assert all(map(all, seen)), "gradients have left their parameters"
    seen.clear()
    train(OffloadPolicy(), meddle=look)
    assert not any(map(all, seen)), "where somebody may look, they stay"


def test_a_backward_that_has_stepped_wants_its_step() -> None:
    module = Net()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    policy = OffloadPolicy()
    offload = ModelOffload(policy, make_tier(policy, CPU), CPU, units_of(module), whole=[], can_take=True)
    offload.attach(optimizer)
    offload.observe(**OVERLAPPED)
    for steps in (True, False):
        offload.before_backward(is_first=True, is_last=True)
        module(torch.randn(2, 8)).backward()
        if steps:
            optimizer.step()
    with pytest.raises(RuntimeError, match="has stepped a part of SGD's parameters, and no step followed"):
        offload.before_backward(is_first=True, is_last=True)


def test_a_module_and_its_optimizer_can_be_copied_and_pickled() -> None:
    module, optimizer = train(OffloadPolicy(), observed=OVERLAPPED)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin.state_dict(), module.state_dict(), rtol=0, atol=0)
        twin(torch.randn(2, 8))
    again = pickle.loads(pickle.dumps(optimizer))
    torch.testing.assert_close(again.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)


class Waiting(optim.SGD):
    """Steps when it is let."""

    may_step = threading.Event()

    def step(self, closure: Any = None) -> None:
        assert self.may_step.wait(timeout=30)
        super().step()


def test_a_step_is_put_off_until_its_unit_is_used() -> None:
    Waiting.may_step.set()
    module = Net()
    optimizer = Waiting(module.parameters(), lr=0.1)
    policy = OffloadPolicy()
    offload = ModelOffload(policy, make_tier(policy, CPU), CPU, units_of(module), whole=[], can_take=True)
    offload.attach(optimizer)
    offload.observe(**{**OVERLAPPED, "steps_in_backward": False})
    before = module.blocks[2].weight.detach().clone()
    module(torch.randn(2, 8)).backward()
    Waiting.may_step.clear()
    optimizer.step()  # comes back although nothing may step yet
    assert torch.equal(module.blocks[2].weight, before)
    threading.Timer(0.2, Waiting.may_step.set).start()
    module.blocks[2](torch.randn(2, 8))
    assert not torch.equal(module.blocks[2].weight, before), "a forward waits for its unit"
    offload.settle()


@pytest.mark.parametrize("fraction", [0.5, 0.2])
def test_a_fraction_stays_on_the_device(fraction: float) -> None:
    module, optimizer = train(OffloadPolicy(fraction=fraction), observed=OVERLAPPED)
    assert_same((module, optimizer), train(None), exact=False)
    found = offloaded(optimizer)
    assert found is not None
    parameters = list(module.parameters())
    count = num_on_device([parameter.numel() for parameter in parameters], fraction)
    assert 0 < count < len(parameters)
    # Two moments and a count of steps for each that has been stepped; off the device also a master.
    stays, leaves = (
        [p.numel() for p in part if p in optimizer.state] for part in (parameters[:count], parameters[count:])
    )
    assert found.state_bytes(on_host=False) == sum(8 * size + 4 for size in stays)
    assert found.state_bytes(on_host=True) == sum(12 * size + 4 for size in leaves)


def scale_in_place(step: int, module: Net, optimizer: Optimizer) -> None:
    if step == 2:
        module.blocks[1].weight.data.mul_(0.5)


def reload(step: int, module: Net, optimizer: Optimizer) -> None:
    if step == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("meddle", [scale_in_place, reload])
@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_what_users_write_between_steps_counts(meddle: Any, device: Any, tmp_path: Path) -> None:
    policy = OffloadPolicy(device=device, path=tmp_path if device == "disk" else None)
    assert_same(train(policy, meddle=meddle), train(None, meddle=meddle), exact=False)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_parameters_that_are_not_contiguous(fraction: float) -> None:
    results = []
    for policy in (None, OffloadPolicy(fraction=fraction)):
        torch.manual_seed(0)
        module = Net()
        for block in module.blocks:
            block.weight = nn.Parameter(block.weight.detach().t().contiguous().t())
        optimizer = optim.AdamW(module.parameters(), lr=0.1)
        if policy is not None:
            offload = ModelOffload(policy, make_tier(policy, CPU), CPU, units_of(module), whole=[], can_take=True)
            offload.attach(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            module(torch.randn(4, 8)).backward()
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        results.append((module, optimizer))
    assert_same(*results, exact=False)


def test_what_is_done_with_is_freed() -> None:
    module, optimizer = train(OffloadPolicy(), observed=OVERLAPPED)
    alive = weakref.ref(optimizer), weakref.ref(module.blocks[0].weight)
    del module, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None], "the thread keeps nothing"


def test_schedulers_do_not_complain() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(OffloadPolicy())


def test_settings_must_not_change_between_a_backward_that_steps_and_the_step() -> None:
    module = Net()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    policy = OffloadPolicy()
    offload = ModelOffload(policy, make_tier(policy, CPU), CPU, units_of(module), whole=[], can_take=True)
    offload.attach(optimizer)
    offload.observe(**OVERLAPPED)
    for rate in (0.1, 0.2):
        offload.before_backward(is_first=True, is_last=True)
        module(torch.randn(2, 8)).backward()
        optimizer.param_groups[0]["lr"] = rate
        if rate == 0.1:
            optimizer.step()
    with pytest.raises(RuntimeError, match="Settings of SGD were changed between a backward"):
        optimizer.step()


def test_a_parameter_used_before_its_unit_is_waited_for() -> None:
    class Penalised(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[2].weight.norm() + super().forward(x)

    results = []
    for policy in (None, OffloadPolicy()):
        torch.manual_seed(0)
        module = Penalised()
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        offload = None
        if policy is not None:
            offload = ModelOffload(policy, make_tier(policy, CPU), CPU, units_of(module), whole=[], can_take=True)
            offload.attach(optimizer)
            offload.observe(**{**OVERLAPPED, "steps_in_backward": False})
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            x = torch.randn(4, 8)
            if offload is None:
                loss = module(x)
            else:
                with offload.forward():
                    loss = module(x)
                offload.before_backward(is_first=True, is_last=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
        if offload is not None:
            assert offload._used_early == {3}
            offload.settle()
    assert results[0] == pytest.approx(results[1], rel=1e-6)


@pytest.mark.parametrize(("make", "words"), [(GlobalTrust, "GlobalTrust looks at several"), (optim.LBFGS, "LBFGS")])
def test_optimizers_that_look_at_all_parameters_are_refused(make: Any, words: str) -> None:
    module = Net()
    policy = OffloadPolicy()
    offload = ModelOffload(policy, make_tier(policy, CPU), CPU, units_of(module), whole=[], can_take=True)
    with pytest.raises(ValueError, match=words):
        offload.attach(make(module.parameters(), lr=0.1))


def test_disk_tier_survives_letting_go_of_memory_and_leaves_no_file(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    tensors = [torch.randn(1000, 300), torch.arange(7), torch.randn(0)]
    held = tier.hold(tensors)
    held[0].add_(1)
    tier.rest(held)
    torch.testing.assert_close(held, [tensors[0] + 1, *tensors[1:]], rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == [], "the file has no name that could be left behind"
    kept = tier.keep([held[0], torch.ones(5)])
    assert kept[0] is held[0]
    assert torch.equal(kept[1], torch.ones(5))


def test_disk_tier_keeps_memory_free(tmp_path: Path) -> None:
    size = 200
    process = psutil.Process()
    tier = DiskTier(tmp_path)
    before = process.memory_info().rss
    held = [tier.hold([torch.ones(size // 4 * MIB // 4)])[0] for _ in range(4)]
    for tensor in held:
        tensor.mul_(2)
        tier.rest([tensor])
    assert process.memory_info().rss - before < size * MIB / 4
    assert all(tensor[-1] == 2 for tensor in held)


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"has no room for 4,032 bytes more of optimizer state .* Set path to a larger"):
        DiskTier(tmp_path).hold([torch.ones(1000)])


def test_a_disk_too_small_for_the_masters_is_refused_before_training(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(DiskTier, "free_bytes", 10)
    module, policy = Net(), OffloadPolicy(device="disk", path=tmp_path)
    offload = ModelOffload(policy, make_tier(policy, CPU), CPU, units_of(module), whole=[], can_take=True)
    with pytest.raises(ValueError, match="10 bytes free, but the master weights of this rank alone take 876"):
        offload.attach(optim.SGD(module.parameters(), lr=0.1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be page-locked here")
def test_memory_that_cannot_be_pinned_falls_back_with_one_warning() -> None:
    tier = HostTier(pin=True)
    with pytest.warns(UserWarning, match="Page-locked host memory can't be had") as caught:
        first, second = tier.hold([torch.ones(3), torch.zeros(3)])
    assert len(caught) == 1
    assert first.tolist() == [1, 1, 1]
    assert second.tolist() == [0, 0, 0]
