"""The checksum of a batch tells batches apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from lightning_par.pipeline_parallel.same_batch import batch_fingerprint

pytestmark = pytest.mark.unit

BASE = torch.arange(6.0)
DIFFERENT: list[Any] = [
    BASE,
    BASE.flip(0),
    BASE.double(),
    BASE.reshape(2, 3),
    BASE.bfloat16(),
    BASE.numpy() + 1,
    [BASE],
    (BASE,),
    {"x": BASE},
    {"y": BASE},
    BatchEncoding({"x": BASE}),
    [BASE[:3], BASE[3:]],
    [BASE[:4], BASE[4:]],
    [BASE, "a"],
    [BASE, "b"],
    [BASE, None],
    [BASE, 1],
    [BASE, True],
    torch.empty(0),
    torch.empty(0, 3),
    torch.tensor(1.5),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    torch.tensor([1 + 2j]).conj(),
    np.array(["a", "b"]),
    [],
]


def test_every_difference_counts() -> None:
    found = [batch_fingerprint(batch) for batch in DIFFERENT]
    assert len(set(found)) == len(found)
    assert all(0 <= value < 2**63 for value in found)


def test_only_values_shapes_and_types_count() -> None:
    strided = torch.arange(12.0)[::2] / 2
    assert batch_fingerprint([strided]) == batch_fingerprint([BASE])
    assert batch_fingerprint(BASE.to_sparse()) == batch_fingerprint(BASE)
    assert batch_fingerprint([object()]) == batch_fingerprint([object()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_does_not_count() -> None:
    assert batch_fingerprint(BASE.cuda()) == batch_fingerprint(BASE)
