"""Handshakes on the GPU: batches of stream memory operations, and a kernel that counts epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from stepgraph.kernels.cuda_call import checked

CAN_FLUSH_REMOTE_WRITES = 98
"""CUdevice_attribute: waits may ask for remote writes to be flushed first."""
MOST_MEMOPS = 255
"""Of one batch, as CUDA's driver API says of cuStreamBatchMemOp."""
LANES = 128
"""Of an epoch handshake: one for each word to write or to wait for. As many as a group of 65 ranks needs."""


@dataclass(frozen=True, slots=True)
class Memop:
    """A stream memory operation on the 64-bit word at an address."""

    waits: bool
    """Wait until the word is ``value``; else write it."""
    address: int
    value: int


@cache
def wait_flags(device: int) -> int:
    """Flags of a wait for equality; with a flush where the device can flush remote writes."""
    from cuda.bindings import driver

    ordinal = checked(driver.cuDeviceGet(device))
    attribute = driver.CUdevice_attribute(CAN_FLUSH_REMOTE_WRITES)
    flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    if checked(driver.cuDeviceGetAttribute(attribute, ordinal)):
        flags |= int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
    return flags


def enqueue_memops(operations: Sequence[Memop], stream: int, device: int) -> None:
    """Put operations on a CUDA stream as one batch, which is one node of a captured graph. Raises RuntimeError."""
    from cuda.bindings import driver

    kinds = driver.CUstreamBatchMemOpType
    batch = []
    for operation in operations:
        item = driver.CUstreamBatchMemOpParams()
        if operation.waits:
            item.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_64
            item.waitValue.operation = item.operation
            item.waitValue.address, item.waitValue.value64 = operation.address, operation.value
            item.waitValue.flags = wait_flags(device)
        else:
            item.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64
            item.writeValue.operation = item.operation
            item.writeValue.address, item.writeValue.value64 = operation.address, operation.value
            item.writeValue.flags = 0  # keeps the fence before the write
        batch.append(item)
    checked(driver.cuStreamBatchMemOp(driver.CUstream(stream), len(batch), batch, 0))


@dataclass(frozen=True, slots=True)
class EpochHandshake:
    """A handshake that needs no reset: writes the next epoch to peers' words, then waits until every own word has
    reached it. The epoch is counted on the device, so that one captured launch means another epoch at each replay."""

    words: Tensor
    """int64 addresses: ``writes`` words to write, then ``waits`` to wait for."""
    writes: int
    waits: int
    epoch: Tensor
    """int64, one element: how many handshakes this rank has been through."""

    def enqueue(self, stream: torch.cuda.Stream) -> None:
        """Put the handshake on a stream: one kernel of one warp."""
        from stepgraph.kernels.epoch_kernel import epoch_handshake

        with torch.cuda.stream(stream):
            epoch_handshake[(1,)](self.words, self.epoch, self.writes, self.waits, LANES=LANES, num_warps=1)
