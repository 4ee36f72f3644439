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
