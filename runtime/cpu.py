"""The cpu device: all ranks of a plan in one process, interleaved by a seed, under a race detector.

Every stream of every rank is a queue. At each turn one of the instructions that could run next is picked and run: real
copies into real arenas, flags that are written, waited for and reset. Ranks run ahead of each other, into the next
replay too, as far as the plan's flags let them.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from itertools import accumulate

import torch

from stepgraph.kernels.stages import StageMaker
from stepgraph.planner.diagnostics import Diagnostic, StepgraphError
from stepgraph.planner.plan import Buffer, Plan
from stepgraph.planner.plan_set import version as version_of
from stepgraph.planner.verify.counterexample import Turn
from stepgraph.runtime.bindings import ParameterWatch
from stepgraph.runtime.cache import ReplayCache
from stepgraph.runtime.cpu_collective import Rendezvous
from stepgraph.runtime.cpu_memory import (
    MAX_FINDINGS,
    Movements,
    Race,
    RankBlock,
    RankMemory,
    Report,
    Unread,
    bytes_of_rank,
    describe,
    fresh_clock,
)
from stepgraph.runtime.cpu_rank import Outputs, RankQueues, StepInputs
from stepgraph.runtime.executor import issue
from stepgraph.runtime.interleave import InterleavingError
from stepgraph.runtime.room import need_host
from stepgraph.runtime.shadow import Conflict, Ints
from stepgraph.runtime.stage_call import make_stages

HostLoop = Generator[StepInputs, Outputs, object]
"""One rank's host: yields what a step takes, is sent its outputs."""
Choice = tuple[int, int | None]
"""A rank, and which of its streams goes on; None for its host."""


class World:
    """All ranks of a plan, or of the plans of a set, of which each step runs one: the cpu side of a session."""

    device = torch.device("cpu")

    def __init__(self, plans: Sequence[Plan], cache: ReplayCache, stages: StageMaker, seed: int = 0) -> None:
        self.plans, self.cache, self.streams = plans, cache, plans[0].streams
        self.ranks: Sequence[int] = range(plans[0].world_size)
        self.width = len(self.streams)
        self.chains = len(self.ranks) * self.width
        self.report = Report()
        self.early: dict[tuple[int, int], set[int]] = defaultdict(set)
        """By plan and exchange: the ranks that may have waited before they signalled."""
        self.random = random.Random(seed)
        wanted = {f"rank {rank}": bytes_of_rank(plans, rank, self.chains) for rank in self.ranks}
        need_host("all ranks of the plan in one process", wanted)
        blocks = [RankBlock(plans, rank, self.chains) for rank in self.ranks]
        bases = [0, *accumulate(max(len(program.buffers) for program in plan.ranks) for plan in plans)]
        self.memories = [
            [RankMemory(plan, rank, self.chains, blocks[rank], base) for rank in self.ranks]
            for plan, base in zip(plans, bases, strict=False)
        ]
        """Of each plan, by rank."""
        self.unread: dict[tuple[int, int], Unread] = {}
        self.movements = [
            Movements(plan, memories, self.report, self.unread)
            for plan, memories in zip(plans, self.memories, strict=True)
        ]
        self.clocks = [fresh_clock(self.chains) for _ in range(self.chains)]
        self.history: list[list[tuple[int, str]]] = [[] for _ in range(self.chains)]
        self.signals: dict[tuple[int, int], Ints] = {}
        """Clock that each flag word (owner, slot) carries."""
        self.resets: dict[tuple[int, int], tuple[int, int]] = {}
        """(chain, time) of the last reset of each word."""
        self.consumed: dict[tuple[int, int], bool] = {}
        """Whether a wait has seen the word's present signal."""
        self.rendezvous: dict[tuple[int, int, int], Rendezvous] = {}
        """(plan, exchange, replay)."""
        self.script: deque[tuple[int, int]] = deque()
        """(rank, stream) of the turns to take before chance decides."""
        self.every = [[RankQueues(self, version, rank) for rank in self.ranks] for version in range(len(plans))]
        """Of each plan, by rank."""
        for plan, ranks in zip(plans, self.every, strict=True):
            for rank, queues in enumerate(ranks):
                issue(plan, rank, queues, make_stages(plan, rank, stages))
        self.parameters = ParameterWatch(stages)
        self.queues = list(self.every[0])
        """Of each rank, those of the plan that it runs now."""
        self.taken: list[int] = []
        """The version of every step so far, as the first rank to come has chosen it."""
        self.started = [0] * len(self.ranks)
        self.done = [0] * len(self.ranks)
        """Steps that each rank has begun, and has ended."""
        for version in range(len(plans)):  # as cuda captures them ahead
            if cache.fits(version):
                cache.hold(version)

    def run(self, loops: Sequence[HostLoop], views: bool = False) -> list[object]:
        """Run one host loop a rank to its end; gives what each loop returns. A deadlock is a fault, and ends it.
        Outputs are the host's own, with ``views`` too: the next step may change them, and does not.

        Raises:
            StepgraphError: E604 where an earlier run was left in the middle of a step.
        """
        self._need_idle()
        pace = [self.random.choice((1, 1, 4, 16)) for _ in range(self.chains)]  # some chains are slow
        results: list[object] = [None] * len(loops)
        hosts: list[HostLoop | None] = list(loops)
        for queues in self.queues:
            queues.outputs = None
        while True:
            choice = self._scripted(hosts) if self.script else self._any(hosts, pace)
            if choice is None:
                break
            rank, picked = choice
            if picked is not None:
                self.queues[rank].step(picked)
                continue
            host = hosts[rank]
            assert host is not None
            try:
                queues = self.queues[rank]
                step = next(host) if queues.outputs is None else host.send(queues.taken())
                self._choose(rank, step.version)
                self.queues[rank].start(step.tensors)
            except StopIteration as end:
                results[rank] = end.value
                hosts[rank] = None
        self._end(hosts)
        return results

    def _choose(self, rank: int, version: int) -> None:
        """Let a rank run a plan in its next step.

        Raises:
            StepgraphError: E607 where another rank runs another plan in the same step. ParameterError: E609.
        """
        number = self.started[rank]
        if number == len(self.taken):
            self.parameters.check()
            self.taken.append(version)
            self.cache.use(version)
        if version != self.taken[number]:
            names = [version_of(self.plans[chosen]) for chosen in (self.taken[number], version)]
            problem = f"ranks take different versions in step {number}"
            hint = "every rank must choose the same variant and bucket"
            raise StepgraphError(
                [Diagnostic("E607", problem, None, f"{names[0]}, as another rank", f"{names[1]} on rank {rank}", hint)]
            )
        self.started[rank] += 1
        self.queues[rank] = self.every[version][rank]

    def over(self, rank: int) -> None:
        """A rank has ended a step."""
        self.done[rank] += 1
        self.report.replays = min(self.done)

    def _any(self, hosts: Sequence[HostLoop | None], pace: Sequence[int]) -> Choice | None:
        """One of what could go on, by chance; None where nothing can."""
        choices: list[Choice] = []
        weights: list[int] = []
        for rank, queues in enumerate(self.queues):
            if queues.idle:
                if hosts[rank] is not None:
                    choices.append((rank, None))
                    weights.append(pace[rank * self.width])
                continue
            for stream in range(self.width):
                if queues.can_run(stream):
                    choices.append((rank, stream))
                    weights.append(pace[rank * self.width + stream])
        return self.random.choices(choices, weights)[0] if choices else None

    def follow(self, turns: Sequence[Turn]) -> None:
        """Take these turns first, from the next replay on."""
        self.script = deque((turn.rank, self.streams.index(turn.stream)) for turn in turns for _ in range(turn.count))

    def _scripted(self, hosts: Sequence[HostLoop | None]) -> Choice:
        """What the next turn of the script needs: the replay's begin, the end of a collective, or the turn itself.

        Raises:
            InterleavingError: E613 where the turn can't be taken.
        """
        rank, stream = self.script[0]
        queues = self.queues[rank]
        if queues.idle and hosts[rank] is not None:
            return rank, None
        if queues.can_run(stream):
            if not queues.meets(stream):
                self.script.popleft()
            return rank, stream
        for other in range(self.width):  # a collective that has started ends when its members let it
            if queues.can_run(other) and queues.meets(other):
                return rank, other
        at = "its loop has ended" if queues.idle else queues.stuck()
        message = f"rank {rank} can't take its turn on stream {self.streams[stream]}"
        hint = "give the run as many --steps as the interleaving has replays"
        raise InterleavingError([Diagnostic("E613", message, None, "an instruction that can run", at, hint)])

    def reset_state(self) -> None:
        """Zero the states of all ranks.

        Raises:
            StepgraphError: E604 where an earlier run was left in the middle of a step.
        """
        self._need_idle()
        for memories in self.memories:
            for memory in memories:
                memory.reset_state()
        for key in [key for key in self.unread if key[1] < 0]:  # which are states
            del self.unread[key]

    def _need_idle(self) -> None:
        if not all(queues.idle for queues in self.queues):
            raise StepgraphError(
                [Diagnostic("E604", "an earlier step has not finished", None, "a new session", "this one")]
            )

    def close(self) -> None:
        """Nothing outlives the process's own memory."""

    def _end(self, hosts: Sequence[HostLoop | None]) -> None:
        stuck = [queues.stuck() for queues in self.queues if not queues.idle]
        if stuck or any(host is not None for host in hosts):
            self.report.fault("deadlock", "; ".join(stuck))
            return
        for rank, memory in enumerate(self.memories[0]):
            epochs = {slot for ranks in self.every for slot in ranks[rank].epochs}
            left = [slot for slot, word in enumerate(memory.flags) if word and slot not in epochs]
            if left:
                self.report.fault("flags left", f"rank {rank} ends with flags {left} set")

    def conflict(self, buffer: Buffer, rank: int, conflict: Conflict) -> None:
        if len(self.report.races) < MAX_FINDINGS:
            earlier, later = describe(conflict, self.history, self.streams)
            self.report.races.append(Race(rank, buffer.name, earlier, later))
