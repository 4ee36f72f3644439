"""What flows between ops: placement, shape, and where a value lies in its memory, for any rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from math import prod

from stepgraph.planner.plan import DType, Region
from stepgraph.planner.shares import Chunk, Shares


class Placement(StrEnum):
    SEQUENCE = "by sequence"
    HEAD = "by head"
    REPLICATED = "replicated"


class DimKind(Enum):
    BATCH = auto()
    SEQUENCE = auto()
    """Cut over ulysses where the placement is by sequence."""
    HEADS = auto()
    """Cut over ulysses where the placement is by head."""
    PLAIN = auto()


@dataclass(frozen=True, slots=True)
class Dim:
    kind: DimKind
    size: int
    """Global."""
    segments: tuple[str, ...] = ()
    """Of a SEQUENCE: its named lengths, in order."""
    heads: str = ""
    """Of HEADS: heads or kv_heads."""
    split: bool = False
    """Cut evenly over the tensor axis besides."""
    by_place: bool = False
    """Of a SEQUENCE of several segments: a send has laid its rows down place by place, each with rows of all segments;
    else they lie segment by segment."""
    chunk: Chunk | None = None
    """Of HEADS: which chunk of every rank's share; None for all."""

    def __str__(self) -> str:
        if self.kind is DimKind.SEQUENCE:
            return "+".join(self.segments) + (" by place" if self.by_place else "")
        if self.kind is DimKind.HEADS:
            return f"chunk {self.chunk[0]} of {self.heads}" if self.chunk else self.heads
        return str(self.size)


Form = tuple[Dim, ...]
"""The global shape of a value: an optional BATCH, then an optional SEQUENCE, then the features."""


def show(form: Form) -> str:
    return f"({', '.join(str(dim) for dim in form)})"


def features(form: Form) -> Form:
    """The dims that make up a row."""
    rest = form[1:] if form and form[0].kind is DimKind.BATCH else form
    return rest if row_dim(form) is None else rest[1:]


def row_dim(form: Form) -> Dim | None:
    """The dim that counts the rows, if there is one."""
    rest = form[1:] if form and form[0].kind is DimKind.BATCH else form
    if not rest or rest[0].kind is DimKind.HEADS:
        return None
    return rest[0] if len(rest) > 1 or rest[0].kind is DimKind.SEQUENCE else None


class Space(Enum):
    INPUT = auto()
    LOCAL = auto()
    TARGET = auto()
    STATE = auto()
    """Of a state that only its own rank writes. One that is sent into is a TARGET."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A buffer of every rank: rows (or segments of them) by pieces of features, side by side."""

    name: str
    space: Space
    dtype: DType
    batch: int
    rows: Dim | None
    pieces: tuple[Form, ...]
    placement: Placement
    copies: int = 1
    """How many blocks of the rows are stacked: one a member where partial sums are exchanged."""
    family: str = ""
    """Of a TARGET: the op whose targets may alternate."""
    buffers: int | None = None
    """Of a TARGET: how many alternate; None leaves it to the planner."""
    axis: str = ""
    """Of a TARGET: the mesh axis over which its writers lie."""
    state: str = ""
    """The key of the state that lies here: its name, as ``kcache[3]`` where every layer has its own. Not dropped, not
    shared, and written by nobody when the session starts."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor at one point of the step: a part of a memory, under a shape and a placement."""

    name: str
    memory: int
    form: Form
    placement: Placement
    partial: bool = False
    piece: int | None = None
    """Which piece of the memory's features; None for all."""
    segment: int = 0
    """Where the value's segments start among those of the memory."""
    block: int | None = None
    """Which of the memory's stacked copies; None for all."""
    place: int | None = None
    """Whose rows, by the coordinate of ulysses, where the value is by sequence and its memory is whole; None for the
    rank's own."""

    def describe(self) -> str:
        return f"{self.name} {show(self.form)}, {'partial sum, ' if self.partial else ''}{self.placement}"


def local_size(dim: Dim, placement: Placement, shares: Shares, rank: int) -> int:
    """How much of ``dim`` rank holds under ``placement``."""
    place = shares.coordinate(rank, "ulysses")
    if dim.kind is DimKind.SEQUENCE and placement is Placement.SEQUENCE:
        return sum(shares.rows[name][place][1] for name in dim.segments)
    if dim.kind is DimKind.HEADS and placement is Placement.HEAD:
        return shares.head_range(dim.heads, place, dim.chunk)[1]
    if dim.chunk:
        return sum(shares.chunk_counts(dim.heads, dim.chunk))
    return dim.size // shares.schedule.axis("tensor") if dim.split else dim.size


def view_shape(value: Value, memory: Memory, shares: Shares, rank: int) -> tuple[int, ...]:
    """The shape under which a stage sees a value: stacked copies count as rows."""
    shape = local_shape(value.form, value.placement, shares, rank)
    if memory.copies == 1 or value.block is not None:
        return shape
    at = 1 if value.form and value.form[0].kind is DimKind.BATCH else 0
    if row_dim(value.form) is None:
        return (*shape[:at], memory.copies, *shape[at:])
    return (*shape[:at], shape[at] * memory.copies, *shape[at + 1 :])


def local_shape(form: Form, placement: Placement, shares: Shares, rank: int) -> tuple[int, ...]:
    return tuple(local_size(dim, placement, shares, rank) for dim in form)


def buffer_box(memory: Memory, shares: Shares, rank: int) -> tuple[int, int, int]:
    """(batch, rows, cols) of a memory on a rank."""
    rows = 1 if memory.rows is None else local_size(memory.rows, memory.placement, shares, rank)
    cols = sum(prod(local_shape(piece, memory.placement, shares, rank)) for piece in memory.pieces)
    return memory.batch, rows * memory.copies, cols


def _first_row(value: Value, memory: Memory, shares: Shares, rank: int) -> int:
    if memory.rows is None or memory.rows.kind is not DimKind.SEQUENCE:
        return 0
    place = shares.coordinate(rank, "ulysses")
    sizes = dict(shares.schedule.segments)
    before = memory.rows.segments[: value.segment]
    if memory.placement is Placement.SEQUENCE:
        return sum(shares.rows[name][place][1] for name in before)
    start = sum(sizes[name] for name in before)
    if value.placement is Placement.SEQUENCE:  # the rank's own rows of what is whole here
        start += shares.rows[memory.rows.segments[value.segment]][place][0]
    return start


def region_of(value: Value, memory: Memory, shares: Shares, rank: int) -> Region:
    """Where a value lies in its memory on a rank."""
    row = row_dim(value.form)
    rows = 1 if row is None else local_size(row, value.placement, shares, rank)
    first = _first_row(value, memory, shares, rank) + rows * (value.block or 0)
    if value.block is None:
        rows *= memory.copies
    _, _, all_cols = buffer_box(memory, shares, rank)
    if value.piece is None:
        return Region(first, rows, 0, all_cols)
    widths = [prod(local_shape(piece, memory.placement, shares, rank)) for piece in memory.pieces]
    col = sum(widths[: value.piece])
    cols = prod(local_shape(features(value.form), value.placement, shares, rank))
    if value.placement is Placement.HEAD and memory.placement is not Placement.HEAD:  # own heads of what is whole
        heads = memory.pieces[value.piece][0]
        chunk = features(value.form)[0].chunk
        first_head = shares.head_range(heads.heads, shares.coordinate(rank, "ulysses"), chunk)[0]
        col += first_head * prod(local_shape(memory.pieces[value.piece][1:], memory.placement, shares, rank))
    return Region(first, rows, col, cols)
