"""Peers' memory through CUDA IPC handles, exchanged over the process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.runtime.transport.mapped import MappedChannel
from stepgraph.runtime.transport.mapping import PeerMemory, RankSite, no_peer_access

DEVICE = 6
"""Which argument of torch's ``rebuild_cuda_tensor`` is the number of the GPU."""


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
        """A handle for each peer: torch counts one importer a handle, and gives a block back when the last has let go,
        so that closing needs no meeting."""
        from torch.multiprocessing.reductions import reduce_tensor

        own, ranks = dist.get_rank(), range(dist.get_world_size())
        given: list[object] | str
        try:
            given = [None if rank == own else reduce_tensor(block) for rank in ranks]
        except RuntimeError as error:
            given = str(error)  # is told behind the exchange: the others wait in it
        every: list[list[object] | str] = [""] * len(ranks)
        dist.all_gather_object(every, given)
        mapped: list[Tensor] = []
        for rank, handles in enumerate(every):
            if isinstance(handles, str):
                raise RuntimeError(f"the block of rank {rank} has no handle: {handles}")
            mapped.append(block if rank == own else self._opened(handles[own]))
        return PeerMemory(block, tuple(tensor.data_ptr() for tensor in mapped), mapped)

    def _opened(self, handle: object) -> Tensor:
        """A peer's block, opened for this rank's GPU, whatever number the peer gives to its own."""
        assert isinstance(handle, tuple)
        rebuild, arguments = handle
        found = rebuild(*arguments[:DEVICE], self.device.index, *arguments[DEVICE + 1 :])
        assert isinstance(found, Tensor)
        return found

    def channel(self, site: RankSite) -> MappedChannel:
        return MappedChannel(site)
