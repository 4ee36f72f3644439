"""Peers' memory through CUDA IPC handles, exchanged over the process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.runtime.transport.mapped import MappedChannel
from stepgraph.runtime.transport.mapping import PeerMemory, RankSite, no_peer_access


class IpcTransport:
    name = "ipc"
    one_host = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def unavailable(self) -> str | None:
        return no_peer_access()

    def reserve(self, nbytes: int) -> Tensor:
        block = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        return block

    def connect(self, block: Tensor) -> PeerMemory:
        """torch counts importers, and gives a block back when the last has let go: closing needs no meeting."""
        from torch.multiprocessing.reductions import reduce_tensor

        handles: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(handles, reduce_tensor(block))
        mapped: list[Tensor] = []
        for rank, handle in enumerate(handles):
            assert isinstance(handle, tuple)
            rebuild, arguments = handle
            mapped.append(block if rank == dist.get_rank() else rebuild(*arguments))
        return PeerMemory(block, tuple(tensor.data_ptr() for tensor in mapped), mapped)

    def channel(self, site: RankSite) -> MappedChannel:
        return MappedChannel(site)
