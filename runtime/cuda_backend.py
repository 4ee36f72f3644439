"""A session's cuda side: from a process group to a captured step that is replayed, one process a rank."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.kernels.stages import StageMaker
from stepgraph.planner.diagnostics import CapabilityError, Diagnostic
from stepgraph.planner.plan import Collective, Load, Plan, Signal
from stepgraph.runtime import group, readback
from stepgraph.runtime.bindings import ParameterWatch
from stepgraph.runtime.capture import Capture, capture
from stepgraph.runtime.cpu import HostLoop
from stepgraph.runtime.cuda import CudaRank, Watcher
from stepgraph.runtime.executor import issue
from stepgraph.runtime.facts import CaptureFacts, package_version
from stepgraph.runtime.stage_call import make_stages
from stepgraph.runtime.transport.choices import transports
from stepgraph.runtime.transport.collective import CollectiveTransport, on_host
from stepgraph.runtime.transport.mapped import MappedChannel
from stepgraph.runtime.transport.mapping import Channel, PeerMemory, RankSite, Transport, block_bytes
from stepgraph.runtime.transport.solo import SoloTransport

log = logging.getLogger("stepgraph")
TIME_LIMIT = 120.0
"""Seconds that a step of the self-test may take."""
RELEASE_LIMIT = 30.0
"""Seconds that a late step may take to end once its waits are satisfied from the host."""


class CudaBackend:
    """One rank. In this order: the group agrees on plan and versions and votes for a transport; the arena and the flags
    are reserved, zeroed and mapped; every stage is warmed on its stream in a rehearsal that meets nobody; the group
    runs a step eagerly; the step is captured, read back, instantiated and replayed twice. Where a rank fails, all do;
    where a step does not finish in time, all try the next transport."""

    def __init__(self, plan: Plan, stages: StageMaker, weights: str, eager: bool, solo: bool) -> None:
        """``weights`` says where the weights come from, for the ranks to compare."""
        self.plan, self.solo = plan, solo
        self.rank = 0 if solo else dist.get_rank()
        self.ranks: Sequence[int] = (self.rank,)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.groups = self._groups(weights, eager)
        self.eager_because = "eager was asked for" if eager else ""
        self.watcher: Watcher | None = None
        self.streams = tuple(
            # Copies first: a priority is kept on kernels only, and costs nothing.
            torch.cuda.Stream(self.device, priority=0 if number == 0 else -1)
            for number in range(len(plan.streams))
        )
        self.loads = [item for item in plan.ranks[self.rank].instructions if isinstance(item, Load)]
        self.rescue = torch.cuda.Stream(self.device, priority=-1)
        self.worker: CudaRank | None = None
        self.channel: Channel | None = None
        self.captured: Capture | None = None
        self.taken: torch.cuda.Event | None = None
        """When the caller's stream has taken the last outputs."""
        self.one_at_a_time = threading.Lock()
        choices = (SoloTransport(self.device, plan.world_size),) if solo else transports(self.device)
        try:
            self.stages = group.together("making stages", lambda: make_stages(plan, self.rank, stages))
            self.parameters = ParameterWatch(stages)
            found, passed_over = group.choose("auto" if solo else plan.transport, choices, self._attempt)
        except group.StuckError:
            raise  # what still runs uses everything
        except Exception:
            self._let_go()
            self._leave_groups()
            raise
        self.facts = self._facts(found, passed_over)
        log.info("rank %d of %s: %s", self.rank, plan.name, self.facts)

    def _groups(self, weights: str, eager: bool) -> dict[int, dist.ProcessGroup | None]:
        """The process group of each of the plan's groups; None for a rank alone. Collective."""
        if self.solo:
            if dist.is_initialized():
                raise CapabilityError(
                    [Diagnostic("E606", "a rank alone has no group", None, "no process group", "one that is there")]
                )
            if any(isinstance(item, Collective) for item in self.plan.ranks[self.rank].instructions):
                message, hint = (
                    "a rank alone has nobody for a collective",
                    "--set defaults.gather.via=copy, and the like",
                )
                raise CapabilityError([Diagnostic("E606", message, None, "via: copy", "via: nccl", hint)])
            return dict.fromkeys(range(len(self.plan.groups)))
        group.check_group(self.plan)
        group.agree("versions and mode", f"{_versions()}, {weights}, eager {eager}")
        found: dict[int, dist.ProcessGroup | None] = {}
        for number, members in enumerate(self.plan.groups):
            made = dist.new_group(list(members)) if len(members) > 1 else None
            found[number] = made if isinstance(made, dist.ProcessGroup) else None
        return found

    # From nothing to a step

    def _attempt(self, transport: Transport) -> None:
        """Set the step up over a transport, to its last replay of the self-test.

        Raises:
            SelfTestError: E611 where a step does not finish in time, on all ranks.
        """
        block = group.attempt("allocating the arena", lambda: transport.reserve(block_bytes(self.plan)))
        memory = group.attempt("mapping peers' memory", lambda: transport.connect(block))
        site = RankSite(self.plan, self.rank, memory, self.streams, self.rescue, self.groups)
        channel = group.together("preparing handshakes", lambda: transport.channel(site))
        self.channel = channel
        self.worker = group.together("preparing buffers", lambda: CudaRank(site, channel))
        group.together("warming stages", lambda: self._rehearse(block))
        self._meet()
        if not self.eager_because:
            self.eager_because = self._uncapturable(transport)
        try:
            self._in_time("the first step", self._issue)
            if not self.eager_because:
                self._meet()
                self.captured = group.together("capturing the step", self._capture)
                self._meet()
                for number in ("first", "second"):
                    self._in_time(f"the {number} replay", self.captured.graph.replay)
        except group.SelfTestError:
            self._let_go()
            raise
        with torch.cuda.stream(self.streams[0]):
            self.worker.reset_state()  # which the steps so far have written
        self._meet()

    def _uncapturable(self, transport: Transport) -> str:
        """Why the step can only run eagerly; empty where it can be captured."""
        kinds = (Collective, Signal) if isinstance(transport, CollectiveTransport) else (Collective,)
        used = any(isinstance(item, kinds) for program in self.plan.ranks for item in program.instructions)
        if not used or not on_host(dist.group.WORLD):
            return ""
        return f"{dist.get_backend()} moves data through the host, which can't be captured"

    def _rehearse(self, block: Tensor) -> None:
        """Issue the step with nobody there: what it sends goes into this rank's own block, and it answers its own
        waits. Loads every kernel and warms every library handle while no wait depends on a peer."""
        assert self.worker is not None
        real, channel = self.worker.site, self.worker.channel
        alone = PeerMemory(block, (block.data_ptr(),) * self.plan.world_size, None)
        site = RankSite(self.plan, self.rank, alone, self.streams, self.rescue, self.groups)
        rehearsal = MappedChannel(site, answers=True)
        self.worker.channel, self.worker.alone = rehearsal, True
        rehearsal.release()  # what may be needed while a wait is pending is warm too
        torch.cuda.synchronize(self.device)
        rehearsal.clear()
        self._issue()
        torch.cuda.synchronize(self.device)
        rehearsal.clear()
        self.worker.site, self.worker.channel, self.worker.alone = real, channel, False

    def _capture(self) -> Capture:
        assert self.worker is not None
        captured = capture(self.worker, self.stages)
        self.graph_facts = readback.facts_of(captured)
        readback.check(self.worker, captured, self.graph_facts)
        captured.graph.instantiate()
        return captured

    def _facts(self, transport: Transport, passed_over: tuple[str, ...]) -> CaptureFacts:
        assert self.worker is not None
        return CaptureFacts(
            transport=transport.name,
            passed_over=passed_over,
            eager_because=self.eager_because,
            capture_seconds=self.captured.seconds if self.captured else 0.0,
            nodes=self.graph_facts.counts if self.captured else {},
            planned_nodes=readback.planned_counts(self.worker) if self.captured else {},
            arena_bytes=self.plan.arena_bytes,
            pool_bytes=self.captured.pool_bytes if self.captured else 0,
        )

    def _meet(self) -> None:
        torch.cuda.synchronize(self.device)
        group.meet()

    def _issue(self) -> None:
        assert self.worker is not None
        with torch.cuda.stream(self.streams[0]):
            issue(self.plan, self.rank, self.worker, self.stages)

    def _in_time(self, what: str, work: Callable[[], None]) -> None:
        """Do ``work`` on the origin and wait for it. Where it fails on some rank, or does not end in time, the waits of
        all ranks are satisfied from the host, until every rank has ended.

        Raises:
            StepgraphError: this rank's own; E607 on the others.
            SelfTestError: E611, on all ranks, where it was late. StuckError: E611, where it never ends.
        """
        failure: Exception | None = None
        ends: list[torch.cuda.Event] = []
        try:
            try:
                with torch.cuda.stream(self.streams[0]):
                    work()
            finally:
                ends = [stream.record_event() for stream in self.streams]
            limit = time.monotonic() + TIME_LIMIT
            while not _over(ends) and time.monotonic() < limit:
                time.sleep(0.0005)
            if _over(ends):
                torch.cuda.synchronize(self.device)
        except Exception as error:
            failure = group.ours(what, error)
        late = group.everyone("" if _over(ends) else "late")
        failed = group.everyone(group.told(failure))
        if any(late) and not self._release(ends):
            got = "waits were satisfied from the host, and it goes on"
            hint = "end the processes; a collective that hangs can only be aborted with its group"
            expected = f"an end within {RELEASE_LIMIT:g} s"
            found = Diagnostic("E611", f"{what} did not finish and can't be released", None, expected, got, hint)
            raise group.StuckError([found]) from failure
        if failure is not None:
            raise failure
        group.blame(what, failed)
        if not any(late):
            return
        torch.cuda.synchronize(self.device)
        names = ", ".join(str(rank) for rank, answer in enumerate(late) if answer)
        got = "on no rank" if all(late) else f"not on rank {names}"
        expected = f"an end within {TIME_LIMIT:g} s"
        raise group.SelfTestError([Diagnostic("E611", f"{what} did not finish in time", None, expected, got)])

    def _release(self, ends: Sequence[torch.cuda.Event]) -> bool:
        """Satisfy waits from the host until every rank's work has ended; false where some rank's does not."""
        limit = time.monotonic() + RELEASE_LIMIT
        while True:
            over = _over(ends)
            answers = group.everyone("" if over else "late" if time.monotonic() < limit else "stuck")
            if "stuck" in answers or not any(answers):
                return "stuck" not in answers
            assert self.channel is not None
            self.channel.release()
            time.sleep(0.01)

    # Steps

    def step(self, inputs: Sequence[Tensor], views: bool) -> tuple[Tensor, ...]:
        """One step. Inputs are read, and outputs made, on the caller's current stream. With ``views`` the outputs are
        the step's own memory, which the next step changes. Calls of several threads come one after another."""
        assert self.worker is not None
        if self.captured is not None:
            self.parameters.check()
        with self.one_at_a_time:
            caller, origin = torch.cuda.current_stream(self.device), self.streams[0]
            origin.wait_stream(caller)
            if self.taken is not None:
                origin.wait_event(self.taken)
            with torch.cuda.stream(origin), torch.no_grad():
                self._copy_in(inputs)
                if self.captured is not None:
                    self.captured.graph.replay()
                else:
                    self.worker.watcher = self.watcher
                    issue(self.plan, self.rank, self.worker, self.stages)
            caller.wait_stream(origin)
            found = self.worker.outputs
            outputs = tuple(found[number] if views else found[number].clone() for number in sorted(found))
            self.taken = caller.record_event()
            return outputs

    def _copy_in(self, inputs: Sequence[Tensor]) -> None:
        assert self.worker is not None
        for load in self.loads:
            static, at = self.worker.inputs[load.input], load.region
            whole = inputs[load.input].view(self.plan.inputs[load.input].box)
            share = whole[load.batch : load.batch + static.shape[0], at.row : at.row + at.rows]
            static.copy_(share[..., at.col : at.col + at.cols])

    def reset_state(self) -> None:
        """Zero this rank's states behind all that it was told to do. A peer's next step may send into them: all meet
        when they are zero."""
        assert self.worker is not None
        with self.one_at_a_time:
            caller, origin = torch.cuda.current_stream(self.device), self.streams[0]
            origin.wait_stream(caller)
            if self.taken is not None:
                origin.wait_event(self.taken)
            with torch.cuda.stream(origin), torch.no_grad():
                self.worker.reset_state()
            caller.wait_stream(origin)
            if self.solo:
                return
            self._meet()

    def run(self, loops: Sequence[HostLoop], views: bool) -> list[object]:
        """Run this rank's host loop to its end."""
        (loop,) = loops
        try:
            inputs = next(loop)
            while True:
                inputs = loop.send(self.step(inputs, views))
        except StopIteration as end:
            return [end.value]

    def close(self) -> None:
        """Let go of the graph, then of the memory that it touches, then of the groups. Needs no meeting: every copy and
        flag that reaches this rank's memory was waited for by its own last step."""
        torch.cuda.synchronize(self.device)
        self._let_go()
        self._leave_groups()

    def _leave_groups(self) -> None:
        if dist.is_initialized():  # else they went with the default group
            for made in self.groups.values():
                if made is not None:
                    dist.destroy_process_group(made)

    def _let_go(self) -> None:
        self.captured = None
        if self.worker is not None:
            self.worker.let_go()
        self.worker = self.channel = None


def _versions() -> str:
    """What ranks must have alike to make the same of a plan."""
    packages = ", ".join(f"{name} {package_version(name)}" for name in ("stepgraph", "cuda-bindings", "triton"))
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {packages}"


def _over(ends: Sequence[torch.cuda.Event]) -> bool:
    """Whether the GPU is through with what came before; with an error too, which the next call raises."""
    try:
        return all(end.query() for end in ends)
    except RuntimeError:
        return True
