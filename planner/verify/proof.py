"""The proof: a plan is free of races and deadlocks over all ranks and replays, or what is wrong with it.

Knows nothing of how the plan was made. Two replays are unrolled: every edge that crosses replays reaches from one to
the next.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import ExchangeKind, Plan, Protocol
from stepgraph.planner.verify import exchanges
from stepgraph.planner.verify.counterexample import Counterexample, Unordered, counterexample
from stepgraph.planner.verify.coverage import coverage
from stepgraph.planner.verify.drops import drops
from stepgraph.planner.verify.findings import first_of_each, name, place
from stepgraph.planner.verify.local import local_order
from stepgraph.planner.verify.order import Order, order_of
from stepgraph.planner.verify.races import races
from stepgraph.planner.verify.symmetry import reduction_of
from stepgraph.planner.verify.words import words

REPLAYS = 2

_ALWAYS = (
    "a rank's replay starts when its last one is done, and nothing else touches its arena, flags or buffers",
    "instructions of a stream run in order, and an event covers all that was issued before its record",
)
_BY_PROTOCOL = {
    Protocol.MEMOP: (
        "a stream memory write is seen after the copies before it on its stream, also by a peer (CUDA documents a "
        "fence before it, and does not name copies by copy engines)",
        "a stream memory wait makes what was written before the awaited value visible to its stream",
    ),
    Protocol.COPY: ("copies of one stream to one peer land in order",),
    Protocol.KERNEL: ("a kernel's system-scope release and acquire order the copies before it on its stream",),
}
_COLLECTIVES = "collectives of a communicator run in the order of issue, and none finishes before all members start"


@dataclass(frozen=True, slots=True)
class Proof:
    findings: tuple[Diagnostic, ...]
    counterexamples: tuple[Counterexample, ...]
    """To the findings where an order is missing; none where flags do not match (E404), which any run shows."""
    assumptions: tuple[str, ...]
    """Of the hardware and the caller; the proof holds where they do."""
    ranks: tuple[int, ...]
    """Whose memory and flags were looked at, against all ranks. The others are like one of them."""
    replays: int
    nodes: int
    accesses: int

    @property
    def ok(self) -> bool:
        return not self.findings


def assumptions(plan: Plan) -> tuple[str, ...]:
    """What the proof takes for granted, given what the plan uses."""
    protocols = [exchange.protocol for exchange in plan.exchanges if exchange.protocol is not None]
    found = [*_ALWAYS]
    for protocol in dict.fromkeys(protocols):
        found += _BY_PROTOCOL[protocol]
    if any(exchange.kind is ExchangeKind.COLLECTIVE for exchange in plan.exchanges):
        found.append(_COLLECTIVES)
    return tuple(found)


@contextmanager
def collector_paused() -> Iterator[None]:
    """A proof makes many small objects and no cycles: looking for cycles among them takes a third of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@collector_paused()
def prove(plan: Plan) -> Proof:
    """Check every rule of the plan. Findings are errors; a plan without any is proven, under the assumptions."""
    return examine(plan)[0]


def examine(plan: Plan) -> tuple[Proof, Order]:
    """The proof, and the order that it has found."""
    order, reduction = order_of([plan] * REPLAYS), reduction_of(plan)
    parts, local = exchanges.parts_in(plan), [local_order(program, len(plan.streams)) for program in plan.ranks]
    ranks = sorted(reduction.ranks)
    found: list[Diagnostic | Unordered] = [
        *exchanges.events(plan, ranks),
        *exchanges.spans(plan, parts),
        *exchanges.covered(plan, parts, local),
        *coverage(plan),
        *drops(plan, ranks),
    ]
    if order.stuck:
        heads = "; ".join(name(plan, step) for step in order.stuck)
        found.append(
            Diagnostic(
                "E401",
                "the step does not finish",
                place(plan, order.stuck[0]),
                "every instruction can run in some order",
                f"these wait for ever: {heads}",
                "what they wait for is missing, or comes after them",
            )
        )
        return _proof(order, ranks, found, 0), order
    found += [
        *exchanges.joins(plan, ranks, local),
        *words(order, ranks),
        *exchanges.exchange_order(order, ranks, parts, local),
    ]
    raced, compared = races(order, reduction)
    return _proof(order, ranks, [*found, *raced], compared), order


def _proof(order: Order, ranks: Sequence[int], found: list[Diagnostic | Unordered], compared: int) -> Proof:
    kept = first_of_each(found)
    # A word that is not written, awaited and reset in turn holds up other orders than those of the plan.
    missing = [one for one in kept if isinstance(one, Unordered)] if all(one.code != "E404" for one in kept) else []
    return Proof(
        findings=tuple(one.diagnostic if isinstance(one, Unordered) else one for one in kept),
        counterexamples=tuple(counterexample(order, one) for one in missing),
        assumptions=assumptions(order.plans[0]),
        ranks=tuple(ranks),
        replays=REPLAYS,
        nodes=len(order.sequence),
        accesses=compared,
    )
