"""One rank's share of a run on the cuda device: the loop eagerly, watched, and the loop as captured replays."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.planner.plan import Plan
from stepgraph.runtime.cuda import CudaRank
from stepgraph.runtime.cuda_backend import CudaBackend
from stepgraph.runtime.denoise import denoise, sigma_pairs
from stepgraph.runtime.facts import CaptureFacts
from stepgraph.runtime.inputs import NamedInputs, random_inputs
from stepgraph.runtime.movement import Moved, endings, moved_right, widths
from stepgraph.runtime.session import NamedLoop, Outputs, Session, StepOf


class MovementRecorder:
    """A ``Watcher`` that keeps what one eager step of a rank sent, and what each exchange left behind."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.ends = {exchange: found for (exchange, owner), found in endings(plan).items() if owner == rank}
        self.sources: dict[Moved, Tensor] = {}
        self.results: dict[tuple[int, Moved], Tensor] = {}

    def sent(self, moved: Moved, source: Tensor, stream: torch.cuda.Stream) -> None:
        if moved not in self.sources:
            with torch.cuda.stream(stream):
                self.sources[moved] = source.clone()

    def closed(self, exchange: int, rank: CudaRank, stream: torch.cuda.Stream) -> None:
        for moved, buffer in self.ends.get(exchange, {}).items():
            with torch.cuda.stream(stream):
                self.results[exchange, moved] = rank.tensors[buffer].clone()

    def verdict(self, plan: Plan, rank: int) -> tuple[int, bool]:
        """How many results there were, and whether all are right bit for bit. Forgets them. Collective."""
        torch.cuda.synchronize()
        every: list[dict[Moved, Tensor]] = [{} for _ in plan.ranks]
        dist.all_gather_object(every, {moved: source.cpu() for moved, source in self.sources.items()})
        ends, wide, exact = endings(plan), widths(plan), True
        for (exchange, moved), result in self.results.items():
            sent = {member: found[moved] for member, found in enumerate(every) if moved in found}
            exact = exact and moved_right(plan, exchange, rank, moved, ends, sent, result.cpu(), wide)
        count = len(self.results)
        self.sources.clear()
        self.results.clear()
        return count, exact


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one rank saw."""

    outputs: tuple[Outputs, ...]
    """Of every step, on the cpu: of the captured replays, or of the eager steps where nothing was captured."""
    captured_equals_eager: bool | None
    """Bit for bit; None where nothing was captured."""
    movements_checked: int
    movement_exact: bool
    facts: CaptureFacts


def run_rank(plan: Plan, steps: int, seed: int, eager: bool) -> RankRun:
    """Run ``steps`` denoising steps of this process's rank, with made-up weights and inputs. Collective.

    Raises:
        StepgraphError: as ``Session`` does.
    """
    seen, checked, exact, facts = _loop(plan, steps, seed, True)
    same = None
    if not eager:
        replayed, _, _, facts = _loop(plan, steps, seed, False)
        if not facts.eager_because:
            pairs = zip(seen, replayed, strict=True)
            same = all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))
        seen = replayed
    return RankRun(seen, same, checked, exact, facts)


def _loop(plan: Plan, steps: int, seed: int, eager: bool) -> tuple[tuple[Outputs, ...], int, bool, CaptureFacts]:
    """The outputs of a denoising loop, and, where it is eager, the verdict on what it moved."""
    seen: list[Outputs] = []
    checked, exact = 0, True
    with torch.no_grad(), Session(plan, device="cuda", seed=seed, eager=eager) as session:
        backend = session.backend
        assert isinstance(backend, CudaBackend)
        recorder = MovementRecorder(plan, backend.rank)
        backend.watcher = recorder if eager else None

        def loop(rank: int) -> NamedLoop:
            inputs = {name: tensor.to(backend.device) for name, tensor in random_inputs(plan, seed).items()}
            return denoise(plan, inputs, sigma_pairs(steps), seen)

        def watched(steps: NamedLoop) -> Generator[NamedInputs | StepOf, Outputs, object]:
            nonlocal checked, exact
            try:
                named = next(steps)
                while True:
                    outputs = yield named
                    count, right = recorder.verdict(plan, backend.rank)
                    checked, exact = checked + count, exact and right
                    named = steps.send(outputs)
            except StopIteration as end:
                return end.value

        session.drive(lambda rank: watched(loop(rank)) if eager else loop(rank))
        facts = session.facts
    return tuple(tuple(output.cpu() for output in outputs) for outputs in seen), checked, exact, facts
