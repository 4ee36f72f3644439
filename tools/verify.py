"""stepgraph verify."""

from __future__ import annotations

import click

from stepgraph.tools.output import emit_json, format_option, progress, read_plan_or_schedule, set_option


@click.command("verify")
@click.argument("file")
@set_option
@format_option
def command(file: str, settings: tuple[str, ...], style: str) -> int:
    """Prove a plan free of races and deadlocks, over all ranks and replays; a schedule is compiled first."""
    from stepgraph.planner.verify.proof import prove
    from stepgraph.tools.output import diagnostic_data

    plan = read_plan_or_schedule(file, settings)
    progress(f"proving {plan.name}")
    proof = prove(plan)
    if style == "json":
        emit_json(
            {
                "ok": proof.ok,
                "name": plan.name,
                "replays": proof.replays,
                "findings": [diagnostic_data(finding) for finding in proof.findings],
                "assumptions": list(proof.assumptions),
            }
        )
        return 0 if proof.ok else 1
    for finding in proof.findings:
        click.echo(finding.render(), err=True)
    verdict = f"free of races and deadlocks over {proof.replays} replays" if proof.ok else "not proven"
    click.echo(f"{plan.name}: {verdict}")
    for assumption in proof.assumptions if proof.ok else ():
        click.echo(f"  assuming: {assumption}")
    return 0 if proof.ok else 1
