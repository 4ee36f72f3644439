"""Holds a captured graph against the plan: every copy and handshake is there with its parameters, no instruction made
other nodes than it should, and every order of the plan is a path."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cuda.bindings import driver

from stepgraph.kernels.cuda_call import checked
from stepgraph.planner.diagnostics import Diagnostic, StepgraphError
from stepgraph.planner.plan import Instruction, Plan, Record, WaitEvent
from stepgraph.runtime.capture import Capture
from stepgraph.runtime.cuda import CudaRank
from stepgraph.runtime.executor import issued_together
from stepgraph.runtime.transport.mapping import PlannedNode

MAX_FINDINGS = 10
EPOCH_KERNEL = "epoch_handshake"
"""The kernel's name: that of its Python function."""


class ReadbackError(StepgraphError):
    """What was captured is not what the plan says (E608)."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The captured graph as data."""

    nodes: tuple[int, ...]
    """Handles, in the order in which they were captured."""
    kinds: Mapping[int, str]
    edges: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> dict[str, int]:
        return dict(sorted(Counter(self.kinds.values()).items()))


def _last_int(parts: Sequence[object]) -> int:
    return next(part for part in reversed(parts) if isinstance(part, int))


def facts_of(capture: Capture) -> GraphFacts:
    """Read the nodes and edges of a captured graph."""
    graph = driver.CUgraph(capture.graph.raw_cuda_graph())
    nodes: Sequence[driver.CUgraphNode] = []
    count = _last_int(checked(driver.cuGraphGetNodes(graph, 0)))
    if count:
        nodes = checked(driver.cuGraphGetNodes(graph, count))[0]
    kinds = {
        int(node): checked(driver.cuGraphNodeGetType(node)).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        for node in nodes
    }
    number = _last_int(checked(driver.cuGraphGetEdges(graph, 0)))
    edges: tuple[tuple[int, int], ...] = ()
    if number:
        found = [part for part in checked(driver.cuGraphGetEdges(graph, number)) if isinstance(part, list)]
        edges = tuple((int(a), int(b)) for a, b in zip(found[0], found[1], strict=True))
    return GraphFacts(tuple(int(node) for node in nodes), kinds, edges)


class _MemopParams(ctypes.Structure):
    """CUstreamBatchMemOpParams: a union of 48 bytes, in which writes and waits are laid out alike."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_ulonglong),
        ("value", ctypes.c_ulonglong),
        ("flags", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 20),
    )


class _BatchParams(ctypes.Structure):
    """CUDA_BATCH_MEM_OP_NODE_PARAMS."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("count", ctypes.c_uint),
        ("operations", ctypes.POINTER(_MemopParams)),
        ("flags", ctypes.c_uint),
    )


def _parameters(node: int, kind: str) -> tuple[tuple[int, ...], ...]:
    """What a node does, in the terms of ``PlannedNode.what``."""
    handle = driver.CUgraphNode(node)
    if kind == "memcpy":
        copy = checked(driver.cuGraphMemcpyNodeGetParams(handle))
        into = int(copy.dstDevice) + copy.dstY * copy.dstPitch + copy.dstXInBytes
        source = int(copy.srcDevice) + copy.srcY * copy.srcPitch + copy.srcXInBytes
        width, height = int(copy.WidthInBytes), int(copy.Height)
        return ((into, int(copy.dstPitch), source, int(copy.srcPitch), width, height),)
    if kind == "batch_mem_op":
        raw = checked(driver.cuGraphBatchMemOpNodeGetParams(handle))
        batch = _BatchParams.from_address(raw.getPtr())
        waits = int(driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_64)
        found = [batch.operations[index] for index in range(batch.count)]
        return tuple((int(item.operation == waits), item.address, item.value, item.flags) for item in found)
    return _epoch_parameters(handle) if kind == "kernel" else ()


def _epoch_parameters(handle: driver.CUgraphNode) -> tuple[tuple[int, ...], ...]:
    """The arguments of an epoch handshake; () for another kernel."""
    launch = checked(driver.cuGraphKernelNodeGetParams(handle))
    if not int(launch.func) or checked(driver.cuFuncGetName(launch.func)) != EPOCH_KERNEL.encode():
        return ()
    arguments = (ctypes.c_void_p * 4).from_address(int(launch.kernelParams))
    words, epoch = (ctypes.c_ulonglong.from_address(arguments[index] or 0).value for index in (0, 1))
    writes, waits = (ctypes.c_int.from_address(arguments[index] or 0).value for index in (2, 3))
    return ((words, epoch, writes, waits),)


def _same(planned: PlannedNode, node: int, kind: str) -> bool:
    if planned.kind != kind:
        return False
    found = _parameters(node, kind)
    if kind != "memcpy":
        return found == planned.what
    ((into, pitch, source, source_pitch, width, height),), (got,) = planned.what, found
    dense = height == 1 or pitch == source_pitch == width  # may be captured as one row
    as_one_row = dense and got[4] * got[5] == width * height
    same_ends = (into, source) == (got[0], got[2])
    return same_ends and (as_one_row or (pitch, source_pitch, width, height) == (got[1], got[3], got[4], got[5]))


def _ancestors(facts: GraphFacts) -> dict[int, int]:
    """For each node, its ancestors and itself, as bits in the order of ``facts.nodes``."""
    place = {node: index for index, node in enumerate(facts.nodes)}
    parents: dict[int, list[int]] = {node: [] for node in facts.nodes}
    children: dict[int, list[int]] = {node: [] for node in facts.nodes}
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


def check(device: CudaRank, capture: Capture, facts: GraphFacts) -> None:
    """Compare the captured graph with the plan.

    Raises:
        ReadbackError: E608 for a copy or handshake that is not there as planned, a node that nobody planned, or an
            order without a path.
    """
    plan, items = device.plan, device.program.instructions
    problems = [*_wrong_nodes(device, capture, facts), *_missing_paths(plan, items, capture, facts)]
    if problems:
        raise ReadbackError(problems[:MAX_FINDINGS])


def _wrong(what: str, expected: str, got: str) -> Diagnostic:
    return Diagnostic("E608", f"the captured graph differs from the plan: {what}", None, expected, got)


def _wrong_nodes(device: CudaRank, capture: Capture, facts: GraphFacts) -> list[Diagnostic]:
    plan, items = device.plan, device.program.instructions
    problems: list[Diagnostic] = []
    done = 0
    for piece in issued_together(items):
        first, done = done, capture.counts[piece.start]
        found = facts.nodes[first:done]
        item = items[piece.start]
        planned = device.planned([(number, items[number]) for number in piece])
        if planned is None:
            planned = device.planned_end(piece.start)
            found = found[len(found) - len(planned) :] if planned else ()
        same = len(planned) == len(found) and all(
            _same(plan_node, node, facts.kinds[node]) for plan_node, node in zip(planned, found, strict=True)
        )
        if not same:
            got = [(facts.kinds[node], _parameters(node, facts.kinds[node])) for node in found]
            problems.append(
                _wrong(
                    f"instruction {piece.start}, {_name(plan, item)}",
                    "; ".join(f"{node.kind} {_words(node.what)}" for node in planned) or "no node",
                    "; ".join(f"{kind} {_words(what)}" for kind, what in got) or "no node",
                )
            )
    if done != len(facts.nodes):
        problems.append(_wrong("nodes behind the last instruction", f"{done} nodes", f"{len(facts.nodes)}"))
    return problems


def _words(what: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join("/".join(f"{value:#x}" if value > 1 << 32 else str(value) for value in part) for part in what)


def _name(plan: Plan, item: Instruction) -> str:
    exchange = getattr(item, "exchange", None)
    op = getattr(item, "op", None)
    if isinstance(op, int):
        peer = getattr(item, "peer", None)
        return f"{item.do} of {plan.ops[op].name}" + (f" to rank {peer}" if peer is not None else "")
    return f"{item.do} of {plan.exchanges[exchange].name}" if isinstance(exchange, int) else item.do


def _missing_paths(plan: Plan, items: Sequence[Instruction], capture: Capture, facts: GraphFacts) -> list[Diagnostic]:
    """The orders along streams and over events that are no paths in the graph."""
    problems: list[Diagnostic] = []
    ancestors = _ancestors(facts)
    place = {node: index for index, node in enumerate(facts.nodes)}
    last: dict[int, int] = {}
    recorded: dict[int, int] = {}
    for number, item in enumerate(items):
        before = [last[item.stream]] if item.stream in last else []
        if isinstance(item, WaitEvent):
            before.append(recorded[item.event])
        elif isinstance(item, Record):
            recorded[item.event] = number
        last[item.stream] = number
        after = capture.marks[number]
        known = 0
        for node in after:
            known |= ancestors[node]
        for first in before:
            if any(not known >> place[node] & 1 for node in capture.marks[first]):
                what = f"no path from instruction {first} to {number}"
                problems.append(_wrong(what, f"{_name(plan, items[first])} before {_name(plan, item)}", "none"))
    return problems


def planned_counts(device: CudaRank) -> dict[str, int]:
    """How many nodes of each kind the plan itself makes, without those of stages and collectives."""
    items = device.program.instructions
    counts: Counter[str] = Counter()
    for piece in issued_together(items):
        counts.update(node.kind for node in device.planned([(number, items[number]) for number in piece]) or ())
    return dict(sorted(counts.items()))
