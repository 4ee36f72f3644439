"""Local tensors are given back as an allocator takes them: once, and on the stream on which they were made."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Collective, Drop, Instruction, Load, Plan, RankProgram, Run
from stepgraph.planner.verify.findings import name, place
from stepgraph.planner.verify.order import Step


def _makes(program: RankProgram, item: Instruction) -> tuple[int, ...]:
    """The buffers that come into being with an instruction."""
    match item:
        case Run():
            return program.made_by(item)
        case Load():
            return (program.views[item.view].buffer,)
        case Collective():
            return tuple(program.views[part.view].buffer for part in item.incoming)
    return ()


def drops(plan: Plan) -> Iterator[Diagnostic]:
    """E304 for a tensor that is dropped twice, or is not there, or is dropped on another stream than its own: its bytes
    go to the next allocation on the stream on which they were allocated, whatever the drop waited for."""
    for rank, program in enumerate(plan.ranks):
        owner: dict[int, int] = {}
        """The stream of each buffer that is there, in the order of issue."""
        for number, item in enumerate(program.instructions):
            if not isinstance(item, Drop):
                owner |= dict.fromkeys(_makes(program, item), item.stream)
                continue
            stream = owner.pop(item.buffer, None)
            if stream != item.stream:
                step, title = Step(rank, 0, number), program.buffers[item.buffer].name
                there = "not there" if stream is None else f"made on stream {plan.streams[stream]}"
                yield Diagnostic(
                    "E304",
                    f"{title} of rank {rank} is dropped where it can't be",
                    place(plan, step),
                    "one drop behind what makes it, on the same stream",
                    f"{name(plan, step)}, and the tensor is {there}",
                    "drop it once, on the stream on which it was made",
                )
