"""Plans with one thing wrong, judged twice: by the verifier, and by running them on the cpu device.

The two share no code. Where they disagree, one of them is wrong.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.kernels.stages import Stage
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import ALIGNMENT as GRAIN
from stepgraph.planner.plan import (
    Collective,
    Flag,
    Instruction,
    Load,
    Plan,
    Record,
    Reset,
    Run,
    Send,
    Signal,
    Wait,
    WaitEvent,
)
from stepgraph.planner.plan_check import check_plan
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.cpu import World
from stepgraph.runtime.inputs import NamedInputs, random_inputs
from stepgraph.runtime.session import Outputs, Session

REPLAYS = 3
SEEDS = 12
"""Interleavings that a mutant is run in before it passes for safe."""
RULES = frozenset({"E404", "E406", "E407", "E410"})
"""Codes that may refuse a plan in which nothing goes wrong on the cpu device: words that two handshakes share, one of
which is of no use, a member whose word nobody needs, an event that is recorded again before anything new has happened,
a copy that another exchange than its own covers."""
MAX_TRIES = 50
"""At a mutant of one kind, before it is left out: a plan may have nothing to change in that way."""


@dataclass(frozen=True, slots=True)
class Mutant:
    kind: str
    what: str
    """In words, with the rank and the instruction."""
    plan: Plan


def with_program(plan: Plan, rank: int, items: Sequence[Instruction]) -> Plan:
    ranks = list(plan.ranks)
    ranks[rank] = replace(ranks[rank], instructions=tuple(items))
    return replace(plan, ranks=tuple(ranks))


class _Change:
    """One random change of a plan; ``None`` where this draw leads nowhere."""

    def __init__(self, plan: Plan, chance: random.Random) -> None:
        self.plan, self.chance = plan, chance
        self.rank = chance.randrange(plan.world_size)
        self.items = list(plan.ranks[self.rank].instructions)

    def pick(self, *kinds: type) -> int | None:
        numbers = [number for number, item in enumerate(self.items) if isinstance(item, kinds)]
        return self.chance.choice(numbers) if numbers else None

    def drop(self, *kinds: type) -> Plan | None:
        number = self.pick(*kinds)
        if number is None:
            return None
        return with_program(self.plan, self.rank, self.items[:number] + self.items[number + 1 :])

    def drop_event(self) -> Plan | None:
        number = self.pick(Record)
        if number is None:
            return None
        record = self.items[number]
        assert isinstance(record, Record)
        kept = [i for i in self.items if not (isinstance(i, Record | WaitEvent) and i.event == record.event)]
        return with_program(self.plan, self.rank, kept)

    def move(self, *kinds: type) -> Plan | None:
        """An instruction some places earlier or later in the order of issue."""
        number = self.pick(*kinds)
        if number is None:
            return None
        rest = self.items[:number] + self.items[number + 1 :]
        to = min(max(0, number + self.chance.choice((-9, -4, -2, -1, 1, 2, 4, 9))), len(rest))
        return with_program(self.plan, self.rank, [*rest[:to], self.items[number], *rest[to:]])

    def drop_word(self) -> Plan | None:
        """One word of a signal, wait or reset."""
        number = self.pick(Signal, Wait, Reset)
        item = None if number is None else self.items[number]
        if number is None or not isinstance(item, Signal | Wait | Reset) or not item.flags:
            return None
        lost = self.chance.choice(item.flags)
        fewer = replace(item, flags=tuple(flag for flag in item.flags if flag != lost))
        return with_program(self.plan, self.rank, [*self.items[:number], fewer, *self.items[number + 1 :]])

    def swap(self) -> Plan | None:
        one, two = (self.chance.randrange(len(self.items)) for _ in range(2))
        if abs(one - two) > 12:
            two = min(one + 1, len(self.items) - 1)
        self.items[one], self.items[two] = self.items[two], self.items[one]
        return with_program(self.plan, self.rank, self.items)

    def other_stream(self) -> Plan | None:
        number = self.pick(Send, Run)
        if number is None:
            return None
        stream = self.chance.randrange(len(self.plan.streams))
        self.items[number] = replace(self.items[number], stream=stream)
        return with_program(self.plan, self.rank, self.items)

    def repeat(self, *kinds: type) -> Plan | None:
        """An instruction is there twice."""
        number = self.pick(*kinds)
        if number is None:
            return None
        to = min(number + self.chance.choice((1, 1, 3, 9)), len(self.items))
        return with_program(self.plan, self.rank, [*self.items[:to], self.items[number], *self.items[to:]])

    def shift_target(self) -> Plan | None:
        number = self.chance.randrange(max(1, len(self.plan.targets)))
        if not self.plan.targets:
            return None
        found = self.plan.targets[number]
        room = (self.plan.arena_bytes - found.nbytes) // GRAIN
        moved = replace(found, offset=GRAIN * self.chance.randint(0, max(0, room)))
        return replace(self.plan, targets=(*self.plan.targets[:number], moved, *self.plan.targets[number + 1 :]))

    def merge_slots(self) -> Plan | None:
        """Two handshakes of a group use the same words, on every rank."""
        handshakes = [n for n, exchange in enumerate(self.plan.exchanges) if exchange.protocol is not None]
        if len(handshakes) < 2:
            return None
        one, two = self.chance.sample(handshakes, 2)
        words: dict[tuple[int, int, str, int], int] = {}
        for rank, program in enumerate(self.plan.ranks):
            for item in program.instructions:
                if isinstance(item, Signal | Wait | Reset) and item.exchange == one:
                    words |= {(rank, flag.peer, item.do, 0): flag.slot for flag in item.flags}

        def merged(rank: int, item: Instruction) -> Instruction:
            if not isinstance(item, Signal | Wait | Reset) or item.exchange != two:
                return item
            flags = [Flag(f.peer, words.get((rank, f.peer, item.do, 0), f.slot)) for f in item.flags]
            return replace(item, flags=tuple(flags))

        plan = self.plan
        for rank, program in enumerate(plan.ranks):
            plan = with_program(plan, rank, [merged(rank, item) for item in program.instructions])
        return plan

    def fewer_buffers(self) -> Plan | None:
        """What goes to one target goes to another one of its shape, on every rank."""
        shapes = [[(b.dtype, b.batch, b.rows, b.cols) for b in p.buffers] for p in self.plan.ranks]
        pairs = [
            (one, two)
            for one in range(len(self.plan.targets))
            for two in range(len(self.plan.targets))
            if one != two and all(found[one] == found[two] for found in shapes)
        ]
        if not pairs:
            return None
        kept, gone = self.chance.choice(pairs)
        ranks = []
        for program in self.plan.ranks:
            views = tuple(replace(v, buffer=kept) if v.buffer == gone else v for v in program.views)
            items = tuple(
                replace(i, target=kept) if isinstance(i, Send) and i.target == gone else i for i in program.instructions
            )
            ranks.append(replace(program, views=views, instructions=items))
        return replace(self.plan, ranks=tuple(ranks))


KINDS: dict[str, Callable[[_Change], Plan | None]] = {
    "drop an event": _Change.drop_event,
    "move an event's record": lambda change: change.move(Record),
    "move an event's wait": lambda change: change.move(WaitEvent),
    "drop a wait": lambda change: change.drop(Wait),
    "move a wait": lambda change: change.move(Wait),
    "drop a reset": lambda change: change.drop(Reset),
    "move a reset": lambda change: change.move(Reset),
    "drop a signal": lambda change: change.drop(Signal),
    "move a signal": lambda change: change.move(Signal),
    "drop a word": _Change.drop_word,
    "drop a send": lambda change: change.drop(Send),
    "move a send": lambda change: change.move(Send),
    "drop a load": lambda change: change.drop(Load),
    "drop a stage": lambda change: change.drop(Run),
    "move a stage": lambda change: change.move(Run),
    "repeat a stage": lambda change: change.repeat(Run),
    "drop a collective": lambda change: change.drop(Collective),
    "move a collective": lambda change: change.move(Collective),
    "swap two instructions": _Change.swap,
    "change a stream": _Change.other_stream,
    "shift a target": _Change.shift_target,
    "merge two flag slots": _Change.merge_slots,
    "shrink buffers": _Change.fewer_buffers,
}


def mutants(plan: Plan, count: int, seed: int) -> Iterator[Mutant]:
    """``count`` mutants, kind after kind, each another plan than ``plan`` and whole in itself; fewer where the plan has
    nothing to change."""
    chance, kinds, made = random.Random(seed), list(KINDS), 0
    while made < count and kinds:
        for kind in list(kinds):
            found = mutant_of(plan, kind, chance)
            if found is None:
                kinds.remove(kind)
                continue
            made += 1
            yield found
            if made == count:
                return


def mutant_of(plan: Plan, kind: str, chance: random.Random) -> Mutant | None:
    """One mutant of one of ``KINDS``; None where no draw has led anywhere."""
    for _ in range(MAX_TRIES):
        change = _Change(plan, chance)
        changed = KINDS[kind](change)
        if changed is not None and changed != plan and check_plan(changed) is None:
            return Mutant(kind, f"{kind} on rank {change.rank}: {_difference(plan, changed)}", changed)
    return None


def _difference(plan: Plan, changed: Plan) -> str:
    for rank, (before, after) in enumerate(zip(plan.ranks, changed.ranks, strict=True)):
        pairs = zip(before.instructions, (*after.instructions, None), strict=False)
        for number, (one, two) in enumerate(pairs):
            if one != two:
                return f"rank {rank}, from instruction {number} on, {one.do}"
    return "targets"


Seen = Mapping[tuple[int, int], Sequence[Sequence[Tensor]]]
"""What ops have read: by rank and op, the operands of each time that it was carried out. Op -1 is the caller, who reads
the outputs and, at the end, the states: what other versions of the step would find there."""


class _Watched:
    """Makes stages that give random numbers of the right shapes, an op of a rank the same ones in every run of a plan,
    and keep what they read: what moves is what matters."""

    def __init__(self) -> None:
        self.read: dict[tuple[int, int], list[Sequence[Tensor]]] = defaultdict(list)

    def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
        program = plan.ranks[rank]
        changed = [run.inputs.index(number) for number in run.outputs if number in run.inputs]
        boxes = [program.buffers[buffer] for buffer in program.made_by(run)]

        def stage(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            seen = self.read[rank, run.op]
            seen.append([tensor.clone() for tensor in tensors])
            chance = torch.Generator().manual_seed(hash((rank, run.op, len(seen))) % 2**63)
            for index in changed:
                tensors[index].uniform_(generator=chance)
            return [torch.rand((b.batch, b.rows, b.cols), generator=chance).to(torch_dtype(b.dtype)) for b in boxes]

        return stage


def _run_watched(plan: Plan, seed: int) -> tuple[str | None, Seen]:
    inputs = [random_inputs(plan, number) for number in range(REPLAYS)]
    watched = _Watched()

    def loop(rank: int) -> Generator[NamedInputs, Outputs, None]:
        for step in inputs:  # a list has no `send`, so no `yield from`
            outputs = yield step
            watched.read[rank, -1].append([output.clone() for output in outputs])

    session = Session(plan, device="cpu", seed=seed, stages=watched)
    try:
        session.drive(loop)
    except StepgraphError:
        return "deadlock", watched.read
    report = session.report
    if report.races:
        return "race", watched.read
    if report.faults:
        return report.faults[0].kind, watched.read
    backend = session.backend
    assert isinstance(backend, World)
    for rank, memory in enumerate(backend.memories[0]):
        watched.read[rank, -1].append([memory.tensors[state.buffer].clone() for state in plan.states])
    return None if report.movement_exact else "moved wrong", watched.read


def meant_by(plan: Plan) -> Seen | None:
    """What the ops of a plan read, for its mutants to be held against; None where a run of it goes wrong."""
    found, seen = _run_watched(plan, 0)
    return seen if found is None else None


def seen_by_running(plan: Plan, seed: int, meant: Seen | None = None) -> str | None:
    """What the cpu device notices in one interleaving of some replays, as a word, or that ops read, or states hold,
    something else than is meant; None when all is well."""
    found, seen = _run_watched(plan, seed)
    if found is not None or meant is None or _same(seen, meant):
        return found
    return "read wrong"


def _same(one: Seen, two: Seen) -> bool:
    def alike(mine: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]]) -> bool:
        return len(mine) == len(theirs) and all(
            len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(mine, theirs, strict=True)
        )

    return one.keys() == two.keys() and all(alike(one[key], two[key]) for key in one)


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    codes: tuple[str, ...]
    """Of the verifier's findings; () where it has proven the mutant."""
    seen: str | None
    """What running it has shown, in one of ``SEEDS`` interleavings."""

    @property
    def outcome(self) -> str:
        if self.seen is None and self.codes:
            return "by rule" if RULES.issuperset(self.codes) else "false alarm"
        if self.seen is None:
            return "safe"
        return "killed" if self.codes else "missed"


def verdicts(plan: Plan, count: int, seed: int) -> Iterator[Verdict]:
    """The verifier's word on ``count`` mutants, and that of runs."""
    meant = meant_by(plan)
    for mutant in mutants(plan, count, seed):
        codes = tuple(sorted({finding.code for finding in prove(mutant.plan).findings}))
        runs = (seen_by_running(mutant.plan, number, meant) for number in range(SEEDS))
        yield Verdict(mutant, codes, next(filter(None, runs), None))
