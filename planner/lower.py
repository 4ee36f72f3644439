"""Last pass: from the memory plan to the plan, every rank's buffers, views and instructions written out."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from stepgraph.planner.memory import MemoryPlan
from stepgraph.planner.opgraph import BRANCHES, IN_PLACE, Action, Node
from stepgraph.planner.plan import (
    Axis,
    Buffer,
    Collective,
    Drop,
    Exchange,
    ExchangeKind,
    Flag,
    Input,
    Instruction,
    Load,
    Op,
    Operand,
    Output,
    Part,
    Plan,
    Protocol,
    RankProgram,
    Record,
    Region,
    Reset,
    Run,
    Send,
    Signal,
    Source,
    State,
    Store,
    Target,
    View,
    Wait,
    WaitEvent,
)
from stepgraph.planner.values import (
    Placement,
    Value,
    buffer_box,
    features,
    local_shape,
    region_of,
    row_dim,
    view_shape,
)


def _part(node: Node) -> tuple[tuple[str, str], ...]:
    """The options that tell which of several nodes of one op in one layer a node is."""
    branch = (("branch", node.branch),) if node.branch else ()
    return (*branch, ("chunk", f"{node.chunk[0]}/{node.chunk[1]}")) if node.chunk else branch


class _Tables:
    """What all ranks share: ops, exchanges, groups, events."""

    def __init__(self, memory: MemoryPlan) -> None:
        self.memory = memory
        self.graph = memory.streams.graph
        self.groups: list[tuple[int, ...]] = []
        self.exchange_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self.exchanges: list[Exchange] = []
        self.closed_by = {send: index for index, node in enumerate(self.graph.nodes) for send in node.closes}
        edges = [(source, index) for index, sources in enumerate(memory.streams.waits) for source in sources]
        end = len(self.graph.nodes)
        edges += [(source, end) for source in memory.streams.joins]
        self.events = {edge: number for number, edge in enumerate(edges)}
        self.recorded: dict[int, list[int]] = {}
        for (source, _), number in self.events.items():
            self.recorded.setdefault(source, []).append(number)
        for index, node in enumerate(self.graph.nodes):
            if node.action.is_exchange:
                self._exchange(index, node)

    def _exchange(self, index: int, node: Node) -> None:
        shares = self.memory.shares
        for group in dict.fromkeys(shares.group(rank, node.axis) for rank in range(shares.world_size)):
            if group not in self.groups:
                self.groups.append(group)
            handshake = node.action is Action.HANDSHAKE
            self.exchange_of[index, group] = len(self.exchanges)
            name = node.name if node.layer is None else f"{node.name}[{node.layer}]"
            name = f"{name} {node.part}" if node.part else name
            self.exchanges.append(
                Exchange(
                    ExchangeKind.HANDSHAKE if handshake else ExchangeKind.COLLECTIVE,
                    self.groups.index(group),
                    name,
                    index,
                    Protocol(node.protocol) if handshake and node.protocol else None,
                )
            )

    def state_buffers(self) -> tuple[State, ...]:
        """Sent into, a state is one of the targets; the others lie behind those."""
        found, local = [], len(self.memory.targets)
        for memory in self.graph.states:
            number = self.memory.target_of.get(memory)
            found.append(State(self.graph.memories[memory].state, local if number is None else number))
            local += number is None
        return tuple(found)

    def ops(self) -> tuple[Op, ...]:
        values, tree = self.graph.values, self.graph.schedule.tree
        made: dict[int, list[int]] = {}
        """By value: the nodes so far that write it."""
        filled: dict[int, list[int]] = {}
        """By memory, likewise."""
        found = []
        for index, node in enumerate(self.graph.nodes):
            # A value that no node writes is another view of what some have written to its memory.
            makers = [made.get(value) or filled.get(values[value].memory, []) for _, value in node.inputs]
            operands = [
                Operand(role, values[value].name, tuple(of))
                for (role, value), of in zip(node.inputs, makers, strict=True)
            ]
            if node.action is not Action.HANDSHAKE:
                for value in node.outputs:
                    made.setdefault(value, []).append(index)
                    filled.setdefault(values[value].memory, []).append(index)
            names = tuple(values[value].name for value in node.outputs)
            line = tree.place(node.path).line
            options = (*node.options, *_part(node))
            found.append(Op(node.kind, node.name, node.layer, line, tuple(operands), names, options))
        return tuple(found)


class _Rank:
    """One rank's program in the making."""

    def __init__(self, tables: _Tables, rank: int) -> None:
        self.tables, self.rank = tables, rank
        self.memory, self.graph, self.shares = tables.memory, tables.graph, tables.memory.shares
        self.stream = tables.memory.streams.stream
        self.buffers: list[Buffer] = []
        self.buffer_of: dict[int, int] = dict(self.memory.target_of)
        self.views: list[View] = []
        self.view_ids: dict[View, int] = {}
        self.made_anew: dict[View, int] = {}
        """Views of states through which stages write what they make: apart from those through which they read."""
        for number, target in enumerate(self.memory.targets):
            memory = next(m for m, n in self.memory.target_of.items() if n == number)
            self._buffer(memory, target.name, 0)
        for memory in self.graph.states:
            if memory not in self.buffer_of:
                self.buffer_of[memory] = self._buffer(memory, self.graph.memories[memory].state, 0)

    def _buffer(self, memory: int, name: str, stream: int) -> int:
        found = self.graph.memories[memory]
        batch, rows, cols = buffer_box(found, self.shares, self.rank)
        self.buffers.append(Buffer(name, found.dtype, batch, rows, cols, stream))
        return len(self.buffers) - 1

    def view(self, value: int, stream: int) -> int:
        """The view of a value on this rank; the first one of a local memory makes its buffer."""
        found = self.graph.values[value]
        if found.memory not in self.buffer_of:
            memory = self.graph.memories[found.memory]
            self.buffer_of[found.memory] = self._buffer(found.memory, memory.name, stream)
        return self._intern(found, self.region(value), self.view_ids)

    def _whose(self, value: Value) -> int:
        """The rank whose rows of what is whole a value has: of those with another place than this rank's."""
        return self.rank if value.place is None else self.shares.group(self.rank, "ulysses")[value.place]

    def _intern(self, value: Value, region: Region, known: dict[View, int]) -> int:
        shape = view_shape(value, self.graph.memories[value.memory], self.shares, self._whose(value))
        view = View(self.buffer_of[value.memory], region, shape)
        if view not in known:
            known[view] = len(self.views)
            self.views.append(view)
        return known[view]

    def made(self, node: Node, value: int, stream: int) -> int:
        """The view through which a stage writes a result."""
        found = self.graph.values[value]
        if self.graph.memories[found.memory].state and node.kind not in IN_PLACE:
            return self._intern(found, self.region(value), self.made_anew)
        return self.view(value, stream)

    def region(self, value: int) -> Region:
        found = self.graph.values[value]
        return region_of(found, self.graph.memories[found.memory], self.shares, self._whose(found))

    def block(self, node: Node, source: int, target: int, sender: int, receiver: int) -> tuple[Region, Region]:
        """What ``sender`` gives ``receiver``: a region of the source's buffer on the one, and of the target's on the
        other. Cut by the receiver's heads in a send, by its rows in a gather; laid down by the sender's place."""
        values, memories, shares = self.graph.values, self.graph.memories, self.shares
        given, taken = values[source], values[target]
        whole = region_of(given, memories[given.memory], shares, sender)
        final = region_of(taken, memories[taken.memory], shares, receiver)
        there, here = shares.coordinate(receiver, node.axis), shares.coordinate(sender, node.axis)
        if node.kind == "send":
            heads = next(dim for dim in taken.form if dim.heads)
            per_head = prod(local_shape(features(given.form)[1:], Placement.REPLICATED, shares, sender))
            first, count = shares.head_range(heads.heads, there, heads.chunk)
            cut = Region(whole.row, whole.rows, whole.col + first * per_head, count * per_head)
            first_row = int(dict(node.options).get("at", 0)) + self._rows_before(given, here)
            return cut, Region(first_row, whole.rows, final.col, final.cols)
        if node.kind == "gather":
            first_row = self._rows_before(taken, there)
            heads = next(dim for dim in given.form if dim.heads)
            per_head = prod(local_shape(features(given.form)[1:], Placement.REPLICATED, shares, sender))
            first, _ = shares.head_range(heads.heads, here, heads.chunk)
            if any(dim.chunk for dim in taken.form):  # the chunk alone, place by place
                first = sum(shares.chunk_counts(heads.heads, heads.chunk)[:here])
            cut = Region(whole.row + first_row, final.rows, whole.col, whole.cols)
            return cut, Region(0, final.rows, first * per_head, whole.cols)
        if node.kind == "all_gather":
            return whole, Region(self._rows_before(given, here), whole.rows, final.col, final.cols)
        if node.kind == "all_reduce" and node.action is Action.COLLECTIVE:
            return whole, final
        return whole, Region(here * whole.rows, whole.rows, 0, whole.cols)  # stacked, a block a member

    def _rows_before(self, value: Value, place: int) -> int:
        """Rows of a sequence that the ranks before ``place`` hold."""
        row = row_dim(value.form)
        assert row is not None
        return sum(count for name in row.segments for _, count in self.shares.rows[name][:place])

    # Instructions

    def program(self) -> RankProgram:
        instructions: list[Instruction] = []
        plan = self.memory
        end = len(self.graph.nodes)
        for index, node in enumerate(self.graph.nodes):
            stream = self.stream[index]
            for source in plan.streams.waits[index]:
                instructions.append(WaitEvent(stream, self.tables.events[source, index]))
            instructions += [Drop(stream, self.buffer_of[m]) for m in plan.drop_before.get(index, ())]
            instructions += self.issue(index, node, stream)
            instructions += [Drop(stream, self.buffer_of[m]) for m in plan.drop_after.get(index, ())]
            instructions += [Record(stream, event) for event in self.tables.recorded.get(index, ())]
        instructions += [WaitEvent(0, self.tables.events[source, end]) for source in plan.streams.joins]
        # Behind the join only the origin knows that every reader is done; what other streams own ends with the replay.
        ending = [self.buffer_of[memory] for memory in plan.drop_at_end]
        instructions += [Drop(0, buffer) for buffer in ending if self.buffers[buffer].stream == 0]
        return RankProgram(tuple(self.buffers), tuple(self.views), tuple(instructions))

    def issue(self, index: int, node: Node, stream: int) -> Iterator[Instruction]:
        if node.action is Action.LOAD:
            yield self.load(index, node, stream)
        elif node.action is Action.STORE:
            output = self.graph.schedule.outputs.index(node.name)
            yield Store(stream, index, output, self.view(node.inputs[0][1], stream))
        elif node.action is Action.RUN:
            inputs = tuple(self.view(value, stream) for _, value in node.inputs)
            yield Run(stream, index, inputs, tuple(self.made(node, value, stream) for value in node.outputs))
        elif node.action is Action.SEND:
            yield from self.sends(index, node, stream)
        elif node.action is Action.HANDSHAKE:
            yield from self.handshake(index, node, stream)
        else:
            yield self.collective(index, node, stream)

    def load(self, index: int, node: Node, stream: int) -> Load:
        value = self.graph.values[node.outputs[0]]
        spec = dict(self.graph.schedule.inputs)[node.name]
        view = self.view(node.outputs[0], stream)
        region = self.region(node.outputs[0])
        first_row = 0
        if value.placement is Placement.SEQUENCE:
            first_row = self._rows_before(value, self.shares.coordinate(self.rank, "ulysses"))
        batch = 0
        if spec.placement == "cfg":
            branch = BRANCHES.index(node.branch) if node.branch else self.shares.coordinate(self.rank, "cfg")
            batch = branch * self.graph.memories[value.memory].batch
        number = [name for name, _ in self.graph.schedule.inputs].index(node.name)
        return Load(stream, index, number, batch, Region(first_row, region.rows, region.col, region.cols), view)

    def sends(self, index: int, node: Node, stream: int) -> Iterator[Send]:
        """A copy to every member, itself last, starting with the next one so that no rank is hit by all at once."""
        source, target = node.inputs[0][1], node.outputs[0]
        group = self.shares.group(self.rank, node.axis)
        me = group.index(self.rank)
        view = self.view(source, stream)
        exchange = self.tables.exchange_of[self.tables.closed_by[index], group]
        number = self.memory.target_of[self.graph.values[target].memory]
        for step in range(1, len(group) + 1):
            peer = group[(me + step) % len(group)]
            cut, laid = self.block(node, source, target, self.rank, peer)
            if laid.rows and laid.cols:
                yield Send(stream, index, exchange, view, cut, peer, number, laid)

    def handshake(self, index: int, node: Node, stream: int) -> Iterator[Instruction]:
        """Writes to every peer's word of mine, waits for mine of theirs, resets; nothing in a group of one."""
        group = self.shares.group(self.rank, node.axis)
        me, base = group.index(self.rank), self.memory.first_slot[index]
        if len(group) == 1:
            return
        exchange = self.tables.exchange_of[index, group]
        order = [(me + step) % len(group) for step in range(1, len(group))]
        own = tuple(Flag(group[member], base + member) for member in order)
        yield Signal(stream, exchange, tuple(Flag(group[member], base + me) for member in order))
        yield Wait(stream, exchange, own)
        if node.protocol != "kernel":
            yield Reset(stream, exchange, own)

    def collective(self, index: int, node: Node, stream: int) -> Collective:
        group = self.shares.group(self.rank, node.axis)
        outgoing: list[Part] = []
        incoming: list[Part] = []
        for (_, source), target in zip(node.inputs, node.outputs, strict=True):
            given, taken = self.view(source, stream), self.view(target, stream)
            for peer in group:
                cut, _ = self.block(node, source, target, self.rank, peer)
                _, laid = self.block(node, source, target, peer, self.rank)
                outgoing.append(Part(peer, given, cut))
                incoming.append(Part(peer, taken, laid))
        reduce = node.kind == "all_reduce"
        return Collective(
            stream,
            index,
            self.tables.exchange_of[index, group],
            reduce,
            tuple(outgoing),
            tuple(incoming),
        )


def lower(memory: MemoryPlan) -> Plan:
    """Write the plan out for every rank."""
    tables = _Tables(memory)
    schedule, shares = tables.graph.schedule, memory.shares
    ranks = tuple(_Rank(tables, rank).program() for rank in range(shares.world_size))
    inputs: dict[str, Input] = {}
    for node in tables.graph.nodes:
        if node.action is Action.LOAD:
            value = tables.graph.values[node.outputs[0]]
            found, spec = tables.graph.memories[value.memory], dict(schedule.inputs)[node.name]
            shape = local_shape(value.form, Placement.REPLICATED, shares, 0)
            rows = 1 if found.rows is None else found.rows.size
            batch = found.batch
            if spec.placement == "cfg":
                if schedule.cfg == "batch":
                    shape = (2, batch // 2, *shape[1:])
                else:
                    shape, batch = (2, *shape), batch * 2
            box = (batch, rows, prod(local_shape(found.pieces[0], Placement.REPLICATED, shares, 0)))
            inputs[node.name] = Input(node.name, shape, found.dtype, box)
    outputs = []
    for node in tables.graph.nodes:
        if node.action is Action.STORE:
            value = tables.graph.values[node.inputs[0][1]]
            shape = local_shape(value.form, Placement.REPLICATED, shares, 0)
            outputs.append(Output(node.name, shape, tables.graph.memories[value.memory].dtype))
    return Plan(
        name=schedule.name,
        source=Source(
            schedule.tree.file, schedule.tree.text, schedule.tree.overrides, schedule.variant, schedule.bucket
        ),
        dtype=schedule.model.dtype,
        mesh=tuple(Axis(name, size) for name, size in schedule.mesh),
        transport=schedule.transport,
        groups=tuple(tables.groups),
        streams=schedule.streams,
        inputs=tuple(inputs.values()),
        outputs=tuple(outputs),
        ops=tables.ops(),
        exchanges=tuple(tables.exchanges),
        targets=tuple(Target(t.name, t.offset, t.nbytes) for t in memory.targets),
        states=tables.state_buffers(),
        arena_bytes=memory.arena_bytes,
        arena_lower_bound=memory.lower_bound,
        flag_slots=memory.flag_slots,
        dependencies=memory.streams.dependencies,
        ranks=ranks,
    )
