"""A collective of the cpu device: members meet, and when the last one has come its copies are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepgraph.planner.plan import Collective, Part, Plan
from stepgraph.runtime.cpu_memory import RankMemory
from stepgraph.runtime.shadow import Ints


@dataclass
class Rendezvous:
    """One collective of one replay."""

    plan: Plan
    memories: Sequence[RankMemory]
    starts: dict[int, Ints] = field(default_factory=dict)
    calls: dict[int, Collective] = field(default_factory=dict)
    moved: bool = False

    def move(self) -> None:
        """All the copies, in the order of the members, unless they are made already."""
        if self.moved:
            return
        results: list[tuple[Tensor, Tensor]] = []
        for rank in sorted(self.calls):
            came: dict[int, int] = {}
            for part in self.calls[rank].incoming:
                nth = came.get(part.peer, 0)
                came[part.peer] = nth + 1
                result = self._sum(rank, nth) if self.calls[rank].reduce else self._part(part.peer, rank, nth).clone()
                results.append((self._region(rank, part), result))
        for place, result in results:  # when all is read: a result may come to where something was given from
            place.copy_(result)
        self.moved = True

    def _part(self, sender: int, receiver: int, nth: int) -> Tensor:
        """The ``nth`` part that a member sends to another."""
        return self._region(sender, [part for part in self.calls[sender].outgoing if part.peer == receiver][nth])

    def _sum(self, receiver: int, nth: int) -> Tensor:
        """The members' parts to one, added in float32 (float64 stays) in the order of members."""
        parts = [self._part(member, receiver, nth) for member in sorted(self.calls)]
        wide = [part if part.dtype is torch.float64 else part.float() for part in parts]
        total = wide[0]
        for part in wide[1:]:
            total = total + part
        return total

    def _region(self, rank: int, part: Part) -> Tensor:
        buffer = self.plan.ranks[rank].views[part.view].buffer
        return self.memories[rank].region(buffer, part.region)
