"""The inputs of a step: what a plan takes, and what is said of anything else."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.planner.diagnostics import Diagnostic, StepgraphError
from stepgraph.planner.plan import DType, Plan
from stepgraph.runtime.room import need_host

NamedInputs = Mapping[str, Tensor]


class SessionError(StepgraphError):
    """A session was used in a way that it does not allow, or a step did not finish (E60x, E401)."""


def ordered(plan: Plan, device: torch.device, named: NamedInputs) -> list[Tensor]:
    """The inputs in the plan's order.

    Raises:
        SessionError: E605 for one that is missing, unknown, or of another shape, dtype, device or layout.
    """
    wanted = [entry.name for entry in plan.inputs]
    problems = [input_error(name, "an input of the plan", "another name") for name in named if name not in wanted]
    found: list[Tensor] = []
    for entry in plan.inputs:
        tensor = named.get(entry.name)
        expected = f"{list(entry.shape)}, {entry.dtype.value}, {device}, contiguous"
        if tensor is None:
            problems.append(input_error(entry.name, expected, "nothing"))
            continue
        if not isinstance(tensor, Tensor):
            problems.append(input_error(entry.name, expected, f"a {type(tensor).__name__}"))
            continue
        right = tuple(tensor.shape) == entry.shape and tensor.dtype is torch_dtype(entry.dtype)
        if not right or tensor.device != device or not tensor.is_contiguous():
            problems.append(input_error(entry.name, expected, _kind(tensor)))
        found.append(tensor)
    if problems:
        raise SessionError(problems)
    return found


def _kind(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
    else:
        layout = "contiguous" if tensor.is_contiguous() else f"strides {list(tensor.stride())}"
    return f"{list(tensor.shape)}, {dtype}, {tensor.device}, {layout}"


def input_error(name: str, expected: str, got: str) -> Diagnostic:
    return Diagnostic("E605", f"the input '{name}' is not what the plan was compiled for", None, expected, got)


def random_inputs(plan: Plan, seed: int) -> dict[str, Tensor]:
    """Inputs that nobody made: normal numbers, the same in every dtype up to rounding; a mask is true in three of four
    places."""
    need_host("made-up inputs", {entry.name: 4 * prod(entry.shape) for entry in plan.inputs})
    generator = torch.Generator().manual_seed(seed)
    drawn = {entry.name: torch.randn(entry.shape, generator=generator) for entry in plan.inputs}
    return {
        entry.name: drawn[entry.name] > -0.67
        if entry.dtype is DType.BOOL
        else drawn[entry.name].to(torch_dtype(entry.dtype))
        for entry in plan.inputs
    }
