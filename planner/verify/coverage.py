"""Every op that makes something is carried out, and what an op sends fills its target on every rank of its groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Collective, Plan, Run, Send
from stepgraph.planner.verify.findings import place_of_op


def _first_chunks(plan: Plan) -> list[int]:
    """For each op, the first one that is another chunk of the same; itself where it is whole."""
    found: list[int] = []
    seen: dict[tuple[object, ...], int] = {}
    for number, op in enumerate(plan.ops):
        options = dict(op.options)
        whole = options.pop("chunk", None) is None
        key = (op.kind, op.name, op.layer, *sorted(options.items()))
        found.append(number if whole else seen.setdefault(key, number))
    return found


def coverage(plan: Plan) -> Iterator[Diagnostic]:
    """E307 for an op that nobody carries out, and for a target that an op's sends fill in part."""
    done = {exchange.op for exchange in plan.exchanges}
    area: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    """(op, target) -> elements of a batch that each rank is sent. Chunks of one op fill a target together."""
    first = _first_chunks(plan)
    handshake: dict[tuple[int, int], int] = {}
    for program in plan.ranks:
        for item in program.instructions:
            if isinstance(item, Run | Send | Collective):
                done.add(item.op)
            if isinstance(item, Send):
                filled = first[item.op], item.target
                area[filled][item.peer] += item.region.rows * item.region.cols
                handshake[filled] = plan.exchanges[item.exchange].op
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
    for (number, target), found in area.items():
        closing = handshake[number, target]
        groups = {exchange.group for exchange in plan.exchanges if exchange.op == closing}
        for rank in sorted({rank for group in groups for rank in plan.groups[group]}):
            buffer = plan.ranks[rank].buffers[target]
            if found.get(rank, 0) != buffer.rows * buffer.cols:
                yield Diagnostic(
                    "E307",
                    f"{plan.ops[number].name} does not fill {buffer.name} of rank {rank}",
                    place_of_op(plan, number),
                    f"{buffer.rows * buffer.cols} elements of a batch",
                    f"{found.get(rank, 0)}",
                    "every member of a group with a share sends to every other, and to itself",
                )
