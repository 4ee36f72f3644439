"""The order of one rank's replay by its own edges alone: streams, and events between them. What a capture knows of the
order, and what stays of it when hardware queues run the streams of a rank one after another."""

from __future__ import annotations

from dataclasses import dataclass

from stepgraph.planner.plan import RankProgram, Record, WaitEvent


@dataclass(frozen=True, slots=True)
class LocalOrder:
    stream: tuple[int, ...]
    """By instruction."""
    place: tuple[int, ...]
    """By instruction: how many of its stream are done with it."""
    known: tuple[tuple[int, ...], ...]
    """By instruction: how many of each stream are known to be done before it."""

    def before(self, first: int, second: int) -> bool:
        """Whether an instruction is done before another one starts, or is it."""
        return first == second or self.known[second][self.stream[first]] >= self.place[first]


def local_order(program: RankProgram, width: int) -> LocalOrder:
    """Of the instructions in the order of issue; an event that is waited for before its record gives no order."""
    now = [(0,) * width for _ in range(width)]
    recorded: dict[int, tuple[int, ...]] = {}
    stream, place, known = [], [], []
    for item in program.instructions:
        mine = now[item.stream]
        if isinstance(item, WaitEvent) and item.event in recorded:
            mine = tuple(map(max, mine, recorded[item.event]))
        stream.append(item.stream)
        place.append(mine[item.stream] + 1)
        known.append(mine)
        mine = (*mine[: item.stream], mine[item.stream] + 1, *mine[item.stream + 1 :])
        now[item.stream] = mine
        if isinstance(item, Record):
            recorded[item.event] = mine
    return LocalOrder(tuple(stream), tuple(place), tuple(known))
