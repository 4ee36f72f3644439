"""What the ranks of a group tell each other before a session begins: votes, and comparisons that name both sides."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from stepgraph.planner.diagnostics import CapabilityError, Diagnostic, StepgraphError
from stepgraph.planner.plan import Plan, plan_hash
from stepgraph.runtime.transport.mapping import Transport


class GroupError(StepgraphError):
    """The ranks of a group disagree, or are too many or too few (E607)."""


def everyone(answer: str) -> list[str]:
    """The answer of every rank, in order."""
    answers = [""] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


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


def choose(wanted: str, transports: Sequence[Transport]) -> tuple[Transport, tuple[str, ...]]:
    """The first transport that every rank can use, and why those before it were passed over.

    Raises:
        CapabilityError: E606 where there is none.
    """
    reasons: list[str] = []
    for transport in transports:
        if wanted not in ("auto", transport.name):
            continue
        answers = everyone(transport.unavailable() or "")
        missing = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
        if not missing:
            return transport, tuple(reasons)
        reasons.append(f"{transport.name}: {missing[0]}")
    raise CapabilityError(
        [Diagnostic("E606", f"no transport '{wanted}' that every rank can use", None, "", "; ".join(reasons))]
    )
