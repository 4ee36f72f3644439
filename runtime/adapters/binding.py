"""Bindings: what the ops of a schedule compute with a module of the user's, and that the two go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from stepgraph.kernels.stages import MadeUpStages, Stage
from stepgraph.planner.diagnostics import Diagnostic, StepgraphError, nearest
from stepgraph.planner.plan import Op, Plan, Run
from stepgraph.planner.schedule import Schedule, read_schedule
from stepgraph.planner.source import TreePath
from stepgraph.runtime.adapters.layers import layer_facts
from stepgraph.runtime.stage_call import laid_out

T = TypeVar("T")
StageFunction = Callable[..., Tensor | Sequence[Tensor]]
"""Takes a module and the op's operands; gives what the op makes."""
Settings = Mapping[str, int | str]
"""Values of a schedule by dotted path, as ``model.heads`` or ``sizes.text_dim``."""
BlockModules = Callable[[Any], Sequence[Module]]
"""The modules of a block's layers, of a model."""
WITHOUT_WEIGHTS = ("concat", "guide", "join", "keep", "repeat", "sum")
"""Kinds whose arithmetic the schedule says in full: nothing is bound to them."""
NEEDED = ("model.heads", "model.head_dim")
"""What every binding tells: with other heads of the same total size, results would be wrong and nothing would fail."""
MODEL_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "dtype")


class BindingError(StepgraphError):
    """A binding, its module and a schedule don't go together, or there is no binding (E620, E622)."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What each op of a schedule computes with a module.

    ``stages`` has a function for every op that computes, by its name, ``block.name`` or ``block.name.suffix``. It is
    called with the module and with the op's operands in the schedule's order, each the rank's own share, with the
    shape that the schedule gives it: heads as (batch, rows, heads, head_dim). The module is that of the layer for an op
    of a block in ``blocks``, else the whole model. It returns a tensor for each result, or one tensor for all of them,
    whose dimensions may be split or joined, but stand in no other order. What an op that works in place returns is
    copied into its operands.

    ``sizes`` tells what a module has, by the paths of the schedule that must say the same, ``model.heads`` and
    ``model.head_dim`` among them; ``model.kv_heads`` is ``model.heads`` unless it is told. A schedule may leave out
    ``optional`` stages.
    """

    name: str
    blocks: Mapping[str, BlockModules]
    stages: Mapping[str, StageFunction]
    sizes: Callable[[Any], Settings]
    optional: frozenset[str] = frozenset()


class BoundStages:
    """A stage maker: the functions of a binding over a module, whose own tensors are the weights."""

    def __init__(self, binding: Binding, model: Module, plans: Sequence[Plan], compiled: Sequence[str] = ()) -> None:
        """``plans`` are the versions of one schedule's step, which together run every layer; ``compiled`` names the ops
        whose functions go through torch.compile.

        Raises:
            BindingError: E620 with every mismatch between the schedule and the module.
        """
        self.binding, self.model = binding, model
        self.layers = {
            name: tuple(_told(binding, model, f"the layers of '{name}'", modules))
            for name, modules in binding.blocks.items()
        }
        self.numbers = _numbers(plans)
        problems = [*_wrong_stages(self, plans), *_wrong_sizes(self, plans[0]), *_not_stages(binding, compiled)]
        if problems:
            raise BindingError(problems)
        self.compiled: dict[str, StageFunction] = {
            name: torch.compile(binding.stages[name], dynamic=False) for name in sorted(compiled)
        }
        self.without_weights = MadeUpStages()

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self.model.named_parameters()

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        return self.model.named_buffers()

    def named_layers(self) -> Iterable[tuple[str, Mapping[str, object]]]:
        return layer_facts(self.model)

    def description(self) -> str:
        """What ranks of one group have alike."""
        names = ", ".join(self.compiled) or "nothing"
        return f"the binding {self.binding.name} over a {type(self.model).__name__}, compiled: {names}"

    def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
        """The stage of a ``Run``.

        Raises:
            CompiledStageError: E623 where a compiled one gives other numbers.
        """
        op = plan.ops[run.op]
        if op.name not in self.binding.stages:
            return self.without_weights(plan, rank, run)
        function, module = self.binding.stages[op.name], self._module(op)
        if op.name in self.compiled:
            from stepgraph.runtime.adapters.compiled import check_parity

            plain, function = function, self.compiled[op.name]
            check_parity(plan, rank, run, module, plain, function)
        changed = [run.inputs.index(view) for view in run.outputs if view in run.inputs]
        program = plan.ranks[rank]
        made = program.made_by(run)

        def stage(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            found = function(module, *tensors)
            results = (found,) if isinstance(found, Tensor) else tuple(found)
            if changed:
                for place, result in zip(changed, results, strict=True):
                    if result is not tensors[place]:
                        name = f"operand {place + 1}"
                        tensors[place].copy_(laid_out(plan, run, name, result, tuple(tensors[place].shape)))
                return []
            if len(results) > 1 and len(made) == 1:
                buffer = program.buffers[made[0]]
                rows = (buffer.batch, buffer.rows)
                boxes = [
                    laid_out(plan, run, buffer.name, result, (*rows, result.numel() // max(1, prod(rows))))
                    for result in results
                ]
                return [torch.cat(boxes, dim=-1)]
            return results

        return stage

    def _module(self, op: Op) -> Module:
        block = op.name.split(".")[0]
        if op.layer is None or block not in self.layers:
            return self.model
        return self.layers[block][self.numbers[block].index(op.layer)]


def _told(binding: Binding, model: Module, what: str, function: Callable[[Any], T]) -> T:
    """What a function of a binding tells of a module. Raises BindingError E620 where it fails."""
    try:
        return function(model)
    except Exception as error:
        message = f"the binding {binding.name} can't tell {what} of the module, a {type(model).__name__}"
        got = f"{type(error).__name__}: {error}"
        raise BindingError([Diagnostic("E620", message, None, what, got)]) from error


def _numbers(plans: Sequence[Plan]) -> dict[str, list[int]]:
    """The layers of each block, as ``Op.layer`` counts them, in order."""
    found: dict[str, set[int]] = {}
    for op in (op for plan in plans for op in plan.ops):
        if op.layer is not None:
            found.setdefault(op.name.split(".")[0], set()).add(op.layer)
    return {block: sorted(layers) for block, layers in found.items()}


def _wrong_stages(bound: BoundStages, plans: Sequence[Plan]) -> list[Diagnostic]:
    """Ops without a function, and functions without an op."""
    ops: dict[str, Op] = {}
    for plan in plans:
        run = {item.op for program in plan.ranks for item in program.instructions if isinstance(item, Run)}
        ops |= {plan.ops[number].name: plan.ops[number] for number in sorted(run)}
    known = bound.binding.stages
    binding, schedule = f"the binding {bound.binding.name}", f"the schedule {plans[0].name}"
    problems = [
        Diagnostic(
            "E620",
            f"{schedule} has an op that {binding} does not know: {name}, in line {op.line}",
            None,
            f"a stage called {name}",
            "none",
            nearest(name, known) or f"known: {', '.join(known)}",
        )
        for name, op in ops.items()
        if name not in known and op.kind not in WITHOUT_WEIGHTS
    ]
    problems += [
        Diagnostic(
            "E620", f"{binding} has a stage that {schedule} leaves out: {name}", None, f"an op called {name}", "none"
        )
        for name in known
        if name not in ops and name not in bound.binding.optional
    ]
    problems += [
        Diagnostic(
            "E620", f"the stage {name} of {binding} can't be called", None, "a function", type(function).__name__
        )
        for name, function in known.items()
        if not callable(function)
    ]
    return problems


def _not_stages(binding: Binding, compiled: Sequence[str]) -> list[Diagnostic]:
    """Names under ``compiled`` that are no stages."""
    known = binding.stages
    return [
        Diagnostic("E620", f"no stage to compile is called {name}", None, "a stage", f"'{name}'", nearest(name, known))
        for name in compiled
        if name not in known
    ]


def _wrong_sizes(bound: BoundStages, plan: Plan) -> list[Diagnostic]:
    """Sizes of the schedule that are not the module's."""
    schedule = read_schedule(plan.source.text, plan.source.file, plan.source.overrides)
    module = f"the module, a {type(bound.model).__name__}"
    problems: list[Diagnostic] = []

    def differs(what: str, path: TreePath, said: object, has: object, hint: str = "") -> None:
        place = schedule.tree.place(path) if schedule.tree.has(path) else None
        problems.append(
            Diagnostic(
                "E620",
                f"{what} differs between the schedule and the module",
                place,
                f"{said}, in the schedule {plan.name}",
                f"{has}, in {module}",
                hint,
            )
        )

    for block, layers in bound.layers.items():
        if block not in bound.numbers:
            message = (
                f"the binding {bound.binding.name} has layers of a block that the schedule {plan.name} does not run"
            )
            known = ", ".join(bound.numbers) or "no block"
            problems.append(Diagnostic("E620", message, None, known, block, nearest(block, bound.numbers)))
        elif len(layers) != len(bound.numbers[block]):
            differs(f"the number of layers of '{block}'", ("blocks", block), len(bound.numbers[block]), len(layers))
    sizes = dict(_told(bound.binding, bound.model, "the sizes", bound.binding.sizes))
    problems += [
        Diagnostic("E620", f"the binding {bound.binding.name} does not tell {path} of {module}", None, "it", "nothing")
        for path in NEEDED
        if path not in sizes
    ]
    if "model.heads" in sizes:
        sizes.setdefault("model.kv_heads", sizes["model.heads"])
    for path, has in sizes.items():
        stated = _said(schedule, path)
        if stated is None:
            expected = ", ".join(f"model.{size}" for size in MODEL_SIZES) + ", or sizes.NAME"
            message = f"the binding {bound.binding.name} tells a size that no schedule has: {path}"
            problems.append(Diagnostic("E620", message, None, expected, path))
        elif stated and stated != str(has):
            hint = f"overrides={{'{path}': {has!r}}} sets it; stepgraph.settings_of(model) gives all for a known class"
            differs(path, tuple(path.split(".")), stated, has, hint)
    if schedule.axis("tensor") > 1:
        problems.append(
            Diagnostic(
                "E620",
                f"the binding {bound.binding.name} has whole weights, and the schedule cuts them over `tensor`",
                schedule.tree.place(("mesh", "tensor")),
                "a mesh without tensor",
                f"tensor: {schedule.axis('tensor')}",
            )
        )
    return problems


def _said(schedule: Schedule, path: str) -> str | None:
    """What a schedule says at a path under ``model`` or ``sizes``; "" where it leaves that open, None for a path that
    no schedule has."""
    section, _, name = path.partition(".")
    if section == "sizes":
        size = dict(schedule.own_sizes).get(name)
        return "" if size is None else str(size)
    if section != "model" or name not in MODEL_SIZES:
        return None
    if name == "dtype":
        return schedule.model.dtype.value
    return str(schedule.model.layers if name == "layers" else schedule.sizes[name])
