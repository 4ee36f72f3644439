"""Local tensors are given back as an allocator takes them: once, and on the stream on which they were made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Collective, Drop, Instruction, Load, Plan, RankProgram, Run, Send, Store
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


def _reads(item: Instruction) -> tuple[int, ...]:
    """The views of its own rank that an instruction reads. What it only writes, it makes."""
    match item:
        case Run():
            return item.inputs
        case Send():
            return (item.source,)
        case Store():
            return (item.view,)
        case Collective():
            return tuple(part.view for part in item.outgoing)
    return ()


def drops(plan: Plan, ranks: Iterable[int]) -> Iterator[Diagnostic]:
    """E304 for a tensor that is used after its drop, in the order of issue; for one that is made while it is there; and
    for a drop of what is not there, or on another stream than its own: the bytes go to the next allocation on the
    stream on which they were allocated, whatever the drop has waited for. A tensor without elements may be gone too
    early like any other."""
    states, targets = plan.state_buffers, set(range(len(plan.targets)))
    for rank in ranks:
        program = plan.ranks[rank]
        owner: dict[int, int] = {}
        """The stream of each buffer that is there."""
        gone: set[int] = set()
        for number, item in enumerate(program.instructions):
            step = Step(rank, 0, number)
            if not isinstance(item, Drop):
                made = _makes(program, item)
                used = {program.views[view].buffer for view in _reads(item)}
                for buffer in sorted(used & gone):
                    yield Diagnostic(
                        "E304",
                        f"{program.buffers[buffer].name} of rank {rank} is used after its drop",
                        place(plan, step),
                        f"{name(plan, step)} before the drop",
                        "after it, in the order of issue",
                        "drop it after its last use",
                    )
                if isinstance(item, Run | Load | Collective):
                    for buffer in sorted((set(made) & owner.keys()) - states - targets):
                        yield Diagnostic(
                            "E304",
                            f"{program.buffers[buffer].name} of rank {rank} is made twice",
                            place(plan, step),
                            "a drop before it is made again",
                            f"{name(plan, step)}, and the first one is still there",
                            "make every tensor once",
                        )
                gone -= set(made)
                owner |= dict.fromkeys(made, item.stream)
                continue
            stream = owner.pop(item.buffer, None)
            gone.add(item.buffer)
            if stream != item.stream:
                there = "is not there" if stream is None else f"was made on stream {plan.streams[stream]}"
                yield Diagnostic(
                    "E304",
                    f"{program.buffers[item.buffer].name} of rank {rank} is dropped where it can't be",
                    place(plan, step),
                    "one drop behind what makes it, on the same stream",
                    f"{name(plan, step)}; the tensor {there}",
                    "drop it once, on the stream on which it was made",
                )
