"""One rank of a plan alone on a GPU, with stand-ins for its peers: what a step costs it at its true shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from stepgraph.planner.plan import Plan
from stepgraph.runtime.facts import CaptureFacts
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import CapturedStep, Session, need_cuda

WARM_STEPS = 2


@dataclass(frozen=True, slots=True)
class SoloReport:
    facts: CaptureFacts
    steps: int
    captured_ms: float
    """Median of a captured step, on the GPU, inputs copied in."""
    eager_ms: float
    """The same, issued instruction by instruction."""
    peak_bytes: int
    """Most that tensors of the captured session took, weights and stand-ins among them."""


def run_solo(plan: Plan, steps: int, seed: int, progress: Callable[[str], None] = lambda _: None) -> SoloReport:
    """Time ``steps`` steps of rank 0, captured and eager. Weights are drawn on the GPU.

    Raises:
        StepgraphError: as ``Session`` does.
    """
    need_cuda()
    progress("capturing the step")
    torch.cuda.reset_peak_memory_stats()
    with Session(plan, device="cuda", seed=seed, solo=True) as session:
        captured = _time(session.capture(outputs="view"), plan, steps, seed)
        facts = session.facts
        peak = torch.cuda.max_memory_allocated()
    progress("running eagerly")
    with Session(plan, device="cuda", seed=seed, solo=True, eager=True) as session:
        eager = _time(session.capture(outputs="view"), plan, steps, seed)
    return SoloReport(facts, steps, captured, eager, peak)


def _time(step: CapturedStep, plan: Plan, steps: int, seed: int) -> float:
    """Median milliseconds of a step."""
    inputs = {name: tensor.cuda() for name, tensor in random_inputs(plan, seed).items()}
    found: list[float] = []
    for number in range(WARM_STEPS + steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(**inputs)
        end.record()
        end.synchronize()
        if number >= WARM_STEPS:
            found.append(start.elapsed_time(end))
    return median(found)
