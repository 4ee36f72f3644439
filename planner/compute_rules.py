"""The rule of each kind that computes or makes a view: its operands, their placements and shapes, what it makes."""

from __future__ import annotations

from dataclasses import replace

from stepgraph.planner import ops
from stepgraph.planner.opgraph import Action
from stepgraph.planner.rules import Operand, Rule, heads_dim, memory_for, same_form, width_of
from stepgraph.planner.values import Dim, DimKind, Form, Placement, Value, features, row_dim, show


def norm(r: Rule, op: ops.Norm) -> None:
    operands = r.read("in", op.in_) if r.count(1, 1, "one tensor") else None
    joined = r.join(operands) if operands else None
    if not joined or not over_fits(r, joined[1], op.over):
        return r.give_up([op.out])
    placement, (x,) = joined
    return r.run([x], op.out, r.value(x).form, placement, (("over", op.over),))


def over_fits(r: Rule, operands: list[Operand], over: str) -> bool:
    """Whether each operand can be normalised over its heads, or over all features of a token on one rank."""
    for operand in operands:
        value = r.value(operand)
        if over == "head" and heads_dim(value.form) is None:
            r.e.error("E204", operand.path, "over: head needs heads", "(..., heads, head_dim)", value.describe())
            return False
        cut = value.placement is Placement.HEAD or any(dim.split for dim in features(value.form))
        if over == "hidden" and cut:
            r.e.error(
                "E203",
                operand.path,
                "over: hidden needs all features of a token on one rank",
                "by sequence and not split",
                value.describe(),
                "normalise over: head, or before the send",
            )
            return False
    return True


def modulate(r: Rule, op: ops.Modulate) -> None:
    x, shift, scale = r.read("in", op.in_), r.read("shift", (op.shift,)), r.read("scale", (op.scale,))
    joined = r.join([*x, *shift, *scale]) if x and shift and scale and r.count(1, 1, "one tensor") else None
    if not joined:
        return r.give_up([op.out])
    placement, operands = joined
    form = r.value(operands[0]).form
    fitting = [r.fits(operand, form, operand.role) for operand in operands[1:]]  # tells of each
    if not all(fitting):
        return r.give_up([op.out])
    return r.run(operands, op.out, form, placement)


def residual(r: Rule, op: ops.Residual) -> None:
    operands = r.read("in", op.in_) if r.count(2, 2, "two tensors") else None
    gate = r.read("gate", (op.gate,)) if op.gate else []
    joined = r.join([*operands, *gate]) if operands and gate is not None else None
    if not joined:
        return r.give_up([op.out])
    placement, both = joined
    form = r.value(both[0]).form
    if not same_form(form, r.value(both[1]).form):
        r.e.error(
            "E204",
            both[1].path,
            "residual adds tensors of one shape",
            r.value(both[0]).describe(),
            r.value(both[1]).describe(),
        )
        return r.give_up([op.out])
    if len(both) > 2 and not r.fits(both[2], form, "gate"):
        return r.give_up([op.out])
    return r.run(both, op.out, form, placement)


def mlp(r: Rule, op: ops.Mlp) -> None:
    operands = r.read("in", op.in_) if r.count(1, 1, "one tensor") else None
    if not operands:
        return r.give_up([op.out])
    value = r.value(operands[0])
    if any(dim.split for dim in value.form) or heads_dim(value.form) is not None:
        r.e.error("E204", operands[0].path, "mlp takes whole features", "(batch, seq, hidden)", value.describe())
        return r.give_up([op.out])
    ffn = (("ffn", str(r.e.schedule.model.ffn)),)
    return r.run(operands, op.out, value.form, value.placement, ffn)


def rotate(r: Rule, op: ops.NormRope | ops.Rope) -> None:
    """norm_rope and rope change their operands where they lie; each name then means a new value there."""
    operands = r.read("in", op.in_)
    tables = r.read("rope", (op.rope,)) if op.rope else []
    if not operands or tables is None:
        return
    joined = r.join([*operands, *tables])
    over = op.over if isinstance(op, ops.NormRope) else None
    if not joined or (over and not over_fits(r, operands, over)):
        return
    changed, tables = joined[1][: len(operands)], joined[1][len(operands) :]
    for operand in changed:
        value = r.value(operand)
        if heads_dim(value.form) is None:
            r.e.error(
                "E204", operand.path, f"{r.site.kind} needs heads", "(batch, seq, heads, head_dim)", value.describe()
            )
            return
        row, dim = row_dim(value.form), value.form[-1].size
        if tables and (row_dim(r.value(tables[0]).form) != row or width_of(r.value(tables[0]).form) != dim):
            r.e.error(
                "E204",
                tables[0].path,
                "the rope table does not fit",
                f"({row}, {dim}), for {value.describe()}",
                r.value(tables[0]).describe(),
            )
            return
    outputs = [r.e.value(r.value(operand)) for operand in changed]
    options = (("over", over),) if over else ()
    r.node(Action.RUN, [(o.role, o.value) for o in [*changed, *tables]], outputs, options)
    for name, output in zip(op.in_, outputs, strict=True):
        r.e.bind(r.e.resolve(name, r.site.context), output, r.site.path)


def linear(r: Rule, op: ops.Linear) -> None:
    widths: dict[str, str] = {op.out: "hidden"} if isinstance(op.out, str) else dict(op.out)
    operands = r.read("in", op.in_)
    joined = r.join(operands) if operands else None
    if not joined:
        return r.give_up(list(widths))
    placement, inputs = joined
    first = r.value(inputs[0])
    lead = first.form[: len(first.form) - len(features(first.form))]
    for operand in inputs:
        value = r.value(operand)
        if not same_form(value.form[: len(value.form) - len(features(value.form))], lead):
            r.e.error(
                "E204",
                operand.path,
                "operands that are joined in features have the same rows",
                first.describe(),
                value.describe(),
            )
            return r.give_up(list(widths))
        if value.placement is Placement.HEAD:
            r.e.error(
                "E203",
                operand.path,
                "a matrix product needs all features of a token",
                Placement.SEQUENCE,
                value.describe(),
                "gather it first",
            )
            return r.give_up(list(widths))
        is_split = any(dim.split for dim in value.form)
        if is_split != (op.split == "row"):
            r.e.error(
                "E210",
                operand.path,
                "features that are split over the tensor axis" if is_split else "features that are whole",
                "split: row" if is_split else "an operand that is split over tensor, for split: row",
                value.describe(),
                "a column split goes before a row split",
            )
            return r.give_up(list(widths))
    column = op.split == "column"
    sizes, head_dim = r.e.schedule.sizes, Dim(DimKind.PLAIN, r.e.schedule.model.head_dim)
    pieces: list[Form] = []
    for width in widths.values():
        if width in ("heads", "kv_heads"):
            pieces.append((Dim(DimKind.HEADS, sizes[width], heads=width, split=column), head_dim))
        else:
            pieces.append((Dim(DimKind.PLAIN, sizes[width], split=column),))
    partial = op.split == "row"
    options = (("split", op.split),) if op.split else ()
    (name, *others) = widths
    if not others and r.site.context.defines(name) in r.e.schedule.state:
        return r.run(inputs, name, (*lead, *pieces[0]), placement, options, partial)
    memory = r.e.memory(
        replace(
            memory_for(r.site.name.split(".")[-1], (*lead, *pieces[0]), placement, r.e.schedule), pieces=tuple(pieces)
        )
    )
    outputs = [
        r.e.value(Value(r.site.context.defines(name), memory, (*lead, *piece), placement, partial, index))
        for index, (name, piece) in enumerate(zip(widths, pieces, strict=True))
    ]
    r.node(Action.RUN, [(o.role, o.value) for o in inputs], outputs, options)
    for name, output in zip(widths, outputs, strict=True):
        r.define(name, output)
    return None


def call(r: Rule, op: ops.Call) -> None:
    operands = r.read("in", op.in_)
    if (op.shape is None) == (op.like is None):
        r.e.error(
            "E208",
            r.site.path,
            "call needs the shape of its outputs",
            "one of `shape` and `like`",
            "both" if op.shape else "neither",
        )
        return r.give_up(op.out)
    forms: list[Form] = []
    like_placement: Placement | None = None
    for out in op.out:
        if op.like is not None:
            name = op.like if isinstance(op.like, str) else op.like.get(out)
            model = r.read("like", (name,)) if name else None
            if model:
                forms.append(r.value(model[0]).form)
                like_placement = r.value(model[0]).placement
        else:
            dims = op.shape.get(out) if isinstance(op.shape, dict) else op.shape
            form = r.e.form(dims, (*r.site.path, "shape")) if dims else None
            if form is not None:
                forms.append(form)
        if len(forms) <= op.out.index(out):
            if not r.e.problems:
                r.e.error("E204", r.site.path, f"the shape of '{out}' is not given", "a shape for every output", "none")
            return r.give_up(op.out)
    if not operands:
        return r.give_up(op.out)
    wanted = {"sequence": Placement.SEQUENCE, "replicated": Placement.REPLICATED, None: like_placement}[op.placement]
    wanted = None if wanted is Placement.REPLICATED else wanted
    joined = r.join(operands, wanted)
    if not joined:
        return r.give_up(op.out)
    placement, inputs = joined
    lengths = {dim.segments for form in forms for dim in form}
    for index, operand in enumerate(operands):
        row = row_dim(r.value(operand).form)
        if placement is Placement.SEQUENCE and row is not None and row.segments not in lengths:
            inputs[index] = operand  # rows of another sequence than the outputs': whole where it is replicated
    needed = DimKind.SEQUENCE if placement is Placement.SEQUENCE else DimKind.HEADS
    for out, form in zip(op.out, forms, strict=True):
        if placement is not Placement.REPLICATED and not any(dim.kind is needed for dim in form):
            r.e.error(
                "E203",
                r.site.path,
                f"'{out}' can't be made from a part of what it needs",
                "operands that are replicated",
                f"operands {placement}, output {show(form)}",
                "all_gather the operand first",
            )
            return r.give_up(op.out)
    if any(r.e.guidance.mixes([r.value(operand).form for operand in inputs], form) for form in forms):
        r.e.error(
            "E216",
            r.site.path,
            "a tensor without a batch is made from both branches",
            "an output with a batch",
            ", ".join(map(show, forms)),
            "give it a batch, or take `cfg: sequential`",
        )
        return r.give_up(op.out)
    made = [r.result(out, form, placement) for out, form in zip(op.out, forms, strict=True)]
    outputs = [output for output in made if output is not None]
    if len(outputs) < len(made):
        return r.give_up(op.out)
    cut = placement is Placement.HEAD or any(dim.split for operand in inputs for dim in r.value(operand).form)
    options = (("features", "cut"),) if cut else ()
    r.node(Action.RUN, [(o.role, o.value) for o in inputs], outputs, options)
    for out, output in zip(op.out, outputs, strict=True):
        r.define(out, output)
    return None


def concat(r: Rule, op: ops.Concat) -> None:
    operands = r.read("in", op.in_)
    joined = r.join(operands) if operands and r.count(2, None, "two tensors or more") else None
    if not joined:
        return r.give_up([op.out])
    placement, parts = joined
    forms = [r.value(part).form for part in parts]
    rows = [row_dim(form) for form in forms]
    for part, form, row in zip(parts, forms, rows, strict=True):
        if row is None or row.kind is not DimKind.SEQUENCE or not same_form(features(form), features(forms[0])):
            r.e.error("E204", part.path, "concat joins sequences of the same features", show(forms[0]), show(form))
            return r.give_up([op.out])
    segments = tuple(name for row in rows if row for name in row.segments)
    whole = Dim(DimKind.SEQUENCE, sum(row.size for row in rows if row), segments)
    form = tuple(whole if dim.kind is DimKind.SEQUENCE else dim for dim in forms[0])
    memory = memory_for(op.out, form, placement, r.e.schedule)
    dtypes = {r.e.memories[r.value(part).memory].dtype for part in parts}
    if len(dtypes) == 1:  # tables keep theirs
        memory = replace(memory, dtype=dtypes.pop())
    joined_value = r.e.value(Value(r.site.context.defines(op.out), r.e.memory(memory), form, placement))
    r.node(Action.RUN, [(part.role, part.value) for part in parts], [joined_value])
    return r.define(op.out, joined_value)


def split(r: Rule, op: ops.Split) -> None:
    operands = r.read("in", op.in_) if r.count(1, 1, "one tensor") else None
    if not operands:
        return r.give_up(op.out)
    value = r.value(operands[0])
    row = row_dim(value.form)
    if row is None or len(row.segments) != len(op.out):
        r.e.error(
            "E204", operands[0].path, "split undoes a concat", f"a concat of {len(op.out)} sequences", value.describe()
        )
        return r.give_up(op.out)
    sizes = r.e.schedule.sizes
    for index, (out, name) in enumerate(zip(op.out, row.segments, strict=True)):
        dim = Dim(DimKind.SEQUENCE, sizes[name], (name,))
        form = tuple(dim if d.kind is DimKind.SEQUENCE else d for d in value.form)
        part = replace(value, name=out, form=form, segment=value.segment + index)
        r.e.bind(r.site.context.defines(out), r.e.value(part), None)
    return None


def shard(r: Rule, op: ops.Shard) -> None:
    outs = op.out or op.in_
    operands = r.read("in", op.in_)
    for out, operand in zip(outs, operands or [], strict=False):
        value = r.value(operand)
        row = row_dim(value.form)
        if value.placement is not Placement.REPLICATED or row is None or len(row.segments) != 1:
            r.e.error(
                "E203",
                operand.path,
                "shard takes a replicated tensor with one sequence",
                "replicated, (..., seq, ...)",
                value.describe(),
            )
            r.give_up([out])
            continue
        name = r.site.context.defines(out)
        r.e.bind(name, r.e.value(replace(value, name=name, placement=Placement.SEQUENCE)), r.site.path)
    if operands is None:
        r.give_up(outs)
