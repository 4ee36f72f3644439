"""Memory of every rank of the group, mapped into this process: what a transport gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One block of bytes on every rank, zeroed."""

    local: Tensor
    """uint8, this rank's own block."""
    pointers: tuple[int, ...]
    """The address of each rank's block in this process."""
    keep: object
    """What must live as long as the mapping."""


class Transport(Protocol):
    """A way to reach peers' memory by address."""

    name: str

    def unavailable(self) -> str | None:
        """Why this process can't use it; None where it can. Collective-free, so that the group can vote."""

    def allocate(self, nbytes: int) -> PeerMemory:
        """Allocate and map a block on every rank. Collective over the group."""

    def release(self, memory: PeerMemory) -> None:
        """Give the block back. Collective over the group where the transport needs an order."""
