"""Events and exchanges: each is used as the protocol says, and nothing can wait for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import combinations, pairwise

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import (
    Collective,
    ExchangeKind,
    Plan,
    Record,
    Reset,
    Signal,
    Wait,
    WaitEvent,
)
from stepgraph.planner.verify.counterexample import Unordered
from stepgraph.planner.verify.findings import name, place
from stepgraph.planner.verify.order import Order, Step


def events(plan: Plan, ranks: Iterable[int]) -> Iterator[Diagnostic]:
    """Every event is recorded once, and waited for after that; every stream enters the capture that way."""
    for rank in ranks:
        program = plan.ranks[rank]
        recorded: dict[int, int] = {}
        entered = {0}
        told: set[int] = set()
        for number, item in enumerate(program.instructions):
            step = Step(rank, 0, number)
            if isinstance(item, WaitEvent) and item.event not in recorded:
                yield Diagnostic(
                    "E407",
                    f"event {item.event} is waited for before it is recorded",
                    place(plan, step),
                    "a record before the wait, in the order of issue",
                    name(plan, step),
                )
            if isinstance(item, WaitEvent) and recorded.get(item.event) in entered:
                entered.add(item.stream)
            elif item.stream not in entered and item.stream not in told:
                told.add(item.stream)
                yield Diagnostic(
                    "E408",
                    f"stream {plan.streams[item.stream]} of rank {rank} works before it has entered the capture",
                    place(plan, step),
                    "first a wait for an event of a stream that is in it",
                    name(plan, step),
                    "let it wait for an event of the origin first",
                )
            if isinstance(item, Record):
                if item.event in recorded:
                    yield Diagnostic(
                        "E407",
                        f"event {item.event} is recorded twice",
                        place(plan, step),
                        "one record",
                        name(plan, step),
                        "take a fresh event for each edge",
                    )
                recorded[item.event] = item.stream


def joins(order: Order, ranks: Iterable[int]) -> Iterator[Diagnostic]:
    """Everything is done before the origin's last instruction, where a capture ends."""
    plan = order.plans[0]
    for rank in ranks:
        program = plan.ranks[rank]
        last = {item.stream: number for number, item in enumerate(program.instructions)}
        if not last:
            continue
        end = Step(rank, 0, last[0]) if 0 in last else None
        for stream, number in last.items():
            step = Step(rank, 0, number)
            if end is None or not order.before(step, end):
                yield Diagnostic(
                    "E409",
                    f"stream {plan.streams[stream]} of rank {rank} is not joined at the end",
                    place(plan, step),
                    f"{name(plan, step)} before the end of {plan.streams[0]}",
                    "no order",
                    "let the origin wait for an event that is recorded after it",
                )


def spans(plan: Plan) -> Iterator[Diagnostic]:
    """Every member of a group takes part in its exchanges once, towards every other member."""
    parts: dict[int, dict[int, list[Signal | Wait | Reset | Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, program in enumerate(plan.ranks):
        for item in program.instructions:
            if isinstance(item, Signal | Wait | Reset | Collective):
                parts[item.exchange][rank].append(item)
    for number, exchange in enumerate(plan.exchanges):
        group = plan.groups[exchange.group]
        for rank in sorted({*group, *parts[number]}):
            items = parts[number][rank]
            others = sorted(member for member in group if member != rank)
            if exchange.kind is ExchangeKind.COLLECTIVE:
                fine = rank in group and [type(item) for item in items] == [Collective]
                want = "one collective"
            else:
                signals = sorted(flag.peer for item in items if isinstance(item, Signal) for flag in item.flags)
                waits = sorted(flag.peer for item in items if isinstance(item, Wait) for flag in item.flags)
                alien = any(isinstance(item, Collective) for item in items)
                fine = rank in group and signals == waits == others and not alien
                want = f"signals to and waits for ranks {', '.join(map(str, others))}"
            if not fine:
                yield Diagnostic(
                    "E406",
                    f"rank {rank} does not take its part in {exchange.name}",
                    None,
                    want,
                    ", ".join(item.do for item in items) or "nothing",
                    "every member of the group takes part, with or without a share",
                )


def exchange_order(order: Order, ranks: Collection[int]) -> Iterator[Diagnostic | Unordered]:
    """All exchanges of a rank are ordered one after another, and alike on all ranks: then they stay free of deadlock
    when hardware queues run a rank's streams one after another."""
    plan = order.plans[0]
    sequences: list[list[int]] = []
    for rank, program in enumerate(plan.ranks):
        parts: dict[int, list[int]] = {}
        for number, item in enumerate(program.instructions):
            if isinstance(item, Signal | Wait | Reset | Collective):
                parts.setdefault(item.exchange, []).append(number)
        sequence = list(parts)
        sequences.append(sequence)
        for one, two in pairwise(sequence) if rank in ranks else ():
            pairs = ((Step(rank, 0, first), Step(rank, 0, second)) for first in parts[one] for second in parts[two])
            apart = next((pair for pair in pairs if not order.before(*pair)), None)
            if apart is not None:
                first, second = apart
                found = Diagnostic(
                    "E402",
                    f"two exchanges of rank {rank} are not ordered",
                    place(plan, second),
                    f"{name(plan, first)} before {name(plan, second)}",
                    "no order",
                    "put them on one stream, or let the second wait for the first",
                )
                yield Unordered(found, first, second)
    for rank, other in combinations(range(len(sequences)), 2):
        if rank in ranks or other in ranks:
            common = set(sequences[rank]) & set(sequences[other])
            mine, theirs = ([e for e in sequences[r] if e in common] for r in (rank, other))
            if mine != theirs:
                at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
                yield Diagnostic(
                    "E403",
                    f"ranks {rank} and {other} have exchanges in different orders",
                    None,
                    f"{plan.exchanges[mine[at]].name} next on both",
                    f"{plan.exchanges[theirs[at]].name} on rank {other}",
                    "issue exchanges in one order on all ranks",
                )
