"""stepgraph bench."""

from __future__ import annotations

import time

import click

from stepgraph.tools.output import console, emit_json, format_option, one_process, progress

SCHEDULE = "minimax_h3_u4"


@click.group("bench")
def command() -> None:
    """Measure what stepgraph itself takes, as ratios within one run."""


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"numbers with commas, not '{text}'") from None


@command.command("proof")
@click.option("--layers", default="60,120,240,480,960", help="Depths, at 8 ranks; the first is what others relate to.")
@click.option("--ranks", default="2,4,8,16,32,64", help="Numbers of ranks, at the first depth.")
@format_option
def proof(layers: str, ranks: str, style: str) -> int:
    """Time the proof of a plan against its layers and its ranks."""
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.schedule import load_schedule, schedule_path
    from stepgraph.planner.verify.proof import prove

    depths, widths = _sizes(layers), _sizes(ranks)
    rows: list[dict[str, int | float]] = []
    for depth, width in [*((depth, 8) for depth in depths), *((depths[0], width) for width in widths)]:
        progress(f"{depth} layers, {width} ranks")
        settings = (("model.layers", str(depth)), ("mesh.ulysses", str(width)), ("model.heads", "64"))
        plan = compile_schedule(load_schedule(schedule_path(SCHEDULE), settings))
        started = time.perf_counter()
        found = prove(plan)
        seconds = time.perf_counter() - started
        assert found.ok, "a shipped schedule is sound"
        count = sum(len(program.instructions) for program in plan.ranks)
        rows.append({"layers": depth, "ranks": width, "instructions": count, "seconds": seconds})
    if style == "json":
        emit_json({"schedule": SCHEDULE, "rows": rows})
        return 0
    from rich.table import Table

    table = Table("layers", "ranks", "instructions", "seconds", "us an instruction", "x the first")
    for row in rows:
        each = 1e6 * row["seconds"] / row["instructions"]
        ratio = row["seconds"] / rows[0]["seconds"]
        cells = (f"{row['layers']}", f"{row['ranks']}", f"{row['instructions']}", f"{row['seconds']:.2f}")
        table.add_row(*cells, f"{each:.1f}", f"{ratio:.2f}")
    console().print(table)
    return 0


@command.command("peers")
@click.option("--ranks", type=click.IntRange(2), help="Rank i runs on GPU i; by default as many as there are GPUs.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="How often every way is timed, in turn.")
@click.option("--steps", default=20, type=click.IntRange(1), help="Steps of 32 exchanges in a round.")
@click.option("--replays", default=1000, type=click.IntRange(1), help="Replays with new data that are checked.")
@format_option
def peers(ranks: int | None, rounds: int, steps: int, replays: int, style: str) -> int:
    """Check and time exchanges over the GPUs of this machine, against an all-to-all with its copies."""
    from stepgraph.runtime.session import need_cuda

    one_process("bench starts its ranks itself")
    need_cuda()
    import torch

    from stepgraph.tools.peers.report import run_all, show

    world = ranks or torch.cuda.device_count()
    if world < 2:
        raise click.UsageError("one GPU: say how many ranks share it, as in --ranks 2")
    report = run_all(world, rounds, steps, replays)
    if style == "json":
        emit_json(report.data())
    else:
        show(report, console())
    return 0 if report.ok else 1
