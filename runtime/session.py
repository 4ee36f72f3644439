"""A session runs a plan; a captured step is called in the denoising loop of the user's model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from stepgraph.kernels.stages import MadeUpStages, StageMaker
from stepgraph.planner.diagnostics import CapabilityError, Diagnostic, StepgraphError
from stepgraph.planner.plan import Plan
from stepgraph.runtime.cpu import HostLoop, World
from stepgraph.runtime.cpu_memory import Report, torch_dtype

NamedInputs = Mapping[str, Tensor]
Outputs = tuple[Tensor, ...]
DeviceName = Literal["cpu", "cuda", "auto"]
"""auto takes the best device that can run the plan."""
NamedLoop = Generator[NamedInputs, Outputs, object]


class SessionError(StepgraphError):
    """A session was used in a way that it does not allow, or a step did not finish (E60x, E401)."""


class Session:
    """Runs a plan on a device.

    On ``cpu`` all ranks run in this process, interleaved by ``seed``. ``stages`` gives what each op computes; by
    default reference arithmetic with weights made up from ``seed``. A session is a context manager; closing it twice
    is fine, using it afterwards is E604.

    Raises:
        CapabilityError: E601 for a device that is not there.
    """

    def __init__(
        self,
        plan: Plan,
        device: DeviceName = "auto",
        seed: int = 0,
        stages: StageMaker | None = None,
    ) -> None:
        if device == "cuda":
            hint = "run on the cpu device, with --device cpu"
            raise CapabilityError([Diagnostic("E601", "the cuda device is not in this version", None, "", "", hint)])
        self.plan = plan
        self._world: World | None = World(plan, stages or MadeUpStages(seed), seed)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back."""
        self._world = None

    @property
    def world(self) -> World:
        if self._world is None:
            raise SessionError([Diagnostic("E604", "the session is closed", None, "an open session", "a closed one")])
        return self._world

    @property
    def report(self) -> Report:
        """What the device has seen so far: races, faults, exactness of data movement."""
        return self.world.report

    def capture(self) -> CapturedStep:
        """The plan's step, ready to be called."""
        _ = self.world
        return CapturedStep(self)

    def drive(self, loop: Callable[[int], NamedLoop]) -> list[object]:
        """Run ``loop(rank)`` for every rank: a generator that yields the inputs of a step by name, is sent its outputs,
        and may return something. Ranks run ahead of each other as far as the plan lets them.

        Raises:
            SessionError: E401 for a deadlock; E605 for inputs that the plan was not compiled for.
        """
        results = self.world.run([self._host(loop(rank)) for rank in range(self.plan.world_size)])
        deadlocks = [fault for fault in self.report.faults if fault.kind == "deadlock"]
        if deadlocks:
            raise SessionError([Diagnostic("E401", "the step does not finish", None, "", deadlocks[0].message)])
        return results

    def _host(self, loop: NamedLoop) -> HostLoop:
        """``loop`` with its inputs checked and in the plan's order."""
        try:
            named = next(loop)
            while True:
                outputs = yield self.ordered(named)
                named = loop.send(outputs)
        except StopIteration as end:
            return end.value

    def ordered(self, named: NamedInputs) -> list[Tensor]:
        """The inputs in the plan's order.

        Raises:
            SessionError: E605 for one that is missing, unknown, or of another shape, dtype or device.
        """
        wanted = [entry.name for entry in self.plan.inputs]
        problems = [_input_error(name, "an input of the plan", "another name") for name in named if name not in wanted]
        found: list[Tensor] = []
        for entry in self.plan.inputs:
            tensor = named.get(entry.name)
            expected = f"{list(entry.shape)}, {entry.dtype.value}, cpu"
            if tensor is None:
                problems.append(_input_error(entry.name, expected, "nothing"))
                continue
            right = tuple(tensor.shape) == entry.shape and tensor.dtype is torch_dtype(entry.dtype)
            if not right or tensor.device.type != "cpu":
                dtype = str(tensor.dtype).removeprefix("torch.")
                problems.append(_input_error(entry.name, expected, f"{list(tensor.shape)}, {dtype}, {tensor.device}"))
            found.append(tensor)
        if problems:
            raise SessionError(problems)
        return found


def _input_error(name: str, expected: str, got: str) -> Diagnostic:
    return Diagnostic("E605", f"the input '{name}' is not what the plan was compiled for", None, expected, got)


class CapturedStep:
    """One denoising step. Called with the plan's inputs, by name or in their order, each whole; gives the output, or a
    tuple where the plan has several. Inputs are not changed; outputs are the caller's own."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor | Outputs:
        """Run one step on every rank.

        Raises:
            SessionError: E605 for inputs of another shape, dtype or device; E401 for a deadlock; E604 when closed.
        """
        names = [entry.name for entry in self.session.plan.inputs]
        if len(inputs) > len(names):
            raise SessionError([_input_error("*", f"{len(names)} inputs", f"{len(inputs)} inputs")])
        twice = [name for name in names[: len(inputs)] if name in named]
        if twice:
            raise SessionError([_input_error(twice[0], "one tensor", "one by place and one by name")])
        given = {**dict(zip(names, inputs, strict=False)), **named}
        results: dict[int, Outputs] = {}

        def loop(rank: int) -> Generator[NamedInputs, Outputs, None]:
            results[rank] = yield given

        self.session.drive(loop)
        return results[0] if len(results[0]) > 1 else results[0][0]


def random_inputs(plan: Plan, seed: int) -> dict[str, Tensor]:
    """Inputs that nobody made: normal numbers, the same in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return {
        entry.name: torch.randn(entry.shape, generator=generator).to(torch_dtype(entry.dtype)) for entry in plan.inputs
    }
