"""stepgraph init."""

from __future__ import annotations

from pathlib import Path

import click

from stepgraph.tools.output import emit_json, format_option


@click.command("init")
@click.argument("name", default="my_model")
@click.option(
    "--from",
    "source",
    help="A class that stepgraph binds, as diffusers.WanTransformer3DModel, or such a model's config.json or folder.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Where it goes; by default NAME.yaml.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@format_option
def command(name: str, source: str | None, output: str | None, force: bool, style: str) -> int:
    """Write a schedule to start from, that compiles and runs as it is: a small one, or that of a model."""
    from stepgraph.planner.schedule import read_schedule

    path = Path(output or f"{name}.yaml")
    if path.exists() and not force:
        raise click.UsageError(f"{path} is there already; --force writes over it")
    if source is None:
        text = _small(name, path.name)
    else:
        from stepgraph.runtime.adapters.draft import draft

        text = draft(source, name)
    read_schedule(text, path.name)  # a name that a schedule can't have is told before anything is written
    path.write_text(text, encoding="utf-8")
    if style == "json":
        emit_json({"ok": True, "written": str(path)})
    else:
        click.echo(f"written to {path}")
    return 0


def _small(name: str, file: str) -> str:
    from stepgraph.planner.schedule import schedule_path

    lines = schedule_path("quickstart").read_text(encoding="utf-8").splitlines()
    body = [line for line in lines if not line.startswith("#")]
    body[body.index("name: quickstart")] = f"name: {name}"
    head = [
        "# A schedule to start from: set the sizes of your model, then reorder, rename and add ops.",
        f"# stepgraph check {file}; stepgraph run {file}; stepgraph explain send",
    ]
    return "\n".join([*head, *body]) + "\n"
