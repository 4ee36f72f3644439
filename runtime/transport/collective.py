"""The transport that needs no peer's memory: what a group has sent is exchanged by all-to-all when its handshake comes.

The process group's own library moves the data: NCCL on the GPU, gloo through the host's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.kernels.copy2d import Strided
from stepgraph.planner.plan import Instruction, Reset, Send, Signal, Wait
from stepgraph.runtime.transport.mapping import PeerMemory, PlannedNode, RankSite


def on_host(group: dist.ProcessGroup | None) -> bool:
    """Whether a group moves tensors of the GPU through the host, which can't be captured."""
    return group is not None and "cuda:nccl" not in dist.get_backend_config(group)


def all_to_all(
    group: dist.ProcessGroup | None, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]]
) -> None:
    """Each member's ``outgoing`` tensors go, in order, into what the others list as ``incoming`` from it.

    One list a member, in the group's order; tensors may be strided and of any dtype. Runs on the current stream, and
    waits for it where the group is on the host. With no group the rank is alone. Collective.
    """
    packed = [[tensor.reshape(-1).view(torch.uint8) for tensor in tensors] for tensors in outgoing]
    into = [tensor for tensors in incoming for tensor in tensors]
    sent = torch.cat([part for parts in packed for part in parts])
    counts = [sum(part.numel() for part in parts) for parts in packed]
    expected = [sum(tensor.numel() * tensor.element_size() for tensor in tensors) for tensors in incoming]
    if group is None:
        came = sent
    else:
        given = sent.cpu() if on_host(group) else sent
        came = torch.empty(sum(expected), dtype=torch.uint8, device=given.device)
        dist.all_to_all_single(came, given, expected, counts, group=group)
        came = came.to(sent.device)
    flat = came.split([tensor.numel() * tensor.element_size() for tensor in into])
    for tensor, part in zip(into, flat, strict=True):
        # A part may start anywhere; a dtype's view wants its own alignment.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


class CollectiveTransport:
    """Named after the library that makes it worth while; over gloo it runs eagerly, for comparison."""

    name = "nccl"
    one_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def unavailable(self) -> str | None:
        return None if torch.cuda.is_available() else "torch sees no GPU"

    def reserve(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def connect(self, block: Tensor) -> PeerMemory:
        return PeerMemory(block, (), None)

    def channel(self, site: RankSite) -> CollectiveChannel:
        return CollectiveChannel(site)


class CollectiveChannel:
    """A send copies its source aside, so that the source may change; at the wait of its handshake the group exchanges
    what was put aside, and each member lays it into its own targets. That is later than a peer could have written
    them, and before anybody may read them."""

    def __init__(self, site: RankSite) -> None:
        self.site, self.plan, self.rank = site, site.plan, site.rank
        self.aside: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        """Exchange -> what goes to which peer, in the order of its sends."""
        self.laid: list[list[Tensor]] = []
        """What other streams may still read, until the step's end."""
        self.sends: dict[tuple[int, int], list[Send]] = defaultdict(list)
        """(exchange, sender) -> what it sends to this rank, in order."""
        for sender, program in enumerate(self.plan.ranks):
            for item in program.instructions:
                if isinstance(item, Send) and item.peer == self.rank:
                    self.sends[item.exchange, sender].append(item)

    def _target(self, send: Send) -> Tensor:
        """The region of this rank's own target that a send to it fills."""
        at = send.region
        return self.site.target(send.target)[:, at.row : at.row + at.rows, at.col : at.col + at.cols]

    def send(self, send: Send, source: Tensor) -> None:
        with torch.cuda.stream(self.site.streams[send.stream]):
            if send.peer == self.rank:
                self._target(send).copy_(source)
            else:
                self.aside[send.exchange].append((send.peer, source.clone(memory_format=torch.contiguous_format)))

    def signal(self, signal: Signal) -> None:
        """The exchange itself tells the peers."""

    def wait(self, wait: Wait) -> None:
        number = self.plan.exchanges[wait.exchange].group
        aside = self.aside.pop(wait.exchange, [])
        outgoing: list[list[Tensor]] = []
        incoming: list[list[Tensor]] = []
        for member in self.plan.groups[number]:
            # A word more for each peer, so that all meet where there is nothing to move.
            word = [] if member == self.rank else [self.site.flag_words[:1]]
            sends = [] if member == self.rank else self.sends[wait.exchange, member]
            outgoing.append([*word, *(tensor for peer, tensor in aside if peer == member)])
            incoming.append([*word, *(self._target(send) for send in sends)])
        with torch.cuda.stream(self.site.streams[wait.stream]):
            all_to_all(self.site.groups[number], outgoing, incoming)
        self.laid.append([tensor for _, tensor in aside])

    def reset(self, reset: Reset) -> None:
        """No flags."""

    def flush(self) -> None:
        """Nothing is held back."""

    def finish(self) -> None:
        self.aside.clear()
        self.laid.clear()

    def forget(self) -> None:
        self.finish()

    def planned(self, items: Sequence[Instruction], source: Strided | None) -> tuple[PlannedNode, ...] | None:
        return None

    def release(self) -> None:
        """A collective that hangs can only be aborted with its group."""

    def clear(self) -> None:
        """No flags."""
