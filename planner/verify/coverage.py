"""Every op that makes something is carried out, and what an op sends fills its target on every rank of its groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Collective, Plan, Run, Send
from stepgraph.planner.verify.findings import place_of_op


def coverage(plan: Plan) -> Iterator[Diagnostic]:
    """E307 for an op that nobody carries out, and for a target that an op's sends fill in part; of a state, the rows of
    all that is sent."""
    done = {exchange.op for exchange in plan.exchanges}
    area: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    """(op, target) -> elements of a batch that each rank is sent."""
    handshake: dict[tuple[int, int], int] = {}
    rows: dict[int, dict[int, int]] = defaultdict(dict)
    """Op -> rows that each rank sends."""
    for sender, program in enumerate(plan.ranks):
        for item in program.instructions:
            if isinstance(item, Run | Send | Collective):
                done.add(item.op)
            if isinstance(item, Send):
                area[item.op, item.target][item.peer] += item.region.rows * item.region.cols
                handshake[item.op, item.target] = plan.exchanges[item.exchange].op
                rows[item.op][sender] = program.views[item.source].region.rows
    for number, op in enumerate(plan.ops):
        if number not in done and op.outputs and op.kind != "load":  # which names no op
            yield Diagnostic(
                "E307",
                f"no rank carries out {op.name}",
                place_of_op(plan, number),
                "an instruction of it",
                "none",
                "what it would make is read all the same, or the op is of no use",
            )
    states = plan.state_buffers
    for (number, target), found in area.items():
        closing = handshake[number, target]
        groups = {plan.groups[exchange.group] for exchange in plan.exchanges if exchange.op == closing}
        for rank, group in sorted((rank, members) for members in groups for rank in members):
            buffer = plan.ranks[rank].buffers[target]
            sent = sum(rows[number].get(member, 0) for member in group)
            wanted = (sent if target in states else buffer.rows) * buffer.cols
            if found.get(rank, 0) != wanted:
                yield Diagnostic(
                    "E307",
                    f"{plan.ops[number].name} does not fill {buffer.name} of rank {rank}",
                    place_of_op(plan, number),
                    f"{wanted} elements of a batch",
                    f"{found.get(rank, 0)}",
                    "every member of a group with a share sends to every other, and to itself",
                )
