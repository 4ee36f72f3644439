"""What the cuda device does besides calling CUDA: the same code on a stand-in for it. Captured graphs are not shown."""

import os
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_cuda import COPIES, sizes_of
from test_cuda_sets import TEXT

from stepgraph.kernels.stages import MadeUpStages, Stage
from stepgraph.planner.compile import compile_set
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.footprint import footprint
from stepgraph.planner.plan import Plan, Run
from stepgraph.planner.plan_set import PlanSet
from stepgraph.planner.schedule import read_schedule
from stepgraph.runtime import walk as walks
from stepgraph.runtime.cache import CacheStats
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Session
from stepgraph.runtime.simulate import report_of

from support.host_gpu import on_host_gpus
from support.sizes import SETS, SHIPPED, small_plan, small_set

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
WITHOUT_COLLECTIVES = [name for name in SHIPPED if name != "nccl_baseline_u4"]


def run_all(plans: list[Plan], rank: int) -> list[object]:
    from stepgraph.runtime.rank_run import run_rank

    runs = [run_rank(plan, 2, 0, eager=False) for plan in plans]
    # Whose own class can't be imported without cuda-python.
    return [SimpleNamespace(**{name: getattr(run, name) for name in run.__slots__}) for run in runs]


def test_shipped_schedules() -> None:
    """Data movement is exact, replays equal eager steps, steps are near the unsharded model."""
    plans = [small_plan(n, model__dtype="float32", **COPIES, **sizes_of(n)[2]) for n in WITHOUT_COLLECTIVES]
    plans += [small_plan("quickstart", mesh__ulysses="2", defaults__handshake=kind) for kind in ("copy", "kernel")]
    every = on_host_gpus(2, partial(run_all, plans))
    for number, plan in enumerate(plans):
        report = report_of(plan, 2, 0, [found[number] for found in every], torch.device("cpu"))
        assert report.ok, (plan.name, report)
        assert report.captured_equals_eager
        assert report.movements_checked > 0


@pytest.mark.parametrize("name", WITHOUT_COLLECTIVES)
def test_what_the_tests_of_the_gpu_take_compiles(name: str) -> None:
    for ranks, settings in sizes_of(name).items():
        assert small_plan(name, model__dtype="float32", **COPIES, **settings).world_size == ranks


def a_set(name: str, handshake: str) -> PlanSet:
    if name in SETS:
        return small_set(name, model__dtype="float32", mesh__ulysses="2", defaults__handshake=handshake, **COPIES)
    return compile_set(read_schedule(TEXT, "variants.yaml", (("mesh.ulysses", "2"), ("defaults.handshake", handshake))))


def walked(plans: PlanSet, steps: int, budget: int, rank: int) -> tuple[list[tuple[object, ...]], CacheStats]:
    """A walk under inference mode, in which what is captured in the loop must not be made."""
    seen: list[tuple[torch.Tensor, ...]] = []
    with torch.inference_mode(), Session(plans, device="cuda", seed=5, graph_bytes=budget) as session:
        loop = walks.walk_loop(plans, walks.walk_order(plans, steps, 5), 5, torch.device("cpu"), seen, [])
        session.drive(lambda _: loop)
        stats = session.stats()
    return [tuple(output.clone().numpy() for output in outputs) for outputs in seen], stats


@pytest.mark.parametrize(
    ("name", "handshake"), [("variants", "memop"), ("variants", "kernel"), *((name, "memop") for name in SETS)]
)
def test_versions_come_and_go_within_a_budget(name: str, handshake: str) -> None:
    """Flags, epochs and states go on where a version is let go and captured anew. The cpu device keeps tensors dense,
    and products of others are rounded in another way."""
    plans = a_set(name, handshake)
    budget, steps = max(footprint(plan) for plan in plans.plans), 16
    every = on_host_gpus(2, partial(walked, plans, steps, budget))
    with torch.no_grad(), Session(plans, device="cpu", seed=5, graph_bytes=budget) as session:
        want: list[list[tuple[torch.Tensor, ...]]] = [[], []]
        session.drive(
            lambda rank: walks.walk_loop(
                plans, walks.walk_order(plans, steps, 5), 5, torch.device("cpu"), want[rank], []
            )
        )
    for (seen, stats), exact in zip(every, want, strict=True):
        assert stats.misses > 3
        assert stats.evictions > 3
        for got, one in zip(seen, exact, strict=True):
            for a, b in zip(got, one, strict=True):
                assert (torch.from_numpy(a) - b).abs().max() <= 1e-5 * b.abs().max()
    for one, two in zip(every[0][0], every[1][0], strict=True):
        assert all((a == b).all() for a, b in zip(one, two, strict=True))


def fails_once(plans: PlanSet, rank: int) -> tuple[str, int, list[bool]]:
    """What is told where rank 1 can't capture a version in the loop; then how many versions are held, and whether the
    step, called again, is as eager ones are."""
    from stepgraph.runtime import cuda_step

    wanted = []
    for eager in (True, False):
        budget = None if eager else max(footprint(plan) for plan in plans.plans)
        with torch.no_grad(), Session(plans, device="cuda", eager=eager, graph_bytes=budget) as session:
            bucket = plans.buckets[-1].name
            step, inputs = session.capture(bucket=bucket), random_inputs(plans.plan("", bucket), 0)
            if eager:
                wanted = [step(**inputs) for _ in range(2)]
                continue
            original, calls = cuda_step.capture, []

            def capture(*given, original=original, calls=calls):
                calls.append(given)
                if rank == 1 and len(calls) == 1:
                    raise RuntimeError("CUDA: no")
                return original(*given)

            cuda_step.capture = capture
            with pytest.raises(StepgraphError) as error:
                step(**inputs)
            held = len(session.stats().captured)
            assert all(entry.captured is None for entry in session.backend.steps)
            found = [step(**inputs) for _ in range(2)]
            assert len(calls) == 2
    return str(error.value), held, [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]


def test_a_version_that_one_rank_cannot_capture_is_held_by_none() -> None:
    (first, *one), (second, *two) = on_host_gpus(2, partial(fails_once, a_set("variants", "memop")))
    assert "E607: rank 1 failed at capturing the step" in first
    assert "E606" in second
    assert one == two == [0, [True, True]]


def differs(plans: PlanSet, rank: int) -> str:
    os.environ["STEPGRAPH_DEBUG"] = "1"
    with torch.no_grad(), Session(plans, device="cuda") as session:
        bucket = plans.buckets[rank].name
        with pytest.raises(StepgraphError) as error:
            session.capture(bucket=bucket)(**random_inputs(plans.plan("", bucket), 0))
        return str(error.value)


def test_ranks_that_take_different_versions_are_told_when_they_compare() -> None:
    plans = a_set("variants", "memop")
    for told in on_host_gpus(2, partial(differs, plans)):
        assert "E607" in told
        assert all(bucket.name in told for bucket in plans.buckets[:2])


def test_what_a_stage_hands_back_is_memory_of_its_own() -> None:
    """An op behind it may work in place, while others still read the operand."""
    from stepgraph.runtime.cuda import CudaRank

    made, operand = torch.randn(1, 4, 6), torch.randn(1, 4, 6)
    site = SimpleNamespace(memory=SimpleNamespace(local=torch.zeros(8)))
    rank = SimpleNamespace(site=site, states={})
    assert CudaRank._own(rank, made, [operand]) is made  # type: ignore[arg-type]
    for same in (operand, operand[:, 1:], operand[..., :3]):
        got = CudaRank._own(rank, same, [operand])  # type: ignore[arg-type]
        assert torch.equal(got, same)
        assert got.untyped_storage().data_ptr() != operand.untyped_storage().data_ptr()
    for once in (made.expand(2, 4, 6), made[:, :1].expand(1, 4, 6)):  # an op in place would write to one place twice
        got = CudaRank._own(rank, once, [operand])  # type: ignore[arg-type]
        assert torch.equal(got, once)
        got.add_(1)


class Fails(MadeUpStages):
    """Made-up stages of which that of one op fails while ``now`` is set."""

    now = False

    def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
        stage, op = super().__call__(plan, rank, run), plan.ops[run.op]

        def failing(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            if self.now:
                raise ValueError("a bad prompt")
            return stage(tensors)

        return failing if op.name.endswith(".norm_rope") and op.layer == 1 else stage


def after_a_failure(plan: Plan, rank: int) -> bool:
    """Whether a step is as good as before when all ranks have failed alike between its sends and their handshake."""
    from stepgraph.runtime import cuda_backend
    from stepgraph.runtime.transport.collective import CollectiveTransport

    if plan.transport == "nccl":
        cuda_backend.transports = lambda device: (CollectiveTransport(torch.device("cpu")),)
    stages = Fails(0)
    with torch.no_grad(), Session(plan, device="cuda", stages=stages, eager=True) as session:
        step, inputs = session.capture(), random_inputs(plan, 0)
        want = step(**inputs)
        stages.now = True
        with pytest.raises(StepgraphError, match="E610"):
            step(**inputs)
        stages.now = False
        return torch.equal(step(**inputs), want)


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_a_step_after_one_that_failed_on_all_ranks(transport: str) -> None:
    plan = small_plan("quickstart", mesh__ulysses="2", defaults__transport=transport)
    assert on_host_gpus(2, partial(after_a_failure, plan)) == [True, True]


def without_triton(plan: Plan, rank: int) -> str:
    from stepgraph.runtime.transport import mapped

    mapped.has_triton = lambda: rank == 0
    with pytest.raises(StepgraphError) as error:
        Session(plan, device="cuda")
    return str(error.value)


def test_a_kernel_handshake_without_triton_is_told() -> None:
    plan = small_plan("quickstart", mesh__ulysses="2", defaults__handshake="kernel")
    first, second = on_host_gpus(2, partial(without_triton, plan))
    assert "E607: rank 1 failed at preparing handshakes and buffers" in first
    assert "E606: there is no triton for a kernel handshake" in second


def allocates_in_capture(rank: int) -> list[str]:
    """What is told of symmetric memory by functions that were imported before; behind it they are as they were."""
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import empty, rendezvous

    from stepgraph.runtime.capture import _no_symmetric_allocation

    before, told = [_SymmetricMemory.empty_strided_p2p, _SymmetricMemory.rendezvous], []
    with _no_symmetric_allocation():
        for call in (lambda: empty(4, device="cpu"), lambda: rendezvous(torch.zeros(4), dist.group.WORLD)):
            with pytest.raises(RuntimeError) as error:
                call()
            told.append(str(error.value))
    after = [_SymmetricMemory.empty_strided_p2p, _SymmetricMemory.rendezvous]
    assert [str(one) for one in before] == [str(one) for one in after]
    return told


def test_symmetric_memory_is_refused_in_capture_by_whatever_name() -> None:
    (told,) = on_host_gpus(1, allocates_in_capture)
    assert told == ["symmetric memory can't be allocated or mapped while a step is captured"] * 2
