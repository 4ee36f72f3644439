"""Plan sets on the cuda device: versions in any allowed order, captured within a byte budget, by several ranks."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from stepgraph.planner.compile import compile_set
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.footprint import footprint
from stepgraph.planner.plan_set import PlanSet
from stepgraph.planner.schedule import read_schedule
from stepgraph.runtime import walk as walks
from stepgraph.runtime.cache import CacheStats, ReplayCache
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Session

from support.ranks import on_ranks
from support.sizes import SETS, small_set

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TEXT = (Path(__file__).parent / "data" / "variants.yaml").read_text()
MIB = 1 << 20


def a_set(ranks: int, **settings: str) -> PlanSet:
    pairs = {"mesh.ulysses": str(ranks), **{key.replace("__", "."): value for key, value in settings.items()}}
    return compile_set(read_schedule(TEXT, "variants.yaml", tuple(pairs.items())))


def all_but(plans: PlanSet, versions: int) -> int:
    """Bytes for all but the largest so many versions."""
    sizes = sorted(footprint(plan) for plan in plans.plans)
    return sum(sizes[: len(sizes) - versions])


def expected(plans: PlanSet, steps: int, budget: int | None) -> CacheStats:
    """What the cache must have done, from the plans alone."""
    cache = ReplayCache(list(plans.versions()), [footprint(plan) for plan in plans.plans], budget)
    for number in range(len(plans.plans)):
        if cache.fits(number):
            cache.hold(number)
    for step in walks.walk_order(plans, steps, 5):
        cache.use(plans.index(*step))
    return cache.stats()


def walked(plans: PlanSet, steps: int, budget: int | None, monkeypatch: pytest.MonkeyPatch) -> walks.WalkReport:
    """A walk by ranks that stay, rather than by processes that are started for it."""
    monkeypatch.setattr("stepgraph.runtime.launch.run_ranks", partial(on_ranks, seconds=300.0))
    report = walks.walk(plans, steps, 5, "cuda", budget)
    assert report is not None
    return report


@pytest.mark.parametrize("handshake", ["memop", "kernel"])
def test_every_version_is_captured_when_the_session_opens(handshake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = a_set(4, defaults__handshake=handshake)
    report = walked(plans, 60, None, monkeypatch)
    assert report.ok, report
    assert report.stats == expected(plans, 60, None)
    assert (report.stats.hits, report.stats.misses) == (60, 0)


@pytest.mark.parametrize("steps", [150, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_versions_come_and_go_within_a_budget(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = a_set(2)
    budget = all_but(plans, 2)
    report = walked(plans, steps, budget, monkeypatch)
    print(
        f"{steps} steps, {report.stats}, error {report.max_abs_error:.3g} of {report.tolerance:.3g}, {report.grown} B"
    )
    assert report.ok, report
    assert report.stats == expected(plans, steps, budget)
    assert report.stats.misses > 0
    assert report.stats.planned_bytes <= budget


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", SETS)
def test_shipped_sets(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = {f"defaults__{kind}__via": "copy" for kind in ("gather", "all_gather", "all_reduce")}
    plans = small_set(name, model__dtype="float32", mesh__ulysses=str(ranks), **copies)
    budget = all_but(plans, 1)
    report = walked(plans, 20, budget, monkeypatch)
    assert report.max_abs_error <= report.tolerance, report
    assert report.ranks_agree
    assert report.stats == expected(plans, 20, budget)
    assert report.stats.misses > 0


def both_ways(plans: PlanSet, rank: int) -> list[bool]:
    """Whether each output of a walk is the same bits eagerly and captured."""
    seen: list[list[tuple[torch.Tensor, ...]]] = []
    where = torch.device("cuda", torch.cuda.current_device())
    for eager in (True, False):
        outputs: list[tuple[torch.Tensor, ...]] = []
        loop = walks.walk_loop(plans, walks.walk_order(plans, 40, 5), 5, where, outputs, [])
        with torch.no_grad(), Session(plans, device="cuda", seed=1, eager=eager) as session:
            session.drive(lambda _, loop=loop: loop)
        seen.append(outputs)
    return [torch.equal(a, b) for one, two in zip(*seen, strict=True) for a, b in zip(one, two, strict=True)]


def test_captured_equals_eager() -> None:
    for same in on_ranks(2, partial(both_ways, a_set(2))):
        assert len(same) == 40
        assert all(same)


def differs(plans: PlanSet, rank: int) -> str:
    os.environ["STEPGRAPH_DEBUG"] = "1"
    try:
        with torch.no_grad(), Session(plans, device="cuda") as session:
            bucket = ("small", "wide")[rank]
            given = {name: t.cuda() for name, t in random_inputs(plans.plan("full", bucket), 0).items()}
            with pytest.raises(StepgraphError) as error:
                session.capture(bucket=bucket)(**given)
            return str(error.value)
    finally:
        del os.environ["STEPGRAPH_DEBUG"]


def test_ranks_that_take_different_versions_are_told_when_they_compare() -> None:
    for told in on_ranks(2, partial(differs, a_set(2))):
        assert "E607" in told
        assert "full/small" in told
        assert "full/wide" in told


def pools() -> dict[str, list[int]]:
    """MiB that torch has reserved with two graphs of 64 MiB each, with one of them let go, and with both: with a pool
    of its own for each, and with one for both."""
    found: dict[str, list[int]] = {}
    for kind in ("private", "shared"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, pool, graphs = torch.cuda.memory_reserved(), torch.cuda.graph_pool_handle(), []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool if kind == "shared" else None):
                torch.ones(64 * MIB, dtype=torch.uint8, device="cuda").add_(1)
            graphs.append(graph)
        found[kind] = [(torch.cuda.memory_reserved() - before) // MIB]
        while graphs:
            graphs.pop(0).reset()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            found[kind].append((torch.cuda.memory_reserved() - before) // MIB)
    return found


def test_what_pools_give_back() -> None:
    """Why every version has a pool of its own: a shared one takes less, and gives nothing back before the last."""
    found = pools()
    print(f"MiB reserved with two graphs, one, none: {found}")
    private, shared = found["private"], found["shared"]
    assert private[0] - private[1] == 64  # what the first one had
    assert shared[0] == shared[1] < private[0]
    assert max(private[2], shared[2]) <= 2  # torch keeps a small block of its own
