"""What the rules of all op kinds share: reading operands, joining placements, making nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from stepgraph.planner import ops
from stepgraph.planner.naming import Site
from stepgraph.planner.opgraph import Action, Node
from stepgraph.planner.schedule import Schedule
from stepgraph.planner.shares import Chunk
from stepgraph.planner.values import (
    Dim,
    DimKind,
    Form,
    Memory,
    Placement,
    Space,
    Value,
    features,
    row_dim,
    show,
)

if TYPE_CHECKING:
    from stepgraph.planner.expand import Expander


@dataclass(frozen=True, slots=True)
class Operand:
    role: str
    value: int
    path: tuple[str | int, ...]


def same_form(left: Form, right: Form) -> bool:
    def key(form: Form) -> list[object]:
        return [(dim.size, dim.segments, dim.split, dim.by_place, dim.chunk) for dim in form]

    return key(left) == key(right)


def width_of(form: Form) -> int:
    return prod(dim.size for dim in features(form))


def heads_dim(form: Form) -> Dim | None:
    return next((dim for dim in form if dim.kind is DimKind.HEADS), None)


def memory_for(name: str, form: Form, placement: Placement, schedule: Schedule) -> Memory:
    """Local memory of its own for a value."""
    has_batch = bool(form) and form[0].kind is DimKind.BATCH
    return Memory(
        name,
        Space.LOCAL,
        schedule.model.dtype,
        form[0].size if has_batch else 1,
        row_dim(form),
        (features(form),),
        placement,
    )


class Rule:
    """One op being expanded: reads operands, checks them, makes nodes."""

    def __init__(self, expander: Expander, site: Site) -> None:
        self.e = expander
        self.site = site

    # Reading

    def operand_path(self, role: str, index: int) -> tuple[str | int, ...]:
        path = self.site.path
        return (*path, role, index) if self.e.tree.has((*path, role)) else (*path, index)

    def read(self, role: str, names: Sequence[str], accept_partial: bool = False) -> list[Operand] | None:
        """The operands of a role, or None where one of them is unknown (told already) or still a partial sum."""
        found: list[Operand] = []
        whole = True
        for index, name in enumerate(names):
            path = self.operand_path(role, index)
            value = self.e.read(name, path, self.site.context)
            if value is None:
                whole = False
                continue
            if self.e.values[value].partial and not accept_partial:
                self.e.error(
                    "E203",
                    path,
                    f"'{name}' is a partial sum",
                    "a whole tensor",
                    self.e.values[value].describe(),
                    "put an all_reduce of it before this op",
                )
                whole = False
                continue
            found.append(Operand(role, value, path))
        return found if whole else None

    def count(self, least: int, most: int | None, what: str) -> bool:
        got = len(self.site.op.in_) if not isinstance(self.site.op, ops.Barrier) else 0
        if got < least or (most is not None and got > most):
            self.e.error("E208", (*self.site.path, "in"), f"{self.site.kind} takes {what}", what, f"{got}")
            return False
        return True

    def value(self, operand: Operand) -> Value:
        return self.e.values[operand.value]

    # Placement

    def join(
        self, operands: list[Operand], placement: Placement | None = None
    ) -> tuple[Placement, list[Operand]] | None:
        """The one placement of all operands, replicated ones narrowed to the rank's own rows or heads."""
        leader: Operand | None = None
        for operand in operands:
            found = self.value(operand).placement
            if found is Placement.REPLICATED:
                continue
            if placement is None:
                placement, leader = found, operand
            elif found is not placement:
                other = self.value(leader).describe() if leader else str(placement)
                self.e.error(
                    "E203",
                    operand.path,
                    f"{self.site.kind} can't mix placements",
                    other,
                    self.value(operand).describe(),
                    "send, gather, shard or all_gather one of them first",
                )
                return None
        if placement is None:
            return Placement.REPLICATED, operands
        return placement, [self.narrow(operand, placement) for operand in operands]

    def narrow(self, operand: Operand, placement: Placement) -> Operand:
        """A replicated operand as the rank's own rows or heads of it; others as they are."""
        value = self.value(operand)
        wanted = DimKind.SEQUENCE if placement is Placement.SEQUENCE else DimKind.HEADS
        dims = [dim for dim in value.form if dim.kind is wanted]
        if value.placement is not Placement.REPLICATED or not dims or len(dims[0].segments) > 1:
            return operand
        return replace(operand, value=self.e.value(replace(value, placement=placement)))

    def in_chunk(self, operand: Operand, chunk: Chunk) -> Operand:
        """The heads of a chunk, of the rank's own heads of what is whole here; others as they are."""
        value = self.value(operand)
        if self.e.memories[value.memory].placement is not Placement.REPLICATED or value.placement is not Placement.HEAD:
            return operand
        form = tuple(replace(dim, chunk=chunk) if dim.kind is DimKind.HEADS else dim for dim in value.form)
        return replace(operand, value=self.e.value(replace(value, form=form)))

    def fits(self, operand: Operand, form: Form, what: str) -> bool:
        """Whether an operand has the features of ``form`` and its rows, one row, or none: it is broadcast then."""
        got = self.value(operand).form
        row, mine = row_dim(form), row_dim(got)
        rows_fit = mine is None or mine.size == 1 or (row is not None and same_form((mine,), (row,)))
        if width_of(got) == width_of(form) and rows_fit:
            return True
        self.e.error(
            "E204",
            operand.path,
            f"{what} does not fit",
            f"the features of {show(form)}, with its rows or one",
            self.value(operand).describe(),
        )
        return False

    # Making

    def node(
        self,
        action: Action,
        inputs: Sequence[tuple[str, int]],
        outputs: Sequence[int],
        options: tuple[tuple[str, str], ...] = (),
        *,
        kind: str = "",
        name: str = "",
        stream: str = "",
        axis: str = "",
        closes: tuple[int, ...] = (),
        protocol: ops.Handshake | None = None,
        chunked: bool = True,
    ) -> int:
        site = self.site
        self.e.nodes.append(
            Node(
                action,
                kind or site.kind,
                name or site.name,
                site.context.layer,
                site.path,
                stream or site.stream,
                tuple(inputs),
                tuple(outputs),
                options,
                axis,
                closes,
                protocol,
                self.e.guidance.part,
                self.e.chunk if chunked else None,
            )
        )
        return len(self.e.nodes) - 1

    def define(self, name: str, value: int | None) -> None:
        self.e.bind(self.site.context.defines(name), value, self.site.path)

    def run(
        self,
        operands: list[Operand],
        name: str,
        form: Form,
        placement: Placement,
        options: tuple[tuple[str, str], ...] = (),
        partial: bool = False,
    ) -> None:
        """A stage with one result, in memory of its own or in the state that it names."""
        value = self.result(name, form, placement, partial)
        if value is None:
            self.give_up([name])
            return
        self.node(Action.RUN, [(o.role, o.value) for o in operands], [value], options)
        self.define(name, value)

    def result(self, name: str, form: Form, placement: Placement, partial: bool = False) -> int | None:
        """A value that a stage makes, in memory of its own, or in a state; None after telling why not there."""
        full = self.site.context.defines(name)
        if full in self.e.schedule.state:
            return self.e.states.result(full, form, placement, partial, self.site.path)
        return self.e.fresh(full, form, placement, partial)

    def give_up(self, names: Sequence[str]) -> None:
        """The results are unknown; whoever reads them is not told again."""
        for name in names:
            self.define(name, None)


def check_sizes(e: Expander) -> None:
    """Sizes that don't go together, whatever the ops are."""
    schedule, sizes = e.schedule, e.schedule.sizes
    tensor, ulysses = schedule.axis("tensor"), schedule.axis("ulysses")
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    if heads % kv_heads:
        e.error(
            "E204", ("model", "kv_heads"), "heads is no multiple of kv_heads", f"a divisor of {heads}", str(kv_heads)
        )
        return
    for name in ("heads", "kv_heads", "ffn", "hidden"):
        if sizes[name] % tensor:
            e.error(
                "E210",
                ("model", name),
                f"{name} can't be cut evenly over the tensor axis",
                f"a multiple of {tensor}",
                str(sizes[name]),
            )
            return
    heads, kv_heads = heads // tensor, kv_heads // tensor
    if heads < ulysses or (kv_heads < ulysses and heads // kv_heads < -(-ulysses // kv_heads)):
        e.error(
            "E205",
            ("mesh", "ulysses"),
            "heads are fewer than ranks",
            f"a head of q for every rank, {ulysses} at least",
            f"{heads} heads, {kv_heads} of k and v",
            "take fewer ulysses ranks; only the sequence may have empty shares",
        )
    branches = schedule.axis("cfg")
    if branches > 2:
        e.error("E204", ("mesh", "cfg"), "there are two branches of guidance", "1 or 2", str(branches))
    elif schedule.cfg == "parallel" and branches < 2:
        e.error(
            "E216", ("cfg",), "the branches have no ranks of their own", "an axis cfg of 2 in `mesh`", str(branches)
        )
    elif schedule.cfg in ("batch", "sequential") and branches > 1:
        e.error(
            "E216",
            ("cfg",),
            "the mesh has ranks for each branch",
            "cfg: parallel, or a mesh without cfg",
            f"cfg: {schedule.cfg}, and an axis cfg of {branches}",
        )
    taken = ["batch", "hidden", "heads", "kv_heads", "head_dim", "ffn"]
    named: list[tuple[str, ...]] = [("shape", "seq", name) for name, _ in schedule.segments]
    named += [("shape", name) for name, _ in schedule.more_sizes]
    for path in [*named, *(("sizes", name) for name, _ in schedule.own_sizes)]:
        name = path[-1]
        if not re.match(ops.NAME_PATTERN, name):
            e.error("E211", path, f"'{name}' is no name", "letters, digits and _", f"'{name}'", key=True)
        if name in taken:
            e.error(
                "E211",
                path,
                f"'{name}' is already the name of a size",
                "another name",
                f"'{name}'",
                key=True,
            )
        taken.append(name)
