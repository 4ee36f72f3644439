"""stepgraph init."""

from __future__ import annotations

from pathlib import Path

import click

from stepgraph.tools.output import emit_json, format_option


@click.command("init")
@click.argument("name", default="my_model")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Where it goes; by default NAME.yaml.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@format_option
def command(name: str, output: str | None, force: bool, style: str) -> int:
    """Write a small schedule to start from, that compiles and runs as it is."""
    from stepgraph.planner.schedule import read_schedule, schedule_path

    path = Path(output or f"{name}.yaml")
    if path.exists() and not force:
        raise click.UsageError(f"{path} is there already; --force writes over it")
    lines = schedule_path("quickstart").read_text(encoding="utf-8").splitlines()
    body = [line for line in lines if not line.startswith("#")]
    body[body.index("name: quickstart")] = f"name: {name}"
    head = [
        "# A schedule to start from: set the sizes of your model, then reorder, rename and add ops.",
        f"# stepgraph check {path.name}; stepgraph run {path.name}; stepgraph explain send",
    ]
    text = "\n".join([*head, *body]) + "\n"
    read_schedule(text, path.name)  # a name that a schedule can't have is told before anything is written
    path.write_text(text, encoding="utf-8")
    if style == "json":
        emit_json({"ok": True, "written": str(path)})
    else:
        click.echo(f"written to {path}")
    return 0
