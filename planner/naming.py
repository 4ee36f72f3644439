"""How ops are named: explicitly, or by their kind. Names identify weights and bindings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepgraph.planner.ops import Op
from stepgraph.planner.schedule import OpItem
from stepgraph.planner.source import TreePath

if TYPE_CHECKING:
    from stepgraph.planner.expand import Expander


@dataclass(frozen=True, slots=True)
class Context:
    """Where in the step an op stands."""

    block: str
    """A block's name, or ``step``."""
    layer: int | None
    suffix: str = ""
    """Inside `each`: which of its suffixes."""

    def defines(self, name: str) -> str:
        """The name that a result called ``name`` gets here."""
        return f"{name}.{self.suffix}" if self.suffix and "." not in name else name


@dataclass(frozen=True, slots=True)
class Site:
    """One op being expanded, in one layer."""

    kind: str
    op: Op
    path: TreePath
    name: str
    stream: str
    context: Context


def base_name(item: OpItem) -> str:
    """An op's name in its block: its own, else its kind (a send's with its operand); a repeat is numbered from 2."""
    if item.op.name:
        return item.op.name
    if item.kind == "send":
        return f"send_{'_'.join(item.op.in_)}".replace(".", "_")  # type: ignore[union-attr]
    return item.kind


class Namer:
    """Gives every op of every block its name, once; unnamed repeats of a kind are numbered in the file's order."""

    def __init__(self, expander: Expander) -> None:
        self.expander = expander
        self.bases: dict[TreePath, str] = {}
        self.taken: dict[tuple[str, str], TreePath] = {}

    def name(self, item: OpItem, context: Context) -> str:
        """Path of an op without its layer: block.name, or block.name.suffix inside `each`."""
        base = self.bases.get(item.path)
        if base is None:
            base = self.bases[item.path] = self._choose(item, context.block)
        return f"{context.block}.{base}.{context.suffix}" if context.suffix else f"{context.block}.{base}"

    def _choose(self, item: OpItem, block: str) -> str:
        wanted = base = base_name(item)
        if item.kind == "call" and not item.op.name:
            self.expander.error(
                "E208", item.path, "a call has a name: that of the stage it is bound to", "name: ...", "none", key=True
            )
        number = 2
        while (block, base) in self.taken:
            if item.op.name:
                line = self.expander.tree.place(self.taken[block, base]).line
                self.expander.error(
                    "E209",
                    (*item.path, "name"),
                    f"two ops of '{block}' are called '{wanted}'",
                    "a name of its own",
                    f"the name of the op in line {line}",
                )
                break
            base = f"{wanted}_{number}"
            number += 1
        self.taken[block, base] = item.path
        return base
