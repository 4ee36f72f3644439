"""What the verifier has to tell, and how an instruction is named."""

from __future__ import annotations

from collections.abc import Iterable

from stepgraph.planner.diagnostics import Diagnostic, Place
from stepgraph.planner.plan import (
    Collective,
    Drop,
    Instruction,
    Load,
    Plan,
    RankProgram,
    Run,
    Send,
    Store,
    WaitEvent,
)
from stepgraph.planner.verify.counterexample import Unordered
from stepgraph.planner.verify.order import Order, Step

MAX_FINDINGS = 5
"""Of one code; more tell nothing new."""

CODES = {
    "E301": "race on a target",
    "E302": "race on local memory",
    "E303": "race at the wrap from one replay to the next",
    "E304": "memory is dropped before its last use is done, twice, or on another stream than its own",
    "E306": "data is overwritten before it is read",
    "E307": "data is read before it is written",
    "E308": "an op is left out, or done twice",
    "E401": "deadlock",
    "E402": "exchanges of one rank are not ordered",
    "E403": "two ranks have exchanges in different orders",
    "E404": "a flag's write, wait and reset do not match one to one",
    "E405": "a flag is written again before its writer can know of its reset",
    "E406": "an exchange does not span its group",
    "E407": "an event is not recorded once and then waited for",
    "E408": "a stream works before it has entered the capture",
    "E409": "a stream is not joined at the end",
    "E410": "a copy is not closed by the exchange that it names",
}


def first_of_each(findings: Iterable[Diagnostic | Unordered], most: int = MAX_FINDINGS) -> list[Diagnostic | Unordered]:
    """The first few findings of each code."""
    counts: dict[str, int] = {}
    kept: list[Diagnostic | Unordered] = []
    for finding in findings:
        counts[finding.code] = counts.get(finding.code, 0) + 1
        if counts[finding.code] <= most:
            kept.append(finding)
    return kept


def op_of(plan: Plan, item: Instruction) -> int | None:
    """The op that an instruction belongs to, if it belongs to one."""
    op = getattr(item, "op", None)
    if op is None and getattr(item, "exchange", None) is not None:
        op = plan.exchanges[getattr(item, "exchange")].op  # noqa: B009
    return op if isinstance(op, int) else None


def name(plan: Plan, step: Step, when: str | None = None) -> str:
    """An instruction with everything that tells it from others; ``when`` says which replay, else its number does."""
    item = plan.ranks[step.rank].instructions[step.number]
    op = op_of(plan, item)
    what: str = item.do
    if op is not None:
        found = plan.ops[op]
        what = f"{item.do} {found.label}, line {found.line}"
    where = f"rank {step.rank}, stream {plan.streams[item.stream]}, instruction {step.number}"
    return f"{what} ({where}, {when or f'replay {step.replay}'})"


def name_in(order: Order, step: Step) -> str:
    """An instruction of one of several replays."""
    return name(order.plans[step.replay], step, order.titles[step.replay])


def place(plan: Plan, step: Step) -> Place | None:
    """The line of the schedule that an instruction comes from, or the one that it is there for."""
    op = op_of(plan, plan.ranks[step.rank].instructions[step.number])
    op = _beside(plan, step) if op is None else op
    return None if op is None else place_of_op(plan, op)


def _beside(plan: Plan, step: Step) -> int | None:
    """The op that an instruction without one is there for: the last one that touches what is dropped, the next one on
    a stream that waits for an event, else the last one; or the nearest the other way."""
    program = plan.ranks[step.rank]
    item, before = program.instructions[step.number], range(step.number - 1, -1, -1)
    behind = range(step.number + 1, len(program.instructions))
    for number in (*behind, *before) if isinstance(item, WaitEvent) else (*before, *behind):
        other = program.instructions[number]
        op = op_of(plan, other)
        fits = item.buffer in _touched(program, other) if isinstance(item, Drop) else other.stream == item.stream
        if op is not None and fits:
            return op
    return None


def _touched(program: RankProgram, item: Instruction) -> set[int]:
    """The buffers of its own rank that an instruction reads or writes."""
    views: tuple[int, ...] = ()
    match item:
        case Run():
            views = (*item.inputs, *item.outputs)
        case Load() | Store():
            views = (item.view,)
        case Send():
            views = (item.source,)
        case Collective():
            views = tuple(part.view for part in (*item.outgoing, *item.incoming))
    return {program.views[view].buffer for view in views}


def place_of_op(plan: Plan, op: int) -> Place:
    """The line of the schedule on which an op stands."""
    line = plan.ops[op].line
    lines = plan.source.text.split("\n")
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    indent = len(text) - len(text.lstrip())
    return Place(plan.source.file, line, indent + 1, max(1, len(text.strip())), text)
