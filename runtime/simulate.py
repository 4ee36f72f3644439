"""Runs a plan's denoising loop on the cpu device and holds it against the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stepgraph.kernels.unsharded import Unsharded
from stepgraph.planner.diagnostics import CapabilityError, Diagnostic
from stepgraph.planner.plan import Plan
from stepgraph.planner.schedule import Schedule, read_schedule
from stepgraph.runtime.cpu_memory import Fault, Race, torch_dtype
from stepgraph.runtime.denoise import denoise, sigma_pairs
from stepgraph.runtime.session import DeviceName, NamedLoop, Session, random_inputs

SLACK = 4.0
"""How many times the error of the unsharded model in the plan's dtype a sharded run may have."""


@dataclass(frozen=True, slots=True)
class RunReport:
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
    races: tuple[Race, ...]
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        agrees = self.max_abs_error <= self.tolerance  # false for NaN
        return agrees and self.movement_exact and not self.races and not self.faults


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that a plan was compiled from."""
    return read_schedule(plan.source.text, plan.source.file, plan.source.overrides)


def _unsharded_loop(plan: Plan, model: Unsharded, inputs: dict[str, Tensor], steps: int) -> list[tuple[Tensor, ...]]:
    seen: list[tuple[Tensor, ...]] = []
    loop = denoise(plan, {name: tensor.to(model.dtype) for name, tensor in inputs.items()}, sigma_pairs(steps), seen)
    try:
        named = next(loop)
        while True:
            named = loop.send(model(named))
    except StopIteration:
        return seen


def _error(seen: list[tuple[Tensor, ...]], exact: list[tuple[Tensor, ...]]) -> float:
    pairs = [pair for step in zip(seen, exact, strict=True) for pair in zip(*step, strict=True)]
    return max(float((got.double() - want.double()).abs().max()) for got, want in pairs)


def simulate(
    plan: Plan, steps: int, seed: int, device: DeviceName = "cpu", progress: Callable[[str], None] = lambda _: None
) -> RunReport:
    """Run ``steps`` denoising steps over all ranks, interleaved by ``seed``, with made-up weights and inputs.

    Raises:
        StepgraphError: where the plan can't be run, or deadlocks.
    """
    if device == "cuda":
        hint = "open a Session in each process of a group, or run with --device cpu"
        raise CapabilityError(
            [Diagnostic("E601", "simulated runs are on the cpu device", None, "cpu or auto", "cuda", hint)]
        )
    inputs, schedule = random_inputs(plan, seed), schedule_of(plan)
    every: list[list[tuple[Tensor, ...]]] = [[] for _ in plan.ranks]

    def loop(rank: int) -> NamedLoop:
        return denoise(plan, inputs, sigma_pairs(steps), every[rank])

    with torch.no_grad():
        progress(f"running {plan.world_size} ranks, {steps} steps")
        with Session(plan, device="cpu", seed=seed) as session:
            session.drive(loop)
            report = session.report
        progress("running the unsharded model in float64")
        exact = _unsharded_loop(plan, Unsharded(schedule, seed), inputs, steps)
        progress(f"running the unsharded model in {plan.dtype}")
        rounded = _unsharded_loop(plan, Unsharded(schedule, seed, torch_dtype(plan.dtype)), inputs, steps)
    largest = max(float(output.abs().max()) for outputs in exact for output in outputs)
    floor = 8 * torch.finfo(torch_dtype(plan.dtype)).eps * largest
    return RunReport(
        ranks=plan.world_size,
        steps=steps,
        seed=seed,
        max_abs_error=max(_error(seen, exact) for seen in every),
        tolerance=max(SLACK * _error(rounded, exact), floor),
        movement_exact=report.movement_exact,
        movements_checked=report.movements_checked,
        races=tuple(report.races),
        faults=tuple(report.faults),
    )
