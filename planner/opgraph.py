"""Level 2, the op graph: one step with all its layers, as ops in the order of issue and the values between them.

An op that works in place makes a new value in the same memory. A sent tensor's name means its target from the
barrier on. The rules of each kind stand in ``rules.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from stepgraph.planner.ops import Handshake
from stepgraph.planner.schedule import Schedule
from stepgraph.planner.shares import Chunk
from stepgraph.planner.source import TreePath
from stepgraph.planner.values import Memory, Value

BRANCHES = ("cond", "uncond")
"""The branches of guidance, in the order in which a sequential step does them."""
IN_PLACE = frozenset({"norm_rope", "rope"})
"""The kinds whose results lie where their operands do."""


class Action(Enum):
    """What a node does when it is issued."""

    LOAD = auto()
    RUN = auto()
    SEND = auto()
    """Copies into peers' targets; readable after the handshake that closes them."""
    HANDSHAKE = auto()
    COLLECTIVE = auto()
    STORE = auto()

    @property
    def is_exchange(self) -> bool:
        return self in (Action.HANDSHAKE, Action.COLLECTIVE)


@dataclass(frozen=True, slots=True)
class Node:
    action: Action
    kind: str
    name: str
    """Path without the layer, as self_attention.qkv or dual.qkv.img."""
    layer: int | None
    path: TreePath
    """Where the op stands in the schedule."""
    stream: str
    inputs: tuple[tuple[str, int], ...] = ()
    """(role, value)."""
    outputs: tuple[int, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    axis: str = ""
    """Of sends and exchanges: the mesh axis of the group."""
    closes: tuple[int, ...] = ()
    """Of a handshake: the nodes whose sends it closes."""
    protocol: Handshake | None = None
    branch: str = ""
    """The branch of guidance, in a sequential step."""
    chunk: Chunk | None = None
    """Which chunk of the heads."""

    @property
    def part(self) -> str:
        """Which of several nodes of one op in one layer, for people."""
        chunk = f"chunk {self.chunk[0]}" if self.chunk else ""
        return " ".join(word for word in (self.branch, chunk) if word)


@dataclass(frozen=True, slots=True)
class OpGraph:
    schedule: Schedule
    nodes: tuple[Node, ...]
    """In the order of issue."""
    values: tuple[Value, ...]
    memories: tuple[Memory, ...]
    states: tuple[int, ...]
    """The memories of states, in the order of the schedule and of the layers."""


def verify_opgraph(graph: OpGraph) -> None:
    """Our own rules of the level: memory is written before it is read, and every value is made once."""
    made: set[int] = set()
    filled: set[int] = set(graph.states)
    for node in graph.nodes:
        for _, value in node.inputs:
            memory = graph.values[value].memory
            assert memory in filled, f"{node.name} reads {graph.values[value].name} before it is written"
        if node.action is not Action.SEND:  # a send's target is readable when its handshake closes it
            assert not made & set(node.outputs), f"{node.name} makes a value twice"
            made |= set(node.outputs)
            filled |= {graph.values[value].memory for value in node.outputs}
