"""Families: classes of diffusers whose forward can run as a plan, and how their arguments become a plan's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from stepgraph.planner.diagnostics import Diagnostic, StepgraphError, nearest
from stepgraph.planner.schedule import Schedule, load_schedule, schedule_path
from stepgraph.runtime.adapters.binding import Binding, BindingError, Settings
from stepgraph.runtime.adapters.layers import drops, has_hooks

Config = Mapping[str, Any]
"""A model's config, as its JSON file holds it."""

FILES = {
    "FluxTransformer2DModel": "flux",
    "LTXVideoTransformer3DModel": "ltx_video",
    "QwenImageTransformer2DModel": "qwen_image",
    "WanTransformer3DModel": "wan",
}
"""The file of this folder that knows a class of diffusers."""


INSTEAD = {
    "OptimizedModule": "bind the module that torch.compile was given; `compiled` names stages to compile",
    "Wrapped": "it is wrapped already; its `model` is the module",
}
"""What to bind in place of a class that stands for another."""


class ArgumentError(StepgraphError):
    """An argument of a wrapped model's call that the plan can't honour (E621)."""


def refuse(name: str, expected: str, got: str, hint: str = "") -> ArgumentError:
    return ArgumentError(
        [Diagnostic("E621", f"a wrapped model can't honour the argument '{name}'", None, expected, got, hint)]
    )


class Arguments:
    """The arguments of one call of a model's forward, by name."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self.given = given

    def tensor(self, name: str, dims: int) -> Tensor:
        """Raises ArgumentError E621 where it is no tensor, or has another number of dimensions."""
        found = self.given.get(name)
        if isinstance(found, Tensor) and found.dim() == dims:
            return found
        got = f"one of {found.dim()}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise refuse(name, f"a tensor of {dims} dimensions", got)

    def batched(self, name: str, dims: int, batch: int) -> Tensor:
        """A tensor for every sample; one for all is repeated, as in arithmetic. Contiguous."""
        found = self.tensor(name, dims)
        return (found.expand(batch, *found.shape[1:]) if len(found) == 1 else found).contiguous()

    def optional(self, name: str, dims: int, batch: int) -> Tensor | None:
        return None if self.given.get(name) is None else self.batched(name, dims, batch)

    def size(self, name: str) -> int:
        found = self.given.get(name)
        if isinstance(found, int):
            return found
        raise refuse(name, "a number", f"a {type(found).__name__}")

    def per_sample(self, name: str, batch: int) -> Tensor:
        """A tensor with a number for each sample, as float32: exact for every dtype that schedulers give."""
        found = self.given.get(name)
        if not isinstance(found, Tensor) or found.dim() > 1 or found.numel() not in (1, batch):
            got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise refuse(name, f"a tensor of shape [{batch}]", got)
        return found.detach().to(torch.float32).reshape(-1).expand(batch).contiguous()


def token_lengths(stream: str) -> Callable[[Any, Arguments], Settings]:
    """The lengths of a call with tokens (batch, rows, features) of a stream of that name, and of text."""

    def lengths(model: Any, arguments: Arguments) -> Settings:
        batch, rows, _ = arguments.tensor("hidden_states", 3).shape
        text = arguments.tensor("encoder_hidden_states", 3).shape[1]
        return {"batch": batch, f"seq.{stream}": rows, "seq.txt": text}

    return lengths


@dataclass(frozen=True, slots=True)
class Family:
    """How a class of diffusers runs as a plan."""

    binding: Binding
    schedule: str
    """The shipped schedule that corresponds to it."""
    settings: Callable[[Config], Settings]
    """What a config says of a schedule's sizes, dtype aside."""
    takes: frozenset[str]
    """Arguments of its forward that a plan honours; all others must have their defaults."""
    processors: frozenset[str]
    """Attention processors whose arithmetic the binding has."""
    rewritten: frozenset[str]
    """Classes of layers whose own forward is not called: their parts are, by stages."""
    refuses: Callable[[Config], Iterable[str]]
    """What of a config has no op in the schedule."""
    lengths: Callable[[Any, Arguments], Settings]
    """The schedule's ``shape`` for a call."""
    inputs: Callable[[Any, Arguments], Mapping[str, Tensor]]
    """The plan's inputs for a call."""
    output: Callable[[Any, Arguments, Tensor], Tensor]
    """What forward gives, from the plan's output."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """Inputs that a schedule may leave out, and the argument of which each is made."""

    def check_schedule(self, schedule: Schedule) -> None:
        """Raises BindingError E620 for a schedule that is not written for one call of a model of this family."""
        like = load_schedule(schedule_path(self.schedule))
        inputs = [{name for name, _ in file.inputs} - self.optional.keys() for file in (like, schedule)]
        lengths = [{name for name, _ in file.segments} for file in (like, schedule)]
        problems = [
            Diagnostic(
                "E620",
                f"the {what} of the schedule {schedule.name} are not those of a call of the model",
                None,
                ", ".join(sorted(expected)),
                ", ".join(sorted(got)),
                f"start from {self.schedule}, or open a Session over stepgraph.bind(model, plan)",
            )
            for what, (expected, got) in (("inputs", inputs), ("named lengths", lengths))
            if expected != got
        ]
        if any(spec.placement == "cfg" for _, spec in schedule.inputs):
            message = (
                f"the schedule {schedule.name} joins both branches of guidance, and a call of the model is for one"
            )
            hint = "open a Session over stepgraph.bind(model, plan)"
            problems.append(Diagnostic("E620", message, None, "inputs of one branch", "placement: cfg", hint))
        if problems:
            raise BindingError(problems)


def config_of(model: Any) -> Config:
    config: Config = model.config
    return config


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def family_of(name: str, module: str) -> Family:
    """The family of a class, by its name and its module's.

    Raises:
        BindingError: E622 for a class that has none.
    """
    if name not in FILES or module.split(".", maxsplit=1)[0] != "diffusers":
        raise BindingError(
            [
                Diagnostic(
                    "E622",
                    f"there is no binding for the class {module}.{name}",
                    None,
                    f"one of {', '.join(FILES)} of diffusers",
                    f"{module}.{name}",
                    INSTEAD.get(name)
                    or ("" if _is_real(name) else nearest(name, FILES))
                    or "docs/bindings.md shows how to write one",
                )
            ]
        )
    found = import_module(f"stepgraph.runtime.adapters.{FILES[name]}").FAMILY
    assert isinstance(found, Family)
    return found


def _is_real(name: str) -> bool:
    """Whether diffusers has a class of that name, which then is no misspelling of another."""
    return find_spec("diffusers") is not None and name in dir(import_module("diffusers"))


def family_of_model(model: Module) -> Family:
    """As family_of, for a module.

    Raises:
        BindingError: E622 for a class that has none; E620 where the module computes what its schedule has no op for.
    """
    family = family_of(type(model).__name__, type(model).__module__)
    problems = [*family.refuses(config_of(model)), *_changes(model, family)]
    if problems:
        expected = f"what the schedule {family.schedule} computes"
        raise BindingError([Diagnostic("E620", problem, None, expected, "something else") for problem in problems])
    return family


def _changes(model: Any, family: Family) -> Iterable[str]:
    """What was done to a module since it was made that its binding does not compute."""
    if getattr(model, "is_cache_enabled", False):
        yield "the module has a cache of diffusers enabled, whose hooks a plan does not run"
    for name, part in model.named_modules():
        if getattr(part, "_hf_hook", None) is not None:
            yield f"{name or 'the module'} has a hook of accelerate, which moves weights while it runs (offloading)"
        elif getattr(getattr(part, "_diffusers_hook", None), "hooks", None):
            yield f"{name or 'the module'} has a hook of diffusers (offloading, casting of weights, a cache)"
        elif type(part).__name__ in family.rewritten and _calls_more(part):
            yield f"{name or 'the module'} has hooks or another forward, and a plan calls its parts instead of it"
        if drops(part):
            yield f"{name} drops numbers at random, other ones on every rank: the module wants a call of eval()"
        processor = getattr(part, "processor", None)
        if processor is None:
            continue
        kind = type(processor).__name__
        if kind not in family.processors:
            yield f"the attention processor of {name} is a {kind}, not a {' or '.join(sorted(family.processors))}"
        elif getattr(processor, "_parallel_config", None) is not None:
            yield f"{name} is parallelised by diffusers already"


def _calls_more(part: Module) -> bool:
    """Whether a call of a layer does more than diffusers' own forward, or something else."""
    return has_hooks(part) or not type(part).forward.__module__.startswith(("diffusers.", "torch."))


def settings_of(model: Module) -> Settings:
    """The settings that give the shipped schedule of a module's family the module's sizes."""
    family = family_of_model(model)
    return family.binding.sizes(model)


def bound_arguments(model: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a call of ``model``, by name, defaults included. Raises TypeError as the call itself would."""
    found = inspect.signature(model.forward).bind(*args, **kwargs)
    found.apply_defaults()
    return dict(found.arguments)


def check_honoured(model: Any, family: Family, given: Mapping[str, object]) -> None:
    """Raises ArgumentError E621 that names every argument that a plan would ignore."""
    defaults = {name: found.default for name, found in inspect.signature(model.forward).parameters.items()}
    problems: list[Diagnostic] = []
    for name, value in given.items():
        ignored = name not in family.takes and name != "return_dict"
        if ignored and value is not None and value is not defaults[name] and value != {}:
            expected = f"nothing: the schedule {family.schedule} has no op for it"
            problems += refuse(name, expected, f"a {type(value).__name__}").diagnostics
        if isinstance(value, Tensor) and value.requires_grad:
            problems += refuse(name, "a tensor that needs no gradient", "one that requires it").diagnostics
    if problems:
        raise ArgumentError(problems)


def check_placed(model: Module, device: str) -> None:
    """Raises BindingError E620 where a weight is not on the kind of device that a session runs on."""
    elsewhere = {name: tensor.device for name, tensor in model.named_parameters() if tensor.device.type != device}
    if elsewhere:
        first, where = next(iter(elsewhere.items()))
        message = f"{len(elsewhere)} weights of the module are not where the session runs, {first} first"
        raise BindingError([Diagnostic("E620", message, None, device, str(where))])


def check_no_autocast(device: str) -> None:
    """Raises ArgumentError E621 under autocast, which would give stages other dtypes than the plan has."""
    if torch.is_autocast_enabled(device):
        hint = "give the model the dtype that it shall have, and call it without autocast"
        found = Diagnostic("E621", "a wrapped model can't honour autocast", None, "no autocast", "autocast", hint)
        raise ArgumentError([found])
