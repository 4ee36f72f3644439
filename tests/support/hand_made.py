"""Small plans written by hand, instruction by instruction. Nothing here decides an order: whoever writes a plan does.

Every rank makes tensors, sends them to its group and reads what it was sent. An op that moves data gives each member
the rows of all members, one below the other, as an ``all_gather`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from stepgraph.planner.plan import (
    ALIGNMENT,
    Axis,
    Buffer,
    Collective,
    Drop,
    DType,
    Exchange,
    ExchangeKind,
    Flag,
    Instruction,
    Op,
    Part,
    Plan,
    Protocol,
    RankProgram,
    Record,
    Region,
    Reset,
    Run,
    Send,
    Signal,
    Source,
    Target,
    View,
    Wait,
    WaitEvent,
)
from stepgraph.planner.plan_check import check_plan

COLS = 2


@dataclass(frozen=True, slots=True)
class Moving:
    """An op that moves data, and the exchange that closes it."""

    op: int
    exchange: int
    target: int


@dataclass
class Draft:
    """A plan in the making: tables that all ranks share, and a program a rank."""

    rows: tuple[int, ...]
    """What each rank sends; a rank may have none."""
    streams: tuple[str, ...] = ("compute", "copy")
    groups: tuple[tuple[int, ...], ...] = ()
    ops: list[Op] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """The first flag slot of each exchange; a slot a writer."""
    first_slot: int = 0
    """Below are the flag slots of other plans."""
    one_word: set[int] = field(default_factory=set)
    """Exchanges whose writers all use the first slot."""
    targets: list[tuple[str, int]] = field(default_factory=list)
    """(name, group)."""

    def __post_init__(self) -> None:
        self.groups = self.groups or (tuple(range(len(self.rows))),)
        self.ranks = [Rank(self, rank) for rank in range(len(self.rows))]

    def target(self, name: str, group: int = 0) -> int:
        """Symmetric memory for the rows of a group. Targets come before local tensors."""
        assert all(not rank.local for rank in self.ranks)
        self.targets.append((name, group))
        return len(self.targets) - 1

    def op(self, kind: str, name: str) -> int:
        self.ops.append(Op(kind, name, None, 1, (), (name,), ()))
        return len(self.ops) - 1

    def exchange(self, name: str, group: int = 0, protocol: Protocol | None = Protocol.MEMOP, op: int = -1) -> int:
        """A handshake, or a collective where ``protocol`` is None; by default it closes an op of its own."""
        kind = ExchangeKind.COLLECTIVE if protocol is None else ExchangeKind.HANDSHAKE
        closed = self.op("barrier", name) if op < 0 else op
        self.exchanges.append(Exchange(kind, group, name, closed, protocol))
        self.slots.append(self.first_slot + len(self.slots) * len(self.rows))
        return len(self.exchanges) - 1

    def move(self, name: str, target: int, protocol: Protocol | None = Protocol.MEMOP) -> Moving:
        """An op that fills ``target`` from all members of its group."""
        op = self.op("all_gather", name)
        return Moving(op, self.exchange(name, self.targets[target][1], protocol, op), target)

    def slot(self, exchange: int, writer: int) -> int:
        return self.slots[exchange] + (0 if exchange in self.one_word else writer)

    def members(self, exchange: int) -> tuple[int, ...]:
        return self.groups[self.exchanges[exchange].group]

    def below(self, group: int, rank: int) -> Region:
        """Where the rows of a member lie in a target."""
        members = self.groups[group]
        first = sum(self.rows[member] for member in members[: members.index(rank)])
        return Region(first, self.rows[rank], 0, COLS)

    def plan(self, name: str = "hand-made") -> Plan:
        """The plan, whole in itself: every reference leads somewhere."""
        targets: list[Target] = []
        for title, group in self.targets:
            size = sum(self.rows[member] for member in self.groups[group]) * COLS * DType.FLOAT32.itemsize
            offset = -(-(targets[-1].offset + targets[-1].nbytes) // ALIGNMENT) * ALIGNMENT if targets else 0
            targets.append(Target(title, offset, size))
        plan = Plan(
            name=name,
            source=Source("hand-made", "", (), "", ""),
            dtype=DType.FLOAT32,
            mesh=(Axis("ulysses", len(self.rows)),),
            transport="auto",
            groups=self.groups,
            streams=self.streams,
            inputs=(),
            outputs=(),
            ops=tuple(self.ops),
            exchanges=tuple(self.exchanges),
            targets=tuple(targets),
            states=(),
            arena_bytes=max((t.offset + t.nbytes for t in targets), default=0),
            arena_lower_bound=0,
            flag_slots=max(self.slots, default=0) + len(self.rows),
            dependencies=0,
            ranks=tuple(rank.program() for rank in self.ranks),
        )
        problem = check_plan(plan)
        assert problem is None, problem
        return plan


class Rank:
    """The program of one rank, instruction by instruction. Streams go by their number; the first is the origin."""

    def __init__(self, draft: Draft, rank: int) -> None:
        self.draft, self.rank = draft, rank
        self.local: list[Buffer] = []
        self.views: list[View] = []
        self.items: list[Instruction] = []
        self.events = 0

    def program(self) -> RankProgram:
        return RankProgram((*self._targets(), *self.local), tuple(self.views), tuple(self.items))

    def _targets(self) -> list[Buffer]:
        rows = [sum(self.draft.rows[member] for member in self.draft.groups[group]) for _, group in self.draft.targets]
        return [
            Buffer(name, DType.FLOAT32, 1, size, COLS, 0)
            for (name, _), size in zip(self.draft.targets, rows, strict=True)
        ]

    def view(self, buffer: int, region: Region) -> int:
        self.views.append(View(buffer, region, (1, region.rows, region.cols)))
        return len(self.views) - 1

    def whole(self, target: int) -> int:
        """A view of all of a target."""
        return self.view(target, Region(0, self._targets()[target].rows, 0, COLS))

    def make(self, stream: int, op: int, reads: Sequence[int] = (), name: str = "made") -> int:
        """A stage that makes a tensor of the rank's rows; gives the view of it."""
        rows = self.draft.rows[self.rank]
        self.local.append(Buffer(name, DType.FLOAT32, 1, rows, COLS, stream))
        made = self.view(len(self.draft.targets) + len(self.local) - 1, Region(0, rows, 0, COLS))
        self.items.append(Run(stream, op, tuple(reads), (made,)))
        return made

    def send(self, stream: int, moving: Moving, source: int, to: Iterable[int] | None = None) -> None:
        """The rows of ``source`` into the target of each member, or of ``to`` alone."""
        group = self.draft.exchanges[moving.exchange].group
        for peer in self.draft.groups[group] if to is None else to:
            place = self.draft.below(group, self.rank)
            if place.rows:
                cut = self.views[source].region
                sent = Send(stream, moving.op, moving.exchange, source, cut, peer, moving.target, place)
                self.items.append(sent)

    def collective(self, stream: int, moving: Moving, source: int) -> None:
        """As ``send`` and a handshake, by one exchange of the process group."""
        group, into = self.draft.exchanges[moving.exchange].group, self.whole(moving.target)
        members = [member for member in self.draft.groups[group] if self.draft.rows[member]]
        gone = [Part(peer, source, self.views[source].region) for peer in self.draft.groups[group]]
        outgoing = tuple(gone) if self.draft.rows[self.rank] else ()
        incoming = tuple(Part(peer, into, self.draft.below(group, peer)) for peer in members)
        self.items.append(Collective(stream, moving.op, moving.exchange, False, outgoing, incoming))

    def _others(self, exchange: int) -> list[int]:
        return [member for member in self.draft.members(exchange) if member != self.rank]

    def _own(self, exchange: int) -> tuple[Flag, ...]:
        return tuple(Flag(peer, self.draft.slot(exchange, peer)) for peer in self._others(exchange))

    def signal(self, stream: int, exchange: int) -> None:
        slot = self.draft.slot(exchange, self.rank)
        self.items.append(Signal(stream, exchange, tuple(Flag(peer, slot) for peer in self._others(exchange))))

    def wait(self, stream: int, exchange: int) -> None:
        self.items.append(Wait(stream, exchange, self._own(exchange)))

    def reset(self, stream: int, exchange: int) -> None:
        if self.draft.exchanges[exchange].protocol is not Protocol.KERNEL:
            self.items.append(Reset(stream, exchange, self._own(exchange)))

    def handshake(self, stream: int, exchange: int) -> None:
        self.signal(stream, exchange)
        self.wait(stream, exchange)
        self.reset(stream, exchange)

    def after(self, stream: int, other: int) -> None:
        """What follows on ``stream`` comes after what is on ``other`` so far."""
        if stream != other:
            self.items += [Record(other, self.events), WaitEvent(stream, self.events)]
            self.events += 1

    def drop(self, stream: int, view: int) -> None:
        self.items.append(Drop(stream, self.views[view].buffer))


def at_one_place(plan: Plan, one: int, two: int) -> Plan:
    """The plan with target ``two`` at the offset of target ``one``."""
    moved = replace(plan.targets[two], offset=plan.targets[one].offset)
    return replace(plan, targets=(*plan.targets[:two], moved, *plan.targets[two + 1 :]))
