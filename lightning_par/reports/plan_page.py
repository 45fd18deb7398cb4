"""``plan.html``: the planner's answer, and the figures behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_par.planner.cluster import MEMORY_LINE, Cluster
from lightning_par.planner.plan import Evaluation, MemoryBreakdown, ModelSummary, Plan, StepTime
from lightning_par.planner.words import count, gigabytes, seconds
from lightning_par.planner.zero_figure import zero_figure
from lightning_par.reports.gantt import gantt_of
from lightning_par.reports.page import write_page
from lightning_par.reports.pieces import Bar, BarChart, Cell, Fact, Line, Segment, Table

__all__ = ["write_plan_page"]

_PAPER = (7.5e9, 64)
"""Parameters and ranks of the ZeRO paper's figure."""
_COLUMNS = ("layout", "memory", "step", "tokens/s/device", "MFU", "bubble", "communication", "offload", "why not")


def write_plan_page(plan: Plan, path: Path) -> Path:
    """Write the page.

    Args:
        plan: The planner's answer.
        path: The file; its directory must exist.

    Raises:
        ValueError: If it does not.
    """
    return write_page(path, "plan.html.j2", **_context(plan))


def _context(plan: Plan) -> dict[str, Any]:
    return {
        "plan": plan,
        "title": f"{plan.model.name} on {plan.cluster.name}",
        "key_facts": _key_facts(plan.recommended) if plan.recommended else [],
        "memory": _memory_chart(plan),
        "time": _time_chart(plan),
        "gantt": gantt_of(plan.recommended) if plan.recommended else None,
        "zero": _zero_charts(plan.model, plan.cluster),
        "layouts": _layouts(plan),
        "closest": [one.closest and _memory_facts(one.closest.memory) for one in plan.rejected],
        "model_facts": _model_facts(plan.model, plan.global_batch),
        "cluster_facts": _cluster_facts(plan.cluster),
        "document": plan.to_dict(),
    }


def _shown(plan: Plan) -> list[Evaluation]:
    return [*([plan.recommended] if plan.recommended else []), *plan.runners_up]


def _key_facts(one: Evaluation) -> list[Fact]:
    time, memory = one.time, one.memory
    return [
        Fact("a step", seconds(time.total)),
        Fact("tokens/s a device", f"{time.tokens_per_second_per_device:,.0f}"),
        Fact("of the devices' peak", f"{time.mfu:.1%}"),
        Fact(f"of {gigabytes(memory.capacity)} a device", gigabytes(memory.total)),
    ]


# Charts


def _memory_chart(plan: Plan) -> BarChart:
    bars = [_memory_bar(one, "best" if one is plan.recommended else "") for one in _shown(plan)]
    bars += [_memory_bar(rejected.closest, "bad") for rejected in plan.rejected if rejected.closest]
    capacity = plan.cluster.device.memory
    lines = (
        Line(MEMORY_LINE * capacity, f"{MEMORY_LINE:.0%}: ", gigabytes(MEMORY_LINE * capacity)),
        Line(capacity, "device: ", gigabytes(capacity)),
    )
    return BarChart(
        tuple(bars),
        lines,
        f"The fullest rank at its fullest moment. A layout fits if it stays left of the {MEMORY_LINE:.0%} line; what "
        "is left to it is the margin.",
    )


def _memory_bar(one: Evaluation, kind: str = "") -> Bar:
    memory = one.memory
    parts = [Segment(part, size := getattr(memory, part), gigabytes(size)) for part in MemoryBreakdown.PARTS]
    if memory.fits:
        parts.append(Segment("margin", memory.margin, gigabytes(memory.margin)))
    elsewhere = [
        f"{gigabytes(size)} on {place}" for place, size in (("the host", memory.host), ("disk", memory.disk)) if size
    ]
    return Bar(one.candidate.describe(), tuple(parts), " + ".join([gigabytes(memory.total), *elsewhere]), kind)


def _time_chart(plan: Plan) -> BarChart:
    bars = []
    for one in _shown(plan):
        parts = tuple(Segment(part, size := getattr(one.time, part), seconds(size)) for part in StepTime.PARTS)
        hidden = one.time.hidden_communication
        text = seconds(one.time.total) + (f", {seconds(hidden)} hidden" if hidden >= 0.001 * one.time.total else "")
        bars.append(Bar(one.candidate.describe(), parts, text, "best" if one is plan.recommended else ""))
    return BarChart(
        tuple(bars),
        caption="Seconds of one optimizer step on the slowest rank. Communication is what nothing hides; what runs "
        "beside computation is named as hidden.",
    )


def _zero_charts(model: ModelSummary, cluster: Cluster) -> list[BarChart]:
    charts = [_zero_chart(*_PAPER, "The paper's figure")]
    if cluster.num_devices > 1:
        charts.append(_zero_chart(model.num_parameters, cluster.num_devices, f"The same for {model.name}"))
    return charts


def _zero_chart(num_parameters: float, num_ranks: int, title: str) -> BarChart:
    bars = tuple(
        Bar(
            stage,
            tuple(Segment(part, size, gigabytes(size)) for part, size in parts.items()),
            _as_in_the_paper(sum(parts.values())),
        )
        for stage, parts in zero_figure(num_parameters, num_ranks).items()
    )
    return BarChart(bars, title=f"{title}: {count(num_parameters)} parameters, {num_ranks:,} ranks")


def _as_in_the_paper(size: float) -> str:
    return f"{size / 1e9:,.1f}".removesuffix(".0") + " GB"


# Tables and facts


def _layouts(plan: Plan) -> Table:
    rows = []
    for one in _shown(plan):
        time, shares = one.time, one.time.shares()
        figures = [
            gigabytes(one.memory.total),
            seconds(time.total),
            f"{time.tokens_per_second_per_device:,.0f}",
            f"{time.mfu:.1%}",
            *(f"{shares[part]:.1%}" for part in ("bubble", "communication", "offload")),
        ]
        reason = "recommended" if one is plan.recommended else one.reason
        cells = [Cell(one.candidate.describe()), *(Cell(text, "number") for text in figures), Cell(reason, "wide")]
        rows.append(cells)
    return Table(_COLUMNS, rows, ["best"] if plan.recommended else [])


def _memory_facts(memory: MemoryBreakdown) -> list[Fact]:
    parts = [Fact(part, gigabytes(getattr(memory, part))) for part in MemoryBreakdown.PARTS if getattr(memory, part)]
    return [*parts, Fact("all", gigabytes(memory.total)), Fact("limit", gigabytes(memory.limit))]


def _model_facts(model: ModelSummary, global_batch: int) -> list[Fact]:
    trained = model.num_trained != model.num_parameters
    return [
        Fact("parameters", f"{model.num_parameters:,}"),
        *([Fact("of them trained", f"{model.num_trained:,}")] if trained else []),
        Fact("blocks", str(model.num_blocks) if model.num_blocks else "no list of like blocks"),
        Fact("largest block or other unit", gigabytes(model.largest_unit)),
        Fact("tokens of a sample", f"{model.tokens_per_sample:,}"),
        Fact("samples of a step", f"{global_batch:,}"),
        Fact("precision", model.precision),
        Fact("activations and FLOPs", model.source),
    ]


def _cluster_facts(cluster: Cluster) -> list[Fact]:
    device, host = cluster.device, cluster.host
    peaks = ", ".join(f"{rate / 1e12:,.3g} {dtype}" for dtype, rate in device.flops.items())
    facts = [
        Fact("devices", f"{cluster.nodes} x {cluster.devices_per_node} {device.name}"),
        Fact("memory of a device", f"{gigabytes(device.memory)}, {gigabytes(device.reserved)} of it the runtime's"),
        Fact("dense peak", f"{peaks} TFLOP/s, of which {device.efficiency:.0%} are reached"),
        Fact("memory bandwidth", f"{gigabytes(device.memory_bandwidth)}/s"),
    ]
    links = [("link inside a machine", cluster.inside)] * (cluster.devices_per_node > 1)
    links += [("link between machines", cluster.between)] * (cluster.nodes > 1)
    links += [(f"link of the {axis} axis", link) for axis, link in cluster.links_by_axis.items()]
    facts += [Fact(name, f"{gigabytes(link.bandwidth)}/s, {seconds(link.latency)} latency") for name, link in links]
    facts.append(Fact("host", f"{gigabytes(host.memory)} a machine, {gigabytes(host.link)}/s to a device"))
    if host.disk is not None:
        facts.append(Fact("disk", f"{gigabytes(host.disk.capacity)}, {gigabytes(host.disk.bandwidth)}/s"))
    return [*facts, *([Fact("figures from", cluster.source)] if cluster.source else [])]
