"""The machine at hand as a cluster: rates measured in a few seconds, and kept in the user's cache."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lightning_par.launch import DEFAULT_CPU_RANKS
from lightning_par.planner.cluster import Cluster, Device, Disk, Host, Link

__all__ = ["cache_file", "measure_cluster", "measure_links", "with_link"]

_GLOO = Link(1.1e9, 200e-6)
"""gloo between ranks of one machine, until it is measured: DeepSpeed PR 5391 (32 MB in 31 ms, 64 KB in 0.23 ms)."""
_PCIE = Link(20e9, 10e-6)
"""Accelerators of one machine, until they are measured."""
_ETHERNET = Link(1.0e9, 100e-6)
"""Machines, until they are measured."""
_CPU_RESERVED = 0.3e9
"""Python, torch and Lightning."""
_GPU_RESERVED = 0.7e9
"""A CUDA context and one communicator: 0.3-0.5 GB and about 0.5 GB."""
_LARGE = 16 * 2**20
"""Bytes of a message that shows a link's bandwidth."""


def measure_cluster(
    devices_per_node: int | None = None, nodes: int = 1, accelerator: str = "auto", refresh: bool = False
) -> Cluster:
    """This machine, and as many like it as ``nodes`` says.

    Args:
        devices_per_node: Ranks of a machine; ``None`` for each GPU one, or 2 where there are none.
        nodes: Machines.
        accelerator: ``"auto"``, ``"gpu"``, ``"cuda"`` or ``"cpu"``.
        refresh: Measure again even if there is a measurement.
    """
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    devices = devices_per_node or launched or (torch.cuda.device_count() if on_gpu else DEFAULT_CPU_RANKS)
    path = cache_file(f"{'cuda' if on_gpu else 'cpu'}-{devices}")
    known = None if refresh else _read(path)
    cluster = known or (_measure_gpu(devices) if on_gpu else _measure_cpu(devices))
    link = _link_of_launched_ranks(on_gpu)
    if link is not None:
        nodes = max(nodes, int(os.environ["WORLD_SIZE"]) // max(1, launched))
        cluster = with_link(cluster.sized(nodes=nodes), link)
    if known is None or link is not None:
        _write(path, cluster.sized(nodes=1))
    return cluster.sized(nodes=nodes)


def with_link(cluster: Cluster, link: Link) -> Cluster:
    """The cluster with the link that was measured between all its ranks.

    A ring over several machines is as fast as the network, of which each rank of a machine has a share.
    """
    if cluster.nodes == 1:
        return replace(cluster, inside=link)
    return replace(cluster, between=replace(link, bandwidth=link.bandwidth / cluster.devices_per_node))


def _link_of_launched_ranks(on_gpu: bool) -> Link | None:
    """Under torchrun the link between its ranks, else nothing. A collective of them."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) < 2 or "MASTER_ADDR" not in os.environ:
        return None
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        return measure_links({"world": dist.group.WORLD}, device)["world"]
    finally:
        dist.destroy_process_group()


def cache_file(kind: str) -> Path:
    """Where measurements of this machine are kept."""
    folder = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(folder) / "lightning_par" / "clusters" / f"{platform.node() or 'this'}-{kind}.json"


def measure_links(groups: Mapping[str, Any], device: torch.device) -> dict[str, Link]:
    """Bandwidth and latency of some process groups. A collective of each.

    Args:
        groups: Mesh axis -> its process group; those of one rank are left out.
        device: This rank's device.

    Returns:
        Links in the convention of :mod:`lightning_par.planner.traffic`: what an all-reduce of n bytes moves is 2n.
    """
    links = {}
    for axis, group in groups.items():
        size = dist.get_world_size(group)
        if size == 1:
            continue
        small, large = torch.zeros(1, device=device), torch.zeros(_LARGE // 4, device=device)
        # The usual time, not the shortest: in a step, ranks wait for the last of them.
        short = statistics.median(_times(partial(dist.all_reduce, small, group=group), device, tries=20))
        long = statistics.median(_times(partial(dist.all_reduce, large, group=group), device, tries=5))
        figures = torch.tensor([short, long], dtype=torch.float64, device=device)
        dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=group)  # the same on all its ranks
        short, long = figures.tolist()
        rounds = 2 * max(1, (size - 1).bit_length())
        moved = 2 * _LARGE * (size - 1) / size
        links[axis] = Link(moved / max(long - short, 1e-6), min(short / rounds, 0.5))
    return links


def _measure_cpu(ranks: int) -> Cluster:
    threads, cores = torch.get_num_threads(), psutil.cpu_count(logical=False) or os.cpu_count() or 1
    memory = float(psutil.virtual_memory().total)
    try:
        torch.set_num_threads(max(1, cores // ranks))
        cpu = torch.device("cpu")
        # Ranks share the cores: more ranks than cores leave each a part of one.
        share = min(1.0, cores / ranks)
        rates = {name: share * _matmul_rate(dtype, cpu, 768) for name, dtype in _types(cpu).items()}
        bandwidth = _copy_rate(cpu, 64 * 2**20)
        overhead = _overhead(cpu) / share
    finally:
        torch.set_num_threads(threads)
    device = Device(
        name=f"{max(1, cores // ranks)} of {cores} CPU cores",
        memory=memory / ranks,
        flops=rates,
        memory_bandwidth=bandwidth / ranks,
        efficiency=1.0,  # the rates are what products reach
        overhead=overhead,
        reserved=min(_CPU_RESERVED, 0.05 * memory / ranks),
        is_gpu=False,
    )
    host = Host(memory=memory, memory_bandwidth=bandwidth, link=bandwidth, disk=_disk())
    return Cluster(
        f"{ranks} CPU ranks of this machine", device, ranks, 1, _GLOO, _ETHERNET, host, "measured here; links assumed"
    )


def _measure_gpu(devices: int) -> Cluster:
    gpu = torch.device("cuda", 0)
    _, total = torch.cuda.mem_get_info(gpu)
    pinned = torch.empty(256 * 2**20, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(pinned, device=gpu)
    link = pinned.nbytes / _best(lambda: there.copy_(pinned, non_blocking=True), gpu)
    rates = {name: _matmul_rate(dtype, gpu, 8192) for name, dtype in _types(gpu).items()}
    device = Device(
        name=torch.cuda.get_device_name(gpu),
        memory=float(total),
        flops=rates,
        memory_bandwidth=_copy_rate(gpu, 2**30),
        efficiency=1.0,
        overhead=_overhead(gpu),
        reserved=_GPU_RESERVED,
    )
    memory = float(psutil.virtual_memory().total)
    host = Host(memory, _copy_rate(torch.device("cpu"), 256 * 2**20), link, _disk())
    return Cluster(f"{devices} GPUs of this machine", device, devices, 1, _PCIE, _ETHERNET, host, "measured here")


def _types(device: torch.device) -> dict[str, torch.dtype]:
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return types | {"fp16": torch.float16} if device.type == "cuda" else types


def _matmul_rate(dtype: torch.dtype, device: torch.device, size: int) -> float:
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _best(lambda: left @ right, device)


def _copy_rate(device: torch.device, size: int) -> float:
    """Bytes read and written a second."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def _overhead(device: torch.device) -> float:
    small = torch.ones(8, device=device)

    def many() -> None:
        for _ in range(200):
            torch.add(small, small)

    return _best(many, device) / 200


def _best(call: Callable[[], Any], device: torch.device) -> float:
    """The shortest of a few times."""
    return min(_times(call, device, tries=4))


def _times(call: Callable[[], Any], device: torch.device, tries: int) -> list[float]:
    """A few times, after one that warms up."""
    times = []
    for number in range(tries + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            times.append(max(time.perf_counter() - start, 1e-9))
    return times


def _disk() -> Disk | None:
    """The disk of the temporary folder, its rate by writing a little of it through."""
    size = 32 * 2**20
    with suppress(OSError), tempfile.TemporaryFile() as file:
        start = time.perf_counter()
        file.write(b"0" * size)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        return Disk(float(shutil.disk_usage(tempfile.gettempdir()).free), size / max(seconds, 1e-6))
    return None


def _read(path: Path) -> Cluster | None:
    with suppress(OSError, ValueError):
        return Cluster.from_mapping(json.loads(path.read_text()))
    return None


def _write(path: Path, cluster: Cluster) -> None:
    with suppress(OSError):  # a home that can't be written to only costs a measurement each time
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(cluster.to_dict(), indent=2))
        temporary.replace(path)
