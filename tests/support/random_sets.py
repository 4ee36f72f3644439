"""Random sets of plans that follow one another, and what all pairs of accesses say of every short run of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hypothesis import strategies as st

from stepgraph.planner.plan import ALIGNMENT, Plan, Protocol
from stepgraph.planner.plan_set import share_memory
from stepgraph.planner.verify.proof import prove

from support.all_pairs import has_race, loses_a_flag
from support.hand_made import Draft, Moving
from support.random_schedules import SMALL, compiled, schedules

Follows = Mapping[str, tuple[str, ...]]
NAMES = "abcd"


def placed(plan: Plan, offsets: Mapping[int, int]) -> Plan:
    """The plan with some of its targets elsewhere in the arena."""
    targets = tuple(replace(found, offset=offsets.get(n, found.offset)) for n, found in enumerate(plan.targets))
    return replace(plan, targets=targets, arena_bytes=max((t.offset + t.nbytes for t in targets), default=0))


@st.composite
def _one(draw: st.DrawFn, rows: tuple[int, ...], first_slot: int) -> Plan:
    """No to three rounds of exchanges among all ranks, or a pair; each brings something, or nothing."""
    everybody = tuple(range(len(rows)))
    draft = Draft(
        rows, groups=(everybody, draw(st.sampled_from([everybody[:2], everybody[-2:]]))), first_slot=first_slot
    )
    fills = [
        draft.target(f"target {number}", draw(st.sampled_from([0, 0, 1]))) for number in range(draw(st.integers(1, 3)))
    ]
    streams = draw(st.sampled_from([(0, 0), (0, 1)]))
    protocol = draw(st.sampled_from([Protocol.MEMOP, Protocol.MEMOP, Protocol.KERNEL if first_slot else Protocol.COPY]))
    make = draft.op("call", "make")
    rounds: list[Moving | int] = []
    for number in range(draw(st.integers(0, 3))):
        way = None if draw(st.integers(0, 7)) == 0 else protocol
        if draw(st.integers(0, 2)) > (number == 0):
            rounds.append(draft.move(f"round {number}", fills[number % len(fills)], way))
        else:
            rounds.append(draft.exchange(f"round {number}", draw(st.sampled_from([0, 0, 1])), protocol))
    if rounds and draw(st.integers(0, 2)) == 0:
        rounds.append(draft.exchange("last", draw(st.sampled_from([0, 0, 1])), protocol))
    draft.slots = list(draw(st.permutations(draft.slots)))
    uses = {found: draft.op("call", f"use {found.op}") for found in rounds if isinstance(found, Moving)}
    late = draw(st.booleans())
    for rank in draft.ranks:
        source = rank.make(0, make)
        reads = []
        for found in rounds:
            exchange = found.exchange if isinstance(found, Moving) else found
            if rank.rank not in draft.members(exchange):
                continue
            rank.after(streams[1], 0)
            if isinstance(found, Moving) and draft.exchanges[exchange].protocol is None:
                rank.collective(streams[1], found, source)
            else:
                if isinstance(found, Moving):
                    rank.send(streams[1], found, source)
                rank.handshake(streams[1], exchange)
            rank.after(0, streams[1])
            reads += [(uses[found], rank.whole(found.target))] if isinstance(found, Moving) else []
            while reads and not late:
                use, view = reads.pop()
                rank.make(0, use, [view])
        for use, view in reads:
            rank.make(0, use, [view])
    plan = draft.plan()
    swapped = draw(st.permutations(range(len(fills))))
    return placed(plan, {number: plan.targets[to].offset for number, to in enumerate(swapped)})


@st.composite
def sets_by_hand(draw: st.DrawFn) -> tuple[dict[str, Plan], Follows]:
    """Two to four plans, those that are proven alone; some share flag words."""
    rows = draw(st.sampled_from([(1, 1), (1, 1, 1), (1, 0, 2)]))
    found = [draw(_one(rows, draw(st.sampled_from([0, 100 * n])))) for n in range(draw(st.integers(2, 4)))]
    return _allowed(_sound(found), draw(_follows(len(found))))


@st.composite
def sets_of_schedules(draw: st.DrawFn) -> tuple[dict[str, Plan], Follows]:
    """Two or three plans that the planner has made of different schedules, moved in the arena; some so that no plan has
    its targets where another one has."""
    axes = draw(st.sampled_from(SMALL))
    drawn = [compiled(draw(schedules((axes,)))) for _ in range(draw(st.integers(2, 3)))]
    plans = [plan for plan in drawn if plan is not None]
    apart = draw(st.sampled_from([0, 1 << 20]))
    found = []
    for plan in share_memory(plans) if plans and draw(st.integers(0, 3)) else plans:
        shift = apart * len(found) + ALIGNMENT * draw(st.integers(0, 3))
        found.append(placed(plan, {n: shift + target.offset for n, target in enumerate(plan.targets)}))
    return _allowed(_sound(found), draw(_follows(len(found))))


def _sound(plans: list[Plan]) -> dict[str, Plan]:
    return {name: plan for name, plan in zip(NAMES, plans, strict=False) if prove(plan).ok}


def _allowed(plans: dict[str, Plan], follows: Follows) -> tuple[dict[str, Plan], Follows]:
    """Without what is said of plans that are not sound."""
    return plans, {name: tuple(one for one in follows.get(name, ()) if one in plans) for name in plans}


@st.composite
def _follows(draw: st.DrawFn, count: int) -> Follows:
    names = NAMES[:count]
    if draw(st.integers(0, 3)) == 0:
        return dict.fromkeys(names, tuple(names))
    return {name: tuple(other for other in names if draw(st.booleans())) for name in names}


def runs(names: list[str], follows: Follows, length: int) -> Iterator[tuple[str, ...]]:
    """Every run of that many plans that is allowed, and every plan twice."""
    yield from ((name, name) for name in names)
    found = [(name,) for name in names]
    for _ in range(length - 1):
        found = [(*run, name) for run in found for name in names if run[-1] in follows.get(name, ())]
        yield from found


def goes_wrong(plans: Mapping[str, Plan], follows: Follows, length: int) -> tuple[str, ...] | None:
    """The first run of up to so many plans in which accesses are unordered, or a flag may be lost."""
    for run in runs(list(plans), follows, length):
        word = [plans[name] for name in run]
        if has_race(word) or loses_a_flag(word):
            return run
    return None
