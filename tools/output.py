"""What all subcommands share: options, reading FILE, and printing data to stdout and diagnostics to stderr."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stepgraph.planner.diagnostics import Diagnostic, StepgraphError

if TYPE_CHECKING:
    from rich.console import Console

    from stepgraph.planner.plan import Plan
    from stepgraph.planner.plan_set import PlanSet
    from stepgraph.planner.schedule import Schedule

Command = TypeVar("Command", bound=Callable[..., Any])
SEED = click.IntRange(0, (1 << 63) - 1)


def format_option(function: Command) -> Command:
    return click.option(
        "--format", "style", type=click.Choice(["text", "json"]), default="text", help="Text or JSON on stdout."
    )(function)


def set_option(function: Command) -> Command:
    return click.option(
        "--set", "settings", multiple=True, metavar="PATH=VALUE", help="Set values, as model.layers=2,shape.seq=96."
    )(function)


def version_options(function: Command) -> Command:
    """--variant and --bucket, for commands that take one version of a schedule or plan set."""
    bucket = click.option("--bucket", default="", metavar="NAME", help="Which bucket; by default the first.")
    variant = click.option("--variant", default="", metavar="NAME", help="Which variant; by default the first.")
    return variant(bucket(function))


def edited_option(function: Command) -> Command:
    """--edited, for every command that takes a plan."""
    return click.option("--edited", is_flag=True, help="Take a plan that was edited by hand, whatever its hash.")(
        function
    )


def read_schedule_file(file: str, settings: tuple[str, ...]) -> Schedule:
    """The schedule that FILE names, with its settings."""
    from stepgraph.planner.schedule import load_schedule, schedule_path
    from stepgraph.planner.source import parse_overrides

    return load_schedule(schedule_path(file), parse_overrides(settings))


def is_plan(file: str) -> bool:
    """Whether FILE is a plan by what it holds or how it is called, rather than a schedule."""
    from pathlib import Path

    from stepgraph.planner.plan import FORMAT

    path = Path(file)
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return FORMAT.encode() in stream.read(64) or path.suffix in (".plan", ".json")


def read_plan_or_schedule(
    file: str, settings: tuple[str, ...], edited: bool = False, variant: str = "", bucket: str = ""
) -> Plan:
    """The plan in FILE, with ``edited`` whatever its hash; a schedule is compiled first. Of several versions the one
    that is wanted, by default the first."""
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.plan_set import choose

    if is_plan(file):
        return read_plans(file, settings, edited).plan(variant, bucket)
    schedule = read_schedule_file(file, settings)
    names = [v.name for v in schedule.variants], [b.name for b in schedule.buckets]
    return compile_schedule(schedule.versions()[choose(schedule.name, *names, variant, bucket)])


def read_plans(file: str, settings: tuple[str, ...], edited: bool = False) -> PlanSet:
    """All plans in FILE, as ``read_plan_or_schedule`` reads one."""
    from pathlib import Path

    from stepgraph.planner.compile import compile_set
    from stepgraph.planner.plan_set import load_plan_set

    if is_plan(file):
        if settings:
            raise click.UsageError("--set changes schedules; a plan is compiled already")
        return load_plan_set(Path(file), edited)
    return compile_set(read_schedule_file(file, settings), progress)


def one_process(why: str) -> None:
    """Refuses to do in each process of torchrun what one process does alone."""
    import os

    from stepgraph.runtime.launch import launched

    processes = os.environ.get("WORLD_SIZE", "1")
    if launched() and processes != "1":
        raise click.UsageError(f"{why}, and torchrun has started {processes}: start it without torchrun")


def emit_json(data: object) -> None:
    """Print data; a number that is none, as the error of a run whose outputs are NaN, as null: JSON has no NaN."""
    click.echo(json.dumps(_finite(data), indent=2, allow_nan=False))


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def pasteable(
    subcommand: str,
    file: str,
    options: Sequence[str],
    edited: bool = False,
    variant: str = "",
    bucket: str = "",
    settings: Sequence[str] = (),
) -> str:
    """A command for FILE as it is given by hand, with the options that tell what is meant by it."""
    chosen = [*options, *(["--edited"] if edited else [])]
    for name, values in (("--variant", [variant]), ("--bucket", [bucket]), ("--set", settings)):
        chosen += [word for value in values if value for word in (name, value)]
    words = [*chosen, "--", file] if file.startswith("-") else [file, *chosen]
    return shlex.join(["stepgraph", subcommand, *words])


def diagnostic_data(diagnostic: Diagnostic) -> dict[str, str | int | None]:
    at = diagnostic.place
    return {
        "code": diagnostic.code,
        "message": diagnostic.message,
        "file": at.file if at else None,
        "line": at.line if at else None,
        "column": at.column if at else None,
        "length": at.length if at else None,
        "expected": diagnostic.expected,
        "got": diagnostic.got,
        "hint": diagnostic.hint,
    }


def tell(error: StepgraphError, style: str) -> None:
    """Print an error's diagnostics: text to stderr, JSON to stdout."""
    if style == "json":
        emit_json({"ok": False, "diagnostics": [diagnostic_data(d) for d in error.diagnostics]})
        return
    for diagnostic in error.diagnostics:
        click.echo(diagnostic.render(), err=True)
    count = len(error.diagnostics)
    click.echo(f"{count} error{'s' if count > 1 else ''}; `stepgraph explain {error.diagnostics[0].code}` tells more",
               err=True)  # fmt: skip


def progress(text: str) -> None:
    """A line on stderr, for people only."""
    if sys.stderr.isatty():
        click.echo(f"... {text}", err=True)


def console() -> Console:
    """A console on stdout that honours NO_COLOR, as wide as what it is given where stdout is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def size(nbytes: int) -> str:
    """Bytes for people: 203.7 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
