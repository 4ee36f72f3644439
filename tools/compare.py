"""stepgraph compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stepgraph.tools.output import (
    SEED,
    console,
    edited_option,
    emit_json,
    format_option,
    one_process,
    progress,
    read_plan_or_schedule,
    set_option,
    version_options,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepgraph.runtime.compare import Compared
    from stepgraph.runtime.session import DeviceName


@click.command("compare")
@click.argument("file")
@click.option("--by-layer", is_flag=True, help="A line a layer; else the verdict alone.")
@click.option("--device", type=click.Choice(["cpu", "cuda", "auto"]), default="auto", help="Where the ranks run.")
@click.option("--seed", type=SEED, default=0, help="Of weights, inputs and, on cpu, interleaving.")
@edited_option
@version_options
@set_option
@format_option
def command(
    file: str,
    by_layer: bool,
    device: DeviceName,
    seed: int,
    edited: bool,
    settings: tuple[str, ...],
    variant: str,
    bucket: str,
    style: str,
) -> int:
    """Run one step on all ranks and hold the result of every op against the unsharded model in float64; name the first
    that differs. Exits with 1 where one does."""
    from stepgraph.runtime.compare import compare
    from stepgraph.runtime.session import cuda_lacks

    if device == "auto":
        device = "cpu" if cuda_lacks() else "cuda"
    if device == "cpu":
        one_process("all ranks run in one process on cpu")
    plan = read_plan_or_schedule(file, settings, edited, variant, bucket)
    progress(f"comparing {plan.name} op by op")
    rows = compare(plan, seed, device)
    if rows is None:  # a rank other than 0
        return 0
    first = next((row for row in rows if row.differs), None)
    if style == "json":
        emit_json(
            {
                "name": plan.name,
                "seed": seed,
                "device": device,
                "compared": [_data(row) for row in rows],
                "first_difference": _data(first) if first else None,
                "ok": first is None,
            }
        )
        return 0 if first is None else 1
    if by_layer:
        _table(rows)
    if first is None:
        click.echo(f"{plan.name}: every one of {len(rows)} results of ops agrees with the unsharded model")
        return 0
    click.echo(f"{plan.name}: {first.where}, {first.kind} on line {first.line}, is the first that differs")
    error = f"max abs error {first.max_abs_error:.3g}, tolerance {first.tolerance:.3g}"
    click.echo(f"  {first.value} on rank {first.rank}: {error}")
    return 1


def _data(row: Compared) -> dict[str, object]:
    return {
        "op": row.op,
        "kind": row.kind,
        "layer": row.layer,
        "line": row.line,
        "value": row.value,
        "max_abs_error": row.max_abs_error,
        "tolerance": row.tolerance,
        "rank": row.rank,
        "differs": row.differs,
    }


def _table(rows: Sequence[Compared]) -> None:
    from rich.table import Table

    table = Table("layer", "results", "largest error / tolerance", "of", "first that differs")
    layers = list(dict.fromkeys(row.layer for row in rows))
    for layer in layers:
        mine = [row for row in rows if row.layer == layer]
        worst = max(mine, key=lambda row: row.max_abs_error / row.tolerance if row.tolerance else 0.0)
        first = next((row for row in mine if row.differs), None)
        ratio = f"{worst.max_abs_error / worst.tolerance:.3f}" if worst.tolerance else "0"
        name = "outside" if layer is None else str(layer)
        table.add_row(name, str(len(mine)), ratio, f"{worst.op}: {worst.value}", first.where if first else "")
    console().print(table)
