"""Level 4, the memory plan: where targets lie in the arena, flag slots, and when local tensors are dropped.

Targets of one family (one op, over the layers) alternate among as few buffers as are safe. Two targets share bytes
only if an exchange of their axis always lies between the accesses to one and the accesses to the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepgraph.planner.diagnostics import Diagnostic, ScheduleError
from stepgraph.planner.opgraph import Action
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


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    streams: StreamPlan
    shares: Shares
    targets: tuple[PlacedTarget, ...]
    target_of: dict[int, int]
    """For each memory that is a target, its number in ``targets``."""
    arena_bytes: int
    lower_bound: int
    """The most bytes that are in use at one time, summed over the axes."""
    first_slot: dict[int, int]
    """For each handshake node, its first flag slot; one for each member of the group follows."""
    flag_slots: int
    drop_before: dict[int, tuple[int, ...]]
    """The memories to drop just before a node runs on its stream."""
    drop_after: dict[int, tuple[int, ...]]
    """The memories to drop just after a node."""
    drop_at_end: tuple[int, ...]
    """The memories whose own stream never waits for all their users: they last until the join."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A target to place: some memories of one family."""

    name: str
    axis: str
    nbytes: int
    cells: int
    memories: tuple[int, ...]
    free: bool
    """Whether the author leaves the number of buffers to the planner."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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


def _groups(plan: StreamPlan, shares: Shares) -> list[_Group]:
    """The targets to place: each family of memories, dealt out to its buffers."""
    graph = plan.graph
    families: dict[str, list[int]] = defaultdict(list)
    for index, found in enumerate(graph.memories):
        if found.space is Space.TARGET:
            families[found.family].append(index)
    groups: list[_Group] = []
    for family, members in families.items():
        for number, hand in enumerate(_alternate(plan, family, members)):
            first = graph.memories[hand[0]]
            nbytes = _nbytes(first, shares)
            free = first.buffers is None
            groups.append(_Group(f"{family}.{number}", first.axis, nbytes, _cells(plan, hand), tuple(hand), free))
    return groups


def _cells(plan: StreamPlan, members: Sequence[int]) -> int:
    found = 0
    for memory in members:
        found |= plan.lifetimes[memory].cells
    return found


def _without_last(plan: StreamPlan, groups: list[_Group], group: _Group) -> list[_Group]:
    """The groups, with the last memory of one apart."""
    *rest, last = group.memories
    fewer = replace(group, cells=_cells(plan, rest), memories=tuple(rest))
    apart = replace(group, name=f"{group.name}.last", cells=_cells(plan, [last]), memories=(last,), free=False)
    return [part for found in groups for part in ((fewer, apart) if found is group else (found,))]


def _place(groups: list[_Group]) -> tuple[dict[str, int], int]:
    """First fit, largest first: offsets by name, and the arena's size. Targets of different axes never share."""
    placed: list[tuple[int, _Group]] = []
    for group in sorted(groups, key=lambda g: (-g.nbytes, g.name)):
        offset = 0
        for start, other in sorted(placed, key=lambda item: (item[0], item[1].name)):
            shares_time = other.axis != group.axis or other.cells & group.cells
            if shares_time and start < offset + _aligned(group.nbytes) and offset < start + _aligned(other.nbytes):
                offset = start + _aligned(other.nbytes)
        placed.append((offset, group))
    return {group.name: offset for offset, group in placed}, max(
        (offset + _aligned(group.nbytes) for offset, group in placed), default=0
    )


def _lower_bound(plan: StreamPlan, shares: Shares) -> int:
    """No placement of single targets goes below what is in use at one time; axes are counted one by one."""
    total = 0
    by_axis: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for memory, life in plan.lifetimes.items():
        nbytes = _aligned(_nbytes(plan.graph.memories[memory], shares))
        for cell in range(life.after, life.until):
            by_axis[plan.graph.memories[memory].axis][cell % life.count] += nbytes
    for cells in by_axis.values():
        total += max(cells.values(), default=0)
    return total


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
    lower_bound = _lower_bound(plan, shares)
    groups = _groups(plan, shares)
    offsets, arena_bytes = _place(groups)
    while arena_bytes > lower_bound:
        # The last layer's target meets others than those of the layers before it: a place of its own may save more.
        choices = [_without_last(plan, groups, group) for group in groups if len(group.memories) > 1 and group.free]
        placed = [(*_place(found), found) for found in choices]
        best = min(placed, key=lambda choice: choice[1], default=(offsets, arena_bytes, groups))
        if best[1] >= arena_bytes:
            break
        offsets, arena_bytes, groups = best
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
        targets=tuple(PlacedTarget(group.name, group.nbytes, offsets[group.name]) for group in groups),
        target_of={memory: number for number, group in enumerate(groups) for memory in group.memories},
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
        life, target = plan.streams.lifetimes[memory], plan.targets[number]
        assert target.offset + target.nbytes <= plan.arena_bytes, f"{target.name} lies outside the arena"
        for other, other_number in placed[at + 1 :]:
            second = plan.targets[other_number]
            meet = target.offset < second.offset + second.nbytes and second.offset < target.offset + target.nbytes
            axes = plan.streams.graph.memories
            if meet and axes[memory].axis == axes[other].axis:
                assert not life.cells & plan.streams.lifetimes[other].cells, f"{target.name} meets {second.name}"
            else:
                assert not meet, f"{target.name} meets {second.name} of another axis"
    assert plan.arena_bytes >= plan.lower_bound or not plan.targets
