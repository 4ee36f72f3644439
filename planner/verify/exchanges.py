"""Events and exchanges: each is used as the protocol says, and nothing can wait for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import (
    Collective,
    ExchangeKind,
    Plan,
    Protocol,
    Record,
    Reset,
    Send,
    Signal,
    Wait,
    WaitEvent,
)
from stepgraph.planner.verify.counterexample import Unordered
from stepgraph.planner.verify.findings import name, place, place_of_op
from stepgraph.planner.verify.local import LocalOrder
from stepgraph.planner.verify.order import Order, Step

Locals = Sequence[LocalOrder]
"""By rank."""
Part = Signal | Wait | Reset | Collective
Parts = Sequence[Mapping[int, Sequence[tuple[int, Part]]]]
"""By rank and exchange, in the order of issue: the instructions that are part of it, with their numbers."""


def parts_in(plan: Plan) -> Parts:
    """The parts of all ranks in all exchanges."""
    found: list[dict[int, list[tuple[int, Part]]]] = []
    for program in plan.ranks:
        mine: dict[int, list[tuple[int, Part]]] = {}
        for number, item in enumerate(program.instructions):
            if isinstance(item, Part):
                mine.setdefault(item.exchange, []).append((number, item))
        found.append(mine)
    return found


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
                    "record the event first, on the stream that is waited for",
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


def joins(plan: Plan, ranks: Iterable[int], local: Locals) -> Iterator[Diagnostic]:
    """Everything is done before the origin's last instruction, where a capture ends, by events of the rank's own."""
    for rank in ranks:
        program = plan.ranks[rank]
        last = {item.stream: number for number, item in enumerate(program.instructions)}
        for stream, number in last.items():
            if 0 not in last or not local[rank].before(number, last[0]):
                step = Step(rank, 0, number)
                yield Diagnostic(
                    "E409",
                    f"stream {plan.streams[stream]} of rank {rank} is not joined at the end",
                    place(plan, step),
                    f"{name(plan, step)} before the end of {plan.streams[0]}",
                    "no order by events of this rank",
                    "let the origin wait for an event that is recorded after it",
                )


def covered(plan: Plan, parts: Parts, local: Locals) -> Iterator[Diagnostic]:
    """Every copy is closed by the exchange that it names: to a member of the group, done before its rank waits there
    and, but for a copy to itself, before it signals. Some transports take it along at that wait, and not before."""
    for rank, program in enumerate(plan.ranks):
        for number, item in enumerate(program.instructions):
            if not isinstance(item, Send):
                continue
            exchange = plan.exchanges[item.exchange]
            group = plan.groups[exchange.group]
            ends = Wait if item.peer == rank else Signal | Wait
            closing = (end for end, part in parts[rank].get(item.exchange, ()) if isinstance(part, ends))
            closes = all(local[rank].before(number, end) for end in closing)
            known = exchange.kind is ExchangeKind.HANDSHAKE and rank in group and item.peer in group
            if not known or not closes:
                step = Step(rank, 0, number)
                yield Diagnostic(
                    "E410",
                    f"{exchange.name} does not close a copy to rank {item.peer} that names it",
                    place(plan, step),
                    f"{name(plan, step)} before the {'wait' if item.peer == rank else 'signal and the wait'} of rank "
                    f"{rank}, in a handshake of both ranks",
                    "no such order" if known else f"a {exchange.kind.value} of ranks {', '.join(map(str, group))}",
                    "name the handshake that comes behind the copy",
                )


def spans(plan: Plan, parts: Parts) -> Iterator[Diagnostic]:
    """Every member of a group takes part in its exchanges once, towards every other member."""
    for number, exchange in enumerate(plan.exchanges):
        group = plan.groups[exchange.group]
        for rank in sorted({*group, *(rank for rank, mine in enumerate(parts) if number in mine)}):
            items = [item for _, item in parts[rank].get(number, ())]
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
                    place_of_op(plan, exchange.op),
                    want,
                    ", ".join(item.do for item in items) or "nothing",
                    "every member of the group takes part, with or without a share",
                )


def exchange_order(
    order: Order, ranks: Collection[int], parts: Parts, local: Locals
) -> Iterator[Diagnostic | Unordered]:
    """All exchanges of a rank are ordered one after another, by streams and events of its own, and alike on all ranks;
    and in none do ranks wait for each other before they signal: then they stay free of deadlock when hardware queues
    run a rank's streams one after another."""
    plan = order.plans[0]
    sequences = [list(mine) for mine in parts]
    for rank in sorted(ranks):
        for one, two in pairwise(sequences[rank]):
            pairs = ((first, second) for first, _ in parts[rank][one] for second, _ in parts[rank][two])
            apart = next((pair for pair in pairs if not local[rank].before(*pair)), None)
            if apart is not None:
                first, second = (Step(rank, 0, number) for number in apart)
                found = Diagnostic(
                    "E402",
                    f"two exchanges of rank {rank} are not ordered",
                    place(plan, second),
                    f"{name(plan, first)} before {name(plan, second)}",
                    "no order by streams and events of this rank",
                    "put them on one stream, or let the second wait for the first",
                )
                yield found if order.before(first, second) else Unordered(found, first, second)
    for rank, other in combinations(range(len(sequences)), 2):
        if rank in ranks or other in ranks:
            common = set(sequences[rank]) & set(sequences[other])
            mine, theirs = ([e for e in sequences[r] if e in common] for r in (rank, other))
            if mine != theirs:
                at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
                yield Diagnostic(
                    "E403",
                    f"ranks {rank} and {other} have exchanges in different orders",
                    place_of_op(plan, plan.exchanges[mine[at]].op),
                    f"{plan.exchanges[mine[at]].name} next on both",
                    f"{plan.exchanges[theirs[at]].name} on rank {other}",
                    "issue exchanges in one order on all ranks",
                )
    yield from _waits_before_signals(plan, parts, local)


def _waits_before_signals(plan: Plan, parts: Parts, local: Locals) -> Iterator[Diagnostic]:
    """A rank's wait needs its peers' signals. Ranks whose signal may come behind their own wait can wait for each other
    in a circle. A rank waits once, where some transports copy; and in a kernel handshake it signals once before, for
    the wait counts the epoch."""
    for exchange, found in enumerate(plan.exchanges):
        late: dict[int, set[int]] = defaultdict(set)
        """By rank: the peers whom it may signal only when it has waited."""
        needs: dict[int, set[int]] = {}
        """By rank: the peers whom it waits for."""
        for rank, mine in enumerate(parts):
            items = mine.get(exchange, ())
            signals = [(number, item) for number, item in items if isinstance(item, Signal)]
            waits = [(number, item) for number, item in items if isinstance(item, Wait)]
            for number, signal in signals:
                if not all(local[rank].before(number, wait) for wait, _ in waits):
                    late[rank].update(flag.peer for flag in signal.flags)
            needs[rank] = {flag.peer for _, wait in waits for flag in wait.flags}
            early = found.protocol is Protocol.KERNEL and (rank in late or len(signals) > 1)
            if rank in plan.groups[found.group] and (early or len(waits) > 1):
                yield Diagnostic(
                    "E404",
                    f"rank {rank} does not signal once and then wait once in {found.name}",
                    place_of_op(plan, found.op),
                    "one signal, and one wait behind it",
                    f"{len(signals)} signals, {len(waits)} waits"
                    + (", in another order, or none" if rank in late else ""),
                    "a kernel handshake counts its epoch, and some transports copy, where a rank waits",
                )
        circle = {rank: {peer for peer in needs[rank] if rank in late.get(peer, ())} for rank in late}
        try:
            TopologicalSorter(circle).prepare()
        except CycleError as error:
            members = ", ".join(map(str, sorted(set(error.args[1]))))
            yield Diagnostic(
                "E402",
                f"ranks {members} may wait for each other in {found.name} before they signal",
                place_of_op(plan, found.op),
                "a signal before the wait of its rank, by streams and events of the rank",
                "no such order",
                "signal first, or let the stream that waits wait for an event behind the signal",
            )
