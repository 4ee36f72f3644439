"""Classifier-free guidance: the ops that a step does for both branches, on other ranks, in one batch, or twice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepgraph.planner import ops
from stepgraph.planner.document import InputSpec
from stepgraph.planner.naming import Context
from stepgraph.planner.opgraph import BRANCHES, Action, Node
from stepgraph.planner.rules import Operand, Rule
from stepgraph.planner.schedule import ChunksItem, EachItem, Item, OpItem
from stepgraph.planner.source import TreePath
from stepgraph.planner.values import DimKind, Form, show

if TYPE_CHECKING:
    from stepgraph.planner.expand import Expander


def _guides(item: Item) -> list[OpItem]:
    if isinstance(item, EachItem | ChunksItem):
        return [guide for inner in item.items for guide in _guides(inner)]
    return [item] if isinstance(item, OpItem) and item.kind == "guide" else []


def stacked(form: Form) -> Form:
    """The shape of both branches in one batch."""
    return (replace(form[0], size=2 * form[0].size), *form[1:])


@dataclass(frozen=True, slots=True)
class Share:
    """What one load takes of an input."""

    branch: str
    """Which branch alone, if it is one."""
    form: Form


class Guidance:
    """The branch part of a step: everything up to its last guide is done for each branch. It reads inputs and what it
    makes itself; behind it only inputs and what the guides have made are seen."""

    def __init__(self, expander: Expander) -> None:
        self.e = expander
        self.mode = expander.schedule.cfg
        self.inside = False
        self.part = ""
        """In a sequential step, the branch that is being expanded."""
        self.plain: dict[str, int] = {}
        """The inputs that both branches share."""
        self.loaded: dict[str, dict[str, int]] = {branch: {} for branch in BRANCHES}
        """In a sequential step, each branch's own share of the inputs that have two."""
        self.repeated: dict[int, int] = {}
        """In a batched step: the input that both branches share -> the same, once for each branch."""
        self.first: dict[tuple[TreePath, str], int] = {}
        """In a sequential step: what each guide takes of the first branch."""
        self.results: dict[str, tuple[int | None, TreePath]] = {}
        self.sides: dict[str, bool] = {}
        """Of each state, whether it belongs to the branches."""
        self.apart: set[str] = set()
        """Names that mean something on the other side of the last guide only."""

    @property
    def stacked(self) -> int:
        """How many branches the batch holds here."""
        return 2 if self.inside and self.mode == "batch" else 1

    def loads(self, name: str, spec: InputSpec, form: Form) -> tuple[Share, ...]:
        """What of an input is loaded: for which branch, and the shape that the step sees."""
        if spec.placement != "cfg" or self.mode == "parallel":
            return (Share("", form),)
        path = ("inputs", name, "placement")
        if self.mode is None:
            hint = "write `cfg: batch` or `cfg: sequential` at the top, or give the mesh an axis cfg of 2"
            self.e.error("E216", path, "an input has two branches, the schedule one", "`cfg`", "none", hint)
        if self.mode == "sequential":
            return tuple(Share(branch, form) for branch in BRANCHES)
        if form[0].kind is not DimKind.BATCH:
            self.e.error(
                "E216",
                path,
                "an input without a batch can't hold both branches in it",
                "(batch, ...)",
                show(form),
                "give it a batch, or take `cfg: sequential`",
            )
            return (Share("", form),)
        return (Share("", stacked(form)),)

    def load(self, name: str, spec: InputSpec, branch: str, value: int) -> None:
        """Remember what an input is."""
        if branch:
            self.loaded[branch][name] = value
        elif spec.placement != "cfg":
            self.plain[name] = value

    def walk(self, top: Context) -> None:
        """Expand the step."""
        e = self.e
        own, rest = self._cut()
        if own:
            shared = dict(e.names)
            self.inside = True
            for part in BRANCHES if self.mode == "sequential" else ("",):
                self.part, e.layer, self.apart = part, 0, set()
                e.names, e.cut = {**shared, **self.loaded.get(part, {})}, set()
                e.items(own, top)
                e.unclosed()
            self.inside, self.part = False, ""
            seen = set(e.names) | self.apart
            states = {key: e.names[key] for key in e.states.memories if key in e.names}
            e.names = {**{name: shared[name] for name in self.plain if e.names.get(name) == shared[name]}, **states}
            self.apart = seen - set(e.names)
            for full, (value, path) in self.results.items():
                e.bind(full, value, path)
        e.items(rest, top)

    def _cut(self) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
        """The branch part of the step, and what comes behind it."""
        e, step = self.e, self.e.schedule.step
        if self.mode is None:
            return (), step
        for items in e.schedule.blocks.values():
            for guide in [guide for item in items for guide in _guides(item)]:
                e.error("E216", guide.path, "a guide stands in a block", "the step's own list", "a block", key=True)
        last = max((index for index, item in enumerate(step) if _guides(item)), default=None)
        if last is not None:
            return step[: last + 1], step[last + 1 :]
        if not e.schedule.outputs:
            return step, ()
        if e.tree.has(("cfg",)):
            e.error(
                "E216",
                ("cfg",),
                "the step has two branches and no guide",
                "a guide that takes the branches' output",
                "none",
                "write `guide: {in: noise, scale: guidance, out: noise}` at the end of the step",
            )
        return (), step

    def scale(self, r: Rule, op: ops.Guide) -> list[Operand] | None:
        """The scale of a guide, as the branches share it; None after telling what is wrong."""
        path = r.operand_path("scale", 0)
        full = self.e.resolve(op.scale, r.site.context)
        value = self.e.names.get(full)
        if value is None or self.plain.get(full) != value:
            if full not in self.e.names or value is not None:
                self.e.error(
                    "E216",
                    path,
                    "the scale of a guide is not of one branch",
                    "an input that both branches share",
                    f"'{op.scale}'",
                    "hand it over as an input, without `placement: cfg`",
                )
            return None
        self.e.mark_read(value)
        return [Operand("scale", value, path)]

    def result(self, full: str, value: int | None, path: TreePath) -> None:
        """A guide's result is seen behind the last guide."""
        if value is not None or full not in self.results:
            self.results[full] = value, path
        self.e.names.pop(full, None)
        self.apart.add(full)

    def refuse(self, name: str, path: TreePath) -> None:
        """Tell that a name has another meaning on the other side of the last guide."""
        if self.inside:
            self.e.error(
                "E216",
                path,
                f"'{name}' has been guided, and this op is done for each branch",
                "a tensor of the branch",
                "one of both branches",
                "every op up to the last guide of a step belongs to the branches; move this one behind it",
            )
        else:
            self.e.error(
                "E216",
                path,
                f"'{name}' is of one branch, and both have been guided",
                "an input that both share, or what a guide or an op behind it has made",
                "a tensor from before the last guide",
                "make it behind the guide",
            )

    def state(self, name: str, path: TreePath) -> bool:
        """Whether a state may be mentioned here; false after telling why not."""
        if self.inside and self.mode == "sequential":
            self.e.error(
                "E216",
                path,
                f"each branch would need a state '{name}' of its own",
                "cfg: batch, cfg: parallel, or a use of it behind the last guide",
                "cfg: sequential",
            )
            return False
        if self.sides.setdefault(name, self.inside) != self.inside:
            self.e.error(
                "E216",
                path,
                f"the state '{name}' is used on both sides of the last guide",
                "uses before the last guide, or behind it",
                "both",
                "give each side a state of its own",
            )
            return False
        return True

    def seen(self, name: str, value: int) -> int:
        """What an op reads of a value: an input that the branches share is repeated where they share a batch."""
        e = self.e
        form = e.values[value].form
        if self.stacked == 1 or self.plain.get(name) != value or form[0].kind is not DimKind.BATCH:
            return value
        if value not in self.repeated:
            found = e.values[value]
            both = e.fresh(name, stacked(form), found.placement)
            e.memories[-1] = replace(e.memories[-1], dtype=e.memories[found.memory].dtype)
            stream = e.schedule.streams[0]
            path: TreePath = ("inputs", name)
            e.nodes.append(
                Node(Action.RUN, "repeat", f"step.repeat_{name}", None, path, stream, (("in", value),), (both,))
            )
            self.repeated[value] = both
        return self.repeated[value]

    def mixes(self, forms: list[Form], made: Form) -> bool:
        """Whether an op makes something without a batch from a batch that holds both branches."""
        has_batch = [bool(form) and form[0].kind is DimKind.BATCH for form in (*forms, made)]
        return self.stacked > 1 and any(has_batch[:-1]) and not has_batch[-1]
