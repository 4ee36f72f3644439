"""Flags, events and exchanges: each is used as the protocol says, and nothing can wait for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import (
    Collective,
    ExchangeKind,
    Plan,
    Protocol,
    Record,
    Reset,
    Signal,
    Wait,
    WaitEvent,
)
from stepgraph.planner.verify.counterexample import Unordered
from stepgraph.planner.verify.findings import name, place
from stepgraph.planner.verify.order import Order, Step

Word = tuple[int, int]
"""(owner, slot)."""


def events(plan: Plan) -> Iterator[Diagnostic]:
    """Every event is recorded once, and waited for after that; every stream enters the capture that way."""
    for rank, program in enumerate(plan.ranks):
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


def joins(plan: Plan, order: Order) -> Iterator[Diagnostic]:
    """Everything is done before the origin's last instruction, where a capture ends."""
    for rank, program in enumerate(plan.ranks):
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


@dataclass(slots=True)
class _Use:
    """What one exchange does with a word."""

    writes: list[Step] = field(default_factory=list)
    waits: list[Step] = field(default_factory=list)
    resets: list[Step] = field(default_factory=list)
    peers: set[int] = field(default_factory=set)
    """Whom the owner waits for."""


def words(plan: Plan, order: Order) -> Iterator[Diagnostic | Unordered]:
    """Writes, waits and resets of every word match one to one, and no word is written before its reset is known. Two
    exchanges may use a word one after the other, if that holds between them too."""
    uses: dict[Word, dict[int, _Use]] = defaultdict(lambda: defaultdict(_Use))
    for rank, program in enumerate(plan.ranks):
        for number, item in enumerate(program.instructions):
            step = Step(rank, 0, number)
            if isinstance(item, Signal):
                for flag in item.flags:
                    uses[flag.peer, flag.slot][item.exchange].writes.append(step)
            elif isinstance(item, Wait):
                for flag in item.flags:
                    uses[rank, flag.slot][item.exchange].waits.append(step)
                    uses[rank, flag.slot][item.exchange].peers.add(flag.peer)
            elif isinstance(item, Reset):
                for flag in item.flags:
                    uses[rank, flag.slot][item.exchange].resets.append(step)
    for word, by_exchange in sorted(uses.items()):
        yield from _word(plan, order, word, by_exchange)


def _word(plan: Plan, order: Order, word: Word, by_exchange: Mapping[int, _Use]) -> Iterator[Diagnostic | Unordered]:
    title = f"flag {word[1]} of rank {word[0]}"
    kernel = any(plan.exchanges[exchange].protocol is Protocol.KERNEL for exchange in by_exchange)
    writers = {step.rank for use in by_exchange.values() for step in use.writes}
    for use in by_exchange.values():
        counts = (len(use.writes), len(use.waits), len(use.resets))
        whole = counts == ((1, 1, 0) if kernel else (1, 1, 1)) and use.peers == writers
        if not whole or (kernel and len(by_exchange) > 1):
            yield Diagnostic(
                "E404",
                f"{title} is not written, waited for and reset once",
                place(plan, [*use.writes, *use.resets, *use.waits][0]),
                "one write, one wait" + ("" if kernel else ", one reset") + " in an exchange, and one writer",
                "{} writes, {} waits, {} resets".format(*counts) + f", {len(by_exchange)} exchanges",
                "give every handshake of a step words of its own",
            )
            return
    if kernel:
        return
    in_turn = sorted(by_exchange.values(), key=lambda use: use.waits[0].number)
    for use, following in zip(in_turn, [*in_turn[1:], in_turn[0]], strict=True):
        wait, reset, again = use.waits[0], use.resets[0], following.writes[0]
        if following is in_turn[0]:
            again = Step(again.rank, 1, again.number)
        if not order.before(wait, reset):
            yield Diagnostic(
                "E404",
                f"{title} is reset before it has been waited for",
                place(plan, reset),
                name(plan, wait),
                name(plan, reset),
                "wait first, then reset",
            )
        if not order.before(reset, again):
            found = Diagnostic(
                "E405",
                f"{title} may be written again before it is reset",
                place(plan, again),
                f"another exchange of both ranks between {name(plan, reset)} and {name(plan, again)}",
                "none",
                "add a second exchange to the step, or close it with a handshake",
            )
            yield Unordered(found, reset, again)


def exchange_order(plan: Plan, order: Order) -> Iterator[Diagnostic | Unordered]:
    """All exchanges of a rank are ordered one after another, and alike on all ranks: then they stay free of deadlock
    when hardware queues run a rank's streams one after another."""
    sequences: list[list[int]] = []
    for rank, program in enumerate(plan.ranks):
        parts: dict[int, list[int]] = {}
        for number, item in enumerate(program.instructions):
            if isinstance(item, Signal | Wait | Reset | Collective):
                parts.setdefault(item.exchange, []).append(number)
        sequence = list(parts)
        sequences.append(sequence)
        for one, two in pairwise(sequence):
            first = Step(rank, 0, parts[two][0])
            for number in parts[one]:
                if not order.before(Step(rank, 0, number), first):
                    found = Diagnostic(
                        "E402",
                        f"two exchanges of rank {rank} are not ordered",
                        place(plan, first),
                        f"{name(plan, Step(rank, 0, number))} before {name(plan, first)}",
                        "no order",
                        "put them on one stream, or let the second wait for the first",
                    )
                    yield Unordered(found, Step(rank, 0, number), first)
                    break
    for rank, sequence in enumerate(sequences):
        for other in range(rank + 1, len(sequences)):
            common = set(sequence) & set(sequences[other])
            mine, theirs = ([e for e in s if e in common] for s in (sequence, sequences[other]))
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
