"""stepgraph diff."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stepgraph.tools.output import (
    edited_option,
    emit_json,
    format_option,
    read_plan_or_schedule,
    set_option,
    version_options,
)
from stepgraph.tools.summary import summary

if TYPE_CHECKING:
    from stepgraph.planner.plan import Plan


def first_difference(a: Plan, b: Plan) -> dict[str, str | int] | None:
    """The first instruction, by rank, at which two plans part; None where all are alike."""
    from stepgraph.tools.show import describe

    for rank, (left, right) in enumerate(zip(a.ranks, b.ranks, strict=False)):
        longest = max(len(left.instructions), len(right.instructions))
        for number in range(longest):
            one = left.instructions[number] if number < len(left.instructions) else None
            two = right.instructions[number] if number < len(right.instructions) else None
            if one != two:
                return {
                    "rank": rank,
                    "instruction": number,
                    "a": f"{a.streams[one.stream]}: {describe(a, rank, one)}" if one else "nothing",
                    "b": f"{b.streams[two.stream]}: {describe(b, rank, two)}" if two else "nothing",
                }
    return None


@click.command("diff")
@click.argument("a")
@click.argument("b")
@edited_option
@version_options
@set_option
@format_option
def command(a: str, b: str, edited: bool, settings: tuple[str, ...], variant: str, bucket: str, style: str) -> int:
    """Tell how two schedules or plans differ. Exits with 1 where they do."""
    from stepgraph.planner.plan import plan_hash

    left, right = (read_plan_or_schedule(file, settings, edited, variant, bucket) for file in (a, b))
    same = plan_hash(left) == plan_hash(right)
    one, two = summary(left), summary(right)
    changed = {key: [one[key], two[key]] for key in one if one[key] != two[key]}
    names = [{op.name for op in plan.ops} for plan in (left, right)]
    first = first_difference(left, right)
    if style == "json":
        emit_json(
            {
                "same": same,
                "changed": changed,
                "ops_only_in_a": sorted(names[0] - names[1]),
                "ops_only_in_b": sorted(names[1] - names[0]),
                "first_difference": first,
            }
        )
        return 0 if same else 1
    if same:
        click.echo("the plans are the same")
        return 0
    for key, (before, after) in changed.items():
        click.echo(f"{key:20} {before} -> {after}")
    for label, only in (("only in A", names[0] - names[1]), ("only in B", names[1] - names[0])):
        if only:
            click.echo(f"{label:20} {', '.join(sorted(only))}")
    if first:
        click.echo(f"first difference     rank {first['rank']}, instruction {first['instruction']}")
        click.echo(f"  A  {first['a']}\n  B  {first['b']}")
    if not changed and not first:
        click.echo("the programs are alike; their sources, weights' names or layouts differ")
    return 1
