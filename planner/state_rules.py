"""The rules of states: what their names mean in a layer, what may be written into them, and what is told of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stepgraph.planner import ops
from stepgraph.planner.diagnostics import nearest
from stepgraph.planner.opgraph import Action
from stepgraph.planner.rules import Rule, heads_dim, memory_for
from stepgraph.planner.source import TreePath
from stepgraph.planner.values import Dim, DimKind, Form, Placement, Space, Value, features, row_dim

if TYPE_CHECKING:
    from stepgraph.planner.expand import Expander

PLACEMENTS = {"sequence": Placement.SEQUENCE, "head": Placement.HEAD, "replicated": Placement.REPLICATED}


class States:
    """The states of a step. One that stands for every layer has a key a layer, as ``kcache[3]``; what a key means
    changes with every write, like other names, in memory that stays."""

    def __init__(self, e: Expander) -> None:
        self.e, self.specs = e, e.schedule.state
        self.memories: dict[str, int] = {}
        """By key, in the order of first mention."""
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.place: dict[str, tuple[int, int]] = {}
        """Of every key: where its state stands in the schedule, and its layer."""

    def key(self, name: str, path: TreePath) -> str:
        """What a state's name stands for here: its key. The first mention makes its memory."""
        if not self.e.guidance.state(name, path):
            self.e.names[name] = None
            return name
        if self.specs[name].per == "step":
            key, layer = name, 0
        elif self.e.in_layers:
            key, layer = f"{name}[{self.e.layer}]", self.e.layer
        else:
            self.e.error(
                "E213",
                path,
                f"every layer has a state '{name}' of its own, and this is none",
                "`per: step`, or a use of it in a block that `layers` repeats",
                "a use outside of layers",
            )
            self.e.names[name] = None
            return name
        if key not in self.e.names:
            self.place[key] = (list(self.specs).index(name), layer)
            self.e.names[key] = self._make(name, key)
        return key

    def _make(self, name: str, key: str) -> int | None:
        """The value that a state has when the step starts."""
        spec, path = self.specs[name], ("state", name)
        if name in dict(self.e.schedule.inputs):
            self.e.error("E213", path, f"'{name}' is also an input", "a name of its own", f"'{name}'", key=True)
            return None
        form = self.e.form(spec.shape, (*path, "shape"))
        if form is None:
            return None
        placement = PLACEMENTS[spec.placement]
        needed = {Placement.SEQUENCE: DimKind.SEQUENCE, Placement.HEAD: DimKind.HEADS, Placement.REPLICATED: None}
        if needed[placement] and not any(dim.kind is needed[placement] for dim in form):
            what = "a sequence" if placement is Placement.SEQUENCE else "heads or kv_heads"
            self.e.error(
                "E203", (*path, "placement"), f"a state placed {placement} needs it", what, "none in its shape"
            )
            return None
        if self.e.schedule.axis("tensor") > 1:  # heads are cut over both axes, as those that projections make
            form = tuple(replace(dim, split=True) if dim.kind is DimKind.HEADS else dim for dim in form)
        target = name in self.e.schedule.sent_into
        memory = replace(
            memory_for(name, form, placement, self.e.schedule),
            space=Space.TARGET if target else Space.STATE,
            dtype=spec.dtype or self.e.schedule.model.dtype,
            state=key + self.e.schedule.state_suffix(name),
            axis="ulysses" if target else "",
        )
        self.memories[key] = self.e.memory(memory)
        return self._value(name, self.memories[key], form, placement)

    def _value(self, name: str, memory: int, form: Form, placement: Placement) -> int:
        return self.e.value(Value(name, memory, form, placement, False, 0))

    # Writing

    def into(self, r: Rule, name: str) -> str | None:
        """The state that `into` names; None after telling that there is none."""
        full = r.e.resolve(name, r.site.context)
        if full in self.specs:
            return full
        hint = nearest(full, self.specs) or f"known: {', '.join(self.specs) or 'none'}"
        r.e.error("E207", (*r.site.path, "into"), f"no state is called '{name}'", "a name under `state`", "none", hint)
        return None

    def result(self, name: str, form: Form, placement: Placement, partial: bool, path: TreePath) -> int | None:
        """The value that a stage leaves in a state, whatever was there; None after telling why it can't."""
        now = self.e.names[self.key(name, path)]
        if now is None:
            return None
        state = self.e.values[now]
        given = Value(name, 0, form, placement, partial).describe()
        if state.placement is not placement or partial:
            hint = "shard, send, gather or all_gather it before, then `keep` it"
            self.e.error("E203", path, f"the state '{name}' is placed otherwise", state.describe(), given, hint)
            return None
        if not self.alike(state.form, form):
            self.e.error("E204", path, f"the state '{name}' has another shape", state.describe(), given)
            return None
        return self._value(name, state.memory, state.form, placement)

    def alike(self, one: Form, two: Form) -> bool:
        cut = self.e.schedule.axis("tensor") > 1

        def told(form: Form) -> list[tuple[int, tuple[str, ...], bool]]:
            return [(dim.size, dim.segments, dim.split and cut) for dim in form]

        return told(one) == told(two)

    def write(self, name: str, value: int | None, path: TreePath | None) -> None:
        """Let a state's name mean what an op has left in it."""
        at = path or ("state", name)
        key = self.key(name, at)
        if any(sent == key for _, sent, _ in self.e.open_sends):
            self.e.error("E206", at, f"'{name}' is written between a send into it and the barrier", "the barrier first")
        now = self.e.names[key]
        if value is not None and now is not None:
            made, state = self.e.values[value], self.e.values[now]
            if made.memory != state.memory:
                self.e.error(
                    "E213",
                    at,
                    f"this op can't write the state '{name}'",
                    "an op that computes one result of its own, or `keep`",
                    "results of an exchange, or views",
                    f"name the result otherwise, and write `keep: {{in: ..., into: {name}}}`",
                )
            elif made.placement is not state.placement:
                self.e.error("E203", at, f"a part of the state '{name}' is changed", state.describe(), made.describe())
        self.written.add(name)
        self.e.names[key] = value

    def reading(self, name: str, path: TreePath) -> str:
        """The key of a state that is read."""
        key = self.key(name, path)
        sent_at = next((at for _, sent, at in self.e.open_sends if sent == key), None)
        if sent_at is not None:
            line = self.e.tree.place(sent_at).line
            self.e.error(
                "E206",
                path,
                f"'{name}' is read between a send into it and the barrier",
                "the barrier first",
                "a read of what peers are writing",
                f"close the send in line {line} with a barrier before this op",
            )
        self.read.add(name)
        return key

    # What is left to tell, and what is found

    def unused(self) -> None:
        """Tell of every state that nothing reads, or that nothing writes."""
        for name in self.specs:
            for what, used in (("read", self.read), ("written", self.written)):
                if name not in used:
                    hint = "take it out of `state`" if what == "read" else "it is zero for ever"
                    self.e.error("E202", ("state", name), f"the state '{name}' is never {what}", hint=hint, key=True)

    def ordered(self) -> tuple[int, ...]:
        """The memories of all states, in the order of the schedule and of the layers."""
        return tuple(self.memories[key] for key in sorted(self.memories, key=self.place.__getitem__))


def keep(r: Rule, op: ops.Keep) -> None:
    """Into a state whole; a replicated tensor as the rank's own part of it."""
    operands = r.read("in", op.in_) if r.count(1, 1, "one tensor") else None
    name = r.e.states.into(r, op.into)
    if name is None:
        return
    now, output = r.e.names[r.e.states.key(name, r.site.path)], None
    if operands and now is not None:
        part = r.narrow(operands[0], r.e.values[now].placement)
        given = r.value(part)
        output = r.e.states.result(name, given.form, given.placement, False, r.site.path)
        if output is not None:
            r.node(Action.RUN, [("in", part.value)], [output])
    r.e.bind(name, output, r.site.path)


def send_into(r: Rule, op: ops.Send, source: int | None, path: TreePath) -> None:
    """A send whose rows go into a state from row `at` on. ``source`` is the value that is sent, None where it is
    unknown. The state's name keeps its meaning until the barrier."""
    name = r.e.states.into(r, op.into or "")
    if name is None:
        return
    key = r.e.states.key(name, r.site.path)
    now = r.e.names[key]
    problem: tuple[str, ...] = ()
    r.e.states.written.add(name)
    if source is None or now is None:
        r.e.names[key] = None
        return
    state, given = r.e.values[now], r.e.values[source]
    memory, row, rows = r.e.memories[state.memory], row_dim(given.form), row_dim(state.form)
    dtype = r.e.memories[given.memory].dtype
    first = r.e.named_size(op.at, (*r.site.path, "at"))
    if first is None or row is None:
        return
    same = heads_dim(given.form) is not None and _lead(given.form) == _lead(state.form)
    same = same and r.e.states.alike(features(given.form), features(state.form))
    if op.via == "nccl" or op.out:
        field = "via: nccl" if op.via == "nccl" else "out"
        problem = ("E213", "a send into a state goes by copy, and names no result", f"no `{field}`", f"`{field}`")
    elif state.placement is not Placement.HEAD:
        problem = ("E203", "a state that is sent into is placed by head", "placement: head")
    elif len(row.segments) > 1:
        problem = ("E203", "what is sent into a state is one sequence", "a tensor of one sequence")
    elif not same or rows is None:
        problem = ("E204", f"the state '{name}' has other features", state.describe())
    elif dtype is not memory.dtype:
        problem = ("E204", f"the state '{name}' has another dtype", memory.dtype, dtype)
    elif first + row.size > rows.size:
        problem = ("E204", f"the rows do not fit into the state '{name}'", f"{rows.size} rows at most")
    if problem:
        code, message, expected, *got = problem
        told = f"{given.describe()}, {row.size} rows from row {first} on"
        r.e.error(code, path, message, expected, got[0] if got else told)
        r.e.names[key] = None
        return
    target = r.e.value(replace(state))
    node = r.node(Action.SEND, [("in", source)], [target], (("at", str(first)), ("into", name)), axis="ulysses")
    r.e.open_sends.append((node, key, r.site.path))


def _lead(form: Form) -> tuple[Dim, ...]:
    return form[:1] if form and form[0].kind is DimKind.BATCH else ()
