"""Clusters: the configurations that ship, and figures that cannot be."""

from __future__ import annotations

import pytest

from lightning_par.planner import Cluster
from tests.planner_models import preset
from tests.unit.configuration import options

PRESETS = [name for name in options("cluster") if name != "this"]


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_a_possible_cluster(name: str) -> None:
    cluster = Cluster.from_mapping(preset(name))
    assert cluster.num_devices >= 1
    assert cluster.inside.bandwidth >= cluster.between.bandwidth
    assert cluster.device.peak("bf16") >= cluster.device.peak("fp32")
    assert cluster.device.reserved < 0.05 * cluster.device.memory
    assert Cluster.from_mapping(cluster.to_dict()) == cluster


def test_only_ethernet_between_nodes_is_slow() -> None:
    slow = {name for name in PRESETS if Cluster.from_mapping(preset(name)).has_slow_link}
    assert slow == {"4x8xa100_slow", "2x4xcpu"}


def test_a_preset_takes_overrides() -> None:
    cluster = Cluster.from_mapping(preset("8xh100", "cluster.nodes=128", "cluster.between.bandwidth=10e9"))
    assert cluster.num_devices == 1024
    assert cluster.has_slow_link


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.nodes=0", "cluster.nodes=0 must be a positive integer"),
        ("cluster.device.memory=-1", "device.memory=-1.0 must be a finite number of bytes above 0"),
        ("cluster.inside.bandwidth=inf", "bandwidth=inf must be a finite number"),
        ("cluster.inside.latency=2", "at least 0 and below 1 second"),
        ("cluster.device.efficiency=1.5", "efficiency=1.5 must be above 0 and at most 1"),
        ("cluster.device.reserved=1e12", "must be less than device.memory"),
        ("+cluster.device.flops.int3=1e12", "'int3', which is not one of fp32"),
        ("~cluster.device.flops.fp32", "must give at least fp32"),
        ("+cluster.host.dsk=1", "host.dsk is unknown. Did you mean host.disk?"),
    ],
)
def test_impossible_figures_are_refused_in_words(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=".*") as caught:
        Cluster.from_mapping(preset("8xh100", override))
    assert words in str(caught.value)


def test_cpu_ranks_share_the_memory_of_their_host() -> None:
    with pytest.raises(ValueError, match="do not fit host.memory"):
        Cluster.from_mapping(preset("2x4xcpu", "cluster.devices_per_node=8"))
