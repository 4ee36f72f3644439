"""States on the cuda device: captured, eager, cpu and unsharded agree over steps; zeroed between requests."""

from functools import partial

import pytest
import torch
from test_cuda import run_and_compare
from test_state_tensors import CACHE, RESIDUAL, plan_of

from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import Plan, Run
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Session

from support.ranks import on_ranks, own_gpus

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TWO = {"mesh__ulysses": "2", "model__dtype": "float32"}


@pytest.mark.parametrize("text", [RESIDUAL, CACHE])
def test_captured_steps_keep_what_eager_ones_do(text: str) -> None:
    plans = [plan_of(text, **TWO, defaults__transport=transport) for transport in ("symmetric", "ipc", "nccl")]
    for plan, report in zip(plans, run_and_compare(plans), strict=True):
        on_host = plan.transport == "nccl" and not own_gpus(2)
        assert report.captured_equals_eager is (None if on_host else True)


def requests(plan: Plan, rank: int) -> tuple[list[torch.Tensor], bool]:
    """The outputs of two requests of two steps each, and whether the states have stayed where they were."""
    from stepgraph.runtime.cuda_backend import CudaBackend

    found: list[torch.Tensor] = []
    with torch.no_grad(), Session(plan, device="cuda", seed=0) as session:
        step, backend = session.capture(), session.backend
        assert isinstance(backend, CudaBackend)
        worker = backend.steps[0].worker
        before = {number: tensor.data_ptr() for number, tensor in worker.states.items()}
        for _ in range(2):
            for number in range(2):
                inputs = {name: tensor.cuda() for name, tensor in random_inputs(plan, number).items()}
                output = step(**inputs)
                assert isinstance(output, torch.Tensor)
                found.append(output.cpu())
            session.reset_state()
            assert all(not tensor.any() for tensor in worker.states.values())
        after = {number: worker.tensors[number].data_ptr() for number in before}
    return found, before == after


@pytest.mark.parametrize("text", [RESIDUAL, CACHE])
def test_a_request_starts_from_zero(text: str) -> None:
    """Also the first one, which follows the session's own test steps."""
    plan = plan_of(text, **TWO)
    with torch.no_grad(), Session(plan, device="cpu", seed=0) as session:
        step = session.capture()
        want = [step(**random_inputs(plan, number)) for number in range(2)]
    for outputs, stayed in on_ranks(2, partial(requests, plan)):
        assert stayed
        assert torch.equal(torch.stack(outputs[:2]), torch.stack(outputs[2:]))
        for got, exact in zip(outputs, want, strict=False):
            assert (got - exact).abs().max() <= 1e-4 * exact.abs().max()


def lost(plan: Plan, rank: int) -> str:
    """What reading the graph back says when a captured step does not copy a result into its state."""
    from stepgraph.kernels import copy2d
    from stepgraph.runtime.cuda import CudaRank

    original, enqueue = CudaRank.run, copy2d.enqueue

    def forgetful(self: CudaRank, number: int, run: Run, stage: object) -> None:
        states = [tensor.data_ptr() for tensor in self.states.values()]
        copy2d.enqueue = lambda copy, stream: (
            None if self.capturing and copy.destination in states else enqueue(copy, stream)
        )
        try:
            original(self, number, run, stage)
        finally:
            copy2d.enqueue = enqueue

    CudaRank.run = forgetful
    try:
        with Session(plan, device="cuda", seed=0):
            return "accepted"
    except StepgraphError as error:
        return str(error)
    finally:
        CudaRank.run = original


def test_a_copy_into_a_state_that_is_not_captured_is_read_back() -> None:
    for told in on_ranks(2, partial(lost, plan_of(RESIDUAL, **TWO))):
        assert isinstance(told, str)
        assert "E608" in told, told
