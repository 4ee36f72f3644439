"""Level 1, the schedule: what the author wrote, validated, every value with its place in the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.json_schema import JsonSchemaValue

from stepgraph.planner.diagnostics import Diagnostic, ScheduleError, nearest
from stepgraph.planner.ops import (
    BufferCount,
    Dims,
    Entry,
    Handshake,
    LayerRun,
    Model,
    Name,
    Names,
    Op,
    Send,
    Size,
    Via,
    as_tuple,
)
from stepgraph.planner.plan import DType, Source
from stepgraph.planner.schema_errors import schema_diagnostics
from stepgraph.planner.source import Overrides, SourceTree, TreePath, read, read_file

Cfg = Literal["batch", "sequential", "parallel"]
AxisName = Literal["ulysses", "tensor", "cfg"]


def _dtype(value: object) -> object:
    return DType(value) if value in [d.value for d in DType] else value


DTypeName = Annotated[DType, BeforeValidator(_dtype)]
FloatName = Annotated[Literal[DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64], BeforeValidator(_dtype)]
Entries = Annotated[tuple[Entry, ...], Field(min_length=1), BeforeValidator(as_tuple)]


class ModelSizes(Model):
    """Global sizes of the model."""

    layers: Size = Field(description="How many layers `layers: NAME` repeats.")
    hidden: Size = Field(description="Features of a token.")
    heads: Size = Field(description="Attention heads of q.")
    kv_heads: Size | None = Field(None, description="Attention heads of k and v; by default as many as heads.")
    head_dim: Size = Field(description="Features of a head.")
    ffn: Size = Field(description="Inner features of the MLP.")
    dtype: FloatName = Field(description="bfloat16, float16, float32 or float64.")


Extra = Annotated[int, Field(ge=0, le=2**40)]


class ShapeSizes(Model):
    """Global sizes of a request: batch, seq, and any others under names of their own, for shapes and for `at`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Extra]

    batch: Size = Field(1, description="Samples.")
    seq: Size | Annotated[dict[Name, Size], Field(min_length=1)] = Field(
        description="Tokens, or a map of named lengths."
    )


class InputSpec(Model):
    """A tensor that the caller hands over."""

    shape: Dims = Field(description="Global sizes, numbers or names.")
    dtype: DTypeName | None = Field(None, description="By default that of the model; bool for a mask.")
    placement: Literal["replicated", "sequence", "cfg"] = Field(
        "replicated",
        description="replicated: every rank loads it whole; sequence: each rank loads its own rows; cfg: both "
        "branches, conditioned first, are stacked in front of the shape.",
    )


class StateSpec(Model):
    """A tensor that outlives a step: zero before a session's first step, then what the last step has left in it."""

    shape: Dims = Field(description="Global sizes, numbers or names.")
    placement: Literal["sequence", "head", "replicated"] = Field(
        "replicated",
        description="replicated: every rank holds it whole; sequence: its own rows; head: all rows of its own heads.",
    )
    dtype: DTypeName | None = Field(None, description="By default that of the model.")
    per: Literal["step", "layer"] = Field(
        "step", description="layer: every layer has one of its own, and the name means that of the layer; step: one."
    )


class StreamSpec(Model):
    """A stream; it has no settings."""


class KindDefaults(Model):
    """Default fields of a kind."""

    stream: Name | None = Field(None, description="The stream that the kind runs on.")


class NormDefaults(KindDefaults):
    over: Literal["head", "hidden"] | None = Field(None, description="Normalise over head or hidden.")


class BarrierDefaults(KindDefaults):
    handshake: Handshake | None = Field(None, description="memop, copy or kernel.")


class ExchangeDefaults(BarrierDefaults):
    via: Via | None = Field(None, description="copy or nccl.")
    buffers: BufferCount | None = Field(None, description="How many targets alternate over the layers.")


class Defaults(Model):
    """Fields that a kind of op has by default, and how peers are reached."""

    handshake: Handshake = Field("memop", description="How handshakes are made: memop, copy or kernel.")
    transport: Literal["auto", "symmetric", "ipc", "nccl"] = Field(
        "auto", description="How peers' memory is reached; auto lets the group choose."
    )
    norm: NormDefaults = NormDefaults()
    modulate: KindDefaults = KindDefaults()
    residual: KindDefaults = KindDefaults()
    mlp: KindDefaults = KindDefaults()
    norm_rope: NormDefaults = NormDefaults()
    rope: KindDefaults = KindDefaults()
    attention: KindDefaults = KindDefaults()
    linear: KindDefaults = KindDefaults()
    call: KindDefaults = KindDefaults()
    send: ExchangeDefaults = ExchangeDefaults()
    barrier: BarrierDefaults = BarrierDefaults()
    gather: ExchangeDefaults = ExchangeDefaults()
    all_reduce: ExchangeDefaults = ExchangeDefaults()
    shard: KindDefaults = KindDefaults()
    all_gather: ExchangeDefaults = ExchangeDefaults()
    concat: KindDefaults = KindDefaults()
    split: KindDefaults = KindDefaults()
    keep: KindDefaults = KindDefaults()
    guide: ExchangeDefaults = ExchangeDefaults()


class VariantSpec(Model):
    """A version of the step."""

    step: Entries = Field(description="The ops of the variant's step.")
    after: Names | None = Field(
        None, description="The variants that it may follow; by default any. The first variant of the file begins."
    )
    outputs: Annotated[tuple[Name, ...], BeforeValidator(as_tuple)] | None = Field(
        None, description="What the caller gets, or []; by default the schedule's `outputs`."
    )


class Document(Model):
    """A schedule file."""

    version: Literal[1] = Field(description="The language's version: 1.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = Field(description="The schedule's name.")
    model: ModelSizes = Field(description="Global sizes of the model.")
    sizes: dict[Name, Size] = Field(
        default={}, description="Sizes of your own, by name: for shapes, and for `repeat` under `layers`."
    )
    mesh: Annotated[dict[AxisName, Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1)] = Field(
        description="Axes and their sizes, in order; the last varies fastest over ranks."
    )
    shape: ShapeSizes = Field(description="Global sizes of a request.")
    inputs: Annotated[dict[Name, InputSpec], Field(min_length=1)] = Field(
        description="What the caller hands over, in order."
    )
    outputs: Names = Field(description="What the caller gets: names at the end of the step.")
    cfg: Cfg | None = Field(
        None,
        description="Classifier-free guidance. batch: both branches in one batch; sequential: one after the other in "
        "one step; parallel: each on ranks of its own, along the mesh's axis cfg of 2, where it is the default.",
    )
    state: dict[Name, StateSpec] = Field(default={}, description="Tensors that outlive a step.")
    streams: Annotated[dict[Name, StreamSpec], Field(min_length=1)] = Field(
        default={"compute": StreamSpec(), "copy": StreamSpec()},
        description="The streams; a capture starts and ends on the first.",
    )
    defaults: Defaults = Field(default=Defaults(), description="Fields that a kind has by default.")
    blocks: dict[Name, Entries] = Field(default={}, description="Named lists of ops.")
    step: Entries | None = Field(None, description="The ops of one denoising step.")
    variants: Annotated[dict[Name, VariantSpec], Field(min_length=1)] | None = Field(
        None, description="Named versions of the step, instead of `step`: each becomes a plan and a graph of its own."
    )
    buckets: Annotated[dict[Name, Annotated[dict[Name, Extra], Field(min_length=1)]], Field(min_length=1)] | None = (
        Field(None, description="Named values for sizes of `shape`: each becomes a plan and a graph of its own.")
    )


@dataclass(frozen=True, slots=True)
class OpItem:
    kind: str
    op: Op
    path: TreePath
    """Where the op's fields stand in the file's tree."""


@dataclass(frozen=True, slots=True)
class EachItem:
    suffixes: tuple[str, ...]
    items: tuple[Item, ...]
    path: TreePath


@dataclass(frozen=True, slots=True)
class LayersItem:
    runs: tuple[tuple[str, int, int | None], ...]
    """(block, how many layers of it, which layer the first one is), in order."""
    path: TreePath


@dataclass(frozen=True, slots=True)
class ChunksItem:
    heads: int
    """Into how many chunks each rank's heads are cut."""
    items: tuple[Item, ...]
    path: TreePath


Item = OpItem | EachItem | LayersItem | ChunksItem


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    after: tuple[str, ...]
    """The variants that it may follow."""
    outputs: tuple[str, ...]
    outputs_path: TreePath
    step: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    name: str
    sizes: tuple[tuple[str, int], ...]
    """Those that differ from the schedule's `shape`."""


@dataclass(frozen=True, slots=True)
class Schedule:
    name: str
    model: ModelSizes
    own_sizes: tuple[tuple[str, int], ...]
    """The file's `sizes`."""
    mesh: tuple[tuple[str, int], ...]
    batch: int
    segments: tuple[tuple[str, int], ...]
    """Named sequence lengths; a plain `seq` is one segment named seq."""
    more_sizes: tuple[tuple[str, int], ...]
    """The other named sizes of `shape`."""
    inputs: tuple[tuple[str, InputSpec], ...]
    outputs: tuple[str, ...]
    outputs_path: TreePath
    cfg: Cfg | None
    """How both branches of guidance are computed; None where there is one."""
    state: Mapping[str, StateSpec]
    """In the order written."""
    sent_into: frozenset[str]
    """The states that a send names, in this version of the step or in another: peers write to them."""
    streams: tuple[str, ...]
    handshake: Handshake
    transport: Literal["auto", "symmetric", "ipc", "nccl"]
    blocks: Mapping[str, tuple[Item, ...]]
    step: tuple[Item, ...]
    """Of the first variant, where there are variants."""
    tree: SourceTree
    variants: tuple[Variant, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    variant: str = ""
    bucket: str = ""
    """Which version of several this one is."""
    varying: frozenset[str] = frozenset()
    """The sizes that buckets give values for."""

    @property
    def in_set(self) -> bool:
        """Whether this is one version of several that run one after another, in one arena: what it leaves is closed,
        and an input that it does not read may be another's."""
        return bool(self.variant or self.bucket)

    def versions(self) -> tuple[Schedule, ...]:
        """Every version of the step, variant by variant, in the order of the file; the schedule itself where it has
        neither variants nor buckets."""
        if not self.variants and not self.buckets:
            return (self,)
        found = []
        for variant in self.variants or (None,):
            for bucket in self.buckets or (None,):
                sizes = dict(bucket.sizes) if bucket else {}
                version = replace(
                    self,
                    batch=sizes.get("batch", self.batch),
                    segments=tuple((name, sizes.get(name, length)) for name, length in self.segments),
                    more_sizes=tuple((name, sizes.get(name, size)) for name, size in self.more_sizes),
                    outputs=variant.outputs if variant else self.outputs,
                    outputs_path=variant.outputs_path if variant else self.outputs_path,
                    step=variant.step if variant else self.step,
                    variants=(),
                    buckets=(),
                    variant=variant.name if variant else "",
                    bucket=bucket.name if bucket else "",
                    varying=frozenset(name for bucket in self.buckets for name, _ in bucket.sizes),
                )
                found.append(version)
        return tuple(found)

    def state_suffix(self, name: str) -> str:
        """What stands behind a state's name where every bucket has one of its own: those whose shape varies."""
        return f"@{self.bucket}" if self.bucket and self.varying & set(self.state[name].shape) else ""

    def axis(self, name: str) -> int:
        """Size of a mesh axis; 1 for one that the mesh lacks."""
        return dict(self.mesh).get(name, 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Every named size: batch, segments, hidden, heads, kv_heads, head_dim, ffn, the others of `shape`, and the
        file's `sizes`."""
        model = self.model
        return {
            **dict(self.more_sizes),
            "batch": self.batch,
            "hidden": model.hidden,
            "heads": model.heads,
            "head_dim": model.head_dim,
            "kv_heads": model.kv_heads or model.heads,
            "ffn": model.ffn,
            **dict(self.segments),
            **dict(self.own_sizes),
        }


def version_name(version: Schedule | Source) -> str:
    """variant/bucket, or the one of the two that there is; empty where the schedule has one version."""
    return "/".join(name for name in (version.variant, version.bucket) if name)


class _Itemizer:
    """Turns entries into items, with defaults filled in and one diagnostic for each that isn't one op."""

    def __init__(self, document: Document, tree: SourceTree) -> None:
        self.document = document
        self.tree = tree
        self.problems: list[Diagnostic] = []

    def items(self, entries: tuple[Entry, ...], path: TreePath) -> tuple[Item, ...]:
        found = [self._item(entry, (*path, index)) for index, entry in enumerate(entries)]
        return tuple(item for item in found if item is not None)

    def _item(self, entry: Entry, path: TreePath) -> Item | None:
        keys = [name for name in type(entry).model_fields if name in entry.model_fields_set]
        if set(keys) == {"each", "do"} and entry.each and entry.do:
            return EachItem(entry.each, self.items(entry.do, (*path, "do")), path)
        if set(keys) == {"chunks", "do"} and entry.chunks and entry.do:
            return ChunksItem(entry.chunks.heads, self.items(entry.do, (*path, "do")), path)
        if len(keys) != 1 or keys[0] in ("each", "chunks", "do"):
            self.problems.append(
                Diagnostic(
                    "E103",
                    "an op is a map of one key, its kind",
                    self.tree.place(path),
                    "one kind, or `each` or `chunks` with `do`",
                    ", ".join(keys) or "nothing",
                    "put each op on a line of its own, behind a dash",
                )
            )
            return None
        kind = keys[0]
        fields = getattr(entry, kind)
        if fields is None:
            self.problems.append(
                Diagnostic("E103", f"`{kind}` says nothing", self.tree.place((*path, kind)), "its operands", "null")
            )
            return None
        if kind == "layers":
            return LayersItem(self._runs(fields, (*path, kind)), (*path, kind))
        defaults: Model = getattr(self.document.defaults, kind)
        missing = {
            name: getattr(defaults, name) for name in defaults.model_fields_set if name not in fields.model_fields_set
        }
        return OpItem(kind, fields.model_copy(update=missing) if missing else fields, (*path, kind))

    def _runs(self, fields: str | tuple[LayerRun, ...], path: TreePath) -> tuple[tuple[str, int, int | None], ...]:
        if isinstance(fields, str):
            return ((fields, self.document.model.layers, None),)
        runs: list[tuple[str, int, int | None]] = []
        for index, run in enumerate(fields):
            repeat = self._count(run.repeat, (*path, index, "repeat"))
            first = None if run.first is None else self._count(run.first, (*path, index, "first"))
            runs.append((run.block, repeat, first))
        return tuple(runs)

    def _count(self, given: int | str, path: TreePath) -> int:
        """A number, or what its name under `sizes` says; 1 after telling that there is none."""
        known = self.document.sizes
        if isinstance(given, str) and given not in known:
            hint = nearest(given, known) or f"known: {', '.join(known) or 'none'}"
            message = f"no size is called '{given}'"
            self.problems.append(
                Diagnostic("E211", message, self.tree.place(path), "a name under `sizes`", f"'{given}'", hint)
            )
        return known.get(given, 1) if isinstance(given, str) else given


def parse(tree: SourceTree) -> Schedule:
    """The schedule that a source tree holds.

    Raises:
        ScheduleError: E102 unknown key, E103 wrong value, E104 missing key; all of them at once.
    """
    try:
        document = Document.model_validate(tree.data)
    except ValidationError as error:
        raise ScheduleError(schema_diagnostics(error, tree)) from None
    itemizer = _Itemizer(document, tree)
    blocks = {name: itemizer.items(entries, ("blocks", name)) for name, entries in document.blocks.items()}
    variants = _variants(document, itemizer)
    step = variants[0].step if variants else itemizer.items(document.step or (), ("step",))
    problems = [*itemizer.problems, *_set_problems(document, tree)]
    if problems:
        raise ScheduleError(problems)
    seq = document.shape.seq
    return Schedule(
        name=document.name,
        model=document.model,
        own_sizes=tuple(document.sizes.items()),
        mesh=tuple(document.mesh.items()),
        batch=document.shape.batch,
        segments=tuple(seq.items()) if isinstance(seq, dict) else (("seq", seq),),
        more_sizes=tuple((document.shape.model_extra or {}).items()),
        inputs=tuple(document.inputs.items()),
        outputs=variants[0].outputs if variants else document.outputs,
        outputs_path=variants[0].outputs_path if variants else ("outputs",),
        cfg=document.cfg or ("parallel" if document.mesh.get("cfg", 1) > 1 else None),
        state=document.state,
        sent_into=frozenset(_sent_into(document.state, (*blocks.values(), step, *(v.step for v in variants)))),
        streams=tuple(document.streams),
        handshake=document.defaults.handshake,
        transport=document.defaults.transport,
        blocks=blocks,
        step=step,
        tree=tree,
        variants=variants,
        buckets=tuple(Bucket(name, tuple(sizes.items())) for name, sizes in (document.buckets or {}).items()),
    )


def _variants(document: Document, itemizer: _Itemizer) -> tuple[Variant, ...]:
    specs = document.variants or {}
    return tuple(
        Variant(
            name,
            tuple(specs) if spec.after is None else spec.after,
            document.outputs if spec.outputs is None else spec.outputs,
            ("outputs",) if spec.outputs is None else ("variants", name, "outputs"),
            itemizer.items(spec.step, ("variants", name, "step")),
        )
        for name, spec in specs.items()
    )


def _sent_into(state: Mapping[str, StateSpec], lists: Iterable[tuple[Item, ...]], suffix: str = "") -> Iterator[str]:
    """The states that a send of any list names; inside `each` with its suffix, if there is such a one."""
    for items in lists:
        for item in items:
            if isinstance(item, EachItem):
                for each in item.suffixes:
                    yield from _sent_into(state, (item.items,), each)
            elif isinstance(item, OpItem) and isinstance(item.op, Send) and item.op.into:
                own = f"{item.op.into}.{suffix}"
                yield own if own in state else item.op.into


def _set_problems(document: Document, tree: SourceTree) -> list[Diagnostic]:
    """What is wrong with `step`, `variants` and `buckets` taken together."""
    found: list[Diagnostic] = []
    if (document.step is None) == (document.variants is None):
        both = document.step is not None
        place = tree.key_place(("variants",)) if both else tree.place(())
        what = "both" if both else "neither"
        hint = "move the step into a variant" if both else "write the ops of a denoising step under `step`"
        found.append(Diagnostic("E104", "a schedule has a step, or variants", place, "one of them", what, hint))
    names = list(document.variants or {})
    for name, spec in (document.variants or {}).items():
        for index, other in enumerate(spec.after or ()):
            if other not in names:
                path: TreePath = ("variants", name, "after")
                path = (*path, index) if tree.has((*path, index)) else path
                expected = f"one of {', '.join(names)}"
                problem = f"no variant is called '{other}'"
                found.append(
                    Diagnostic("E214", problem, tree.place(path), expected, f"'{other}'", nearest(other, names))
                )
    seq = document.shape.seq
    whole = ["batch", *(seq if isinstance(seq, dict) else ["seq"])]
    sizes = [*whole, *(document.shape.model_extra or {})]
    for name, values in (document.buckets or {}).items():
        for size, value in values.items():
            if size in whole and value == 0:
                place = tree.place(("buckets", name, size))
                found.append(Diagnostic("E103", f"'buckets.{name}.{size}' has a wrong value", place, "at least 1", "0"))
            if size not in sizes:
                place = tree.key_place(("buckets", name, size))
                expected = f"one of {', '.join(sizes)}"
                problem = f"no size of `shape` is called '{size}'"
                found.append(Diagnostic("E214", problem, place, expected, f"'{size}'", nearest(size, sizes)))
    return found


def load_schedule(path: Path, overrides: Overrides = ()) -> Schedule:
    """Read and validate a schedule file. Raises ScheduleError with every error found."""
    return parse(read_file(path, overrides))


def read_schedule(text: str, file: str, overrides: Overrides = ()) -> Schedule:
    """As load_schedule, from text; ``file`` is the name that diagnostics give."""
    return parse(read(text, file, overrides))


def json_schema() -> JsonSchemaValue:
    """The JSON Schema of a schedule file."""
    schema = Document.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "stepgraph schedule", **schema}


def schedule_path(given: str) -> Path:
    """The file that ``given`` names: a path that exists, else a shipped schedule's name.

    Raises:
        ScheduleError: E100 where there is neither.
    """
    path = Path(given)
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    folder = Path(__file__).parent.parent / "plans"
    shipped = {found.stem: found for found in sorted(folder.glob("*.yaml"))}
    if given in shipped:
        return shipped[given]
    raise ScheduleError(
        [
            Diagnostic(
                "E100",
                f"there is no file and no shipped schedule '{given}'",
                None,
                f"a path, or one of {', '.join(shipped)}",
                f"'{given}'",
                nearest(given, shipped),
            )
        ]
    )
