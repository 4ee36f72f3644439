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
    from stepgraph.planner.compile import check_schedules

    schedule = read_schedule_file(file, settings)
    levels = check_schedules(schedule)
    versions = [
        {
            "version": level.streams.graph.schedule.version,
            "ranks": level.shares.world_size,
            "ops": len(level.streams.graph.nodes),
            "layers": len({node.layer for node in level.streams.graph.nodes if node.layer is not None}),
        }
        for level in levels
    ]
    if style == "json":
        emit_json({"ok": True, "name": schedule.name, "versions": versions, "diagnostics": []})
    for found in versions if style == "text" else ():
        name = f"{schedule.name} {found['version']}".strip()
        click.echo(f"{name}: fine ({found['layers']} layers, {found['ops']} ops, {found['ranks']} ranks)")
    return 0
