"""Every op that makes something is carried out, and what an op sends fills its target on every rank of its groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Collective, Plan, Region, Run, Send
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
    """E307 for an op that nobody carries out, and for a target that an op's sends fill in part; of a state, from the
    op's row `at` on, as many rows as are sent."""
    done = {exchange.op for exchange in plan.exchanges}
    sent: dict[tuple[int, int], dict[int, list[Region]]] = defaultdict(lambda: defaultdict(list))
    """(op, target) -> what each rank is sent. Chunks of one op fill a target together."""
    first_chunk = _first_chunks(plan)
    handshake: dict[tuple[int, int], int] = {}
    rows: dict[int, dict[int, int]] = defaultdict(dict)
    """Op -> rows that each rank sends."""
    for sender, program in enumerate(plan.ranks):
        for item in program.instructions:
            if isinstance(item, Run | Send | Collective):
                done.add(item.op)
            if isinstance(item, Send):
                filled = first_chunk[item.op], item.target
                sent[filled][item.peer].append(item.region)
                handshake[filled] = plan.exchanges[item.exchange].op
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
    for (number, target), regions in sent.items():
        closing = handshake[number, target]
        groups = {plan.groups[exchange.group] for exchange in plan.exchanges if exchange.op == closing}
        for rank, group in sorted((rank, members) for members in groups for rank in members):
            buffer = plan.ranks[rank].buffers[target]
            window = range(buffer.rows)
            if target in states:
                first = int(dict(plan.ops[number].options).get("at", "0"))
                window = range(first, first + sum(rows[number].get(member, 0) for member in group))
            wanted = len(window) * buffer.cols
            found = sum(_rows_in(region, window) * region.cols for region in regions.get(rank, ()))
            if found != wanted:
                yield Diagnostic(
                    "E307",
                    f"{plan.ops[number].name} does not fill {buffer.name} of rank {rank}",
                    place_of_op(plan, number),
                    f"{wanted} elements of a batch, in rows {window.start} to {window.stop - 1}",
                    f"{found}",
                    "every member of a group with a share sends to every other, and to itself",
                )


def _rows_in(region: Region, window: range) -> int:
    return max(0, min(region.row + region.rows, window.stop) - max(region.row, window.start))
