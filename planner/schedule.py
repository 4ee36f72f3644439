"""Level 1, the schedule: what the author wrote, validated, every value with its place in the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from stepgraph.planner.diagnostics import Diagnostic, ScheduleError, nearest
from stepgraph.planner.document import Cfg, Document, InputSpec, ModelSizes, StateSpec
from stepgraph.planner.ops import (
    Entry,
    Handshake,
    LayerRun,
    Model,
    Op,
    Send,
)
from stepgraph.planner.plan import version_name
from stepgraph.planner.schema_errors import schema_diagnostics
from stepgraph.planner.source import Overrides, SourceTree, TreePath, read, read_file


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
    def version(self) -> str:
        """The version's name, as in a plan's source."""
        return version_name(self.variant, self.bucket)

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
