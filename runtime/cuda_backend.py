"""A session's cuda side: from a process group to a captured step that is replayed, one process a rank."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.kernels.stages import StageMaker
from stepgraph.planner.diagnostics import CapabilityError, Diagnostic
from stepgraph.planner.plan import Collective, Plan, Signal
from stepgraph.planner.plan_set import version as version_of
from stepgraph.runtime import group
from stepgraph.runtime.bindings import ParameterWatch
from stepgraph.runtime.cache import ReplayCache
from stepgraph.runtime.cpu import HostLoop
from stepgraph.runtime.cpu_rank import StepInputs
from stepgraph.runtime.cuda import Watcher
from stepgraph.runtime.cuda_step import CudaStep
from stepgraph.runtime.facts import package_version
from stepgraph.runtime.stage_call import make_stages
from stepgraph.runtime.transport.choices import transports
from stepgraph.runtime.transport.collective import CollectiveTransport, on_host
from stepgraph.runtime.transport.mapping import PeerMemory, RankSite, Transport, block_bytes
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

    def __init__(
        self,
        plans: Sequence[Plan],
        cache: ReplayCache,
        stages: StageMaker,
        weights: str,
        eager: bool,
        solo: bool,
    ) -> None:
        """``weights`` says where the weights come from, for the ranks to compare."""
        self.plans, self.cache, self.solo = plans, cache, solo
        self.rank = 0 if solo else dist.get_rank()
        self.ranks: Sequence[int] = (self.rank,)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.groups: dict[tuple[int, ...], dist.ProcessGroup | None] = self._groups(weights, eager)
        """The process group of each group of ranks; None for a rank alone."""
        self.eager_because = "eager was asked for" if eager else ""
        self.watcher: Watcher | None = None
        self.streams = tuple(
            # Copies first: a priority is kept on kernels only, and costs nothing.
            torch.cuda.Stream(self.device, priority=0 if number == 0 else -1)
            for number in range(len(plans[0].streams))
        )
        self.rescue = torch.cuda.Stream(self.device, priority=-1)
        self.steps: list[CudaStep] = []
        """One for each plan."""
        self.stepped = 0
        """Steps that were taken."""
        self.taken: torch.cuda.Event | None = None
        """When the caller's stream has taken the last outputs."""
        self.one_at_a_time = threading.Lock()
        choices = (SoloTransport(self.device, plans[0].world_size),) if solo else transports(self.device)
        try:
            self.stages = group.together(
                "making stages", lambda: [make_stages(plan, self.rank, stages) for plan in plans]
            )
            self.parameters = ParameterWatch(stages)
            found, passed_over = group.choose("auto" if solo else plans[0].transport, choices, self._attempt)
        except group.StuckError:
            raise  # what still runs uses everything
        except Exception:
            self._let_go()
            self._leave_groups()
            raise
        self.facts = self.steps[0].facts(found.name, passed_over, self.eager_because)
        """Of the first plan."""
        log.info("rank %d of %s: %s", self.rank, plans[0].name, self.facts)

    def _groups(self, weights: str, eager: bool) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
        """Collective."""
        members = dict.fromkeys(group for plan in self.plans for group in plan.groups)
        if self.solo:
            if dist.is_initialized():
                raise CapabilityError(
                    [Diagnostic("E606", "a rank alone has no group", None, "no process group", "one that is there")]
                )
            if any(isinstance(item, Collective) for plan in self.plans for item in plan.ranks[0].instructions):
                message, hint = (
                    "a rank alone has nobody for a collective",
                    "--set defaults.gather.via=copy, and the like",
                )
                raise CapabilityError([Diagnostic("E606", message, None, "via: copy", "via: nccl", hint)])
            return dict.fromkeys(members)
        group.check_group(self.plans)
        group.agree("versions and mode", f"{_versions()}, {weights}, eager {eager}, graph bytes {self.cache.budget}")
        found: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for ranks in members:
            made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            found[ranks] = made if isinstance(made, dist.ProcessGroup) else None
        return found

    # From nothing to a step

    def _attempt(self, transport: Transport) -> None:
        """Set the step up over a transport, to its last replay of the self-test.

        Raises:
            SelfTestError: E611 where a step does not finish in time, on all ranks.
        """
        block = group.attempt("allocating the arena", lambda: transport.reserve(block_bytes(self.plans[0])))
        memory = group.attempt("mapping peers' memory", lambda: transport.connect(block))
        self.steps = group.together("preparing handshakes and buffers", lambda: self._prepared(transport, memory))
        group.together("warming stages", self._rehearse)
        self._meet()
        if not self.eager_because:
            self.eager_because = self._uncapturable(transport)
        try:
            for number, step in enumerate(self.steps):
                self._in_time("the first step", step, step.issue)
                if self.eager_because:
                    continue
                if not self.cache.fits(number):
                    step.evict()
                    continue
                self._meet()
                group.together("capturing the step", step.capture)
                self._meet()
                assert step.captured is not None
                for which in ("first", "second"):
                    self._in_time(f"the {which} replay", step, step.captured.graph.replay)
                self.cache.hold(number)
        except group.SelfTestError:
            self._let_go()
            self.cache.forget()
            raise
        with torch.cuda.stream(self.streams[0]):
            self._zero_states()  # which the steps so far have written
        self._meet()

    def _prepared(self, transport: Transport, memory: PeerMemory) -> list[CudaStep]:
        found = []
        states = self._states()
        for plan, stages in zip(self.plans, self.stages, strict=True):
            groups = {number: self.groups[members] for number, members in enumerate(plan.groups)}
            site = RankSite(plan, self.rank, memory, self.streams, self.rescue, groups, states)
            found.append(CudaStep(site, transport.channel(site), stages))
        return found

    def _states(self) -> dict[str, Tensor]:
        """The states that only this rank writes, zeroed: of all plans, and of every capture of each."""
        found: dict[str, Tensor] = {}
        for plan in self.plans:
            for state in plan.states:
                box = plan.ranks[self.rank].buffers[state.buffer]
                if state.buffer >= len(plan.targets) and state.name not in found:
                    shape, dtype = (box.batch, box.rows, box.cols), torch_dtype(box.dtype)
                    found[state.name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return found

    def _rehearse(self) -> None:
        for step in self.steps:
            step.rehearse()

    def _uncapturable(self, transport: Transport) -> str:
        """Why the step can only run eagerly; empty where it can be captured."""
        kinds = (Collective, Signal) if isinstance(transport, CollectiveTransport) else (Collective,)
        programs = [program for plan in self.plans for program in plan.ranks]
        used = any(isinstance(item, kinds) for program in programs for item in program.instructions)
        if not used or not on_host(dist.group.WORLD):
            return ""
        return f"{dist.get_backend()} moves data through the host, which can't be captured"

    def _meet(self) -> None:
        torch.cuda.synchronize(self.device)
        group.meet()

    def _in_time(self, what: str, step: CudaStep, work: Callable[[], None]) -> None:
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
        if any(late) and not self._release(step, ends):
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

    def _release(self, step: CudaStep, ends: Sequence[torch.cuda.Event]) -> bool:
        """Satisfy waits from the host until every rank's work has ended; false where some rank's does not."""
        limit = time.monotonic() + RELEASE_LIMIT
        while True:
            over = _over(ends)
            answers = group.everyone("" if over else "late" if time.monotonic() < limit else "stuck")
            if "stuck" in answers or not any(answers):
                return "stuck" not in answers
            step.channel.release()
            time.sleep(0.01)

    # Steps

    def step(self, given: StepInputs, views: bool) -> tuple[Tensor, ...]:
        """One step. Inputs are read, and outputs made, on the caller's current stream. With ``views`` the outputs are
        the step's own memory, which the next step changes. Calls of several threads come one after another."""
        with self.one_at_a_time:
            step = self._ready(given.version)
            self.parameters.check()
            caller, origin = torch.cuda.current_stream(self.device), self.streams[0]
            origin.wait_stream(caller)
            if self.taken is not None:
                origin.wait_event(self.taken)
            with torch.cuda.stream(origin), torch.no_grad():
                step.copy_in(given.tensors)
                if step.captured is not None:
                    step.captured.graph.replay()
                else:
                    step.worker.watcher = self.watcher
                    step.issue()
            caller.wait_stream(origin)
            found = step.worker.outputs
            outputs = tuple(found[number] if views else found[number].clone() for number in sorted(found))
            self.taken = caller.record_event()
            return outputs

    def _ready(self, version: int) -> CudaStep:
        """The step of a version, captured unless steps run eagerly; others are let go for it."""
        step = self.steps[version]
        if len(self.steps) > 1 and os.environ.get("STEPGRAPH_DEBUG"):
            group.agree(f"the version of step {self.stepped}", version_of(step.plan))
        self.stepped += 1
        if self.eager_because:
            return step
        missed, evicted = self.cache.use(version)
        if missed:
            torch.cuda.synchronize(self.device)
            # As when the session opens, whatever the caller's mode: what is made here is written to by every step.
            with torch.inference_mode(False), torch.no_grad():
                for other in evicted:
                    self.steps[other].evict()
                try:
                    group.together("capturing the step", step.capture)
                except Exception:
                    step.evict()  # on every rank, or some would replay what others issue
                    self.cache.drop(version)
                    raise
            gone = ", ".join(version_of(self.plans[other]) for other in evicted) or "none"
            log.info("captured %s in the loop; let go: %s", version_of(step.plan), gone)
        return step

    def reset_state(self) -> None:
        """Zero this rank's states behind all that it was told to do. A peer's next step may send into them: all meet
        when they are zero."""
        with self.one_at_a_time:
            caller, origin = torch.cuda.current_stream(self.device), self.streams[0]
            origin.wait_stream(caller)
            if self.taken is not None:
                origin.wait_event(self.taken)
            with torch.cuda.stream(origin), torch.no_grad():
                self._zero_states()
            caller.wait_stream(origin)
            if not self.solo:
                self._meet()

    def _zero_states(self) -> None:
        """On the current stream."""
        for step in self.steps:
            step.worker.reset_state()

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
        try:
            torch.cuda.synchronize(self.device)  # raises where a step has broken the GPU's context
        finally:
            self._let_go()
            self._leave_groups()

    def _leave_groups(self) -> None:
        if dist.is_initialized():  # else they went with the default group
            for made in self.groups.values():
                if made is not None:
                    dist.destroy_process_group(made)

    def _let_go(self) -> None:
        for step in self.steps:
            step.let_go()
        self.steps = []


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
