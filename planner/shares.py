"""How a mesh cuts sequences and heads: every rank's share, even or not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product

from stepgraph.planner.schedule import Schedule

Range = tuple[int, int]
"""(first, count)."""
Chunk = tuple[int, int]
"""(number, of how many)."""


def balanced(total: int, parts: int) -> tuple[Range, ...]:
    """``total`` things in ``parts`` shares that differ by one at most, the larger ones first."""
    counts = [total // parts + (index < total % parts) for index in range(parts)]
    starts = [0, *accumulate(counts)]
    return tuple((starts[index], counts[index]) for index in range(parts))


def head_shares(heads: int, kv_heads: int, parts: int) -> tuple[tuple[Range, Range], ...]:
    """(query heads, key and value heads) of each part, such that a part holds the kv heads of its query heads and
    every kv head of a part serves equally many of its query heads. With fewer kv heads than parts, parts share one."""
    group = heads // kv_heads
    if kv_heads >= parts:
        return tuple(((first * group, count * group), (first, count)) for first, count in balanced(kv_heads, parts))
    shares: list[tuple[Range, Range]] = []
    for kv_head, (_, sharers) in enumerate(balanced(parts, kv_heads)):
        shares += [((kv_head * group + first, count), (kv_head, 1)) for first, count in balanced(group, sharers)]
    return tuple(shares)


def most_chunks(heads: int, kv_heads: int) -> int:
    """Into how many chunks ``head_shares`` can cut heads, each with a head of q at least; none of no heads."""
    return max((n for n in range(1, heads + 1) if kv_heads >= n or heads // kv_heads >= -(-n // kv_heads)), default=0)


@dataclass(frozen=True)
class Shares:
    """The shares of a schedule's mesh. Ranks count through the axes in the order written, the last fastest."""

    schedule: Schedule

    @cached_property
    def world_size(self) -> int:
        return len(self.coordinates)

    @cached_property
    def coordinates(self) -> tuple[dict[str, int], ...]:
        names = [name for name, _ in self.schedule.mesh]
        return tuple(
            dict(zip(names, point, strict=True)) for point in product(*(range(size) for _, size in self.schedule.mesh))
        )

    def coordinate(self, rank: int, axis: str) -> int:
        return self.coordinates[rank].get(axis, 0)

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` in their coordinate of ``axis`` alone, in the order of it."""
        mine = {name: value for name, value in self.coordinates[rank].items() if name != axis}
        return tuple(
            other
            for other, point in enumerate(self.coordinates)
            if {name: value for name, value in point.items() if name != axis} == mine
        )

    @cached_property
    def rows(self) -> dict[str, tuple[Range, ...]]:
        """For each segment, the rows of each coordinate of the ulysses axis."""
        parts = self.schedule.axis("ulysses")
        return {name: balanced(length, parts) for name, length in self.schedule.segments}

    @cached_property
    def heads(self) -> dict[str, tuple[Range, ...]]:
        """For heads and kv_heads, the heads of each coordinate of the ulysses axis, among those of one tensor rank."""
        sizes = self.schedule.sizes
        tensor = self.schedule.axis("tensor")
        pairs = head_shares(sizes["heads"] // tensor, sizes["kv_heads"] // tensor, self.schedule.axis("ulysses"))
        return {"heads": tuple(q for q, _ in pairs), "kv_heads": tuple(kv for _, kv in pairs)}

    @cached_property
    def most_chunks(self) -> tuple[int, ...]:
        """Into how many chunks the heads of each coordinate of the ulysses axis can be cut."""
        pairs = zip(self.heads["heads"], self.heads["kv_heads"], strict=True)
        return tuple(most_chunks(q[1], kv[1]) for q, kv in pairs)

    def head_range(self, kind: str, place: int, chunk: Chunk | None) -> Range:
        """The heads, or kv_heads, of a coordinate of the ulysses axis, or of one chunk of them: a chunk has the kv
        heads of its q heads, and chunks share them where there are fewer."""
        first, count = self.heads[kind][place]
        if chunk is None:
            return first, count
        number, parts = chunk
        (_, heads), (_, kv_heads) = self.heads["heads"][place], self.heads["kv_heads"][place]
        q, kv = head_shares(heads, kv_heads, parts)[number]
        start, held = q if kind == "heads" else kv
        return first + start, held

    def chunk_counts(self, kind: str, chunk: Chunk | None) -> tuple[int, ...]:
        """How many heads each coordinate of the ulysses axis has in a chunk."""
        return tuple(self.head_range(kind, place, chunk)[1] for place in range(self.schedule.axis("ulysses")))
