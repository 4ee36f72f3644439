"""The estimate: predicted time of every instruction of one rank, exposed communication, and the critical path.

A first model, for comparing schedules, not for quoting milliseconds: all ranks are taken to keep pace, so a handshake
waits for nobody, and an instruction takes the larger of its arithmetic and its bytes at the rates of ``Hardware``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from stepgraph.planner.plan import Collective, Plan, Record, Run, Send, Signal, View, Wait, WaitEvent


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one GPU and its links. The defaults were measured on an H200 (matrix product, copy, handshake), or
    read in published figures (link)."""

    flops: float = 700e12
    """FLOP/s of matrix products and attention in bfloat16."""
    memory: float = 4.3e12
    """Bytes/s of device memory, read plus written."""
    link: float = 393e9
    """Bytes/s that one rank sends to its peers together."""
    exchange: float = 36e-6
    """Seconds that a collective takes besides its bytes."""
    handshake: float = 5.6e-6
    """Seconds of a batched handshake."""
    launch: float = 2e-6
    """Seconds that the shortest stage takes."""


@dataclass(frozen=True, slots=True)
class Span:
    """When one instruction runs, in seconds from the start of the step."""

    instruction: int
    stream: int
    start: float
    end: float
    after: int | None
    """The span, by its number, that it had to wait for; None at the start."""


@dataclass(frozen=True, slots=True)
class Timeline:
    spans: tuple[Span, ...]
    critical: tuple[int, ...]
    """Numbers of the spans on the critical path, in order."""
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    """Of sends, handshakes and collectives, hidden or not."""

    @property
    def exposed_seconds(self) -> float:
        """Communication that nothing hides: what the step takes longer than its compute."""
        return max(0.0, self.step_seconds - self.compute_seconds)


def _stage_seconds(plan: Plan, rank: int, instruction: Run, hardware: Hardware) -> float:
    op = plan.ops[instruction.op]
    program = plan.ranks[rank]
    inputs = [program.views[view] for view in instruction.inputs]
    outputs = [program.views[view] for view in instruction.outputs]

    def nbytes(views: list[View]) -> int:
        return sum(prod(view.shape) * program.buffers[view.buffer].dtype.itemsize for view in views)

    made = [program.views[number] for number in instruction.outputs if number not in instruction.inputs]
    copied = [view for view in made if view.buffer in plan.state_buffers]
    moved, flops = nbytes(inputs) + nbytes(outputs) + 2 * nbytes(copied), 0.0
    roles = [operand.role for operand in op.inputs]
    if op.kind == "linear":
        rows = program.buffers[inputs[0].buffer].batch * inputs[0].region.rows
        flops = 2.0 * rows * sum(view.region.cols for view in inputs) * sum(view.region.cols for view in outputs)
    elif op.kind == "mlp":
        flops = 4.0 * prod(inputs[0].shape) * int(dict(op.options)["ffn"])
    elif op.kind == "attention":
        queries = sum(prod(v.shape) for v, role in zip(inputs, roles, strict=True) if role == "q")
        keys = sum(v.region.rows for v, role in zip(inputs, roles, strict=True) if role == "k")
        flops = 4.0 * queries * keys
    return max(hardware.launch, flops / hardware.flops, moved / hardware.memory)


def estimate(plan: Plan, rank: int = 0, hardware: Hardware | None = None) -> Timeline:
    """The predicted timeline of one rank's replay."""
    hardware = hardware or Hardware()
    program = plan.ranks[rank]
    free: list[float] = [0.0] * len(plan.streams)
    last: list[int | None] = [None] * len(plan.streams)
    events: dict[int, tuple[float, int | None]] = {}
    spans: list[Span] = []
    compute = communication = 0.0
    for number, instruction in enumerate(program.instructions):
        stream = instruction.stream
        if isinstance(instruction, Record):
            events[instruction.event] = free[stream], last[stream]
            continue
        if isinstance(instruction, WaitEvent):
            at, span = events[instruction.event]
            if at > free[stream]:
                free[stream], last[stream] = at, span
            continue
        seconds = 0.0
        if isinstance(instruction, Run):
            seconds = _stage_seconds(plan, rank, instruction, hardware)
            compute += seconds
        elif isinstance(instruction, Send):
            view = program.views[instruction.source]
            region, buffer = instruction.region, program.buffers[view.buffer]
            rate = hardware.link if instruction.peer != rank else hardware.memory / 2
            seconds = buffer.batch * region.rows * region.cols * buffer.dtype.itemsize / rate
        elif isinstance(instruction, Collective):
            sent = [part for part in instruction.outgoing if part.peer != rank]
            sizes = [program.buffers[program.views[part.view].buffer] for part in sent]
            total = sum(
                b.batch * p.region.rows * p.region.cols * b.dtype.itemsize for p, b in zip(sent, sizes, strict=True)
            )
            seconds = hardware.exchange + total / hardware.link
        elif isinstance(instruction, Signal | Wait):
            seconds = hardware.handshake / 2
        if not isinstance(instruction, Run):
            communication += seconds
        if seconds:
            spans.append(Span(number, stream, free[stream], free[stream] + seconds, last[stream]))
            free[stream] += seconds
            last[stream] = len(spans) - 1
    critical: list[int] = []
    at_end: int | None = max(range(len(spans)), key=lambda index: spans[index].end, default=None)
    while at_end is not None:
        critical.append(at_end)
        at_end = spans[at_end].after
    return Timeline(tuple(spans), tuple(reversed(critical)), max(free), compute, communication)
