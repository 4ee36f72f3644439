"""Memory of the cpu device: arenas, flag pages and local buffers of all ranks, with their shadows and findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.planner.plan import Plan, Region, View
from stepgraph.runtime.movement import Moved, endings, moved_right, state_rows, widths
from stepgraph.runtime.shadow import Conflict, Ints, Shadow

POISON = 0xFF
"""Byte that fills memory which nobody has written: NaN in every floating type."""
MAX_FINDINGS = 100


@dataclass(frozen=True, slots=True)
class Access:
    """An instruction as a finding names it."""

    rank: int
    stream: str
    instruction: int
    what: str
    writes: bool

    def __str__(self) -> str:
        verb = "write" if self.writes else "read"
        return f"{verb} by rank {self.rank}, stream {self.stream}, instruction {self.instruction}, {self.what}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to the same bytes, one of them a write, that nothing orders."""

    rank: int
    """Whose memory it is."""
    buffer: str
    earlier: Access
    later: Access

    def __str__(self) -> str:
        return f"race on {self.buffer} of rank {self.rank}: {self.earlier}; {self.later}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something else that must not happen; ``kind`` is a word for programs."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass
class Report:
    """What the cpu device has seen so far."""

    races: list[Race] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    movements_checked: int = 0
    movement_exact: bool = True
    replays: int = 0
    """Of every rank."""

    @property
    def ok(self) -> bool:
        return self.movement_exact and not self.races and not self.faults

    def fault(self, kind: str, message: str) -> None:
        if len(self.faults) < MAX_FINDINGS:
            self.faults.append(Fault(kind, message))


def bytes_of_rank(plans: Sequence[Plan], rank: int, chains: int) -> int:
    """What one rank takes: its arena, flags, and local buffers as if all were there at once, each with its shadow."""
    words = np.dtype(np.int32).itemsize * (3 + chains)  # an element's shadow
    unit = min((b.dtype.itemsize for plan in plans for b in plan.ranks[rank].buffers[: len(plan.targets)]), default=1)
    found = plans[0].arena_bytes * (1 + words // unit) + 8 * plans[0].flag_slots
    for plan in plans:
        for buffer in plan.ranks[rank].buffers[len(plan.targets) :]:
            found += buffer.nbytes + words * (buffer.nbytes // buffer.dtype.itemsize)
    return found


class RankBlock:
    """What all plans of a set share on one rank: the arena, in elements of ``unit`` bytes, and the page of flags."""

    def __init__(self, plans: Sequence[Plan], rank: int, chains: int) -> None:
        targets = [buffer for plan in plans for buffer in plan.ranks[rank].buffers[: len(plan.targets)]]
        self.unit = min((buffer.dtype.itemsize for buffer in targets), default=1)
        self.arena = torch.full((plans[0].arena_bytes,), POISON, dtype=torch.uint8)
        self.flags = [0] * plans[0].flag_slots
        self.shadow = Shadow.of((plans[0].arena_bytes // self.unit,), chains)
        names = dict.fromkeys(state.name for plan in plans for state in plan.states)
        self.labels = {name: -1 - number for number, name in enumerate(names)}
        """What tells states from each other and from buffers of single plans: all plans have them in common."""
        self.states: dict[str, tuple[Tensor, Shadow]] = {}
        """Those that only this rank writes, by name."""
        for plan in plans:
            for state in plan.states:
                buffer = plan.ranks[rank].buffers[state.buffer]
                shape = (buffer.batch, buffer.rows, buffer.cols)
                if state.buffer >= len(plan.targets) and state.name not in self.states:
                    self.states[state.name] = (
                        torch.zeros(shape, dtype=torch_dtype(buffer.dtype)),
                        Shadow.of(shape, chains),
                    )


class RankMemory:
    """What one rank owns under one plan. Targets are views of one arena, so that overlapping offsets really meet."""

    def __init__(self, plan: Plan, rank: int, chains: int, block: RankBlock, base: int) -> None:
        """``base`` tells buffers of this plan from those of others in the same arena."""
        self.plan, self.rank, self.base = plan, rank, base
        self.program = plan.ranks[rank]
        self.arena, self.flags, self.unit = block.arena, block.flags, block.unit
        self.tensors: dict[int, Tensor] = {}
        self.shadows: list[Shadow] = []
        self.dropped: set[int] = set()
        self.states = {state.buffer: state.name for state in plan.states}
        self.labels = {state.buffer: block.labels[state.name] for state in plan.states}
        for index, buffer in enumerate(self.program.buffers):
            shape = (buffer.batch, buffer.rows, buffer.cols)
            if index < len(plan.targets):
                offset = plan.targets[index].offset
                raw = self.arena[offset : offset + buffer.nbytes]
                self.tensors[index] = raw.view(torch_dtype(buffer.dtype)).view(shape)
                wide = buffer.dtype.itemsize // self.unit
                self.shadows.append(block.shadow.part(offset // self.unit, (*shape[:2], shape[2] * wide)))
            elif index in self.states:
                self.tensors[index], shadow = block.states[self.states[index]]
                self.shadows.append(shadow)
            else:
                self.shadows.append(Shadow.of(shape, chains))
        self.reset_state()

    def label(self, buffer: int) -> int:
        """What tells a buffer from all others, those of other plans among them."""
        return self.labels.get(buffer, self.base + buffer)

    def reset_state(self) -> None:
        """Zero every state: nobody has written it."""
        for index in self.states:
            buffer = self.program.buffers[index]
            self.tensors[index].zero_()
            self.shadow(index, Region(0, buffer.rows, 0, buffer.cols)).forget()

    def _wide(self, buffer: int) -> int:
        """Shadow elements an element."""
        found = self.program.buffers[buffer]
        return found.dtype.itemsize // self.unit if buffer < len(self.plan.targets) else 1

    def shadow(self, buffer: int, region: Region) -> Shadow:
        wide = self._wide(buffer)
        return self.shadows[buffer].region(
            slice(region.row, region.row + region.rows), slice(region.col * wide, (region.col + region.cols) * wide)
        )

    def region(self, buffer: int, region: Region) -> Tensor:
        """(batch, rows, cols) of a buffer; poison where nothing has been written yet."""
        found = self.tensors[buffer] if buffer in self.tensors else self.allocate(buffer)
        return found[:, region.row : region.row + region.rows, region.col : region.col + region.cols]

    def view(self, view: View) -> Tensor:
        return self.region(view.buffer, view.region).view(view.shape)

    def allocate(self, buffer: int, result: Tensor | None = None) -> Tensor:
        """Memory for a local buffer: poisoned, or what a stage has made. A state stays where it is."""
        found = self.program.buffers[buffer]
        shape = (found.batch, found.rows, found.cols)
        if result is None:
            result = torch.full(shape, float("nan"), dtype=torch_dtype(found.dtype))
        if buffer in self.states:
            return self.tensors[buffer].copy_(result)
        # What a stage gives may be its own, and is poisoned later.
        self.tensors[buffer] = result.clone(memory_format=torch.contiguous_format)
        self.dropped.discard(buffer)
        return self.tensors[buffer]

    def forget_local(self) -> None:
        """A replay starts with targets and states, and nothing else."""
        kept = {*range(len(self.plan.targets)), *self.states}
        for buffer in [number for number in self.tensors if number not in kept]:
            del self.tensors[buffer]
        self.dropped.clear()

    def drop(self, buffer: int) -> None:
        self.dropped.add(buffer)
        if buffer in self.tensors:
            self.tensors[buffer].fill_(float("nan"))


@dataclass
class Unread:
    """What exchanges have brought to one buffer since it was last read: each op, with its exchange and replay. States
    are known to all plans, and an entry says whose it is."""

    found: dict[tuple[int, Moved], tuple[Movements, int, int]] = field(default_factory=dict)
    """(number of the plan, op) -> (movements of the plan, exchange, replay)."""


class Movements:
    """Holds what every exchange moved against what the members' sources held when they were sent, bit for bit."""

    def __init__(
        self,
        plan: Plan,
        memories: list[RankMemory],
        report: Report,
        unread: dict[tuple[int, int], Unread],
    ) -> None:
        """``unread`` is that of all plans, by rank and label of a buffer."""
        self.plan, self.memories, self.report, self.unread = plan, memories, report, unread
        self.sent: dict[tuple[Moved, int, int], Tensor] = {}
        """(op, rank, replay) -> the source view when it was first read."""
        self.ends, self.widths = endings(plan), widths(plan)
        self.rows = state_rows(plan)

    def note(self, moved: Moved, rank: int, replay: int, source: Tensor) -> None:
        if (moved, rank, replay) not in self.sent:
            self.sent[moved, rank, replay] = source.clone()
            self.sent.pop((moved, rank, replay - 2), None)

    def over(self, exchange: int, rank: int, replay: int) -> None:
        """An exchange is over on a rank: what it closes there is to be right when it is read."""
        for moved, buffer in self.ends.get((exchange, rank), {}).items():
            found = self._unread(rank, buffer).found
            rows = self.rows.get(moved)
            if rows is not None:  # what nobody has read of a state is gone where something else has come over it
                for key, (owner, _, _) in list(found.items()):
                    other = owner.rows[key[1]]
                    if rows.start < other.stop and other.start < rows.stop:
                        del found[key]
            found[id(self), moved] = (self, exchange, replay)

    def _unread(self, rank: int, buffer: int) -> Unread:
        return self.unread.setdefault((rank, self.memories[rank].label(buffer)), Unread())

    def made_anew(self, rank: int, buffer: int) -> None:
        """A stage has replaced a state: what was sent into it before is gone, read or not."""
        self._unread(rank, buffer).found.clear()

    def read(self, rank: int, buffer: int) -> None:
        """Before the first read of what exchanges brought: it holds what the group sent."""
        found = self._unread(rank, buffer).found
        for (_, moved), (owner, exchange, replay) in found.items():
            owner.check(moved, exchange, rank, replay)
        found.clear()

    def check(self, moved: Moved, exchange: int, rank: int, replay: int) -> None:
        """Whether what an exchange has left on a rank is what the group sent."""
        by_rank = {member: self.sent.get((moved, member, replay)) for member in range(self.plan.world_size)}
        sent = {member: source for member, source in by_rank.items() if source is not None}
        got = self.memories[rank].tensors.get(self.ends[exchange, rank][moved])
        self.report.movements_checked += 1
        if got is None or not moved_right(self.plan, exchange, rank, moved, self.ends, sent, got, self.widths):
            self.report.movement_exact = False


def describe(
    conflict: Conflict, access: list[list[tuple[int, str]]], streams: tuple[str, ...]
) -> tuple[Access, Access]:
    """The two accesses of a conflict, from the history of every chain."""
    found = []
    for touch, writes in ((conflict.earlier, conflict.earlier_writes), (conflict.later, conflict.later_writes)):
        rank, stream = divmod(touch.chain, len(streams))
        instruction, what = access[touch.chain][touch.time - 1]
        found.append(Access(rank, streams[stream], instruction, what, writes))
    return found[0], found[1]


def fresh_clock(chains: int) -> Ints:
    return np.zeros(chains, np.int32)
