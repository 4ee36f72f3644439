"""Runs a plan's denoising loop over all ranks, on cpu or on GPUs, and holds it against the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.kernels.unsharded import Unsharded
from stepgraph.planner.compile import compile_schedule, compile_set
from stepgraph.planner.diagnostics import Diagnostic, PlanError, StepgraphError
from stepgraph.planner.plan import Plan
from stepgraph.planner.plan_set import version as version_of
from stepgraph.planner.schedule import Schedule, read_schedule
from stepgraph.runtime.cpu_memory import Fault, Race
from stepgraph.runtime.denoise import denoise, sigma_pairs
from stepgraph.runtime.facts import CaptureFacts
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.interleave import Interleaving
from stepgraph.runtime.session import DeviceName, NamedLoop, Session, cuda_lacks, need_cuda

if TYPE_CHECKING:
    from stepgraph.runtime.rank_run import RankRun

SLACK = 4.0
"""How many times the error of the unsharded model in the plan's dtype a sharded run may have."""


@dataclass(frozen=True, slots=True)
class RunReport:
    device: str
    ranks: int
    steps: int
    seed: int
    max_abs_error: float
    """Largest difference of any output of any step from the unsharded model in float64."""
    tolerance: float
    """SLACK times what the unsharded model in the plan's own dtype differs by, and at least 8 roundings of the largest
    output."""
    movement_exact: bool
    movements_checked: int
    races: tuple[Race, ...] = ()
    faults: tuple[Fault, ...] = ()
    facts: CaptureFacts | None = None
    """On cuda: of rank 0."""
    captured_equals_eager: bool | None = None
    """On cuda, on every rank and in every step, bit for bit; None where nothing was captured."""

    @property
    def ok(self) -> bool:
        agrees = self.max_abs_error <= self.tolerance  # false for NaN
        found = self.races or self.faults or self.captured_equals_eager is False
        return agrees and self.movement_exact and not found


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that a plan was compiled from: the version of it that the plan is.

    Raises:
        PlanError: E156 where it has none, as in a plan that was edited.
    """
    source = plan.source
    versions = read_schedule(source.text, source.file, source.overrides).versions()
    found = [one for one in versions if (one.variant, one.bucket) == (source.variant, source.bucket)]
    if not found:
        raise PlanError([_other_schedule(plan, "no such version")])
    return found[0]


def _other_schedule(plan: Plan, got: str) -> Diagnostic:
    expected = "the one that it was compiled from: the unsharded model is made of it"
    hint = "edit instructions and memory, and leave the source, ops, inputs and outputs as they are"
    return Diagnostic(
        "E156", f"{version_of(plan)} does not fit the schedule that it carries", None, expected, got, hint
    )


@contextmanager
def held_against_schedule(plans: Sequence[Plan]) -> Iterator[None]:
    """Around what makes a model of the schedule in a plan: where that fails and a plan is not what its schedule
    compiles to, the plan is to blame.

    Raises:
        PlanError: E156.
    """
    try:
        yield
    except (StepgraphError, MemoryError):
        raise
    except Exception as error:
        for plan in plans:
            if not _is_compiled(plan):
                raise PlanError([_other_schedule(plan, f"another: {type(error).__name__}: {error}"[:200])]) from error
        raise


def _is_compiled(plan: Plan) -> bool:
    source = plan.source
    whole = read_schedule(source.text, source.file, source.overrides)
    several = compile_set(whole).plans if whole.variants or whole.buckets else ()
    return plan in (compile_schedule(schedule_of(plan)), *several)


def _unsharded_loop(plan: Plan, model: Unsharded, inputs: dict[str, Tensor], steps: int) -> list[tuple[Tensor, ...]]:
    seen: list[tuple[Tensor, ...]] = []
    loop = denoise(plan, {name: tensor.to(model.dtype) for name, tensor in inputs.items()}, sigma_pairs(steps), seen)
    try:
        named = next(loop)
        while True:
            named = loop.send(model(named))
    except StopIteration:
        return seen


def largest_error(seen: Sequence[tuple[Tensor, ...]], exact: Sequence[tuple[Tensor, ...]]) -> float:
    """Largest difference of any output of any step; NaN where there is one, 0 where there is no output."""
    pairs = [pair for step in zip(seen, exact, strict=True) for pair in zip(*step, strict=True)]
    errors = [(got.cpu().double() - want.cpu().double()).abs().max() for got, want in pairs]
    return float(torch.stack(errors).max()) if errors else 0.0  # Python's max would pass over NaN


def tolerance_of(
    rounded: Sequence[tuple[Tensor, ...]], exact: Sequence[tuple[Tensor, ...]], dtype: torch.dtype
) -> float:
    """SLACK times what the unsharded model in ``dtype`` differs by, and at least 8 roundings of the largest output."""
    largest = max((float(output.abs().max()) for outputs in exact for output in outputs), default=0.0)
    return max(SLACK * largest_error(rounded, exact), 8 * torch.finfo(dtype).eps * largest)


def simulate(
    plan: Plan,
    steps: int,
    seed: int,
    device: DeviceName = "cpu",
    eager: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    interleaving: Interleaving | None = None,
) -> RunReport | None:
    """Run ``steps`` denoising steps over all ranks with made-up weights and inputs. On cpu they are interleaved by
    ``seed`` in this process, after the turns of ``interleaving``; on cuda each is a process, started here unless
    torchrun has started this one as a rank. None in processes that are ranks other than 0.

    Raises:
        StepgraphError: where the plan can't be run, or deadlocks.
    """
    if device == "cuda":
        need_cuda()
    if device == "cpu" or cuda_lacks():
        return _on_cpu(plan, steps, seed, progress, interleaving)
    return _on_gpus(plan, steps, seed, eager, progress)


def _on_cpu(
    plan: Plan, steps: int, seed: int, progress: Callable[[str], None], interleaving: Interleaving | None
) -> RunReport:
    inputs = random_inputs(plan, seed)
    every: list[list[tuple[Tensor, ...]]] = [[] for _ in plan.ranks]

    def loop(rank: int) -> NamedLoop:
        return denoise(plan, inputs, sigma_pairs(steps), every[rank])

    with torch.no_grad():
        progress(f"running {plan.world_size} ranks, {steps} steps")
        with Session(plan, device="cpu", seed=seed) as session:
            if interleaving is not None:
                session.follow(interleaving)
            session.drive(loop)
            report = session.report
    error, tolerance = _against_unsharded(plan, steps, seed, every, torch.device("cpu"), progress)
    return RunReport(
        device="cpu",
        ranks=plan.world_size,
        steps=steps,
        seed=seed,
        max_abs_error=error,
        tolerance=tolerance,
        movement_exact=report.movement_exact,
        movements_checked=report.movements_checked,
        races=tuple(report.races),
        faults=tuple(report.faults),
    )


def _on_gpus(plan: Plan, steps: int, seed: int, eager: bool, progress: Callable[[str], None]) -> RunReport | None:
    from stepgraph.runtime.launch import run_ranks

    progress(f"running {plan.world_size} ranks, {steps} steps")
    runs = run_ranks(plan.world_size, partial(_run_rank, plan, steps, seed, eager))
    return None if runs is None else report_of(plan, steps, seed, runs, torch.device("cuda"), progress)


def report_of(
    plan: Plan,
    steps: int,
    seed: int,
    runs: Sequence[RankRun],
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
) -> RunReport:
    """What the ranks of a run on cuda saw, held against the unsharded model on ``device``."""
    every = [list(run.outputs) for run in runs]
    error, tolerance = _against_unsharded(plan, steps, seed, every, device, progress)
    same = [run.captured_equals_eager for run in runs]
    return RunReport(
        device="cuda",
        ranks=plan.world_size,
        steps=steps,
        seed=seed,
        max_abs_error=error,
        tolerance=tolerance,
        movement_exact=all(run.movement_exact for run in runs),
        movements_checked=sum(run.movements_checked for run in runs),
        facts=runs[0].facts,
        captured_equals_eager=None if None in same else all(same),
    )


def _run_rank(plan: Plan, steps: int, seed: int, eager: bool, rank: int) -> RankRun:
    from stepgraph.runtime.rank_run import run_rank

    return run_rank(plan, steps, seed, eager)


def _against_unsharded(
    plan: Plan,
    steps: int,
    seed: int,
    every: Sequence[list[tuple[Tensor, ...]]],
    device: torch.device,
    progress: Callable[[str], None],
) -> tuple[float, float]:
    """(largest error of any rank's outputs, tolerance)."""
    inputs, schedule = {n: t.to(device) for n, t in random_inputs(plan, seed).items()}, schedule_of(plan)
    with torch.no_grad(), held_against_schedule([plan]):
        progress("running the unsharded model in float64")
        exact = _unsharded_loop(plan, Unsharded(schedule, seed, torch.float64, device), inputs, steps)
        progress(f"running the unsharded model in {plan.dtype}")
        own = Unsharded(schedule, seed, torch_dtype(plan.dtype), device)
        rounded = _unsharded_loop(plan, own, inputs, steps)
        seen = [step for rank in every for step in rank]
        return largest_error(seen, [*exact] * len(every)), tolerance_of(rounded, exact, torch_dtype(plan.dtype))
