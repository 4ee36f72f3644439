"""What an exchange must leave behind, told from the senders' whole sources alone."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.planner.plan import Buffer


def assemble(kind: str, sources: list[Tensor], ends: list[Buffer], me: int) -> Tensor:
    """What member ``me`` of a group ends with, from the members' whole sources and the shapes that all end with."""
    if kind == "gather":
        first = sum(end.rows for end in ends[:me])
        return torch.cat([source[:, first : first + ends[me].rows] for source in sources], dim=2)
    joined = torch.cat(sources, dim=1)
    if kind != "send":
        return joined  # all_gather; partial sums and branches, stacked
    cols = [end.cols for end in ends]
    first = sum(cols[:me])
    if sum(cols) > joined.shape[2]:  # members share heads of k and v: as many to each head as go, more to the first
        heads, members = joined.shape[2] // cols[0], len(ends)
        sharers = [head for head in range(heads) for _ in range(members // heads + (head < members % heads))]
        first = sharers[me] * cols[0]
    return joined[:, :, first : first + cols[me]]


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, for comparison bit for bit (NaN included)."""
    return tensor.contiguous().view(torch.uint8)
