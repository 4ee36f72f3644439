"""What the ranks of a group tell each other before a session begins: votes, and comparisons that name both sides."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from stepgraph.planner.diagnostics import CapabilityError, Diagnostic, StepgraphError
from stepgraph.planner.plan import Plan, plan_hash
from stepgraph.runtime.transport.mapping import Transport

Result = TypeVar("Result")
NO_MEMORY = "E606 no memory"
"""How ranks are told that another has run out of memory."""


class SelfTestError(StepgraphError):
    """A transport could not be set up, or a step did not finish in time before the session was handed out (E611).
    Raised on all ranks or on none."""


class StuckError(StepgraphError):
    """A step did not finish, and could not be released: the GPU's work will not end while the ranks live (E611)."""


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


def check_group(plans: Sequence[Plan]) -> None:
    """One process a rank, and the same plans on all."""
    size, world_size = dist.get_world_size(), plans[0].world_size
    if size != world_size:
        raise GroupError(
            [
                Diagnostic(
                    "E607",
                    "the process group does not fit the plan",
                    None,
                    f"{world_size} ranks",
                    f"{size} processes",
                    "start one process a rank",
                )
            ]
        )
    agree("the plan", " ".join(plan_hash(plan) for plan in plans))


def together(what: str, work: Callable[[], Result]) -> Result:
    """Do a rank's share of ``what``; where it fails on one rank, it fails on all. Not for work that meets the others.

    Raises:
        StepgraphError: this rank's own; E607 on the others, which names the rank; E606 for an error of CUDA or want of
            memory.
    """
    result, failure = _tried(what, work)
    _all_well(what, failure, everyone(told(failure)))
    assert result is not None
    return result[0]


def attempt(what: str, work: Callable[[], Result]) -> Result:
    """As ``together``, for a step of a transport's set-up: where it fails, all can take the next transport. Want of
    memory fails here too: the next one wants as much.

    Raises:
        SelfTestError: E611 on every rank where it fails on one.
    """
    result, failure = _tried(what, work)
    answers = everyone(told(failure))
    if any(answer.startswith(NO_MEMORY) for answer in answers):
        _all_well(what, failure, answers)
    failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
    if failed:
        raise SelfTestError([Diagnostic("E611", f"{what} failed", None, "", failed[0])]) from failure
    assert result is not None
    return result[0]


def _tried(what: str, work: Callable[[], Result]) -> tuple[tuple[Result] | None, Exception | None]:
    try:
        return (work(),), None
    except Exception as error:
        return None, ours(what, error)


def _all_well(what: str, failure: Exception | None, answers: Sequence[str]) -> None:
    """Raises this rank's failure, or E607 for that of another."""
    if failure is not None:
        raise failure
    blame(what, answers)


def told(failure: Exception | None) -> str:
    """What the other ranks are told of an error; empty for none."""
    if isinstance(failure, StepgraphError):
        first = failure.diagnostics[0]
        return f"{first.code} {first.message}: {first.got}"
    return _line(failure) if failure is not None else ""


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def ours(what: str, error: Exception) -> Exception:
    """What a user sees of an error: errors of CUDA and torch, and want of memory, are told as E606."""
    if isinstance(error, torch.OutOfMemoryError):
        found = CapabilityError([Diagnostic("E606", f"no memory for {what}", None, "", _line(error))])
    elif isinstance(error, RuntimeError):
        found = CapabilityError([Diagnostic("E606", f"{what} failed", None, "", _line(error))])
    else:
        return error
    found.__cause__ = error
    return found


def blame(what: str, answers: Sequence[str]) -> None:
    """Raises GroupError E607 for the first rank that tells of a failure."""
    for rank, answer in enumerate(answers):
        if answer:
            raise GroupError([Diagnostic("E607", f"rank {rank} failed at {what}", None, "", answer)])


def host() -> str:
    """This machine, as one name among those of a group."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def choose(
    wanted: str, transports: Sequence[Transport], attempt: Callable[[Transport], None]
) -> tuple[Transport, tuple[str, ...]]:
    """The first transport that every rank can use and whose ``attempt`` passes its self-test, and why those before it
    were passed over.

    Raises:
        CapabilityError: E606 where there is none.
    """
    reasons: list[str] = []
    hosts = len(set(everyone(host())))
    for transport in transports:
        if wanted not in ("auto", transport.name):
            reasons.append(f"{transport.name}: the schedule wants {wanted}")
            continue
        if transport.one_host and hosts > 1:
            reasons.append(f"{transport.name}: reaches the GPUs of one machine, and the ranks are on {hosts}")
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
