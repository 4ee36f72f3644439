"""No two accesses to the same bytes, one of them a write, are unordered: on any rank's memory, in or across replays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Collective, Drop, Load, Plan, Region, Run, Send, Store
from stepgraph.planner.verify.findings import MAX_FINDINGS, name, place
from stepgraph.planner.verify.order import Order, Step


@dataclass(frozen=True, slots=True)
class Access:
    step: Step
    owner: int
    """Whose memory."""
    buffer: int
    region: Region
    writes: bool


def accesses(plan: Plan, replays: int) -> Iterator[Access]:
    """Every access of every instruction of every replay."""
    for rank, program in enumerate(plan.ranks):
        for number, item in enumerate(program.instructions):
            found: list[tuple[int, int, Region, bool]] = []
            match item:
                case Load():
                    view = program.views[item.view]
                    found = [(rank, view.buffer, view.region, True)]
                case Store():
                    view = program.views[item.view]
                    found = [(rank, view.buffer, view.region, False)]
                case Run():
                    for views, writes in ((item.inputs, False), (item.outputs, True)):
                        found += [(rank, v.buffer, v.region, writes) for v in (program.views[i] for i in views)]
                case Send():
                    found = [
                        (rank, program.views[item.source].buffer, item.source_region, False),
                        (item.peer, item.target, item.region, True),
                    ]
                case Collective():
                    for parts, writes in ((item.outgoing, False), (item.incoming, True)):
                        found += [(rank, program.views[p.view].buffer, p.region, writes) for p in parts]
                case Drop():
                    buffer = program.buffers[item.buffer]
                    found = [(rank, item.buffer, Region(0, buffer.rows, 0, buffer.cols), True)]
            for owner, buffer_id, region, writes in found:
                if region.rows and region.cols:
                    for replay in range(replays):
                        yield Access(Step(rank, replay, number), owner, buffer_id, region, writes)


def _clusters(plan: Plan) -> list[int]:
    """For each target, the number of the cluster of targets whose bytes meet, directly or through others."""
    cluster = list(range(len(plan.targets)))
    edge = -1
    previous = 0
    for number in sorted(range(len(plan.targets)), key=lambda n: plan.targets[n].offset):
        target = plan.targets[number]
        if target.offset < edge:
            cluster[number] = cluster[previous]
        edge = max(edge, target.offset + target.nbytes)
        previous = number
    return cluster


def _meet(a: Region, b: Region) -> bool:
    rows = a.row < b.row + b.rows and b.row < a.row + a.rows
    return rows and a.col < b.col + b.cols and b.col < a.col + a.cols


class _Bytes:
    """Whether regions of different targets of one rank meet: compared row by row, since their pitches differ."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.meet = cache(self._compare)

    def rows(self, owner: int, buffer: int, region: Region) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int]:
        """The first byte of every row of a region, ascending, and a row's length in bytes."""
        found, item = self.plan.ranks[owner].buffers[buffer], self.plan.ranks[owner].buffers[buffer].dtype.itemsize
        batches = np.arange(found.batch, dtype=np.int64)[:, None] * found.rows
        lines = batches + np.arange(region.row, region.row + region.rows, dtype=np.int64)[None, :]
        starts = self.plan.targets[buffer].offset + (lines * found.cols + region.col) * item
        return starts.reshape(-1), region.cols * item

    def _compare(self, owner: int, one: int, first: Region, two: int, second: Region) -> bool:
        starts, length = self.rows(owner, one, first)
        others, other_length = self.rows(owner, two, second)
        following = np.searchsorted(others, starts, side="right")
        after = np.append(others, np.iinfo(np.int64).max)[following] < starts + length
        before = np.insert(others, 0, np.iinfo(np.int64).min // 2)[following] + other_length > starts
        return bool((after | before).any())


def _pairs(plan: Plan, order: Order, group: list[Access], bytes_of: _Bytes) -> Iterator[tuple[Access, Access]]:
    """The unordered conflicting pairs of accesses to one piece of memory."""
    begins = np.array([order.begin[a.step] for a in group])
    ends = np.array([order.end[a.step] for a in group])
    known = order.position[ends][:, None] <= order.clocks[begins][:, order.chain[ends]].T
    unordered = ~(known | known.T)
    writes = np.array([a.writes for a in group])
    unordered &= writes[:, None] | writes[None, :]
    if not unordered.any():
        return
    for index, other in np.argwhere(np.triu(unordered, 1)):
        one, two = group[index], group[other]
        if one.step == two.step:
            continue  # an instruction orders its own accesses
        if one.buffer == two.buffer:
            meets = _meet(one.region, two.region)
        else:
            meets = bytes_of.meet(one.owner, one.buffer, one.region, two.buffer, two.region)
        if meets:
            yield one, two


def _finding(plan: Plan, one: Access, two: Access) -> Diagnostic:
    buffer = plan.ranks[one.owner].buffers[one.buffer]
    is_target = one.buffer < len(plan.targets)
    dropped = any(isinstance(plan.ranks[a.step.rank].instructions[a.step.number], Drop) for a in (one, two))
    if one.step.replay != two.step.replay:
        code, when = "E303", f"between replay {one.step.replay} and replay {two.step.replay}"
    else:
        code, when = "E301" if is_target else "E302", "within a replay"
    if dropped:
        code = "E304"
    words = [f"{'write' if a.writes else 'read'} of {_words(a.region)} by {name(plan, a.step)}" for a in (one, two)]
    hint = (
        "let an exchange lie between them: more buffers, or a gather before the next send"
        if is_target
        else "let the second wait for an event that is recorded after the first"
    )
    return Diagnostic(
        code,
        f"nothing orders two accesses to {buffer.name} of rank {one.owner}, {when}",
        place(plan, two.step) or place(plan, one.step),
        f"an order between {words[0]} and {words[1]}",
        "none",
        hint,
    )


def _words(region: Region) -> str:
    return f"rows {region.row}:{region.row + region.rows}, columns {region.col}:{region.col + region.cols}"


def races(plan: Plan, order: Order) -> tuple[list[Diagnostic], int]:
    """The races, a few of each memory, and how many accesses were compared."""
    clusters = _clusters(plan)
    groups: dict[tuple[int, bool, int], list[Access]] = defaultdict(list)
    total = 0
    for access in accesses(plan, order.replays):
        is_target = access.buffer < len(plan.targets)
        groups[access.owner, is_target, clusters[access.buffer] if is_target else access.buffer].append(access)
        total += 1
    bytes_of = _Bytes(plan)
    found: list[Diagnostic] = []
    for (_, is_target, _), group in groups.items():
        if not is_target:
            found += _after_drop(plan, order, group)
        else:
            found += _overwritten(plan, order, group, bytes_of)
        per_code: dict[str, int] = defaultdict(int)
        for one, two in _pairs(plan, order, group, bytes_of):
            finding = _finding(plan, one, two)
            per_code[finding.code] += 1
            if per_code[finding.code] <= MAX_FINDINGS:
                found.append(finding)
    return found, total


def _overwritten(plan: Plan, order: Order, group: list[Access], bytes_of: _Bytes) -> Iterator[Diagnostic]:
    """Reads of a target whose bytes another target's write has replaced since they were written. No race need be in
    it: targets may share bytes only while neither holds what is still to be read."""
    if len({access.buffer for access in group}) < 2:
        return
    writes = [access for access in group if access.writes]
    ends = np.array([order.end[w.step] for w in writes])
    begins = np.array([order.begin[w.step] for w in writes])
    chains, positions = order.chain[ends], order.position[ends]
    known = positions[:, None] <= order.clocks[begins][:, chains].T
    buffers = np.array([w.buffer for w in writes])
    for read in (access for access in group if not access.writes):
        done = order.clocks[order.begin[read.step], chains] >= positions
        latest: dict[tuple[int, Region], int] = {}  # of each sender and region, whose writes are ordered
        for index in map(int, np.flatnonzero(done & (buffers == read.buffer))):
            key = (writes[index].step.rank, writes[index].region)
            if key not in latest or positions[index] > positions[latest[key]]:
                latest[key] = index
        for index in latest.values():
            source = writes[index]
            later = done & (buffers != read.buffer) & np.logical_not(known[:, index])
            for other in map(int, np.flatnonzero(later)):
                late = writes[other]
                if bytes_of.meet(read.owner, source.buffer, source.region, late.buffer, late.region):
                    yield Diagnostic(
                        "E306",
                        f"{plan.ranks[read.owner].buffers[read.buffer].name} of rank {read.owner} is overwritten "
                        "before it is read",
                        place(plan, late.step),
                        f"{name(plan, late.step)} after {name(plan, read.step)}",
                        "before it, into the same bytes",
                        "place the two targets apart",
                    )
                    return


def _after_drop(plan: Plan, order: Order, group: list[Access]) -> Iterator[Diagnostic]:
    """Uses of a buffer that come after it was dropped in the same replay."""
    drops = [a for a in group if isinstance(plan.ranks[a.step.rank].instructions[a.step.number], Drop)]
    for drop in drops:
        for other in group:
            if other.step.replay == drop.step.replay and other is not drop and order.before(drop.step, other.step):
                yield Diagnostic(
                    "E304",
                    f"{plan.ranks[drop.owner].buffers[drop.buffer].name} of rank {drop.owner} is used after its drop",
                    place(plan, other.step),
                    f"{name(plan, other.step)} before {name(plan, drop.step)}",
                    "after it",
                    "drop it after its last use",
                )
