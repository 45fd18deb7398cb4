"""Batches of any form are cut into equal micro-batches, and what steps return for them becomes whole again."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_par.pipeline_parallel.microbatches import batch_size_of, merge, num_parts, split
from lightning_par.pipeline_parallel.same_batch import batch_fingerprint

pytestmark = pytest.mark.unit

X = torch.arange(12.0).reshape(4, 3)
Y = torch.arange(4)


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Sample:
    inputs: Tensor
    texts: list[str]
    is_labelled: bool = True

    def __post_init__(self) -> None:
        assert len(self.inputs) == 4, "a micro-batch is not made by the constructor"


class Detections(list):
    pass


BATCHES: dict[str, Any] = {
    "tensor": X,
    "list": [X, Y],
    "tuple": (X, Y),
    "namedtuple": Pair(X, Y),
    "dict": {"x": X, "y": Y},
    "ordered": OrderedDict(x=X, y=Y),
    "default": defaultdict(list, x=X),
    "user dict": UserDict(x=X, y=Y),
    "encoding": BatchEncoding({"input_ids": X, "labels": Y}),
    "dataclass": Sample(X, ["a", "b", "c", "d"]),
    "nested": {"pair": Pair(X, Y), "rest": [{"x": X}, (Y, [X])]},
    "strings": (X, ["a", "b", "c", "d"]),
    "tuple of strings": (X, ("a", "b", "c", "d")),
    "array": (X, np.arange(4)),
    "detections": (X, [{"boxes": torch.zeros(count, 4)} for count in (1, 4, 0, 2)]),
    "masks": (X, [torch.zeros(count, 5, 5) for count in (1, 2, 0, 3)]),
    "list subclass": (X, Detections(["a", "b", "c", "d"])),
    "strings alone": ["a", "b", "c", "d"],
}


def parts_of(batch: Any) -> tuple[Any, Any]:
    assert batch_size_of(batch) == 4
    first, second = split(batch, 2)
    return first, second


def same(one: Any, other: Any) -> bool:
    return batch_fingerprint(one) == batch_fingerprint(other)


@pytest.mark.parametrize("name", ["tensor", "list", "tuple", "namedtuple", "dict", "ordered", "default", "nested"])
def test_tensors_are_cut_wherever_they_are(name: str) -> None:
    for part, rows in zip(parts_of(BATCHES[name]), (slice(0, 2), slice(2, 4)), strict=True):
        expected = torch.utils._pytree.tree_map(lambda tensor, rows=rows: tensor[rows], BATCHES[name])
        assert type(part) is type(BATCHES[name])
        assert same(part, expected)


def test_parts_are_views() -> None:
    _, second = split({"x": X}, 2)
    assert second["x"].data_ptr() == X[2:].data_ptr()


@pytest.mark.parametrize("name", ["user dict", "encoding"])
def test_other_mappings_keep_their_type(name: str) -> None:
    batch = BATCHES[name]
    first, second = parts_of(batch)
    assert type(first) is type(batch)
    assert list(second) == list(batch)
    assert [len(value) for value in [*first.values(), *second.values()]] == [2] * 4
    assert [len(value) for value in batch.values()] == [4, 4]


def test_an_encoding_is_read_by_attribute_and_keeps_what_hangs_on_it() -> None:
    encoding: Any = BatchEncoding({"input_ids": X})
    encoding._encodings = ["a", "b", "c", "d"]
    second = split(encoding, 2)[1]
    assert second.input_ids.tolist() == X[2:].tolist()
    assert second.encodings == ["c", "d"]
    assert encoding.encodings == ["a", "b", "c", "d"]


def test_a_dataclass_is_cut_without_its_constructor() -> None:
    _, second = parts_of(BATCHES["dataclass"])
    assert isinstance(second, Sample)
    assert second.inputs.tolist() == X[2:].tolist()
    assert (second.texts, second.is_labelled) == (["c", "d"], True)


@pytest.mark.parametrize("name", ["strings", "tuple of strings", "array", "list subclass"])
def test_what_lies_beside_tensors_is_cut_with_them(name: str) -> None:
    batch = BATCHES[name]
    (_, first), (_, second) = parts_of(batch)
    assert type(first) is type(batch[1])
    assert list(first) == list(batch[1][:2])
    assert list(second) == list(batch[1][2:])


@pytest.mark.parametrize("name", ["detections", "masks"])
def test_one_thing_per_sample_is_not_cut_inside(name: str) -> None:
    batch = BATCHES[name]
    for (inputs, per_sample), rows in zip(parts_of(batch), (slice(0, 2), slice(2, 4)), strict=True):
        assert same((inputs, per_sample), (X[rows], batch[1][rows]))


def test_a_pair_is_no_batch_of_two() -> None:
    batch = (X[:2], torch.tensor(0.5))
    assert [same(part, (X[row : row + 1], batch[1])) for row, part in enumerate(split(batch, 2))] == [True, True]


def test_loaders_beside_each_other_are_cut_each() -> None:
    batch = [{"x": X[:2]}, {"x": X[2:]}]
    assert same(split(batch, 2)[1], [{"x": X[1:2]}, {"x": X[3:]}])


def test_a_list_of_strings_alone_is_cut() -> None:
    assert parts_of(BATCHES["strings alone"]) == (["a", "b"], ["c", "d"])


def test_everything_else_goes_to_each_part() -> None:
    batch = {"x": X, "scale": torch.tensor(2.0), "weights": torch.ones(7), "names": ["a", "b"], "mode": "train"}
    for part in split(batch, 4):
        assert all(part[key] is batch[key] for key in ("scale", "weights", "mode"))
        assert part["names"] == ["a", "b"]


def test_a_single_part_is_the_batch_itself() -> None:
    assert split(BATCHES["dict"], 1)[0] is BATCHES["dict"]


def test_a_batch_without_tensors_or_lists_is_one_sample() -> None:
    assert batch_size_of({"index": 3}) == 1


@pytest.mark.parametrize(
    ("batch_size", "wanted", "count"), [(8, 4, 4), (6, 4, 3), (7, 4, 1), (2, 4, 2), (1, 4, 1), (12, 5, 4), (0, 4, 1)]
)
def test_the_largest_number_of_parts_that_divides(batch_size: int, wanted: int, count: int) -> None:
    assert num_parts(batch_size, wanted) == count


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="0 micro-batches"):
        num_parts(4, 0)
    with pytest.raises(ValueError, match="4 samples can't be cut into 3"):
        split(X, 3)


@pytest.mark.parametrize(
    "name",
    ["tensor", "tuple", "namedtuple", "dict", "ordered", "default", "user dict", "encoding", "dataclass", "strings"]
    + ["array", "detections", "masks", "strings alone"],
)
def test_what_was_cut_is_whole_again(name: str) -> None:
    assert same(merge(split(BATCHES[name], 2)), BATCHES[name])


def test_losses_and_numbers_become_their_mean() -> None:
    merged = merge([{"loss": torch.tensor(value), "count": value, "hits": torch.tensor(value)} for value in (1, 2)])
    assert (merged["loss"].item(), merged["count"], merged["hits"].item()) == (1.5, 1.5, 1.5)


def test_predictions_come_back_once_per_sample() -> None:
    outputs = [{"logits": X[:2], "texts": ["a", "b"], "model": "gpt", "state": None}]
    outputs += [{"logits": X[2:], "texts": ["c", "d"], "model": "gpt", "state": None}]
    assert same(merge(outputs), {"logits": X, "texts": ["a", "b", "c", "d"], "model": "gpt", "state": None})
    assert [tokens.tolist() for tokens in merge([[X[0], X[1]], [X[2], X[3]]])] == X.tolist()
    assert merge([np.arange(2), np.arange(2, 4)]).tolist() == [0, 1, 2, 3]


def test_a_models_own_output_keeps_its_type() -> None:
    outputs: Any = [CausalLMOutput(loss=loss, logits=part) for loss, part in zip(Y[:2], split(X, 2), strict=True)]
    merged = merge(outputs)
    assert isinstance(merged, CausalLMOutput)
    assert (merged["loss"].item(), merged["logits"].tolist()) == (0.5, X.tolist())


@pytest.mark.parametrize("outputs", [[], [None], [None, None]])
def test_nothing_stays_nothing(outputs: list[None]) -> None:
    assert merge(outputs) is None


def test_outputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="different structures"):
        merge([{"a": X}, {"b": X}])
    with pytest.raises(ValueError, match=r"shapes \(4, 3\), \(4, 2\)"):
        merge([X, X[:, :2]])
