"""What an exchange must leave behind, told from the senders' whole sources alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from stepgraph.planner.plan import Buffer, Collective, Plan, RankProgram, Send, View

Moved = tuple[int, int]
"""An op that moves data, and which of its operands."""


def collective_views(program: RankProgram, collective: Collective) -> list[tuple[Moved, View]]:
    """The operands of a collective. What an all-reduce adds is arithmetic, not movement."""
    if collective.reduce:
        return []
    views = dict.fromkeys(part.view for part in collective.outgoing)
    return [((collective.op, index), program.views[view]) for index, view in enumerate(views)]


def endings(plan: Plan) -> Mapping[tuple[int, int], Mapping[Moved, int]]:
    """(exchange, rank) -> the buffer in which each op that the exchange closes ends there."""
    found: dict[tuple[int, int], dict[Moved, int]] = defaultdict(dict)
    for rank, program in enumerate(plan.ranks):
        for item in program.instructions:
            if isinstance(item, Send):
                found[item.exchange, item.peer][item.op, 0] = item.target
            elif isinstance(item, Collective) and not item.reduce:
                results = dict.fromkeys(program.views[part.view].buffer for part in item.incoming)
                for index, buffer in enumerate(results):
                    found[item.exchange, rank][item.op, index] = buffer
    return found


def state_rows(plan: Plan) -> Mapping[Moved, range]:
    """The rows of a state that each op fills which sends into one."""
    states, found = plan.state_buffers, dict[Moved, range]()
    for program in plan.ranks:
        for item in program.instructions:
            if isinstance(item, Send) and item.target in states:
                first, end = _first_row(plan, item.op), item.region.row + item.region.rows
                found[item.op, 0] = range(first, max(end, found.get((item.op, 0), range(end)).stop))
    return found


def _first_row(plan: Plan, op: int) -> int:
    return int(dict(plan.ops[op].options).get("at", "0"))


def moved_right(
    plan: Plan,
    exchange: int,
    rank: int,
    moved: Moved,
    ends: Mapping[tuple[int, int], Mapping[Moved, int]],
    sent: Mapping[int, Tensor],
    got: Tensor,
) -> bool:
    """Whether ``got``, in which ``moved`` has ended on ``rank``, is what the group sent, bit for bit. ``sent`` has the
    whole source of each member that sent anything: one without rows sends nothing."""
    group = plan.groups[plan.exchanges[exchange].group]
    buffer = ends[exchange, rank][moved]
    first = _first_row(plan, moved[0])
    sources = [sent[member] for member in group if member in sent]
    # Nothing is sent to a member that ends with none.
    numbers = [ends[exchange, member].get(moved, buffer) if (exchange, member) in ends else buffer for member in group]
    boxes = [plan.ranks[member].buffers[number] for member, number in zip(group, numbers, strict=True)]
    want = assemble(plan.ops[moved[0]].kind, sources, boxes, group.index(rank)) if sources else None
    if want is not None and buffer in plan.state_buffers:  # whose other rows are not of this op
        got = got[:, first : first + want.shape[1]]
    return want is not None and want.shape == got.shape and torch.equal(bits(got), bits(want))


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
