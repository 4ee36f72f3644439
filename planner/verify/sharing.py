"""What plans of a set may not share in any order of theirs: words that count epochs, and places of states."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Plan, Wait
from stepgraph.planner.verify.counterexample import SetCounterexample, Unordered, counterexample
from stepgraph.planner.verify.findings import name as name_of
from stepgraph.planner.verify.findings import name_in, place
from stepgraph.planner.verify.order import Order, Step, order_of
from stepgraph.planner.verify.races import accesses, races
from stepgraph.planner.verify.words import Uses, Word, is_epoch

Follows = Mapping[str, tuple[str, ...]]
"""By plan: what it may directly follow."""
Told = tuple[Diagnostic, SetCounterexample | None]
"""A finding, and a run that shows it, where one is known."""


def shown_by(word: Sequence[str], order: Order, found: Unordered) -> SetCounterexample:
    """The run of a word in which what nothing orders comes the wrong way round."""
    first, second = (name_in(order, step) for step in (found.first, found.second))
    return SetCounterexample(tuple(word), found.code, first, second, counterexample(order, found).turns)


def _way(one: str, two: str, follows: Follows) -> tuple[str, ...] | None:
    """The shortest allowed run from a plan to another."""
    ways: list[tuple[str, ...]] = [(one,)]
    for way in ways:  # which grows
        if way[-1] == two:
            return way
        seen = {found[-1] for found in ways}
        ways += [(*way, name) for name, before in follows.items() if name not in seen and way[-1] in before]
    return None


def shared_epochs(plans: Mapping[str, Plan], uses: Mapping[int, Uses], follows: Follows) -> Iterator[Told]:
    """A word that counts epochs counts those of one handshake."""
    for (name, one), (other, two) in combinations(plans.items(), 2):
        shared = sorted(uses[id(one)].keys() & uses[id(two)].keys())
        counting = [w for w in shared if is_epoch(one, uses[id(one)][w]) or is_epoch(two, uses[id(two)][w])]
        if counting:
            owner, slot = counting[0]
            finding = Diagnostic(
                "E404",
                f"{name} and {other} both use flag {slot} of rank {owner}, which counts epochs",
                None,
                "words of its own for each handshake of a set",
                "one word",
                "give each plan of a set a range of flag slots",
            )
            ways = (_way(name, other, follows), _way(other, name, follows))
            found = (_unheard(way, plans, counting) for way in ways if way is not None)
            yield finding, next((run for run in found if run is not None), None)


def _unheard(word: tuple[str, ...], plans: Mapping[str, Plan], counting: Collection[Word]) -> SetCounterexample | None:
    """A run in which the last plan's waits are satisfied by what the first one has counted: they wait for nobody."""
    last = plans[word[-1]]
    ranks = []
    for rank, program in enumerate(last.ranks):
        items = tuple(
            replace(item, flags=tuple(flag for flag in item.flags if (rank, flag.slot) not in counting))
            if isinstance(item, Wait)
            else item
            for item in program.instructions
        )
        ranks.append(replace(program, instructions=items))
    order = order_of([*(plans[name] for name in word[:-1]), replace(last, ranks=tuple(ranks))], word)
    end = len(word) - 1
    found = (one for one in races(order)[0] if isinstance(one, Unordered) and one.first.replay == end)
    first = next(found, None)
    return None if first is None else shown_by(word, order, first)


def shared_states(plans: Mapping[str, Plan], follows: Follows) -> Iterator[Told]:
    """What a plan leaves in a state outlives every other plan: nothing else lies there."""
    for name, plan in plans.items():
        for state in (state for state in plan.states if state.buffer < len(plan.targets)):
            kept = plan.targets[state.buffer]
            for other, found in plans.items():
                own = {one.buffer: one.name for one in found.states}
                for number, target in enumerate(found.targets):
                    meet = kept.offset < target.offset + target.nbytes and target.offset < kept.offset + kept.nbytes
                    same = own.get(number) == state.name
                    if other != name and (meet != same or (same and kept.offset != target.offset)):
                        finding = Diagnostic(
                            "E306",
                            f"{other} writes where {name} has the state {state.name}, or has it elsewhere",
                            None,
                            f"{state.name} at bytes {kept.offset} to {kept.offset + kept.nbytes}, and nothing else",
                            f"{target.name} at bytes {target.offset} to {target.offset + target.nbytes}",
                            "give states of one name one place in the arena, and share it with nothing",
                        )
                        holders = [who for who, p in plans.items() if any(s.name == state.name for s in p.states)]
                        yield finding, _overwritten(other, holders, plans, follows)
                        return


def unwritten_states(plans: Mapping[str, Plan]) -> Iterator[Told]:
    """A state that some version reads is left by some version."""
    read: dict[str, tuple[str, Step]] = {}
    """By state: a version, and what reads it there."""
    written: set[str] = set()
    for version, plan in plans.items():
        states = {state.buffer: state.name for state in plan.states}
        for rank, program in enumerate(plan.ranks if states else ()):
            for number, item in enumerate(program.instructions):
                for (_, buffer, _), writes in accesses(plan, rank, item):
                    if buffer in states and writes:
                        written.add(states[buffer])
                    elif buffer in states:
                        read.setdefault(states[buffer], (version, Step(rank, 0, number)))
    for state in sorted(read.keys() - written):
        version, step = read[state]
        finding = Diagnostic(
            "E307",
            f"{version} reads the state {state}, and no version writes it",
            place(plans[version], step),
            f"a write of {state} in some version",
            f"{name_of(plans[version], step, version)}, and no write",
            "give a state one name in all versions, and let one of them leave it",
        )
        yield finding, None


def _overwritten(
    writer: str, holders: Iterable[str], plans: Mapping[str, Plan], follows: Follows
) -> SetCounterexample | None:
    """A run in which one of the holders of a state reads what the writer has put in its place."""
    for holder in holders:
        word = _way(writer, holder, follows) if holder != writer else None
        if word is None:
            continue
        order = order_of([plans[name] for name in word], word)
        for found in races(order)[0]:
            if isinstance(found, Unordered):
                return shown_by(word, order, found)
            if found.code == "E306":
                return SetCounterexample(word, found.code, found.expected, found.got, ())
    return None
