"""Chunks: from the sends before an attention to the gathers behind it, cut by heads and pipelined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stepgraph.planner.naming import Context
from stepgraph.planner.ops import Barrier, Send
from stepgraph.planner.schedule import ChunksItem, EachItem, Item, OpItem
from stepgraph.planner.shares import Shares
from stepgraph.planner.source import TreePath

if TYPE_CHECKING:
    from stepgraph.planner.expand import Expander

Placed = tuple[OpItem, Context]
EXCHANGING = ("send", "barrier")


class Chunks:
    """One `chunks` of a layer. In the order of issue, sends that stand before another op are sent there, all chunks of
    them; then comes the pipeline: the last sends and the barrier of chunk i + 1, the attention of chunk i, the gathers
    of chunk i - 1. Ops between the attention and the gathers stand before the last gathers; ops behind stay behind."""

    def __init__(self, expander: Expander, item: ChunksItem, context: Context) -> None:
        self.e, self.item, self.context = expander, item, context
        self.number: int | None = None
        """The chunk that is being expanded; None for what is done whole."""
        self.count = item.heads
        self.names: list[dict[str, int | None]] = [{} for _ in range(self.count)]
        """What names mean in each chunk besides."""
        self.open: list[list[tuple[int, str, TreePath]]] = [[] for _ in range(self.count)]
        """The open sends of each chunk."""
        self.gathered: dict[tuple[TreePath, str], list[int]] = {}
        """What the gathers of an operand have made so far: one value for all chunks, or one for each."""

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def expand(self) -> None:
        e = self.e
        ops = list(self._flat(self.item.items, self.context))
        for item, context in ops:
            e.namer.name(item, context)  # in the file's order
        if not self._fits(ops) or self.count == 1:
            for item, context in ops:
                e.op(item, context)
            return
        outer, e.chunks = e.chunks, self
        for item, context, number in self._order(ops):
            self._op(item, context, number)
        e.chunks = outer
        for sends in self.open:
            e.open_sends += sends

    def _flat(self, items: Sequence[Item], context: Context) -> Iterator[Placed]:
        for item in items:
            if isinstance(item, EachItem):
                for suffix in item.suffixes:
                    yield from self._flat(item.items, replace(context, suffix=suffix))
            elif isinstance(item, OpItem):
                yield item, context
            else:
                self.e.error(
                    "E217", item.path, "chunks hold ops", "ops, or `each` with ops", "layers or chunks", key=True
                )

    def _fits(self, ops: list[Placed]) -> bool:
        """Whether the ops are a run from send to gather, and every rank has heads for every chunk."""
        kinds = [item.kind for item, _ in ops]
        closes = [isinstance(i.op, Barrier) or (isinstance(i.op, Send) and i.op.barrier) for i, _ in ops]
        copied = any(isinstance(item.op, Send) and item.op.via == "copy" for item, _ in ops)
        at = kinds.index("attention") if "attention" in kinds else 0
        ordered = "send" in kinds[:at] and "gather" in kinds[at:] and "gather" not in kinds[:at]
        alone = kinds.count("attention") == 1 and not any(kind in EXCHANGING for kind in kinds[at:])
        if not ordered or not alone or sum(closes) != copied:
            self.e.error(
                "E217",
                self.item.path,
                "chunks are a run from send to gather",
                "sends, one barrier behind them, one attention, its gathers; other ops between them",
                ", ".join(kinds),
                key=True,
            )
            return False
        most = min(Shares(self.e.schedule).most_chunks)
        if self.count > most:
            self.e.error(
                "E217",
                (*self.item.path, "chunks", "heads"),
                "more chunks than a rank has heads",
                f"{most} at most",
                str(self.count),
            )
        return self.count <= most

    def _order(self, ops: list[Placed]) -> Iterator[tuple[OpItem, Context, int | None]]:
        """The order of issue: each op with its chunk, or with None where it is done whole."""
        kinds = [item.kind for item, _ in ops]
        attention, first_gather = kinds.index("attention"), kinds.index("gather")
        last = max(index for index in range(attention) if kinds[index] in EXCHANGING)
        late = max((index + 1 for index in range(last) if kinds[index] not in EXCHANGING), default=0)
        numbers = range(self.count)
        for item, context in ops[:late]:
            for number in numbers if item.kind in EXCHANGING else (None,):
                yield item, context, number
        yield from ((*op, 0) for op in ops[late : last + 1])
        for number in numbers:
            yield from ((*op, number + 1) for op in ops[late : last + 1] if number + 1 < self.count)
            if number == 0:
                yield from ((*op, None) for op in ops[last + 1 : attention])
            yield (*ops[attention], number)
            if number == self.count - 1:
                yield from ((*op, None) for op in ops[attention + 1 : first_gather])
            yield from ((*op, number - 1) for op in ops if op[0].kind == "gather" and number > 0)
        yield from ((*op, self.count - 1) for op in ops if op[0].kind == "gather")
        yield from ((*op, None) for op in ops[first_gather:] if op[0].kind != "gather")

    def _op(self, item: OpItem, context: Context, number: int | None) -> None:
        """Expand one op. In a chunk, what it defines is the chunk's alone, but for what the last gather defines."""
        e = self.e
        outer_sends = e.open_sends
        if number is None:
            e.open_sends = [*outer_sends, *(send for sends in self.open for send in sends)]
            e.op(item, context)
            e.open_sends = outer_sends
            return
        outer, e.open_sends, self.number = e.names, self.open[number], number
        e.names = {**outer, **self.names[number]}
        e.op(item, context)
        made = {name: value for name, value in e.names.items() if name not in outer or outer[name] != value}
        self.open[number], e.open_sends = e.open_sends, outer_sends
        if item.kind == "gather" and self.is_last:
            whole = {name: value for name, value in made.items() if self.names[number].get(name) != value}
            e.names = {**outer, **whole}
            e.cut -= set(whole)
        else:
            e.names, self.names[number] = outer, made
            e.cut |= set(made)
        self.number = None
