"""What fails on GPUs when stages, transports or single ranks fail: it is told on all ranks, and nobody hangs."""

import gc
import time
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist

from stepgraph.kernels.stages import MadeUpStages, Stage
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import Plan, Run
from stepgraph.planner.schedule import read_schedule
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Session

from support.ranks import on_fresh_ranks, on_ranks
from support.sizes import small_plan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LATE = """
version: 1
name: late
model: {layers: 1, hidden: 8, heads: 2, head_dim: 4, ffn: 8, dtype: float32}
mesh: {ulysses: 2}
shape: {seq: 6}
inputs: {latents: {shape: [batch, seq, 8]}}
outputs: [noise]
step:
  - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
  - shard: x
  - call: {name: head, in: x, out: noise, shape: [batch, seq, 8]}
  - all_gather: {in: noise, via: copy}
"""


def on_gpu(plan: Plan, seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in random_inputs(plan, seed).items()}


def plan_of_two(**more: str) -> Plan:
    return small_plan("quickstart", mesh__ulysses="2", **more)


class Changed(MadeUpStages):
    """Made-up stages of which that of one op in one layer gives what ``change`` makes of its results."""

    def __init__(self, name: str, layer: int | None, change: "object") -> None:
        super().__init__(0, torch.device("cuda", torch.cuda.current_device()))
        self.name, self.layer, self.change = name, layer, change

    def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
        stage, op = super().__call__(plan, rank, run), plan.ops[run.op]
        if not op.name.endswith(self.name) or op.layer != self.layer:
            return stage
        return lambda tensors: self.change(stage(tensors))


# What stages give


def transposed(made: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in made]


def strided(plan: Plan, op: str, rank: int) -> bool:
    with Session(plan, device="cuda") as session:
        want = session.capture()(**on_gpu(plan, 0))
    with Session(plan, device="cuda", stages=Changed(op, 1, transposed)) as session:
        step = session.capture()
        return all(torch.equal(step(**on_gpu(plan, 0)), want) for _ in range(3))


@pytest.mark.parametrize("op", ["qkv", "mlp"])
def test_strided_results_are_as_good(op: str) -> None:
    assert on_ranks(2, partial(strided, plan_of_two(), op)) == [True, True]


def wrong_dtype(plan: Plan, rank: int) -> str:
    with pytest.raises(StepgraphError) as error:
        Session(plan, device="cuda", stages=Changed(".qkv", 1, lambda made: [made[0].bfloat16()]))
    return str(error.value)


def test_a_result_of_another_dtype_is_refused() -> None:
    for told in on_ranks(2, partial(wrong_dtype, plan_of_two())):
        assert "E610" in told
        assert "qkv[1]" in told
        assert "float32" in told
        assert "bfloat16" in told


# Outputs that lie in targets


def read_late(plan: Plan, rank: int) -> tuple[bool, bool]:
    """Rank 1 is a step ahead while rank 0 still reads its output."""
    with Session(plan, device="cuda") as session:
        step = session.capture(outputs="view")
        output = step(**on_gpu(plan, 0))
        first = output.clone()
        assert torch.equal(output, first)  # loads its kernels: with a peer in a wait, loading would hang
        inputs = on_gpu(plan, 1)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 1:
            step(**inputs)
        else:
            time.sleep(0.5)
        still = rank == 1 or torch.equal(output, first)
        dist.barrier()
        if rank == 0:
            step(**inputs)
        torch.cuda.synchronize()
        return still, not torch.equal(output, first)


def test_outputs_in_targets_are_safe_from_peers_that_are_ahead() -> None:
    plan = compile_schedule(read_schedule(LATE, "late.yaml"))
    assert on_ranks(2, partial(read_late, plan)) == [(True, True)] * 2


# Memory that nobody holds any more


def captured_beside_garbage(plan: Plan, rank: int) -> bool:
    """While a stage is captured, symmetric memory becomes garbage of a cycle, and enough is made to have it collected:
    freeing it within the capture would end the process."""
    from torch.distributed import _symmetric_memory as symmetric

    kept = [symmetric.empty(1 << 20, device="cuda")]

    def leaves_garbage(made: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if torch.cuda.is_current_stream_capturing() and kept:
            ring: list[object] = [kept.pop()]
            ring.append(ring)
            del ring
            assert [[number] for number in range(10_000)]
        return made

    with Session(plan, device="cuda") as session:
        want = session.capture()(**on_gpu(plan, 0))
    with Session(plan, device="cuda", stages=Changed("mlp", 1, leaves_garbage)) as session:
        step = session.capture()
        return not kept and torch.equal(step(**on_gpu(plan, 0)), want) and gc.isenabled()


def test_garbage_is_not_collected_while_a_step_is_captured() -> None:
    assert on_ranks(2, partial(captured_beside_garbage, plan_of_two())) == [True, True]


# Modes of autograd


def under_modes(plan: Plan, rank: int) -> bool:
    with torch.inference_mode(), Session(plan, device="cuda") as session:
        step, inputs = session.capture(), on_gpu(plan, 0)
        want = step(**inputs)
        with torch.inference_mode(False):
            wants_grad = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
            found = [step(**wants_grad) for _ in range(3)]
    return all(torch.equal(output, want) and not output.requires_grad for output in found)


def test_steps_build_no_graph_of_autograd() -> None:
    assert on_ranks(2, partial(under_modes, plan_of_two())) == [True, True]


# One rank, or one transport, that fails


def breaks_in_the_group(plan: Plan, rank: int) -> tuple[str, bool]:
    """On rank 1 a stage fails in its second call: after the rehearsal, in the first step of the group."""
    import stepgraph.runtime.cuda_backend as backend

    calls = 0

    def second(made: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 2:
            raise ValueError("no more")
        return made

    limit, backend.TIME_LIMIT = backend.TIME_LIMIT, 3.0
    try:
        with pytest.raises(StepgraphError) as error:
            Session(plan, device="cuda", stages=Changed("mlp", 1, second))
    finally:
        backend.TIME_LIMIT = limit
    with Session(plan, device="cuda") as session:
        output = session.capture()(**on_gpu(plan, 0))
    return str(error.value), bool(output.isfinite().all())


@pytest.mark.parametrize("handshake", ["memop", "copy", "kernel"])
def test_a_rank_that_fails_in_the_first_step_leaves_nobody_hanging(handshake: str) -> None:
    plan = plan_of_two(defaults__handshake=handshake)
    (first, fine), (second, fine_too) = on_fresh_ranks(2, partial(breaks_in_the_group, plan))
    assert "E607: rank 1 failed at the first step" in first
    assert "E610" in second
    assert "no more" in second
    assert fine
    assert fine_too


def unmapped(plan: Plan, rank: int) -> tuple[str, tuple[str, ...]]:
    """Mapping symmetric memory fails on rank 1."""
    from stepgraph.runtime.transport.symmetric import SymmetricTransport

    original = SymmetricTransport.connect

    def connect(self, block):
        found = original(self, block)
        if rank == 1:
            raise RuntimeError("CUDA: no handle")
        return found

    SymmetricTransport.connect = connect
    try:
        with Session(plan, device="cuda") as session:
            session.capture()(**on_gpu(plan, 0))
            return session.facts.transport, session.facts.passed_over
    finally:
        SymmetricTransport.connect = original


def test_memory_that_cannot_be_mapped_leads_to_the_next_transport() -> None:
    for transport, passed_over in on_fresh_ranks(2, partial(unmapped, plan_of_two())):
        assert transport == "ipc"
        assert "symmetric: mapping peers' memory failed, rank 1: E606" in passed_over[0]


def stuck(plan: Plan, rank: int) -> str:
    """Rank 1's signals are lost, and its waits can't be satisfied from the host either."""
    import stepgraph.runtime.cuda_backend as backend
    from stepgraph.runtime.transport.mapped import MappedChannel
    from stepgraph.runtime.transport.symmetric import SymmetricTransport

    channels = []

    class Silent(MappedChannel):
        def signal(self, signal):
            if self.rank == 0:
                super().signal(signal)

        def release(self):
            channels.append(self)

    original = SymmetricTransport.channel
    SymmetricTransport.channel = lambda self, site: Silent(site)
    backend.TIME_LIMIT = backend.RELEASE_LIMIT = 2.0
    try:
        with pytest.raises(StepgraphError) as error:
            Session(plan, device="cuda")
    finally:
        SymmetricTransport.channel = original
    for _ in range(200):  # or the process could not end
        MappedChannel.release(channels[0])
        time.sleep(0.01)
    return f"{type(error.value).__name__} {error.value}"


def test_a_step_that_nothing_releases_is_told() -> None:
    for told in on_fresh_ranks(2, partial(stuck, plan_of_two())):
        assert "StuckError E611: the first step did not finish and can't be released" in told


def other_seeds(plan: Plan, rank: int) -> str:
    with pytest.raises(StepgraphError) as error:
        Session(plan, device="cuda", seed=rank)
    return str(error.value)


def test_ranks_with_other_seeds_are_told() -> None:
    for told in on_ranks(2, partial(other_seeds, plan_of_two())):
        assert "E607: ranks disagree on versions and mode" in told
        assert "seed 1, eager False, graph bytes None on rank 1" in told


def groups_left(plan: Plan, rank: int) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        with Session(plan, device="cuda") as session:
            session.capture()(**on_gpu(plan, 0))
    return len(dist.distributed_c10d._world.pg_map) - before


def test_sessions_leave_no_groups_behind() -> None:
    assert on_ranks(2, partial(groups_left, plan_of_two())) == [0, 0]


def many(plan: Plan, rank: int) -> str:
    dist.destroy_process_group()
    with Session(plan, device="cuda", solo=True) as session:
        step = session.capture()
        for seed in range(3):
            step(**on_gpu(plan, seed))
        torch.cuda.synchronize()
        return str(session.facts.planned_nodes["kernel"])


def test_a_kernel_handshake_of_forty_ranks() -> None:
    sizes = {"model__heads": "40", "shape__seq": "80", "defaults__gather__via": "copy"}
    plan = small_plan("quickstart", mesh__ulysses="40", defaults__handshake="kernel", **sizes)
    exchanges = str(sum(item.do == "wait" for item in plan.ranks[0].instructions))
    assert on_fresh_ranks(1, partial(many, plan)) == [exchanges]
