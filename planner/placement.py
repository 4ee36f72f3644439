"""Placement of blocks in an arena: where they lie, and how small an arena can be.

A block is in use over an arc of a circle of cells: the times between two exchanges, the last of which wraps from one
replay to the next. Blocks whose arcs meet need disjoint bytes. This is dynamic storage allocation, NP-hard already on a
line (Garey and Johnson, Computers and Intractability, problem SR2). On a circle the most that is in use at once may be
out of reach: around an odd ring of blocks, each of which meets the next, some three lie one on top of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    tried: int = 0
    """How many offsets of single blocks were tried."""


def peak(problem: Problem) -> int:
    """The most that is in use in one cell."""
    found = [0] * problem.cells
    for block in problem.blocks:
        for cell in range(block.start, block.end):
            found[cell % problem.cells] += block.size
    return max(found, default=0)


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


def first_fit(problem: Problem, hands: Sequence[Sequence[int]], order: Sequence[int]) -> tuple[int, ...]:
    """An offset for each hand of blocks, of one size and of disjoint arcs: one after another, as low as they go."""
    blocks, count = problem.blocks, problem.cells
    cells = [
        {cell % count for block in hand for cell in range(blocks[block].start, blocks[block].end)} for hand in hands
    ]
    sizes = [blocks[hand[0]].size for hand in hands]
    offsets: dict[int, int] = {}
    for hand in order:
        at = 0
        for low, other in sorted((low, other) for other, low in offsets.items()):
            if low < at + sizes[hand] and at < low + sizes[other] and not cells[hand].isdisjoint(cells[other]):
                at = low + sizes[other]
        offsets[hand] = at
    return tuple(offsets[hand] for hand in range(len(hands)))
