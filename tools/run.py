"""stepgraph run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepgraph.tools.output import (
    SEED,
    edited_option,
    emit_json,
    format_option,
    is_plan,
    one_process,
    progress,
    read_plans,
    set_option,
    size,
    version_options,
)

if TYPE_CHECKING:
    from stepgraph.planner.plan import Plan
    from stepgraph.planner.plan_set import PlanSet
    from stepgraph.runtime.facts import CaptureFacts
    from stepgraph.runtime.interleave import Interleaving
    from stepgraph.runtime.session import DeviceName
    from stepgraph.runtime.simulate import RunReport

STEPS = 8


@click.command("run")
@click.argument("file")
@click.option("--device", type=click.Choice(["cpu", "cuda", "auto"]), default="auto", help="Where it runs.")
@click.option("--ranks", type=click.IntRange(1, 64), help="How many; sets the schedule's ulysses axis.")
@click.option("--steps", type=click.IntRange(1, 10_000), help=f"Denoising steps; by default {STEPS}.")
@click.option("--seed", type=SEED, default=0, help="Of weights, inputs and, on cpu, interleaving.")
@click.option("--eager", is_flag=True, help="On cuda: issue every step anew, capture nothing.")
@click.option("--interleave", metavar="FILE", help="On cpu: first take the turns of a counterexample.")
@click.option("--solo", is_flag=True, help="On cuda: rank 0 alone, with stand-ins for its peers, and what it costs.")
@click.option("--graph-bytes", type=click.IntRange(0), help="Of a plan set: how much captured versions may take.")
@edited_option
@version_options
@set_option
@format_option
def command(
    file: str,
    device: DeviceName,
    ranks: int | None,
    steps: int | None,
    seed: int,
    eager: bool,
    solo: bool,
    interleave: str | None,
    graph_bytes: int | None,
    edited: bool,
    settings: tuple[str, ...],
    variant: str,
    bucket: str,
    style: str,
) -> int:
    """Run a denoising loop over all ranks with made-up weights, and compare it with the unsharded model in float64.

    On cuda each rank is a process, which this command starts, unless torchrun has started it as a rank. Of several
    versions of the step all are taken, in any order that is allowed; with --variant or --bucket one alone.
    """
    plans = _plans(file, settings, ranks, edited)
    from stepgraph.runtime.session import cuda_lacks

    on_cpu = device == "cpu" or (device == "auto" and cuda_lacks() != "")
    if on_cpu or solo:
        one_process("all ranks run in one process on cpu" if on_cpu else "--solo runs one rank")
    if len(plans.plans) > 1 and not (variant or bucket):
        if solo or eager:
            raise click.UsageError("--solo and --eager take one version: choose with --variant and --bucket")
        if interleave and steps:
            raise click.UsageError("--interleave says which steps of a plan set are taken; leave --steps out")
        turns = _interleaving(interleave, plans, device) if interleave else None
        return _walk(plans, steps or STEPS, seed, "cpu" if turns else device, graph_bytes, turns, style)
    if graph_bytes is not None:
        raise click.UsageError("--graph-bytes is for a walk through several versions; this runs one")
    plan = plans.plan(variant, bucket)
    if (solo or eager) and on_cpu:
        why = "this run is on cpu" if device == "cpu" else "which is not there; `stepgraph doctor` tells why"
        raise click.UsageError(f"--solo and --eager are for cuda, {why}")
    steps = steps or STEPS
    if solo:
        return _solo(plan, steps, seed, style)
    from stepgraph.runtime.simulate import simulate

    found = _interleaving(interleave, plan, device) if interleave else None
    report = simulate(plan, steps, seed, "cpu" if found else device, eager, progress, found)
    if report is None:  # a rank other than 0
        return 0
    if style == "json":
        emit_json(_data(plan, report))
    else:
        _tell(plan, report)
    return 0 if report.ok else 1


def _interleaving(file: str, plan: Plan | PlanSet, device: DeviceName) -> Interleaving:
    from stepgraph.runtime.interleave import load_interleaving

    if device == "cuda":
        raise click.UsageError("--interleave is for cpu: on cuda the hardware decides")
    found = load_interleaving(Path(file), plan)
    progress(f"taking {sum(turn.count for turn in found.turns)} turns, then by chance")
    return found


def _walk(
    plans: PlanSet,
    steps: int,
    seed: int,
    device: DeviceName,
    graph_bytes: int | None,
    turns: Interleaving | None,
    style: str,
) -> int:
    from stepgraph.runtime.walk import walk

    report = walk(plans, steps, seed, device, graph_bytes, progress, turns)
    if report is None:  # a rank other than 0
        return 0
    stats = report.stats
    if style == "json":
        emit_json({"name": plans.name, **asdict(report), "ok": report.ok})
        return 0 if report.ok else 1
    for finding in report.findings[:5]:
        click.echo(finding, err=True)
    click.echo(
        f"{plans.name}: {report.steps} steps through {len(report.taken)} of {len(plans.plans)} versions on "
        f"{report.ranks} ranks, device {report.device}, seed {report.seed}"
    )
    verdict = "agrees" if report.max_abs_error <= report.tolerance else "DISAGREES"
    click.echo(
        f"  unsharded model  {verdict}: max abs error {report.max_abs_error:.3g}, tolerance {report.tolerance:.3g}"
    )
    click.echo(f"  ranks            {'the same bits on all' if report.ranks_agree else 'NOT THE SAME'}")
    click.echo(
        f"  races and faults {len(report.findings)}"
        if report.device == "cpu"
        else f"  memory grown by  {size(report.grown)}"
    )
    limit = "no limit" if stats.budget is None else f"a budget of {size(stats.budget)}"
    click.echo(
        f"  replay cache     {stats.hits} hits, {stats.misses} misses, {stats.evictions} evictions, {limit}, "
        f"{len(stats.captured)} held with {size(stats.planned_bytes)}"
    )
    return 0 if report.ok else 1


def _plans(file: str, settings: tuple[str, ...], ranks: int | None, edited: bool) -> PlanSet:
    plans = read_plans(file, settings, edited)
    plan = plans.plans[0]
    if ranks is None or ranks == plan.world_size:
        return plans
    if is_plan(file):
        raise click.UsageError(f"--ranks changes schedules; this plan is compiled for {plan.world_size} ranks")
    _, ulysses = plan.coordinate(0, "ulysses")
    others = plan.world_size // ulysses
    if ranks % others:
        raise click.UsageError(f"the other axes of the mesh take {others} ranks each; {ranks} is no multiple of that")
    return read_plans(file, (*settings, f"mesh.ulysses={ranks // others}"))


def _data(plan: Plan, report: RunReport) -> dict[str, object]:
    return {
        "name": plan.name,
        "device": report.device,
        "ranks": report.ranks,
        "steps": report.steps,
        "seed": report.seed,
        "max_abs_error": report.max_abs_error,
        "tolerance": report.tolerance,
        "movement_exact": report.movement_exact,
        "movements_checked": report.movements_checked,
        "races": len(report.races),
        "faults": [str(fault) for fault in report.faults],
        "first_races": [str(race) for race in report.races[:5]],
        "captured_equals_eager": report.captured_equals_eager,
        "capture": _facts_data(report.facts) if report.facts else None,
        "ok": report.ok,
    }


def _facts_data(facts: CaptureFacts) -> dict[str, object]:
    return {
        "transport": facts.transport,
        "passed_over": list(facts.passed_over),
        "eager_because": facts.eager_because,
        "capture_seconds": facts.capture_seconds,
        "nodes": dict(facts.nodes),
        "planned_nodes": dict(facts.planned_nodes),
        "arena_bytes": facts.arena_bytes,
        "pool_bytes": facts.pool_bytes,
    }


def _tell(plan: Plan, report: RunReport) -> None:
    for finding in [*report.races[:5], *report.faults[:5]]:
        click.echo(str(finding), err=True)
    click.echo(
        f"{plan.name}: {report.steps} denoising steps on {report.ranks} ranks, device {report.device}, "
        f"seed {report.seed}"
    )
    verdict = "agrees" if report.max_abs_error <= report.tolerance else "DISAGREES"
    click.echo(
        f"  unsharded model  {verdict}: max abs error {report.max_abs_error:.3g}, tolerance {report.tolerance:.3g}"
    )
    exact = "exact" if report.movement_exact else "NOT EXACT"
    click.echo(f"  data movement    {exact}, bit for bit, in {report.movements_checked} targets")
    if report.facts is None:
        click.echo(f"  races            {len(report.races)}")
        click.echo(f"  other faults     {len(report.faults)}")
        return
    if report.captured_equals_eager is not None:
        same = "the same" if report.captured_equals_eager else "NOT THE SAME"
        click.echo(f"  captured, eager  {same}, bit for bit, on every rank in every step")
    tell_facts(report.facts)


def tell_facts(facts: CaptureFacts) -> None:
    """What was captured, over what."""
    click.echo(f"  transport        {facts.transport}")
    for reason in facts.passed_over:
        click.echo(f"                   not {reason}")
    if facts.eager_because:
        click.echo(f"  not captured     {facts.eager_because}")
    else:
        nodes = ", ".join(f"{count} {kind}" for kind, count in facts.nodes.items())
        planned = ", ".join(f"{count} {kind}" for kind, count in facts.planned_nodes.items())
        click.echo(f"  captured         in {facts.capture_seconds:.2f} s")
        click.echo(f"  graph nodes      {nodes}")
        click.echo(f"  of the plan      {planned or 'none'}")
        click.echo(f"  pool             {size(facts.pool_bytes)}")
    click.echo(f"  arena            {size(facts.arena_bytes)}")


def _solo(plan: Plan, steps: int, seed: int, style: str) -> int:
    from stepgraph.runtime.solo import run_solo

    report = run_solo(plan, steps, seed, progress)
    if style == "json":
        emit_json(
            {
                "name": plan.name,
                "rank": 0,
                "ranks": plan.world_size,
                "steps": report.steps,
                "captured_ms": report.captured_ms,
                "eager_ms": report.eager_ms,
                "peak_bytes": report.peak_bytes,
                "capture": _facts_data(report.facts),
            }
        )
        return 0
    click.echo(f"{plan.name}: rank 0 of {plan.world_size} alone, with stand-ins for its peers, {report.steps} steps")
    ratio = report.eager_ms / report.captured_ms
    click.echo(
        f"  a step           {report.captured_ms:.2f} ms captured, {report.eager_ms:.2f} ms eager ({ratio:.3f} x)"
    )
    click.echo(f"  peak memory      {size(report.peak_bytes)}")
    tell_facts(report.facts)
    return 0
