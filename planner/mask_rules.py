"""The masks of an attention: which keys each of them is for, in the order in which the keys lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepgraph.planner import ops
from stepgraph.planner.rules import Operand, Rule
from stepgraph.planner.shares import Shares
from stepgraph.planner.values import Dim, DimKind, Placement, Value, show


def _parts(r: Rule, dim: Dim) -> list[tuple[Dim, int]]:
    """The sequences of a dim, and where each stands among its segments; a number of rows is one part."""
    sizes = r.e.schedule.sizes
    if dim.kind is not DimKind.SEQUENCE:
        return [(dim, 0)]
    return [(Dim(DimKind.SEQUENCE, sizes[name], (name,)), index) for index, name in enumerate(dim.segments)]


def key_masks(
    r: Rule, op: ops.Attention, keys: Sequence[Dim]
) -> tuple[list[Operand] | None, tuple[tuple[str, str], ...]]:
    """The mask operands, and the option `masked`: in the order of the keys, `mask` for a run that the next operand is
    the mask of, or how many keys without a mask follow. No operands where an error has been told."""
    assert op.mask is not None
    wanted = [dim for key in keys for dim, _ in _parts(r, key)]
    masks: dict[Dim, tuple[Operand, Value]] = {}
    for operand in r.read("mask", op.mask) or []:
        value = r.value(operand)
        if value.placement is not Placement.REPLICATED:
            r.e.error(
                "E203",
                operand.path,
                "every rank attends to all keys, so it needs the whole mask",
                str(Placement.REPLICATED),
                value.describe(),
                "leave the mask out of `shard`, or all_gather it",
            )
            return None, ()
        dims = _parts(r, value.form[-1])
        lead = len(value.form) == 2 and value.form[0].kind is DimKind.BATCH
        if not lead or any(wanted.count(dim) != 1 or dim in masks for dim, _ in dims):
            r.e.error(
                "E204",
                operand.path,
                f"'{value.name}' is not the mask of one sequence of keys",
                f"(batch, keys), one mask at most for each of: {', '.join(map(str, wanted))}",
                show(value.form),
                "the keys are the rows of k; a sequence without a mask is attended to in full",
            )
            return None, ()
        for dim, index in dims:
            part = replace(value, form=(value.form[0], dim), segment=value.segment + index)
            masks[dim] = operand, part
    found: list[Operand] = []
    pattern: list[str] = []
    rows = Shares(r.e.schedule).rows
    for key in keys:
        for place in range(r.e.schedule.axis("ulysses")) if key.by_place else [None]:
            for dim, _ in _parts(r, key):
                count = dim.size if place is None else rows[dim.segments[0]][place][1]
                if dim in masks and count:
                    operand, value = masks[dim]
                    if place is not None:
                        value = replace(value, placement=Placement.SEQUENCE, place=place)
                    found.append(replace(operand, value=r.e.value(value)))
                    pattern.append("mask")
                elif count:
                    pattern.append(str(count))
    return (found, (("masked", " ".join(pattern)),)) if masks else (None, ())
