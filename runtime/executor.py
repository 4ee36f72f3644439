"""The loop that interprets a plan: one rank's instructions, in the order of issue, on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stepgraph.kernels.stages import Stage, StageMaker
from stepgraph.planner.plan import (
    Collective,
    Drop,
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


def make_stages(plan: Plan, rank: int, maker: StageMaker) -> dict[int, Stage]:
    """The stage of every ``Run`` of a rank, by its number in the program. Weights are made here, not when it runs."""
    items = enumerate(plan.ranks[rank].instructions)
    return {number: maker(plan, rank, item) for number, item in items if isinstance(item, Run)}


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
