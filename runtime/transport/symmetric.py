"""Peers' memory through torch's symmetric memory."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.runtime.launch import OVERLAPPING
from stepgraph.runtime.transport.mapped import MappedChannel
from stepgraph.runtime.transport.mapping import PeerMemory, RankSite, no_peer_access


class SymmetricTransport:
    name = "symmetric"
    one_host = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def unavailable(self) -> str | None:
        lacking = no_peer_access()
        if lacking:
            return lacking
        try:
            import torch.distributed._symmetric_memory as symmetric
        except ImportError as error:
            return f"torch has no symmetric memory: {error}"
        return None if hasattr(symmetric, "rendezvous") else "torch's symmetric memory has no rendezvous"

    def reserve(self, nbytes: int) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric

        os.environ.setdefault(OVERLAPPING, "1")  # read when the first block is allocated
        block = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        block.zero_()
        return block

    def connect(self, block: Tensor) -> PeerMemory:
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD
        assert group is not None
        handle = symmetric.rendezvous(block, group)
        first = block.data_ptr() - handle.buffer_ptrs[dist.get_rank()]
        return PeerMemory(block, tuple(pointer + first for pointer in handle.buffer_ptrs), handle)

    def channel(self, site: RankSite) -> MappedChannel:
        return MappedChannel(site)
