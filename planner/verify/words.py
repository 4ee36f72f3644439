"""Flag words: written, awaited and reset once in an exchange, and not written again before the reset is known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Plan, Protocol, Reset, Signal, Wait
from stepgraph.planner.verify.counterexample import Unordered
from stepgraph.planner.verify.findings import name, name_in, place
from stepgraph.planner.verify.order import Order, Step

Word = tuple[int, int]
"""(owner, slot)."""


@dataclass(slots=True)
class Use:
    """What one exchange of a plan does with a word, in a replay."""

    writes: list[Step] = field(default_factory=list)
    waits: list[Step] = field(default_factory=list)
    resets: list[Step] = field(default_factory=list)
    peers: set[int] = field(default_factory=set)
    """Whom the owner waits for."""


Uses = Mapping[Word, Mapping[int, Use]]
"""By word and exchange."""


def uses_of(plan: Plan) -> Uses:
    """Who does what with every word."""
    uses: dict[Word, dict[int, Use]] = defaultdict(lambda: defaultdict(Use))
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
    return uses


def is_epoch(plan: Plan, use: Mapping[int, Use]) -> bool:
    """Whether a word counts epochs."""
    return any(plan.exchanges[exchange].protocol is Protocol.KERNEL for exchange in use)


def words(order: Order, ranks: Collection[int]) -> Iterator[Diagnostic | Unordered]:
    """Of a plan over two replays, for the words of some ranks: writes, waits and resets match one to one, and no word
    is written before its reset is known. Two exchanges may use a word in turn, if that holds between them too."""
    plan = order.plans[0]
    for word, by_exchange in sorted(item for item in uses_of(plan).items() if item[0][0] in ranks):
        wrong = _mismatch(plan, word, by_exchange)
        if wrong is not None:
            yield wrong
        elif not is_epoch(plan, by_exchange):
            in_turn = sorted(by_exchange.values(), key=lambda use: use.waits[0].number)
            for use in in_turn:
                yield from _early_reset(order, word, use)
            for use, following in pairwise(in_turn):
                yield from _again(order, word, (0, use), (0, following))
            yield from _again(order, word, (0, in_turn[-1]), (1, in_turn[0]))


def words_of_many(order: Order, uses: Mapping[int, Uses]) -> Iterator[Diagnostic | Unordered]:
    """Of plans that follow one another, each of them proven alone: the words that more than one of them uses. ``uses``
    goes by the ``id`` of a plan."""
    by_word: dict[Word, list[tuple[int, Mapping[int, Use]]]] = defaultdict(list)
    for replay, plan in enumerate(order.plans):
        for word, by_exchange in uses[id(plan)].items():
            by_word[word].append((replay, by_exchange))
    for word, found in sorted(by_word.items()):
        for (replay, one), (later, two) in pairwise(found):
            if not is_epoch(order.plans[replay], one) and not is_epoch(order.plans[later], two):
                last = max(one.values(), key=lambda use: use.waits[0].number)
                first = min(two.values(), key=lambda use: use.waits[0].number)
                yield from _again(order, word, (replay, last), (later, first))


def _title(word: Word) -> str:
    return f"flag {word[1]} of rank {word[0]}"


def _mismatch(plan: Plan, word: Word, by_exchange: Mapping[int, Use]) -> Diagnostic | None:
    kernel = is_epoch(plan, by_exchange)
    writers = {step.rank for use in by_exchange.values() for step in use.writes}
    for use in by_exchange.values():
        counts = (len(use.writes), len(use.waits), len(use.resets))
        whole = counts == ((1, 1, 0) if kernel else (1, 1, 1)) and use.peers == writers
        if not whole or (kernel and len(by_exchange) > 1):
            return Diagnostic(
                "E404",
                f"{_title(word)} is not written, waited for and reset once",
                place(plan, [*use.writes, *use.resets, *use.waits][0]),
                "one write, one wait" + ("" if kernel else ", one reset") + " in an exchange, and one writer",
                "{} writes, {} waits, {} resets".format(*counts) + f", {len(by_exchange)} exchanges",
                "give every handshake of a step words of its own",
            )
    return None


def _early_reset(order: Order, word: Word, use: Use) -> Iterator[Diagnostic]:
    wait, reset, plan = use.waits[0], use.resets[0], order.plans[0]
    if not order.before(wait, reset):
        yield Diagnostic(
            "E404",
            f"{_title(word)} is reset before it has been waited for",
            place(plan, reset),
            name(plan, wait),
            name(plan, reset),
            "wait first, then reset",
        )


def _again(order: Order, word: Word, one: tuple[int, Use], two: tuple[int, Use]) -> Iterator[Unordered]:
    """A word's use in a replay, and its next one in the same or a later replay."""
    (replay, use), (later, following) = one, two
    reset, again = use.resets[0], following.writes[0]
    reset, again = Step(reset.rank, replay, reset.number), Step(again.rank, later, again.number)
    if not order.before(reset, again):
        found = Diagnostic(
            "E405",
            f"{_title(word)} may be written again before it is reset",
            place(order.plans[later], again),
            f"another exchange of both ranks between {name_in(order, reset)} and {name_in(order, again)}",
            "none",
            "add a second exchange to the step, or close it with a handshake",
        )
        yield Unordered(found, reset, again)
