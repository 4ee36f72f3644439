"""The race detector of the cpu device: vector clocks, and shadow memory that remembers who touched each element.

A chain is one stream of one rank; its clock says how far it knows every chain to be. An access that conflicts with an
earlier one which its chain does not know to be done is a race, whether or not the bytes came out right this time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Touch:
    """An instruction of a chain at a time of the chain."""

    chain: int
    time: int


@dataclass(frozen=True, slots=True)
class Conflict:
    earlier: Touch
    earlier_writes: bool
    later: Touch
    later_writes: bool


class Shadow:
    """Last writer, last read of each chain, and what is held, of every element of a block of memory; or a part of such
    a block."""

    def __init__(self, writer: Ints, written: Ints, reads: Ints, holds: Ints) -> None:
        self.writer, self.written, self.reads, self.holds = writer, written, reads, holds

    @staticmethod
    def of(shape: tuple[int, ...], chains: int) -> Shadow:
        """Memory that nobody has touched. Times count from 1."""
        writer, written, holds = (np.zeros(shape, np.int32) for _ in range(3))
        return Shadow(writer, written, np.zeros((chains, *shape), np.int32), holds)

    def part(self, start: int, shape: tuple[int, int, int]) -> Shadow:
        """Elements [start, start + size) of one-dimensional memory as a dense box."""
        stop = start + shape[0] * shape[1] * shape[2]
        chains = self.reads.shape[0]
        return Shadow(
            self.writer[start:stop].reshape(shape),
            self.written[start:stop].reshape(shape),
            self.reads[:, start:stop].reshape(chains, *shape),
            self.holds[start:stop].reshape(shape),
        )

    def region(self, rows: slice, cols: slice) -> Shadow:
        own = (self.writer[:, rows, cols], self.written[:, rows, cols])
        return Shadow(*own, self.reads[:, :, rows, cols], self.holds[:, rows, cols])

    def forget(self) -> None:
        """Nobody has touched it. Nothing that may is on its way."""
        for part in (self.writer, self.written, self.reads, self.holds):
            part[...] = 0

    def lost(self, buffer: int) -> bool:
        """Whether something was written over what ``buffer`` held here."""
        return bool(((self.holds != buffer) & (self.written > 0)).any())

    def read(self, chain: int, time: int, clock: Ints) -> tuple[Conflict | None, bool]:
        """Note a read; gives a conflict with a write, and whether an element was never written."""
        conflict = self._unordered_write(chain, time, clock, later_writes=False)
        unwritten = bool((self.written == 0).any())
        self.reads[chain] = time
        return conflict, unwritten

    def write(self, chain: int, time: int, clock: Ints) -> Conflict | None:
        """Note a write; gives a conflict with a write or a read."""
        conflict = self._unordered_write(chain, time, clock, later_writes=True)
        if conflict is None:
            newer = self.reads > clock.reshape(-1, *[1] * (self.reads.ndim - 1))
            if newer.any():
                where = tuple(int(index) for index in np.argwhere(newer)[0])
                earlier = Touch(where[0], int(self.reads[where]))
                conflict = Conflict(earlier, False, Touch(chain, time), True)
        self.writer[...] = chain
        self.written[...] = time
        return conflict

    def read_at(self, chain: int, time: int) -> bool:
        """Whether a chain has read any of it at a time."""
        return bool((self.reads[chain] == time).any())

    def _unordered_write(self, chain: int, time: int, clock: Ints, later_writes: bool) -> Conflict | None:
        newer = self.written > clock[self.writer]
        if not newer.any():
            return None
        where = tuple(int(index) for index in np.argwhere(newer)[0])
        earlier = Touch(int(self.writer[where]), int(self.written[where]))
        return Conflict(earlier, True, Touch(chain, time), later_writes)
