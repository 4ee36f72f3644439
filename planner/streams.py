"""Level 3, the stream plan: every node on a stream, and the fewest events that keep what must be ordered.

Ordered are: dataflow; a change in place after all readers of what was there; all exchanges, one after another, in the
order of issue; the first node of a stream after the start of the step; the end of the step after the last node of
every stream. The order of issue is the author's and every dependency points forwards in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from stepgraph.planner.opgraph import Action, Node, OpGraph
from stepgraph.planner.state_order import states_open_at_the_wrap
from stepgraph.planner.values import Space


@dataclass(frozen=True, slots=True)
class StreamPlan:
    graph: OpGraph
    """With the closing handshakes that the step needs."""
    stream: tuple[int, ...]
    """The stream of each node, an index into the schedule's streams; 0 is the origin."""
    waits: tuple[tuple[int, ...], ...]
    """For each node, the nodes of other streams for whose events it waits."""
    joins: tuple[int, ...]
    """The nodes for whose events the origin waits at the end."""
    dependencies: int
    """Orderings between streams before reduction."""
    clocks: tuple[tuple[int, ...], ...]
    """For each node and stream, how many nodes of the stream are done when the node is."""
    lifetimes: dict[int, Lifetime]
    """Of every memory that is a target."""

    @property
    def events(self) -> int:
        return sum(len(sources) for sources in self.waits) + len(self.joins)

    def position(self, node: int) -> int:
        """The node's number on its stream, from 1."""
        return self.clocks[node][self.stream[node]]

    def before(self, first: int, second: int) -> bool:
        """Whether ``first`` is done before ``second`` is issued to its stream, or is it."""
        return self.clocks[second][self.stream[first]] >= self.position(first)


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a target is in use, told in exchanges of its axis, which all ranks pass in one order.

    Every access comes after exchange ``after`` and before exchange ``until``; -1 is the last one of the previous
    replay, and ``until`` may be the first one of the next, which has the number ``count``."""

    after: int
    until: int
    count: int

    @property
    def fits(self) -> bool:
        """Whether the target is free again when the next replay first writes it."""
        return self.until - self.after <= self.count

    @property
    def cells(self) -> int:
        """The times in use, as a set of bits: bit i is the time between exchange i and the next, bit count - 1 the
        wrap from one replay to the next."""
        bits = 0
        for cell in range(self.after, self.until):
            bits |= 1 << (cell % self.count)
        return bits


def _dependencies(graph: OpGraph, stream: list[int]) -> list[set[int]]:
    """For each node, the nodes that must be done before it, those of its own stream included."""
    needs: list[set[int]] = [set() for _ in graph.nodes]
    producer: dict[int, int] = {}
    readers: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    written: dict[tuple[int, int | None], int] = {}
    last_exchange: int | None = None
    entered: set[int] = {stream[0]}
    for index, node in enumerate(graph.nodes):
        for _, value in node.inputs:
            memory, piece = graph.values[value].memory, graph.values[value].piece
            # A view (shard, split, own heads) has no node: what wrote its memory made it. A state may be older still.
            source = producer.get(value, written.get((memory, piece)))
            if source is not None:
                needs[index].add(source)
            else:
                assert graph.memories[memory].state, (
                    f"{node.name} reads {graph.values[value].name}, which nothing makes"
                )
            latest = written.get((memory, piece))
            if latest is not None:
                needs[index].add(latest)
            readers[memory, piece].append(index)
        needs[index].update(node.closes)
        if node.action is not Action.SEND:
            for value in node.outputs:
                place = (graph.values[value].memory, graph.values[value].piece)
                needs[index].update(reader for reader in readers[place] if reader != index)
                readers[place].clear()
                written[place] = index
                producer[value] = index
        if node.action.is_exchange:
            if last_exchange is not None:
                needs[index].add(last_exchange)
            last_exchange = index
        if stream[index] not in entered:
            needs[index].add(0)
            entered.add(stream[index])
    return needs


def _reduce(
    needs: list[set[int]], stream: list[int], streams: int
) -> tuple[list[tuple[int, ...]], tuple[int, ...], list[tuple[int, ...]], int]:
    """Transitive reduction over the streams' own order: waits of each node, joins, clocks, orderings before."""
    clocks: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    last: list[int | None] = [None] * streams
    before = 0

    def keep(sources: set[int], own: int | None) -> tuple[int, ...]:
        """The sources that are not implied by another one or by the stream's own last node."""
        known = [clocks[own]] if own is not None else []
        kept: list[int] = []
        for source in sorted(sources, reverse=True):  # a source implies only earlier ones
            if not any(clock[stream[source]] >= clocks[source][stream[source]] for clock in known):
                kept.append(source)
                known.append(clocks[source])
        return tuple(sorted(kept))

    for index, sources in enumerate(needs):
        mine = stream[index]
        others = {source for source in sources if stream[source] != mine}
        before += len(others)
        kept = keep(others, last[mine])
        clock = [0] * streams
        for source in [*kept, *([last[mine]] if last[mine] is not None else [])]:
            assert source is not None
            clock = [max(a, b) for a, b in zip(clock, clocks[source], strict=True)]
        clock[mine] += 1
        clocks.append(tuple(clock))
        waits.append(kept)
        last[mine] = index
    ends = {node for number, node in enumerate(last) if node is not None and number != 0}
    before += len(ends)
    return waits, keep(ends, last[0]), clocks, before


def _lifetimes(graph: OpGraph, stream: list[int], clocks: list[tuple[int, ...]]) -> dict[int, Lifetime]:
    """The lifetime of every target, from the exchanges of its axis that surround its accesses."""
    accesses: dict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        for value in {*(value for _, value in node.inputs), *node.outputs}:
            memory = graph.values[value].memory
            found = graph.memories[memory]
            if found.space is Space.TARGET and not found.state and node.action is not Action.HANDSHAKE:
                accesses[memory].append(index)
    exchanges: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        if node.action.is_exchange:
            exchanges[node.axis].append(index)

    def before(first: int, second: int) -> bool:
        return first != second and clocks[second][stream[first]] >= clocks[first][stream[first]]

    lifetimes = {}
    for memory, nodes in accesses.items():
        order = exchanges[graph.memories[memory].axis]
        after, until = len(order), 0
        for access in nodes:
            # Exchanges are totally ordered, so those before a node are the first few of them.
            first = _count(order, lambda exchange, access=access: before(exchange, access)) - 1  # type: ignore[misc]
            last = _count(order, lambda exchange, access=access: not before(access, exchange))  # type: ignore[misc]
            after, until = min(after, first), max(until, last)
        lifetimes[memory] = Lifetime(after, until, len(order))
    return lifetimes


def _count(order: list[int], holds: Callable[[int], bool]) -> int:
    """How many of the first exchanges ``holds`` is true for; it is monotone."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if holds(order[middle]):
            low = middle + 1
        else:
            high = middle
    return low


def _closing(graph: OpGraph, lifetimes: dict[int, Lifetime], open_axes: set[str]) -> list[str]:
    """The axes that need one more handshake at the end of the step: a flag needs another exchange between its reset
    and its next write, and a target one between its last access and the next replay's first. ``open_axes`` are those
    of states that need it."""
    short = []
    for axis, size in graph.schedule.mesh:
        kinds = [node.action for node in graph.nodes if node.action.is_exchange and node.axis == axis]
        flags_reused = kinds == [Action.HANDSHAKE] and size > 1
        targets = [life for memory, life in lifetimes.items() if graph.memories[memory].axis == axis]
        if flags_reused or axis in open_axes or not all(life.fits for life in targets):
            short.append(axis)
    return short


def _closing_set(graph: OpGraph) -> list[str]:
    """The axes whose closing handshakes, one after another, let every rank know that all ranks are through with a
    version of a step before anything of the next one begins, whichever that is. A flag of an axis without another
    exchange needs two in turn. A version without exchanges and without states that peers write to has no targets and
    closes nothing."""
    used = {node.axis for node in graph.nodes if node.action.is_exchange}
    reached = used or any(graph.memories[memory].space is Space.TARGET for memory in graph.states)
    if not graph.schedule.in_set or not reached:
        return []
    return [axis for axis, size in graph.schedule.mesh if size > 1 for _ in range(1 if axis in used else 2)]


def order(graph: OpGraph) -> StreamPlan:
    """Put every node on its stream and find the events.

    Raises:
        ScheduleError: E301 for a send into a state that nothing orders behind an earlier use of it.
    """
    names = graph.schedule.streams
    closed = _closing_set(graph)
    graph = _closed(graph, closed)
    while True:
        stream = [names.index(node.stream) for node in graph.nodes]
        needs = _dependencies(graph, stream)
        for index, node in enumerate(graph.nodes):
            if node.kind == "closing":  # every access of the step comes before it
                needs[index].update(_last_nodes(stream[:index]))
        waits, joins, clocks, before = _reduce(needs, stream, len(names))
        lifetimes = _lifetimes(graph, stream, clocks)
        open_axes = states_open_at_the_wrap(graph, stream, clocks)
        short = [axis for axis in _closing(graph, lifetimes, open_axes) if axis not in closed]
        if not short:
            return StreamPlan(graph, tuple(stream), tuple(waits), joins, before, tuple(clocks), lifetimes)
        closed += short
        graph = _closed(graph, short)


def _last_nodes(stream: list[int]) -> set[int]:
    return set({number: index for index, number in enumerate(stream)}.values())


def _closed(graph: OpGraph, axes: list[str]) -> OpGraph:
    """The graph with a closing handshake for each axis behind everything else."""
    nodes = list(graph.nodes)
    for axis in axes:
        before = sum(node.kind == "closing" and node.axis == axis for node in nodes)
        nodes.append(_closing_handshake(graph, axis, f"_{before + 1}" if before else ""))
    return replace(graph, nodes=tuple(nodes))


def _closing_handshake(graph: OpGraph, axis: str, suffix: str) -> Node:
    exchanges = [node for node in reversed(graph.nodes) if node.action.is_exchange]
    last = next((node for node in exchanges if node.axis == axis), exchanges[0] if exchanges else graph.nodes[-1])
    return Node(
        Action.HANDSHAKE,
        "closing",
        f"step.closing_{axis}{suffix}",
        None,
        last.path,
        last.stream,
        axis=axis,
        protocol=last.protocol or graph.schedule.handshake,
    )


def verify_streams(plan: StreamPlan) -> None:
    """Our own rules of the level: waits point backwards to other streams, and every target's lifetime closes."""
    for index, sources in enumerate(plan.waits):
        for source in sources:
            assert source < index, "a wait points forwards"
            assert plan.stream[source] != plan.stream[index], "a wait for the own stream"
    for memory, life in plan.lifetimes.items():
        assert life.fits, f"{plan.graph.memories[memory].name} is never free"
