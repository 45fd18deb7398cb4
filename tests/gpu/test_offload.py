"""States off an accelerator: streams and page-locked memory change no bit, and states are where the policy says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_par import OffloadPolicy, ZeROStrategy
from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import QUIET, relative_difference


def fit(offload: Any, stage: int = 2, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Final weights, and where the model state is."""
    torch.manual_seed(0)
    module = TinyGPT(num_blocks=4)
    strategy = ZeROStrategy(stage=stage, offload=offload, find_unused_parameters=False)
    trainer = Trainer(**{**QUIET, "accelerator": "gpu"}, devices=1, strategy=strategy, max_epochs=2, **options)
    trainer.fit(module, DataLoader(token_data(64), 8))
    weights = {name: value.cpu() for name, value in trainer.strategy.lightning_module_state_dict().items()}
    return weights, trainer.strategy.model_state_by_place()


SCENARIOS = [
    {},
    {"gradient_clip_val": 0.2},
    {"accumulate_grad_batches": 2},
    {"precision": "bf16-mixed"},
    {"precision": "16-mixed", "gradient_clip_val": 0.2},
]


@pytest.mark.parametrize("options", SCENARIOS)
@pytest.mark.parametrize("parameters", [False, True])
def test_streams_change_no_bit(parameters: bool, options: dict[str, Any]) -> None:
    plain, _ = fit(OffloadPolicy(parameters=parameters, overlap=False, pin_memory=False), **options)
    overlapped, _ = fit(OffloadPolicy(parameters=parameters), **options)
    assert all(torch.equal(overlapped[name], plain[name]) for name in plain)
    expected, _ = fit(None, **options)
    tolerance = 5e-2 if "precision" in options else 1e-4
    assert all(relative_difference(plain[name], expected[name]) <= tolerance for name in expected)


def test_states_leave_the_device(tmp_path: Path) -> None:
    _, none = fit(None)
    _, optimizer = fit("optimizer")
    _, everything = fit("all", stage=3)
    _, disk = fit(OffloadPolicy(device="disk", path=tmp_path))
    _, half = fit(OffloadPolicy(fraction=0.5))
    assert set(none) == {"device"}
    assert optimizer["device"]["optimizer"] == optimizer["device"]["gradients"] == 0
    assert sum(everything["device"].values()) == 0
    assert disk["disk"]["optimizer"] == optimizer["host"]["optimizer"]
    assert 0 < half["device"]["optimizer"] < none["device"]["optimizer"]


def test_peak_memory_falls() -> None:
    peaks = []
    for offload in (None, "optimizer", "all"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        fit(offload, stage=3)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] > peaks[1] > peaks[2]
