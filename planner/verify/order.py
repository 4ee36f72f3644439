"""The order of replays: what happens before what, over all ranks, as vector clocks.

A word of plans is given, one for each replay: twice the same, or several plans of a set that follow one another on the
same ranks. A chain is one stream of one rank; positions count its instructions, from 1, through all replays. A clock
says for every chain up to which position it is known to be done. It changes only where a chain waits, so a stretch of
instructions between two waits shares one. A collective takes two positions, its start and its finish. Edges: issue
order on a stream; a record to the wait for its event; a signal to the wait for its word; every start of a collective to
every finish; all of a rank's replay to all of its next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.planner.plan import Collective, Instruction, Plan, Record, Signal, Wait, WaitEvent

Clock = Sequence[int]
"""For each chain, the last position that is known to be done."""
Told = tuple[int, int, int]
"""What a record, signal or start tells: (clock, chain, position), all of the clock and the chain up to the position."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of one replay of a rank."""

    rank: int
    replay: int
    number: int
    """In the rank's program."""


@dataclass(frozen=True, slots=True)
class Order:
    plans: tuple[Plan, ...]
    """Of each replay."""
    titles: tuple[str, ...]
    """What messages call each replay."""
    width: int
    """Chains of a rank: the most streams that a plan has."""
    clocks: Sequence[Clock]
    base: Sequence[Sequence[int]]
    """By rank and replay: where ``started`` and ``clock`` of the replay begin."""
    started: Sequence[Sequence[int]]
    """By rank, then by base + number: the position at which an instruction starts."""
    clock: Sequence[Sequence[int]]
    """Likewise: the number of the clock that an instruction starts with."""
    entered: Sequence[Sequence[int]]
    """By rank and replay: the number of the clock that the replay starts with."""
    sequence: Sequence[Step]
    """Everything that can run, in one order that keeps the edges; a collective at its start."""
    stuck: tuple[Step, ...]
    """The instructions that can never run; the order says nothing of them."""

    def item(self, step: Step) -> Instruction:
        return self.plans[step.replay].ranks[step.rank].instructions[step.number]

    def chain(self, step: Step) -> int:
        return step.rank * self.width + self.item(step).stream

    def at(self, step: Step) -> int:
        return self.base[step.rank][step.replay] + step.number

    def done(self, step: Step) -> int:
        """The position at which an instruction is done."""
        return self.started[step.rank][self.at(step)] + isinstance(self.item(step), Collective)

    def before(self, first: Step, second: Step) -> bool:
        """Whether ``first`` is done before ``second`` starts, or is it."""
        chain = self.chain(first)
        if chain == self.chain(second):
            return first == second or self.done(first) <= self.started[second.rank][self.at(second)]
        return self.clocks[self.clock[second.rank][self.at(second)]][chain] >= self.done(first)


class _Builder:
    """Runs every chain as far as it can; a chain that waits is woken by what it waits for."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans, self.replays = plans, len(plans)
        self.width, ranks = max(len(plan.streams) for plan in plans), range(plans[0].world_size)
        self.count = len(ranks) * self.width
        queues = {id(plan): self.queues_of(plan) for plan in plans}
        self.queues = [queues[id(plan)] for plan in plans]
        """By replay and chain: the numbers of instructions."""
        sizes = [[len(plan.ranks[rank].instructions) for plan in plans] for rank in ranks]
        self.base = [[sum(found[:replay]) for replay in range(self.replays)] for found in sizes]
        self.at = [0] * self.count
        self.replay = [0] * len(ranks)
        self.clocks: list[list[int]] = [[0] * self.count]
        self.clock = [0] * self.count
        """The number of each chain's present clock."""
        self.position = [0] * self.count
        self.started = [[0] * sum(found) for found in sizes]
        self.clock_at = [[0] * sum(found) for found in sizes]
        self.entered = [[0] * self.replays for _ in ranks]
        self.sequence: list[Step] = []
        self.told: dict[tuple[object, ...], Told] = {}
        """What has been told under a key: an event, a flag word, a member's start of a collective."""
        self.sleepers: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self.awake = list(range(self.count))

    def queues_of(self, plan: Plan) -> list[list[int]]:
        queues: list[list[int]] = [[] for _ in range(self.count)]
        for rank, program in enumerate(plan.ranks):
            for number, item in enumerate(program.instructions):
                queues[rank * self.width + item.stream].append(number)
        return queues

    def tell(self, key: tuple[object, ...], chain: int) -> None:
        self.told[key] = (self.clock[chain], chain, self.position[chain])
        self.awake += self.sleepers.pop(key, ())

    def join(self, chain: int, keys: Sequence[tuple[object, ...]]) -> bool:
        """Learn what is told under all keys; whether it is there. Else the chain sleeps until it is."""
        missing = next((key for key in keys if key not in self.told), None)
        if missing is not None:
            self.sleepers[missing].append(chain)
            return False
        known = self.clocks[self.clock[chain]]
        for key in keys:
            number, other, position = self.told[key]
            known = list(map(max, known, self.clocks[number]))
            known[other] = max(known[other], position)
        self.clocks.append(list(known))
        self.clock[chain] = len(self.clocks) - 1
        return True

    def run(self, chain: int) -> None:
        """Run a chain until it must wait, or its replay is over."""
        rank = chain // self.width
        replay = self.replay[rank]
        queue, plan = self.queues[replay][chain], self.plans[replay]
        items, base = plan.ranks[rank].instructions, self.base[rank][replay]
        started, clock_at = self.started[rank], self.clock_at[rank]
        while self.at[chain] < len(queue):
            number = queue[self.at[chain]]
            item = items[number]
            if isinstance(item, WaitEvent):
                if not self.join(chain, [(replay, rank, item.event)]):
                    return
            elif isinstance(item, Wait):
                if not self.join(chain, [(replay, item.exchange, rank, flag.slot) for flag in item.flags]):
                    return
            elif isinstance(item, Collective):
                if not started[base + number]:
                    self.begin(chain, Step(rank, replay, number))
                    self.tell((replay, item.exchange, rank, "start"), chain)
                group = plan.groups[plan.exchanges[item.exchange].group]
                if not self.join(chain, [(replay, item.exchange, member, "start") for member in group]):
                    return
                self.position[chain] += 1
                self.at[chain] += 1
                continue
            self.position[chain] += 1
            started[base + number] = self.position[chain]
            clock_at[base + number] = self.clock[chain]
            self.sequence.append(Step(rank, replay, number))
            if isinstance(item, Record):
                self.tell((replay, rank, item.event), chain)
            elif isinstance(item, Signal):
                for flag in item.flags:
                    self.tell((replay, item.exchange, flag.peer, flag.slot), chain)
            self.at[chain] += 1
        self.next_replay(rank)

    def begin(self, chain: int, step: Step) -> None:
        """The start of a collective."""
        self.position[chain] += 1
        at = self.base[step.rank][step.replay] + step.number
        self.started[step.rank][at] = self.position[chain]
        self.clock_at[step.rank][at] = self.clock[chain]
        self.sequence.append(step)

    def next_replay(self, rank: int) -> None:
        """Enter a rank's next replay if all its chains are through this one."""
        mine = range(rank * self.width, (rank + 1) * self.width)
        queues = self.queues[self.replay[rank]]
        through = all(self.at[chain] == len(queues[chain]) for chain in mine)
        if not through or self.replay[rank] + 1 == self.replays:
            return
        self.replay[rank] += 1
        known = list(map(max, *(self.clocks[self.clock[chain]] for chain in mine), [0] * self.count))
        for chain in mine:
            known[chain] = self.position[chain]
        self.clocks.append(known)
        self.entered[rank][self.replay[rank]] = len(self.clocks) - 1
        for chain in mine:
            self.clock[chain] = len(self.clocks) - 1
            self.at[chain] = 0
        self.awake += mine

    def heads(self) -> list[Step]:
        """What the chains that are not through stand at."""
        found = []
        for chain, at in enumerate(self.at):
            rank = chain // self.width
            queue = self.queues[self.replay[rank]][chain]
            if at < len(queue):
                found.append(Step(rank, self.replay[rank], queue[at]))
        return found

    def build(self, titles: tuple[str, ...]) -> Order:
        while self.awake:
            self.run(self.awake.pop())
        return Order(
            plans=tuple(self.plans),
            titles=titles,
            width=self.width,
            clocks=self.clocks,
            base=self.base,
            started=self.started,
            clock=self.clock_at,
            entered=self.entered,
            sequence=self.sequence,
            stuck=tuple(self.heads()),
        )


def order_of(plans: Sequence[Plan], titles: Sequence[str] = ()) -> Order:
    """The order of replays of every rank, one of each of ``plans``, all of which are for the same ranks."""
    assert len({plan.world_size for plan in plans}) == 1, "plans of one set are for the same ranks"
    return _Builder(plans).build(tuple(titles) or tuple(f"replay {number}" for number in range(len(plans))))
