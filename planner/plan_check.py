"""Whether a plan's references lead somewhere: indices, regions, sizes. A plan may come from anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod

from stepgraph.planner.plan import (
    ALIGNMENT,
    Buffer,
    Collective,
    Drop,
    ExchangeKind,
    Instruction,
    Load,
    Plan,
    RankProgram,
    Record,
    Region,
    Reset,
    Run,
    Send,
    Signal,
    Store,
    Wait,
    WaitEvent,
)

MAX_SIZE = 1 << 50
"""No size, offset or count of a plan is larger."""


class _Broken(Exception):
    """The first thing that is wrong."""


def _need(holds: bool, problem: str) -> None:
    if not holds:
        raise _Broken(problem)


def _index(value: int, length: int, what: str) -> None:
    if not 0 <= value < length:
        raise _Broken(f"{what} {value} of {length}")


def _inside(region: Region, rows: int, cols: int, what: str) -> None:
    fits = (
        region.row >= 0
        and region.rows >= 0
        and region.col >= 0
        and region.cols >= 0
        and region.row + region.rows <= rows
        and region.col + region.cols <= cols
    )
    if not fits:
        raise _Broken(f"{what} lies outside of its buffer")


def _within(inner: Region, outer: Region, what: str) -> None:
    fits = (
        inner.row >= outer.row
        and inner.col >= outer.col
        and inner.row + inner.rows <= outer.row + outer.rows
        and inner.col + inner.cols <= outer.col + outer.cols
    )
    if not fits:
        raise _Broken(f"{what} lies outside of its view")


def _tables(plan: Plan) -> None:
    world = len(plan.ranks)
    _need(0 < world <= 4096, f"{world} ranks")
    _need(
        all(axis.size > 0 for axis in plan.mesh) and prod(a.size for a in plan.mesh) == world, "ranks and mesh differ"
    )
    _need(bool(plan.streams), "no stream")
    _need(0 <= plan.arena_bytes <= MAX_SIZE and 0 <= plan.flag_slots <= MAX_SIZE, "a size")
    for group in plan.groups:
        _need(len(group) == len(set(group)) > 0, "a group names a rank twice, or none")
        for rank in group:
            _index(rank, world, "rank")
    for exchange in plan.exchanges:
        _index(exchange.group, len(plan.groups), "group")
        _index(exchange.op, len(plan.ops), "op")
        fits = (exchange.kind is ExchangeKind.HANDSHAKE) == (exchange.protocol is not None)
        _need(fits, f"the protocol of {exchange.name}")
    for op in plan.ops:
        for operand in op.inputs:
            for maker in operand.made_by:
                _index(maker, len(plan.ops), "op")
    for target in plan.targets:
        aligned = target.offset >= 0 and target.offset % ALIGNMENT == 0
        _need(aligned and target.nbytes >= 0, f"the offset of target {target.name}")
        _need(target.offset + target.nbytes <= plan.arena_bytes, f"target {target.name} lies outside of the arena")
    for entry in plan.inputs:
        _need(all(size >= 0 for size in (*entry.shape, *entry.box)), f"input {entry.name}")
        _need(prod(entry.shape) <= MAX_SIZE, f"the size of input {entry.name}")
        _need(prod(entry.shape) == prod(entry.box), f"the box of input {entry.name}")


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(MAX_SIZE))


def _chunk(text: str) -> bool:
    number, slash, count = text.partition("/")
    return bool(slash) and _number(number) and _number(count) and int(number) < int(count)


def _head_counts(text: str) -> bool:
    return all(_number(count) for chunk in text.split() for count in chunk.split(","))


_OPTIONS: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "at": (_number, "a number"),
    "ffn": (_number, "a number"),
    "chunk": (_chunk, "as 0/2"),
    "heads": (_head_counts, "as 2,1 1,1"),
}
"""Those that are numbers, which everything behind this file takes for granted."""


def _ops(plan: Plan) -> None:
    for op in plan.ops:
        names = [name for name, _ in op.options]
        _need(len(names) == len(set(names)), f"{op.name} has an option twice")
        for name, value in op.options:
            if name in _OPTIONS:
                right, what = _OPTIONS[name]
                _need(right(value), f"the option {name} of {op.name} is '{value[:40]}', not {what}")


def _states(plan: Plan) -> None:
    """Every state is a buffer of its own on every rank: a target, or one right behind the targets."""
    local = [state.buffer for state in plan.states if state.buffer >= len(plan.targets)]
    _need(len(plan.state_buffers) == len(plan.states), "two states in one buffer")
    _need(len({state.name for state in plan.states}) == len(plan.states), "two states of one name")
    _need(sorted(local) == list(range(len(plan.targets), len(plan.targets) + len(local))), "the buffer of a state")
    for state in plan.states:
        _need(state.buffer >= 0, "the buffer of a state")
        _need(all(state.buffer < len(program.buffers) for program in plan.ranks), f"a rank lacks state {state.name}")


def _memory(plan: Plan, program: RankProgram) -> None:
    _need(len(program.buffers) >= len(plan.targets), "a rank lacks a target")
    for number, buffer in enumerate(program.buffers):
        sizes = (buffer.batch, buffer.rows, buffer.cols)
        _need(min(sizes) >= 0 and max(sizes) <= MAX_SIZE and buffer.nbytes <= MAX_SIZE, f"the size of {buffer.name}")
        _index(buffer.stream, len(plan.streams), "stream")
        if number < len(plan.targets):
            _need(buffer.nbytes <= plan.targets[number].nbytes, f"{buffer.name} is larger than its target")
    for view in program.views:
        _index(view.buffer, len(program.buffers), "buffer")
        buffer = program.buffers[view.buffer]
        _inside(view.region, buffer.rows, buffer.cols, f"a view of {buffer.name}")
        _need(min(view.shape, default=1) >= 0, f"the shape of a view of {buffer.name}")
        elements = buffer.batch * view.region.rows * view.region.cols
        _need(prod(view.shape) == elements, f"the shape of a view of {buffer.name}")


class _Instructions:
    """Checks the instructions of one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.program = plan.ranks[rank]
        self.states = plan.state_buffers

    def view(self, view: int) -> Buffer:
        _index(view, len(self.program.views), "view")
        return self.program.buffers[self.program.views[view].buffer]

    def send(self, item: Send) -> None:
        plan = self.plan
        _index(item.op, len(plan.ops), "op")
        _index(item.exchange, len(plan.exchanges), "exchange")
        source = self.view(item.source)
        _within(item.source_region, self.program.views[item.source].region, "what is sent")
        _index(item.peer, len(plan.ranks), "rank")
        _index(item.target, len(plan.targets), "target")
        target = plan.ranks[item.peer].buffers[item.target]
        _inside(item.region, target.rows, target.cols, f"what is sent into {target.name}")
        _alike(source, item.source_region, target, item.region)

    def parts(self, item: Collective) -> None:
        _index(item.op, len(self.plan.ops), "op")
        _index(item.exchange, len(self.plan.exchanges), "exchange")
        exchange = self.plan.exchanges[item.exchange]
        group = self.plan.groups[exchange.group]
        _need(item.op == exchange.op, f"a collective of {exchange.name} belongs to another op")
        _need(item.reduce == (self.plan.ops[item.op].kind == "all_reduce"), f"whether {exchange.name} adds up")
        if item.reduce:
            for parts in (item.outgoing, item.incoming):
                _need(sorted(part.peer for part in parts) == sorted(group), f"the parts of the sum {exchange.name}")
                _need(len({(part.view, part.region) for part in parts}) == 1, f"the tensor of the sum {exchange.name}")
        for part in (*item.outgoing, *item.incoming):
            self.view(part.view)
            _within(part.region, self.program.views[part.view].region, "a part of a collective")
            _need(part.peer in group, f"rank {part.peer} is not in the group of a collective")
        into = {self.program.views[part.view].buffer for part in item.incoming}
        _need(not into & self.states, "a collective ends in a state")

    def check(self, item: Instruction) -> None:
        plan, program = self.plan, self.program
        _index(item.stream, len(plan.streams), "stream")
        match item:
            case Run():
                _index(item.op, len(plan.ops), "op")
                for number in (*item.inputs, *item.outputs):
                    self.view(number)
                _need(bool(item.outputs), "a stage without outputs")
                operands = len(plan.ops[item.op].inputs)
                _need(operands in (0, len(item.inputs)), f"a stage reads {len(item.inputs)} of {operands} operands")
                made = [number for number in program.made_by(item) if number not in self.states]
                _need(min(made, default=len(plan.targets)) >= len(plan.targets), "a stage makes a target")
                for number in item.outputs:
                    view = program.views[number]
                    if number not in item.inputs and view.buffer in self.states:
                        box = program.buffers[view.buffer]
                        whole = view.region == Region(0, box.rows, 0, box.cols)
                        _need(whole, f"a stage makes a part of state {box.name}")
            case Send():
                self.send(item)
            case Signal() | Wait() | Reset():
                _index(item.exchange, len(plan.exchanges), "exchange")
                for flag in item.flags:
                    _index(flag.slot, plan.flag_slots, "flag slot")
                    _index(flag.peer, len(plan.ranks), "rank")
            case Collective():
                self.parts(item)
            case Record() | WaitEvent():
                _need(item.event >= 0, "an event below 0")
            case Drop():
                _index(item.buffer, len(program.buffers), "buffer")
                _need(item.buffer >= len(plan.targets), "a target is dropped")
                _need(item.buffer not in self.states, "a state is dropped")
            case Load():
                _index(item.op, len(plan.ops), "op")
                _index(item.input, len(plan.inputs), "input")
                buffer, view = self.view(item.view), program.views[item.view]
                batch, rows, cols = plan.inputs[item.input].box
                _need(item.batch >= 0 and item.batch + buffer.batch <= batch, "the batches of an input")
                _inside(item.region, rows, cols, "the share of an input")
                _need(view.buffer >= len(plan.targets), "an input is loaded into a target")
                _need(view.buffer not in self.states, "an input is loaded into a state")
                _need(
                    view.region == Region(0, buffer.rows, 0, buffer.cols), "an input is loaded into a part of a buffer"
                )
                alike = (item.region.rows, item.region.cols) == (view.region.rows, view.region.cols)
                _need(alike, "an input and its view differ in shape")
            case Store():
                _index(item.op, len(plan.ops), "op")
                _index(item.output, len(plan.outputs), "output")
                self.view(item.view)
                same = program.views[item.view].shape == plan.outputs[item.output].shape
                _need(same, "an output and its view differ in shape")


def _ends(plan: Plan, rank: int) -> None:
    """Inputs come in to places of their own, and outputs go out once."""
    program = plan.ranks[rank]
    loaded = [program.views[item.view].buffer for item in program.instructions if isinstance(item, Load)]
    _need(len(loaded) == len(set(loaded)), f"rank {rank} loads two inputs into one buffer")
    stored = Counter(item.output for item in program.instructions if isinstance(item, Store))
    for number, output in enumerate(plan.outputs):
        _need(stored[number] == 1, f"rank {rank} hands out {output.name} {stored[number]} times, not once")


def _alike(source: Buffer, cut: Region, target: Buffer, laid: Region) -> None:
    shapes = (source.batch, cut.rows, cut.cols) == (target.batch, laid.rows, laid.cols)
    if not shapes or source.dtype is not target.dtype:
        raise _Broken(f"what is sent from {source.name} to {target.name} differs in shape or dtype")


def _collectives(plan: Plan) -> None:
    """What one member gives another is what that one takes."""
    calls: dict[tuple[int, int], Collective] = {}
    for rank, program in enumerate(plan.ranks):
        calls.update({(rank, i.exchange): i for i in program.instructions if isinstance(i, Collective)})
    for (giver, number), call in calls.items():
        for taker in plan.groups[plan.exchanges[number].group]:
            other = calls.get((taker, number))
            if other is None:
                continue  # a member that stays away is for the verifier to tell
            given = [part for part in call.outgoing if part.peer == taker]
            taken = [part for part in other.incoming if part.peer == giver]
            _need(len(given) == len(taken), f"{plan.exchanges[number].name} gives other parts than it takes")
            for out, into in zip(given, taken, strict=True):
                source = plan.ranks[giver].buffers[plan.ranks[giver].views[out.view].buffer]
                target = plan.ranks[taker].buffers[plan.ranks[taker].views[into.view].buffer]
                _alike(source, out.region, target, into.region)


def check_plan(plan: Plan) -> str | None:
    """One sentence on the first reference that leads nowhere; None for a plan that is whole."""
    try:
        _tables(plan)
        _ops(plan)
        _states(plan)
        for rank, program in enumerate(plan.ranks):
            _memory(plan, program)
            checker = _Instructions(plan, rank)
            for item in program.instructions:
                checker.check(item)
            _ends(plan, rank)
        _collectives(plan)
    except _Broken as broken:
        return str(broken)
    return None
