"""The rule of each kind that moves data between ranks: via copies and a handshake, or via one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepgraph.planner import ops
from stepgraph.planner.chunking import Chunks
from stepgraph.planner.opgraph import Action
from stepgraph.planner.rules import Operand, Rule, heads_dim, memory_for
from stepgraph.planner.shares import Shares
from stepgraph.planner.state_rules import send_into
from stepgraph.planner.values import DimKind, Placement, Space, Value, row_dim, show

AXIS = {"send": "ulysses", "gather": "ulysses", "all_gather": "ulysses", "all_reduce": "tensor", "guide": "cfg"}


def _laid(r: Rule, value: Value, placement: Placement) -> Value:
    """A value with its rows in the order in which an exchange leaves them, and the heads that it brings."""
    by_head = placement is Placement.HEAD
    form = tuple(
        replace(
            dim,
            by_place=by_head and len(dim.segments) > 1,
            chunk=r.e.chunk if by_head and dim.kind is DimKind.HEADS else dim.chunk,
        )
        for dim in value.form
    )
    return replace(value, form=form)


def _whole(value: Value) -> Value:
    """A value with the heads of all chunks."""
    return replace(value, form=tuple(replace(dim, chunk=None) for dim in value.form))


def _target(r: Rule, op: ops.Exchanging | ops.Guide, value: Value, placement: Placement, copies: int = 1) -> int:
    """A value in a symmetric target, shaped like ``value`` under ``placement``."""
    value = _laid(r, value, placement)
    chunk = next((f".chunk{dim.chunk[0]}" for dim in value.form if dim.chunk), "")
    memory = replace(
        memory_for(value.name, value.form, placement, r.e.schedule),
        space=Space.TARGET,
        dtype=r.e.memories[value.memory].dtype,
        copies=copies,
        family=f"{r.site.name}:{value.name}{chunk}",
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
            value = _laid(r, r.value(operand), placement)
            dtype = r.e.memories[value.memory].dtype
            memory = replace(memory_for(value.name, value.form, placement, r.e.schedule), dtype=dtype, copies=copies)
            outputs.append(r.e.value(Value(value.name, r.e.memory(memory), value.form, placement, False, 0)))
        r.node(Action.COLLECTIVE, [("in", o.value) for o in operands], outputs, axis=axis)
        return outputs
    sends, outputs = [], []
    for operand in operands:
        target = _target(r, op, r.value(operand), placement, copies)
        sends.append(r.node(Action.SEND, [("in", operand.value)], [target], axis=axis))
        outputs.append(target)
    _close(r, op, sends, outputs)
    return outputs


def _close(r: Rule, op: ops.Exchanging | ops.Guide, sends: Sequence[int], outputs: Sequence[int]) -> None:
    """One handshake for the sends of an op."""
    r.node(
        Action.HANDSHAKE,
        [],
        outputs,
        name=f"{r.site.name}.handshake",
        axis=AXIS[r.site.kind],
        closes=tuple(sends),
        protocol=op.handshake or r.e.schedule.handshake,
    )


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
        if r.e.chunk is not None:
            r.e.error(
                "E217",
                (*r.site.path, "into"),
                "a state is not cut into chunks",
                "a send of its own",
                f"into: {op.into}",
            )
            return None
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
        target = _target(r, op, r.value(operand), Placement.HEAD)
        node = r.node(Action.SEND, [("in", operand.value)], [target], axis="ulysses")
        full = r.e.resolve(name, r.site.context) if not op.out else r.site.context.defines(name)
        r.e.open_sends.append((node, full, r.site.path))
    return None


def gather(r: Rule, op: ops.Gather) -> None:
    operands = _operands(r, op, Placement.HEAD, "only what is placed by head is gathered")
    for operand in operands or []:
        row = row_dim(r.value(operand).form)
        if row is not None and len(row.segments) > 1 and not row.by_place:
            r.e.error(
                "E203",
                operand.path,
                "gather takes one sequence, or rows as a send has laid them down",
                "a tensor of one sequence",
                r.value(operand).describe(),
                "gather the parts, and concat them then",
            )
            operands = None
    if r.e.chunks is not None and r.e.chunk is not None:
        return _gather_chunk(r, op, operands, r.e.chunks)
    return _move(r, op, operands, Placement.SEQUENCE)


def _gather_chunk(r: Rule, op: ops.Gather, operands: list[Operand] | None, chunks: Chunks) -> None:
    """One chunk of a gather. Via copy all chunks end in one target, and the last handshake makes it readable; the
    results of collectives are put side by side by a stage."""
    names = _names(r, op)
    if not operands:
        return r.give_up(names)
    places = [(r.site.path, f"{r.site.context.suffix}.{index}") for index in range(len(operands))]
    if op.via == "nccl":
        for place, output in zip(places, _exchange(r, op, operands, Placement.SEQUENCE), strict=True):
            chunks.gathered.setdefault(place, []).append(output)
        if chunks.is_last:
            for name, place in zip(names, places, strict=False):
                _join(r, name, chunks.gathered[place])
        return None
    sends, targets = [], []
    for place, operand in zip(places, operands, strict=True):
        if place not in chunks.gathered:
            chunks.gathered[place] = [_target(r, op, _whole(r.value(operand)), Placement.SEQUENCE)]
        targets += chunks.gathered[place]
        sends.append(r.node(Action.SEND, [("in", operand.value)], targets[-1:], axis="ulysses"))
    _close(r, op, sends, targets if chunks.is_last else [])
    for name, target in zip(names, targets if chunks.is_last else [], strict=False):
        r.define(name, target)
    return None


def _join(r: Rule, name: str, parts: list[int]) -> None:
    """The heads of all chunks in their order, from what each chunk has brought. The option `heads` tells how many of
    them a chunk has of each place."""
    values = [r.e.values[part] for part in parts]
    heads = heads_dim(values[0].form)
    assert heads is not None
    shares = Shares(r.e.schedule)
    counts = [shares.chunk_counts(heads.heads, (number, len(parts))) for number in range(len(parts))]
    output = r.e.fresh(values[0].name, _whole(values[0]).form, Placement.SEQUENCE)
    r.node(
        Action.RUN,
        [("in", part) for part in parts],
        [output],
        (("heads", " ".join(",".join(map(str, count)) for count in counts)),),
        kind="join",
        name=f"{r.site.name}.join",
        stream=r.e.schedule.streams[0],
        chunked=False,
    )
    r.define(name, output)


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
    guidance = r.e.guidance
    full = r.site.context.defines(op.out)
    what = "the branch alone, where the schedule has `cfg`" if guidance.mode else "[cond, uncond]"
    counted = r.count(1, 1, what) if guidance.mode else r.count(2, 2, what)
    operands = r.read("in", op.in_)
    scale = guidance.scale(r, op) if guidance.mode else r.read("scale", (op.scale,))
    joined = r.join(operands) if counted and operands and scale else None
    if not joined or not scale:
        return guidance.result(full, None, r.site.path) if guidance.inside else r.give_up([op.out])
    placement, branches = joined
    form = r.value(branches[0]).form
    inputs = [("cond", branches[0].value), ("uncond", branches[-1].value)]
    if guidance.mode == "parallel":
        (stacked,) = _exchange(r, op, branches, placement, 2)
        value = r.e.values[stacked]
        inputs = [(role, r.e.value(replace(value, block=block))) for block, role in enumerate(("cond", "uncond"))]
    elif guidance.mode == "sequential":
        cond = guidance.first.setdefault((r.site.path, r.site.context.suffix), branches[0].value)
        if cond == branches[0].value:
            return guidance.result(full, None, r.site.path)  # the second branch is yet to come
        inputs = [("cond", cond), ("uncond", branches[0].value)]
    elif guidance.mode == "batch":
        if form[0].kind is not DimKind.BATCH:
            r.e.error("E204", branches[0].path, "guide takes both branches in one batch", "(batch, ...)", show(form))
            return guidance.result(full, None, r.site.path)
        form = (replace(form[0], size=form[0].size // 2), *form[1:])
        inputs = [("both", branches[0].value)]
    output = r.e.fresh(full, form, placement)
    r.node(Action.RUN, [*inputs, ("scale", scale[0].value)], [output], stream=r.e.schedule.streams[0])
    if guidance.inside:
        return guidance.result(full, output, r.site.path)
    r.define(op.out, output)
    return None
