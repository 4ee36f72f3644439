"""stepgraph compile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepgraph.tools.output import console, emit_json, format_option, progress, read_schedule_file, set_option, size
from stepgraph.tools.summary import summary

if TYPE_CHECKING:
    from stepgraph.planner.schedule import Schedule


@click.command("compile")
@click.argument("file")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Where the plan goes.")
@set_option
@format_option
def command(file: str, output: str | None, settings: tuple[str, ...], style: str) -> int:
    """Compile a schedule to a plan, prove it, and tell what an author wants to know. A plan that is not proven is not
    written. A schedule with variants or buckets becomes a plan set: a plan for each, and a proof of all successions."""
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.plan import dumps, plan_hash
    from stepgraph.planner.timeline import estimate
    from stepgraph.planner.verify.proof import prove
    from stepgraph.tools.output import diagnostic_data

    schedule = read_schedule_file(file, settings)
    if schedule.variants or schedule.buckets:
        return _set(schedule, output, style)
    plan = compile_schedule(schedule)
    progress(f"proving {plan.name}")
    proof = prove(plan)
    facts = summary(plan)
    timeline = estimate(plan)
    if proof.ok and output:
        Path(output).write_text(dumps(plan), encoding="utf-8")
    if style == "json":
        emit_json(
            {
                **facts,
                "predicted_step_seconds": timeline.step_seconds,
                "predicted_exposed_seconds": timeline.exposed_seconds,
                "proven": proof.ok,
                "findings": [diagnostic_data(finding) for finding in proof.findings],
                "assumptions": list(proof.assumptions),
                "sha256": plan_hash(plan),
                "output": output if proof.ok else None,
            }
        )
        return 0 if proof.ok else 1
    arena, least = int(facts["arena_bytes"]), int(facts["arena_lower_bound"])
    gap = f"{100 * (arena / least - 1):.1f} % over" if arena > least else "equal to"
    states = f"{facts['states']}, {size(int(facts['state_bytes']))} of rank 0" if plan.states else "none"
    rows = [
        ("ranks", f"{facts['ranks']} ({facts['mesh']})"),
        ("ops", f"{facts['ops']}"),
        ("streams", f"{facts['streams']}"),
        ("events", f"{facts['events']} a rank ({facts['dependencies']} before reduction)"),
        ("handshakes", f"{facts['handshakes']} a rank, {facts['protocols']}"),
        ("collectives", f"{facts['collectives']} a rank"),
        ("copies", f"{facts['copies']} a step and rank, {size(int(facts['copied_bytes']))}"),
        ("arena", f"{size(arena)} ({arena} bytes, {gap} the lower bound of {least})"),
        ("state", states),
        ("predicted", f"{1e3 * timeline.step_seconds:.2f} ms a step on H200, "
                      f"{1e3 * timeline.exposed_seconds:.2f} ms of communication exposed"),
        ("proof", f"free of races and deadlocks over {proof.replays} replays" if proof.ok else "NOT PROVEN"),
        ("hash", plan_hash(plan)),
    ]  # fmt: skip
    click.echo(plan.name)
    for name, text in rows:
        click.echo(f"  {name:12} {text}")
    click.echo("  assuming")
    for assumption in proof.assumptions:
        click.echo(f"    - {assumption}")
    for finding in proof.findings:
        click.echo(finding.render(), err=True)
    if output and proof.ok:
        click.echo(f"  written to   {output}")
    return 0 if proof.ok else 1


def _set(schedule: Schedule, output: str | None, style: str) -> int:
    """Compile every version, prove them and their successions, and tell of them in a table."""
    from rich.table import Table

    from stepgraph.planner.compile import compile_set
    from stepgraph.planner.footprint import footprint
    from stepgraph.planner.plan_set import dumps, set_hash
    from stepgraph.planner.timeline import estimate
    from stepgraph.planner.verify.succession import prove_set
    from stepgraph.tools.output import diagnostic_data

    plans = compile_set(schedule, progress)
    progress(f"proving {len(plans.plans)} versions and their successions")
    proof = prove_set(plans.versions(), plans.follows())
    if proof.ok and output:
        Path(output).write_text(dumps(plans), encoding="utf-8")
    written = output if proof.ok else None
    successions = sum(len(before) for before in plans.follows().values())
    if style == "json":
        emit_json(
            {
                "name": plans.name,
                "arena_bytes": plans.arena_bytes,
                "versions": [
                    {
                        **summary(plan),
                        "version": name,
                        "graph_bytes": footprint(plan),
                        "predicted_step_seconds": estimate(plan).step_seconds,
                        "proven": proof.alone[name].ok,
                    }
                    for name, plan in plans.versions().items()
                ],
                "successions": successions,
                "proven": proof.ok,
                "findings": [diagnostic_data(finding) for finding in proof.findings],
                "sha256": set_hash(plans),
                "output": written,
            }
        )
        return 0 if proof.ok else 1
    table = Table("version", "ops", "handshakes", "copies", "bytes of targets", "graph bytes", "predicted ms", "proof")
    for name, plan in plans.versions().items():
        facts = summary(plan)
        targets = max((target.offset + target.nbytes for target in plan.targets), default=0)
        numbers = (facts["ops"], facts["handshakes"], facts["copies"], size(targets), size(footprint(plan)))
        verdict = "proven" if proof.alone[name].ok else "NOT PROVEN"
        table.add_row(name, *map(str, numbers), f"{1e3 * estimate(plan).step_seconds:.2f}", verdict)
    click.echo(f"{plans.name}: {len(plans.plans)} versions on {plans.world_size} ranks")
    console().print(table)
    click.echo(f"  arena        {size(plans.arena_bytes)} ({plans.arena_bytes} bytes) for all of them")
    how = f"{proof.closed} because the first is closed, {proof.words} looked at one by one"
    verdict = "free of races and deadlocks" if proof.ok else "NOT PROVEN"
    click.echo(f"  successions  {successions} allowed, {verdict}: {how}")
    click.echo(f"  hash         {set_hash(plans)}")
    for finding in proof.findings:
        click.echo(finding.render(), err=True)
    if written:
        click.echo(f"  written to   {written}")
    return 0 if proof.ok else 1
