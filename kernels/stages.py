"""Stages: what a ``Run`` instruction calls. Here made from the reference arithmetic and made-up weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepgraph.kernels import reference
from stepgraph.kernels.dtype import torch_dtype
from stepgraph.kernels.weights import MadeUpWeights
from stepgraph.planner.diagnostics import CapabilityError, Diagnostic
from stepgraph.planner.plan import Op, Plan, Run, View

Stage = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Takes the input views of a ``Run``, in order; gives one tensor for each buffer that the ``Run`` allocates, in the
order of first mention, with the buffer's elements in its order (batch, rows, cols). Views that are inputs and outputs
are changed in place."""

StageMaker = Callable[[Plan, int, Run], Stage]
"""Makes the stage of one ``Run`` of a rank."""


class MadeUpStages:
    """A ``StageMaker``: reference arithmetic with made-up weights, cut for the rank where the op is split."""

    def __init__(self, seed: int = 0, device: torch.device | None = None, drawn_there: bool = False) -> None:
        self.weights = MadeUpWeights(seed, device or torch.device("cpu"), drawn_there)

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The weights that have been made up so far."""
        return self.weights.named()

    def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
        op, program = plan.ops[run.op], plan.ranks[rank]
        inputs = [program.views[view] for view in run.inputs]
        outputs = [program.views[view] for view in run.outputs]
        dtype = torch_dtype(program.buffers[outputs[0].buffer].dtype)
        stage = _MAKERS[op.kind](_Site(self.weights, plan, rank, op, inputs, outputs, dtype))
        one_dtype = all(torch_dtype(program.buffers[view.buffer].dtype) is dtype for view in inputs)
        return stage if one_dtype or set(run.outputs) <= set(run.inputs) else _cast(stage, dtype)


def _cast(stage: Stage, dtype: torch.dtype) -> Stage:
    """``stage`` in the dtype of its results, whatever those of its inputs."""
    return lambda tensors: stage([tensor.to(dtype) for tensor in tensors])


class _Site:
    """One op on one rank, and how it gets weights."""

    def __init__(
        self,
        weights: MadeUpWeights,
        plan: Plan,
        rank: int,
        op: Op,
        inputs: list[View],
        outputs: list[View],
        dtype: torch.dtype,
    ) -> None:
        self.weights, self.plan, self.op, self.dtype = weights, plan, op, dtype
        self.inputs, self.outputs = inputs, outputs
        self.options = dict(op.options)
        self.index, self.parts = plan.coordinate(rank, "tensor")
        _, self.shards = plan.coordinate(rank, "ulysses")
        self.program = plan.ranks[rank]

    def box(self, view: View) -> tuple[int, int, int]:
        """(batch, rows, cols) of a view."""
        return self.program.buffers[view.buffer].batch, view.region.rows, view.region.cols

    def matrix(self, part: str, rows: int, cols: int) -> Tensor:
        """A weight of which the rank has (rows, cols): its part of the whole where the op is split."""
        split = self.options.get("split")
        whole_rows, whole_cols = (
            rows * (self.parts if split == "row" else 1),
            cols * (self.parts if split == "column" else 1),
        )
        whole = self.weights.matrix(self.op.name, self.op.layer, part, (whole_rows, whole_cols), self.dtype)
        if split == "row":
            return whole.narrow(0, self.index * rows, rows)
        return whole.narrow(1, self.index * cols, cols) if split == "column" else whole

    def scale(self, part: str, size: int) -> Tensor:
        return self.weights.scale(self.op.name, self.op.layer, part, size, self.dtype)

    def has_part_of_rows(self, view: View) -> bool:
        """Whether a view is cut from a buffer that holds more rows, as the rank's own rows of what is whole here."""
        return self.shards > 1 and view.region.rows < self.program.buffers[view.buffer].rows

    def with_role(self, role: str) -> list[int]:
        return [index for index, operand in enumerate(self.op.inputs) if operand.role == role]

    def norm_weight(self, part: str, shape: tuple[int, ...]) -> Tensor:
        whole = shape[-1] * shape[-2] if self.options["over"] == "hidden" and len(shape) == 4 else shape[-1]
        return self.scale(part, whole)


def _norm(site: _Site) -> Stage:
    weight = site.norm_weight("weight", site.inputs[0].shape)
    return lambda tensors: [reference.rms_norm(tensors[0], weight, site.options["over"])]


def _modulate(site: _Site) -> Stage:
    return lambda tensors: [reference.modulate(tensors[0], tensors[1], tensors[2])]


def _residual(site: _Site) -> Stage:
    return lambda tensors: [reference.residual(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)]


def _mlp(site: _Site) -> Stage:
    hidden, ffn = site.inputs[0].shape[-1], int(site.options["ffn"])
    up, down = site.matrix("up", hidden, ffn), site.matrix("down", ffn, hidden)
    return lambda tensors: [reference.mlp(tensors[0], up, down)]


def _rotate(site: _Site) -> Stage:
    """norm_rope and rope, in place."""
    changed, tables = site.with_role("in"), site.with_role("rope")
    weights = [
        site.norm_weight(f"weight{index}", site.inputs[index].shape) if "over" in site.options else None
        for index in changed
    ]

    def stage(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        for index, weight in zip(changed, weights, strict=True):
            result = tensors[index]
            if weight is not None:
                result = reference.rms_norm(result, weight, site.options["over"])
            if tables:
                result = reference.rotate(result, tensors[tables[0]])
            tensors[index].copy_(result)
        return []

    return stage


def _attention(site: _Site) -> Stage:
    roles, masks = [site.with_role(role) for role in "qkv"], site.with_role("mask")

    def stage(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        q, k, v = (torch.cat([tensors[index] for index in indices], dim=1) for indices in roles)
        given = [tensors[index] for index in masks]
        return [reference.attention(q, k, v, reference.joined_mask(site.options["masked"], given) if given else None)]

    return stage


def _linear(site: _Site) -> Stage:
    wide = sum(view.region.cols for view in site.inputs)
    parts = [site.matrix(f"weight{index}", wide, view.region.cols) for index, view in enumerate(site.outputs)]
    weight = torch.cat(parts, dim=1)
    boxes = [site.box(view) for view in site.inputs]

    def stage(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = [tensor.reshape(box) for tensor, box in zip(tensors, boxes, strict=True)]
        return [torch.cat(rows, dim=-1) @ weight]

    return stage


def _call(site: _Site) -> Stage:
    boxes = [site.box(view) for view in site.inputs]
    made: list[tuple[int, int, list[Tensor]]] = []
    for operand, view in zip(site.op.inputs, site.inputs, strict=True):
        if site.has_part_of_rows(view) and any(view.region.rows != out.region.rows for out in site.outputs):
            raise CapabilityError([_no_made_up_stage(site.op, "operands with the rows of the outputs", operand.name)])
    for number, view in enumerate(site.outputs):
        weights: list[Tensor] = []
        for index, (_, _, cols) in enumerate(boxes):
            part = f"weight{number}.{index}"
            if cols == view.region.cols:
                weights.append(site.weights.number(site.op.name, site.op.layer, part, site.dtype))
            elif site.options.get("features") == "cut":
                what = "operands as wide as the outputs, where each rank has a part of the features"
                raise CapabilityError([_no_made_up_stage(site.op, what, site.op.inputs[index].name)])
            else:
                weights.append(site.matrix(part, cols, view.region.cols))
        made.append((*site.box(view)[:2], weights))

    def stage(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        flat = [tensor.reshape(box) for tensor, box in zip(tensors, boxes, strict=True)]
        return [reference.mix(flat, weights, batch, rows) for batch, rows, weights in made]

    return stage


def _no_made_up_stage(op: Op, expected: str, got: str) -> Diagnostic:
    message = f"no stage can be made up for {op.name}"
    return Diagnostic("E602", message, None, expected, got, "bind a stage of the model to it")


def _concat(site: _Site) -> Stage:
    boxes = [site.box(view) for view in site.inputs]
    return lambda tensors: [torch.cat([t.reshape(box) for t, box in zip(tensors, boxes, strict=True)], dim=1)]


def _keep(site: _Site) -> Stage:
    """What it gives is copied into a state, and needs no memory of its own."""
    return list


def _guide(site: _Site) -> Stage:
    stacked = bool(site.with_role("both"))

    def stage(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        cond, uncond = tensors[0].chunk(2) if stacked else tensors[:2]
        return [reference.guide(cond, uncond, tensors[-1])]

    return stage


def _repeat(site: _Site) -> Stage:
    return lambda tensors: [torch.cat([tensors[0], tensors[0]])]


def _join(site: _Site) -> Stage:
    counts = [[int(count) for count in chunk.split(",")] for chunk in site.options["heads"].split()]

    def stage(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        by_chunk = [tensor.split(chunk, dim=2) for tensor, chunk in zip(tensors, counts, strict=True)]
        return [torch.cat([part for place in zip(*by_chunk, strict=True) for part in place], dim=2)]

    return stage


def _sum(site: _Site) -> Stage:
    rows = site.outputs[0].region.rows
    blocks = site.inputs[0].region.rows // rows if rows else 1
    return lambda tensors: [reference.sum_blocks(tensors[0], blocks)]


_MAKERS: dict[str, Callable[[_Site], Stage]] = {
    "norm": _norm,
    "modulate": _modulate,
    "residual": _residual,
    "mlp": _mlp,
    "norm_rope": _rotate,
    "rope": _rotate,
    "attention": _attention,
    "linear": _linear,
    "call": _call,
    "concat": _concat,
    "keep": _keep,
    "guide": _guide,
    "repeat": _repeat,
    "join": _join,
    "sum": _sum,
}
