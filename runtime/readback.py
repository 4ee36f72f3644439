"""Holds a captured graph against the plan: every copy and handshake is there, and every order is a path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cuda.bindings import driver

from stepgraph.planner.diagnostics import Diagnostic, StepgraphError
from stepgraph.planner.plan import Plan, Protocol, Record, Send, Signal, WaitEvent
from stepgraph.runtime.capture import Capture, Nodes
from stepgraph.runtime.cuda import CudaRank, checked


class ReadbackError(StepgraphError):
    """What was captured is not what the plan says (E608)."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The captured graph as data."""

    kinds: Mapping[int, str]
    """Type of each node, by its handle."""
    edges: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> dict[str, int]:
        return dict(sorted(Counter(self.kinds.values()).items()))


def _lists(result: tuple[object, ...]) -> list[list[driver.CUgraphNode]]:
    found = checked(result)
    parts = found if isinstance(found, list | tuple) else [found]
    return [part for part in parts if isinstance(part, list) and part and isinstance(part[0], driver.CUgraphNode)]


def _count(result: tuple[object, ...]) -> int:
    found = checked(result)
    parts = found if isinstance(found, list | tuple) else [found]
    return next(int(part) for part in reversed(parts) if isinstance(part, int))


def facts_of(capture: Capture) -> GraphFacts:
    """Read the nodes and edges of a captured graph."""
    graph = driver.CUgraph(capture.graph.raw_cuda_graph())
    count = _count(driver.cuGraphGetNodes(graph, 0))
    (nodes,) = _lists(driver.cuGraphGetNodes(graph, count))
    kinds = {
        int(node): checked(driver.cuGraphNodeGetType(node)).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        for node in nodes
    }
    number = _count(driver.cuGraphGetEdges(graph, 0))
    lists = _lists(driver.cuGraphGetEdges(graph, number)) if number else [[], []]
    edges = tuple((int(a), int(b)) for a, b in zip(lists[0], lists[1], strict=True))
    return GraphFacts(kinds, edges)


def _ancestors(facts: GraphFacts) -> dict[int, int]:
    """For each node, its ancestors and itself, as bits in the order of ``facts.kinds``."""
    place = {node: index for index, node in enumerate(facts.kinds)}
    parents: dict[int, list[int]] = {node: [] for node in facts.kinds}
    children: dict[int, list[int]] = {node: [] for node in facts.kinds}
    for parent, child in facts.edges:
        parents[child].append(parent)
        children[parent].append(child)
    waiting = {node: len(found) for node, found in parents.items()}
    ready = [node for node, count in waiting.items() if count == 0]
    bits: dict[int, int] = {}
    while ready:
        node = ready.pop()
        mine = 1 << place[node]
        for parent in parents[node]:
            mine |= bits[parent]
        bits[node] = mine
        for child in children[node]:
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
    return bits


def check(plan: Plan, rank: int, device: CudaRank, capture: Capture, facts: GraphFacts) -> None:
    """Compare the captured graph with the plan.

    Raises:
        ReadbackError: E608 for a copy or handshake without its node, or an order without a path.
    """
    problems: list[Diagnostic] = []

    def wrong(what: str, expected: str, got: str) -> None:
        problems.append(Diagnostic("E608", f"the captured graph differs from the plan: {what}", None, expected, got))

    items = plan.ranks[rank].instructions
    new = _new_nodes(plan, rank, capture)
    for number, item in enumerate(items):
        if isinstance(item, Send):
            batches = plan.ranks[item.peer].buffers[item.target].batch
            kind, want, name = "memcpy", batches, f"{plan.ops[item.op].name} to rank {item.peer}"
            got = _path_kinds(facts, new[number], kind)
            if got < 1:
                wrong(f"instruction {number}, {name}", f"{want} {kind} node", "none")
        elif isinstance(item, Signal) and plan.exchanges[item.exchange].protocol is Protocol.MEMOP:
            found = _path_kinds(facts, new[number], "batch_mem_op")
            if found < 1:
                wrong(f"instruction {number}, {plan.exchanges[item.exchange].name}", "a batch_mem_op node", "none")
    for kind, least in _expected(plan, rank).items():
        got = facts.counts.get(kind, 0)
        exact = kind == "batch_mem_op"
        if got < least or (exact and got != least):
            wrong(f"{kind} nodes", f"{least}" if exact else f"at least {least}", str(got))
    ancestors = _ancestors(facts)
    place = {node: index for index, node in enumerate(facts.kinds)}
    for first, second in _orders(plan, rank):
        before, after = capture.marks[first], capture.marks[second]
        missing = [b for b in before if not any(ancestors[a] >> place[b] & 1 for a in after)]
        if after and missing:
            wrong(
                f"no path from instruction {first} to {second}", f"{items[first].do} before {items[second].do}", "none"
            )
    if problems:
        raise ReadbackError(problems[:10])


def _new_nodes(plan: Plan, rank: int, capture: Capture) -> dict[int, Nodes]:
    """For each instruction, the nodes that ended its stream after it and did not before."""
    last: dict[int, Nodes] = {}
    found: dict[int, Nodes] = {}
    for number, item in enumerate(plan.ranks[rank].instructions):
        found[number] = capture.marks[number] - last.get(item.stream, frozenset())
        last[item.stream] = capture.marks[number]
    return found


def _path_kinds(facts: GraphFacts, nodes: Nodes, kind: str) -> int:
    return sum(facts.kinds.get(node) == kind for node in nodes)


def _expected(plan: Plan, rank: int) -> dict[str, int]:
    """How many nodes of each kind the plan's own instructions become; stages may add copies of their own."""
    counts: Counter[str] = Counter()
    for item in plan.ranks[rank].instructions:
        if isinstance(item, Send):
            counts["memcpy"] += plan.ranks[item.peer].buffers[item.target].batch
        elif isinstance(item, Signal):
            counts["batch_mem_op"] += 1
            if plan.exchanges[item.exchange].protocol is Protocol.COPY:
                counts["memcpy"] += len(item.flags)
    return dict(counts)


def _orders(plan: Plan, rank: int) -> list[tuple[int, int]]:
    """Pairs of instructions that the plan orders directly: along streams, and over events."""
    last: dict[int, int] = {}
    recorded: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for number, item in enumerate(plan.ranks[rank].instructions):
        if item.stream in last:
            pairs.append((last[item.stream], number))
        if isinstance(item, Record):
            recorded[item.event] = number
        elif isinstance(item, WaitEvent):
            pairs.append((recorded[item.event], number))
        last[item.stream] = number
    return pairs
