"""Finding the blocks that a pipeline cuts."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_par.pipeline_parallel.trunk import CannotSplitError, Trunk, find_trunk
from tests.pipeline_models import MODELS, Residual

pytestmark = pytest.mark.unit

NAMES = {
    "tiny_gpt": "net.blocks",
    "example_gpt": "network.blocks",
    "llama": "network.model.layers",
    "gpt2": "network.transformer.h",
    "vision_transformer": "network.layers",
    "direct_blocks": "blocks",
}


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(Residual() for _ in range(2))
        self.large = nn.Sequential(*(Residual() for _ in range(3)))
        self.bare = nn.Sequential(*(nn.Linear(100, 100) for _ in range(5)))


@pytest.mark.parametrize("model", NAMES)
def test_finds_the_blocks_of_a_module_that_names_none(model: str) -> None:
    assert find_trunk(MODELS[model][0]()) == Trunk(NAMES[model], 4)


def test_takes_the_largest_list_of_composite_blocks_or_the_one_named() -> None:
    assert find_trunk(TwoLists()) == Trunk("large", 3)
    assert find_trunk(TwoLists(), "small") == Trunk("small", 2)
    assert find_trunk(TwoLists(), "bare") == Trunk("bare", 5)


def test_takes_the_outer_of_nested_lists() -> None:
    module = nn.Module()
    module.stages = nn.ModuleList(nn.Sequential(Residual(), Residual()) for _ in range(2))
    assert find_trunk(module).name == "stages"


def test_refuses_a_module_without_blocks() -> None:
    module = nn.Module()
    module.mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(CannotSplitError, match=r'Module has no list of like blocks.*pipeline_blocks="\.\.\.".*"mlp"'):
        find_trunk(module)


@pytest.mark.parametrize("name", ["absent", "blocks.0", ""])
def test_refuses_a_name_that_is_no_list(name: str) -> None:
    with pytest.raises(CannotSplitError, match=f'pipeline_blocks="{name}" is not .*it has "blocks"'):
        find_trunk(MODELS["direct_blocks"][0](), name)


def test_refuses_blocks_that_share_weights() -> None:
    module = TwoLists()
    module.large[2].layers[1].weight = module.large[0].layers[1].weight
    with pytest.raises(CannotSplitError, match=r"large\.0 and large\.2 share the parameter layers\.1\.weight"):
        find_trunk(module)
    same = Residual()
    module.large = nn.Sequential(same, same)
    with pytest.raises(CannotSplitError, match=r"large\.0 and large\.1 share"):
        find_trunk(module, "large")
