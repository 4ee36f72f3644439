"""Ranks that are alike: where a rotation along an axis of the mesh maps a plan onto itself, one rank's memory and
flags decide for all that it is rotated to.

A rotation takes the instruction at one place of a rank's program to the one at the same place of the next rank's. It
keeps the order if streams, events, exchanges, groups and flag words go with it, each to one of its own. It keeps what
accesses meet, and what they cover, if buffers are the same on both ranks and the regions of a buffer go to regions that
lie to each other alike: a block of rows to another one. Where targets share bytes of the arena, other blocks meet other
blocks after a rotation: such targets are looked at on every rank. In doubt a rotation is refused, and every rank is
looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from stepgraph.planner.plan import (
    Collective,
    Drop,
    Flag,
    Instruction,
    Load,
    Part,
    Plan,
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
from stepgraph.planner.verify.cells import parts_of

Pairs = dict[tuple[int, int], set[tuple[Region, Region]]]
"""By owner and buffer: regions, and where a rotation takes them."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """What must be looked at, to know about all."""

    ranks: frozenset[int]
    """One of each set of ranks that are alike."""
    everywhere: frozenset[int]
    """Targets that are looked at on every rank."""

    def asks(self, owner: int, buffer: int) -> bool:
        """Whether accesses to a buffer of a rank are looked at."""
        return owner in self.ranks or buffer in self.everywhere


def reduction_of(plan: Plan) -> Reduction:
    """The ranks that decide for all: rank 0 alone where every axis may be rotated."""
    alike = list(range(plan.world_size))
    """The lowest rank that each is known to be like."""
    stride = plan.world_size
    for axis in plan.mesh:
        stride //= axis.size
        around = stride * axis.size
        turned = [rank // around * around + (rank + stride) % around for rank in range(plan.world_size)]
        if axis.size > 1 and _keeps(plan, turned):
            for _ in range(axis.size):
                for rank, to in enumerate(turned):
                    alike[to] = min(alike[to], alike[rank])
    shared = {
        number
        for (one, a), (two, b) in combinations(enumerate(plan.targets), 2)
        if a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
        for number in (one, two)
    }
    return Reduction(frozenset(alike), frozenset(shared))


class _Differs(Exception):
    """The rotation does not map the plan onto itself."""


def _need(holds: bool) -> None:
    if not holds:
        raise _Differs


class _OneToOne:
    """A map that is found piece by piece, and stays one to one."""

    def __init__(self) -> None:
        self.to: dict[object, object] = {}
        self.back: dict[object, object] = {}

    def pair(self, one: object, two: object) -> None:
        _need(self.to.setdefault(one, two) == two and self.back.setdefault(two, one) == one)


class _Rotation:
    def __init__(self, plan: Plan, to: Sequence[int]) -> None:
        self.plan, self.to = plan, to
        self.words, self.exchanges = _OneToOne(), _OneToOne()
        self.pairs: Pairs = {}

    def check(self) -> None:
        plan = self.plan
        for rank, program in enumerate(plan.ranks):
            other = plan.ranks[self.to[rank]]
            _need(program.buffers == other.buffers and len(program.views) == len(other.views))
            for mine, theirs in zip(program.views, other.views, strict=True):
                _need(mine.buffer == theirs.buffer)
                self.regions(rank, mine.buffer, mine.region, theirs.region)
            _need(len(program.instructions) == len(other.instructions))
            for one, two in zip(program.instructions, other.instructions, strict=True):
                self.instruction(rank, one, two)
        for number, found in self.exchanges.to.items():
            assert isinstance(number, int)
            assert isinstance(found, int)
            here, there = plan.exchanges[number], plan.exchanges[found]
            _need((here.kind, here.protocol, here.op) == (there.kind, there.protocol, there.op))
            _need({self.to[member] for member in plan.groups[here.group]} == set(plan.groups[there.group]))
        for (owner, buffer), pairs in self.pairs.items():
            size = plan.ranks[owner].buffers[buffer]
            dropped = Region(0, size.rows, 0, size.cols)
            _need(_lie_alike(frozenset(pairs | {(dropped, dropped)})))

    def instruction(self, rank: int, one: Instruction, two: Instruction) -> None:
        if type(one) is not type(two) or one.stream != two.stream:
            raise _Differs
        match one:
            case Run():
                assert isinstance(two, Run)
                _need(one.op == two.op and one.inputs == two.inputs and one.outputs == two.outputs)
            case Send():
                assert isinstance(two, Send)
                _need((one.op, one.source, one.target) == (two.op, two.source, two.target))
                _need(two.peer == self.to[one.peer])
                self.exchanges.pair(one.exchange, two.exchange)
                source = self.plan.ranks[rank].views[one.source].buffer
                self.regions(rank, source, one.source_region, two.source_region)
                self.regions(one.peer, one.target, one.region, two.region)
            case Signal() | Wait() | Reset():
                assert isinstance(two, Signal | Wait | Reset)
                self.exchanges.pair(one.exchange, two.exchange)
                self.flags(None if isinstance(one, Signal) else rank, one.flags, two.flags)
            case Collective():
                assert isinstance(two, Collective)
                _need(one.op == two.op and one.reduce == two.reduce)
                self.exchanges.pair(one.exchange, two.exchange)
                self.parts(rank, one.outgoing, two.outgoing)
                self.parts(rank, one.incoming, two.incoming)
            case Record() | WaitEvent():
                assert isinstance(two, Record | WaitEvent)
                _need(one.event == two.event)
            case Drop():
                assert isinstance(two, Drop)
                _need(one.buffer == two.buffer)
            case Load():
                assert isinstance(two, Load)
                _need((one.op, one.input, one.view) == (two.op, two.input, two.view))
            case Store():
                assert isinstance(two, Store)
                _need((one.op, one.output, one.view) == (two.op, two.output, two.view))

    def regions(self, owner: int, buffer: int, one: Region, two: Region) -> None:
        self.pairs.setdefault((owner, buffer), set()).add((one, two))

    def flags(self, owner: int | None, one: Sequence[Flag], two: Sequence[Flag]) -> None:
        """The words of an instruction, in any order; those of ``owner``, or of the peers."""
        slots = {flag.peer: flag.slot for flag in two}
        _need(len(slots) == len(two) == len(one) == len({flag.peer for flag in one}))
        for flag in one:
            peer = self.to[flag.peer]
            _need(peer in slots)
            home = flag.peer if owner is None else owner
            self.words.pair((home, flag.slot), (self.to[home], slots[peer]))

    def parts(self, rank: int, one: Sequence[Part], two: Sequence[Part]) -> None:
        """The parts of a collective, those of a peer in order."""
        _need(len(one) == len(two))
        for peer in dict.fromkeys(part.peer for part in one):
            mine = [part for part in one if part.peer == peer]
            theirs = [part for part in two if part.peer == self.to[peer]]
            _need(len(mine) == len(theirs))
            for part, other in zip(mine, theirs, strict=True):
                _need(part.view == other.view)
                self.regions(rank, self.plan.ranks[rank].views[part.view].buffer, part.region, other.region)


@cache
def _lie_alike(pairs: frozenset[tuple[Region, Region]]) -> bool:
    """Whether regions go to regions such that whatever elements some of them share, and no others have, the others
    share as many: then they meet alike, and cover alike what others read."""
    order = sorted(pairs, key=str)
    return _areas([one for one, _ in order]) == _areas([two for _, two in order])


def _areas(regions: Sequence[Region]) -> dict[tuple[int, ...], int]:
    """For every set of regions, by their numbers: the elements of a batch that all of them have, and no other."""
    return {numbers: sum(box.rows * box.cols for box in boxes) for numbers, boxes in parts_of(regions).items()}


def _keeps(plan: Plan, to: Sequence[int]) -> bool:
    """Whether a rotation of the ranks maps the plan onto itself."""
    try:
        _Rotation(plan, to).check()
    except _Differs:
        return False
    return True
