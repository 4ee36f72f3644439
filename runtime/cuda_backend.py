"""A session's cuda side: from a process group to a captured step that is replayed, one process a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.kernels.stages import StageMaker
from stepgraph.planner.plan import Load, Plan
from stepgraph.runtime import group, readback
from stepgraph.runtime.capture import Capture, capture
from stepgraph.runtime.cpu import HostLoop
from stepgraph.runtime.cuda import CudaRank, block_bytes
from stepgraph.runtime.executor import issue, make_stages
from stepgraph.runtime.transport.ipc import IpcTransport
from stepgraph.runtime.transport.symmetric import SymmetricTransport


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """What a session tells of its captured step."""

    transport: str
    passed_over: tuple[str, ...]
    """Why other transports were not taken."""
    capture_seconds: float
    nodes: dict[str, int]
    arena_bytes: int
    pool_bytes: int


class CudaBackend:
    """One rank. In this order: the group agrees on plan and transport; arena and flags are allocated, zeroed and
    mapped; every stage is warmed on its stream by an eager step; the step is captured, read back, instantiated."""

    device_type = "cuda"

    def __init__(self, plan: Plan, stages: StageMaker, eager: bool) -> None:
        self.plan = plan
        group.check_group(plan)
        self.rank = dist.get_rank()
        self.ranks: Sequence[int] = (self.rank,)
        self.device = torch.device("cuda", torch.cuda.current_device())
        transports = (SymmetricTransport(self.device), IpcTransport(self.device))
        self.transport, passed_over = group.choose(plan.transport, transports)
        self.memory = self.transport.allocate(block_bytes(plan))
        groups = {number: self._group(members) for number, members in enumerate(plan.groups)}
        self.worker = CudaRank(plan, self.rank, self.memory, self.device, groups)
        self.stages = make_stages(plan, self.rank, stages)
        self.taken: torch.cuda.Event | None = None
        """When the caller's stream has taken the last outputs."""
        self._meet()
        self._issue()  # warms every kernel and library handle on the stream that it runs on
        self._meet()
        self.captured: Capture | None = None
        counts: dict[str, int] = {}
        if not eager:
            self.captured = capture(plan, self.rank, self.worker, self.stages)
            self._meet()
            found = readback.facts_of(self.captured)
            readback.check(plan, self.rank, self.worker, self.captured, found)
            counts = found.counts
            self.captured.graph.instantiate()
            self._meet()
        self.facts = CaptureFacts(
            transport=self.transport.name,
            passed_over=passed_over,
            capture_seconds=self.captured.seconds if self.captured else 0.0,
            nodes=counts,
            arena_bytes=plan.arena_bytes,
            pool_bytes=self.captured.pool_bytes if self.captured else 0,
        )

    def _group(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of some ranks; None for a rank alone. Collective over all ranks."""
        made = dist.new_group(list(members)) if len(members) > 1 else None
        return made if isinstance(made, dist.ProcessGroup) else None

    def _meet(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier()

    def _issue(self) -> None:
        with torch.cuda.stream(self.worker.streams[0]):
            issue(self.plan, self.rank, self.worker, self.stages)

    def step(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """One step. Inputs are read, and outputs made, on the caller's current stream."""
        caller, origin = torch.cuda.current_stream(self.device), self.worker.streams[0]
        origin.wait_stream(caller)
        if self.taken is not None:
            origin.wait_event(self.taken)
        with torch.cuda.stream(origin):
            self._copy_in(inputs)
            if self.captured is not None:
                self.captured.graph.replay()
            else:
                issue(self.plan, self.rank, self.worker, self.stages)
        caller.wait_stream(origin)
        outputs = tuple(self.worker.outputs[number].clone() for number in sorted(self.worker.outputs))
        self.taken = torch.cuda.Event()
        self.taken.record(caller)
        return outputs

    def _copy_in(self, inputs: Sequence[Tensor]) -> None:
        for item in self.plan.ranks[self.rank].instructions:
            if isinstance(item, Load):
                batch = self.worker.inputs[item.input].shape[0]
                whole = inputs[item.input].reshape(self.plan.inputs[item.input].box)[item.batch : item.batch + batch]
                at = item.region
                share = whole[:, at.row : at.row + at.rows, at.col : at.col + at.cols]
                self.worker.inputs[item.input].copy_(share)

    def run(self, loops: Sequence[HostLoop]) -> list[object]:
        """Run this rank's host loop to its end."""
        (loop,) = loops
        try:
            inputs = next(loop)
            while True:
                inputs = loop.send(self.step(inputs))
        except StopIteration as end:
            return [end.value]

    def close(self) -> None:
        """Let go of the graph, then of the memory that it touches. Collective where the transport needs it."""
        torch.cuda.synchronize(self.device)
        self.captured = None
        self.worker.tensors.clear()
        self.worker.outputs.clear()
        self.transport.release(self.memory)
