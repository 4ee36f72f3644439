"""A walk through the versions of a plan set: steps in any order that is allowed, held against the unsharded model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from stepgraph.kernels.dtype import torch_dtype
from stepgraph.kernels.unsharded import Unsharded
from stepgraph.planner.plan_set import PlanSet, version
from stepgraph.runtime.cache import CacheStats
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.interleave import Interleaving
from stepgraph.runtime.session import DeviceName, Outputs, Session, StepOf, cuda_lacks, need_cuda
from stepgraph.runtime.simulate import held_against_schedule, largest_error, schedule_of, tolerance_of

Way = Sequence[tuple[str, str]]
"""(variant, bucket) of every step."""
SETTLED = 4
"""Memory is compared from this part of the walk on: one in so many steps have been taken."""


@dataclass(frozen=True, slots=True)
class Walked:
    """What one rank saw."""

    outputs: tuple[Outputs, ...]
    stats: CacheStats
    grown: int
    """Bytes by which the memory of torch's allocator has grown since the walk had settled; 0 on cpu."""


@dataclass(frozen=True, slots=True)
class WalkReport:
    device: str
    ranks: int
    steps: int
    seed: int
    taken: Mapping[str, int]
    """How often each version came."""
    max_abs_error: float
    """Largest difference of any output of any step and rank from the unsharded model in float64."""
    tolerance: float
    """As that of a run: from the unsharded model in the plan's own dtype."""
    ranks_agree: bool
    """All ranks have the same bits in every output."""
    findings: tuple[str, ...]
    """Races and faults, on cpu."""
    stats: CacheStats
    grown: int
    """Of the rank that has grown most."""

    @property
    def ok(self) -> bool:
        return self.max_abs_error <= self.tolerance and self.ranks_agree and not self.findings and not self.grown


def walk_order(plans: PlanSet, steps: int, seed: int) -> list[tuple[str, str]]:
    """(variant, bucket) of every step: buckets by chance, left and taken up again, in each what may come there."""
    chance, before = random.Random(seed), dict[str, str]()
    found: list[tuple[str, str]] = []
    for _ in range(steps):
        bucket = chance.choice([entry.name for entry in plans.buckets] or [""])
        last = before.get(bucket, "")
        names = [rule.name for rule in plans.variants] or [""]
        allowed = [name for name in names if plans.may_follow(last, name) or plans.may_follow("", name)]
        before[bucket] = chance.choice(allowed)
        found.append((before[bucket], bucket))
    return found


def walk(
    plans: PlanSet,
    steps: int,
    seed: int,
    device: DeviceName = "cpu",
    graph_bytes: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    interleaving: Interleaving | None = None,
) -> WalkReport | None:
    """Take ``steps`` steps over all ranks with made-up weights, each with fresh inputs; on cpu, those of
    ``interleaving`` and no others, by its turns and then by chance. None in processes that are ranks other than 0.

    Raises:
        StepgraphError: as ``Session`` does.
    """
    if device == "cuda":
        need_cuda()
    on_cpu = device == "cpu" or cuda_lacks() != ""
    way = walk_order(plans, steps, seed)
    if interleaving is not None:
        sources = [plans.versions()[name].source for name in interleaving.word]
        way = [(source.variant, source.bucket) for source in sources]
    progress(f"{len(way)} steps through {len(plans.plans)} versions on {plans.world_size} ranks")
    findings: tuple[str, ...] = ()
    if on_cpu:
        every, findings = _on_cpu(plans, way, seed, graph_bytes, interleaving)
    else:
        from stepgraph.runtime.launch import run_ranks

        found = run_ranks(plans.world_size, partial(_on_gpu, plans, way, seed, graph_bytes))
        if found is None:
            return None
        every = found
    progress("running the unsharded model")
    where = torch.device("cpu" if on_cpu else "cuda")
    dtype = torch_dtype(plans.plans[0].dtype)
    first = every[0].outputs
    with held_against_schedule(plans.plans):
        exact = unsharded(plans, way, seed, torch.float64, where)
        rounded = unsharded(plans, way, seed, dtype, where)
        error, tolerance = largest_error(first, exact), tolerance_of(rounded, exact, dtype)
    same = all(
        len(one) == len(two) and all(map(torch.equal, one, two))
        for rank in every
        for one, two in zip(first, rank.outputs, strict=True)
    )
    return WalkReport(
        device=where.type,
        ranks=plans.world_size,
        steps=len(way),
        seed=seed,
        taken=dict(Counter(version(plans.plan(*step)) for step in way)),
        max_abs_error=error,
        tolerance=tolerance,
        ranks_agree=same,
        findings=findings,
        stats=every[0].stats,
        grown=max(one.grown for one in every),
    )


def unsharded(plans: PlanSet, way: Way, seed: int, dtype: torch.dtype, where: torch.device) -> list[Outputs]:
    """What a model of each version makes of the walk's inputs, all models over the same states, on the host."""
    models = [Unsharded(schedule_of(plan), seed, dtype, where) for plan in plans.plans]
    for model in models:
        model.states = models[0].states
    found: list[Outputs] = []
    with torch.no_grad():
        for number, step in enumerate(way):
            plan, model = plans.plan(*step), models[plans.index(*step)]
            outputs = model({name: tensor.to(where) for name, tensor in random_inputs(plan, seed + number).items()})
            found.append(tuple(output.cpu() for output in outputs))
    return found


def walk_loop(
    plans: PlanSet, way: Way, seed: int, where: torch.device, seen: list[Outputs], memory: list[int]
) -> Generator[StepOf, Outputs, None]:
    """A host loop: takes the walk's steps, and adds what comes of each to ``seen``, and on cuda what torch has
    reserved by then to ``memory``."""
    for number, step in enumerate(way):
        given = {name: tensor.to(where) for name, tensor in random_inputs(plans.plan(*step), seed + number).items()}
        outputs = yield StepOf(given, *step)
        seen.append(tuple(output.cpu() for output in outputs))
        if where.type == "cuda":
            memory.append(torch.cuda.memory_reserved(where))


def _on_cpu(
    plans: PlanSet, way: Way, seed: int, graph_bytes: int | None, interleaving: Interleaving | None
) -> tuple[list[Walked], tuple[str, ...]]:
    every: list[list[Outputs]] = [[] for _ in range(plans.world_size)]
    with torch.no_grad(), Session(plans, device="cpu", seed=seed, graph_bytes=graph_bytes) as session:
        if interleaving is not None:
            session.follow(interleaving)
        session.drive(lambda rank: walk_loop(plans, way, seed, torch.device("cpu"), every[rank], []))
        report, stats = session.report, session.stats()
    found = [*map(str, report.races), *map(str, report.faults)]
    if not report.movement_exact:
        found.append("data movement is not exact")
    return [Walked(tuple(outputs), stats, 0) for outputs in every], tuple(found)


def _on_gpu(plans: PlanSet, way: Way, seed: int, graph_bytes: int | None, rank: int) -> Walked:
    seen: list[Outputs] = []
    memory: list[int] = []
    with torch.no_grad(), Session(plans, device="cuda", seed=seed, graph_bytes=graph_bytes) as session:
        where = torch.device("cuda", torch.cuda.current_device())
        session.drive(lambda rank: walk_loop(plans, way, seed, where, seen, memory))
        stats = session.stats()
    settled = max(memory[: len(memory) // SETTLED + 1])
    return Walked(tuple(seen), stats, max(0, max(memory) - settled))
