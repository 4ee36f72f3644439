"""Interleavings as files: what a counterexample of the verifier says, and the cpu device replays."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from stepgraph.planner.diagnostics import Diagnostic, StepgraphError
from stepgraph.planner.plan import Plan, plan_hash
from stepgraph.planner.verify.counterexample import Counterexample, Turn
from stepgraph.planner.verify.findings import name

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
    """The plan's hash."""
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
    return Interleaving(FORMAT, plan_hash(plan), found.finding.code, first, second, replays, found.turns)


@cache
def _adapter() -> TypeAdapter[Interleaving]:
    return TypeAdapter(Interleaving)


def dumps(interleaving: Interleaving) -> str:
    return _adapter().dump_json(interleaving, indent=1).decode() + "\n"


def load_interleaving(path: Path, plan: Plan) -> Interleaving:
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
    if found.plan != plan_hash(plan):
        raise _refuse("the interleaving belongs to another plan", found.plan[:80], plan_hash(plan))
    for number, turn in enumerate(found.turns):
        if not 0 <= turn.rank < plan.world_size or turn.stream not in plan.streams or turn.count < 1:
            told = f"rank {turn.rank}, stream {turn.stream[:40]}, {turn.count} times"
            raise _refuse(f"turn {number} of the interleaving does not fit the plan", "its ranks and streams", told)
    return found


def _refuse(message: str, expected: str, got: str) -> InterleavingError:
    hint = "`stepgraph verify PLAN --counterexample FILE` writes one"
    return InterleavingError([Diagnostic("E613", message, None, expected, got, hint)])
