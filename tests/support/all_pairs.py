"""Races the obvious way: a graph of everything that happens, reachability, every pair of accesses, every byte.

Written from the plan format's own words, and knows nothing of the verifier. For plans of a few hundred instructions.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations

import networkx as nx

from stepgraph.planner.plan import (
    Collective,
    Drop,
    Load,
    Plan,
    Protocol,
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

Node = tuple[int, int, int, str]
"""(rank, replay, number, start or end); number -1 is the rank's entry into the replay."""


def happens(plans: Sequence[Plan]) -> nx.DiGraph:
    """Replays of some plans, one after another: every instruction starts before it ends; edges say what comes before
    what."""
    graph = nx.DiGraph()
    for rank in range(plans[0].world_size):
        for replay, plan in enumerate(plans):
            last: dict[int, int] = {}
            graph.add_edge((rank, replay, -1, "start"), (rank, replay + 1, -1, "start"))
            for number, item in enumerate(plan.ranks[rank].instructions):
                graph.add_edge((rank, replay, number, "start"), (rank, replay, number, "end"))
                if item.stream in last:
                    graph.add_edge((rank, replay, last[item.stream], "end"), (rank, replay, number, "start"))
                last[item.stream] = number
                graph.add_edge((rank, replay, -1, "start"), (rank, replay, number, "start"))
                graph.add_edge((rank, replay, number, "end"), (rank, replay + 1, -1, "start"))
    for replay, plan in enumerate(plans):
        told: dict[object, list[Node]] = defaultdict(list)
        for rank, program in enumerate(plan.ranks):
            for number, item in enumerate(program.instructions):
                if isinstance(item, Record):
                    told["event", rank, item.event].append((rank, replay, number, "end"))
                elif isinstance(item, Signal):
                    for flag in item.flags:
                        told["flag", flag.peer, item.exchange, flag.slot].append((rank, replay, number, "end"))
                elif isinstance(item, Collective):
                    told["collective", item.exchange].append((rank, replay, number, "start"))
        for rank, program in enumerate(plan.ranks):
            for number, item in enumerate(program.instructions):
                heard: list[Node] = []
                if isinstance(item, WaitEvent):
                    heard = told["event", rank, item.event]
                elif isinstance(item, Wait):
                    heard = [node for f in item.flags for node in told["flag", rank, item.exchange, f.slot]]
                elif isinstance(item, Collective):
                    heard = told["collective", item.exchange]
                for node in heard:
                    graph.add_edge(node, (rank, replay, number, "end"))
    return graph


def touched(plan: Plan, rank: int, number: int) -> list[tuple[tuple[int, object], int, bool]]:
    """(memory, bytes as the bits of a number, whether it writes) of an instruction."""
    program = plan.ranks[rank]
    item = program.instructions[number]

    def of(owner: int, buffer: int, region: Region, writes: bool) -> tuple[tuple[int, object], int, bool]:
        box = plan.ranks[owner].buffers[buffer]
        width = box.dtype.itemsize
        is_target = buffer < len(plan.targets)
        first = plan.targets[buffer].offset if is_target else 0
        bits = 0
        for batch in range(box.batch):
            for row in range(region.row, region.row + region.rows):
                start = first + ((batch * box.rows + row) * box.cols + region.col) * width
                bits |= ((1 << region.cols * width) - 1) << start
        return (owner, "arena" if is_target else buffer), bits, writes

    def view(index: int, writes: bool) -> tuple[tuple[int, object], int, bool]:
        return of(rank, program.views[index].buffer, program.views[index].region, writes)

    match item:
        case Load():
            return [view(item.view, True)]
        case Store():
            return [view(item.view, False)]
        case Run():
            return [*(view(index, False) for index in item.inputs), *(view(index, True) for index in item.outputs)]
        case Send():
            source = program.views[item.source].buffer
            return [of(rank, source, item.source_region, False), of(item.peer, item.target, item.region, True)]
        case Collective():
            gone = [of(rank, program.views[part.view].buffer, part.region, False) for part in item.outgoing]
            return gone + [of(rank, program.views[part.view].buffer, part.region, True) for part in item.incoming]
        case Drop():
            box = program.buffers[item.buffer]
            return [of(rank, item.buffer, Region(0, box.rows, 0, box.cols), True)]
    return []


def _reachable(graph: nx.DiGraph) -> Callable[[Node, Node], bool]:
    """Whether one thing comes before another, for all of them."""
    order = list(nx.topological_sort(graph))
    place = {node: index for index, node in enumerate(order)}
    after: dict[Node, int] = {}
    for node in reversed(order):
        bits = 1 << place[node]
        for following in graph.successors(node):
            bits |= after[following]
        after[node] = bits
    return lambda one, two: bool(after[one] >> place[two] & 1)


def has_race(plans: Sequence[Plan]) -> bool:
    """Whether two accesses to a byte, one of them a write, are unordered. Each plan must finish."""
    reaches = _reachable(happens(plans))
    memory: dict[object, list[tuple[Node, Node, int, bool]]] = defaultdict(list)
    for replay, plan in enumerate(plans):
        for rank, program in enumerate(plan.ranks):
            for number in range(len(program.instructions)):
                for where, bits, writes in touched(plan, rank, number):
                    start, end = (rank, replay, number, "start"), (rank, replay, number, "end")
                    memory[home(plan, where)].append((start, end, bits, writes))
    for found in memory.values():
        for one, two in combinations(found, 2):
            if one[0] == two[0] or not (one[3] or two[3]) or not one[2] & two[2]:
                continue
            if not reaches(one[1], two[0]) and not reaches(two[1], one[0]):
                return True
    return False


def home(plan: Plan, where: tuple[int, object]) -> object:
    """A place in memory, told from those of other plans: a local buffer is of one plan, and the arena of all."""
    return where if where[1] == "arena" else (id(plan), where)


def loses_a_flag(plans: Sequence[Plan]) -> bool:
    """Whether a write of a word and a reset of it are unordered. Each plan must finish."""
    reaches = _reachable(happens(plans))
    writes: dict[tuple[int, int], list[Node]] = defaultdict(list)
    resets: dict[tuple[int, int], list[Node]] = defaultdict(list)
    for replay, plan in enumerate(plans):
        for rank, program in enumerate(plan.ranks):
            for number, item in enumerate(program.instructions):
                if isinstance(item, Signal | Reset) and plan.exchanges[item.exchange].protocol is not Protocol.KERNEL:
                    for flag in item.flags:
                        word = (flag.peer if isinstance(item, Signal) else rank, flag.slot)
                        (writes if isinstance(item, Signal) else resets)[word].append((rank, replay, number, ""))
    for word, found in writes.items():
        for write in found:
            for reset in resets[word]:
                one, two = ((*node[:3], "end") for node in (write, reset))
                first, second = ((*node[:3], "start") for node in (write, reset))
                if not reaches(one, second) and not reaches(two, first):
                    return True
    return False
