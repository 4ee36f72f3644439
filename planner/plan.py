"""The plan: everything that every rank issues in one denoising step. The only door between planner and runtime.

A plan is integers and names. Each rank has its own buffers, views and program; a program is listed in the order in
which the host issues it, and each instruction runs on a stream, in that order within the stream. Stream 0 is the
origin: a capture starts and ends on it, and the other streams enter the capture by waiting for an event.

Memory. A buffer is a dense box (batch, rows, cols) of elements, row-major. The first ``len(plan.targets)`` buffer
ids of every rank are the symmetric targets, which lie in the rank's arena at the same byte offset on every rank;
their pitch (cols) may differ between ranks. The others are local. States outlive a replay: some targets, and the first
local buffers. A region is a rectangle of rows and columns over all batches of a buffer.

Time. Every replay of a rank runs after its previous replay. Ranks are ordered only by flags and collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from stepgraph.planner.plan_file import digest, read_text, refuse, sealed, unsealed

FORMAT = "stepgraph-plan"
FLAG_BYTES = 8
ALIGNMENT = 256
"""Bytes; every target's offset is a multiple of it."""


class DType(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BOOL = "bool"
    """Of inputs that are masks; a model computes in another."""

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "bool": 1}[self.value]


class Protocol(StrEnum):
    """How a handshake tells its group that the sends before it are done."""

    MEMOP = "memop"
    """Stream memory operations: write 1 to the peers, wait for 1, reset to 0. A slot a handshake."""
    COPY = "copy"
    """As MEMOP, but the 1 travels as a copy behind the payload."""
    KERNEL = "kernel"
    """A monotone epoch, counted on the device; a wait is satisfied by any later epoch; nothing is reset."""


class ExchangeKind(StrEnum):
    HANDSHAKE = "handshake"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True)
class Region:
    """Rows [row, row + rows) and columns [col, col + cols) of every batch of a buffer; units are elements."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    row: int
    rows: int
    col: int
    cols: int


@dataclass(frozen=True, slots=True)
class Buffer:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    dtype: DType
    batch: int
    rows: int
    cols: int
    stream: int
    """The stream on which a local buffer is allocated; 0 for targets and states."""

    @property
    def nbytes(self) -> int:
        return self.batch * self.rows * self.cols * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class View:
    """A region of one of the rank's buffers, and the shape under which a stage sees it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    buffer: int
    region: Region
    shape: tuple[int, ...]
    """Its elements are those of the region, batch by batch, row by row: a reshape of (batch, rows, cols)."""


@dataclass(frozen=True, slots=True)
class Target:
    """A symmetric buffer of every rank. Its dtype and shape on rank r are ``ranks[r].buffers[id]``."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    offset: int
    """Bytes from the start of the arena."""
    nbytes: int
    """The largest over the ranks."""


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that outlives a replay: zero before a session's first one, then what the last one has left in it. It is
    one buffer on every rank, under one number: a target where peers write to it, which then shares its bytes with no
    other, else a local buffer right behind the targets, which is never allocated by an instruction nor dropped."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    """As in the schedule, and with the layer where every layer has its own: ``kcache[3]``."""
    buffer: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """One all-rank exchange of a group in the step; every member takes part once a replay."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    kind: ExchangeKind
    group: int
    name: str
    op: int
    protocol: Protocol | None
    """None for a collective."""


@dataclass(frozen=True, slots=True)
class Operand:
    """What an input of a stage is for: ``role`` is the schedule's field ("in", "rope", "gate", ...)."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    role: str
    name: str
    made_by: tuple[int, ...]
    """The ops of the step that make it, whose writes its reader must see; none for a state as the last replay has left
    it."""


@dataclass(frozen=True, slots=True)
class Op:
    """An op of the schedule in one layer. All ranks share the table."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    kind: str
    name: str
    """Path without the layer, as ``self_attention.qkv`` or ``dual.qkv.img``; it names weights and bindings."""
    layer: int | None
    """Which repetition, counted over the whole step; None outside ``layers``."""
    line: int
    inputs: tuple[Operand, ...]
    outputs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    """The kind's own fields that a stage needs, as ("over", "head"). `branch` and `chunk` tell several ops of one name
    and layer apart: the branch of guidance, and which chunk of the heads of how many, as ("chunk", "0/2")."""

    @property
    def part(self) -> str:
        """Which of several ops of one name and layer, for people: as `cond chunk 0`."""
        options = dict(self.options)
        chunk = f"chunk {options['chunk'].partition('/')[0]}" if "chunk" in options else ""
        return " ".join(word for word in (options.get("branch", ""), chunk) if word)

    @property
    def label(self) -> str:
        """Name, layer and part, as people are told of an op."""
        layer = "" if self.layer is None else f"[{self.layer}]"
        return f"{self.name}{layer} {self.part}".rstrip()


@dataclass(frozen=True, slots=True)
class Input:
    """What the caller hands to every rank, whole."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    shape: tuple[int, ...]
    dtype: DType
    box: tuple[int, int, int]
    """The shape as (batch, rows, cols), in the way of a buffer."""


@dataclass(frozen=True, slots=True)
class Output:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    shape: tuple[int, ...]
    dtype: DType


# Instructions. ``stream`` is an index into ``Plan.streams``; views and buffers are the rank's own.


@dataclass(frozen=True, slots=True)
class Load:
    """The rank's share of the caller's input is written to ``view`` before anything else of the replay: ``region`` of
    as many batches as the view has, from ``batch`` on, of the input seen as ``Input.box``."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    op: int
    input: int
    batch: int
    region: Region
    view: int
    do: Literal["load"] = field(default="load", kw_only=True)


@dataclass(frozen=True, slots=True)
class Store:
    """``view`` is read by the caller as output number ``output``."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    op: int
    output: int
    view: int
    do: Literal["store"] = field(default="store", kw_only=True)


@dataclass(frozen=True, slots=True)
class Run:
    """A stage reads ``inputs`` and writes ``outputs``. A view in both is changed in place; the buffers of the other
    outputs are allocated by the stage, one tensor a buffer, in the order of first mention. What it makes for the buffer
    of a state is copied into it at the end; a stage that reads a state and makes it anew names two views of it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    op: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    do: Literal["run"] = field(default="run", kw_only=True)


@dataclass(frozen=True, slots=True)
class Send:
    """One pitched copy (a batch) from view ``source`` into ``region`` of buffer ``target`` on rank ``peer``."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    op: int
    exchange: int
    """The handshake that closes its group."""
    source: int
    source_region: Region
    """In the source view's buffer, inside the view; as many rows and columns as ``region``."""
    peer: int
    target: int
    region: Region
    do: Literal["send"] = field(default="send", kw_only=True)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag word: ``slot`` of the flag page of its owner. In a signal ``peer`` is the owner; in a wait or reset the
    word is the rank's own and ``peer`` is the rank that writes it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    peer: int
    slot: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Write 1 to each peer's word (KERNEL: the next epoch), after everything before it on the stream."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    exchange: int
    flags: tuple[Flag, ...]
    do: Literal["signal"] = field(default="signal", kw_only=True)


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until every own word holds 1 (KERNEL: at least this replay's epoch)."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    exchange: int
    flags: tuple[Flag, ...]
    do: Literal["wait"] = field(default="wait", kw_only=True)


@dataclass(frozen=True, slots=True)
class Reset:
    """Write 0 to own words. Never in a KERNEL handshake."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    exchange: int
    flags: tuple[Flag, ...]
    do: Literal["reset"] = field(default="reset", kw_only=True)


@dataclass(frozen=True, slots=True)
class Part:
    """What goes to, or comes from, ``peer``: ``region`` lies in the buffer of ``view`` and inside the view."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    peer: int
    view: int
    region: Region


@dataclass(frozen=True, slots=True)
class Collective:
    """An exchange through the process group. Each outgoing part to a peer pairs, in order, with the incoming parts
    that the peer lists from this rank, shape by shape. With ``reduce`` every rank has one outgoing and one incoming
    part a member, and each incoming part is the sum over the members of the outgoing ones, in float32."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    op: int
    exchange: int
    reduce: bool
    outgoing: tuple[Part, ...]
    incoming: tuple[Part, ...]
    do: Literal["collective"] = field(default="collective", kw_only=True)


@dataclass(frozen=True, slots=True)
class Record:
    """Event number ``event`` happens when everything before it on the stream is done. Each event is recorded once
    and waited for once a replay."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    event: int
    do: Literal["record"] = field(default="record", kw_only=True)


@dataclass(frozen=True, slots=True)
class WaitEvent:
    """What follows on the stream starts after the event."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    event: int
    do: Literal["wait_event"] = field(default="wait_event", kw_only=True)


@dataclass(frozen=True, slots=True)
class Drop:
    """The buffer's memory may be given to the next allocation on ``stream``, its own stream: from here on in that
    stream the bytes may change, as by a write."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    stream: int
    buffer: int
    do: Literal["drop"] = field(default="drop", kw_only=True)


Instruction = Annotated[
    Load | Store | Run | Send | Signal | Wait | Reset | Collective | Record | WaitEvent | Drop,
    Field(discriminator="do"),
]


@dataclass(frozen=True, slots=True)
class RankProgram:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    buffers: tuple[Buffer, ...]
    views: tuple[View, ...]
    instructions: tuple[Instruction, ...]

    def made_by(self, run: Run) -> tuple[int, ...]:
        """The buffers that a ``Run`` allocates, or makes anew where they are states, in the order of first mention."""
        return tuple(dict.fromkeys(self.views[view].buffer for view in run.outputs if view not in run.inputs))


@dataclass(frozen=True, slots=True)
class Axis:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Source:
    """The schedule that the plan was compiled from, so that a plan explains and checks itself."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    file: str
    """Its name without folders."""
    text: str
    overrides: tuple[tuple[str, str], ...]
    variant: str
    """Which version of the step it is; empty where the schedule has no variants."""
    bucket: str
    """Which sizes it is for; empty where the schedule has no buckets."""

    @property
    def version(self) -> str:
        return version_name(self.variant, self.bucket)


def version_name(variant: str, bucket: str) -> str:
    """variant/bucket, or the one of the two that there is; empty where the schedule has one version."""
    return "/".join(name for name in (variant, bucket) if name)


@dataclass(frozen=True, slots=True)
class Plan:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    source: Source
    dtype: DType
    mesh: tuple[Axis, ...]
    """In the order written; the last varies fastest over ranks."""
    transport: Literal["auto", "symmetric", "ipc", "nccl"]
    groups: tuple[tuple[int, ...], ...]
    streams: tuple[str, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    ops: tuple[Op, ...]
    exchanges: tuple[Exchange, ...]
    targets: tuple[Target, ...]
    states: tuple[State, ...]
    arena_bytes: int
    arena_lower_bound: int
    """Bytes that no placement of the targets can go below, given their lifetimes."""
    flag_slots: int
    dependencies: int
    """Orderings between streams before reduction."""
    ranks: tuple[RankProgram, ...]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def state_buffers(self) -> frozenset[int]:
        """The buffers, of every rank, that are states."""
        return frozenset(state.buffer for state in self.states)

    def coordinate(self, rank: int, axis: str) -> tuple[int, int]:
        """(index, size) of ``rank`` along a mesh axis; (0, 1) for an axis that the mesh lacks."""
        stride = 1
        for entry in reversed(self.mesh):
            if entry.name == axis:
                return rank // stride % entry.size, entry.size
            stride *= entry.size
        return 0, 1


@cache
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def dumps(plan: Plan) -> str:
    """The canonical text of a plan: one line of JSON, keys in declaration order, with its SHA-256 in front."""
    return sealed(FORMAT, "plan", _adapter().dump_json(plan))


def plan_hash(plan: Plan) -> str:
    """SHA-256, in hex, over everything that the plan says."""
    return digest(_adapter().dump_json(plan))


def loads(text: str, edited: bool = False) -> Plan:
    """Read a plan, refusing what is not whole, not of this version, not what was hashed (unless it was ``edited`` by
    hand), or refers to what isn't there. Runs no code of the file's.

    Raises:
        PlanError: E150 not a plan, E151 version, E152 hash, E153 schema, E154 a reference that leads nowhere.
    """
    from stepgraph.planner.plan_check import check_plan

    plan = unsealed(text, FORMAT, "plan", _adapter(), edited)
    problem = check_plan(plan)
    if problem is not None:
        raise refuse("E154", f"the plan refers to what is not there: {problem}", "valid references", "this")
    return plan


def load_plan(path: Path, edited: bool = False) -> Plan:
    """``loads`` of a file. Raises PlanError, also E150 where the file can't be read."""
    return loads(read_text(path), edited)
