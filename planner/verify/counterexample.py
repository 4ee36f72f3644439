"""An interleaving that shows a finding: two instructions that nothing orders, run in the order that must not happen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.verify.order import Order, Step


@dataclass(frozen=True, slots=True)
class Turn:
    """A stream of a rank runs its next instructions."""

    rank: int
    stream: str
    count: int


@dataclass(frozen=True, slots=True)
class Unordered:
    """A finding: ``first`` should be done before ``second`` starts, and nothing sees to it."""

    diagnostic: Diagnostic
    first: Step
    second: Step

    @property
    def code(self) -> str:
        return self.diagnostic.code


@dataclass(frozen=True, slots=True)
class Counterexample:
    """After ``turns``, from the first replay on, the second instruction of ``finding`` has run, and the first has not
    been done."""

    finding: Unordered
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class SetCounterexample:
    """To a finding between versions of a set: ``word`` are those that run one after another, ``turns`` are taken in
    them, from the first one on. None where the word itself shows it, in any order of turns."""

    word: tuple[str, ...]
    code: str
    first: str
    """What should have been done before ``second``, and is not."""
    second: str
    turns: tuple[Turn, ...]


def counterexample(order: Order, finding: Unordered) -> Counterexample:
    """Everything that either instruction has to wait for, in an order that keeps all edges, and then the second: the
    first has all that it needs, and is not among it."""
    first, second = finding.first, finding.second
    needed = [_needed(order, second)]
    if not order.before(second, first):
        needed.append(_needed(order, first))
    steps = [*(step for step in order.sequence if any(needs(step) for needs in needed)), second]
    return Counterexample(finding, turns_of(order, steps))


def _needed(order: Order, wanted: Step) -> Callable[[Step], bool]:
    """Whether an instruction has to run, or start, before one may."""
    clock = order.clocks[order.clock[wanted.rank][order.at(wanted)]]
    own, start = order.chain(wanted), order.started[wanted.rank][order.at(wanted)]

    def comes_first(step: Step) -> bool:
        chain, position = order.chain(step), order.started[step.rank][order.at(step)]
        return position < start if chain == own else position <= clock[chain]

    return comes_first


def turns_of(order: Order, steps: Iterable[Step]) -> tuple[Turn, ...]:
    """Whose turn it is while these steps are taken."""
    streams = [(step.rank, order.plans[step.replay].streams[order.item(step).stream]) for step in steps]
    return tuple(Turn(rank, stream, len(list(run))) for (rank, stream), run in groupby(streams))
