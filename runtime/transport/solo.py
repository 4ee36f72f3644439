"""Stand-ins for peers: one rank runs a plan of many, for its cost, its memory and its graph."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.runtime.transport.mapped import MappedChannel
from stepgraph.runtime.transport.mapping import PeerMemory, RankSite


class SoloTransport:
    """For rank 0. What it sends goes into scratch memory of a peer's layout, a block a peer; it answers its own waits.
    What peers would send is what its targets hold: random numbers."""

    name = "solo"
    one_host = True

    def __init__(self, device: torch.device, world_size: int) -> None:
        self.device, self.world_size = device, world_size

    def unavailable(self) -> str | None:
        return None if torch.cuda.is_available() else "torch sees no GPU"

    def reserve(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def connect(self, block: Tensor) -> PeerMemory:
        scratch = [block, *(torch.zeros_like(block) for _ in range(1, self.world_size))]
        return PeerMemory(block, tuple(peer.data_ptr() for peer in scratch), scratch)

    def channel(self, site: RankSite) -> MappedChannel:
        for number in range(len(site.plan.targets)):
            site.target(number).normal_()
        return MappedChannel(site, answers=True)
