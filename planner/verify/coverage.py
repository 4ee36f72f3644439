"""Every op that makes something is carried out, and what an op sends fills its target on every rank of its groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from stepgraph.planner.diagnostics import Diagnostic
from stepgraph.planner.plan import Collective, Load, Plan, Region, Run, Send, Store
from stepgraph.planner.verify.cells import Place, cells_of, parts_of
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
    """E308 for an op that nobody carries out, or a rank does twice, or does not where it leaves a state; and E307 for a
    target that an op's sends fill in part: of a state, from the op's row `at` on, as many rows as are sent; and E306
    where parts meet, or an instruction changes what it reads, or something else lies in a state. Either for a state
    that is taken for another."""
    yield from _undone(plan)
    yield from _unfilled(plan)
    yield from _overlapping(plan)
    yield from _over_itself(plan)
    yield from _other_states(plan)
    yield from _shared_states(plan)


def _undone(plan: Plan) -> Iterator[Diagnostic]:
    states = plan.state_buffers
    exchanged = {exchange.op for exchange in plan.exchanges}
    done: list[Counter[int]] = []
    """By rank: how often it carries out the stage of each op, or has a part in the op."""
    leaves_state: set[int] = set()
    for program in plan.ranks:
        runs = [item for item in program.instructions if isinstance(item, Run)]
        others = {item.op for item in program.instructions if isinstance(item, Load | Store | Send | Collective)}
        done.append(Counter(run.op for run in runs) + Counter(others))
        leaves_state |= {run.op for run in runs if any(program.views[v].buffer in states for v in run.outputs)}
    for number, op in enumerate(plan.ops):
        counts = [found[number] for found in done]
        if op.outputs and number not in exchanged and not any(counts):
            yield _not_once(plan, number, f"no rank carries out {op.label}", "none")
        for rank, count in enumerate(counts):
            if count > 1:
                yield _not_once(plan, number, f"rank {rank} carries out {op.label} more than once", str(count))
            elif count == 0 and number in leaves_state:
                yield _not_once(plan, number, f"rank {rank} leaves out {op.label}, which keeps a state", "none")


def _not_once(plan: Plan, op: int, message: str, got: str) -> Diagnostic:
    place, hint = place_of_op(plan, op), "give every rank one instruction of every op"
    return Diagnostic("E308", message, place, "one instruction of it on every rank", got, hint)


def _unfilled(plan: Plan) -> Iterator[Diagnostic]:
    sent: dict[tuple[int, int], dict[int, set[tuple[int, Send]]]] = defaultdict(lambda: defaultdict(set))
    """(op, target) -> what each rank is sent, and by whom: a copy done twice once. Chunks of one op fill a target
    together."""
    first_chunk = _first_chunks(plan)
    closing: dict[tuple[int, int], set[int]] = defaultdict(set)
    """Likewise: the ops whose exchanges its copies name."""
    named: dict[int, int] = {}
    """By op: the op whose exchanges its copies name, which is one."""
    parted: set[int] = set()
    rows: dict[int, dict[int, int]] = defaultdict(dict)
    """Op -> rows that each rank has to send."""
    made = _rows_made(plan)
    makers = [{maker for operand in op.inputs for maker in operand.made_by} for op in plan.ops]
    for sender, program in enumerate(plan.ranks):
        for item in program.instructions:
            if isinstance(item, Send):
                filled = first_chunk[item.op], item.target
                sent[filled][item.peer].add((sender, replace(item, stream=0)))
                closing[filled].add(plan.exchanges[item.exchange].op)
                if named.setdefault(item.op, plan.exchanges[item.exchange].op) != plan.exchanges[item.exchange].op:
                    parted.add(item.op)
                view = program.views[item.source]
                whole = [
                    made[sender, maker].get(view.buffer, 0) for maker in makers[item.op] if (sender, maker) in made
                ]
                rows[item.op][sender] = max([view.region.rows, *whole])
    groups: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for exchange in plan.exchanges:
        groups[exchange.op].add(plan.groups[exchange.group])
    for number in sorted(parted):
        yield Diagnostic(
            "E410",
            f"copies of {plan.ops[number].label} name exchanges of several ops",
            place_of_op(plan, number),
            "one handshake of each group",
            "several",
            "let all copies of an op name the exchange that comes behind them",
        )
    area, states = cache(_area), plan.state_buffers
    for (number, target), copies in sent.items():
        spanned = {members for op in closing[number, target] for members in groups[op]}
        for rank, group in sorted((rank, members) for members in spanned for rank in members):
            buffer = plan.ranks[rank].buffers[target]
            window = range(buffer.rows)
            if target in states:
                first = int(dict(plan.ops[number].options).get("at", "0"))
                window = range(first, first + sum(rows[number].get(member, 0) for member in group))
                if rank not in rows[number] and any((rank, maker) in made for maker in makers[number]):
                    yield Diagnostic(
                        "E307",
                        f"rank {rank} sends nothing of {plan.ops[number].label}",
                        place_of_op(plan, number),
                        f"its share of the rows of {buffer.name}",
                        "no copy",
                        "every member of a group with a share sends to every other, and to itself",
                    )
            wanted = len(window) * buffer.cols
            copied = tuple(copy.region for _, copy in sorted(copies.get(rank, ()), key=str))
            found = area(copied, window)
            if sum(_rows_in(region, window) * region.cols for region in copied) > found:
                yield Diagnostic(
                    "E306",
                    f"{plan.ops[number].name} sends over what it has sent into {buffer.name} of rank {rank}",
                    place_of_op(plan, number),
                    "copies to places of their own",
                    "two that meet",
                    "send every part once",
                )
            if found != wanted:
                yield Diagnostic(
                    "E307",
                    f"{plan.ops[number].name} does not fill {buffer.name} of rank {rank}",
                    place_of_op(plan, number),
                    f"{wanted} elements of a batch, in rows {window.start} to {window.stop - 1}",
                    f"{found}",
                    "every member of a group with a share sends to every other, and to itself",
                )


def _overlapping(plan: Plan) -> Iterator[Diagnostic]:
    """What members of a collective give a rank, if it is no sum, comes to places of their own."""
    area = cache(_area)
    for rank, program in enumerate(plan.ranks):
        for item in program.instructions:
            if not isinstance(item, Collective) or item.reduce:
                continue
            into: dict[int, list[Region]] = defaultdict(list)
            for part in item.incoming:
                into[program.views[part.view].buffer].append(part.region)
            for number, regions in into.items():
                buffer = program.buffers[number]
                if sum(region.rows * region.cols for region in regions) > area(tuple(regions), range(buffer.rows)):
                    yield Diagnostic(
                        "E306",
                        f"two parts of {plan.ops[item.op].label} meet in {buffer.name} of rank {rank}",
                        place_of_op(plan, item.op),
                        "parts that come to places of their own",
                        "two that meet",
                        "lay every part down beside the others",
                    )


def _over_itself(plan: Plan) -> Iterator[Diagnostic]:
    """What an instruction reads lies apart from what it writes there and then: nothing orders the bytes of a copy, or
    what a stage reads and what it changes in place. What a stage makes anew, and what members of a collective give,
    comes to its place when all is read."""
    for rank, program in enumerate(plan.ranks):
        where = [(rank, view.buffer, view.region) for view in program.views]
        for item in program.instructions:
            pairs: list[tuple[Place, Place]] = []
            if isinstance(item, Send) and item.peer == rank:
                source = (rank, program.views[item.source].buffer, item.source_region)
                pairs = [(source, (rank, item.target, item.region))]
            elif isinstance(item, Run):
                changed = dict.fromkeys(view for view in item.outputs if view in item.inputs)
                pairs = [(where[v], where[c]) for c in changed for v in dict.fromkeys(item.inputs) if v != c]
            meeting = next((pair for pair in pairs if _meet(plan, *pair)), None)
            if meeting is not None and isinstance(item, Run | Send):
                read, written = (program.buffers[buffer].name for _, buffer, _ in meeting)
                yield Diagnostic(
                    "E306",
                    f"{plan.ops[item.op].label} writes over what it reads on rank {rank}",
                    place_of_op(plan, item.op),
                    f"{read} apart from {written}, where it writes",
                    "bytes that both have",
                    "let it write to another place",
                )


def _meet(plan: Plan, one: Place, two: Place) -> bool:
    """Whether two regions on a rank share a byte."""
    (_, first, a), (_, second, b) = one, two
    if first == second:
        return (
            max(a.row, b.row) < min(a.row + a.rows, b.row + b.rows)
            and max(a.col, b.col) < min(a.col + a.cols, b.col + b.cols)
        )  # fmt: skip
    return max(first, second) < len(plan.targets) and bool(cells_of([plan], [[one, two]]).overlaps)


def _other_states(plan: Plan) -> Iterator[Diagnostic]:
    """An op reads and writes the states that it names, in its layer: nothing in a step tells who has left what is in
    one."""
    states = {state.buffer: state.name.partition("@")[0] for state in plan.states}
    for rank, program in enumerate(plan.ranks if states else ()):
        for item in program.instructions:
            if not isinstance(item, Run | Send | Store):
                continue
            op, views = plan.ops[item.op], program.views
            inputs = item.inputs if isinstance(item, Run) else (item.source if isinstance(item, Send) else item.view,)
            into = [views[view].buffer for view in item.outputs] if isinstance(item, Run) else []
            into += [item.target] if isinstance(item, Send) else []
            reads = [(views[view].buffer, (one.name,)) for view, one in zip(inputs, op.inputs, strict=False)]
            writes = [(buffer, op.outputs) for buffer in into if op.outputs]
            for code, done, pairs in (("E307", "reads", reads), ("E306", "writes", writes)):
                for buffer, names in pairs:
                    own = [*names, *(f"{name}[{op.layer}]" for name in names)]  # of the step, or of the layer
                    if states.get(buffer, own[0]) not in own:
                        meant = [name for name in own if name in states.values()] or names
                        message = f"rank {rank} {done} {states[buffer]} in {op.label}, which names another tensor"
                        hint = "let it take the one that it names"
                        place, got = place_of_op(plan, item.op), states[buffer]
                        yield Diagnostic(code, message, place, ", ".join(meant), got, hint)


def _shared_states(plan: Plan) -> Iterator[Diagnostic]:
    """What a step leaves in a state outlives it, whether or not this step reads it again: nothing else lies there."""
    for state in plan.states:
        if state.buffer >= len(plan.targets):
            continue
        kept = plan.targets[state.buffer]
        for number, other in enumerate(plan.targets):
            later = number > state.buffer or number not in plan.state_buffers  # two states are told of once
            apart = kept.offset >= other.offset + other.nbytes or other.offset >= kept.offset + kept.nbytes
            if number != state.buffer and later and not apart:
                yield Diagnostic(
                    "E306",
                    f"{other.name} lies where the step leaves the state {state.name}",
                    None,
                    f"{state.name} at bytes {kept.offset} to {kept.offset + kept.nbytes}, and nothing else",
                    f"{other.name} at bytes {other.offset} to {other.offset + other.nbytes}",
                    "give every state a place in the arena that nothing else has",
                )


def _rows_made(plan: Plan) -> dict[tuple[int, int], dict[int, int]]:
    """(rank, op) -> for each buffer that its stage or load writes with any element, how many rows."""
    found: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for rank, program in enumerate(plan.ranks):
        for item in program.instructions:
            if not isinstance(item, Run | Load):
                continue
            for view in item.outputs if isinstance(item, Run) else (item.view,):
                buffer, region = program.views[view].buffer, program.views[view].region
                if region.rows and region.cols:
                    found[rank, item.op][buffer] = max(region.rows, found[rank, item.op].get(buffer, 0))
    return found


def _area(regions: Sequence[Region], window: range) -> int:
    """How many elements of the rows of ``window`` lie in some of the regions."""
    parts = [box for boxes in parts_of(regions).values() for box in boxes]
    return sum(_rows_in(box, window) * box.cols for box in parts)


def _rows_in(region: Region, window: range) -> int:
    return max(0, min(region.row + region.rows, window.stop) - max(region.row, window.start))
