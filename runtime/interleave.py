"""Interleavings as files: what a counterexample of the verifier says, and the cpu device replays."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from stepgraph.planner.diagnostics import Diagnostic, StepgraphError
from stepgraph.planner.plan import Plan, plan_hash
from stepgraph.planner.plan_set import PlanSet, set_hash
from stepgraph.planner.verify.counterexample import Counterexample, SetCounterexample, Turn, turns_of
from stepgraph.planner.verify.findings import name
from stepgraph.planner.verify.order import order_of

FORMAT = "stepgraph interleaving 1"
MAX_BYTES = 64 << 20


class InterleavingError(StepgraphError):
    """A file is no interleaving, is one of another plan, or can't be followed (E613)."""


@dataclass(frozen=True, slots=True)
class Interleaving:
    """The turns that ranks take on the cpu device before chance goes on."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    format: str
    plan: str
    """The hash of the plan, or of the plan set."""
    word: tuple[str, ...]
    """Of a plan set: the versions that run one after another, from the beginning of a request on; else none."""
    code: str
    first: str
    """What should have been done before ``second``, and has not."""
    second: str
    replays: int
    """How many the turns reach into."""
    turns: tuple[Turn, ...]


def interleaving_of(plan: Plan, found: Counterexample) -> Interleaving:
    """A counterexample to ``plan``, to be kept."""
    first, second = (name(plan, step) for step in (found.finding.first, found.finding.second))
    replays = found.finding.second.replay + 1
    return Interleaving(FORMAT, plan_hash(plan), (), found.finding.code, first, second, replays, found.turns)


def interleaving_of_set(plans: PlanSet, found: SetCounterexample) -> Interleaving | None:
    """A counterexample to a plan set, to be kept, behind what a request has to begin with: all ranks are through with
    that before the turns of the counterexample. None where no session may run its versions one after another."""
    begun = plans.walk_to(found.word)
    if begun is None:
        return None
    versions = plans.versions()
    turns = found.turns
    if begun and turns:
        order = order_of([versions[one] for one in begun], begun)
        turns = (*turns_of(order, order.sequence), *turns)
    word = (*begun, *found.word)
    return Interleaving(FORMAT, set_hash(plans), word, found.code, found.first, found.second, len(word), turns)


@cache
def _adapter() -> TypeAdapter[Interleaving]:
    return TypeAdapter(Interleaving)


def dumps(interleaving: Interleaving) -> str:
    return _adapter().dump_json(interleaving, indent=1).decode() + "\n"


def load_interleaving(path: Path, plan: Plan | PlanSet) -> Interleaving:
    """Raises InterleavingError E613 for a file that can't be read, is another document, or belongs to another plan."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _refuse("the file is too large", f"at most {MAX_BYTES} bytes", "more")
        found = _adapter().validate_json(path.read_bytes())
    except OSError as error:
        raise _refuse(f"{path} can't be read", "a file", error.strerror or "an error") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        got = json.dumps(first["input"], default=str)[:80]
        raise _refuse(f"the file is no interleaving{f', at {where}' if where else ''}", first["msg"], got) from None
    if found.format != FORMAT:
        raise _refuse("the file is no interleaving", FORMAT, found.format[:80])
    wanted = set_hash(plan) if isinstance(plan, PlanSet) else plan_hash(plan)
    if found.plan != wanted:
        hint = "of a plan set: one of the whole set, or of one version, with --variant and --bucket"
        raise _refuse("the interleaving belongs to another plan", found.plan[:80], wanted, hint)
    known = plan.versions() if isinstance(plan, PlanSet) else {}
    unknown = next((name for name in found.word if name not in known), None)
    if unknown is not None or (isinstance(plan, PlanSet) and not found.word):
        expected = f"some of {', '.join(known)}" if known else "no versions: the plan is one"
        raise _refuse("the interleaving does not say which versions run", expected, repr(unknown)[:80])
    streams = plan.plans[0].streams if isinstance(plan, PlanSet) else plan.streams
    for number, turn in enumerate(found.turns):
        if not 0 <= turn.rank < plan.world_size or turn.stream not in streams or turn.count < 1:
            told = f"rank {turn.rank}, stream {turn.stream[:40]}, {turn.count} times"
            raise _refuse(f"turn {number} of the interleaving does not fit the plan", "its ranks and streams", told)
    return found


def _refuse(
    message: str, expected: str, got: str, hint: str = "`stepgraph verify PLAN --counterexample FILE` writes one"
) -> InterleavingError:
    return InterleavingError([Diagnostic("E613", message, None, expected, got, hint)])
