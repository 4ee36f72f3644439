"""stepgraph memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import click

from stepgraph.tools.output import (
    console,
    edited_option,
    emit_json,
    format_option,
    read_plan_or_schedule,
    set_option,
    size,
    version_options,
)

if TYPE_CHECKING:
    from stepgraph.planner.plan import Plan

WIDTH, HEIGHT, MARGIN = 1200, 480, 60
"""Of the drawing, in its own units."""


@dataclass(frozen=True, slots=True)
class Use:
    """One filling of a target: from the op that sends into it to the last op that reads it."""

    target: int
    first: int
    last: int


def uses(plan: Plan, rank: int) -> list[Use]:
    """What a rank's targets hold, one filling after another, by the order of ops; a state is in use all the time."""
    from stepgraph.planner.plan import Collective, Run, Send, Store

    if not plan.ops:
        return []
    program = plan.ranks[rank]
    touched: dict[int, dict[int, bool]] = {number: {} for number in range(len(plan.targets))}
    """Target -> op -> whether it writes."""
    for sender in plan.ranks:
        for item in sender.instructions:
            if isinstance(item, Send) and item.peer == rank:
                touched[item.target][item.op] = True
    for item in program.instructions:
        if isinstance(item, Store) and program.views[item.view].buffer < len(plan.targets):
            touched[program.views[item.view].buffer][item.op] = False
        views: tuple[int, ...] = ()
        if isinstance(item, Run):
            views = item.inputs
        elif isinstance(item, Send):
            views = (item.source,)
        elif isinstance(item, Collective):
            views = tuple(part.view for part in item.outgoing)
            for part in item.incoming:
                if program.views[part.view].buffer < len(plan.targets):
                    touched[program.views[part.view].buffer][item.op] = True
        for view in views:
            if program.views[view].buffer < len(plan.targets) and isinstance(item, Run | Send | Collective):
                touched[program.views[view].buffer].setdefault(item.op, False)
    states = plan.state_buffers
    found = [Use(target, 0, len(plan.ops) - 1) for target in touched if target in states]
    for target, ops in touched.items():
        if target in states:
            continue
        first = last = -1
        read = False
        for op, writes in sorted(ops.items()):
            if writes and read:  # chunks of an op fill a target one after another, before it is read
                found.append(Use(target, first, last))
                first, read = -1, False
            first = op if writes and first < 0 else first
            read |= first >= 0 and not writes
            last = op
        if first >= 0:
            found.append(Use(target, first, last))
    return found


def drawing(plan: Plan, rank: int) -> str:
    """Offsets against ops, as SVG."""
    wide, high = (WIDTH - 2 * MARGIN) / max(1, len(plan.ops)), (HEIGHT - 2 * MARGIN) / max(1, plan.arena_bytes)
    boxes = []
    for use in uses(plan, rank):
        target = plan.targets[use.target]
        title = f"{target.name}: {plan.ops[use.first].name} to {plan.ops[use.last].name}, {size(target.nbytes)}"
        x, width = MARGIN + use.first * wide, (use.last - use.first + 1) * wide
        y, height = MARGIN + target.offset * high, target.nbytes * high
        hue = 47 * use.target % 360
        boxes.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="hsl({hue},60%,65%)" '
            f'stroke="#333" stroke-width="0.5"><title>{escape(title)}</title></rect>'
        )
    head = f"{plan.name}, rank {rank}: arena of {size(plan.arena_bytes)}, by the order of ops"
    frame = (
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{WIDTH - 2 * MARGIN}" height="{HEIGHT - 2 * MARGIN}" fill="none" '
        'stroke="#999"/>'
    )
    text = f'<text x="{MARGIN}" y="{MARGIN / 2}" font-family="sans-serif" font-size="16">{escape(head)}</text>'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
    return "\n".join([opening, text, frame, *boxes, "</svg>"]) + "\n"


@click.command("memory")
@click.argument("file")
@click.option("--rank", type=click.IntRange(0), default=0, help="Whose arena.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Draw offsets against ops into this file.")
@edited_option
@version_options
@set_option
@format_option
def command(
    file: str,
    rank: int,
    svg: str | None,
    edited: bool,
    settings: tuple[str, ...],
    variant: str,
    bucket: str,
    style: str,
) -> int:
    """Show where a plan's targets lie in the arena, and from which op to which each is in use."""
    plan = read_plan_or_schedule(file, settings, edited, variant, bucket)
    if rank >= plan.world_size:
        raise click.UsageError(f"the plan has ranks 0 to {plan.world_size - 1}")
    found, program = uses(plan, rank), plan.ranks[rank]
    if svg:
        Path(svg).write_text(drawing(plan, rank), encoding="utf-8")
    if style == "json":
        emit_json(
            {
                "name": plan.name,
                "rank": rank,
                "arena_bytes": plan.arena_bytes,
                "arena_lower_bound": plan.arena_lower_bound,
                "flag_slots": plan.flag_slots,
                "targets": [
                    {
                        "name": target.name,
                        "offset": target.offset,
                        "nbytes": target.nbytes,
                        "uses": [
                            {"first_op": use.first, "last_op": use.last, "from": plan.ops[use.first].name,
                             "to": plan.ops[use.last].name, "layer": plan.ops[use.first].layer}
                            for use in found if use.target == number
                        ],
                    }
                    for number, target in enumerate(plan.targets)
                ],
                "states": [
                    {"name": state.name, "nbytes": program.buffers[state.buffer].nbytes,
                     "sent_into": state.buffer < len(plan.targets)}
                    for state in plan.states
                ],
                "svg": svg,
            }
        )  # fmt: skip
        return 0
    from rich.table import Table

    table = Table("offset", "bytes", "target", "times in use", "from", "to")
    for number, target in sorted(enumerate(plan.targets), key=lambda pair: pair[1].offset):
        mine = [use for use in found if use.target == number]
        ends = (plan.ops[mine[0].first].name, plan.ops[mine[0].last].name) if mine else ("", "")
        table.add_row(str(target.offset), str(target.nbytes), target.name, str(len(mine)), *ends)
    console().print(table)
    click.echo(f"arena {plan.arena_bytes} bytes, {_gap(plan)} the lower bound of {plan.arena_lower_bound}")
    shared = _shared_words(plan)
    words = f"{shared} of them shared by exchanges" if shared else "none of them shared"
    click.echo(f"flags {plan.flag_slots} words of 8 bytes, {words}")
    for sent, words in ((True, "in the arena, sent into"), (False, "in memory of the rank's own")):
        states = [program.buffers[s.buffer] for s in plan.states if (s.buffer < len(plan.targets)) is sent]
        if states:
            click.echo(f"states {words}: {len(states)}, {sum(buffer.nbytes for buffer in states)} bytes")
    if svg:
        click.echo(f"drawn into {svg}")
    return 0


def _gap(plan: Plan) -> str:
    """How the arena compares with its lower bound; an edited plan may be below, or have none."""
    over = plan.arena_bytes - plan.arena_lower_bound
    if over <= 0:
        return "below" if over else "equal to"
    return f"{100 * over / plan.arena_lower_bound:.1f} % over" if plan.arena_lower_bound > 0 else "over"


def _shared_words(plan: Plan) -> int:
    """How many words of all ranks more than one exchange waits for."""
    from stepgraph.planner.plan import Wait

    users: dict[tuple[int, int], set[int]] = {}
    for rank, program in enumerate(plan.ranks):
        for item in program.instructions:
            if isinstance(item, Wait):
                for flag in item.flags:
                    users.setdefault((rank, flag.slot), set()).add(item.exchange)
    return sum(len(exchanges) > 1 for exchanges in users.values())
