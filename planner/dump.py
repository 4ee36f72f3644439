"""A level of the pipeline as text, one node a line, for the dump directory."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.planner.memory import MemoryPlan
from stepgraph.planner.opgraph import OpGraph
from stepgraph.planner.plan import Plan, dumps
from stepgraph.planner.streams import StreamPlan


def _nodes(graph: OpGraph, notes: list[str]) -> Iterator[str]:
    for index, (node, note) in enumerate(zip(graph.nodes, notes, strict=True)):
        layer = "" if node.layer is None else f"[{node.layer}]"
        inputs = ", ".join(f"{role}={graph.values[value].describe()}" for role, value in node.inputs)
        outputs = ", ".join(graph.values[value].describe() for value in node.outputs)
        what = f"{node.stream:10} {node.action.name.lower():10} {node.name}{layer} {node.part}".rstrip()
        yield f"{index:5} {what} <- {inputs} -> {outputs}{note}"


def dump_level(level: OpGraph | StreamPlan | MemoryPlan | Plan) -> str:
    """The text of a level; a plan's is the artifact itself."""
    if isinstance(level, Plan):
        return dumps(level)
    if isinstance(level, OpGraph):
        return "\n".join(_nodes(level, [""] * len(level.nodes))) + "\n"
    if isinstance(level, StreamPlan):
        notes = [f"  after {', '.join(map(str, sources))}" if sources else "" for sources in level.waits]
        return "\n".join(_nodes(level.graph, notes)) + f"\njoins {level.joins}\n"
    lines = [f"{t.offset:12} {t.nbytes:12} {t.name}{', a state' if t.state else ''}" for t in level.targets]
    return "\n".join([*lines, f"arena {level.arena_bytes}, at least {level.lower_bound}"]) + "\n"
