"""The rule of attention: its operands and their placements, the masks of its keys, what it makes."""

from __future__ import annotations

from dataclasses import replace

from stepgraph.planner import ops
from stepgraph.planner.mask_rules import key_masks
from stepgraph.planner.opgraph import Action
from stepgraph.planner.rules import Operand, Rule, heads_dim, memory_for, same_form
from stepgraph.planner.shares import Chunk
from stepgraph.planner.values import Dim, DimKind, Placement, Value, row_dim


def attention(r: Rule, op: ops.Attention) -> None:
    outs = [f"{op.out}.{suffix}" for suffix in op.concat] if op.concat else [op.out]
    if not r.count(3, 3, "q, k and v"):
        return r.give_up(outs)
    operands: list[Operand] = []
    for index, (role, name) in enumerate(zip("qkv", op.in_, strict=True)):
        for part in [f"{name}.{suffix}" for suffix in op.concat] if op.concat else [name]:
            value = r.e.read(part, r.operand_path("in", index), r.site.context)
            if value is not None:
                operands.append(Operand(role, value, r.operand_path("in", index)))
    parts = len(op.concat) if op.concat else 1
    if len(operands) != 3 * parts:
        return r.give_up(outs)
    queries = operands[:parts]
    for operand in operands:
        if heads_dim(r.value(operand).form) is None or row_dim(r.value(operand).form) is None:
            r.e.error(
                "E204",
                operand.path,
                "attention takes heads",
                "(batch, seq, heads, head_dim)",
                r.value(operand).describe(),
            )
            return r.give_up(outs)
    by_sequence = any(r.value(q).placement is Placement.SEQUENCE for q in queries)
    if by_sequence:
        for operand in operands[parts:]:
            if r.value(operand).placement is not Placement.REPLICATED:
                r.e.error(
                    "E203",
                    operand.path,
                    "attention over a part of the rows",
                    f"q {Placement.HEAD} like k and v, or k and v replicated",
                    f"{r.value(queries[0]).describe()}; {r.value(operand).describe()}",
                    "send q, k and v before the attention, and close them with a barrier",
                )
                return r.give_up(outs)
        joined = r.join(queries, Placement.SEQUENCE)
        narrowed = [*joined[1], *operands[parts:]] if joined else []
    else:
        joined = r.join(operands)
        narrowed = joined[1] if joined else []
    if not joined:
        return r.give_up(outs)
    for k, v in zip(narrowed[parts : 2 * parts], narrowed[2 * parts :], strict=True):
        if not same_form(r.value(k).form, r.value(v).form):
            r.e.error("E204", v.path, "k and v differ in shape", r.value(k).describe(), r.value(v).describe())
            return r.give_up(outs)
    if op.keys is not None:
        first_rows = [_first_rows(r, op.keys, operand, op.concat is None) for operand in narrowed[parts:]]
        known = [operand for operand in first_rows if operand is not None]
        if len(known) < len(first_rows):
            return r.give_up(outs)
        narrowed = [*narrowed[:parts], *known]
    kv_heads, q_heads = heads_dim(r.value(narrowed[parts]).form), heads_dim(r.value(narrowed[0]).form)
    assert kv_heads is not None
    assert q_heads is not None
    if q_heads.size % kv_heads.size:
        r.e.error(
            "E204",
            narrowed[parts].path,
            "q heads are no multiple of k's",
            r.value(narrowed[0]).describe(),
            r.value(narrowed[parts]).describe(),
        )
        return r.give_up(outs)
    if r.e.chunk is not None:
        narrowed = _in_chunk(r, narrowed, r.e.chunk)
        if not narrowed:
            return r.give_up(outs)
    keys = [row_dim(r.value(k).form) for k in narrowed[parts : 2 * parts]]
    masks, options = key_masks(r, op, [key for key in keys if key]) if op.mask else ([], ())
    if masks is None:
        return r.give_up(outs)
    return _attend(r, joined[0], [*narrowed, *masks], outs, options)


def _in_chunk(r: Rule, operands: list[Operand], chunk: Chunk) -> list[Operand]:
    """The operands of one chunk of heads: those that were sent in chunks, and those heads of what is whole here. Empty
    after telling of another."""
    found = [r.in_chunk(operand, chunk) for operand in operands]
    for operand in found:
        dim = heads_dim(r.value(operand).form)
        if dim is not None and dim.chunk != chunk:
            r.e.error(
                "E217",
                operand.path,
                "the attention is in chunks, and an operand is not",
                "what is sent in the chunks, or replicated",
                r.value(operand).describe(),
                "move the send into `do`",
            )
            return []
    return found


def _first_rows(r: Rule, keys: int | str, operand: Operand, alone: bool) -> Operand | None:
    """The first rows of k or v; None after telling that there are none, or not so many."""
    path, value = (*r.site.path, "keys"), r.value(operand)
    count, row = r.e.named_size(keys, path), row_dim(value.form)
    if count is None:
        return None
    if not alone or row is None or len(row.segments) > 1 or not 0 < count <= row.size:
        r.e.error("E204", path, "keys counts rows of one k and one v", f"1 or more of {value.describe()}", str(count))
        return None
    form = tuple(Dim(DimKind.PLAIN, count) if dim is row else dim for dim in value.form)
    return replace(operand, value=r.e.value(replace(value, form=form)))


def _attend(
    r: Rule, placement: Placement, operands: list[Operand], outs: list[str], options: tuple[tuple[str, str], ...]
) -> None:
    """One result with the rows of all q segments; each segment's output is a view of it."""
    queries = [r.value(operand) for operand in operands[: len(outs)]]
    if len(queries) == 1:
        return r.run(operands, outs[0], queries[0].form, placement, options)
    rows = [row_dim(query.form) for query in queries]
    segments = tuple(name for row in rows if row for name in row.segments)
    whole = Dim(DimKind.SEQUENCE, sum(row.size for row in rows if row), segments)
    memory = r.e.memory(
        replace(memory_for(outs[0].rpartition(".")[0], queries[0].form, placement, r.e.schedule), rows=whole)
    )
    outputs, first = [], 0
    for out, query, row in zip(outs, queries, rows, strict=True):
        outputs.append(r.e.value(Value(out, memory, query.form, placement, False, 0, first)))
        first += len(row.segments) if row else 0
    r.node(Action.RUN, [(o.role, o.value) for o in operands], outputs, options)
    for out, output in zip(outs, outputs, strict=True):
        r.define(out, output)
    return None
