"""Every op that makes something is carried out, what it sends fills its target, and outputs are handed out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Collective, Load, Plan, Region, Run, Send, Store
from stepgraph.planner.verify.cells import parts_of
from stepgraph.planner.verify.findings import place_of_op

_WITH_OP = Load | Store | Run | Send | Collective


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
    """E307 for an op that nobody carries out, or a rank does not where it leaves a state; for a target that an op's
    sends fill in part, of a state, from the op's row `at` on, as many rows as are sent; and for an output that a rank
    does not hand out once."""
    yield from _undone(plan)
    yield from _unfilled(plan)
    for rank, program in enumerate(plan.ranks):
        stored = Counter(item.output for item in program.instructions if isinstance(item, Store))
        for number, output in enumerate(plan.outputs):
            if stored[number] != 1:
                yield Diagnostic(
                    "E307",
                    f"rank {rank} does not hand out {output.name}",
                    None,
                    "one store of it",
                    str(stored[number] or "none"),
                    "every rank gives every output of the step to its caller",
                )


def _undone(plan: Plan) -> Iterator[Diagnostic]:
    exchanged = {exchange.op for exchange in plan.exchanges}
    done = [{item.op for item in p.instructions if isinstance(item, _WITH_OP)} for p in plan.ranks]
    anywhere = exchanged.union(*done)
    states = plan.state_buffers
    leaves_state = {
        item.op
        for program in plan.ranks
        for item in program.instructions
        if isinstance(item, Run) and any(program.views[view].buffer in states for view in item.outputs)
    }
    for number, op in enumerate(plan.ops):
        if number not in anywhere and op.outputs:
            yield _undone_by("no rank", plan, number)
        for rank, mine in enumerate(done):
            if number in leaves_state and number not in mine:
                yield _undone_by(f"rank {rank} never", plan, number)


def _undone_by(who: str, plan: Plan, op: int) -> Diagnostic:
    return Diagnostic(
        "E307",
        f"{who} carries out {plan.ops[op].name}",
        place_of_op(plan, op),
        "an instruction of it",
        "none",
        "what it would make is read all the same, or the op is of no use",
    )


def _unfilled(plan: Plan) -> Iterator[Diagnostic]:
    sent: dict[tuple[int, int], dict[int, list[Region]]] = defaultdict(lambda: defaultdict(list))
    """(op, target) -> what each rank is sent. Chunks of one op fill a target together."""
    first_chunk = _first_chunks(plan)
    handshake: dict[tuple[int, int], int] = {}
    rows: dict[int, dict[int, int]] = defaultdict(dict)
    """Op -> rows that each rank sends."""
    for sender, program in enumerate(plan.ranks):
        for item in program.instructions:
            if isinstance(item, Send):
                filled = first_chunk[item.op], item.target
                sent[filled][item.peer].append(item.region)
                handshake[filled] = plan.exchanges[item.exchange].op
                rows[item.op][sender] = program.views[item.source].region.rows
    groups: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for exchange in plan.exchanges:
        groups[exchange.op].add(plan.groups[exchange.group])
    area, states = cache(_area), plan.state_buffers
    for (number, target), regions in sent.items():
        members_of = ((rank, group) for group in groups[handshake[number, target]] for rank in group)
        for rank, group in sorted(members_of):
            buffer = plan.ranks[rank].buffers[target]
            window = range(buffer.rows)
            if target in states:
                first = int(dict(plan.ops[number].options).get("at", "0"))
                window = range(first, first + sum(rows[number].get(member, 0) for member in group))
            wanted = len(window) * buffer.cols
            found = area(tuple(regions.get(rank, ())), window)
            if found != wanted:
                yield Diagnostic(
                    "E307",
                    f"{plan.ops[number].name} does not fill {buffer.name} of rank {rank}",
                    place_of_op(plan, number),
                    f"{wanted} elements of a batch, in rows {window.start} to {window.stop - 1}",
                    f"{found}",
                    "every member of a group with a share sends to every other, and to itself",
                )


def _area(regions: Sequence[Region], window: range) -> int:
    """How many elements of the rows of ``window`` lie in some of the regions."""
    parts = [box for boxes in parts_of(regions).values() for box in boxes]
    return sum(_rows_in(box, window) * box.cols for box in parts)


def _rows_in(region: Region, window: range) -> int:
    return max(0, min(region.row + region.rows, window.stop) - max(region.row, window.start))
