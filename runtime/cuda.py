"""The cuda device: one rank's verbs as work on CUDA streams. The same calls run eagerly and under capture.

One process is one rank; several may share a GPU. Copies go straight into the peers' targets; a handshake is one batch
of stream memory operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from cuda.bindings import driver, runtime
from torch import Tensor

from stepgraph.kernels.stages import Stage
from stepgraph.planner.diagnostics import CapabilityError, Diagnostic
from stepgraph.planner.plan import (
    FLAG_BYTES,
    Collective,
    Drop,
    Load,
    Part,
    Plan,
    Protocol,
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
from stepgraph.runtime.transport.mapping import PeerMemory

PAGE = 4096
"""Bytes; flags have pages of their own behind the arena."""
CAN_FLUSH_REMOTE_WRITES = 98
"""CUdevice_attribute: waits may ask for remote writes to be flushed first."""


def checked(result: tuple[Any, ...]) -> Any:
    """What a CUDA call gives besides its status. Raises RuntimeError where that is an error."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else values


def flags_offset(plan: Plan) -> int:
    """Bytes from the start of a rank's block to its flag page."""
    return -(-plan.arena_bytes // PAGE) * PAGE


def block_bytes(plan: Plan) -> int:
    """Bytes of a rank's block: arena, then flags."""
    return flags_offset(plan) + max(PAGE, -(-plan.flag_slots * FLAG_BYTES // PAGE) * PAGE)


class CudaRank:
    """One rank's streams and memory. ``inputs`` holds the rank's share of each input, by its number."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        memory: PeerMemory,
        device: torch.device,
        groups: Mapping[int, dist.ProcessGroup | None],
    ) -> None:
        self.plan, self.rank, self.memory, self.device, self.groups = plan, rank, memory, device, groups
        self.program = plan.ranks[rank]
        # Copies first: a priority is kept on kernels only, and costs nothing.
        self.streams = [torch.cuda.Stream(device, priority=0 if n == 0 else -1) for n in range(len(plan.streams))]
        self.events: dict[int, torch.cuda.Event] = {}
        self.tensors: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.batch: list[driver.CUstreamBatchMemOpParams] = []
        self.batch_stream = 0
        self.one = torch.ones(1, dtype=torch.int64, device=device)
        self.on_send: Callable[[Send, Tensor], None] | None = None
        """Called with a send and its whole source before its copy is issued; for checks, never under capture."""
        self.on_closed: Callable[[int], None] | None = None
        """Called with an exchange when its wait has been issued; for checks, never under capture."""
        ordinal = checked(driver.cuDeviceGet(device.index or 0))
        flush = checked(driver.cuDeviceGetAttribute(driver.CUdevice_attribute(CAN_FLUSH_REMOTE_WRITES), ordinal))
        self.wait_flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        if flush:
            self.wait_flags |= int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
        for number, target in enumerate(plan.targets):
            buffer = self.program.buffers[number]
            raw = memory.local[target.offset : target.offset + buffer.nbytes]
            self.tensors[number] = raw.view(torch_dtype(buffer.dtype)).view(buffer.batch, buffer.rows, buffer.cols)
        for item in self.program.instructions:
            if isinstance(item, Load):
                view = self.program.views[item.view]
                dtype = torch_dtype(self.program.buffers[view.buffer].dtype)
                self.inputs[item.input] = torch.empty(self._box(view), dtype=dtype, device=device)

    def _box(self, view: View) -> tuple[int, int, int]:
        return self.program.buffers[view.buffer].batch, view.region.rows, view.region.cols

    def _region(self, buffer: int, region: Region) -> Tensor:
        return self.tensors[buffer][:, region.row : region.row + region.rows, region.col : region.col + region.cols]

    def _view(self, number: int) -> Tensor:
        view = self.program.views[number]
        return self._region(view.buffer, view.region).view(view.shape)

    def flag(self, rank: int, slot: int) -> int:
        """The address of a flag word of any rank."""
        return self.memory.pointers[rank] + flags_offset(self.plan) + slot * FLAG_BYTES

    # Device

    def load(self, number: int, load: Load) -> None:
        self._flush()
        self.tensors[self.program.views[load.view].buffer] = self.inputs[load.input]

    def store(self, number: int, store: Store) -> None:
        self._flush()
        self.outputs[store.output] = self._view(store.view)

    def run(self, number: int, run: Run, stage: Stage) -> None:
        self._flush()
        outputs = [self.program.views[view] for view in run.outputs]
        made = list(dict.fromkeys(v.buffer for v, i in zip(outputs, run.outputs, strict=True) if i not in run.inputs))
        with torch.cuda.stream(self.streams[run.stream]), torch.no_grad():
            results = stage([self._view(view) for view in run.inputs])
            for buffer, result in zip(made, results, strict=True):
                found = self.program.buffers[buffer]
                self.tensors[buffer] = result.reshape(found.batch, found.rows, found.cols)

    def send(self, number: int, send: Send) -> None:
        self._flush()
        view = self.program.views[send.source]
        if self.on_send is not None:
            self.on_send(send, self._region(view.buffer, view.region))
        source = self._region(view.buffer, send.source_region)
        target, region = self.plan.ranks[send.peer].buffers[send.target], send.region
        item = target.dtype.itemsize
        first = self.memory.pointers[send.peer] + self.plan.targets[send.target].offset
        stream = self.streams[send.stream].cuda_stream
        for batch in range(target.batch):
            row = batch * target.rows + region.row
            checked(
                runtime.cudaMemcpy2DAsync(
                    first + (row * target.cols + region.col) * item,
                    target.cols * item,
                    source[batch].data_ptr(),
                    source.stride(1) * item,
                    region.cols * item,
                    region.rows,
                    runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
                    stream,
                )
            )

    def signal(self, number: int, signal: Signal) -> None:
        protocol = self.plan.exchanges[signal.exchange].protocol
        if protocol is Protocol.KERNEL:
            raise CapabilityError(
                [
                    Diagnostic(
                        "E606",
                        "kernel handshakes are not made by the cuda device",
                        None,
                        "memop or copy",
                        "kernel",
                        "--set defaults.handshake=memop",
                    )
                ]
            )
        if protocol is Protocol.MEMOP:
            for flag in signal.flags:
                self._memop(signal.stream, self.flag(flag.peer, flag.slot), 1)
            return
        self._flush()
        for flag in signal.flags:
            checked(
                runtime.cudaMemcpyAsync(
                    self.flag(flag.peer, flag.slot),
                    self.one.data_ptr(),
                    FLAG_BYTES,
                    runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
                    self.streams[signal.stream].cuda_stream,
                )
            )

    def wait(self, number: int, wait: Wait) -> None:
        for flag in wait.flags:
            self._memop(wait.stream, self.flag(self.rank, flag.slot), 1, waits=True)
        if self.on_closed is not None:
            self._flush()
            self.on_closed(wait.exchange)

    def reset(self, number: int, reset: Reset) -> None:
        for flag in reset.flags:
            self._memop(reset.stream, self.flag(self.rank, flag.slot), 0)

    def collective(self, number: int, collective: Collective) -> None:
        """Through the process group: packed, exchanged, unpacked. On a backend of the host the stream is waited for."""
        self._flush()
        stream = self.streams[collective.stream]
        group = self.groups[self.plan.exchanges[collective.exchange].group]
        on_host = group is not None and dist.get_backend(group) != "nccl"
        if on_host and torch.cuda.is_current_stream_capturing():
            raise CapabilityError(
                [
                    Diagnostic(
                        "E606",
                        "a collective on the host can't be captured",
                        None,
                        "via: copy, or an NCCL group",
                        dist.get_backend(group),
                        "run eagerly, or --set defaults.gather.via=copy",
                    )
                ]
            )
        with torch.cuda.stream(stream), torch.no_grad():
            for part in collective.incoming:
                buffer = self._buffer_of(part)
                found = self.program.buffers[buffer]
                if buffer >= len(self.plan.targets) and buffer not in self.tensors:
                    shape, dtype = (found.batch, found.rows, found.cols), torch_dtype(found.dtype)
                    self.tensors[buffer] = torch.empty(shape, dtype=dtype, device=self.device)
            if collective.reduce:
                self._all_reduce(collective, group, on_host)
            else:
                self._all_to_all(collective, group, on_host)

    def _buffer_of(self, part: Part) -> int:
        return self.program.views[part.view].buffer

    def _members(self, collective: Collective) -> tuple[int, ...]:
        return self.plan.groups[self.plan.exchanges[collective.exchange].group]

    def _all_to_all(self, collective: Collective, group: dist.ProcessGroup | None, on_host: bool) -> None:
        outgoing = [[p for p in collective.outgoing if p.peer == peer] for peer in self._members(collective)]
        incoming = [[p for p in collective.incoming if p.peer == peer] for peer in self._members(collective)]
        packed = [self._region(self._buffer_of(p), p.region).reshape(-1) for parts in outgoing for p in parts]
        sent = torch.cat(packed)
        into = [self._region(self._buffer_of(p), p.region) for parts in incoming for p in parts]
        counts = [sum(self._region(self._buffer_of(p), p.region).numel() for p in parts) for parts in outgoing]
        expected = [sum(self._region(self._buffer_of(p), p.region).numel() for p in parts) for parts in incoming]
        if on_host:
            sent = sent.cpu()
        came = torch.empty(sum(expected), dtype=sent.dtype, device=sent.device)
        if group is None:
            came.copy_(sent)
        else:
            dist.all_to_all_single(came, sent, expected, counts, group=group)
        came = came.to(self.device)
        for region, flat in zip(into, came.split([region.numel() for region in into]), strict=True):
            region.copy_(flat.view(region.shape))

    def _all_reduce(self, collective: Collective, group: dist.ProcessGroup | None, on_host: bool) -> None:
        mine, into = collective.outgoing[0], collective.incoming[0]
        total = self._region(self._buffer_of(mine), mine.region).float().contiguous()
        if on_host:
            total = total.cpu()
        if group is not None:
            dist.all_reduce(total, group=group)
        self._region(self._buffer_of(into), into.region).copy_(total.to(self.device))

    def record(self, number: int, record: Record) -> None:
        self._flush()
        event = torch.cuda.Event()
        event.record(self.streams[record.stream])
        self.events[record.event] = event

    def wait_event(self, number: int, wait: WaitEvent) -> None:
        self._flush()
        self.streams[wait.stream].wait_event(self.events[wait.event])

    def drop(self, number: int, drop: Drop) -> None:
        self._flush()
        del self.tensors[drop.buffer]

    def finish(self) -> None:
        self._flush()

    # Stream memory operations

    def _memop(self, stream: int, address: int, value: int, waits: bool = False) -> None:
        """Add an operation to the batch of its stream."""
        if self.batch and self.batch_stream != stream:
            self._flush()
        self.batch_stream = stream
        item = driver.CUstreamBatchMemOpParams()
        kinds = driver.CUstreamBatchMemOpType
        if waits:
            item.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_64
            item.waitValue.operation = item.operation
            item.waitValue.address, item.waitValue.value64 = address, value
            item.waitValue.flags = self.wait_flags
        else:
            item.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64
            item.writeValue.operation = item.operation
            item.writeValue.address, item.writeValue.value64 = address, value
            item.writeValue.flags = 0  # keeps the fence before the write
        self.batch.append(item)

    def _flush(self) -> None:
        """Issue the batch: writes, waits and resets of one handshake are one node."""
        if self.batch:
            stream = driver.CUstream(self.streams[self.batch_stream].cuda_stream)
            checked(driver.cuStreamBatchMemOp(stream, len(self.batch), self.batch, 0))
            self.batch = []
