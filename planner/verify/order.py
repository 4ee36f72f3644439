"""The order of a plan: what happens before what, over all ranks and replays, as vector clocks.

A chain is one stream of one rank. A node is an instruction of one replay; a collective is two, its start and its
finish. A node's clock says for every chain how many of its nodes are done before the node starts, itself counted.
Edges: issue order on a stream; a record to the wait for its event; a signal to the wait for its word; every start of a
collective to every finish; all of a rank's replay to all of its next one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepgraph.planner.plan import Collective, Instruction, Plan, Record, Signal, Wait, WaitEvent

Clock = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of one replay of a rank."""

    rank: int
    replay: int
    number: int
    """In the rank's program."""


@dataclass(frozen=True, slots=True)
class Order:
    replays: int
    chains: int
    begin: dict[Step, int]
    """The node at which an instruction starts."""
    end: dict[Step, int]
    """The node at which it is done: of a collective its finish, else the same."""
    clocks: Clock
    """(nodes, chains)."""
    chain: Clock
    """Of each node."""
    position: Clock
    """Of each node in its chain, from 1."""
    stuck: tuple[Step, ...]
    """The instructions that can never run; the order says nothing of them."""

    def before(self, first: Step, second: Step) -> bool:
        """Whether ``first`` is done before ``second`` starts, or is it."""
        end = self.end[first]
        return bool(self.clocks[self.begin[second], self.chain[end]] >= self.position[end])


class _Builder:
    def __init__(self, plan: Plan, replays: int) -> None:
        self.plan, self.replays = plan, replays
        self.width = len(plan.streams)
        self.chains = len(plan.ranks) * self.width
        self.queues: list[list[tuple[int, Instruction]]] = [[] for _ in range(self.chains)]
        for rank, program in enumerate(plan.ranks):
            for number, item in enumerate(program.instructions):
                self.queues[rank * self.width + item.stream].append((number, item))
        self.at = [0] * self.chains
        self.replay = [0] * len(plan.ranks)
        self.clock = [np.zeros(self.chains, np.int32) for _ in range(self.chains)]
        self.clocks: list[Clock] = []
        self.chain: list[int] = []
        self.position: list[int] = []
        self.begin: dict[Step, int] = {}
        self.end: dict[Step, int] = {}
        self.events: dict[tuple[int, int, int], Clock] = {}
        self.signals: dict[tuple[int, int, int, int], Clock] = {}
        """(replay, exchange, owner, slot) -> the clock that the word carries."""
        self.starts: dict[tuple[int, int], dict[int, Clock]] = {}
        """(replay, exchange) -> the clock with which each member has started."""

    def node(self, chain: int) -> int:
        clock = self.clock[chain]
        clock[chain] += 1
        self.clocks.append(clock.copy())
        self.chain.append(chain)
        self.position.append(int(clock[chain]))
        return len(self.clocks) - 1

    def join(self, chain: int, clock: Clock) -> None:
        np.maximum(self.clock[chain], clock, out=self.clock[chain])

    def advance(self, chain: int) -> bool:
        """Run the head of a chain if it can; whether it did."""
        rank = chain // self.width
        if self.at[chain] == len(self.queues[chain]):
            return False
        number, item = self.queues[chain][self.at[chain]]
        step = Step(rank, self.replay[rank], number)
        match item:
            case WaitEvent():
                event = self.events.get((step.replay, rank, item.event))
                if event is None:
                    return False
                self.join(chain, event)
            case Wait():
                words = [self.signals.get((step.replay, item.exchange, rank, flag.slot)) for flag in item.flags]
                if any(word is None for word in words):
                    return False
                for word in words:
                    assert word is not None
                    self.join(chain, word)
            case Collective():
                return self.collective(chain, step, item)
        self.begin[step] = self.end[step] = node = self.node(chain)
        if isinstance(item, Record):
            self.events[step.replay, rank, item.event] = self.clocks[node]
        elif isinstance(item, Signal):
            for flag in item.flags:
                self.signals[step.replay, item.exchange, flag.peer, flag.slot] = self.clocks[node]
        self.at[chain] += 1
        return True

    def collective(self, chain: int, step: Step, item: Collective) -> bool:
        started = self.starts.setdefault((step.replay, item.exchange), {})
        if step not in self.begin:
            self.begin[step] = node = self.node(chain)
            started[step.rank] = self.clocks[node]
            return True
        if len(started) < len(self.plan.groups[self.plan.exchanges[item.exchange].group]):
            return False
        for clock in started.values():
            self.join(chain, clock)
        self.end[step] = self.node(chain)
        self.at[chain] += 1
        return True

    def next_replay(self, rank: int) -> bool:
        """Enter a rank's next replay if this one is done; whether it did."""
        mine = range(rank * self.width, (rank + 1) * self.width)
        done = all(self.at[chain] == len(self.queues[chain]) for chain in mine)
        if not done or self.replay[rank] + 1 == self.replays:
            return False
        self.replay[rank] += 1
        known = np.maximum.reduce([self.clock[chain] for chain in mine])
        for chain in mine:
            self.clock[chain] = known.copy()
            self.at[chain] = 0
        return True

    def build(self) -> Order:
        moved = True
        while moved:
            moved = False
            for chain in range(self.chains):
                while self.advance(chain):
                    moved = True
            for rank in range(len(self.plan.ranks)):
                moved = self.next_replay(rank) or moved
        stuck = [
            Step(chain // self.width, self.replay[chain // self.width], self.queues[chain][self.at[chain]][0])
            for chain in range(self.chains)
            if self.at[chain] < len(self.queues[chain])
        ]
        return Order(
            replays=self.replays,
            chains=self.chains,
            begin=self.begin,
            end=self.end,
            clocks=np.array(self.clocks, np.int32).reshape(-1, self.chains),
            chain=np.array(self.chain, np.int32),
            position=np.array(self.position, np.int32),
            stuck=tuple(stuck),
        )


def order_of(plan: Plan, replays: int) -> Order:
    """The order of ``replays`` replays of every rank."""
    return _Builder(plan, replays).build()
