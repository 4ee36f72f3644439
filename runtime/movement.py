"""What an exchange must leave behind, told from the senders' whole sources alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stepgraph.planner.plan import Buffer, Collective, Op, Plan, RankProgram, Send, View

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


def widths(plan: Plan) -> Mapping[int, Mapping[int, int]]:
    """op -> rank -> the columns of what it sends from there, of all ops in chunks."""
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, program in enumerate(plan.ranks):
        for item in program.instructions:
            if isinstance(item, Send) and _chunk(plan.ops[item.op]) is not None:
                found[item.op][rank] = program.views[item.source].region.cols
    return found


def _chunk(op: Op) -> tuple[int, int] | None:
    """(number, of how many) of an op in chunks."""
    told = dict(op.options).get("chunk")
    if told is None:
        return None
    number, _, count = told.partition("/")
    return int(number), int(count)


def _siblings(plan: Plan, op: int) -> list[int]:
    """All chunks of an op, in their order."""

    def key(found: Op) -> tuple[object, ...]:
        names = tuple((operand.role, operand.name) for operand in found.inputs)
        return found.name, found.layer, names, dict(found.options).get("branch")

    wanted = key(plan.ops[op])
    return [n for n, found in enumerate(plan.ops) if key(found) == wanted and _chunk(found) is not None]


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
    sources_of: Mapping[int, Mapping[int, int]],
) -> bool:
    """Whether ``got``, in which ``moved`` has ended on ``rank``, is what the group sent, bit for bit. ``sent`` has the
    whole source of each member that sent anything: one without rows sends nothing."""
    try:
        group = plan.groups[plan.exchanges[exchange].group]
        buffer = ends[exchange, rank][moved]
        first = _first_row(plan, moved[0])
        sources = [sent[member] for member in group if member in sent]
        # Nothing is sent to a member that ends with none.
        numbers = [
            ends[exchange, member].get(moved, buffer) if (exchange, member) in ends else buffer for member in group
        ]
        boxes = [plan.ranks[member].buffers[number] for member, number in zip(group, numbers, strict=True)]
        if not sources or rank not in group:
            return False
        kind, me = plan.ops[moved[0]].kind, group.index(rank)
        chunk = _chunk(plan.ops[moved[0]])
        if chunk is None or (kind == "gather" and moved[0] not in sources_of):
            want = assemble(kind, sources, boxes, me)
            if buffer in plan.state_buffers:  # whose other rows are not of this op
                got = got[:, first : first + want.shape[1]]
        else:
            slots = _slots(plan, moved, group, ends, sources_of)
            if slots is None:
                return False
            if kind == "send":
                joined = torch.cat(sources, dim=1)
                want = _columns(joined, slots, me, chunk[0])
            else:  # a copied gather: one target for all chunks
                want = assemble(kind, sources, boxes, me)
                got = torch.cat([_columns(got, slots, member, chunk[0]) for member in range(len(group))], dim=2)
        return want.shape == got.shape and torch.equal(bits(got), bits(want))
    except (IndexError, RuntimeError, ZeroDivisionError):
        return False  # copies of an edited plan may go where their shapes make no whole


def _slots(
    plan: Plan,
    moved: Moved,
    group: Sequence[int],
    ends: Mapping[tuple[int, int], Mapping[Moved, int]],
    sources_of: Mapping[int, Mapping[int, int]],
) -> list[list[int]] | None:
    """For each member the columns of all its chunks of an op; None where a member or a chunk is left out."""
    found: list[list[int]] = [[] for _ in group]
    for sibling in _siblings(plan, moved[0]):
        wide = dict(sources_of.get(sibling, {}))
        if plan.ops[sibling].kind == "send":
            part = sibling, moved[1]
            into = {owner: buffers[part] for (_, owner), buffers in ends.items() if part in buffers}
            wide = {owner: plan.ranks[owner].buffers[buffer].cols for owner, buffer in into.items()}
        if not set(group) <= set(wide):
            return None
        for slots, member in zip(found, group, strict=True):
            slots.append(wide[member])
    return found


def _columns(whole: Tensor, slots: Sequence[Sequence[int]], member: int, number: int) -> Tensor:
    """The columns of one chunk of a member."""
    first = chunk_start(slots, member, number, whole.shape[2])
    return whole[:, :, first : first + slots[member][number]]


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
        first = _sharers(heads, members)[me] * cols[0]
    return joined[:, :, first : first + cols[me]]


def chunk_start(slots: Sequence[Sequence[int]], me: int, number: int, total: int) -> int:
    """The first column of a chunk of member ``me``, of ``total``, where ``slots`` has the columns of every member's
    chunks. They lie one behind the other, or share heads of k and v: as many to each head as go, more to the first."""
    if sum(map(sum, slots)) == total:
        return sum(map(sum, slots[:me])) + sum(slots[me][:number])
    head = min(map(min, slots))
    heads, members, chunks = total // head, len(slots), len(slots[me])
    if heads < members:
        return _sharers(heads, members)[me] * head
    held = [heads // members + (member < heads % members) for member in range(members)]
    start = sum(held[:me]) * head
    if held[me] >= chunks:
        return start + sum(slots[me][:number])
    return start + _sharers(held[me], chunks)[number] * head


def _sharers(heads: int, parts: int) -> list[int]:
    """The head of each of ``parts`` parts that share them."""
    return [head for head in range(heads) for _ in range(parts // heads + (head < parts % heads))]


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, for comparison bit for bit (NaN included)."""
    return tensor.contiguous().view(torch.uint8)
