"""A session runs a plan; a captured step is called in the denoising loop of the user's model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.kernels.stages import MadeUpStages, StageMaker
from stepgraph.planner.diagnostics import CapabilityError, Diagnostic
from stepgraph.planner.footprint import footprint
from stepgraph.planner.plan import Plan
from stepgraph.planner.plan_set import PlanSet, alone
from stepgraph.runtime.bindings import Described
from stepgraph.runtime.cache import CacheStats, ReplayCache
from stepgraph.runtime.cpu import HostLoop, World
from stepgraph.runtime.cpu_memory import Report
from stepgraph.runtime.cpu_rank import StepInputs
from stepgraph.runtime.facts import NO_BINDINGS, CaptureFacts, has_bindings
from stepgraph.runtime.inputs import NamedInputs, SessionError, input_error, ordered
from stepgraph.runtime.interleave import Interleaving

Outputs = tuple[Tensor, ...]
DeviceName = Literal["cpu", "cuda", "auto"]
"""auto takes the best device that can run the plan."""
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class StepOf:
    """A step of a version of a plan set; by default of the first variant and the first bucket."""

    inputs: NamedInputs
    variant: str = ""
    bucket: str = ""


NamedLoop = Generator[NamedInputs | StepOf, Outputs, object]


class Backend(Protocol):
    """A device's side of a session."""

    device: torch.device
    """Where inputs are taken from and outputs are left."""
    ranks: Sequence[int]
    """Those that run in this process."""

    def run(self, loops: Sequence[HostLoop], views: bool) -> list[object]:
        """Run one host loop for each of ``ranks``; with ``views`` it is sent outputs that the next step changes."""

    def reset_state(self) -> None:
        """Zero every state of ``ranks``, behind the last step and before the next one of any rank."""

    def close(self) -> None: ...


class Session:
    """Runs a plan on a device.

    On ``cpu`` all ranks run in this process, interleaved by ``seed``. On ``cuda`` this process is one rank of the
    default process group, and the step is captured as one CUDA graph, unless ``eager``; every rank opens the session
    with the same arguments. ``auto`` is cuda in a process group with a GPU, else cpu. ``stages`` gives what each op
    computes; by default reference arithmetic with weights made up from ``seed``. With ``solo`` this process runs rank 0
    alone on ``cuda``, with stand-ins for its peers: what it computes means nothing, what it costs does. A session is a
    context manager; closing it twice is fine, using it afterwards is E604. Close it before the process group.

    Of a plan set every version is warmed when the session opens. On ``cuda`` those are captured that ``graph_bytes``
    has room for by ``footprint``; the others are captured when they are first used, and those that were not used for
    longest are let go for them. ``stats`` tells what that came to. All ranks must take the same version in a step:
    other ranks can't know (with STEPGRAPH_DEBUG set they compare, and raise E607; the cpu device always does).

    Raises:
        CapabilityError: E601 for a device that is not there, E606 for what it can't do.
        GroupError: E607 where ranks disagree, or another rank has failed.
        StageError: E610 for a stage that fails. ReadbackError: E608. SelfTestError: E611.
    """

    def __init__(
        self,
        plan: Plan | PlanSet,
        device: DeviceName = "auto",
        seed: int = 0,
        stages: StageMaker | None = None,
        eager: bool = False,
        solo: bool = False,
        graph_bytes: int | None = None,
    ) -> None:
        if not isinstance(plan, Plan | PlanSet):
            hint = "stepgraph.load reads one from a file, stepgraph.compile makes one from a schedule"
            raise SessionError([_wrong_argument("plan", "a Plan or a PlanSet", f"a {type(plan).__name__}", hint)])
        need_name(device)
        if type(seed) is not int or not 0 <= seed <= MAX_SEED:
            raise SessionError([_wrong_argument("seed", f"an int from 0 to {MAX_SEED}", repr(seed))])
        if graph_bytes is not None and (type(graph_bytes) is not int or graph_bytes < 0):
            raise SessionError([_wrong_argument("graph_bytes", "a number of bytes, or None", repr(graph_bytes))])
        self.plans = plan if isinstance(plan, PlanSet) else alone(plan)
        sizes = [footprint(version) for version in self.plans.plans]
        self.cache = ReplayCache(list(self.plans.versions()), sizes, graph_bytes)
        self._before: dict[tuple[int, str], str] = {}
        """(rank, bucket) -> the variant that came last."""
        with torch.inference_mode(False), torch.no_grad():  # what is made here is written to by every step
            self._backend: Backend | None = _open(self.plans.plans, self.cache, device, seed, stages, eager, solo)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; on cuda before the process group is destroyed."""
        if self._backend is not None:
            backend, self._backend = self._backend, None  # closed, also where closing fails
            backend.close()

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            raise SessionError([Diagnostic("E604", "the session is closed", None, "an open session", "a closed one")])
        return self._backend

    @property
    def report(self) -> Report:
        """What the cpu device has seen so far: races, faults, exactness of data movement.

        Raises:
            CapabilityError: E606 on cuda, which watches nothing.
        """
        backend = self.backend
        if not isinstance(backend, World):
            found = Diagnostic("E606", "only the cpu device reports races", None, "a session on cpu", "cuda")
            raise CapabilityError([found])
        return backend.report

    @property
    def facts(self) -> CaptureFacts:
        """Of a session on cuda: its transport, and what was captured.

        Raises:
            CapabilityError: E606 on cpu, which captures nothing.
        """
        backend = self.backend
        if isinstance(backend, World):
            raise CapabilityError([Diagnostic("E606", "only cuda captures", None, "a session on cuda", "cpu")])
        from stepgraph.runtime.cuda_backend import CudaBackend

        assert isinstance(backend, CudaBackend)
        return backend.facts

    def stats(self) -> CacheStats:
        """What the replay cache has done. On cpu nothing is captured; the figures are those that cuda would have."""
        return self.cache.stats()

    def capture(
        self, outputs: Literal["copy", "view"] = "copy", *, variant: str = "", bucket: str = ""
    ) -> CapturedStep:
        """The plan's step, or that of a version of a plan set, ready to be called; by default of the first variant and
        the first bucket. Its outputs are the caller's own; as a ``view`` they are the step's memory, which the next
        call changes.

        Raises:
            PlanError: E155 for a version that is not there.
        """
        _ = self.backend
        if outputs not in ("copy", "view"):
            raise SessionError([_wrong_argument("outputs", "'copy' or 'view'", repr(outputs))])
        return CapturedStep(self, outputs == "view", self.plans.index(variant, bucket))

    def reset_state(self) -> None:
        """Zero the plan's states, as before the first step; a request begins, so that a variant that needs another
        before it is E614. On cuda every rank calls it, between the same two steps: what is zeroed lies behind the last
        step and the caller's current stream, and no rank goes on before all have zeroed theirs."""
        with torch.inference_mode(False):
            self.backend.reset_state()
        self._before.clear()

    def follow(self, interleaving: Interleaving) -> None:
        """On cpu: let ranks take these turns first, from the next step on.

        Raises:
            CapabilityError: E606 on cuda, where the hardware decides.
        """
        backend = self.backend
        if not isinstance(backend, World):
            problem = "only the cpu device can follow an interleaving"
            raise CapabilityError([Diagnostic("E606", problem, None, "a session on cpu", "cuda")])
        backend.follow(interleaving.turns)

    def drive(self, loop: Callable[[int], NamedLoop], views: bool = False) -> list[object]:
        """Run ``loop(rank)`` for every rank of this process: a generator that yields the inputs of a step by name (or a
        ``StepOf`` a version), is sent its outputs, and may return something. Ranks run ahead of each other as far as
        the plan lets them.

        Raises:
            SessionError: E401 for a deadlock; E605 for inputs that the plan was not compiled for; E614 for a variant
                that may not follow the one before it.
        """
        backend = self.backend
        with torch.inference_mode(False):  # what a step makes outlives it, and is written to by later ones
            results = backend.run([self._host(rank, loop(rank)) for rank in backend.ranks], views)
        deadlocks = [f for f in backend.report.faults if f.kind == "deadlock"] if isinstance(backend, World) else []
        if deadlocks:
            raise SessionError([Diagnostic("E401", "the step does not finish", None, "", deadlocks[0].message)])
        return results

    def _host(self, rank: int, loop: NamedLoop) -> HostLoop:
        """``loop`` with its versions and inputs checked, and the inputs in the plan's order."""
        try:
            step = next(loop)
            while True:
                given = step if isinstance(step, StepOf) else StepOf(step)
                outputs = yield self._checked(rank, given)
                step = loop.send(outputs)
        except StopIteration as end:
            return end.value

    def _checked(self, rank: int, step: StepOf) -> StepInputs:
        version = self.plans.index(step.variant, step.bucket)
        plan = self.plans.plans[version]
        bucket, variant = plan.source.bucket, plan.source.variant
        before = self._before.get((rank, bucket), "")
        if not self.plans.may_follow(before, variant) and not self.plans.may_follow("", variant):
            allowed = next(rule.after for rule in self.plans.variants if rule.name == variant)
            expected = f"one of {', '.join(allowed)} before it" if allowed else "nothing: no variant may come before it"
            problem = f"the variant '{variant}' may not come here"
            raise SessionError([Diagnostic("E614", problem, None, expected, before or "the beginning of a request")])
        tensors = ordered(plan, self.backend.device, step.inputs)
        self._before[rank, bucket] = variant
        return StepInputs(version, tensors)


def _wrong_argument(name: str, expected: str, got: str, hint: str = "") -> Diagnostic:
    return Diagnostic("E605", f"{name} is not what a session takes", None, expected, got, hint)


class CapturedStep:
    """One denoising step. Called with the plan's inputs, by name or in their order, each whole and contiguous; gives
    the output, or a tuple where the plan has several. Inputs are not changed.

    On cuda a call only puts work on the GPU: inputs are read, and outputs made, in the order of the caller's current
    stream, whichever that is. Calls of one session run one after another, in the order in which they were made.
    """

    def __init__(self, session: Session, views: bool, version: int) -> None:
        self.session, self.views, self.plan = session, views, session.plans.plans[version]

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor | Outputs:
        """Run one step on every rank.

        Raises:
            SessionError: E605 for inputs of another shape, dtype, device or layout; E401 for a deadlock; E604 when
                closed.
            ParameterError: E609 where a bound parameter has moved since the step was captured.
        """
        names = [entry.name for entry in self.plan.inputs]
        if len(inputs) > len(names):
            raise SessionError([input_error("*", f"{len(names)} inputs", f"{len(inputs)} inputs")])
        twice = [name for name in names[: len(inputs)] if name in named]
        if twice:
            raise SessionError([input_error(twice[0], "one tensor", "one by place and one by name")])
        source = self.plan.source
        given = StepOf({**dict(zip(names, inputs, strict=False)), **named}, source.variant, source.bucket)
        results: dict[int, Outputs] = {}

        def loop(rank: int) -> Generator[StepOf, Outputs, None]:
            results[rank] = yield given

        self.session.drive(loop, self.views)
        outputs = results[self.session.backend.ranks[0]]
        return outputs[0] if len(outputs) == 1 else outputs


def _open(
    plans: Sequence[Plan],
    cache: ReplayCache,
    device: DeviceName,
    seed: int,
    stages: StageMaker | None,
    eager: bool,
    solo: bool,
) -> Backend:
    """The backend of a device, with everything allocated, warmed and captured."""
    in_group = torch.cuda.is_available() and dist.is_initialized()
    if device == "cpu" or (device == "auto" and not in_group and not solo):
        if solo:
            problem = "a rank alone runs on cuda"
            raise CapabilityError([Diagnostic("E606", problem, None, "--device cuda", "cpu")])
        return World(plans, cache, stages or MadeUpStages(seed), seed)
    need_cuda()
    if not solo and not dist.is_initialized():
        message, hint = "the cuda device has no process group", "`stepgraph run --device cuda` starts one"
        raise CapabilityError([Diagnostic("E601", message, None, "a process of a group for each rank", "none", hint)])
    from stepgraph.runtime.cuda_backend import CudaBackend

    where = torch.device("cuda", torch.cuda.current_device())
    if isinstance(stages, Described):
        weights = stages.description()
    else:
        weights = "weights of the caller" if stages else f"weights made up from seed {seed}"
    maker = stages or MadeUpStages(seed, where, drawn_there=solo)
    return CudaBackend(plans, cache, maker, weights, eager, solo)


def need_name(device: str) -> None:
    """Raises CapabilityError E601 for what is no ``DeviceName``."""
    if device not in get_args(DeviceName):
        expected = ", ".join(get_args(DeviceName))
        raise CapabilityError([Diagnostic("E601", f"no device '{device}'", None, expected, repr(device))])


def cuda_lacks() -> str:
    """Why this process can't use the cuda device; empty where it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return "" if has_bindings() else NO_BINDINGS


def need_cuda() -> None:
    """Raises CapabilityError E601 where this process can't use the cuda device."""
    lacks = cuda_lacks()
    if lacks:
        hint = "`stepgraph doctor` tells more; --device cpu runs everywhere"
        raise CapabilityError([Diagnostic("E601", "the cuda device is not there", None, "", lacks, hint)])
