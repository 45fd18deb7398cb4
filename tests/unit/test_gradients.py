"""Norms and clipping of one process equal torch's own; the ranks' are tested by the parity matrix."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_par.gradients import clip_by_norm_, clip_by_value_, total_norm
from lightning_par.model_state import count_parameters, expected_state_bytes, measure_state_bytes


def _parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (1,), (2, 2))]
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn_like(parameter) * 3
    return parameters


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_norm_equals_torch(norm_type: float, max_norm: float) -> None:
    ours, theirs = _parameters(), _parameters()
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(clip_by_norm_(ours, max_norm, norm_type), expected.double())
    for own, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert ours[-1].grad is None


def test_value_equals_torch() -> None:
    ours, theirs = _parameters(), _parameters()
    nn.utils.clip_grad_value_(theirs, 0.5)
    clip_by_value_(ours, 0.5)
    for own, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_no_gradients() -> None:
    assert total_norm([nn.Parameter(torch.ones(2))]) == 0
    assert total_norm([]) == 0


def test_half_precision_gradients_do_not_overflow() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    parameter.grad = torch.full((4,), 6e4, dtype=torch.float16)
    assert total_norm([parameter]).item() == pytest.approx(1.2e5, rel=1e-3)


def test_model_state_of_one_process_is_sixteen_bytes_a_parameter() -> None:
    module = nn.Linear(8, 4)
    frozen = nn.Linear(8, 4).requires_grad_(False)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    parameters = [*module.parameters(), *frozen.parameters()]
    assert count_parameters(parameters) == 72
    assert expected_state_bytes(parameters) == 16 * 36 + 4 * 36
    steps = 2 * 4  # Adam keeps a float32 step count for each tensor
    measured = measure_state_bytes(parameters, [optimizer])
    assert measured == {"parameters": 4 * 72, "gradients": 4 * 36, "optimizer": 8 * 36 + steps}
