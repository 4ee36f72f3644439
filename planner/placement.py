"""Placement of blocks in an arena: offsets, and how small an arena can be.

A block is in use over an arc of a circle of cells: the times between two exchanges, the last of which wraps from one
replay to the next. Blocks whose arcs meet need disjoint bytes. This is dynamic storage allocation, NP-hard already on a
line (Garey and Johnson, Computers and Intractability, problem SR2). A step's layers repeat and few blocks are in use at
one time, so that an exact search over the cells is quick.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

MOST_SUMS = 4096
"""A search among more offsets than these would not end in time."""


@dataclass(frozen=True, slots=True)
class Block:
    size: int
    """In any unit; positive."""
    start: int
    """The first cell in use, modulo the number of cells."""
    end: int
    """The cell after the last one in use: at most the number of cells more than ``start``."""
    family: int
    """Blocks of one family lie at the same offset where they can."""


@dataclass(frozen=True, slots=True)
class Problem:
    blocks: tuple[Block, ...]
    cells: int


class Verdict(Enum):
    FITS = auto()
    TOO_SMALL = auto()
    """No placement exists."""
    OPEN = auto()
    """The search ended before it knew."""


@dataclass(frozen=True, slots=True)
class Answer:
    verdict: Verdict
    offsets: tuple[int, ...] = ()
    """Of every block, if they fit."""
    steps: int = 0
    """How many states were looked at."""


def load(problem: Problem) -> tuple[int, ...]:
    """How much is in use in each cell. No arena is smaller than the largest."""
    found = [0] * problem.cells
    for block in problem.blocks:
        for cell in range(block.start, block.end):
            found[cell % problem.cells] += block.size
    return tuple(found)


def chain_sums(sizes: Sequence[int], limit: int) -> list[int] | None:
    """The sums of some of the sizes, up to ``limit``, in order; None for more than can be searched.

    Let every block of a placement sink as far as it goes. It then lies at 0 or on top of another one that it meets, so
    that its offset is the sum of a chain of sizes. A search needs no other offsets, and an arena no other size.
    """
    sums = {0}
    for size, count in Counter(sizes).items():
        sums = {at + times * size for at in sums for times in range(min(count, (limit - at) // size) + 1)}
        if len(sums) > MOST_SUMS:
            return None
    return sorted(sums)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A block's turn in the sweep: what is known of the blocks before it. Blocks are numbered by their turns."""

    size: int
    meets: tuple[int, ...]
    """The earlier blocks that are in use with this one at some time."""
    now: tuple[int, ...]
    """Those in use in this block's first cell."""
    alive: tuple[tuple[int, int], ...]
    """The earlier blocks that this one or a later one can meet, with a key each: blocks of one key are in use until
    the same cell."""
    twin: bool
    """Whether the block before has the same size and arc: then it takes the lower offset."""
    pending: tuple[int, ...]
    """The sums of sizes of this block and later ones that start in the same cell."""
    family: tuple[int, ...]
    """The last two blocks of the family."""


def _cut(problem: Problem) -> int:
    """The cell to sweep from: few blocks cross into it, and around it there is little room."""
    loads = load(problem)
    crossing = [0] * problem.cells
    for block in problem.blocks:
        for cell in range(block.start + 1, block.end):
            crossing[cell % problem.cells] += 1
    return min(range(problem.cells), key=lambda cell: (crossing[cell], -loads[cell] - loads[cell - 1], cell))


def _turns(problem: Problem, capacity: int) -> tuple[list[int], list[_Turn]]:
    """The order of the blocks in the sweep, those that cross its start first, and the turn of each."""
    cells, cut = problem.cells, _cut(problem)
    starts = [(block.start - cut) % cells for block in problem.blocks]
    ends = [start + block.end - block.start for start, block in zip(starts, problem.blocks, strict=True)]

    def place(number: int) -> tuple[int, int, int, int]:
        start = -1 if ends[number] > cells else starts[number]
        return start, -problem.blocks[number].size, ends[number], starts[number]

    order = sorted(range(len(problem.blocks)), key=place)
    turns: list[_Turn] = []
    alive: list[int] = []
    latest: dict[int, tuple[int, ...]] = {}
    for turn, number in enumerate(order):
        block, start, end = problem.blocks[number], starts[number], ends[number]
        wraps = end > cells
        alive = [other for other in alive if wraps or ends[order[other]] > start]
        heads = {other: ends[order[other]] > cells for other in alive}

        def in_use(other: int, first: int, last: int) -> bool:
            """Whether an earlier block is in use in one of the cells of the sweep."""
            low, high = starts[order[other]], ends[order[other]]
            return (low < last and first < high) or first < high - cells

        meets = tuple(o for o in alive if wraps or in_use(o, start, end))
        now = tuple(o for o in alive if wraps or in_use(o, start, start + 1))
        together = [n for n in order[turn:] if place(n)[0] == place(number)[0]]
        turns.append(
            _Turn(
                block.size,
                meets,
                now,
                tuple((cells + 1 + o if heads[o] else ends[order[o]], o) for o in alive),
                turn > 0 and place(order[turn - 1]) == place(number),
                tuple(chain_sums([problem.blocks[n].size for n in together], capacity) or ()),
                latest.get(block.family, ()),
            )
        )
        latest[block.family] = (turn, *latest.get(block.family, ())[:1])
        alive.append(turn)
    return order, turns


def _gaps(turns: Sequence[_Turn], offsets: Sequence[int], taken: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """What some blocks leave free: from, to."""
    found, at = [], 0
    for offset, end in sorted((offsets[other], offsets[other] + turns[other].size) for other in taken):
        if offset > at:
            found.append((at, offset))
        at = max(at, end)
    if capacity > at:
        found.append((at, capacity))
    return found


def _state(turn: _Turn, turns: Sequence[_Turn], offsets: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """What the blocks so far mean to those to come: ranges in use, and until when."""
    found: list[tuple[int, int, int]] = []
    for key, offset, other in sorted((key, offsets[other], other) for key, other in turn.alive):
        end = offset + turns[other].size
        if found and found[-1][0] == key and found[-1][2] == offset:
            found[-1] = (key, found[-1][1], end)
        else:
            found.append((key, offset, end))
    return tuple(found)


def _choices(number: int, turns: Sequence[_Turn], offsets: Sequence[int], sums: list[int], capacity: int) -> list[int]:
    """The offsets that a block can take, the most promising last."""
    turn = turns[number]
    room = 0
    for low, high in _gaps(turns, offsets, turn.now, capacity):
        room += turn.pending[bisect_right(turn.pending, high - low) - 1] if turn.pending else high - low
    if turn.pending and room < turn.pending[-1]:
        return []
    lowest = offsets[number - 1] if turn.twin else 0
    found: list[int] = []
    for low, high in _gaps(turns, offsets, turn.meets, capacity):
        found += sums[bisect_left(sums, max(low, lowest)) : bisect_right(sums, high - turn.size)]
    found.reverse()
    for relative in reversed(turn.family):
        if offsets[relative] in found:
            found.remove(offsets[relative])
            found.append(offsets[relative])
    return found


def search(problem: Problem, capacity: int, steps: int) -> Answer:
    """Whether the blocks fit an arena, by depth-first search over the cells, and where they lie.

    Blocks take their turns in the order of first cells. The states that led nowhere are kept, so that what follows one
    is searched once. Every placement can sink into one that is searched, so that a search that ends is a proof.
    """
    sums = chain_sums([block.size for block in problem.blocks], capacity)
    if sums is None:
        return Answer(Verdict.OPEN)
    order, turns = _turns(problem, capacity)
    offsets = [0] * len(turns)
    seen: set[tuple[int, int, tuple[tuple[int, int, int], ...]]] = set()
    stack: list[list[int]] = []
    looked = 0
    while len(stack) < len(turns):
        number = len(stack)
        turn = turns[number]
        state = (number, offsets[number - 1] if turn.twin else 0, _state(turn, turns, offsets))
        looked += 1
        if looked > steps:
            return Answer(Verdict.OPEN, steps=steps)
        stack.append([] if state in seen else _choices(number, turns, offsets, sums, capacity))
        seen.add(state)
        while stack and not stack[-1]:
            stack.pop()
        if not stack:
            return Answer(Verdict.TOO_SMALL, steps=looked)
        offsets[len(stack) - 1] = stack[-1].pop()
    placed = dict(zip(order, offsets, strict=True))
    return Answer(Verdict.FITS, tuple(placed[number] for number in range(len(order))), looked)
