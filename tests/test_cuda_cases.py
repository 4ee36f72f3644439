"""What has gone wrong for others on GPUs, and does not here: cases by number."""

import gc
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist

from stepgraph.kernels.stages import MadeUpStages, Stage
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import Plan, Run
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Session

from support.ranks import on_fresh_ranks, on_ranks
from support.sizes import small_plan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(plan: Plan, seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in random_inputs(plan, seed).items()}


def plan_of_two(**more: str) -> Plan:
    return small_plan("quickstart", mesh__ulysses="2", **more)


class Changed(MadeUpStages):
    """Made-up stages of which that of one op in one layer does something besides."""

    def __init__(self, name: str, layer: int, besides: "object") -> None:
        super().__init__(0, torch.device("cuda", torch.cuda.current_device()))
        self.name, self.layer, self.besides = name, layer, besides

    def __call__(self, plan: Plan, rank: int, run: Run) -> Stage:
        stage, op = super().__call__(plan, rank, run), plan.ops[run.op]
        if not op.name.endswith(self.name) or op.layer != self.layer:
            return stage

        def changed(tensors):
            return [self.besides(result) for result in stage(tensors)]

        return changed


# 9: an allocation of symmetric memory inside the capture


def allocate_inside(plan: Plan, rank: int) -> str:
    def besides(result: torch.Tensor) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric

        if torch.cuda.is_current_stream_capturing():
            symmetric.empty(64, device="cuda")
        return result

    with pytest.raises(StepgraphError) as error:
        Session(plan, device="cuda", stages=Changed("mlp", 1, besides))
    with Session(plan, device="cuda") as session:  # and the process is as good as before
        session.capture()(**on_gpu(plan, 0))
    return str(error.value)


def test_symmetric_memory_allocated_in_capture_is_refused_by_name() -> None:
    for told in on_ranks(2, partial(allocate_inside, plan_of_two())):
        assert "E610" in told
        assert "mlp[1]" in told
        assert "symmetric memory" in told


# 10, 36: capture begins when all are warm; kernels are loaded while no wait is pending


def first_calls(plan: Plan, rank: int) -> tuple[list[str], bool]:
    """What happened in order, and whether every stage was first called while all streams of the rank were idle."""
    import stepgraph.runtime.cuda_step as backend
    from stepgraph.runtime import group
    from stepgraph.runtime.cuda import CudaRank

    log: list[str] = []
    meet, capture, run = group.meet, backend.capture, CudaRank.run
    answered: list[bool] = []

    def note(name, function):
        def noting(*arguments):
            log.append(name)
            return function(*arguments)

        return noting

    def running(self, number, item, stage):
        if not log:
            answered.append(self.channel.answers)
        run(self, number, item, stage)

    group.meet, backend.capture, CudaRank.run = note("meet", meet), note("capture", capture), running
    try:
        with Session(plan, device="cuda"):
            pass
    finally:
        group.meet, backend.capture, CudaRank.run = meet, capture, run
    stages = sum(isinstance(item, Run) for item in plan.ranks[rank].instructions)
    return log, len(answered) == stages and all(answered)


def test_capture_begins_when_all_ranks_are_warm() -> None:
    for log, rehearsed in on_ranks(2, partial(first_calls, plan_of_two())):
        assert log == ["meet", "meet", "capture", "meet", "meet"]
        assert rehearsed  # each stage ran first where the rank answers its own waits


# 11: memory that the graph uses is not freed


def poisoned(plan: Plan, rank: int) -> bool:
    with Session(plan, device="cuda") as session:
        step = session.capture()
        inputs = on_gpu(plan, 0)
        want = step(**inputs)
        del inputs
        gc.collect()
        torch.cuda.synchronize()
        filled = []
        for size in [1 << 20] * 64 + [1 << 12] * 512 + [512] * 2048:  # whatever is free becomes NaN
            filled.append(torch.full((size // 4,), float("nan"), device="cuda"))
        torch.cuda.synchronize()
        del filled
        return torch.equal(step(**on_gpu(plan, 0)), want)


def test_replay_after_freed_memory_was_poisoned() -> None:
    assert on_ranks(2, partial(poisoned, plan_of_two())) == [True, True]


# 12: nothing depends on how often the step ran; step variables are read anew


def constant(plan: Plan, rank: int) -> tuple[bool, bool]:
    with Session(plan, device="cuda") as session:
        step = session.capture()
        inputs = on_gpu(plan, 0)
        first = step(**inputs)
        same = all(torch.equal(step(**inputs), first) for _ in range(5))
        other = step(**{**inputs, "timestep": inputs["timestep"] + 1})
    return same, not torch.equal(other, first)


def test_replays_are_functions_of_their_inputs() -> None:
    assert on_ranks(2, partial(constant, plan_of_two())) == [(True, True)] * 2


# 13: the stream contract


def on_a_side_stream(plan: Plan, outputs: str, rank: int) -> int:
    """How many steps are wrong when their inputs are made late, and overwritten at once, on a side stream."""
    with Session(plan, device="cuda") as session:
        step = session.capture(outputs=outputs)
        given = [on_gpu(plan, number) for number in range(8)]
        wanted = [step(**inputs).clone() for inputs in given]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        results = []
        with torch.cuda.stream(side):
            staged = {name: torch.empty_like(tensor) for name, tensor in given[0].items()}
            for number in [3, 1, 7, 0, 2, 6, 5, 4]:
                torch.cuda._sleep(2_000_000)
                for name, tensor in staged.items():
                    tensor.copy_(given[number][name])
                output = step(**staged)
                for tensor in staged.values():
                    tensor.fill_(float("nan"))
                results.append((number, output.clone()))
        torch.cuda.synchronize()
        return sum(not torch.equal(result, wanted[number]) for number, result in results)


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_caller_on_a_side_stream(outputs: str) -> None:
    assert on_ranks(2, partial(on_a_side_stream, plan_of_two(), outputs)) == [0, 0]


def copies_and_views(plan: Plan, rank: int) -> tuple[bool, bool, bool]:
    with Session(plan, device="cuda") as session:
        copying, viewing = session.capture(), session.capture(outputs="view")
        mine = copying(**on_gpu(plan, 0))
        kept = mine.clone()
        view = viewing(**on_gpu(plan, 1))
        again = viewing(**on_gpu(plan, 2))
        return torch.equal(mine, kept), view.data_ptr() == again.data_ptr(), mine.data_ptr() != view.data_ptr()


def test_outputs_are_copies_or_views_by_choice() -> None:
    assert on_ranks(2, partial(copies_and_views, plan_of_two())) == [(True, True, True)] * 2


# 14: inputs of another kind


def refused_inputs(plan: Plan, rank: int) -> list[str]:
    told = []
    with Session(plan, device="cuda") as session:
        step, inputs = session.capture(), on_gpu(plan, 0)
        latents = inputs["latents"]
        for wrong in (
            latents.half(),
            latents[:, 1:],
            latents.transpose(1, 2).contiguous().transpose(1, 2),
            latents.cpu(),
        ):
            with pytest.raises(StepgraphError) as error:
                step(**{**inputs, "latents": wrong})
            told.append(str(error.value))
        step(**inputs)
    return told


def test_inputs_of_another_kind_are_refused() -> None:
    (told, _) = on_ranks(2, partial(refused_inputs, plan_of_two()))
    assert all("E605" in text and "float32, cuda:0, contiguous" in text for text in told)
    for text, word in zip(told, ("float16", "[1, 20, 16]", "strides", "cpu"), strict=True):
        assert word in text


# 15: random numbers


def random_stage(plan: Plan, own_generator: bool, rank: int) -> object:
    generator = torch.Generator("cuda").manual_seed(3) if own_generator else None

    def besides(result: torch.Tensor) -> torch.Tensor:
        return result + torch.randn(result.shape, generator=generator, device="cuda", dtype=result.dtype)

    try:
        session = Session(plan, device="cuda", stages=Changed("mlp", 1, besides))
    except StepgraphError as error:
        return str(error)
    with session:
        step, inputs = session.capture(), on_gpu(plan, 0)
        torch.cuda.manual_seed(1)
        one, two = step(**inputs), step(**inputs)
        torch.cuda.manual_seed(1)
        again = step(**inputs)
    return torch.equal(one, again) and not torch.equal(one, two)


def test_random_numbers_of_the_default_generator_are_fresh_at_each_replay() -> None:
    assert on_ranks(2, partial(random_stage, plan_of_two(), False)) == [True, True]


def test_a_generator_that_the_capture_does_not_know_is_refused() -> None:
    for told in on_fresh_ranks(2, partial(random_stage, plan_of_two(), True)):
        assert isinstance(told, str)
        assert "E610" in told
        assert "mlp[1]" in told


# 16, 17: the self-test and the votes


def silent(plan: Plan, rank: int) -> tuple[str, tuple[str, ...], bool]:
    """A session where rank 1's signals get lost over symmetric memory."""
    import stepgraph.runtime.cuda_backend as backend
    from stepgraph.runtime.transport.mapped import MappedChannel
    from stepgraph.runtime.transport.symmetric import SymmetricTransport

    class Silent(MappedChannel):
        def signal(self, signal):
            if self.rank == 0:
                super().signal(signal)

    original, limit = SymmetricTransport.channel, backend.TIME_LIMIT
    SymmetricTransport.channel = lambda self, site: Silent(site)
    backend.TIME_LIMIT = 3.0
    try:
        with Session(plan, device="cuda") as session:
            output = session.capture()(**on_gpu(plan, 0))
            facts = session.facts
    finally:
        SymmetricTransport.channel, backend.TIME_LIMIT = original, limit
    with Session(plan, device="cuda") as session:
        return facts.transport, facts.passed_over, torch.equal(session.capture()(**on_gpu(plan, 0)), output)


@pytest.mark.parametrize("handshake", ["memop", "copy", "kernel"])
def test_a_step_that_hangs_in_the_self_test_leads_to_the_next_transport(handshake: str) -> None:
    for transport, passed_over, same in on_fresh_ranks(2, partial(silent, plan_of_two(defaults__handshake=handshake))):
        assert transport == "ipc"
        assert "symmetric: the first step did not finish in time" in passed_over[0]
        assert same


def without(plan: Plan, failing: str, rank: int) -> tuple[str, tuple[str, ...]] | str:
    """A session where symmetric memory is missing, or can't be had, on rank 1."""
    from stepgraph.runtime.transport.symmetric import SymmetricTransport

    original = getattr(SymmetricTransport, failing)
    if rank == 1:
        if failing == "unavailable":
            SymmetricTransport.unavailable = lambda self: "it is broken here"
        else:

            def fail(self, nbytes):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

            SymmetricTransport.reserve = fail
    try:
        with Session(plan, device="cuda") as session:
            session.capture()(**on_gpu(plan, 0))
            return session.facts.transport, session.facts.passed_over
    except StepgraphError as error:
        return str(error)
    finally:
        setattr(SymmetricTransport, failing, original)


def test_all_ranks_take_the_same_transport() -> None:
    for found in on_ranks(2, partial(without, plan_of_two(), "unavailable")):
        assert found == ("ipc", ("symmetric: rank 1: it is broken here",))


def test_an_allocation_that_fails_on_one_rank_fails_on_all() -> None:
    first, second = on_ranks(2, partial(without, plan_of_two(), "reserve"))
    assert "E607: rank 1 failed at allocating the arena" in first
    assert "E606: no memory for allocating the arena" in second


# 18: ranks that disagree


def with_other_plans(plans: list[Plan], rank: int) -> str:
    with pytest.raises(StepgraphError) as error:
        Session(plans[rank], device="cuda")
    return str(error.value)


def test_ranks_with_other_plans_are_told_both_sides() -> None:
    plans = [plan_of_two(), plan_of_two(model__layers="3")]
    for told in on_ranks(2, partial(with_other_plans, plans)):
        assert "E607: ranks disagree on the plan" in told
        assert "on rank 0" in told
        assert "on rank 1" in told


# 20: closing


def closes(plan: Plan, rank: int) -> str:
    session = Session(plan, device="cuda")
    step = session.capture()
    step(**on_gpu(plan, 0))
    session.close()
    session.close()
    with pytest.raises(StepgraphError, match="E604"):
        step(**on_gpu(plan, 0))
    again = Session(plan, device="cuda", eager=True)
    backend = again.backend
    number = next(n for n, item in enumerate(plan.ranks[rank].instructions) if isinstance(item, Run))

    def fails(tensors):
        raise ValueError("no")

    backend.steps[0].stages[number] = fails
    with pytest.raises(StepgraphError, match="E610"):
        again.capture()(**on_gpu(plan, 0))
    again.close()
    again.close()
    dist.barrier()
    dist.destroy_process_group()
    return "ended"


def test_close_twice_close_after_a_failed_step_then_end_the_group() -> None:
    assert on_fresh_ranks(2, partial(closes, plan_of_two())) == ["ended"] * 2


# 21: calls of two threads


def from_two_threads(plan: Plan, rank: int) -> int:
    """How many steps are wrong when two threads of rank 0's only session call it, in the same order on all ranks."""
    wrong = []
    with Session(plan, device="cuda") as session:
        step = session.capture()
        given = [on_gpu(plan, number) for number in range(2)]
        wanted = [step(**inputs) for inputs in given]
        torch.cuda.synchronize()

        def caller(number: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    if not torch.equal(step(**given[number]), wanted[number]):
                        wrong.append(number)

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return len(wrong)


def test_calls_of_two_threads_come_one_after_another() -> None:
    """With one rank: ranks of a group must call in the same order, which two threads do not."""
    assert on_ranks(1, partial(from_two_threads, small_plan("quickstart", mesh__ulysses="1"))) == [0]


# 30: attention beside copies


def beside_copies(plan: Plan, rank: int) -> tuple[int, int]:
    """How many of many replays, with copies of other memory running all the time, differ from the first without."""
    with Session(plan, device="cuda") as session:
        step, inputs = session.capture(), on_gpu(plan, 0)
        want = step(**inputs)
        torch.cuda.synchronize()
        busy, source, target = torch.cuda.Stream(), *(torch.randn(1 << 22, device="cuda") for _ in range(2))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        copies = 0
        for _ in range(100):
            with torch.cuda.stream(busy):
                for _ in range(8):
                    target.copy_(source)
                    copies += 1
            wrong += (step(**inputs) != want).any()
        torch.cuda.synchronize()
        return int(wrong), copies


def test_attention_beside_copies_is_the_same_bit_for_bit() -> None:
    plan = small_plan(
        "minimax_h3_u4",
        model__hidden="256",
        model__heads="8",
        model__head_dim="64",
        shape__seq="512",
        model__dtype="bfloat16",
        defaults__gather__via="copy",
    )
    assert [wrong for wrong, _ in on_ranks(4, partial(beside_copies, plan))] == [0] * 4


# 33: settings that differ


def eager_on_one(plan: Plan, rank: int) -> str:
    with pytest.raises(StepgraphError) as error:
        Session(plan, device="cuda", eager=rank == 1)
    return str(error.value)


def test_ranks_that_run_in_other_ways_are_told() -> None:
    for told in on_ranks(2, partial(eager_on_one, plan_of_two())):
        assert "E607: ranks disagree on versions and mode" in told
        assert "eager True, graph bytes None on rank 1" in told


# 37: weights that moved


def moved_weights(plan: Plan, rank: int) -> list[str]:
    stages = MadeUpStages(0, torch.device("cuda", torch.cuda.current_device()))
    told = []
    with Session(plan, device="cuda", stages=stages) as session:
        step, inputs = session.capture(), on_gpu(plan, 0)
        step(**inputs)
        key = next(key for key in stages.weights._kept if key[0].endswith("mlp") and key[1] == 1)
        held = stages.weights._kept[key]
        held.mul_(1.0)  # in place is fine
        step(**inputs)
        for changed in (held.clone(), None):
            if changed is None:
                del stages.weights._kept[key]
            else:
                stages.weights._kept[key] = changed
            with pytest.raises(StepgraphError) as error:
                step(**inputs)
            told.append(str(error.value))
        stages.weights._kept[key] = held
        step(**inputs)
    return told


def test_weights_that_were_swapped_or_dropped_are_named() -> None:
    for swapped, gone in on_ranks(2, partial(moved_weights, plan_of_two())):
        assert "E609" in swapped
        assert "mlp[1]" in swapped
        assert "another address" in swapped
        assert "it is gone" in gone


def two_sessions(plan: Plan, rank: int) -> tuple[bool, bool]:
    """Graphs of two sessions replay in any order."""
    with Session(plan, device="cuda", seed=0) as one, Session(plan, device="cuda", seed=1) as two:
        first, second, inputs = one.capture(), two.capture(), on_gpu(plan, 0)
        wanted = first(**inputs), second(**inputs)
        found = [(second(**inputs), first(**inputs), first(**inputs)) for _ in range(3)]
        same = all(torch.equal(b, wanted[1]) and torch.equal(a, wanted[0]) for b, a, _ in found)
        return same, not torch.equal(*wanted)


def test_graphs_of_two_sessions_replay_in_any_order() -> None:
    assert on_ranks(2, partial(two_sessions, plan_of_two())) == [(True, True)] * 2


def alone(plan: Plan, rank: int) -> object:
    from stepgraph.runtime.solo import run_solo

    dist.destroy_process_group()
    return run_solo(plan, 3, 0)


def test_a_rank_alone() -> None:
    plan = small_plan("minimax_h3_u4", defaults__gather__via="copy")
    (report,) = on_fresh_ranks(1, partial(alone, plan))
    assert report.facts.transport == "solo"
    assert report.captured_ms > 0
    sends = sum(item.do == "send" for item in plan.ranks[0].instructions)
    assert report.facts.planned_nodes["memcpy"] == sends + 1  # the output is taken out of its target
