"""Random plans that no schedule and no pass has made, out of the instructions themselves.

A plan has rounds: in each, every rank makes a tensor, sends it, signals, waits, resets and reads what came. Which
stream each of these is on, which target a round fills, which flag words it takes, and which of the events between
streams are there, is drawn. Some are safe, and more are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from stepgraph.planner.plan import Plan, Protocol, Run

from support.hand_made import Draft, Moving, Rank

STREAMS = ("compute", "copy", "other")
PROTOCOLS = (Protocol.MEMOP, Protocol.MEMOP, Protocol.COPY, Protocol.KERNEL)


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange of the step, alike on all ranks."""

    make: int
    moving: Moving | None
    """None for a handshake that closes nothing."""
    exchange: int
    use: int
    streams: tuple[int, int, int]
    """Of the tensor that is made, of its sends and handshake, and of the stage that reads what came."""
    early_reset: bool
    """Reset behind the wait, or behind the read."""
    late: bool
    """The read is issued behind the next round's sends."""
    drops: bool
    """What was made is dropped."""


@st.composite
def drafts(draw: st.DrawFn) -> tuple[Draft, tuple[Round, ...]]:
    """Tables, and the rounds of a step."""
    world = draw(st.sampled_from([2, 2, 2, 3]))
    rows = draw(st.lists(st.integers(0, 2), min_size=world, max_size=world).filter(any))
    streams = STREAMS[: draw(st.integers(1, 3))]
    everybody = tuple(range(world))
    groups = (everybody, draw(st.sampled_from([everybody, everybody[:2], everybody[-2:], everybody[::-1]])))
    draft = Draft(tuple(rows), streams, groups)
    in_turn = draw(st.booleans())
    fills = [draft.target(f"target {number}", draw(st.integers(0, 1))) for number in range(draw(st.integers(1, 3)))]
    protocol = draw(st.sampled_from(PROTOCOLS))
    stream = st.integers(0, len(streams) - 1)
    usual = (0, draw(stream), 0)
    rounds = []
    for number in range(count := draw(st.sampled_from([1, 2, 2, 3] if world == 2 else [1, 2]))):
        make = draft.op("call", f"make {number}")
        protocol = draw(st.sampled_from(PROTOCOLS)) if draw(st.integers(0, 7)) == 0 else protocol
        way = None if draw(st.integers(0, 7)) == 0 else protocol
        moving = None
        closing = 0 < number == count - 1 and draw(st.booleans())
        if not closing and (way is None or draw(st.integers(0, 3)) > 0):
            target = fills[number % len(fills)] if in_turn else draw(st.sampled_from(fills))
            moving = draft.move(f"round {number}", target, way)
            exchange = moving.exchange
        else:
            exchange = draft.exchange(f"round {number}", 0 if closing else draw(st.integers(0, 1)), protocol)
        use = make if moving is None else draft.op("call", f"use {number}")
        if draw(st.integers(0, 5)) == 0:
            draft.slots[exchange] = draft.slots[draw(st.integers(0, exchange))]
        places = usual if draw(st.integers(0, 2)) else (draw(stream), draw(stream), draw(stream))
        rounds.append(Round(make, moving, exchange, use, places, *(draw(st.booleans()) for _ in range(3))))
    return draft, tuple(rounds)


class _Writer:
    """Writes the program of one rank; leaves out events where it is told to."""

    def __init__(self, rank: Rank, keep: Callable[[], bool]) -> None:
        self.rank, self.keep = rank, keep

    def after(self, stream: int, *others: int) -> None:
        for other in dict.fromkeys(others):
            if self.keep():
                self.rank.after(stream, other)

    def write(self, rounds: tuple[Round, ...]) -> None:
        rank, width = self.rank, len(self.rank.draft.streams)
        for stream in range(1, width):
            self.after(stream, 0)
        source = rank.make(0, rounds[0].make)
        late: list[Callable[[], None]] = []
        for number, item in enumerate(rounds):
            if rank.rank not in rank.draft.members(item.exchange):
                continue
            made, moved, _ = item.streams
            if number:
                source = rank.make(made, item.make)
            if item.moving is not None and rank.draft.exchanges[item.exchange].protocol is None:
                self.after(moved, made if number else 0, *range(width))
                rank.collective(moved, item.moving, source)
            else:
                self.sends(item, source, number)
            while late:
                late.pop()()
            reading = self.reading(item, source)
            if item.late:
                late.append(reading)
            else:
                reading()
        while late:
            late.pop()()
        for stream in range(1, width):
            self.after(0, stream)

    def sends(self, item: Round, source: int, number: int) -> None:
        rank, (made, moved, _) = self.rank, item.streams
        self.after(moved, made if number else 0, *range(len(rank.draft.streams)))
        if item.moving is not None:
            rank.send(moved, item.moving, source)
        rank.signal(moved, item.exchange)
        rank.wait(moved, item.exchange)
        if item.early_reset:
            rank.reset(moved, item.exchange)

    def reading(self, item: Round, source: int) -> Callable[[], None]:
        rank, (made, moved, used) = self.rank, item.streams

        def read() -> None:
            self.after(used, moved)
            if item.moving is not None:
                rank.make(used, item.use, [rank.whole(item.moving.target)])
            if not item.early_reset and rank.draft.exchanges[item.exchange].protocol is not None:
                rank.reset(moved, item.exchange)
            if item.drops and source in made_on(rank, made):
                self.after(made, moved)
                rank.drop(made, source)

        return read


def made_on(rank: Rank, stream: int) -> set[int]:
    """The views of what is made on a stream."""
    return {view for item in rank.items if isinstance(item, Run) and item.stream == stream for view in item.outputs}


@st.composite
def programs(draw: st.DrawFn) -> Plan:
    """A plan of some rounds; in every second draw some of its events are left out."""
    draft, rounds = draw(drafts())
    one_in = draw(st.sampled_from([0, 0, 4, 12]))
    for rank in draft.ranks:
        _Writer(rank, lambda: one_in == 0 or draw(st.integers(1, one_in)) > 1).write(rounds)
    return draft.plan("random")
