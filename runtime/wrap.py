"""``bind`` and ``wrap``: a user's module as the stages of a plan, and in place of itself in a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.plan import Plan
from stepgraph.planner.plan_set import PlanSet
from stepgraph.planner.schedule import load_schedule, schedule_path
from stepgraph.runtime.adapters.binding import Binding, BoundStages, Settings
from stepgraph.runtime.adapters.family import (
    Arguments,
    bound_arguments,
    check_honoured,
    family_of_model,
    refuse,
)
from stepgraph.runtime.session import CapturedStep, DeviceName, Session


def bind(
    model: Module, plan: Plan | PlanSet, binding: Binding | None = None, compiled: Sequence[str] = ()
) -> BoundStages:
    """The stages of a plan, or of all plans of a set, computed by a module with its own weights: hand it to ``Session``
    as ``stages``. Without a ``binding`` the module is of a class of diffusers that stepgraph knows. ``compiled`` names
    ops whose stages go through torch.compile; each is held against the stage itself when a session makes it (E623).

    Raises:
        BindingError: E620 with every mismatch between the schedule and the module; E622 for a class without a binding.
    """
    plans = plan.plans if isinstance(plan, PlanSet) else (plan,)
    return BoundStages(binding or family_of_model(model).binding, model, plans, compiled)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call of a model's forward, as a plan takes it."""

    arguments: Arguments
    lengths: Settings
    inputs: Mapping[str, Tensor]


class Wrapped(Module):
    """Stands in for a model of diffusers in a pipeline: a call runs as a plan on all ranks. Everything else is the
    model's own. A call of other lengths than before compiles a plan and opens a session for them."""

    def __init__(
        self,
        model: Module,
        schedule: str | Path,
        ranks: int | None = None,
        device: DeviceName = "auto",
        overrides: Mapping[str, str | int] | None = None,
        seed: int = 0,
        eager: bool = False,
        compiled: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.family = family_of_model(model)
        self.schedule, self.overrides = schedule_path(str(schedule)), dict(overrides or {})
        self.ranks, self.on, self.seed, self.eager = ranks, device, seed, eager
        self.compiled = tuple(compiled)
        self.reads = {name for name, _ in load_schedule(self.schedule).inputs}
        self.sessions: dict[tuple[tuple[str, int | str], ...], Session] = {}
        """By the lengths of their calls."""
        self.steps: dict[tuple[tuple[str, int | str], ...], CapturedStep] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, *args: object, **kwargs: object) -> object:
        """The model's own forward, with its arguments and its result.

        Raises:
            ArgumentError: E621 for arguments that a plan can't honour. BindingError: E620 where the module and the
                schedule don't go together. SessionError, GroupError, ScheduleError: as ``compile`` and ``Session``.
        """
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        if getattr(self.model, "is_cache_enabled", False):
            family_of_model(self.model)  # refuses it
        call = self.prepare(args, kwargs)
        with torch.no_grad():
            noise = self._step_for(call.lengths)(**call.inputs)
            assert isinstance(noise, Tensor)
            sample = self.family.output(self.model, call.arguments, noise)
        return Transformer2DModelOutput(sample=sample) if call.arguments.given["return_dict"] else (sample,)

    def prepare(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> PreparedCall:
        """A call's lengths, and the plan's inputs for it. Raises ArgumentError E621."""
        given = bound_arguments(self.model, args, kwargs)
        check_honoured(self.model, self.family, given)
        arguments = Arguments(given)
        lengths = self.family.lengths(self.model, arguments)
        with torch.no_grad():
            inputs = dict(self.family.inputs(self.model, arguments))
        for name, argument in self.family.optional.items():
            if name not in self.reads:
                del inputs[name]
                if given[argument] is not None:
                    hint = f"take a schedule with an input '{name}'"
                    raise refuse(argument, f"nothing: the schedule has no input '{name}'", "a tensor", hint)
        return PreparedCall(arguments, lengths, inputs)

    def _step_for(self, lengths: Settings) -> CapturedStep:
        """The step for calls of these lengths."""
        key = tuple(sorted(lengths.items()))
        if key not in self.steps:
            family_of_model(self.model)  # nothing was changed since the last session that the plan does not compute
            plan = self.plan_for(lengths)
            stages = bind(self.model, plan, compiled=self.compiled)
            session = Session(plan, self.on, self.seed, stages, self.eager)
            self.sessions[key], self.steps[key] = session, session.capture()
        return self.steps[key]

    def plan_for(self, lengths: Settings) -> Plan:
        """The schedule's plan for the ranks that there are and the lengths of a call."""
        ranks = self.ranks
        if ranks is None and self.on != "cpu" and dist.is_initialized():
            ranks = dist.get_world_size()
        settings = {**self.overrides, **{f"shape.{name}": size for name, size in lengths.items()}}
        if ranks is not None:
            settings["mesh.ulysses"] = ranks
        return compile_schedule(
            load_schedule(self.schedule, tuple((path, str(value)) for path, value in settings.items()))
        )

    def close(self) -> None:
        """Close every session; a later call opens another."""
        self.steps.clear()
        while self.sessions:
            self.sessions.popitem()[1].close()


def wrap(
    model: Module,
    schedule: str | Path,
    ranks: int | None = None,
    device: DeviceName = "auto",
    overrides: Mapping[str, str | int] | None = None,
    seed: int = 0,
    eager: bool = False,
    compiled: Sequence[str] = (),
) -> Wrapped:
    """A module that takes the model's place: ``pipe.transformer = stepgraph.wrap(pipe.transformer, "wan_14b_u4")``.

    ``schedule`` is a path or a shipped schedule's name, ``overrides`` sets values of it by dotted path. Lengths come
    from each call. On cpu ``ranks`` run in this process, by default as many as the schedule's mesh has; on cuda the
    process group's ranks do, and each calls the model with the same arguments. Close it before the process group.
    ``compiled`` is as in ``bind``.

    Raises:
        BindingError: E622 for a class that stepgraph has no binding for; E620 for a module that was changed in a way
            that the schedule has no op for. ScheduleError: E100.
    """
    return Wrapped(model, schedule, ranks, device, overrides, seed, eager, compiled)
