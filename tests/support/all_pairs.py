"""Races the obvious way: a graph of everything that happens, reachability, every pair of accesses, every byte.

Written from the plan format's own words, and knows nothing of the verifier. For plans of a few hundred instructions.
"""

from collections import defaultdict
from itertools import combinations

import networkx as nx

from stepgraph.planner.plan import (
    Collective,
    Drop,
    Load,
    Plan,
    Record,
    Region,
    Run,
    Send,
    Signal,
    Store,
    Wait,
    WaitEvent,
)

Node = tuple[int, int, int, str]
"""(rank, replay, number, start or end)."""


def happens(plan: Plan, replays: int) -> nx.DiGraph:
    """Every instruction starts before it ends; edges say what comes before what."""
    graph = nx.DiGraph()
    for rank, program in enumerate(plan.ranks):
        for replay in range(replays):
            last: dict[int, int] = {}
            for number, item in enumerate(program.instructions):
                graph.add_edge((rank, replay, number, "start"), (rank, replay, number, "end"))
                if item.stream in last:
                    graph.add_edge((rank, replay, last[item.stream], "end"), (rank, replay, number, "start"))
                last[item.stream] = number
                if replay:
                    for before in range(len(program.instructions)):
                        graph.add_edge((rank, replay - 1, before, "end"), (rank, replay, number, "start"))
    for replay in range(replays):
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


def touched(plan: Plan, rank: int, number: int) -> list[tuple[object, int, bool]]:
    """(memory, bytes as the bits of a number, whether it writes) of an instruction."""
    program = plan.ranks[rank]
    item = program.instructions[number]

    def of(owner: int, buffer: int, region: Region, writes: bool) -> tuple[object, int, bool]:
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

    def view(index: int, writes: bool) -> tuple[object, int, bool]:
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


def has_race(plan: Plan, replays: int = 2) -> bool:
    """Whether two accesses to a byte, one of them a write, are unordered. The plan must finish."""
    graph = happens(plan, replays)
    order = list(nx.topological_sort(graph))
    place = {node: index for index, node in enumerate(order)}
    after: dict[Node, int] = {}
    for node in reversed(order):
        bits = 1 << place[node]
        for following in graph.successors(node):
            bits |= after[following]
        after[node] = bits
    memory: dict[object, list[tuple[Node, Node, int, bool]]] = defaultdict(list)
    for rank, program in enumerate(plan.ranks):
        for number in range(len(program.instructions)):
            for where, bits, writes in touched(plan, rank, number):
                for replay in range(replays):
                    start, end = (rank, replay, number, "start"), (rank, replay, number, "end")
                    memory[where].append((start, end, bits, writes))
    for found in memory.values():
        for one, two in combinations(found, 2):
            if one[0] == two[0] or not (one[3] or two[3]) or not one[2] & two[2]:
                continue
            if not after[one[1]] >> place[two[0]] & 1 and not after[two[1]] >> place[one[0]] & 1:
                return True
    return False
