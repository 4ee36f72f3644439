"""No two accesses to the same bytes, one of them a write, are unordered; and what is read is what was written for it.

Goes once through everything in an order that keeps all edges, and remembers for every cell of memory its last write and
the last read of each chain since. That is enough: as long as no race was found, earlier accesses come before those.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Collective, Drop, Instruction, Load, Plan, Region, Run, Send, Store, Wait
from stepgraph.planner.verify.cells import Cells, Place, cells_of
from stepgraph.planner.verify.counterexample import Unordered
from stepgraph.planner.verify.findings import MAX_FINDINGS, name_in, op_of, place
from stepgraph.planner.verify.order import Order, Step
from stepgraph.planner.verify.symmetry import Reduction


def accesses(plan: Plan, rank: int, item: Instruction) -> list[tuple[Place, bool]]:
    """What an instruction reads, and then what it writes, wherever it is."""
    views = plan.ranks[rank].views
    match item:
        case Load():
            view = views[item.view]
            return [((rank, view.buffer, view.region), True)]
        case Store():
            view = views[item.view]
            return [((rank, view.buffer, view.region), False)]
        case Run():
            reads = [((rank, views[number].buffer, views[number].region), False) for number in item.inputs]
            return reads + [((rank, views[number].buffer, views[number].region), True) for number in item.outputs]
        case Send():
            source = (rank, views[item.source].buffer, item.source_region)
            return [(source, False), ((item.peer, item.target, item.region), True)]
        case Collective():
            gone = [((rank, views[part.view].buffer, part.region), False) for part in item.outgoing]
            return gone + [((rank, views[part.view].buffer, part.region), True) for part in item.incoming]
        case Drop():
            buffer = plan.ranks[rank].buffers[item.buffer]
            return [((rank, item.buffer, Region(0, buffer.rows, 0, buffer.cols)), True)]
    return []


_Makers = tuple[int, ...] | None
"""The ops that make what is read; None where the plan does not say, and for a write."""


def _makers(plan: Plan, item: Instruction) -> list[_Makers]:
    """Of what an instruction reads, in the order of ``accesses``; nothing where the plan does not say."""
    op = op_of(plan, item)
    named: list[_Makers] = [] if op is None else [operand.made_by for operand in plan.ops[op].inputs]
    if isinstance(item, Collective) and named:  # its tensors are the views, in the order of first mention
        tensors = list(dict.fromkeys(part.view for part in item.outgoing))
        return [named[min(tensors.index(part.view), len(named) - 1)] for part in item.outgoing]
    return named if isinstance(item, Run | Send | Store | Collective) else []


def _asked(plan: Plan, rank: int, item: Instruction, reduction: Reduction | None) -> list[tuple[Place, bool, _Makers]]:
    """The accesses that ``reduction`` asks for, or all: where, whether it writes, and the makers of what it reads."""
    touched = accesses(plan, rank, item)
    found = zip_longest(touched, _makers(plan, item)[: len(touched)])  # an edited plan may name more than is read
    return [(*access, makers) for access, makers in found if reduction is None or reduction.asks(*access[0][:2])]


@dataclass(slots=True)
class _Access:
    step: Step
    chain: int
    position: int
    """At which it is done."""
    time: int
    """In the sequence."""
    place: Place
    makers: _Makers


_Touches = list[list[list[tuple[Place, tuple[int, ...], bool, _Makers]]]]
"""Of a plan, by rank and instruction: where, the cells of it, whether it writes, and the makers of what it reads."""


def _waits(plan: Plan) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, program in enumerate(plan.ranks):
        for number, item in enumerate(program.instructions):
            if isinstance(item, Wait):
                found[rank, item.exchange].append(number)
    return found


def _fills(plan: Plan, touches: _Touches) -> dict[int, set[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    states = plan.state_buffers
    for program, of in zip(plan.ranks, touches, strict=True):
        for item, touched in zip(program.instructions, of, strict=True):
            op = op_of(plan, item)
            for (_, buffer, _), cells, writes, _ in touched:
                if writes and op is not None and buffer in states:
                    for cell in cells:
                        found[cell].add(op)
    return found


class _Walk:
    def __init__(self, order: Order, reduction: Reduction | None) -> None:
        self.order = order
        plans = list({id(plan): plan for plan in order.plans}.values())
        self.which = [next(number for number, one in enumerate(plans) if one is plan) for plan in order.plans]
        """By replay: the number of its plan among the different ones."""
        found = [
            [[_asked(plan, rank, item, reduction) for item in p.instructions] for rank, p in enumerate(plan.ranks)]
            for plan in plans
        ]
        asked = [dict.fromkeys(where for rank in plan for item in rank for where, *_ in item) for plan in found]
        self.states = [{state.buffer: state.name for state in plan.states} for plan in plans]
        """Of each different plan."""
        cells: Cells = cells_of(plans, asked)
        self.overlaps = cells.overlaps
        self.touches: list[_Touches] = [
            [[[(where, of.get(where, ()), w, made) for where, w, made in item] for item in rank] for rank in plan]
            for plan, of in zip(found, cells.of, strict=True)
        ]
        self.fills = [_fills(plan, of) for plan, of in zip(plans, self.touches, strict=True)]
        """By plan, for every cell of a state: the ops that write it."""
        self.waits = [_waits(plan) for plan in plans]
        """By plan: where each rank waits in each exchange."""
        self.written: dict[int, _Access] = {}
        """Of each cell."""
        self.reads: dict[int, dict[int, _Access]] = defaultdict(dict)
        """Of each cell since its last write, by chain."""
        self.stored: dict[int, _Access] = {}
        """Of each cell, where it was handed out last."""
        self.found: list[Diagnostic | Unordered] = []
        self.unseen: list[Unordered] = []
        """Missing orders of two writes, which come behind those that a read makes known: a run may not show them."""
        self.counts: Counter[tuple[str, int, int, bool]] = Counter()
        self.total = 0

    def run(self) -> None:
        order = self.order
        for time, step in enumerate(order.sequence):
            touches = self.touches[self.which[step.replay]][step.rank][step.number]
            if not touches:
                continue
            item = order.item(step)
            chain, at = step.rank * order.width + item.stream, order.at(step)
            clock = order.clocks[order.clock[step.rank][at]]
            position = order.started[step.rank][at] + isinstance(item, Collective)
            self.total += len(touches)
            for where, cells, writes, makers in touches:
                access = _Access(step, chain, position, time, where, makers)
                for cell in cells:
                    self.touch(cell, access, writes, clock)
        self.found += self.unseen

    def touch(self, cell: int, access: _Access, writes: bool, clock: Sequence[int]) -> None:
        chain, others = access.chain, self.overlaps.get(cell, ())
        last = self.written.get(cell)
        ordered = last is None or last.chain == chain or clock[last.chain] >= last.position
        if last is not None and not ordered:
            self.race(last, True, access, writes)
        for other in others:
            near = self.written.get(other)
            if near is not None and near.chain != chain and clock[near.chain] < near.position:
                self.race(near, True, access, writes)
        if not writes:
            if ordered:
                self.fresh(cell, last, access, others)
            self.reads[cell][chain] = access
            if isinstance(self.order.item(access.step), Store):
                self.stored[cell] = access
            return
        stored = self.stored.get(cell)
        if stored is not None and stored.step.replay == access.step.replay:
            self.handed_out(stored, access)
        for near_cell in (cell, *others):
            for reader, read in self.reads[near_cell].items():
                if reader != chain and clock[reader] < read.position:
                    self.race(read, False, access, True)
        if last is not None and ordered and self.is_target(access) and self.state(access) is None:
            self.unread(cell, last, access)
        self.reads[cell].clear()
        if last is None or ordered or not isinstance(self.order.item(last.step), Drop):
            self.written[cell] = access  # else a drop may come behind this, and what reads it is to be told of that

    def fresh(self, cell: int, last: _Access | None, access: _Access, others: tuple[int, ...]) -> None:
        """What is read was written in this replay, or is of a state that it leaves alone before, and was not replaced
        since."""
        state = self.state(access)
        kept = state is not None and self.fills[self.which[access.step.replay]][cell].isdisjoint(access.makers or ())
        if not kept and (last is None or last.step.replay < access.step.replay):
            self.note(
                "E307",
                access,
                f"{self.buffer(access)} is read before it is written",
                f"a write of {_words(access.place[2])} before {name_in(self.order, access.step)}",
                "none in its replay",
                "send, load or compute every part of it first",
            )
            return
        if last is not None and access.makers is not None and last.step.replay == access.step.replay:
            self.meant(last, access, access.makers)
        if last is not None and last.step.replay == access.step.replay:
            self.delivered(last, access)
        for other in others:
            late = self.written.get(other)
            if late is None or (state is not None and self.state(late) == state):
                continue  # the latter is what another plan has left in it
            if state is None and late.step.replay != access.step.replay:
                continue  # it races with this replay's own write, which is told
            if last is None or late.time > last.time:
                self.note(
                    "E306",
                    access,
                    f"{self.buffer(access)} is overwritten before it is read",
                    f"{name_in(self.order, late.step)} after {name_in(self.order, access.step)}",
                    f"before it, into {self.buffer(late)}, which shares {self.shared(late, access)}",
                    "place the two targets apart",
                )

    def meant(self, last: _Access, access: _Access, makers: tuple[int, ...]) -> None:
        """What is read is what the op's operand names."""
        plan, writer = self.plan(access), self._op(last)
        if not isinstance(writer, int) or writer in makers:
            return
        early = not makers or writer < max(makers)
        wanted = ", ".join(plan.ops[maker].label for maker in makers) or "nothing of this step"
        self.note(
            "E307" if early and makers else "E306",
            access,
            f"{self.buffer(access)} is read "
            + ("before what is meant is written" if early and makers else "after what is meant was overwritten"),
            f"{name_in(self.order, access.step)} reads what is made by {wanted}",
            f"what {name_in(self.order, last.step)} has left there",
            "carry out the ops of a rank in the order in which they need one another, each once",
        )

    def handed_out(self, store: _Access, access: _Access) -> None:
        """The caller reads an output when the replay is over."""
        if isinstance(self.order.item(access.step), Drop):
            return
        self.note(
            "E306",
            access,
            f"{self.buffer(store)} is an output, and changed after it was handed out",
            f"{name_in(self.order, access.step)} before {name_in(self.order, store.step)}",
            "behind it",
            "hand the output out when it is done",
        )

    def delivered(self, last: _Access, access: _Access) -> None:
        """What was sent is read behind the exchange that its copy names: some transports bring it no sooner."""
        item, (rank, replay) = self.order.item(last.step), (access.step.rank, access.step.replay)
        if not isinstance(item, Send):
            return
        waits = (Step(rank, replay, number) for number in self.waits[self.which[replay]].get((rank, item.exchange), ()))
        early = next((wait for wait in waits if not self.order.before(wait, access.step)), None)
        if early is not None:
            self.note(
                "E410",
                access,
                f"{self.buffer(access)} is read before the exchange that closes its copy",
                f"{name_in(self.order, early)} before {name_in(self.order, access.step)}",
                "no such order",
                "read it behind that exchange, or let the copy name the one that the reader waits for",
            )

    def unread(self, cell: int, last: _Access, access: _Access) -> None:
        """What was sent is read before something else is sent to the same place."""
        if self.reads[cell] or last.step == access.step or self._op(last) == self._op(access):
            return
        self.note(
            "E306",
            access,
            f"{self.buffer(access)} is overwritten before it is read",
            f"a read of what {name_in(self.order, last.step)} has sent before {name_in(self.order, access.step)}",
            "none",
            "let what is sent be read first, or send it elsewhere",
        )

    def _op(self, access: _Access) -> object:
        return getattr(self.order.item(access.step), "op", None)

    def plan(self, access: _Access) -> Plan:
        return self.order.plans[access.step.replay]

    def state(self, access: _Access) -> str | None:
        """The name of the state that is touched."""
        return self.states[self.which[access.step.replay]].get(access.place[1])

    def is_target(self, access: _Access) -> bool:
        return access.place[1] < len(self.plan(access).targets)

    def race(self, one: _Access, one_writes: bool, two: _Access, two_writes: bool) -> None:
        if self._turn(two) < self._turn(one):
            one, one_writes, two, two_writes = two, two_writes, one, one_writes
        is_target = self.is_target(two)
        if one.step.replay != two.step.replay:
            first, second = (self.order.titles[access.step.replay] for access in (one, two))
            code, when = "E303", f"between {first} and {second}"
        else:
            code, when = "E301" if is_target else "E302", "within a replay"
        if any(isinstance(self.order.item(a.step), Drop) for a in (one, two)):
            code = "E304"
        pairs = ((one, one_writes), (two, two_writes))
        apart = self.buffer(one) != self.buffer(two)  # two targets that share bytes of the arena
        words = [
            f"{'write' if w else 'read'} of {_words(a.place[2])}{f' of {self.buffer(a)}' if apart else ''} by "
            f"{name_in(self.order, a.step)}"
            for a, w in pairs
        ]
        where = self.buffer(one) + (f" and {self.buffer(two)}, which share {self.shared(one, two)}" if apart else "")
        self.note(
            code,
            two,
            f"nothing orders two accesses to {where}, {when}",
            f"an order between {words[0]} and {words[1]}",
            "none: the second can run before the first",
            self.hint(one, one_writes, two),
            one,
            one_writes and two_writes,
        )

    def shared(self, one: _Access, two: _Access) -> str:
        """The bytes of the arena that two targets have in common."""
        found = [self.plan(access).targets[access.place[1]] for access in (one, two)]
        first, end = max(t.offset for t in found), min(t.offset + t.nbytes for t in found)
        return f"bytes {first} to {end} of the arena"

    def hint(self, one: _Access, one_writes: bool, two: _Access) -> str:
        if one.step.rank == two.step.rank:
            return "let the second wait for an event that is recorded after the first"
        if one_writes and one.step.replay == two.step.replay and self.buffer(one) == self.buffer(two):
            return "let the second wait for an event that is recorded after the wait of the exchange that brings it"
        return "let an exchange lie between them: more buffers, or a gather before the next send"

    def _turn(self, access: _Access) -> tuple[int, float]:
        """When an access is meant to come: by replay, then by the schedule; outputs and drops come last."""
        item = self.order.item(access.step)
        op = op_of(self.plan(access), item)
        last = -1.0 if isinstance(item, Load) else math.inf
        return access.step.replay, last if op is None else op

    def buffer(self, access: _Access) -> str:
        owner, number, _ = access.place
        return f"{self.plan(access).ranks[owner].buffers[number].name} of rank {owner}"

    def note(
        self,
        code: str,
        at: _Access,
        message: str,
        expected: str,
        got: str,
        hint: str,
        other: _Access | None = None,
        unseen: bool = False,
    ) -> None:
        owner, number, _ = at.place
        self.counts[code, owner, number, unseen] += 1
        if self.counts[code, owner, number, unseen] <= MAX_FINDINGS:
            where = place(self.plan(at), at.step) or (place(self.plan(other), other.step) if other else None)
            found = Diagnostic(code, message, where, expected, got, hint)
            if other is None:
                self.found.append(found)
            else:
                (self.unseen if unseen else self.found).append(Unordered(found, other.step, at.step))


def _words(region: Region) -> str:
    return f"rows {region.row}:{region.row + region.rows}, columns {region.col}:{region.col + region.cols}"


def races(order: Order, reduction: Reduction | None = None) -> tuple[list[Diagnostic | Unordered], int]:
    """The races, a few of each memory, and how many accesses were looked at: what ``reduction`` asks for, or all."""
    walk = _Walk(order, reduction)
    walk.run()
    return _by_cause(walk.found), walk.total


def _by_cause(found: Sequence[Diagnostic | Unordered]) -> list[Diagnostic | Unordered]:
    """Missing orders first: data that is read too early, or overwritten too early, often only follows from one."""
    missing = [one for one in found if isinstance(one, Unordered)]
    others = [one for one in found if not isinstance(one, Unordered)]
    if missing:
        hint = "mend the missing order first, which may be all that is wrong; else "
        others = [replace(one, hint=hint + one.hint) for one in others]
    return [*missing, *others]
