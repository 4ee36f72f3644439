"""stepgraph show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stepgraph.tools.output import (
    console,
    edited_option,
    emit_json,
    format_option,
    read_plan_or_schedule,
    set_option,
    version_options,
)

if TYPE_CHECKING:
    from stepgraph.planner.plan import Instruction, Plan


def describe(plan: Plan, rank: int, item: Instruction) -> str:
    """An instruction in a few words."""
    from stepgraph.planner import plan as p

    program = plan.ranks[rank]

    def op(index: int) -> str:
        op = plan.ops[index]
        return f"{op.name.split('.', 1)[-1]} {op.part}".rstrip()

    match item:
        case p.Run():
            return op(item.op)
        case p.Send():
            into = f"{program.buffers[item.target].name} of " if item.target in plan.state_buffers else ""
            return f"{op(item.op)} -> {into}rank {item.peer}"
        case p.Signal():
            return f"signal {', '.join(str(flag.peer) for flag in item.flags)}"
        case p.Wait():
            return f"wait for {', '.join(str(flag.peer) for flag in item.flags)}"
        case p.Reset():
            return "reset flags"
        case p.Collective():
            return f"{op(item.op)} (collective)"
        case p.Record():
            return f"record e{item.event}"
        case p.WaitEvent():
            return f"wait e{item.event}"
        case p.Drop():
            return f"drop {program.buffers[item.buffer].name}"
        case p.Load():
            return f"load {plan.inputs[item.input].name}"
        case p.Store():
            return f"store {plan.outputs[item.output].name}"


def layers_of(plan: Plan, rank: int) -> list[int | None]:
    """The layer that each instruction of a rank belongs to: its op's, or that of what stands around it."""
    found: list[int | None] = []
    here: int | None = None
    for item in plan.ranks[rank].instructions:
        op = getattr(item, "op", None)
        exchange = getattr(item, "exchange", None)
        if op is None and exchange is not None:
            op = plan.exchanges[exchange].op
        if op is not None:
            here = plan.ops[op].layer
        found.append(here)
    return found


def shown_layers(plan: Plan, rank: int, layer: int | None, everything: bool) -> set[int | None] | None:
    """Which layers to print; None for all. By default the first of each block, and what is outside of layers."""
    if everything:
        return None
    if layer is not None:
        return {layer}
    first: dict[str, int] = {}
    for op in plan.ops:
        if op.layer is not None:
            first.setdefault(op.name.split(".", maxsplit=1)[0], op.layer)
    return {None, *first.values()}


@click.command("show")
@click.argument("file")
@click.option("--rank", type=click.IntRange(0), default=0, help="Whose program.")
@click.option("--layer", type=click.IntRange(0), help="Only this layer.")
@click.option("--all", "everything", is_flag=True, help="All layers, not only the first of each block.")
@edited_option
@version_options
@set_option
@format_option
def command(
    file: str,
    rank: int,
    layer: int | None,
    everything: bool,
    edited: bool,
    settings: tuple[str, ...],
    variant: str,
    bucket: str,
    style: str,
) -> int:
    """Show a rank's program: a column a stream, a row an instruction, in the order of issue."""
    plan = read_plan_or_schedule(file, settings, edited, variant, bucket)
    if rank >= plan.world_size:
        raise click.UsageError(f"the plan has ranks 0 to {plan.world_size - 1}")
    layers = layers_of(plan, rank)
    if layer is not None and layer not in layers:
        raise click.UsageError(f"the plan has no layer {layer}")
    wanted = shown_layers(plan, rank, layer, everything)
    rows = [
        (number, at, item.stream, describe(plan, rank, item))
        for number, (item, at) in enumerate(zip(plan.ranks[rank].instructions, layers, strict=True))
        if wanted is None or at in wanted
    ]
    if style == "json":
        emit_json([{"instruction": n, "layer": at, "stream": plan.streams[s], "what": what} for n, at, s, what in rows])
        return 0
    from rich.table import Table

    table = Table(title=f"{plan.name}, rank {rank} of {plan.world_size}", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("layer", justify="right")
    for stream in plan.streams:
        table.add_column(stream)
    following = rows[0][0] if rows else 0
    for number, at, column, what in rows:
        if number > following:
            table.add_row("...", "", f"{number - following} more, alike", *[""] * (len(plan.streams) - 1))
        cells = [what if index == column else "" for index in range(len(plan.streams))]
        table.add_row(str(number), "" if at is None else str(at), *cells)
        following = number + 1
    console().print(table)
    return 0
