"""stepgraph verify."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepgraph.tools.output import (
    SEED,
    console,
    edited_option,
    emit_json,
    format_option,
    pasteable,
    progress,
    read_plans,
    set_option,
    version_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepgraph.planner.plan import Plan
    from stepgraph.planner.plan_set import PlanSet
    from stepgraph.planner.verify.proof import Proof
    from stepgraph.planner.verify.succession import SetProof
    from stepgraph.runtime.interleave import Interleaving
    from stepgraph.runtime.mutate import Verdict

NO_ORDER = "no order is missing, any run shows it"


@click.command("verify")
@click.argument("file")
@click.option("--mutate", type=click.IntRange(0, 1_000_000), default=0, help="Judge so many plans with one change.")
@click.option("--seed", type=SEED, default=0, help="Of the changes.")
@click.option("--counterexample", metavar="FILE", help="Write an interleaving that shows the first missing order.")
@edited_option
@version_options
@set_option
@format_option
def command(
    file: str,
    mutate: int,
    seed: int,
    counterexample: str | None,
    edited: bool,
    settings: tuple[str, ...],
    variant: str,
    bucket: str,
    style: str,
) -> int:
    """Prove a plan free of races and deadlocks, over all ranks and replays; a schedule is compiled first. Of several
    versions all are proven, and everything that may follow one another; with --variant or --bucket one alone.

    With --mutate the verifier itself is tried: plans with one random change are judged by it and by running them on the
    cpu device, with random numbers for what stages compute. Take a small size: every mutant runs a dozen times.
    """
    from stepgraph.planner.verify.proof import prove
    from stepgraph.tools.output import diagnostic_data

    plans = read_plans(file, settings, edited)
    if len(plans.plans) > 1 and not (variant or bucket):
        if mutate:
            raise click.UsageError("--mutate takes one version: choose with --variant and --bucket")
        return _set(plans, counterexample, lambda v, b, o: pasteable("run", file, o, edited, v, b, settings), style)
    plan = plans.plan(variant, bucket)
    progress(f"proving {plan.name}")
    proof = prove(plan)
    to_see = ""
    if counterexample and proof.counterexamples:
        options = _write(counterexample, _of_one(plan, proof))
        to_see = pasteable("run", file, options, edited, variant, bucket, settings)
    verdicts = _judged(plan, mutate, seed) if mutate and proof.ok else []
    agree = not any(verdict.outcome in ("missed", "false alarm") for verdict in verdicts)
    if style == "json":
        emit_json(
            {
                "ok": proof.ok and agree,
                "name": plan.name,
                "replays": proof.replays,
                "findings": [diagnostic_data(finding) for finding in proof.findings],
                "assumptions": list(proof.assumptions),
                "counterexample": counterexample if to_see else None,
                "to_see_it": to_see or None,
                **({"mutants": _data(verdicts)} if mutate else {}),
            }
        )
        return 0 if proof.ok and agree else 1
    for finding in proof.findings:
        click.echo(finding.render(), err=True)
    verdict = f"free of races and deadlocks over {proof.replays} replays" if proof.ok else "not proven"
    click.echo(f"{plan.name}: {verdict}")
    if counterexample:
        _tell_of_it(to_see, proof.ok, NO_ORDER)
    for assumption in proof.assumptions if proof.ok else ():
        click.echo(f"  assuming: {assumption}")
    if verdicts:
        _table(verdicts)
    return 0 if proof.ok and agree else 1


def _set(
    plans: PlanSet, counterexample: str | None, command: Callable[[str, str, Sequence[str]], str], style: str
) -> int:
    """Prove every version and every succession. ``command`` runs a variant, a bucket, or "" for all, with options."""
    from stepgraph.planner.verify.succession import prove_set
    from stepgraph.tools.output import diagnostic_data

    progress(f"proving {len(plans.plans)} versions of {plans.name} and their successions")
    proof = prove_set(plans.versions(), plans.follows())
    to_see = ""
    found = _of_set(plans, proof) if counterexample else None
    if counterexample and found:
        interleaving, variant, bucket = found
        to_see = command(variant, bucket, _write(counterexample, interleaving))
    if style == "json":
        emit_json(
            {
                "ok": proof.ok,
                "name": plans.name,
                "versions": {name: alone.ok for name, alone in proof.alone.items()},
                "successions_by_closing": proof.closed,
                "successions_looked_at": proof.words,
                "findings": [diagnostic_data(finding) for finding in proof.findings],
                "counterexample": counterexample if to_see else None,
                "to_see_it": to_see or None,
            }
        )
        return 0 if proof.ok else 1
    for finding in proof.findings:
        click.echo(finding.render(), err=True)
    for name, alone in proof.alone.items():
        click.echo(f"{name}: {'free of races and deadlocks' if alone.ok else 'not proven'}")
    how = f"{proof.closed} follow a version that is closed, {proof.words} were looked at one by one"
    click.echo(f"successions: {'free of races and deadlocks' if proof.ok else 'not proven'}; {how}")
    if counterexample:
        sound = all(alone.ok for alone in proof.alone.values())
        _tell_of_it(to_see, proof.ok, "no run of the set is known that shows it" if sound else NO_ORDER)
    return 0 if proof.ok else 1


def _of_one(plan: Plan, proof: Proof) -> Interleaving:
    """The first counterexample, for a file."""
    from stepgraph.runtime.interleave import interleaving_of

    return interleaving_of(plan, proof.counterexamples[0])


def _of_set(plans: PlanSet, proof: SetProof) -> tuple[Interleaving, str, str] | None:
    """The first counterexample, to a version alone or to a succession, with the variant and bucket to run; "" for
    all."""
    from stepgraph.runtime.interleave import interleaving_of_set

    for name, alone in proof.alone.items():
        if alone.counterexamples:
            plan = plans.versions()[name]
            return _of_one(plan, alone), plan.source.variant, plan.source.bucket
    for shown in proof.counterexamples:
        found = interleaving_of_set(plans, shown)
        if found is not None:
            return found, "", ""
    return None


def _write(file: str, interleaving: Interleaving) -> list[str]:
    """Write a counterexample; gives the options of the run that follows it."""
    from stepgraph.runtime.interleave import dumps

    Path(file).write_text(dumps(interleaving), encoding="utf-8")
    steps = [] if interleaving.word else ["--steps", str(interleaving.replays)]
    return ["--device", "cpu", *steps, "--interleave", file]


def _tell_of_it(to_see: str, ok: bool, why: str) -> None:
    click.echo(f"  to see it: {to_see}" if to_see else f"  no counterexample: {'it is proven' if ok else why}")


def _judged(plan: Plan, count: int, seed: int) -> list[Verdict]:
    from stepgraph.runtime.mutate import verdicts

    found = []
    for number, verdict in enumerate(verdicts(plan, count, seed), 1):
        found.append(verdict)
        if number % 50 == 0:
            progress(f"{number} of {count} mutants")
    return found


def _data(verdicts: Sequence[Verdict]) -> dict[str, object]:
    counts = Counter(verdict.outcome for verdict in verdicts)
    kinds: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        kinds.setdefault(verdict.mutant.kind, Counter())[verdict.outcome] += 1
    return {
        "total": len(verdicts),
        "unsafe": counts["killed"] + counts["missed"],
        "killed": counts["killed"],
        "missed": counts["missed"],
        "by_rule": counts["by rule"],
        "false_alarms": counts["false alarm"],
        "by_kind": {kind: dict(found) for kind, found in kinds.items()},
        "disagreements": [
            {"what": v.mutant.what, "codes": list(v.codes), "seen": v.seen}
            for v in verdicts
            if v.outcome in ("missed", "false alarm")
        ],
    }


def _table(verdicts: Sequence[Verdict]) -> None:
    from rich.table import Table

    table = Table(
        "change", "mutants", "killed", "safe", "by rule", "missed", "false alarms", "codes", "seen by running"
    )
    for kind in dict.fromkeys(verdict.mutant.kind for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.mutant.kind == kind]
        counts = Counter(verdict.outcome for verdict in mine)
        codes = Counter(code for verdict in mine for code in verdict.codes)
        seen = Counter(verdict.seen for verdict in mine if verdict.seen)
        numbers = [counts[outcome] for outcome in ("killed", "safe", "by rule", "missed", "false alarm")]
        words = (" ".join(code for code, _ in codes.most_common(4)), ", ".join(word for word, _ in seen.most_common(3)))
        table.add_row(kind, str(len(mine)), *map(str, numbers), *words)
    console().print(table)
    for verdict in verdicts:
        if verdict.outcome in ("missed", "false alarm"):
            click.echo(f"{verdict.outcome}: {verdict.mutant.what}: {' '.join(verdict.codes) or 'proven'}, "
                       f"running shows {verdict.seen or 'nothing'}", err=True)  # fmt: skip
    counts = Counter(verdict.outcome for verdict in verdicts)
    unsafe = counts["killed"] + counts["missed"]
    click.echo(
        f"{counts['killed']} of {unsafe} unsafe mutants killed, {counts['false alarm']} false alarms, "
        f"{counts['by rule']} refused by rule"
    )
