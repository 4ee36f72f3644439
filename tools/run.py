"""stepgraph run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stepgraph.tools.output import emit_json, format_option, progress, read_plan_or_schedule, set_option

if TYPE_CHECKING:
    from stepgraph.runtime.session import DeviceName


@click.command("run")
@click.argument("file")
@click.option("--device", type=click.Choice(["cpu", "cuda", "auto"]), default="auto", help="Where it runs.")
@click.option("--steps", type=click.IntRange(1, 10_000), default=8, help="Denoising steps.")
@click.option("--seed", type=int, default=0, help="Of weights, inputs and interleaving.")
@set_option
@format_option
def command(file: str, device: DeviceName, steps: int, seed: int, settings: tuple[str, ...], style: str) -> int:
    """Run a denoising loop over all ranks with made-up weights, and compare it with the unsharded model in float64."""
    from stepgraph.runtime.simulate import simulate

    plan = read_plan_or_schedule(file, settings)
    report = simulate(plan, steps, seed, device, progress)
    if style == "json":
        emit_json(
            {
                "name": plan.name,
                "device": "cpu",
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
                "ok": report.ok,
            }
        )
        return 0 if report.ok else 1
    for finding in [*report.races[:5], *report.faults[:5]]:
        click.echo(str(finding), err=True)
    click.echo(f"{plan.name}: {report.steps} denoising steps on {report.ranks} ranks, device cpu, seed {report.seed}")
    verdict = "agrees" if report.max_abs_error <= report.tolerance else "DISAGREES"
    click.echo(
        f"  unsharded model  {verdict}: max abs error {report.max_abs_error:.3g}, tolerance {report.tolerance:.3g}"
    )
    exact = "exact" if report.movement_exact else "NOT EXACT"
    click.echo(f"  data movement    {exact}, bit for bit, in {report.movements_checked} targets")
    click.echo(f"  races            {len(report.races)}")
    click.echo(f"  other faults     {len(report.faults)}")
    return 0 if report.ok else 1
