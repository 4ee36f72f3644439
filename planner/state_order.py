"""Whether every send into a state comes behind all that has touched the rows on other ranks: an exchange must lie
between, since a rank knows of its peers by exchanges alone. A state has one buffer: there is none to alternate with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.planner.diagnostics import Diagnostic, ScheduleError
from stepgraph.planner.opgraph import Action, Node, OpGraph
from stepgraph.planner.values import Space, row_dim


@dataclass(frozen=True, slots=True)
class _Use:
    node: int
    rows: range | None
    """The rows that a send writes; None for all, by a node of the rank itself."""


def _uses(graph: OpGraph) -> dict[int, list[_Use]]:
    """The uses of every state that is sent into, in the order of issue."""
    found: dict[int, list[_Use]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        if node.action is Action.HANDSHAKE:
            continue
        for value in dict.fromkeys([*(value for _, value in node.inputs), *node.outputs]):
            memory = graph.values[value].memory
            if graph.memories[memory].state and graph.memories[memory].space is Space.TARGET:
                sent = node.action is Action.SEND and value in node.outputs
                found[memory].append(_Use(index, _rows(graph, node) if sent else None))
    return found


def _rows(graph: OpGraph, node: Node) -> range:
    row = row_dim(graph.values[node.inputs[0][1]].form)
    assert row is not None
    first = int(dict(node.options)["at"])
    return range(first, first + row.size)


def _meet(one: _Use, two: _Use) -> bool:
    if one.rows is None or two.rows is None:
        return True
    return one.rows.start < two.rows.stop and two.rows.start < one.rows.stop


def states_open_at_the_wrap(graph: OpGraph, stream: Sequence[int], clocks: Sequence[tuple[int, ...]]) -> set[str]:
    """The axes over which a handshake must close the step, so that the next step's sends into states come behind this
    one's uses of them.

    Raises:
        ScheduleError: E301 for a send that nothing orders behind an earlier use within the step.
    """

    def before(first: int, second: int) -> bool:
        return first != second and clocks[second][stream[first]] >= clocks[first][stream[first]]

    open_axes: set[str] = set()
    problems: dict[tuple[object, ...], Diagnostic] = {}
    for memory, uses in _uses(graph).items():
        axis = graph.memories[memory].axis
        exchanges = [n for n, node in enumerate(graph.nodes) if node.action.is_exchange and node.axis == axis]
        for send in (use for use in uses if use.rows is not None):
            behind = [exchange for exchange in exchanges if before(exchange, send.node)]
            for use in (use for use in uses if _meet(use, send)):
                if use.node < send.node and not any(before(use.node, exchange) for exchange in behind):
                    problems.setdefault(graph.nodes[send.node].path, _unordered(graph, use.node, send.node))
                if not behind and not any(before(use.node, exchange) for exchange in exchanges):
                    open_axes.add(axis)
    if problems:
        raise ScheduleError(list(problems.values()))
    return open_axes


def _unordered(graph: OpGraph, use: int, send: int) -> Diagnostic:
    tree, name = graph.schedule.tree, dict(graph.nodes[send].options)["into"]
    line = tree.place(graph.nodes[use].path).line
    return Diagnostic(
        "E301",
        f"nothing orders the send into the state '{name}' behind a use of it on other ranks",
        tree.place(graph.nodes[send].path),
        f"an exchange between the op in line {line} and the send",
        "none",
        "put a gather or a barrier between them, or send before the state is read",
    )
