"""The cuda device: several processes, one a rank, that may share one GPU."""

import functools

import pytest
import torch

from stepgraph.planner.plan import Plan
from stepgraph.runtime.session import Session, random_inputs
from stepgraph.runtime.simulate import schedule_of

from support.ranks import on_ranks
from support.sizes import small_plan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 4


def outputs_of(plan: Plan, eager: bool, rank: int) -> list[torch.Tensor]:
    found = []
    with Session(plan, device="cuda", seed=0, eager=eager) as session:
        step = session.capture()
        for number in range(STEPS):
            inputs = {name: tensor.cuda() for name, tensor in random_inputs(plan, number).items()}
            output = step(**inputs)
            assert isinstance(output, torch.Tensor)
            found.append(output.cpu().clone())
    return found


def compare(plan: Plan) -> None:
    from stepgraph.kernels.unsharded import Unsharded

    captured = on_ranks(plan.world_size, functools.partial(outputs_of, plan, False))
    eager = on_ranks(plan.world_size, functools.partial(outputs_of, plan, True))
    model = Unsharded(schedule_of(plan), 0)
    for one, two in zip(captured, eager, strict=True):
        assert isinstance(one, list)
        assert isinstance(two, list)
        for number in range(STEPS):
            assert torch.equal(one[number], two[number])
            (want,) = model(random_inputs(plan, number))
            error = (one[number].double() - want).abs().max() / want.abs().max()
            assert error < 1e-4, (number, float(error))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_quickstart_captured_eager_and_unsharded(ranks: int) -> None:
    compare(small_plan("quickstart", mesh__ulysses=str(ranks)))


@pytest.mark.parametrize("transport", ["symmetric", "ipc"])
@pytest.mark.parametrize("handshake", ["memop", "copy"])
def test_transports_and_handshakes(transport: str, handshake: str) -> None:
    compare(small_plan("uneven_u4", defaults__transport=transport, defaults__handshake=handshake))


@pytest.mark.parametrize(
    "name", ["minimax_h3_u4", "minimax_h3_tp2_u2", "wan_14b_u4", "flux_1024_u4", "lingbot_world_v2_u4"]
)
def test_shipped_schedules(name: str) -> None:
    settings = {f"defaults__{kind}__via": "copy" for kind in ("gather", "all_gather", "all_reduce")}
    compare(small_plan(name, model__dtype="float32", **settings))


def dropped(plan: Plan, what: str, rank: int) -> str:
    """What reading the graph back says when a captured step lacks one copy, or one wait for an event."""
    import stepgraph.runtime.cuda as module
    from stepgraph.planner.diagnostics import StepgraphError

    worker = module.CudaRank
    original = getattr(worker, what)
    seen = 0

    def skipping(self: object, number: int, item: object) -> None:
        nonlocal seen
        seen += torch.cuda.is_current_stream_capturing() or is_capturing(self)
        if seen != 3:
            original(self, number, item)

    setattr(worker, what, skipping)
    try:
        with Session(plan, device="cuda", seed=0):
            return "accepted"
    except StepgraphError as error:
        return str(error)
    finally:
        setattr(worker, what, original)


def is_capturing(worker: object) -> bool:
    with torch.cuda.stream(worker.streams[0]):  # type: ignore[attr-defined]
        return torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize("what", ["send", "wait_event"])
def test_a_dropped_copy_or_edge_is_read_back(what: str) -> None:
    """CASES 29."""
    plan = small_plan("quickstart", mesh__ulysses="1")
    (told,) = on_ranks(1, functools.partial(dropped, plan, what))
    assert isinstance(told, str)
    assert "E608" in told, told


def jittered(plan: Plan, replays: int, rank: int) -> int:
    """How many of many replays, with fresh data and random delays of this rank's host, differ from the first rank's
    word for it: inputs are replicated, so every rank must make the same output."""
    import random
    import time

    import torch.distributed as dist

    delays = random.Random(rank)
    digests = []
    with Session(plan, device="cuda", seed=0) as session:
        step = session.capture()
        inputs = {name: tensor.cuda() for name, tensor in random_inputs(plan, 0).items()}
        for number in range(replays):
            generator = torch.Generator("cuda").manual_seed(number)
            inputs["latents"] = torch.randn(inputs["latents"].shape, generator=generator, device="cuda")
            if delays.random() < 0.1:
                time.sleep(delays.random() * 0.01)
            output = step(**inputs)
            assert isinstance(output, torch.Tensor)
            digests.append(output.cpu())
    gathered: list[object] = [None] * plan.world_size
    dist.all_gather_object(gathered, torch.stack(digests))
    first = gathered[0]
    assert isinstance(first, torch.Tensor)
    if rank == 0:  # and the same as fresh sessions make, replay by replay, on the cpu device
        with torch.no_grad(), Session(plan, device="cpu", seed=0) as session:
            step = session.capture()
            host = random_inputs(plan, 0)
            for number in range(0, replays, replays // 10):
                generator = torch.Generator("cuda").manual_seed(number)
                host["latents"] = torch.randn(host["latents"].shape, generator=generator, device="cuda").cpu()
                want = step(**host)
                assert isinstance(want, torch.Tensor)
                torch.testing.assert_close(first[number], want, rtol=1e-4, atol=1e-5)
    return int((torch.stack(digests) != first).flatten(1).any(1).sum())


def test_replays_with_random_delays() -> None:
    """CASES 1: each replay has fresh data and is checked, while ranks run ahead of each other."""
    plan = small_plan("quickstart")
    assert on_ranks(4, functools.partial(jittered, plan, 200)) == [0, 0, 0, 0]


@pytest.mark.exhaustive
def test_replays_of_sixty_layers_on_eight_ranks() -> None:
    """Start the CUDA multi-process service first: without it the driver takes turns between the processes."""
    plan = small_plan("quickstart", model__layers="60", mesh__ulysses="8")
    assert on_ranks(8, functools.partial(jittered, plan, 300), seconds=400) == [0] * 8
