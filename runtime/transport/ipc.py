"""Peers' memory through CUDA IPC handles, exchanged over the process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.runtime.transport.mapping import PeerMemory


class IpcTransport:
    name = "ipc"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def unavailable(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device"

    def allocate(self, nbytes: int) -> PeerMemory:
        from torch.multiprocessing.reductions import reduce_tensor

        block = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        handles: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(handles, reduce_tensor(block))
        mapped: list[Tensor] = []
        for rank, handle in enumerate(handles):
            assert isinstance(handle, tuple)
            rebuild, arguments = handle
            mapped.append(block if rank == dist.get_rank() else rebuild(*arguments))
        return PeerMemory(block, tuple(tensor.data_ptr() for tensor in mapped), mapped)

    def release(self, memory: PeerMemory) -> None:
        """Importers let go before any exporter does."""
        assert isinstance(memory.keep, list)
        memory.keep.clear()
        torch.cuda.synchronize(self.device)
        dist.barrier()
