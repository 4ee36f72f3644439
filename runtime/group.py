"""What the ranks of a group tell each other before a session begins: votes, and comparisons that name both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from stepgraph.planner.diagnostics import CapabilityError, Diagnostic, StepgraphError
from stepgraph.planner.plan import Plan, plan_hash
from stepgraph.runtime.transport.mapping import Transport

Result = TypeVar("Result")


class SelfTestError(StepgraphError):
    """A step did not finish in time before the session was handed out (E611). Raised on all ranks or on none."""


class GroupError(StepgraphError):
    """The ranks of a group disagree, or are too many or too few (E607)."""


def everyone(answer: str) -> list[str]:
    """The answer of every rank, in order."""
    if not dist.is_initialized():
        return [answer]
    answers = [""] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


def meet() -> None:
    """No rank goes on before all have come."""
    if dist.is_initialized():
        dist.barrier()


def agree(what: str, mine: str) -> None:
    """Raises GroupError E607 on every rank where ranks answer differently."""
    answers = everyone(mine)
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise GroupError(
                [
                    Diagnostic(
                        "E607",
                        f"ranks disagree on {what}",
                        None,
                        f"{answers[0]} as on rank 0",
                        f"{answer} on rank {rank}",
                        "start every rank with the same plan and versions",
                    )
                ]
            )


def check_group(plan: Plan) -> None:
    """One process a rank, and the same plan on all."""
    size = dist.get_world_size()
    if size != plan.world_size:
        raise GroupError(
            [
                Diagnostic(
                    "E607",
                    "the process group does not fit the plan",
                    None,
                    f"{plan.world_size} ranks",
                    f"{size} processes",
                    "start one process a rank",
                )
            ]
        )
    agree("the plan", plan_hash(plan))


def together(what: str, work: Callable[[], Result]) -> Result:
    """Do a rank's share of ``what``; where it fails on one rank, it fails on all. Not for work that meets the others.

    Raises:
        StepgraphError: this rank's own; E607 on the others, which names the rank; E606 for want of memory.
    """
    failure: StepgraphError | None = None
    try:
        result = work()
    except StepgraphError as error:
        failure = error
    except torch.OutOfMemoryError as error:
        found = Diagnostic("E606", f"no memory for {what}", None, "", str(error).splitlines()[0])
        failure = CapabilityError([found])
    told = failure.diagnostics[0] if failure else None
    answers = everyone(f"{told.code} {told.message}: {told.got}" if told else "")
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if answer:
            raise GroupError([Diagnostic("E607", f"rank {rank} failed at {what}", None, "", answer)])
    return result


def choose(
    wanted: str, transports: Sequence[Transport], attempt: Callable[[Transport], None]
) -> tuple[Transport, tuple[str, ...]]:
    """The first transport that every rank can use and whose ``attempt`` passes its self-test, and why those before it
    were passed over.

    Raises:
        CapabilityError: E606 where there is none.
    """
    reasons: list[str] = []
    for transport in transports:
        if wanted not in ("auto", transport.name):
            reasons.append(f"{transport.name}: the schedule wants {wanted}")
            continue
        answers = everyone(transport.unavailable() or "")
        missing = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
        if missing:
            reasons.append(f"{transport.name}: {missing[0]}")
            continue
        try:
            attempt(transport)
        except SelfTestError as error:
            reasons.append(f"{transport.name}: {error.diagnostics[0].message}, {error.diagnostics[0].got}")
            continue
        return transport, tuple(reasons)
    raise CapabilityError(
        [Diagnostic("E606", f"no transport '{wanted}' that every rank can use", None, "", "; ".join(reasons))]
    )
