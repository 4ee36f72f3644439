"""Pass 1: from the schedule to the op graph. Finds every error of names, placement and shape at once (E2xx)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from stepgraph.planner import attention_rules, compute_rules, exchange_rules, state_rules
from stepgraph.planner.chunking import Chunks
from stepgraph.planner.diagnostics import Diagnostic, ScheduleError, nearest
from stepgraph.planner.guidance import Guidance
from stepgraph.planner.naming import Context, Namer, Site
from stepgraph.planner.opgraph import Action, Node, OpGraph
from stepgraph.planner.ops import Barrier, Dims, Handshake, Send
from stepgraph.planner.rules import Rule, check_sizes, memory_for
from stepgraph.planner.schedule import ChunksItem, EachItem, Item, LayersItem, OpItem, Schedule
from stepgraph.planner.shares import Chunk
from stepgraph.planner.source import TreePath
from stepgraph.planner.state_rules import States
from stepgraph.planner.values import Dim, DimKind, Form, Memory, Placement, Space, Value

RULES: dict[str, Callable[[Rule, Any], None]] = {
    "norm": compute_rules.norm,
    "modulate": compute_rules.modulate,
    "residual": compute_rules.residual,
    "mlp": compute_rules.mlp,
    "norm_rope": compute_rules.rotate,
    "rope": compute_rules.rotate,
    "attention": attention_rules.attention,
    "linear": compute_rules.linear,
    "call": compute_rules.call,
    "concat": compute_rules.concat,
    "split": compute_rules.split,
    "shard": compute_rules.shard,
    "keep": state_rules.keep,
    "send": exchange_rules.send,
    "gather": exchange_rules.gather,
    "all_gather": exchange_rules.all_gather,
    "all_reduce": exchange_rules.all_reduce,
    "guide": exchange_rules.guide,
}


class Expander:
    """Builds an op graph; collects diagnostics instead of stopping at the first."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.tree = schedule.tree
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.memories: list[Memory] = []
        self.problems: dict[tuple[str, str], Diagnostic] = {}
        self.names: dict[str, int | None] = {}
        """What each name means now; None where an error has already been told."""
        self.open_sends: list[tuple[int, str, TreePath]] = []
        """(node, name) of sends since the last barrier, and where each stands."""
        self.origin: dict[int, tuple[TreePath, str]] = {}
        """Where each value was defined."""
        self.read_origins: set[tuple[TreePath, str]] = set()
        self.sizes_used: set[str] = set()
        self.layer = 0
        self.in_layers = False
        self.states = States(self)
        self.namer = Namer(self)
        self.guidance = Guidance(self)
        self.chunks: Chunks | None = None
        self.cut: set[str] = set()
        """Names that mean something in chunks only."""

    # Diagnostics

    def error(
        self,
        code: str,
        path: TreePath,
        message: str,
        expected: str = "",
        got: str = "",
        hint: str = "",
        key: bool = False,
    ) -> None:
        """Tell an error once a place, however often the op is repeated."""
        place = self.tree.key_place(path) if key else self.tree.place(path)
        at = f"{place.file}:{place.line}:{place.column}"
        self.problems.setdefault((code, at), Diagnostic(code, message, place, expected, got, hint))

    # Names

    def resolve(self, name: str, context: Context) -> str:
        """What a name means in ``context``: inside `each`, x.img if there is one (an input may be called x_img)."""
        if context.suffix:
            own = f"{name}.{context.suffix}"
            if own in self.names or own in self.schedule.state:
                return own
            if f"{name}_{context.suffix}" in dict(self.schedule.inputs):
                return f"{name}_{context.suffix}"
        return name

    def read(self, name: str, path: TreePath, context: Context) -> int | None:
        """The value that a name has, or None after telling why it has none."""
        full = self.resolve(name, context)
        if full in self.guidance.apart:
            self.guidance.refuse(name, path)
            self.guidance.apart.discard(full)
            self.names[full] = None
        if self.chunk is None and full in self.cut:
            self.error(
                "E217",
                path,
                f"'{name}' is in chunks",
                "the attention of the chunks, or their gathers",
                "an op that is done whole",
                "read it before it is sent, or what has been gathered",
            )
            return None
        if full in self.schedule.state:
            full = self.states.reading(full, path)
        if full not in self.names:
            known = sorted({name for name in self.names if "[" not in name} | set(self.schedule.state))
            hint = nearest(name, known) or f"known here: {', '.join(known)}"
            self.error(
                "E201", path, f"'{name}' is read before it exists", "a tensor that is defined above", "nothing", hint
            )
            self.names[full] = None
        value = self.names[full]
        if value is None:
            return None
        self.mark_read(value)
        return self.guidance.seen(full, value)

    @property
    def chunk(self) -> Chunk | None:
        """The chunk of the heads that is being expanded."""
        chunks = self.chunks
        return None if chunks is None or chunks.number is None else (chunks.number, chunks.count)

    def mark_read(self, value: int) -> None:
        if value in self.origin:
            self.read_origins.add(self.origin[value])

    def bind(self, full: str, value: int | None, path: TreePath | None) -> None:
        """Let a name mean ``value`` from here on. ``path`` is where it is made; None for a part of what is there."""
        if full in self.schedule.state:
            self.states.write(full, value, path)
            return
        for _, sent, sent_at in self.open_sends:
            if sent == full and path is not None:
                self.error(
                    "E206",
                    path,
                    f"'{full}' is sent and then defined anew before its barrier",
                    "the barrier first",
                    "a new value",
                    f"close the send in line {self.tree.place(sent_at).line} with a barrier before this op, "
                    "or name the result otherwise",
                )
        self.names[full] = value
        self.guidance.apart.discard(full)
        if self.chunk is None:
            self.cut.discard(full)
        if value is not None and path is not None:
            self.origin[value] = (path, full)

    # Values

    def memory(self, memory: Memory) -> int:
        self.memories.append(memory)
        return len(self.memories) - 1

    def value(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def fresh(self, name: str, form: Form, placement: Placement, partial: bool = False) -> int:
        """A value in local memory of its own."""
        memory = self.memory(memory_for(name, form, placement, self.schedule))
        return self.value(Value(name, memory, form, placement, partial, 0))

    def named_size(self, size: int | str, path: TreePath) -> int | None:
        """A number, or what a name of a size means; None after telling that there is none."""
        if isinstance(size, int):
            return size
        sizes = self.schedule.sizes
        self.sizes_used.add(size)
        if size not in sizes:
            hint = nearest(size, sizes) or f"known: {', '.join(sizes)}"
            self.error("E211", path, f"no size is called '{size}'", "a number or a name", f"'{size}'", hint)
        return sizes.get(size)

    def form(self, dims: Dims, path: TreePath) -> Form | None:
        """The global shape that an author's dims mean, or None after telling what is wrong."""
        sizes = self.schedule.sizes
        segments = dict(self.schedule.segments)
        form: list[Dim] = []
        for index, dim in enumerate(dims):
            self.sizes_used.add(str(dim))
            if sizes.get(str(dim)) == 0:
                self.error("E204", (*path, index), f"the size '{dim}' is 0 here", "1 at least", "0")
                return None
            if isinstance(dim, int):
                form.append(Dim(DimKind.PLAIN, dim))
            elif dim == "batch" and index == 0:
                form.append(Dim(DimKind.BATCH, sizes[dim] * self.guidance.stacked))
            elif dim in segments and index == (1 if dims[0] == "batch" else 0):
                form.append(Dim(DimKind.SEQUENCE, segments[dim], segments=(dim,)))
            elif dim in ("heads", "kv_heads"):
                form.append(Dim(DimKind.HEADS, sizes[dim], heads=dim))
            elif dim in sizes and dim != "batch" and dim not in segments:
                form.append(Dim(DimKind.PLAIN, sizes[dim]))
            elif dim in sizes:
                self.error(
                    "E204",
                    (*path, index),
                    f"'{dim}' can't stand here",
                    "batch first, then a sequence, then features",
                    f"'{dim}' as number {index + 1}",
                )
                return None
            else:
                self.error(
                    "E211",
                    (*path, index),
                    f"no size is called '{dim}'",
                    "a number or a name",
                    f"'{dim}'",
                    nearest(str(dim), sizes) or f"known: {', '.join(sizes)}",
                )
                return None
        return tuple(form)

    # Walking

    def expand(self) -> OpGraph:
        check_sizes(self)
        top = Context("step", None)
        self.inputs(top)
        self.guidance.walk(top)
        self.unclosed()
        self.outputs(top)
        self.unread()
        if self.problems:
            raise ScheduleError(sorted(self.problems.values(), key=_position))
        schedule = self._as_read()
        graph = (schedule, tuple(self.nodes), tuple(self.values), tuple(self.memories))
        return OpGraph(*graph, self.states.ordered())

    def _as_read(self) -> Schedule:
        """The schedule without the inputs that this version of the step does not read, which are not loaded."""
        unread = {name for path, name in set(self.origin.values()) - self.read_origins if path[0] == "inputs"}
        loads = [node for node in self.nodes if node.action is Action.LOAD and node.name in unread]
        # Loads stand in front of all that counts nodes.
        kept_nodes = (node for node in self.nodes if node not in loads)
        self.nodes = [replace(n, closes=tuple(sent - len(loads) for sent in n.closes)) for n in kept_nodes]
        kept = tuple((name, spec) for name, spec in self.schedule.inputs if name not in unread)
        return replace(self.schedule, inputs=kept)

    def inputs(self, top: Context) -> None:
        for name, spec in self.schedule.inputs:
            path = ("inputs", name)
            form = self.form(spec.shape, (*path, "shape"))
            if form is None:
                self.names[name] = None
                continue
            placement = Placement.SEQUENCE if spec.placement == "sequence" else Placement.REPLICATED
            for part in self.guidance.loads(name, spec, form):
                memory = replace(
                    memory_for(name, part.form, placement, self.schedule),
                    space=Space.INPUT,
                    dtype=spec.dtype or self.schedule.model.dtype,
                )
                value = self.value(Value(name, self.memory(memory), part.form, placement, False, 0))
                self.bind(name, value, path)
                self.guidance.load(name, spec, part.branch, value)
                stream = self.schedule.streams[0]
                self.nodes.append(Node(Action.LOAD, "load", name, None, path, stream, (), (value,), branch=part.branch))

    def outputs(self, top: Context) -> None:
        for index, name in enumerate(self.schedule.outputs):
            path = self.schedule.outputs_path
            path = (*path, index) if isinstance(self.tree.value(path), list) else path
            if name not in self.names and name not in self.guidance.apart and name not in self.schedule.state:
                self.error(
                    "E212",
                    path,
                    f"the step never defines its output '{name}'",
                    "a tensor of the step",
                    "nothing",
                    nearest(name, self.names),
                )
                continue
            value = self.read(name, path, top)
            if value is None:
                continue
            found = self.values[value]
            if found.placement is not Placement.REPLICATED or found.partial:
                self.error(
                    "E212",
                    path,
                    f"the output '{name}' is not whole on every rank",
                    "replicated",
                    found.describe(),
                    "end the step with an all_gather of it",
                )
            self.nodes.append(Node(Action.STORE, "store", name, None, path, self.schedule.streams[0], (("in", value),)))

    def unclosed(self) -> None:
        """Tell of every send that its block leaves without a barrier."""
        for _, name, path in self.open_sends:
            self.error(
                "E206",
                path,
                f"the send of '{name.partition('[')[0]}' is never closed",
                "a barrier after it in the same list",
                "none",
                "write `barrier: true` on the last send of the group, or `barrier: all` after it",
            )
            self.names[name] = None
        self.open_sends.clear()

    def unread(self) -> None:
        """Tell of everything that nothing reads; only where nothing else is wrong, since errors leave readers out."""
        if self.problems:
            return
        alone = not self.schedule.in_set  # what this version leaves out may be another's
        if alone:
            self.states.unused()
        for name, _ in self.schedule.more_sizes if alone else ():
            if name not in self.sizes_used:
                hint = nearest(name, ("batch", "seq")) or "take it out of `shape`"
                self.error("E202", ("shape", name), f"the size '{name}' is never used", hint=hint, key=True)
        for path, name in dict.fromkeys(self.origin.values()):
            if (path, name) in self.read_origins:
                continue
            if path[0] == "inputs" and self.schedule.in_set:
                continue
            if path[0] == "inputs":
                self.error("E202", path, f"the input '{name}' is never read", hint="take it out of `inputs`", key=True)
                continue
            at = next((p for p in ((*path, "out", name), (*path, "out")) if self.tree.has(p)), path)
            self.error(
                "E202",
                at,
                f"'{name}' is never read",
                "an op that reads it, or an output",
                "neither",
                "take the op out, or use what it makes",
            )

    def items(self, items: Iterable[Item], context: Context) -> None:
        for item in items:
            if isinstance(item, EachItem):
                for suffix in item.suffixes:
                    self.items(item.items, replace(context, suffix=suffix))
            elif isinstance(item, LayersItem):
                self.layers(item, context)
            elif isinstance(item, ChunksItem):
                Chunks(self, item, context).expand()
            else:
                self.op(item, context)

    def layers(self, item: LayersItem, context: Context) -> None:
        if context.layer is not None or context.suffix:
            self.error("E207", item.path, "`layers` stands in a block", "the step's own list", "a block", key=True)
            return
        for index, (block, repeat, first) in enumerate(item.runs):
            if first is not None:
                self.layer = first
            if block not in self.schedule.blocks:
                path = (*item.path, index, "block") if self.tree.has((*item.path, index, "block")) else item.path
                self.error(
                    "E207",
                    path,
                    f"no block is called '{block}'",
                    "a name under `blocks`",
                    f"'{block}'",
                    nearest(block, self.schedule.blocks),
                )
                continue
            self.in_layers = True
            for _ in range(repeat):
                self.items(self.schedule.blocks[block], Context(block, self.layer))
                self.unclosed()
                self.layer += 1
            self.in_layers = False

    def op(self, item: OpItem, context: Context) -> None:
        name = self.namer.name(item, context)
        stream = self.stream(item)
        if isinstance(item.op, Barrier):
            self.barrier(item.path, name, context, stream, item.op.handshake)
            return
        RULES[item.kind](Rule(self, Site(item.kind, item.op, item.path, name, stream, context)), item.op)
        if isinstance(item.op, Send) and item.op.barrier and item.op.via == "copy":
            self.barrier(item.path, name, context, stream, item.op.handshake)

    def stream(self, item: OpItem) -> str:
        """The stream that an op runs on: the one it names, else the one of its kind, else the first."""
        streams = self.schedule.streams
        if item.op.stream is not None:
            if item.op.stream in streams:
                return item.op.stream
            self.error(
                "E207",
                (*item.path, "stream"),
                f"no stream is called '{item.op.stream}'",
                "one of `streams`",
                f"'{item.op.stream}'",
                nearest(item.op.stream, streams) or f"known: {', '.join(streams)}",
            )
        usual = "compute" if getattr(item.op, "via", "copy") == "nccl" else item.op.runs_on
        return usual if usual in streams else streams[0]

    def barrier(self, path: TreePath, name: str, context: Context, stream: str, protocol: Handshake | None) -> None:
        """Close every open send: one handshake, after which the names mean the targets."""
        if not self.open_sends:
            if not self.problems:
                self.error(
                    "E206", path, "the barrier closes nothing", "a send before it", "none since the last one", key=True
                )
            return
        sends = tuple(self.open_sends)
        self.open_sends.clear()
        targets = tuple(self.nodes[node].outputs[0] for node, _, _ in sends)
        self.nodes.append(
            Node(
                Action.HANDSHAKE,
                "barrier",
                f"{name}.handshake",
                context.layer,
                path,
                stream,
                (),
                targets,
                axis="ulysses",
                closes=tuple(node for node, _, _ in sends),
                protocol=protocol or self.schedule.handshake,
                branch=self.guidance.part,
                chunk=self.chunk,
            )
        )
        for (_, full, sent_at), target in zip(sends, targets, strict=True):
            self.names[full] = target
            if not self.memories[self.values[target].memory].state:  # which the next step reads
                self.origin[target] = (sent_at, full)


def _position(diagnostic: Diagnostic) -> tuple[int, int]:
    return (diagnostic.place.line, diagnostic.place.column) if diagnostic.place else (0, 0)


def expand(schedule: Schedule) -> OpGraph:
    """The op graph of a schedule.

    Raises:
        ScheduleError: every E2xx that the schedule has.
    """
    return Expander(schedule).expand()
