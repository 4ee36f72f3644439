"""stepgraph compile."""

from __future__ import annotations

from pathlib import Path

import click

from stepgraph.tools.output import emit_json, format_option, progress, read_schedule_file, set_option, size
from stepgraph.tools.summary import summary


@click.command("compile")
@click.argument("file")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Where the plan goes.")
@set_option
@format_option
def command(file: str, output: str | None, settings: tuple[str, ...], style: str) -> int:
    """Compile a schedule to a plan, prove it, and tell what an author wants to know. A plan that is not proven is not
    written."""
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.plan import dumps, plan_hash
    from stepgraph.planner.timeline import estimate
    from stepgraph.planner.verify.proof import prove
    from stepgraph.tools.output import diagnostic_data

    plan = compile_schedule(read_schedule_file(file, settings))
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
