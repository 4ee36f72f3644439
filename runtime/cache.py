"""Which versions of a step are captured: a byte budget, least recently used out.

Every rank decides from the plans alone, with the figures of the rank that needs most, so that all ranks capture and
evict alike without asking each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a session's replay cache has done so far."""

    hits: int
    """Steps whose version was captured."""
    misses: int
    """Steps whose version had to be captured first."""
    evictions: int
    budget: int | None
    """Bytes; None for no limit."""
    planned_bytes: int
    """What the captured versions need, by their plans, on the rank that needs most."""
    captured: Mapping[str, int]
    """Of each captured version the same, the least recently used first."""


class ReplayCache:
    """Keeps account of captured versions. The version in use always stays, also where it alone is over the budget."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], budget: int | None) -> None:
        self.names, self.sizes, self.budget = names, sizes, budget
        self.held: OrderedDict[int, None] = OrderedDict()
        """Captured versions, the least recently used first."""
        self.hits = self.misses = self.evictions = 0

    def fits(self, version: int) -> bool:
        """Whether a version can be captured without evicting another."""
        return self.budget is None or self._bytes() + self.sizes[version] <= self.budget

    def hold(self, version: int) -> None:
        """A version was captured ahead of its use."""
        self.held[version] = None

    def drop(self, version: int) -> None:
        """A version that came could not be captured."""
        del self.held[version]

    def forget(self) -> None:
        """Nothing is captured any more."""
        self.held.clear()

    def use(self, version: int) -> tuple[bool, tuple[int, ...]]:
        """A step of ``version`` comes: whether it has to be captured, and the versions to evict first."""
        if version in self.held:
            self.held.move_to_end(version)
            self.hits += 1
            return False, ()
        out: list[int] = []
        while self.held and not self.fits(version):
            out.append(self.held.popitem(last=False)[0])
        self.held[version] = None
        self.misses += 1
        self.evictions += len(out)
        return True, tuple(out)

    def _bytes(self) -> int:
        return sum(self.sizes[version] for version in self.held)

    def stats(self) -> CacheStats:
        captured = {self.names[version]: self.sizes[version] for version in self.held}
        return CacheStats(self.hits, self.misses, self.evictions, self.budget, self._bytes(), captured)
