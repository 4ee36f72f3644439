"""What a transport is: memory of every rank, and a channel that carries sends and handshakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.kernels.copy2d import Copy2D, Strided
from stepgraph.kernels.cuda_call import checked
from stepgraph.kernels.dtype import torch_dtype
from stepgraph.planner.plan import FLAG_BYTES, Instruction, Plan, Reset, Send, Signal, Wait
from stepgraph.runtime.facts import NO_BINDINGS, has_bindings

PAGE = 4096
"""Bytes; flags have pages of their own behind the arena."""


def flags_offset(plan: Plan) -> int:
    """Bytes from the start of a rank's block to its flag page."""
    return -(-plan.arena_bytes // PAGE) * PAGE


def block_bytes(plan: Plan) -> int:
    """Bytes of a rank's block: arena, then flags."""
    return flags_offset(plan) + max(PAGE, -(-plan.flag_slots * FLAG_BYTES // PAGE) * PAGE)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One block of bytes on every rank, zeroed."""

    local: Tensor
    """uint8, this rank's own block."""
    pointers: tuple[int, ...]
    """The address of each rank's block in this process; () where peers can't be reached by address."""
    keep: object
    """What must live as long as the mapping."""


@dataclass(frozen=True, slots=True)
class RankSite:
    """Where a channel works: one rank of a plan, its memory and its streams."""

    plan: Plan
    rank: int
    memory: PeerMemory
    streams: tuple[torch.cuda.Stream, ...]
    rescue: torch.cuda.Stream
    """For what must run while the others wait."""
    groups: Mapping[int, dist.ProcessGroup | None]
    """The process group of each group of the plan; None for a rank alone."""
    states: Mapping[str, Tensor]
    """The states that only this rank writes, by name, (batch, rows, cols): those of all plans of the session."""

    @property
    def device(self) -> torch.device:
        return self.memory.local.device

    def target(self, number: int) -> Tensor:
        """The rank's own copy of a target, (batch, rows, cols)."""
        buffer, offset = self.plan.ranks[self.rank].buffers[number], self.plan.targets[number].offset
        raw = self.memory.local[offset : offset + buffer.nbytes]
        return raw.view(torch_dtype(buffer.dtype)).view(buffer.batch, buffer.rows, buffer.cols)

    @property
    def flag_words(self) -> Tensor:
        """The rank's own flags, int64."""
        return self.memory.local[flags_offset(self.plan) :].view(torch.int64)


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A node that an instruction must become in a captured graph."""

    kind: str
    """memcpy, batch_mem_op or kernel."""
    what: tuple[tuple[int, ...], ...] = ()
    """Its parameters: of a memcpy one (destination, pitch, source, pitch, width, height), of a batch an (is wait,
    address, value, flags) an operation, of a kernel one (table of words, epoch word, words to write, words to wait
    for)."""


def memcpy_node(copy: Copy2D) -> PlannedNode:
    """The node of a copy."""
    parameters = (copy.destination, copy.destination_pitch, copy.source, copy.source_pitch, copy.width, copy.height)
    return PlannedNode("memcpy", (parameters,))


class Channel(Protocol):
    """Carries one rank's sends and handshakes. Work is issued to the streams, or held back until ``flush``."""

    def send(self, send: Send, source: Tensor) -> None:
        """``source`` is (batch, rows, cols), strided."""

    def signal(self, signal: Signal) -> None: ...

    def wait(self, wait: Wait) -> None: ...

    def reset(self, reset: Reset) -> None: ...

    def flush(self) -> None:
        """Issue what was held back: it comes before whatever is issued next."""

    def finish(self) -> None:
        """The step's last instruction has been issued."""

    def forget(self) -> None:
        """A step has failed before its end: what it held back or put aside is nobody's."""

    def planned(self, items: Sequence[Instruction], source: Strided | None) -> tuple[PlannedNode, ...] | None:
        """The nodes of instructions that are issued together: a send from ``source``, or a signal with the wait and
        reset behind it. None where a library decides."""

    def release(self) -> None:
        """Satisfy every wait of this rank that is pending now, from the host. Flags are lost."""

    def clear(self) -> None:
        """Zero this rank's flags and epochs. Nothing that uses them runs."""


def no_peer_access() -> str | None:
    """Why this process's GPU can't be reached by address, and by stream memory operations; None where it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if not has_bindings():
        return NO_BINDINGS
    from cuda.bindings import driver

    own = torch.cuda.current_device()
    far = [n for n in range(torch.cuda.device_count()) if n != own and not torch.cuda.can_device_access_peer(own, n)]
    if far:
        return f"GPU {own} has no peer access to GPU {far[0]}"
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    able = checked(driver.cuDeviceGetAttribute(attribute, checked(driver.cuDeviceGet(own))))
    return None if able else f"GPU {own} has no 64-bit stream memory operations"


class Transport(Protocol):
    """A way to move data between ranks."""

    name: str
    one_host: bool
    """Whether it reaches only ranks on the same machine."""

    def unavailable(self) -> str | None:
        """Why this process can't use it; None where it can. Not collective, so that the group can vote."""

    def reserve(self, nbytes: int) -> Tensor:
        """A block of this rank, zeroed. Not collective: it may fail on one rank alone."""

    def connect(self, block: Tensor) -> PeerMemory:
        """Map the blocks of all ranks. Collective."""

    def channel(self, site: RankSite) -> Channel: ...
