"""stepgraph check."""

from __future__ import annotations

import click

from stepgraph.tools.output import emit_json, format_option, read_schedule_file, set_option


@click.command("check")
@click.argument("file")
@set_option
@format_option
def command(file: str, settings: tuple[str, ...], style: str) -> int:
    """Check a schedule: every error at once, with its place. Plans nothing beyond the targets and proves nothing."""
    from stepgraph.planner.compile import check_schedule

    schedule = read_schedule_file(file, settings)
    level = check_schedule(schedule)
    graph = level.streams.graph
    data = {
        "ok": True,
        "name": schedule.name,
        "ranks": level.shares.world_size,
        "ops": len(graph.nodes),
        "layers": len({node.layer for node in graph.nodes if node.layer is not None}),
        "diagnostics": [],
    }
    if style == "json":
        emit_json(data)
    else:
        click.echo(f"{schedule.name}: fine ({data['layers']} layers, {data['ops']} ops, {data['ranks']} ranks)")
    return 0
