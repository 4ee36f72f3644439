"""Memory in cells: the coarsest pieces of every buffer such that each access touches whole ones.

Regions of one buffer are rectangles; two regions meet where they share a cell. Targets may share bytes of the arena,
under different pitches: cells of different targets that do are listed, byte by byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

from stepgraph.planner.plan import Plan, Region

Place = tuple[int, int, Region]
"""(owner, buffer, region)."""


@dataclass(frozen=True, slots=True)
class Cells:
    of: Mapping[Place, tuple[int, ...]]
    """The cells of every region that was asked for."""
    overlaps: Mapping[int, tuple[int, ...]]
    """For a cell, the cells of other targets that share bytes with it; none where it is not named."""


def cells_of(plan: Plan, places: Iterable[Place]) -> Cells:
    """The cells for a set of regions."""
    regions: dict[tuple[int, int], list[Region]] = defaultdict(list)
    for owner, buffer, region in places:
        if region.rows and region.cols:
            regions[owner, buffer].append(region)
    of: dict[Place, tuple[int, ...]] = {}
    owner_of: list[tuple[int, int]] = []
    pieces: list[list[Region]] = []
    split = cache(_split)
    for (owner, buffer), found in regions.items():
        parts, touched = split(tuple(found))
        for region, numbers in zip(found, touched, strict=True):
            of[owner, buffer, region] = tuple(len(owner_of) + number for number in numbers)
        pieces += parts
        owner_of += [(owner, buffer)] * len(parts)
    return Cells(of, _overlaps(plan, owner_of, pieces))


def _split(regions: tuple[Region, ...]) -> tuple[list[list[Region]], list[list[int]]]:
    """The cells of one buffer, each some rectangles, and for each region the cells that it is made of."""
    if len(regions) == 1:
        return [[regions[0]]], [[0]]
    rows = sorted({edge for r in regions for edge in (r.row, r.row + r.rows)})
    cols = sorted({edge for r in regions for edge in (r.col, r.col + r.cols)})
    row_at, col_at = ({edge: index for index, edge in enumerate(edges)} for edges in (rows, cols))
    touching: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, region in enumerate(regions):
        for row in range(row_at[region.row], row_at[region.row + region.rows]):
            for col in range(col_at[region.col], col_at[region.col + region.cols]):
                touching[row, col].append(number)
    parts: dict[tuple[int, ...], list[Region]] = defaultdict(list)
    for (row, col), numbers in touching.items():
        box = Region(rows[row], rows[row + 1] - rows[row], cols[col], cols[col + 1] - cols[col])
        parts[tuple(numbers)].append(box)
    touched: list[list[int]] = [[] for _ in regions]
    for cell, members in enumerate(parts):
        for number in members:
            touched[number].append(cell)
    return list(parts.values()), touched


def _overlaps(
    plan: Plan, owner_of: Sequence[tuple[int, int]], pieces: Sequence[Sequence[Region]]
) -> Mapping[int, tuple[int, ...]]:
    meet = cache(_meet)
    shared = {
        (one, two)
        for (one, a), (two, b) in combinations(enumerate(plan.targets), 2)
        if a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
    }
    by_buffer: dict[tuple[int, int], list[int]] = defaultdict(list)
    for cell, (owner, buffer) in enumerate(owner_of):
        by_buffer[owner, buffer].append(cell)
    found: dict[int, list[int]] = defaultdict(list)
    for owner in range(plan.world_size):
        for one, two in shared:
            for first in by_buffer.get((owner, one), ()):
                for second in by_buffer.get((owner, two), ()):
                    spans = [_bytes(plan, owner, one, pieces[first]), _bytes(plan, owner, two, pieces[second])]
                    if any(meet(a, b) for a in spans[0] for b in spans[1]):
                        found[first].append(second)
                        found[second].append(first)
    return {cell: tuple(others) for cell, others in found.items()}


@dataclass(frozen=True, slots=True)
class _Runs:
    """Bytes of a rectangle in the arena: ``count`` runs of ``length`` bytes, ``pitch`` apart, in each batch."""

    start: int
    length: int
    pitch: int
    count: int
    batch_pitch: int
    batches: int

    @property
    def end(self) -> int:
        return self.start + (self.batches - 1) * self.batch_pitch + (self.count - 1) * self.pitch + self.length


def _bytes(plan: Plan, owner: int, target: int, boxes: Sequence[Region]) -> list[_Runs]:
    buffer = plan.ranks[owner].buffers[target]
    item, found = buffer.dtype.itemsize, []
    for box in boxes:
        pitch = buffer.cols * item
        start = plan.targets[target].offset + (box.row * buffer.cols + box.col) * item
        length, count = box.cols * item, box.rows
        if length == pitch:
            length, count = length * count, 1
        found.append(_Runs(start, length, pitch, count, buffer.rows * pitch, buffer.batch))
    return found


def _starts(runs: _Runs) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    batches = np.arange(runs.batches, dtype=np.int64)[:, None] * runs.batch_pitch
    return (runs.start + batches + np.arange(runs.count, dtype=np.int64)[None, :] * runs.pitch).reshape(-1)


def _meet(one: _Runs, two: _Runs) -> bool:
    """Whether two sets of runs share a byte."""
    if one.end <= two.start or two.end <= one.start:
        return False
    starts, others = _starts(one), _starts(two)
    following = np.searchsorted(others, starts, side="right")
    after = np.append(others, np.iinfo(np.int64).max)[following] < starts + one.length
    before = np.insert(others, 0, np.iinfo(np.int64).min // 2)[following] + two.length > starts
    return bool((after | before).any())
