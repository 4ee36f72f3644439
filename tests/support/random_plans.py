"""Random plans, and what three judges say of each: the verifier, runs on the cpu device, and the search of states."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypothesis import assume
from hypothesis import strategies as st

from stepgraph.planner.plan import (
    Flag,
    Instruction,
    Plan,
    Record,
    Region,
    Reset,
    Send,
    Signal,
    Wait,
    WaitEvent,
)
from stepgraph.planner.plan_check import check_plan
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.mutate import KINDS, meant_by, mutant_of, seen_by_running, with_program

from support.random_programs import programs
from support.random_schedules import ANY, SMALL, Axes, compiled, schedules
from support.states import search

Items = list[Instruction]


def _aim(plan: Plan, items: Items, chance: random.Random) -> Items | None:
    """A send goes to another rank, into another target, or to another place in it."""
    numbers = [number for number, item in enumerate(items) if isinstance(item, Send)]
    if not numbers:
        return None
    number = chance.choice(numbers)
    item = items[number]
    assert isinstance(item, Send)
    peer = chance.choice((item.peer, chance.randrange(plan.world_size)))
    target = chance.choice((item.target, chance.randrange(len(plan.targets))))
    box, size = plan.ranks[peer].buffers[target], item.region
    row, col = (chance.randint(0, max(0, room)) for room in (box.rows - size.rows, box.cols - size.cols))
    items[number] = replace(item, peer=peer, target=target, region=Region(row, size.rows, col, size.cols))
    return items


def _another_word(plan: Plan, items: Items, chance: random.Random) -> Items | None:
    """A signal, wait or reset takes another word for one of its own."""
    numbers = [number for number, item in enumerate(items) if isinstance(item, Signal | Wait | Reset) and item.flags]
    if not numbers:
        return None
    number = chance.choice(numbers)
    item = items[number]
    assert isinstance(item, Signal | Wait | Reset)
    at = chance.randrange(len(item.flags))
    flag = Flag(item.flags[at].peer, chance.randrange(plan.flag_slots))
    items[number] = replace(item, flags=(*item.flags[:at], flag, *item.flags[at + 1 :]))
    return items


def _another_event(plan: Plan, items: Items, chance: random.Random) -> Items | None:
    """One more order between two streams, which may be a circle."""
    event = 1 + max((item.event for item in items if isinstance(item, Record | WaitEvent)), default=0)
    for made in (Record, WaitEvent) if chance.random() < 0.8 else (WaitEvent, Record):
        items.insert(chance.randint(0, len(items)), made(chance.randrange(len(plan.streams)), event))
    return items


def _once_more(plan: Plan, items: Items, chance: random.Random) -> Items | None:
    """An instruction is there twice, at another place."""
    del plan
    if not items:
        return None
    items.insert(chance.randint(0, len(items)), chance.choice(items))
    return items


EDITS: dict[str, Callable[[Plan, Items, random.Random], Items | None]] = {
    "aim a send elsewhere": _aim,
    "take another word": _another_word,
    "add an event": _another_event,
    "do an instruction twice": _once_more,
}

GENTLE = ("add an event", "move an event's record", "move an event's wait", "swap two instructions", "move a reset")
"""Kinds that leave many plans safe."""


def edit(plan: Plan, kind: str, chance: random.Random) -> Plan | None:
    """The plan with one change; None where there is nothing to change."""
    if kind in KINDS:
        found = mutant_of(plan, kind, chance)
        return None if found is None else found.plan
    rank = chance.randrange(plan.world_size)
    items = EDITS[kind](plan, list(plan.ranks[rank].instructions), chance)
    changed = None if items is None else with_program(plan, rank, items)
    return changed if changed is not None and check_plan(changed) is None else None


@dataclass(frozen=True, slots=True)
class Drawn:
    plan: Plan
    base: Plan | None
    """Of which it is a changed form; None where its ops do not say what they mean to read."""


@st.composite
def edited(draw: st.DrawFn, plans: st.SearchStrategy[Drawn], least: int, most: int) -> Drawn:
    """A plan with some changes, one upon the other."""
    drawn = draw(plans)
    plan = drawn.plan
    for _ in range(draw(st.integers(least, most))):
        kind = draw(st.sampled_from(GENTLE) if draw(st.integers(0, 4)) else st.sampled_from([*KINDS, *EDITS]))
        changed = edit(plan, kind, draw(st.randoms(use_true_random=False)))
        plan = plan if changed is None else changed
    return replace(drawn, plan=plan)


@st.composite
def from_schedules(draw: st.DrawFn, axes_of: Sequence[Axes] = ANY, stateful: bool = False) -> Drawn:
    """Plans that the planner has made."""
    plan = compiled(draw(schedules(axes_of, stateful)))
    assume(plan is not None)
    assert plan is not None
    return Drawn(plan, plan)


BY_HAND = programs().map(lambda plan: Drawn(plan, None))
FAMILIES: dict[str, st.SearchStrategy[Drawn]] = {
    "compiled": from_schedules(),
    # In a group of one nothing waits, and runs do not see that its copy to itself is missing or another's.
    "compiled, edited": edited(from_schedules(SMALL), 2, 4),
    "with state": from_schedules(stateful=True),
    "with state, edited": edited(from_schedules(SMALL, stateful=True), 2, 4),
    "hand-made": BY_HAND,
    "hand-made, edited": edited(BY_HAND, 1, 4),
}


@dataclass(frozen=True, slots=True)
class Opinions:
    """What the judges say of a plan."""

    codes: frozenset[str]
    """Of the verifier; none where it has proven the plan."""
    seen: str | None
    """What a run on the cpu device has shown; None where none did."""
    wrong: frozenset[str]
    """What the search has found to go wrong in some order."""
    searched: bool
    """Whether the search went through all states."""

    @property
    def unsafe(self) -> bool:
        return self.seen is not None or bool(self.wrong)

    @property
    def safe(self) -> bool:
        """Shown in every order, not in some."""
        return not self.unsafe and self.searched


def on_one_queue(plan: Plan, chance: random.Random) -> Plan:
    """The plan as hardware with one queue may run it: a rank's streams one behind another, in some order that keeps
    each stream and puts an event's record before its wait."""
    for rank, program in enumerate(plan.ranks):
        streams: list[list[Instruction]] = [[] for _ in plan.streams]
        for item in program.instructions:
            streams[item.stream].append(item)
        queue: list[Instruction] = []
        recorded: set[int] = set()
        while ready := [s for s in streams if s and (not isinstance(s[0], WaitEvent) or s[0].event in recorded)]:
            item = chance.choice(ready).pop(0)
            recorded |= {item.event} if isinstance(item, Record) else set()
            queue.append(replace(item, stream=0))
        plan = with_program(plan, rank, queue)
    return plan


def opinions(plan: Plan, seeds: int, states: int, replays: int = 2, base: Plan | None = None) -> Opinions:
    """Ask all three."""
    codes = frozenset(finding.code for finding in prove(plan).findings)
    meant = None if base is None else meant_by(base)
    seen = next((found for seed in range(seeds) if (found := seen_by_running(plan, seed, meant))), None)
    outcome = search(plan, replays, states)
    return Opinions(codes, seen, frozenset(outcome.wrong), outcome.exhausted or bool(outcome.wrong))
