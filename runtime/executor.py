"""The loop that interprets a plan: one rank's instructions, in the order of issue, on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stepgraph.kernels.stages import Stage
from stepgraph.planner.plan import (
    Collective,
    Drop,
    Instruction,
    Load,
    Plan,
    Record,
    Reset,
    Run,
    Send,
    Signal,
    Store,
    Wait,
    WaitEvent,
)
from stepgraph.runtime.device import Device


def issued_together(items: Sequence[Instruction]) -> list[range]:
    """The program in pieces that are issued at once: a signal, wait and reset of one exchange that follow each other,
    else a single instruction."""
    found: list[range] = []
    for number, item in enumerate(items):
        before = items[number - 1] if number else None
        parts = (Signal, Wait, Reset)
        if isinstance(item, parts) and isinstance(before, parts):
            goes_on = before.exchange == item.exchange and before.stream == item.stream
            if goes_on and not isinstance(item, Signal):
                found[-1] = range(found[-1].start, number + 1)
                continue
        found.append(range(number, number + 1))
    return found


def issue(
    plan: Plan,
    rank: int,
    device: Device,
    stages: Mapping[int, Stage],
    after: Callable[[int], None] | None = None,
) -> None:
    """Issue one replay of ``rank``; ``after`` is told the number of each instruction that has been issued."""
    for number, instruction in enumerate(plan.ranks[rank].instructions):
        match instruction:
            case Run():
                device.run(number, instruction, stages[number])
            case Send():
                device.send(number, instruction)
            case Signal():
                device.signal(number, instruction)
            case Wait():
                device.wait(number, instruction)
            case Reset():
                device.reset(number, instruction)
            case Collective():
                device.collective(number, instruction)
            case Record():
                device.record(number, instruction)
            case WaitEvent():
                device.wait_event(number, instruction)
            case Drop():
                device.drop(number, instruction)
            case Load():
                device.load(number, instruction)
            case Store():
                device.store(number, instruction)
        if after is not None:
            after(number)
    device.finish()
