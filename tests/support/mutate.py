"""Plans with one thing wrong, and whether the cpu device notices in a number of interleavings."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import Plan, Record, Reset, Send, Signal, Wait, WaitEvent
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.mutate import with_program
from stepgraph.runtime.session import Session

Mutant = tuple[str, Plan]


def without_event(plan: Plan, rank: int) -> Iterator[Mutant]:
    items = plan.ranks[rank].instructions
    for event in [item.event for item in items if isinstance(item, Record)]:
        kept = [i for i in items if not (isinstance(i, Record | WaitEvent) and i.event == event)]
        yield f"rank {rank} without event {event}", with_program(plan, rank, kept)


def _without_flags(plan: Plan, rank: int, kind: type[Wait] | type[Reset]) -> Iterator[Mutant]:
    items = list(plan.ranks[rank].instructions)
    for number, item in enumerate(items):
        if not isinstance(item, kind):
            continue
        yield f"rank {rank} without {item.do} {number}", with_program(plan, rank, items[:number] + items[number + 1 :])
        for flag in item.flags:
            fewer = replace(item, flags=tuple(other for other in item.flags if other != flag))
            changed = [*items[:number], fewer, *items[number + 1 :]]
            yield f"rank {rank}, {item.do} {number} without {flag}", with_program(plan, rank, changed)


def without_wait(plan: Plan, rank: int) -> Iterator[Mutant]:
    yield from _without_flags(plan, rank, Wait)


def without_reset(plan: Plan, rank: int) -> Iterator[Mutant]:
    yield from _without_flags(plan, rank, Reset)


def send_behind_barrier(plan: Plan, rank: int) -> Iterator[Mutant]:
    """Each send to another rank swapped with the handshake that closes it."""
    items = list(plan.ranks[rank].instructions)
    for number, item in enumerate(items):
        if not isinstance(item, Send) or item.peer == rank:
            continue
        signal = next(
            (n for n, i in enumerate(items) if n > number and isinstance(i, Signal) and i.exchange == item.exchange),
            None,
        )
        if signal is not None:
            moved = [*items[:number], *items[number + 1 : signal + 1], item, *items[signal + 1 :]]
            yield f"rank {rank}, send {number} behind its signal", with_program(plan, rank, moved)


PLANTED: dict[str, Callable[[Plan, int], Iterator[Mutant]]] = {
    "event": without_event,
    "wait": without_wait,
    "reset": without_reset,
    "swap": send_behind_barrier,
}


def fault_of(plan: Plan, seed: int, replays: int = 3) -> str | None:
    """What the cpu device notices in one interleaving of some replays with fresh inputs; None when all is well."""
    inputs = [random_inputs(plan, seed * 1000 + number) for number in range(replays)]

    def loop(rank: int) -> Generator[dict[str, Tensor], tuple[Tensor, ...], None]:
        for step in inputs:  # a list has no `send`, so no `yield from`
            _ = yield step

    with torch.no_grad(), Session(plan, device="cpu", seed=seed) as session:
        try:
            session.drive(loop)
        except StepgraphError as error:
            return str(error)
        report = session.report
        if report.ok:
            return None
        return "; ".join(map(str, [*report.races[:1], *report.faults[:1]])) or "data moved wrongly"
