"""Memory in cells: the coarsest pieces of every buffer such that each access touches whole ones.

Regions of one buffer are rectangles; two regions meet where they share a cell. Targets may share bytes of the arena,
under different pitches, also those of different plans: cells of different targets that do are listed, byte by byte.
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
_Home = tuple[int, int, int]
"""(plan, owner, buffer)."""


@dataclass(frozen=True, slots=True)
class Cells:
    of: Sequence[Mapping[Place, tuple[int, ...]]]
    """By plan: the cells of every region that was asked for."""
    overlaps: Mapping[int, tuple[int, ...]]
    """For a cell, the cells of other targets that share bytes with it; none where it is not named."""


def cells_of(plans: Sequence[Plan], places: Sequence[Iterable[Place]]) -> Cells:
    """The cells for a set of regions of each plan. A plan's local buffers are its own; the arena is of all."""
    of: list[dict[Place, tuple[int, ...]]] = []
    homes: list[_Home] = []
    pieces: list[list[Region]] = []
    split = cache(_split)
    for number, asked in enumerate(places):
        regions: dict[tuple[int, int], list[Region]] = defaultdict(list)
        for owner, buffer, region in asked:
            if region.rows and region.cols:
                regions[owner, buffer].append(region)
        cells: dict[Place, tuple[int, ...]] = {}
        for (owner, buffer), found in regions.items():
            parts, touched = split(tuple(found))
            for region, members in zip(found, touched, strict=True):
                cells[owner, buffer, region] = tuple(len(homes) + member for member in members)
            pieces += parts
            homes += [(number, owner, buffer)] * len(parts)
        of.append(cells)
    return Cells(of, _overlaps(plans, homes, pieces))


def _split(regions: tuple[Region, ...]) -> tuple[list[list[Region]], list[list[int]]]:
    """The cells of one buffer, each some rectangles, and for each region the cells that it is made of."""
    if len(regions) == 1:
        return [[regions[0]]], [[0]]
    parts = parts_of(regions)
    touched: list[list[int]] = [[] for _ in regions]
    for cell, members in enumerate(parts):
        for number in members:
            touched[number].append(cell)
    return list(parts.values()), touched


def parts_of(regions: Sequence[Region]) -> Mapping[tuple[int, ...], list[Region]]:
    """For every set of regions, by their numbers: the rectangles that all of them have, and no other."""
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
    return parts


def _overlaps(
    plans: Sequence[Plan], homes: Sequence[_Home], pieces: Sequence[Sequence[Region]]
) -> Mapping[int, tuple[int, ...]]:
    meet = cache(_meet)
    targets = [
        (number, index, target) for number, plan in enumerate(plans) for index, target in enumerate(plan.targets)
    ]
    shared = [
        ((plan, one), (other, two))
        for (plan, one, a), (other, two, b) in combinations(targets, 2)
        if a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
    ]
    by_home: dict[_Home, list[int]] = defaultdict(list)
    for cell, home in enumerate(homes):
        by_home[home].append(cell)
    overlaps: dict[int, list[int]] = defaultdict(list)
    for owner in range(plans[0].world_size):
        for (plan, one), (other, two) in shared:
            nears = [(c, _bytes(plans[plan], owner, one, pieces[c])) for c in by_home.get((plan, owner, one), ())]
            fars = [(c, _bytes(plans[other], owner, two, pieces[c])) for c in by_home.get((other, owner, two), ())]
            for first, runs in nears:
                for second, others in fars:
                    if any(meet(a, b) for a in runs for b in others):
                        overlaps[first].append(second)
                        overlaps[second].append(first)
    return {cell: tuple(others) for cell, others in overlaps.items()}


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
