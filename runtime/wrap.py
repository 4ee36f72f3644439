"""``bind`` and ``wrap``: a user's module as the stages of a plan, and in place of itself in a pipeline."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from stepgraph.planner.buckets import match
from stepgraph.planner.compile import compile_set
from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Plan
from stepgraph.planner.plan_set import PlanSet
from stepgraph.planner.schedule import load_schedule, schedule_path
from stepgraph.runtime.adapters.binding import Binding, BindingError, BoundStages, Settings
from stepgraph.runtime.adapters.family import (
    Arguments,
    bound_arguments,
    check_honoured,
    check_no_autocast,
    check_placed,
    family_of_model,
    refuse,
)
from stepgraph.runtime.session import CapturedStep, DeviceName, Session, need_cuda, need_name

log = logging.getLogger("stepgraph")


def bind(
    model: Module, plan: Plan | PlanSet, binding: Binding | None = None, compiled: Sequence[str] = ()
) -> BoundStages:
    """The stages of a plan, or of all plans of a set, computed by a module with its own weights: hand it to ``Session``
    as ``stages``. Without a ``binding`` the module is of a class of diffusers that stepgraph knows. ``compiled`` names
    ops whose stages go through torch.compile; each is held against the stage itself when a session makes it (E623).

    Raises:
        BindingError: E620 with every mismatch between the schedule and the module, or for what is no plan; E622 for a
            class without a binding.
    """
    if not isinstance(plan, Plan | PlanSet):
        got = f"a {type(plan).__name__}"
        raise BindingError([Diagnostic("E620", "stages are bound to a plan", None, "a Plan or a PlanSet", got)])
    if binding is not None and not isinstance(binding, Binding):
        got = f"a {type(binding).__name__}"
        raise BindingError([Diagnostic("E620", "stages are told by a binding", None, "a Binding, or None", got)])
    if not isinstance(model, Module):
        got = f"a {type(model).__name__}"
        raise BindingError([Diagnostic("E620", "stages are those of a module", None, "a torch.nn.Module", got)])
    plans = plan.plans if isinstance(plan, PlanSet) else (plan,)
    names = (compiled,) if isinstance(compiled, str) else compiled
    return BoundStages(binding or family_of_model(model).binding, model, plans, names)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call of a model's forward, as a plan takes it."""

    arguments: Arguments
    lengths: Settings
    inputs: Mapping[str, Tensor]


class Wrapped(Module):
    """Stands in for a model of diffusers in a pipeline: a call runs as a plan on all ranks. Everything else is the
    model's own: ``pipe.transformer = stepgraph.wrap(pipe.transformer, "wan_14b_u4")``. Where the schedule has buckets,
    one session serves all lengths that they have; else a call of other lengths than before compiles the schedule and
    opens a session for them. ``variant`` says which version of the step the next calls take, where the schedule has
    several; "" is the first. Where it has states, calls in each ``cache_context`` have states of their own."""

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
        most: int = 4,
        graph_bytes: int | None = None,
    ) -> None:
        """``schedule`` is a path or a shipped schedule's name, ``overrides`` sets values of it by dotted path. Lengths
        come from each call. On cpu ``ranks`` run in this process, by default as many as the schedule's mesh has; on
        cuda the process group's ranks do, and each calls the model with the same arguments. Close it before the
        process group. ``compiled`` is as in ``bind``. Sessions for at most ``most`` different lengths are kept, the
        least recently used is closed for another; of a schedule with buckets there is one, whose captured versions
        take ``graph_bytes`` at most.

        Raises:
            BindingError: E622 for a class that stepgraph has no binding for; E620 for a module that was changed in a
                way that the schedule has no op for, or a schedule that a call has not all inputs of. ScheduleError:
                as ``compile``. CapabilityError: E601 for no device's name.
        """
        super().__init__()
        need_name(device)
        for name, number in (("ranks", ranks), ("most", most)):
            if number is not None and type(number) is not int:
                found = Diagnostic("E620", f"a wrap can't take {name}={number!r}", None, "a whole number", repr(number))
                raise BindingError([found])
        self.model = model
        self.family = family_of_model(model)
        self.schedule, self.overrides = schedule_path(str(schedule)), dict(overrides or {})
        self.ranks, self.on, self.seed, self.eager = ranks, device, seed, eager
        self.compiled = (compiled,) if isinstance(compiled, str) else tuple(compiled)
        self.most, self.graph_bytes, self.variant = max(1, most), graph_bytes, ""
        self.file = load_schedule(self.schedule, tuple((path, str(value)) for path, value in self.overrides.items()))
        self.family.check_schedule(self.file)
        self.reads = {name for name, _ in self.file.inputs}
        self.context = ""
        self.sessions: OrderedDict[tuple[tuple[str, int | str], ...], Session] = OrderedDict()
        """By the lengths of their calls, where there are no buckets, and their context, where there are states; the
        least recently used first."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def __getstate__(self) -> dict[str, object]:
        """A copy opens sessions of its own: those that are held run this model."""
        return {**vars(self), "sessions": OrderedDict()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own: weights change in place, and the next call uses them."""
        return self.model.load_state_dict(*args, **kwargs)

    @contextmanager
    def cache_context(self, name: str, **more: Any) -> Iterator[None]:
        """Calls inside are those of one branch of guidance, as pipelines of diffusers name it: what a schedule keeps
        from step to step in states is kept for each."""
        model: Any = self.model
        before, self.context = self.context, name
        try:
            with model.cache_context(name, **more):
                yield
        finally:
            self.context = before

    def reset_state(self) -> None:
        """The next call begins a request: what earlier ones kept from step to step is gone, and a variant that needs
        another before it is E614. On cuda every rank calls it, between the same two calls."""
        if self.file.state or self.file.variants:
            for session in self.sessions.values():
                session.reset_state()

    def _reset_stateful_cache(self, recurse: bool = True) -> None:
        """What pipelines of diffusers call where a request ends."""
        self.reset_state()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: object, **kwargs: object) -> object:
        """The model's own forward, with its arguments and its result.

        Raises:
            ArgumentError: E621 for arguments that a plan can't honour. BindingError: E620 where the module and the
                schedule don't go together. BucketMissError: E615 for lengths that no bucket has. SessionError,
                GroupError, ScheduleError: as ``compile`` and ``Session``.
        """
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        if getattr(self.model, "is_cache_enabled", False):
            family_of_model(self.model)  # refuses it
        call = self.prepare(args, kwargs)
        with torch.no_grad():
            step = self._step_for(call.lengths)
            noise = step(**{entry.name: call.inputs[entry.name] for entry in step.plan.inputs})
            assert isinstance(noise, Tensor)
            sample = self.family.output(self.model, call.arguments, noise)
        return Transformer2DModelOutput(sample=sample) if call.arguments.given["return_dict"] else (sample,)

    def prepare(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> PreparedCall:
        """A call's lengths, and the plan's inputs for it. Raises ArgumentError E621."""
        given = bound_arguments(self.model, args, kwargs)
        check_no_autocast(self.device_type())
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

    def device_type(self) -> str:
        """Where sessions run: cpu or cuda."""
        if self.on == "auto":
            return "cuda" if torch.cuda.is_available() and dist.is_initialized() else "cpu"
        return self.on

    def _step_for(self, lengths: Settings) -> CapturedStep:
        """The step of the variant that is set, for calls of these lengths."""
        context = (("context", self.context),) if self.file.state else ()
        key = (*context, *(() if self.file.buckets else sorted(lengths.items())))
        if key not in self.sessions:
            family_of_model(self.model)  # nothing was changed since the last session that the plan does not compute
            if self.device_type() == "cuda":
                need_cuda()
            check_placed(self.model, self.device_type())
            started = time.perf_counter()
            plans = self.plans_for(lengths)
            stages = bind(self.model, plans, compiled=self.compiled)
            while len(self.sessions) >= self.most:
                self.sessions.popitem(last=False)[1].close()
            self.sessions[key] = Session(plans, self.on, self.seed, stages, self.eager, graph_bytes=self.graph_bytes)
            took = time.perf_counter() - started
            log.info("%s: a session for %s, opened in %.1f s; %d held", plans.name, lengths, took, len(self.sessions))
        self.sessions.move_to_end(key)
        session = self.sessions[key]
        bucket = ""
        if self.file.buckets:
            bucket = match(
                session.plans, {name.removeprefix("seq."): int(size) for name, size in lengths.items()}
            ).bucket
        return session.capture(variant=self.variant, bucket=bucket)

    def plans_for(self, lengths: Settings) -> PlanSet:
        """The schedule's plans for the ranks that there are and, where it has no buckets, the lengths of a call."""
        ranks = self.ranks
        if ranks is None and self.device_type() == "cuda":
            ranks = dist.get_world_size() if dist.is_initialized() else None
        settings = dict(self.overrides)
        if not self.file.buckets:
            settings |= {f"shape.{name}": size for name, size in lengths.items()}
        if ranks is not None:
            others = self.file.axis("cfg") * self.file.axis("tensor")
            if ranks % others:
                expected, got = f"a multiple of {others}, the mesh's other axes", str(ranks)
                raise BindingError([Diagnostic("E620", "ranks that fill no mesh", None, expected, got)])
            settings["mesh.ulysses"] = ranks // others
        return compile_set(load_schedule(self.schedule, tuple((path, str(value)) for path, value in settings.items())))

    def close(self) -> None:
        """Close every session; a later call opens another."""
        while self.sessions:
            self.sessions.popitem()[1].close()


wrap = Wrapped
"""A class that reads as what it does to a pipeline's model."""
