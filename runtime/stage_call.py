"""Makes and calls stages, and checks what they give: the same rules on every device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.kernels.stages import Stage, StageMaker
from stepgraph.planner.diagnostics import CapabilityError, Diagnostic, StepgraphError
from stepgraph.planner.plan import Buffer, Plan, Run

CAPTURE_RULE = (
    "a captured stage must not wait for the GPU, allocate symmetric memory, or draw from a generator that the capture "
    "does not know"
)


class StageError(StepgraphError):
    """A stage failed when it was made, warmed, run or captured, or gave what its op does not make (E610)."""


def make_stages(plan: Plan, rank: int, maker: StageMaker) -> dict[int, Stage]:
    """The stage of every ``Run`` of a rank, by its number in the program. Weights are made here, not when it runs.

    Raises:
        StageError: E610 where ``maker`` fails. StepgraphError: its own.
    """
    found: dict[int, Stage] = {}
    for number, item in enumerate(plan.ranks[rank].instructions):
        if isinstance(item, Run):
            try:
                found[number] = maker(plan, rank, item)
            except Exception as error:
                raise _failed(plan, item, "made", error) from error
    return found


def call_stage(
    plan: Plan, rank: int, run: Run, stage: Stage, inputs: Sequence[Tensor], capturing: bool = False
) -> list[tuple[int, Tensor]]:
    """What a stage makes of its input views: for each buffer that the op allocates, its number and its contents,
    (batch, rows, cols), in the buffer's dtype and on the inputs' device.

    Raises:
        StageError: E610 where it fails, or gives other tensors than its op makes. CapabilityError: E606 for want of
            memory.
    """
    before = _changes(inputs)
    try:
        with torch.no_grad():
            results = stage(inputs)
    except Exception as error:
        raise _failed(plan, run, "captured" if capturing else "run", error) from error
    made = plan.ranks[rank].made_by(run)
    if not any(view in run.inputs for view in run.outputs) and _changes(inputs) != before:
        raise _wrong(plan, run, "a new tensor: only norm_rope and rope change operands", "an operand changed in place")
    if not isinstance(results, list | tuple) or len(results) != len(made):
        got = f"{len(results)}" if isinstance(results, list | tuple) else f"a {type(results).__name__}"
        raise _wrong(plan, run, f"a list of {len(made)} tensors", got)
    program = plan.ranks[rank]
    return [
        (number, _contents(plan, run, program.buffers[number], result, inputs))
        for number, result in zip(made, results, strict=True)
    ]


def _changes(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was written to so far."""
    return [tensor._version for tensor in tensors]


def _contents(plan: Plan, run: Run, buffer: Buffer, result: object, inputs: Sequence[Tensor]) -> Tensor:
    shape = (buffer.batch, buffer.rows, buffer.cols)
    device = inputs[0].device if inputs else None
    expected = f"{buffer.batch} x {buffer.rows} x {buffer.cols} elements, {buffer.dtype.value}"
    if not isinstance(result, Tensor):
        raise _wrong(plan, run, f"{buffer.name}: {expected}", f"a {type(result).__name__}")
    fits = result.numel() == buffer.batch * buffer.rows * buffer.cols and result.dtype is torch_dtype(buffer.dtype)
    if not fits or (device is not None and result.device != device):
        got = f"{list(result.shape)}, {str(result.dtype).removeprefix('torch.')}, {result.device}"
        raise _wrong(plan, run, f"{buffer.name}: {expected}, {device or 'the device of the session'}", got)
    return laid_out(plan, run, buffer.name, result, shape)


def laid_out(plan: Plan, run: Run, name: str, result: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``result`` in ``shape``, of as many elements.

    Raises:
        StageError: E610 where its rows are elsewhere, as in (batch, heads, rows, head_dim): it would be read wrong.
    """
    if result.numel() and not _in_order(result.shape, shape):
        expected = f"{name}: {' x '.join(map(str, shape))}, or with these dimensions split or joined"
        raise _wrong(plan, run, expected, f"{list(result.shape)}")
    return result.reshape(shape)


def _in_order(found: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether every dimension of ``found`` is a part of one of ``wanted``, or several whole ones; sizes are not 0."""
    bounds, start = set(accumulate(wanted, mul, initial=1)), 1
    for size in found:
        end = start * size
        if any(start < bound < end for bound in bounds) and not {start, end} <= bounds:
            return False
        start = end
    return True


def _name(plan: Plan, run: Run) -> str:
    op = plan.ops[run.op]
    return f"the stage of {op.label} on line {op.line}"


def _wrong(plan: Plan, run: Run, expected: str, got: str) -> StageError:
    message = f"{_name(plan, run)} gives what its op does not make"
    return StageError([Diagnostic("E610", message, None, expected, got)])


def _failed(plan: Plan, run: Run, when: str, error: Exception) -> StepgraphError:
    """The error to raise for one that a stage, or its maker, has raised."""
    if isinstance(error, StepgraphError):
        return error
    told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if isinstance(error, torch.OutOfMemoryError):
        return CapabilityError([Diagnostic("E606", f"no memory for {_name(plan, run)}", None, "", told)])
    hint = CAPTURE_RULE if when == "captured" else ""
    return StageError([Diagnostic("E610", f"{_name(plan, run)} can't be {when}", None, "", told, hint)])
