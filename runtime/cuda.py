"""The cuda device: one rank's verbs as work on CUDA streams. The same calls run eagerly and under capture.

One process is one rank; several may share a GPU. Sends and handshakes are carried by the transport's channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.kernels import copy2d
from stepgraph.kernels.copy2d import Copy2D, Strided
from stepgraph.kernels.dtype import torch_dtype
from stepgraph.kernels.stages import Stage
from stepgraph.planner.plan import (
    Collective,
    Drop,
    Instruction,
    Load,
    Part,
    Record,
    Region,
    Reset,
    Run,
    Send,
    Signal,
    Store,
    View,
    Wait,
    WaitEvent,
)
from stepgraph.runtime.movement import Moved, collective_views
from stepgraph.runtime.stage_call import call_stage
from stepgraph.runtime.transport.collective import all_to_all, on_host
from stepgraph.runtime.transport.mapping import Channel, PlannedNode, RankSite, memcpy_node


class Watcher(Protocol):
    """Is told what a step moves, as it is issued. Only for steps that run eagerly."""

    def sent(self, moved: Moved, source: Tensor, stream: torch.cuda.Stream) -> None:
        """``source`` is the whole operand, before anything of it is sent."""

    def closed(self, exchange: int, rank: CudaRank, stream: torch.cuda.Stream) -> None:
        """An exchange is over on its stream."""


class CudaRank:
    """One rank's memory. ``inputs`` holds the rank's share of each input, by its number."""

    def __init__(self, site: RankSite, channel: Channel) -> None:
        self.site, self.channel = site, channel
        self.plan, self.streams = site.plan, site.streams
        self.program = self.plan.ranks[site.rank]
        self.events: dict[int, torch.cuda.Event] = {}
        self.tensors: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.kept: dict[int, Tensor] = {}
        """Memory for outputs that lie in targets, which a peer that is ahead may write to before the caller has read
        them; (batch, rows, cols), by the output's number."""
        self.sources: dict[int, Strided] = {}
        """Where each send read from when it was last issued, by the instruction's number."""
        self.state_copies: dict[int, list[Copy2D]] = {}
        """What took a stage's results into states when it was last issued, by the instruction's number."""
        self.watcher: Watcher | None = None
        self.capturing = False
        self.alone = False
        """Nobody takes part in collectives; what would come through them is zero."""
        for number in range(len(self.plan.targets)):
            self.tensors[number] = site.target(number)
        # They stay where they are until the session ends: graphs know their addresses.
        self.states = {
            state.buffer: self.tensors[state.buffer] if state.buffer in self.tensors else site.states[state.name]
            for state in self.plan.states
        }
        self.tensors |= self.states
        for item in self.program.instructions:
            if isinstance(item, Load):
                view = self.program.views[item.view]
                dtype = torch_dtype(self.program.buffers[view.buffer].dtype)
                self.inputs[item.view] = torch.zeros(self._box(view), dtype=dtype, device=site.device)
            elif isinstance(item, Store) and self.program.views[item.view].buffer < len(self.plan.targets):
                view = self.program.views[item.view]
                self.kept[item.output] = torch.zeros_like(self.region(view.buffer, view.region).contiguous())

    def _box(self, view: View) -> tuple[int, int, int]:
        return self.program.buffers[view.buffer].batch, view.region.rows, view.region.cols

    def region(self, buffer: int, region: Region) -> Tensor:
        """(batch, rows, cols) of a buffer that holds something now."""
        return self.tensors[buffer][:, region.row : region.row + region.rows, region.col : region.col + region.cols]

    def _view(self, number: int) -> Tensor:
        view = self.program.views[number]
        return self.region(view.buffer, view.region).view(view.shape)

    # Device

    def load(self, number: int, load: Load) -> None:
        self.channel.flush()
        self.tensors[self.program.views[load.view].buffer] = self.inputs[load.view]

    def store(self, number: int, store: Store) -> None:
        self.channel.flush()
        for copy in self._kept_copies(store):
            copy2d.enqueue(copy, self.streams[store.stream].cuda_stream)
        view = self.program.views[store.view]
        self.outputs[store.output] = (
            self.kept[store.output].view(view.shape) if store.output in self.kept else self._view(store.view)
        )

    def _kept_copies(self, store: Store) -> list[Copy2D]:
        """What takes an output out of a target; nothing for another output."""
        if store.output not in self.kept:
            return []
        into, view = self.kept[store.output], self.program.views[store.view]
        width = into.shape[2] * into.element_size()
        source = Strided.of(self.region(view.buffer, view.region))
        return copy2d.between(source, Strided.of(into), width, into.shape[1])

    def planned(self, items: Sequence[tuple[int, Instruction]]) -> tuple[PlannedNode, ...] | None:
        """The nodes that instructions, given with their numbers, must become when they are issued together; None where
        a library decides."""
        number, first = items[0]
        if isinstance(first, Run | Collective):
            return None
        if isinstance(first, Store):
            return tuple(memcpy_node(copy) for copy in self._kept_copies(first))
        return self.channel.planned([item for _, item in items], self.sources.get(number))

    def planned_end(self, number: int) -> tuple[PlannedNode, ...]:
        """The last nodes that an instruction must become when a library decides on those before: what takes results of
        a stage into states."""
        return tuple(memcpy_node(copy) for copy in self.state_copies.get(number, ()))

    def run(self, number: int, run: Run, stage: Stage) -> None:
        self.channel.flush()
        with torch.cuda.stream(self.streams[run.stream]):
            inputs = [self._view(view) for view in run.inputs]
            made = call_stage(self.plan, self.site.rank, run, stage, inputs, self.capturing)
            copies: list[Copy2D] = []
            for buffer, result in made:
                if buffer in self.states:
                    copies += self._into_state(self.states[buffer], self._own(result))
                else:
                    self.tensors[buffer] = self._own(result, inputs)
            for copy in copies:
                copy2d.enqueue(copy, self.streams[run.stream].cuda_stream)
            self.state_copies[number] = copies

    def _into_state(self, state: Tensor, result: Tensor) -> list[Copy2D]:
        _, rows, cols = result.shape
        if not result.numel():
            return []
        return copy2d.between(Strided.of(result), Strided.of(state), cols * result.element_size(), rows)

    def reset_state(self) -> None:
        """Zero every state, on the current stream."""
        for state in self.states.values():
            state.zero_()

    def _own(self, result: Tensor, inputs: Sequence[Tensor] = ()) -> Tensor:
        """A stage's result with dense rows that nobody else writes to: itself, or, where it is strided otherwise or a
        part of a target, of a state, or of one of ``inputs``, a copy."""
        batch, rows, cols = result.shape
        dense = (cols == 1 or result.stride(2) == 1) and (rows == 1 or result.stride(1) >= cols)
        dense = dense and (batch == 1 or result.stride(0) > 0)
        kept = (self.site.memory.local, *self.states.values(), *inputs)
        shared = result.untyped_storage().data_ptr() in [tensor.untyped_storage().data_ptr() for tensor in kept]
        return result.clone(memory_format=torch.contiguous_format) if shared or not dense else result

    def send(self, number: int, send: Send) -> None:
        view = self.program.views[send.source]
        if self.watcher is not None:
            whole = self.region(view.buffer, view.region)
            self.watcher.sent((send.op, 0), whole, self.streams[send.stream])
        source = self.region(view.buffer, send.source_region)
        self.sources[number] = Strided.of(source)
        self.channel.send(send, source)

    def signal(self, number: int, signal: Signal) -> None:
        self.channel.signal(signal)

    def wait(self, number: int, wait: Wait) -> None:
        self.channel.wait(wait)
        if self.watcher is not None:
            self.channel.flush()
            self.watcher.closed(wait.exchange, self, self.streams[wait.stream])

    def reset(self, number: int, reset: Reset) -> None:
        self.channel.reset(reset)

    def collective(self, number: int, collective: Collective) -> None:
        """Through the process group: packed, exchanged, unpacked. On a backend of the host the stream is waited for."""
        self.channel.flush()
        stream = self.streams[collective.stream]
        group = self.site.groups[self.plan.exchanges[collective.exchange].group]
        with torch.cuda.stream(stream), torch.no_grad():
            for buffer in dict.fromkeys(self._buffer_of(part) for part in collective.incoming):
                if buffer >= len(self.plan.targets):
                    found = self.program.buffers[buffer]
                    shape, dtype = (found.batch, found.rows, found.cols), torch_dtype(found.dtype)
                    make = torch.zeros if self.alone else torch.empty
                    self.tensors[buffer] = make(shape, dtype=dtype, device=self.site.device)
            if self.watcher is not None:
                for moved, view in collective_views(self.program, collective):
                    self.watcher.sent(moved, self.region(view.buffer, view.region), stream)
            if self.alone:
                return
            if collective.reduce:
                self._all_reduce(collective, group)
            else:
                self._all_to_all(collective, group)
            if self.watcher is not None:
                self.watcher.closed(collective.exchange, self, stream)

    def _buffer_of(self, part: Part) -> int:
        return self.program.views[part.view].buffer

    def _all_to_all(self, collective: Collective, group: dist.ProcessGroup | None) -> None:
        members = self.plan.groups[self.plan.exchanges[collective.exchange].group]
        outgoing, incoming = (
            [[self.region(self._buffer_of(p), p.region) for p in parts if p.peer == peer] for peer in members]
            for parts in (collective.outgoing, collective.incoming)
        )
        all_to_all(group, outgoing, incoming)

    def _all_reduce(self, collective: Collective, group: dist.ProcessGroup | None) -> None:
        mine, into = collective.outgoing[0], collective.incoming[0]
        part = self.region(self._buffer_of(mine), mine.region)
        total = (part if part.dtype is torch.float64 else part.float()).clone(memory_format=torch.contiguous_format)
        if group is not None:
            total = total.cpu() if on_host(group) else total
            dist.all_reduce(total, group=group)
        self.region(self._buffer_of(into), into.region).copy_(total.to(self.site.device))

    def record(self, number: int, record: Record) -> None:
        self.channel.flush()
        event = torch.cuda.Event()
        event.record(self.streams[record.stream])
        self.events[record.event] = event

    def wait_event(self, number: int, wait: WaitEvent) -> None:
        self.channel.flush()
        self.streams[wait.stream].wait_event(self.events[wait.event])

    def drop(self, number: int, drop: Drop) -> None:
        self.channel.flush()
        del self.tensors[drop.buffer]

    def finish(self) -> None:
        self.channel.finish()

    def let_go(self) -> None:
        """Forget every tensor."""
        self.tensors.clear()
        self.states.clear()
        self.inputs.clear()
        self.outputs.clear()
        self.kept.clear()
        self.events.clear()
