"""The cuda device: one rank's verbs as work on CUDA streams. The same calls run eagerly and under capture.

One process is one rank; several may share a GPU. Sends and handshakes are carried by the transport's channel.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.kernels.stages import Stage
from stepgraph.planner.diagnostics import Diagnostic, StepgraphError
from stepgraph.planner.plan import (
    Collective,
    Drop,
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
from stepgraph.runtime.cpu_memory import torch_dtype
from stepgraph.runtime.movement import Moved, collective_views
from stepgraph.runtime.transport.collective import all_to_all, on_host
from stepgraph.runtime.transport.mapping import Channel, RankSite


class StageError(StepgraphError):
    """A stage failed when it was warmed, run or captured (E610)."""


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
        self.watcher: Watcher | None = None
        self.capturing = False
        self.alone = False
        """Nobody takes part in collectives; what would come through them is zero."""
        for number in range(len(self.plan.targets)):
            self.tensors[number] = site.target(number)
        for item in self.program.instructions:
            if isinstance(item, Load):
                view = self.program.views[item.view]
                dtype = torch_dtype(self.program.buffers[view.buffer].dtype)
                self.inputs[item.input] = torch.zeros(self._box(view), dtype=dtype, device=site.device)

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
        self.tensors[self.program.views[load.view].buffer] = self.inputs[load.input]

    def store(self, number: int, store: Store) -> None:
        self.channel.flush()
        self.outputs[store.output] = self._view(store.view)

    def run(self, number: int, run: Run, stage: Stage) -> None:
        self.channel.flush()
        with torch.cuda.stream(self.streams[run.stream]), torch.no_grad():
            try:
                results = stage([self._view(view) for view in run.inputs])
            except Exception as error:
                raise self._stage_error(run, error) from error
            for buffer, result in zip(self.program.made_by(run), results, strict=True):
                found = self.program.buffers[buffer]
                self.tensors[buffer] = result.reshape(found.batch, found.rows, found.cols)

    def _stage_error(self, run: Run, error: Exception) -> StageError:
        op = self.plan.ops[run.op]
        name = op.name if op.layer is None else f"{op.name}[{op.layer}]"
        when = "captured" if self.capturing else "run"
        message = f"the stage of {name} on line {op.line} can't be {when}"
        rule = (
            "a captured stage must not wait for the GPU, allocate symmetric memory, or draw from a generator that the "
        )
        hint = f"{rule}capture does not know" if when == "captured" else ""
        got = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return StageError([Diagnostic("E610", message, None, "", got, hint)])

    def send(self, number: int, send: Send) -> None:
        view = self.program.views[send.source]
        if self.watcher is not None:
            whole = self.region(view.buffer, view.region)
            self.watcher.sent((send.op, 0), whole, self.streams[send.stream])
        self.channel.send(send, self.region(view.buffer, send.source_region))

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
        self.inputs.clear()
        self.outputs.clear()
        self.events.clear()
