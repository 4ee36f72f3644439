"""The rule of each kind that moves data between ranks: via copies and a handshake, or via one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepgraph.planner import ops
from stepgraph.planner.opgraph import Action
from stepgraph.planner.rules import Operand, Rule, heads_dim, memory_for
from stepgraph.planner.state_rules import send_into
from stepgraph.planner.values import Placement, Space, Value, row_dim

AXIS = {"send": "ulysses", "gather": "ulysses", "all_gather": "ulysses", "all_reduce": "tensor", "guide": "cfg"}


def _target(r: Rule, op: ops.Exchanging | ops.Guide, operand: Operand, placement: Placement, copies: int = 1) -> int:
    """A value in a symmetric target, shaped like the operand under ``placement``."""
    value = r.value(operand)
    memory = replace(
        memory_for(value.name, value.form, placement, r.e.schedule),
        space=Space.TARGET,
        dtype=r.e.memories[value.memory].dtype,
        copies=copies,
        family=f"{r.site.name}:{value.name}",
        buffers=None if op.buffers == "auto" else op.buffers,
        axis=AXIS[r.site.kind],
    )
    return r.e.value(Value(value.name, r.e.memory(memory), value.form, placement, False, 0))


def _exchange(
    r: Rule, op: ops.Exchanging | ops.Guide, operands: Sequence[Operand], placement: Placement, copies: int = 1
) -> list[int]:
    """The operands' values on the other side: targets after a handshake, or the results of one collective."""
    axis = AXIS[r.site.kind]
    if op.via == "nccl":
        outputs = []
        for operand in operands:
            value = r.value(operand)
            dtype = r.e.memories[value.memory].dtype
            memory = replace(memory_for(value.name, value.form, placement, r.e.schedule), dtype=dtype, copies=copies)
            outputs.append(r.e.value(Value(value.name, r.e.memory(memory), value.form, placement, False, 0)))
        r.node(Action.COLLECTIVE, [("in", o.value) for o in operands], outputs, axis=axis)
        return outputs
    sends, outputs = [], []
    for operand in operands:
        target = _target(r, op, operand, placement, copies)
        sends.append(r.node(Action.SEND, [("in", operand.value)], [target], axis=axis))
        outputs.append(target)
    r.node(
        Action.HANDSHAKE,
        [],
        outputs,
        name=f"{r.site.name}.handshake",
        axis=axis,
        closes=tuple(sends),
        protocol=op.handshake or r.e.schedule.handshake,
    )
    return outputs


def _names(r: Rule, op: ops.Exchanging) -> tuple[str, ...]:
    names = op.out or op.in_
    if len(names) != len(op.in_):
        r.e.error(
            "E208",
            (*r.site.path, "out"),
            f"{r.site.kind} gives as many tensors as it takes",
            str(len(op.in_)),
            str(len(names)),
        )
    return names


def _operands(r: Rule, op: ops.Exchanging, wanted: Placement, hint: str, partial: bool = False) -> list[Operand] | None:
    """The operands, all of them placed as wanted; None after telling which is not."""
    operands = r.read("in", op.in_, accept_partial=partial)
    for operand in operands or []:
        value = r.value(operand)
        row = row_dim(value.form)
        if value.placement is not wanted:
            r.e.error(
                "E203",
                operand.path,
                f"{r.site.kind} takes a tensor placed {wanted}",
                str(wanted),
                value.describe(),
                hint,
            )
            return None
        if row is None:
            r.e.error("E204", operand.path, f"{r.site.kind} needs a sequence", "(batch, seq, ...)", value.describe())
            return None
    return operands


def send(r: Rule, op: ops.Send) -> None:
    """From sequence to head placement. Via copy the name keeps meaning the source until the barrier."""
    names = _names(r, op)
    operands = _operands(r, op, Placement.SEQUENCE, "a replicated operand joins any placement and is not sent")
    for operand in operands or []:
        heads = heads_dim(r.value(operand).form)
        if heads is None:
            r.e.error(
                "E204", operand.path, "send needs heads", "(batch, seq, heads, head_dim)", r.value(operand).describe()
            )
            operands = None
        elif not heads.split and r.e.schedule.axis("tensor") > 1:
            hint = "write `split: column` on the linear that makes them"
            problem = "send takes a rank's own heads of the tensor axis"
            r.e.error("E210", operand.path, problem, "heads that are split", r.value(operand).describe(), hint)
            operands = None
    if op.into is not None:
        one = r.count(1, 1, "one tensor, where it goes into a state")
        return send_into(r, op, operands[0].value if operands and one else None, r.operand_path("in", 0))
    if not operands:
        return r.give_up(names)
    if op.via == "nccl":
        if op.barrier:
            r.e.error(
                "E206",
                (*r.site.path, "barrier"),
                "a send via nccl needs no barrier",
                "no barrier: the collective is an exchange of its own",
                "barrier: true",
                "take the barrier out; `barrier: all` closes sends via copy",
            )
        for name, output in zip(names, _exchange(r, op, operands, Placement.HEAD), strict=False):
            r.define(name, output)
        return None
    for name, operand in zip(names, operands, strict=False):
        target = _target(r, op, operand, Placement.HEAD)
        node = r.node(Action.SEND, [("in", operand.value)], [target], axis="ulysses")
        full = r.e.resolve(name, r.site.context) if not op.out else r.site.context.defines(name)
        r.e.open_sends.append((node, full, r.site.path))
    return None


def gather(r: Rule, op: ops.Gather) -> None:
    _move(r, op, _operands(r, op, Placement.HEAD, "only what is placed by head is gathered"), Placement.SEQUENCE)


def all_gather(r: Rule, op: ops.AllGather) -> None:
    operands = _operands(r, op, Placement.SEQUENCE, "only what is placed by sequence is gathered to all")
    for operand in operands or []:
        row = row_dim(r.value(operand).form)
        if row is not None and len(row.segments) > 1:
            r.e.error(
                "E203",
                operand.path,
                "all_gather takes one sequence",
                "a tensor of one sequence",
                r.value(operand).describe(),
                "split the concat first",
            )
            operands = None
    _move(r, op, operands, Placement.REPLICATED)


def _move(r: Rule, op: ops.Exchanging, operands: list[Operand] | None, placement: Placement) -> None:
    names = _names(r, op)
    if not operands:
        return r.give_up(names)
    for name, output in zip(names, _exchange(r, op, operands, placement), strict=False):
        r.define(name, output)
    return None


def all_reduce(r: Rule, op: ops.AllReduce) -> None:
    """Adds partial sums. Via copy they are stacked in targets, one block a member, and added by a stage."""
    names = _names(r, op)
    operands = r.read("in", op.in_, accept_partial=True)
    for operand in operands or []:
        if not r.value(operand).partial:
            r.e.error(
                "E203",
                operand.path,
                "all_reduce takes a partial sum",
                "the result of split: row",
                r.value(operand).describe(),
            )
            operands = None
    if not operands:
        return r.give_up(names)
    placement = r.value(operands[0]).placement
    if op.via == "nccl":
        outputs = _exchange(r, op, operands, placement)
    else:
        stacked = _exchange(r, op, operands, placement, r.e.schedule.axis("tensor"))
        outputs = []
        for target in stacked:
            value = r.e.values[target]
            outputs.append(r.e.fresh(value.name, value.form, placement))
            r.node(
                Action.RUN,
                [("in", target)],
                [outputs[-1]],
                kind="sum",
                name=f"{r.site.name}.sum",
                stream=r.e.schedule.streams[0],
            )
    for name, output in zip(names, outputs, strict=False):
        r.define(name, output)
    return None


def guide(r: Rule, op: ops.Guide) -> None:
    parallel = r.e.schedule.axis("cfg") > 1
    what = "this rank's branch, where the mesh has an axis cfg" if parallel else "[cond, uncond]"
    counted = r.count(1, 1, what) if parallel else r.count(2, 2, what)
    operands = r.read("in", op.in_)
    scale = r.read("scale", (op.scale,))
    joined = r.join(operands) if counted and operands and scale else None
    if not joined or not scale:
        return r.give_up([op.out])
    placement, branches = joined
    if parallel:
        (stacked,) = _exchange(r, op, branches, placement, 2)
        value = r.e.values[stacked]
        branches = [Operand("in", r.e.value(replace(value, block=index)), branches[0].path) for index in range(2)]
    inputs = [("cond", branches[0].value), ("uncond", branches[1].value), ("scale", scale[0].value)]
    form = r.value(branches[0]).form
    output = r.e.fresh(r.site.context.defines(op.out), form, placement)
    r.node(Action.RUN, inputs, [output], stream=r.e.schedule.streams[0])
    r.define(op.out, output)
    return None
