"""Stages compiled by torch.compile, each held against what it was compiled from before it is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.planner.diagnostics import Diagnostic, StepgraphError
from stepgraph.planner.plan import Op, Plan, Run
from stepgraph.runtime.adapters.binding import StageFunction

SLACK = 8.0
"""Roundings of the largest result by which a compiled stage may differ: it may leave out those between its parts."""


class CompiledStageError(StepgraphError):
    """A compiled stage gives other numbers than the stage that it was compiled from (E623)."""


def check_parity(
    plan: Plan, rank: int, run: Run, module: Module, plain: StageFunction, compiled: StageFunction
) -> None:
    """Call both on random numbers in the shapes of a ``Run``, on the module's device.

    Raises:
        CompiledStageError: E623 where they differ by more than ``SLACK`` roundings of the largest result.
    """
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    program = plan.ranks[rank]
    tensors = []
    for number in run.inputs:
        view = program.views[number]
        drawn = torch.randn(view.shape, generator=generator)
        tensors.append(drawn.to(device, torch_dtype(program.buffers[view.buffer].dtype)))
    with torch.no_grad():
        wanted, found = _list(plain(module, *tensors)), _list(compiled(module, *tensors))
    for want, got in zip(wanted, found, strict=True):
        if not want.numel():
            continue
        largest = float(want.double().abs().max())
        error = float((got.double() - want.double()).abs().max())
        limit = SLACK * torch.finfo(want.dtype).eps * largest
        if not error <= limit:  # true for NaN
            raise CompiledStageError([_differs(plan.ops[run.op], error, limit)])


def _list(results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _differs(op: Op, error: float, limit: float) -> Diagnostic:
    name = op.name if op.layer is None else f"{op.name}[{op.layer}]"
    hint = "take the op out of `compiled`, or set torch._inductor's options to exact ones"
    message = f"the compiled stage of {name} gives other numbers"
    return Diagnostic("E623", message, None, f"at most {limit:.1e} from the stage itself", f"{error:.1e}", hint)
