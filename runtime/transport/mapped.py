"""The channel of transports that map peers' memory: copies straight into targets, flags written into peers' pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepgraph.kernels import copy2d
from stepgraph.kernels.copy2d import Copy2D, Strided
from stepgraph.kernels.handshake import LANES, MOST_MEMOPS, EpochHandshake, Memop, enqueue_memops, wait_flags
from stepgraph.planner.diagnostics import CapabilityError, Diagnostic
from stepgraph.planner.plan import (
    FLAG_BYTES,
    Flag,
    Instruction,
    Protocol,
    Reset,
    Send,
    Signal,
    Wait,
)
from stepgraph.runtime.facts import has_triton
from stepgraph.runtime.transport.mapping import PlannedNode, RankSite, flags_offset, memcpy_node

RELEASE_EPOCH = 1 << 62
"""Later than any epoch."""


class MappedChannel:
    """Sends are pitched copies, one a batch. What a handshake does on a stream is gathered until ``flush``, and is then
    one node. With ``answers`` nobody is there but this rank: it writes the words that it waits for itself."""

    def __init__(self, site: RankSite, answers: bool = False) -> None:
        self.site, self.plan, self.rank, self.answers = site, site.plan, site.rank, answers
        self.batch: list[Memop] = []
        self.stream = 0
        """Of the batch, and of the epoch handshake that is held back."""
        self.pending: tuple[int, tuple[Flag, ...], tuple[Flag, ...]] | None = None
        """An epoch handshake that is held back: exchange, flags to write, flags to wait for."""
        self.one = torch.ones(1, dtype=torch.int64, device=site.device)
        self.epochs = torch.zeros(max(1, len(self.plan.exchanges)), dtype=torch.int64, device=site.device)
        self.tables: dict[tuple[int, tuple[Flag, ...], tuple[Flag, ...]], EpochHandshake] = {}
        self._make_tables()
        self.released = self._released()

    # Sends

    def copies(self, send: Send, source: Strided) -> list[Copy2D]:
        """The copies of a send."""
        target, region = self.plan.ranks[send.peer].buffers[send.target], send.region
        item = target.dtype.itemsize
        first = self.site.memory.pointers[send.peer] + self.plan.targets[send.target].offset
        rows = (batch * target.rows + region.row for batch in range(target.batch))
        into = Strided(tuple(first + (row * target.cols + region.col) * item for row in rows), target.cols * item)
        return copy2d.between(source, into, region.cols * item, region.rows)

    def send(self, send: Send, source: Tensor) -> None:
        self.flush()
        for copy in self.copies(send, Strided.of(source)):
            copy2d.enqueue(copy, self.site.streams[send.stream].cuda_stream)

    # Handshakes

    def flag(self, rank: int, slot: int) -> int:
        """The address of a flag word of any rank."""
        return self.site.memory.pointers[rank] + flags_offset(self.plan) + slot * FLAG_BYTES

    def signal(self, signal: Signal) -> None:
        self._on(signal.stream)
        protocol = self.plan.exchanges[signal.exchange].protocol
        if protocol is Protocol.KERNEL:
            self.flush()
            self.pending = (signal.exchange, signal.flags, ())
        elif protocol is Protocol.MEMOP:
            self._gather([Memop(False, self.flag(flag.peer, flag.slot), 1) for flag in signal.flags])
        else:
            self._copy_flags([self.flag(flag.peer, flag.slot) for flag in signal.flags])

    def wait(self, wait: Wait) -> None:
        self._on(wait.stream)
        protocol = self.plan.exchanges[wait.exchange].protocol
        if protocol is Protocol.KERNEL:
            exchange, flags, waited = self.pending or (wait.exchange, (), ())
            if exchange != wait.exchange or waited:
                self.flush()
                flags = ()
            self.pending = (wait.exchange, flags, wait.flags)
            return
        own = [self.flag(self.rank, flag.slot) for flag in wait.flags]
        if self.answers and protocol is Protocol.COPY:
            self._copy_flags(own)
        elif self.answers:
            self._gather([Memop(False, address, 1) for address in own])
        self._gather([Memop(True, address, 1) for address in own])

    def reset(self, reset: Reset) -> None:
        self._on(reset.stream)
        self._gather([Memop(False, self.flag(self.rank, flag.slot), 0) for flag in reset.flags])

    def flush(self) -> None:
        if self.batch:
            batch, self.batch = self.batch, []
            enqueue_memops(batch, self.site.streams[self.stream].cuda_stream, self.site.device.index)
        if self.pending is not None:
            found, self.pending = self.tables[self.pending], None
            found.enqueue(self.site.streams[self.stream])

    def finish(self) -> None:
        self.flush()

    def forget(self) -> None:
        self.batch, self.pending = [], None

    def _on(self, stream: int) -> None:
        if stream != self.stream:
            self.flush()
            self.stream = stream

    def _gather(self, memops: Sequence[Memop]) -> None:
        """Behind an epoch handshake that is held back, and behind a batch that is full: eager steps gather handshakes
        that follow each other."""
        if self.pending is not None or len(self.batch) + len(memops) > MOST_MEMOPS:
            self.flush()
        self.batch += memops

    def _copy_flags(self, addresses: Sequence[int]) -> None:
        self.flush()
        for address in addresses:
            copy2d.enqueue(self._flag_copy(address), self.site.streams[self.stream].cuda_stream)

    def _flag_copy(self, address: int) -> Copy2D:
        return Copy2D(address, FLAG_BYTES, self.one.data_ptr(), FLAG_BYTES, FLAG_BYTES, 1)

    # Epoch handshakes

    def _make_tables(self) -> None:
        """The addresses that every epoch handshake needs, on the device before anything is captured: whole, and, for
        plans that do something between signal and wait, either half."""
        signals: dict[int, tuple[Flag, ...]] = {}
        for item in self.plan.ranks[self.rank].instructions:
            if isinstance(item, Signal | Wait) and self.plan.exchanges[item.exchange].protocol is Protocol.KERNEL:
                if not has_triton():
                    message, hint = "there is no triton for a kernel handshake", "--set defaults.handshake=memop"
                    raise CapabilityError([Diagnostic("E606", message, None, "triton", "none", hint)])
                if len(item.flags) > LANES // 2:
                    message = "a kernel handshake is made for fewer ranks"
                    found = Diagnostic("E606", message, None, f"{LANES // 2 + 1} at most", f"{len(item.flags) + 1}")
                    raise CapabilityError([found])
                if isinstance(item, Signal):
                    signals[item.exchange] = item.flags
                    self._table(item.exchange, item.flags, ())
                else:
                    self._table(item.exchange, signals.get(item.exchange, ()), item.flags)
                    self._table(item.exchange, (), item.flags)

    def _table(self, exchange: int, writes: tuple[Flag, ...], waits: tuple[Flag, ...]) -> None:
        own = [self.flag(self.rank, flag.slot) for flag in waits]
        given = [self.flag(flag.peer, flag.slot) for flag in writes] + (own if self.answers else [])
        words = torch.tensor([*given, *own], dtype=torch.int64, device=self.site.device)
        found = EpochHandshake(words, len(given), len(own), self.epochs[exchange : exchange + 1])
        self.tables[exchange, writes, waits] = found

    # Checks

    def _released(self) -> Tensor:
        """The flag page with every wait satisfied, in pinned memory."""
        page = torch.zeros(self.plan.flag_slots, dtype=torch.int64)
        for item in self.plan.ranks[self.rank].instructions:
            if isinstance(item, Wait):
                kernel = self.plan.exchanges[item.exchange].protocol is Protocol.KERNEL
                for flag in item.flags:
                    page[flag.slot] = RELEASE_EPOCH if kernel else 1
        return page.pin_memory()

    def planned(self, items: Sequence[Instruction], source: Strided | None) -> tuple[PlannedNode, ...]:
        flags = {type(item): item.flags for item in items if isinstance(item, Signal | Wait)}
        nodes: list[PlannedNode] = []
        batch: list[tuple[int, ...]] = []
        for item in items:
            if isinstance(item, Send):
                assert source is not None, "a send has been issued before it is asked for"
                nodes += [memcpy_node(copy) for copy in self.copies(item, source)]
            if not isinstance(item, Signal | Wait | Reset):
                continue
            protocol = self.plan.exchanges[item.exchange].protocol
            own = [self.flag(self.rank, flag.slot) for flag in item.flags]
            if protocol is Protocol.KERNEL:
                nodes = [_kernel(self.tables[item.exchange, flags.get(Signal, ()), flags.get(Wait, ())])]
                continue
            given = [self.flag(flag.peer, flag.slot) for flag in item.flags] if isinstance(item, Signal) else []
            if isinstance(item, Wait) and self.answers:
                given = own
            if protocol is Protocol.COPY:
                nodes += [memcpy_node(self._flag_copy(address)) for address in given]
            else:
                batch += [(0, address, 1, 0) for address in given]
            if isinstance(item, Wait):
                batch += [(1, address, 1, wait_flags(self.site.device.index)) for address in own]
            elif isinstance(item, Reset):
                batch += [(0, address, 0, 0) for address in own]
        return (*nodes, PlannedNode("batch_mem_op", tuple(batch))) if batch else tuple(nodes)

    def release(self) -> None:
        """One copy from the host over the whole page."""
        with torch.cuda.stream(self.site.rescue):
            self.site.flag_words[: len(self.released)].copy_(self.released, non_blocking=True)

    def clear(self) -> None:
        self.site.flag_words.zero_()
        self.epochs.zero_()


def _kernel(found: EpochHandshake) -> PlannedNode:
    return PlannedNode("kernel", ((found.words.data_ptr(), found.epoch.data_ptr(), found.writes, found.waits),))
