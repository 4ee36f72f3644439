"""Plans of one set, which follow one another on the same ranks, in one arena and one page of flags.

Each is proven alone, over two replays. Then every pair of accesses in any allowed run of the set must be ordered, and
every flag word reset in time. This is decided by few words, short runs of one replay a plan:

- More plans between two others only add order: whatever holds for A and B next to each other holds for them anywhere.
- A plan that orders all pairs of ranks puts everything before it before everything behind it. A plan that doesn't is
  transparent, so that what is before it may still run beside what is behind it: words go through such plans, once
  each, where no shorter word is allowed that says more.
- A plan is closed if all its accesses to targets come before the next replay of every rank, whichever plan that is of.
  If no other plan uses its flag words, it needs no word with what follows it: other memory is of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Collective, Plan
from stepgraph.planner.verify.counterexample import SetCounterexample, Unordered
from stepgraph.planner.verify.findings import first_of_each
from stepgraph.planner.verify.order import Order, order_of
from stepgraph.planner.verify.proof import Proof, collector_paused, examine
from stepgraph.planner.verify.races import accesses, races
from stepgraph.planner.verify.sharing import Follows, Told, shared_epochs, shared_states, shown_by, unwritten_states
from stepgraph.planner.verify.words import Uses, uses_of, words_of_many


@dataclass(frozen=True, slots=True)
class SetProof:
    alone: Mapping[str, Proof]
    """Of each plan, followed by itself."""
    successions: tuple[Diagnostic, ...]
    """What is wrong between plans that are proven alone."""
    counterexamples: tuple[SetCounterexample, ...]
    """To ``successions``, where a run is known that shows it."""
    closed: int
    """Allowed successions of two plans that the first one's closing decides."""
    words: int
    """Words of two or more plans that were proven one by one, or refused."""

    @property
    def findings(self) -> tuple[Diagnostic, ...]:
        return (*(found for proof in self.alone.values() for found in proof.findings), *self.successions)

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class _Reach:
    """What is known to be done when a rank, any of them, is through a plan."""

    orders_all: bool
    """Every rank has entered the plan, and so has left the one before."""
    closed: bool
    """And every access of every rank to a target is done."""


def _reach(order: Order) -> _Reach:
    plan, ranks = order.plans[0], range(order.plans[0].world_size)
    last = [0] * (len(ranks) * order.width)
    """By chain: the position at which its last access to a target is done."""
    for rank, program in enumerate(plan.ranks):
        for number, item in enumerate(program.instructions):
            if any(buffer < len(plan.targets) for (_, buffer, _), _ in accesses(plan, rank, item)):
                chain = rank * order.width + item.stream
                last[chain] = max(last[chain], order.started[rank][number] + isinstance(item, Collective))
    clocks = [order.clocks[order.entered[rank][1]] for rank in ranks]
    chains = [slice(rank * order.width, (rank + 1) * order.width) for rank in ranks]
    orders_all = all(any(clock[mine]) for clock in clocks for mine in chains)
    done = all(known >= position for clock in clocks for known, position in zip(clock, last, strict=True))
    return _Reach(orders_all, orders_all and done)


def _words(names: Sequence[str], follows: Follows, reach: Mapping[str, _Reach]) -> Iterator[tuple[str, ...]]:
    """Every allowed word of different plans that are transparent but for the first and the last one, where no part of
    it may be left out."""
    then = {name: [other for other in names if name in follows[other]] for name in names}

    def longer(word: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name in then[word[-1]]:
            if name in word or any(name in then[earlier] for earlier in word[:-1]):
                continue
            yield (*word, name)
            if not reach[name].orders_all:
                yield from longer((*word, name))

    for name in names:
        yield from longer((name,))


def _succession(word: Sequence[str], plans: Mapping[str, Plan], uses: Mapping[int, Uses]) -> Iterator[Told]:
    order = order_of([plans[name] for name in word], word)
    assert not order.stuck, "each plan comes to its end alone"
    raced, _ = races(order)
    for found in first_of_each([*words_of_many(order, uses), *raced], 1):
        what = found.diagnostic if isinstance(found, Unordered) else found
        hint = f"end {word[0]} with a handshake of all its ranks, and give each plan flag words of its own"
        told = replace(what, message=f"at the succession {' -> '.join(word)}: {what.message}", hint=hint)
        yield told, shown_by(word, order, found) if isinstance(found, Unordered) else None


@collector_paused()
def prove_set(plans: Mapping[str, Plan], follows: Follows) -> SetProof:
    """Prove plans that may follow one another; names are those of variants, or of variants and buckets. Successions
    are looked at between plans that are proven alone. A plan must stand its own repetition, allowed or not.

    Raises:
        ValueError: for a name in ``follows`` that no plan has.
    """
    assert len({id(plan) for plan in plans.values()}) == len(plans), "a plan has one name"
    unknown = sorted({*follows, *(name for before in follows.values() for name in before)} - plans.keys())
    if unknown:
        raise ValueError(f"follows names {', '.join(unknown)}; the plans are {', '.join(plans)}")
    alone: dict[str, Proof] = {}
    reach: dict[str, _Reach] = {}
    for name, plan in plans.items():
        alone[name], order = examine(plan)
        if alone[name].ok:
            reach[name] = _reach(order)
    sound = {name: plans[name] for name in reach}
    uses = {id(plan): uses_of(plan) for plan in sound.values()}
    among = {two: tuple(one for one in follows.get(two, ()) if one in sound) for two in sound}
    found = [*shared_epochs(sound, uses, among), *shared_states(sound, among), *unwritten_states(plans)]
    shared = {
        name
        for one, two in combinations(sound, 2)
        if uses[id(sound[one])].keys() & uses[id(sound[two])].keys()
        for name in (one, two)
    }
    sealed = {name for name in sound if reach[name].closed and name not in shared}
    allowed = [(one, two) for two in sound for one in among[two]]
    words = [word for word in _words(list(sound), among, reach) if word[0] not in sealed]
    for word in words:
        found += _succession(word, sound, uses)
    shown = tuple(run for _, run in found if run is not None)
    return SetProof(
        alone, tuple(what for what, _ in found), shown, sum(one in sealed for one, _ in allowed), len(words)
    )
