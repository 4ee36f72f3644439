"""Level 4, the memory plan: where targets lie in the arena, flag slots, and when local tensors are dropped.

Targets of one family (one op, over the layers) alternate among as few buffers as are safe. Two targets share bytes
only if an exchange of their axis always lies between the accesses to one and the accesses to the other.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stepgraph.planner.diagnostics import Diagnostic, ScheduleError
from stepgraph.planner.opgraph import Action
from stepgraph.planner.packing import Hand, Packing, pack
from stepgraph.planner.placement import Block, Problem
from stepgraph.planner.plan import ALIGNMENT
from stepgraph.planner.shares import Shares
from stepgraph.planner.streams import StreamPlan
from stepgraph.planner.values import Memory, Space, buffer_box


@dataclass(frozen=True, slots=True)
class PlacedTarget:
    name: str
    nbytes: int
    """The largest over the ranks."""
    offset: int
    state: bool = False
    """In use all the time, and by nothing else."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    streams: StreamPlan
    shares: Shares
    targets: tuple[PlacedTarget, ...]
    target_of: dict[int, int]
    """For each memory that is a target, its number in ``targets``."""
    arena_bytes: int
    lower_bound: int
    """No placement of single targets at aligned offsets is smaller (``pack``)."""
    first_slot: dict[int, int]
    """For each handshake node, its first flag slot; one for each member of the group follows."""
    flag_slots: int
    drop_before: dict[int, tuple[int, ...]]
    """The memories to drop just before a node runs on its stream."""
    drop_after: dict[int, tuple[int, ...]]
    """The memories to drop just after a node."""
    drop_at_end: tuple[int, ...]
    """The memories whose own stream never waits for all their users: they last until the join."""


def _nbytes(memory: Memory, shares: Shares) -> int:
    sizes = []
    for rank in range(shares.world_size):
        batch, rows, cols = buffer_box(memory, shares, rank)
        sizes.append(batch * rows * cols * memory.dtype.itemsize)
    return max(sizes)


def _alternate(plan: StreamPlan, family: str, members: list[int]) -> list[list[int]]:
    """The members of a family, dealt out to the fewest buffers that are safe, or to as many as the author says.

    Raises:
        ScheduleError: E305 when the author's number is not safe.
    """
    wanted = plan.graph.memories[members[0]].buffers
    for count in [wanted] if wanted else range(1, len(members) + 1):
        dealt = [members[start::count] for start in range(min(count, len(members)))]
        if all(_disjoint(plan, hand) for hand in dealt):
            return dealt
    assert wanted, "a target for every layer is always safe"
    safe = next(n for n in range(1, len(members) + 1) if all(_disjoint(plan, members[s::n]) for s in range(n)))
    node = next(n for n in plan.graph.nodes if n.outputs and plan.graph.values[n.outputs[0]].memory == members[0])
    raise ScheduleError(
        [
            Diagnostic(
                "E305",
                f"buffers: {wanted} is not safe for {family.split(':', maxsplit=1)[0]}",
                plan.graph.schedule.tree.place(node.path),
                f"{safe} buffers or more",
                str(wanted),
                "no exchange lies between the last read of a layer's target and the next write to it; write "
                "`buffers: auto`, or put a gather between them",
            )
        ]
    )


def _disjoint(plan: StreamPlan, members: list[int]) -> bool:
    taken = 0
    for memory in members:
        cells = plan.lifetimes[memory].cells
        if taken & cells:
            return False
        taken |= cells
    return True


def _place(plan: StreamPlan, shares: Shares, axis: str) -> tuple[Packing, tuple[int, ...]]:
    """The targets of an axis in an arena of their own, in units of alignment, and the memories that its blocks are."""
    graph = plan.graph
    memories = tuple(index for index in sorted(plan.lifetimes) if graph.memories[index].axis == axis)
    families: dict[str, list[int]] = defaultdict(list)
    for index in memories:
        families[graph.memories[index].family].append(index)
    numbers = {family: number for number, family in enumerate(families)}
    blocks = tuple(
        Block(
            -(-_nbytes(graph.memories[index], shares) // ALIGNMENT),
            plan.lifetimes[index].after,
            plan.lifetimes[index].until,
            numbers[graph.memories[index].family],
        )
        for index in memories
    )
    hands = [
        Hand(tuple(memories.index(index) for index in hand), graph.memories[hand[0]].buffers is None)
        for family, members in families.items()
        for hand in _alternate(plan, family, members)
    ]
    cells = plan.lifetimes[memories[0]].count
    return pack(Problem(blocks, cells), hands), memories


def _targets(plan: StreamPlan, shares: Shares) -> tuple[tuple[PlacedTarget, ...], dict[int, int], int, int]:
    """The targets, the number of each memory's, the arena's bytes and their lower bound.

    Targets of different axes are not made to share bytes: every axis has a range of its own. Some could, where
    exchanges of both axes lie between, so that the bound is that of the axis which needs most: any arena holds its
    targets. States come first: nothing shares their bytes.
    """
    graph = plan.graph
    targets: list[PlacedTarget] = []
    target_of: dict[int, int] = {}
    base = 0
    for memory in graph.states:
        found = graph.memories[memory]
        if found.space is Space.TARGET:
            target_of[memory] = len(targets)
            targets.append(PlacedTarget(found.state, _nbytes(found, shares), base * ALIGNMENT, True))
            base += -(-_nbytes(found, shares) // ALIGNMENT)
    states, bound = base, 0
    for axis in dict.fromkeys(graph.memories[index].axis for index in sorted(plan.lifetimes)):
        packing, memories = _place(plan, shares, axis)
        numbers: dict[str, int] = defaultdict(int)
        for hand, offset in zip(packing.hands, packing.offsets, strict=True):
            first = graph.memories[memories[hand.blocks[0]]]
            target_of |= {memories[block]: len(targets) for block in hand.blocks}
            name = f"{first.family}.{numbers[first.family]}"
            targets.append(PlacedTarget(name, _nbytes(first, shares), (base + offset) * ALIGNMENT))
            numbers[first.family] += 1
        base += packing.size
        bound = max(bound, packing.bound)
    return tuple(targets), target_of, base * ALIGNMENT, (states + bound) * ALIGNMENT


def _drops(plan: StreamPlan) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]], tuple[int, ...]]:
    """When each local memory may go: at the first node of its own stream that all its accesses precede."""
    graph = plan.graph
    accesses: dict[int, list[int]] = defaultdict(list)
    stores = [node for node in graph.nodes if node.action is Action.STORE]
    kept = {graph.values[value].memory for node in stores for _, value in node.inputs}
    for index, node in enumerate(graph.nodes):
        for value in {*(value for _, value in node.inputs), *node.outputs}:
            accesses[graph.values[value].memory].append(index)
    by_stream: dict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(plan.stream):
        by_stream[number].append(index)
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    end: list[int] = []
    for memory, nodes in accesses.items():
        if graph.memories[memory].space is not Space.LOCAL or memory in kept:
            continue
        own = plan.stream[nodes[0]]
        place = next((n for n in by_stream[own] if n >= nodes[-1] and all(plan.before(a, n) for a in nodes)), None)
        if place is None:
            end.append(memory)
        else:
            (after if place in nodes else before)[place].append(memory)
    return ({n: tuple(m) for n, m in before.items()}, {n: tuple(m) for n, m in after.items()}, tuple(end))


def allocate(plan: StreamPlan) -> MemoryPlan:
    """Place every target, flag and drop.

    Raises:
        ScheduleError: E305 for a number of buffers that is not safe.
    """
    graph, shares = plan.graph, Shares(plan.graph.schedule)
    targets, target_of, arena_bytes, lower_bound = _targets(plan, shares)
    first_slot: dict[int, int] = {}
    slots = 0
    for index, node in enumerate(graph.nodes):
        if node.action is Action.HANDSHAKE:
            first_slot[index] = slots
            slots += graph.schedule.axis(node.axis)
    drop_before, drop_after, drop_at_end = _drops(plan)
    return MemoryPlan(
        streams=plan,
        shares=shares,
        targets=targets,
        target_of=target_of,
        arena_bytes=arena_bytes,
        lower_bound=lower_bound,
        first_slot=first_slot,
        flag_slots=slots,
        drop_before=drop_before,
        drop_after=drop_after,
        drop_at_end=drop_at_end,
    )


def verify_memory(plan: MemoryPlan) -> None:
    """Our own rules of the level: targets that are in use at one time don't meet, and flags never share."""
    placed = sorted(plan.target_of.items())
    for at, (memory, number) in enumerate(placed):
        target = plan.targets[number]
        assert target.offset + target.nbytes <= plan.arena_bytes, f"{target.name} lies outside the arena"
        for other, other_number in placed[at + 1 :]:
            second = plan.targets[other_number]
            meet = target.offset < second.offset + second.nbytes and second.offset < target.offset + target.nbytes
            axes, lives = plan.streams.graph.memories, plan.streams.lifetimes
            if target.state or second.state:
                assert not meet, f"{target.name} meets {second.name}, and one is a state"
            elif meet and axes[memory].axis == axes[other].axis:
                assert not lives[memory].cells & lives[other].cells, f"{target.name} meets {second.name}"
            else:
                assert not meet, f"{target.name} meets {second.name} of another axis"
    assert plan.arena_bytes >= plan.lower_bound or not plan.targets
