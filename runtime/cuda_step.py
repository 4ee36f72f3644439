"""One version of a step on one rank of the cuda device: warmed, issued eagerly, captured, let go, captured again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from stepgraph.kernels.stages import Stage
from stepgraph.planner.plan import Load, Plan
from stepgraph.runtime import readback
from stepgraph.runtime.capture import Capture, capture
from stepgraph.runtime.cuda import CudaRank
from stepgraph.runtime.executor import issue
from stepgraph.runtime.facts import CaptureFacts
from stepgraph.runtime.transport.mapped import MappedChannel
from stepgraph.runtime.transport.mapping import Channel, PeerMemory, RankSite


class CudaStep:
    """A plan on one rank. Its stages outlive captures; its tensors are those of one capture, or of eager steps."""

    def __init__(self, site: RankSite, channel: Channel, stages: Mapping[int, Stage]) -> None:
        self.site, self.channel, self.stages = site, channel, stages
        self.plan: Plan = site.plan
        self.worker = CudaRank(site, channel)
        self.loads = [item for item in self.plan.ranks[site.rank].instructions if isinstance(item, Load)]
        self.captured: Capture | None = None
        self.graph_facts: readback.GraphFacts | None = None

    def rehearse(self) -> None:
        """Issue the step with nobody there: what it sends goes into this rank's own block, and it answers its own
        waits. Loads every kernel and warms every library handle while no wait depends on a peer."""
        site, block = self.site, self.site.memory.local
        alone = PeerMemory(block, (block.data_ptr(),) * self.plan.world_size, None)
        there = replace(site, memory=alone)
        rehearsal = MappedChannel(there, answers=True)
        self.worker.channel, self.worker.alone = rehearsal, True
        rehearsal.release()  # what may be needed while a wait is pending is warm too
        torch.cuda.synchronize(site.device)
        rehearsal.clear()
        self.issue()
        torch.cuda.synchronize(site.device)
        rehearsal.clear()
        self.worker.site, self.worker.channel, self.worker.alone = site, self.channel, False

    def issue(self) -> None:
        """Issue the step eagerly, on the streams."""
        with self._forgotten_if_it_fails(), torch.cuda.stream(self.site.streams[0]):
            issue(self.plan, self.site.rank, self.worker, self.stages)

    @contextmanager
    def _forgotten_if_it_fails(self) -> Iterator[None]:
        """Or the next step would send what this one has left in the channel."""
        try:
            yield
        except BaseException:
            self.channel.forget()
            raise

    def capture(self) -> None:
        """Capture the step, hold the graph against the plan, and make it ready.

        Raises:
            StageError: E610. ReadbackError: E608.
        """
        with self._forgotten_if_it_fails():
            captured = capture(self.worker, self.stages)
        self.graph_facts = readback.facts_of(captured)
        readback.check(self.worker, captured, self.graph_facts)
        captured.graph.instantiate()
        self.captured = captured

    def evict(self) -> None:
        """Let the graph go, and every tensor of it. Nothing of the step runs."""
        self.captured = None
        self.worker.let_go()
        self.worker = CudaRank(self.site, self.channel)

    def copy_in(self, inputs: Sequence[Tensor]) -> None:
        """This rank's share of every input, on the current stream."""
        for load in self.loads:
            static, at = self.worker.inputs[load.view], load.region
            whole = inputs[load.input].view(self.plan.inputs[load.input].box)
            share = whole[load.batch : load.batch + static.shape[0], at.row : at.row + at.rows]
            static.copy_(share[..., at.col : at.col + at.cols])

    def facts(self, transport: str, passed_over: tuple[str, ...], eager_because: str) -> CaptureFacts:
        captured, graph = self.captured, self.graph_facts
        return CaptureFacts(
            transport=transport,
            passed_over=passed_over,
            eager_because=eager_because,
            capture_seconds=captured.seconds if captured else 0.0,
            nodes=graph.counts if captured and graph else {},
            planned_nodes=readback.planned_counts(self.worker) if captured else {},
            arena_bytes=self.plan.arena_bytes,
            pool_bytes=captured.pool_bytes if captured else 0,
        )

    def let_go(self) -> None:
        """Forget the graph, then the memory that it touches."""
        self.captured = None
        self.worker.let_go()
