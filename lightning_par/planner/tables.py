"""A plan on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lightning_par.planner.plan import Evaluation, MemoryBreakdown, Plan
from lightning_par.planner.words import count, gigabytes, seconds

__all__ = ["print_plan"]


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the answer, the figures behind it, and what was rejected."""
    console = console or Console()
    _print_question(plan, console)
    if plan.recommended is None:
        console.print(f"\n[bold red]No layout fits.[/] {plan.fix}")
    else:
        console.print(f"\n[bold green]Take[/] [bold]{plan.recommended.candidate.describe()}[/]")
        console.print(plan.recommended.reason)
        _print_advice(plan, console)
        console.print(_candidates(plan))
        console.print(_memory(plan.recommended.memory))
    if plan.rejected:
        console.print(_rejected(plan))
    if plan.recommended is not None:
        console.print("\n[bold]To train with it:[/]")
        console.print(f"  {plan.command}", soft_wrap=True, highlight=False)
    for note in plan.notes:
        console.print(f"[yellow]Note:[/] {note}")


def _print_question(plan: Plan, console: Console) -> None:
    model, cluster = plan.model, plan.cluster
    frozen = f", {count(model.num_trained)} of them trained" if model.num_trained != model.num_parameters else ""
    console.print(
        f"[bold]{model.name}[/]: {count(model.num_parameters)} parameters{frozen}, {model.num_blocks} blocks, "
        f"{model.tokens_per_sample:,} tokens a sample, {model.precision}, {model.source}"
    )
    links = [f"{gigabytes(cluster.inside.bandwidth)}/s inside a machine"] * (cluster.devices_per_node > 1)
    links += [f"{gigabytes(cluster.between.bandwidth)}/s between machines"] * (cluster.nodes > 1)
    rate = f"{cluster.device.peak('bf16') / 1e12:,.3g} bf16 TFLOP/s"
    memory = f"{cluster.num_devices} x {gigabytes(cluster.device.memory)}"
    console.print(f"[bold]{cluster.name}[/]: {', '.join([memory, rate, *links])}")
    console.print(
        f"{plan.global_batch} samples a step; {plan.num_considered:,} layouts looked at in {seconds(plan.seconds)}; "
        "a layout fits if it takes at most 80% of a device's memory."
    )


def _print_advice(plan: Plan, console: Console) -> None:
    if plan.advice is None:
        return
    console.print(f"[bold]The decision list[/] for {plan.advice.situation}: {plan.advice.advice}.")
    if plan.advice.comparison:
        console.print(f"[yellow]The figures say otherwise.[/] {plan.advice.comparison}")


def _candidates(plan: Plan) -> Table:
    table = Table(title="Layouts", title_justify="left")
    for name in ("layout", "memory", "step", "tokens/s/device", "MFU", "bubble", "communication", "offload", "why not"):
        table.add_column(name, justify="left" if name in ("layout", "why not") else "right")
    assert plan.recommended is not None
    for number, one in enumerate((plan.recommended, *plan.runners_up)):
        table.add_row(*_row(one, "" if number == 0 else one.reason), style="bold" if number == 0 else "")
    return table


def _row(one: Evaluation, reason: str) -> list[str]:
    time, shares = one.time, one.time.shares()
    return [
        one.candidate.describe(),
        gigabytes(one.memory.total),
        seconds(time.total),
        f"{time.tokens_per_second_per_device:,.0f}",
        f"{time.mfu:.1%}",
        *(f"{shares[part]:.1%}" for part in ("bubble", "communication", "offload")),
        reason,
    ]


def _memory(memory: MemoryBreakdown) -> Table:
    table = Table(title=f"Memory of the fullest rank ({memory.moment})", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    rows = [(part, getattr(memory, part)) for part in MemoryBreakdown.PARTS]
    for name, size in [*rows, ("all", memory.total), ("margin below the line", memory.margin)]:
        table.add_row(name, gigabytes(size), f"{size / memory.capacity:.1%}")
    for name, size in (("on the host", memory.host), ("on disk", memory.disk)):
        if size:
            table.add_row(name, gigabytes(size), "")
    return table


def _rejected(plan: Plan) -> Table:
    table = Table(title="Rejected", title_justify="left")
    table.add_column("layout")
    table.add_column("why")
    for rejection in plan.rejected:
        table.add_row(rejection.label, rejection.reason)
    return table
