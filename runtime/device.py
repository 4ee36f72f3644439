"""What a device can be told to do: the verbs of a plan, on one rank's streams.

The executor calls these in the order of issue. A device may act at once, put the work on a queue, or capture it.
"""

from __future__ import annotations

from typing import Protocol

from stepgraph.kernels.stages import Stage
from stepgraph.planner.plan import (
    Collective,
    Drop,
    Load,
    Record,
    Reset,
    Run,
    Send,
    Signal,
    Store,
    Wait,
    WaitEvent,
)


class Device(Protocol):
    """One rank's memory and streams. ``number`` is the instruction's place in the rank's program."""

    def load(self, number: int, load: Load) -> None: ...

    def store(self, number: int, store: Store) -> None: ...

    def run(self, number: int, run: Run, stage: Stage) -> None: ...

    def send(self, number: int, send: Send) -> None: ...

    def signal(self, number: int, signal: Signal) -> None: ...

    def wait(self, number: int, wait: Wait) -> None: ...

    def reset(self, number: int, reset: Reset) -> None: ...

    def collective(self, number: int, collective: Collective) -> None: ...

    def record(self, number: int, record: Record) -> None: ...

    def wait_event(self, number: int, wait: WaitEvent) -> None: ...

    def drop(self, number: int, drop: Drop) -> None: ...

    def finish(self) -> None:
        """The whole program has been issued."""
        ...
