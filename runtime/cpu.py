"""The cpu device: all ranks of a plan in one process, interleaved by a seed, under a race detector.

Every stream of every rank is a queue. At each turn one of the instructions that could run next is picked and run: real
copies into real arenas, flags that are written, waited for and reset. Ranks run ahead of each other, into the next
replay too, as far as the plan's flags let them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Sequence

import torch

from stepgraph.kernels.stages import StageMaker
from stepgraph.planner.diagnostics import Diagnostic, StepgraphError
from stepgraph.planner.plan import Plan
from stepgraph.planner.verify.counterexample import Turn
from stepgraph.runtime.cpu_collective import Rendezvous
from stepgraph.runtime.cpu_memory import Movements, Race, RankMemory, Report, describe, fresh_clock
from stepgraph.runtime.cpu_rank import Inputs, Outputs, RankQueues
from stepgraph.runtime.executor import issue
from stepgraph.runtime.interleave import InterleavingError
from stepgraph.runtime.shadow import Conflict, Ints
from stepgraph.runtime.stage_call import make_stages

HostLoop = Generator[Inputs, Outputs, object]
"""One rank's host: yields the inputs of a step, is sent its outputs."""
Choice = tuple[int, int | None]
"""A rank, and which of its streams goes on; None for its host."""


class World:
    """All ranks of a plan: the cpu side of a session."""

    device = torch.device("cpu")

    def __init__(self, plan: Plan, stages: StageMaker, seed: int = 0) -> None:
        self.plan = plan
        self.ranks: Sequence[int] = range(plan.world_size)
        self.width = len(plan.streams)
        self.chains = plan.world_size * self.width
        self.report = Report()
        self.random = random.Random(seed)
        self.memories = [RankMemory(plan, rank, self.chains) for rank in range(plan.world_size)]
        self.movements = Movements(plan, self.memories, self.report)
        self.clocks = [fresh_clock(self.chains) for _ in range(self.chains)]
        self.history: list[list[tuple[int, str]]] = [[] for _ in range(self.chains)]
        self.signals: dict[tuple[int, int], Ints] = {}
        """Clock that each flag word (owner, slot) carries."""
        self.resets: dict[tuple[int, int], tuple[int, int]] = {}
        """(chain, time) of the last reset of each word."""
        self.consumed: dict[tuple[int, int], bool] = {}
        """Whether a wait has seen the word's present signal."""
        self.rendezvous: dict[tuple[int, int], Rendezvous] = {}
        self.script: deque[tuple[int, int]] = deque()
        """(rank, stream) of the turns to take before chance decides."""
        self.queues = [RankQueues(self, rank) for rank in self.ranks]
        for rank, queues in enumerate(self.queues):
            issue(plan, rank, queues, make_stages(plan, rank, stages))

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
                inputs = next(host) if queues.outputs is None else host.send(queues.taken())
                queues.start(inputs)
            except StopIteration as end:
                results[rank] = end.value
                hosts[rank] = None
        self._end(hosts)
        return results

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
        self.script = deque(
            (turn.rank, self.plan.streams.index(turn.stream)) for turn in turns for _ in range(turn.count)
        )

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
        at = "its loop has ended" if queues.idle else queues.stuck()
        message = f"rank {rank} can't take its turn on stream {self.plan.streams[stream]}"
        hint = "give the run as many --steps as the interleaving has replays"
        raise InterleavingError([Diagnostic("E613", message, None, "an instruction that can run", at, hint)])

    def reset_state(self) -> None:
        """Zero the states of all ranks.

        Raises:
            StepgraphError: E604 where an earlier run was left in the middle of a step.
        """
        self._need_idle()
        for memory in self.memories:
            memory.reset_state()
        self.movements.forget()

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
        for rank, memory in enumerate(self.memories):
            left = [slot for slot, word in enumerate(memory.flags) if word and slot not in self.queues[rank].epochs]
            if left:
                self.report.fault("flags left", f"rank {rank} ends with flags {left} set")

    def conflict(self, rank: int, buffer: int, conflict: Conflict) -> None:
        if len(self.report.races) < 100:
            earlier, later = describe(conflict, self.history, self.plan.streams)
            name = self.plan.ranks[rank].buffers[buffer].name
            self.report.races.append(Race(rank, name, earlier, later))
