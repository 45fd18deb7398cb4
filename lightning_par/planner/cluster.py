"""The machines a plan is for: what each device computes and holds, and what the links between them carry.

Figures are those a job gets of one device, in SI units (bytes, seconds, FLOP/s). Peaks are dense, never with sparsity.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

__all__ = ["MEMORY_LINE", "Cluster", "Device", "Disk", "Host", "Link"]

MEMORY_LINE = 0.8
"""A layout fits if it takes at most this share of a device's memory: of 454 runs estimated under 80%, none ran out of
memory (Fujii et al., arXiv 2411.06465)."""

DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True)
class Link:
    """What carries messages.

    Attributes:
        bandwidth: Bytes per second that one device sends while it receives as many.
        latency: Seconds that a message takes however short it is.

    Raises:
        ValueError: If a figure is impossible.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("a link's bandwidth", self.bandwidth, "bytes per second")
        if not 0 <= self.latency < 1:
            raise ValueError(f"a link's latency={self.latency} s must be at least 0 and below 1 second.")

    @property
    def is_slow(self) -> bool:
        """Whether ZeRO over it would wait more than it computes: below 100 Gbit/s a device."""
        return self.bandwidth < 12.5e9


@dataclass(frozen=True)
class Device:
    """One accelerator, or the share of a CPU that one rank has.

    Attributes:
        name: What it is.
        memory: Bytes.
        flops: Dense peak by data type (``fp32``, ``bf16``, ``fp16``), FLOP/s.
        memory_bandwidth: Bytes per second.
        efficiency: Share of both peaks that large products and copies reach.
        overhead: Seconds that launching one operator takes.
        reserved: Bytes that the driver, the runtime and communicators take before a model does.
        is_gpu: Whether offload moves anything: a CPU rank's memory is the host's.

    Raises:
        ValueError: If a figure is impossible.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    memory_bandwidth: float
    efficiency: float = 0.75
    overhead: float = 5e-6
    reserved: float = 0.0
    is_gpu: bool = True

    def __post_init__(self) -> None:
        _check_positive("device.memory", self.memory, "bytes")
        _check_positive("device.memory_bandwidth", self.memory_bandwidth, "bytes per second")
        for dtype, rate in self.flops.items():
            if dtype not in DTYPES:
                raise ValueError(f"device.flops names {dtype!r}, which is not one of {', '.join(DTYPES)}.")
            _check_positive(f"device.flops.{dtype}", rate, "FLOP/s")
        if "fp32" not in self.flops:
            raise ValueError("device.flops must give at least fp32, the type that everything can be computed in.")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"device.efficiency={self.efficiency} must be above 0 and at most 1.")
        if self.overhead < 0 or not 0 <= self.reserved < self.memory:
            raise ValueError(
                f"device.overhead={self.overhead} must not be negative, and device.reserved={self.reserved:.3g} must "
                f"be less than device.memory={self.memory:.3g}."
            )

    @property
    def stream(self) -> float:
        """Bytes per second that operators reach."""
        return self.memory_bandwidth * self.efficiency

    def peak(self, dtype: str) -> float:
        """Dense peak of a data type, that of float32 where none is given."""
        return float(self.flops.get(dtype, self.flops["fp32"]))


@dataclass(frozen=True)
class Disk:
    """A disk that a node's devices share.

    Attributes:
        capacity: Bytes.
        bandwidth: Bytes per second, the lower of reading and writing.
    """

    capacity: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_positive("host.disk.capacity", self.capacity, "bytes")
        _check_positive("host.disk.bandwidth", self.bandwidth, "bytes per second")


@dataclass(frozen=True)
class Host:
    """What a node has beside its devices.

    Attributes:
        memory: Bytes, of the whole node.
        memory_bandwidth: Bytes per second, of the whole node.
        link: Bytes per second between one device and the host, each way.
        disk: ``None`` without one to offload to.
    """

    memory: float
    memory_bandwidth: float
    link: float
    disk: Disk | None = None

    def __post_init__(self) -> None:
        _check_positive("host.memory", self.memory, "bytes")
        _check_positive("host.memory_bandwidth", self.memory_bandwidth, "bytes per second")
        _check_positive("host.link", self.link, "bytes per second")


@dataclass(frozen=True)
class Cluster:
    """Machines, all alike.

    Attributes:
        name: What they are called.
        device: One of their devices.
        devices_per_node: Devices of one machine.
        nodes: Machines.
        inside: The link between devices of one machine.
        between: The link between machines, as one device sees it when all of a machine use it.
        host: A machine's own memory.
        source: Where the figures are from.

    Raises:
        ValueError: If a figure is impossible, with its name.
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    inside: Link
    between: Link
    host: Host
    source: str = ""
    links_by_axis: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("devices_per_node", "nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"cluster.{name}={value!r} must be a positive integer.")
        if not self.device.is_gpu and self.device.memory * self.devices_per_node > self.host.memory * 1.001:
            raise ValueError(
                f"{self.devices_per_node} CPU ranks of {self.device.memory:.3g} bytes do not fit host.memory="
                f"{self.host.memory:.3g}. A CPU rank's memory is its share of the host's."
            )

    @property
    def num_devices(self) -> int:
        """Devices of all machines."""
        return self.nodes * self.devices_per_node

    @property
    def memory_limit(self) -> float:
        """Bytes that a layout may take of one device."""
        return MEMORY_LINE * self.device.memory

    @property
    def has_slow_link(self) -> bool:
        """Whether several machines are joined by a link that ZeRO would wait for."""
        return self.nodes > 1 and self.between.is_slow

    def sized(self, nodes: int | None = None, devices_per_node: int | None = None) -> Cluster:
        """The same machines in other numbers."""
        return replace(self, nodes=nodes or self.nodes, devices_per_node=devices_per_node or self.devices_per_node)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, with the names that :meth:`from_mapping` takes."""
        return {**asdict(self), "links_by_axis": {axis: asdict(link) for axis, link in self.links_by_axis.items()}}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Cluster:
        """A cluster from a configuration's ``cluster`` node.

        Raises:
            ValueError: If a key is unknown (the nearest is named) or missing, or a figure is impossible.
        """
        kinds: dict[str, type] = {"device": Device, "inside": Link, "between": Link}
        plain = {key: _build(kinds[key], key, value) if key in kinds else value for key, value in values.items()}
        if isinstance(host := plain.get("host"), Mapping):
            disk = host.get("disk")
            plain["host"] = _build(Host, "host", {**host, "disk": disk and _build(Disk, "host.disk", disk)})
        links = plain.get("links_by_axis") or {}
        plain["links_by_axis"] = {axis: _build(Link, f"links_by_axis.{axis}", link) for axis, link in links.items()}
        return _build(cls, "cluster", plain)  # type: ignore[no-any-return]


def _build(kind: type, name: str, values: Any) -> Any:
    if isinstance(values, kind):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"{name}={values!r} must be a mapping with {', '.join(f.name for f in fields(kind))}.")
    known = [item.name for item in fields(kind)]
    for key in values:
        if key not in known and not str(key).startswith("_"):
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{name}.{key} is unknown. Did you mean {name}.{near}? Known: {', '.join(known)}.")
    try:
        return kind(**{key: value for key, value in values.items() if key in known})
    except TypeError as error:
        raise ValueError(f"{name}: {str(error).partition('() ')[2] or error}. Known: {', '.join(known)}.") from error


def _check_positive(name: str, value: Any, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number of {unit} above 0.")
