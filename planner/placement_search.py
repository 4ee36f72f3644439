"""An exact search: whether blocks fit an arena of a given size, and where they lie.

Blocks take their turns in the order of their first cells, from one cell once around the circle. What matters of the
blocks before a turn is which ranges are in use and until when; such a state is searched once. Layers repeat and a cell
holds few blocks, so that there are few states. ``refutes`` goes through all of them, turn by turn. ``search`` ranks the
offsets for a block, those of its family first, then the lowest, and looks at placements in the order of discrepancies,
the sum of the ranks of what they chose, deepest first (Harvey and Ginsberg, Limited discrepancy search, IJCAI 1995).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.planner.placement import Answer, Problem, Verdict, chain_sums

LOOK_AHEAD = 3
"""In so many cells of a block room must be left for those that come after it."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell as a block sees it when it takes its turn."""

    taken: tuple[int, ...]
    """The earlier blocks in use."""
    sums: tuple[int, ...]
    """The sums of sizes of this and the later blocks in use; empty where they are too many."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A block's turn in the sweep: what is known of the blocks before it. Blocks are numbered by their turns."""

    size: int
    meets: tuple[int, ...]
    """The earlier blocks that are in use with this one at some time."""
    cells: tuple[_Cell, ...]
    """The first few cells of the block."""
    alive: tuple[tuple[int, int], ...]
    """The earlier blocks that this one or a later one can meet, with a key each, how long they stay in use from here:
    blocks of one key until the same cell. Those that cross the sweep's start have keys below 0 of their own."""
    twin: bool
    """Whether the block before has the same size and arc: then it takes the lower offset."""
    family: tuple[int, ...]
    """The last two blocks of the family."""


def _cut(problem: Problem) -> int:
    """The cell to start from: few blocks are in use across its start, and around it little is free."""
    loads, crossing = [0] * problem.cells, [0] * problem.cells
    for block in problem.blocks:
        for cell in range(block.start, block.end):
            loads[cell % problem.cells] += block.size
            crossing[cell % problem.cells] += cell > block.start
    return min(range(problem.cells), key=lambda cell: (crossing[cell], -loads[cell] - loads[cell - 1], cell))


def _turns(problem: Problem, capacity: int) -> tuple[list[int], list[_Turn]]:
    """The order of the blocks in the sweep, those that cross its start first, and the turn of each."""
    cells, cut = problem.cells, _cut(problem)
    starts = [(block.start - cut) % cells for block in problem.blocks]
    ends = [start + block.end - block.start for start, block in zip(starts, problem.blocks, strict=True)]

    def key(number: int) -> tuple[bool, int, int, int]:
        return ends[number] <= cells, starts[number], -problem.blocks[number].size, ends[number]

    order = sorted(range(len(problem.blocks)), key=key)
    used: list[list[int]] = [[] for _ in range(cells)]
    for turn, number in enumerate(order):
        for cell in range(starts[number], ends[number]):
            used[cell % cells].append(turn)
    turns: list[_Turn] = []
    alive: list[int] = []
    latest: dict[int, tuple[int, ...]] = {}
    for turn, number in enumerate(order):
        block, first = problem.blocks[number], starts[number] if ends[number] <= cells else 0
        alive = [other for other in alive if ends[order[other]] > first]
        seen = []
        for cell in range(first, min(first + LOOK_AHEAD, ends[number])):
            here = used[cell % cells]
            sizes = [problem.blocks[order[other]].size for other in here if other >= turn]
            seen.append(_Cell(tuple(o for o in here if o < turn), tuple(chain_sums(sizes, capacity) or ())))
        turns.append(
            _Turn(
                size=block.size,
                meets=tuple(
                    sorted({o for cell in range(starts[number], ends[number]) for o in used[cell % cells] if o < turn})
                ),
                cells=tuple(seen),
                alive=tuple((ends[order[o]] - first if ends[order[o]] <= cells else -1 - o, o) for o in alive),
                twin=turn > 0 and key(order[turn - 1]) == key(number),
                family=latest.get(block.family, ()),
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


def _room(cell: _Cell, turns: Sequence[_Turn], offsets: Sequence[int], capacity: int) -> bool:
    """Whether the gaps of a cell can take all that is to come in it, were it not for the cells around it."""
    if not cell.sums:
        return True
    gaps = _gaps(turns, offsets, cell.taken, capacity)
    return sum(cell.sums[bisect_right(cell.sums, high - low) - 1] for low, high in gaps) >= cell.sums[-1]


_State = tuple[int, tuple[tuple[int, int, int], ...]]
"""What the blocks so far mean to those to come: the offset that a twin must exceed, and for how long which ranges are
in use."""


def _state(number: int, turns: Sequence[_Turn], offsets: Sequence[int]) -> _State:
    turn = turns[number]
    found: list[tuple[int, int, int]] = []
    for key, offset, other in sorted((key, offsets[other], other) for key, other in turn.alive):
        end = offset + turns[other].size
        if found and found[-1][0] == key and found[-1][2] == offset:
            found[-1] = (key, found[-1][1], end)
        else:
            found.append((key, offset, end))
    return offsets[number - 1] if turn.twin else 0, tuple(found)


def _free(number: int, turns: Sequence[_Turn], offsets: Sequence[int], sums: list[int], capacity: int) -> list[int]:
    """The offsets at which a block meets none before it."""
    turn = turns[number]
    lowest = offsets[number - 1] if turn.twin else 0
    found: list[int] = []
    for low, high in _gaps(turns, offsets, turn.meets, capacity):
        found += sums[bisect_left(sums, max(low, lowest)) : bisect_right(sums, high - turn.size)]
    return found


def _leaves_room(number: int, turns: Sequence[_Turn], offsets: Sequence[int], capacity: int) -> bool:
    """Whether there may be a place for what comes after a block."""
    return number + 1 == len(turns) or all(_room(cell, turns, offsets, capacity) for cell in turns[number + 1].cells)


def _shape(number: int, turns: Sequence[_Turn]) -> tuple[object, ...]:
    """A turn as seen from itself: in layers that repeat, the turns of one block have one shape."""
    turn, crossing = turns[number], {other for key, other in turns[-1].alive if key < 0}

    def seen(others: Sequence[int]) -> tuple[int, ...]:
        return tuple(-1 - other if other in crossing else number - other for other in others)

    cells = tuple((seen(cell.taken), cell.sums) for cell in turn.cells)
    keys, others = [key for key, _ in turn.alive], [other for _, other in turn.alive]
    return turn.size, turn.twin, seen(turn.meets), cells, tuple(keys), seen(others), number in crossing


def refutes(problem: Problem, capacity: int, tries: int) -> bool:
    """Whether it is proven, within so many tries of an offset, that the blocks don't fit ``capacity``.

    Turn by turn, in all states that can be reached. Where the states at some turn are those of a layer before, they are
    so after every layer like it, so that the rest of these layers can be left out.
    """
    sums = chain_sums([block.size for block in problem.blocks], capacity)
    if sums is None or not problem.blocks:
        return False
    _, turns = _turns(problem, capacity)
    shapes = [_shape(number, turns) for number in range(len(turns))]
    reached: dict[_State, tuple[int, ...]] = {(0, ()): ()}
    """States, and the offsets of the blocks alive in one placement that leads there."""
    met: dict[tuple[tuple[object, ...], frozenset[_State]], int] = {}
    number = 0
    while number < len(turns) and reached:
        period = number - met.setdefault((shapes[number], frozenset(reached)), number)
        if period:
            end = number
            while end + 1 < len(turns) and shapes[end + 1] == shapes[end + 1 - period]:
                end += 1
            number += (end - number) // period * period
        following: dict[_State, tuple[int, ...]] = {}
        for placed in reached.values():
            offsets = [0] * (number + 1)
            for (_, other), offset in zip(turns[number].alive, placed, strict=True):
                offsets[other] = offset
            free = _free(number, turns, offsets, sums, capacity)
            tries -= len(free)
            if tries < 0:
                return False
            for offset in free:
                offsets[number] = offset
                if number + 1 == len(turns):
                    return False
                if _leaves_room(number, turns, offsets, capacity):
                    alive = tuple(offsets[other] for _, other in turns[number + 1].alive)
                    following.setdefault(_state(number + 1, turns, offsets), alive)
        reached = following
        number += 1
    return not reached


def search(problem: Problem, capacity: int, tries: int) -> Answer:
    """Whether the blocks fit ``capacity``; a search that ends within so many tries of an offset is a proof.

    Every placement can sink into one of those that are searched (``chain_sums``), and blocks of one size and arc can be
    swapped, so that only one order of them is searched.
    """
    sums = chain_sums([block.size for block in problem.blocks], capacity)
    if sums is None:
        return Answer(Verdict.OPEN)
    order, turns = _turns(problem, capacity)
    waiting: dict[int, list[tuple[int, ...]]] = defaultdict(list, {0: [()]})
    """Offsets of the first blocks, by their discrepancies."""
    seen: set[tuple[int, _State]] = set()
    tried = 0
    while waiting:
        discrepancies = min(waiting)
        offsets = waiting[discrepancies].pop()
        if not waiting[discrepancies]:
            del waiting[discrepancies]
        number = len(offsets)
        if number == len(turns):
            at = dict(zip(order, offsets, strict=True))
            return Answer(Verdict.FITS, tuple(at[block] for block in range(number)), tried)
        state = (number, _state(number, turns, offsets))
        if state in seen:
            continue
        seen.add(state)
        free = _free(number, turns, offsets, sums, capacity)
        tried += len(free)
        if tried > tries:
            return Answer(Verdict.OPEN, tried=tries)
        kept = [offsets[relative] for relative in turns[number].family if offsets[relative] in free]
        longer = [(*offsets, offset) for offset in dict.fromkeys([*kept, *free])]
        useful = [placed for placed in longer if _leaves_room(number, turns, placed, capacity)]
        for worse, placed in reversed(list(enumerate(useful))):
            waiting[discrepancies + worse].append(placed)
    return Answer(Verdict.TOO_SMALL, tried=tried)
