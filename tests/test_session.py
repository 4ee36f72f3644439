"""The session and its step: what they accept, what they refuse, and that they end cleanly."""

import math
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import stepgraph
from stepgraph.kernels.stages import MadeUpStages, Stage, StageMaker
from stepgraph.planner.diagnostics import CapabilityError, StepgraphError
from stepgraph.planner.plan import Plan, Run
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import CapturedStep, Session
from stepgraph.runtime.simulate import largest_error, schedule_of

TINY = {"shape.seq": 9, "model.hidden": 16, "model.head_dim": 2, "model.ffn": 8}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return stepgraph.compile("quickstart", TINY)


def test_loop_of_a_user(plan: Plan) -> None:
    inputs = random_inputs(plan, 0)
    latents, rope = inputs["latents"], inputs["rope"]
    with torch.no_grad(), stepgraph.Session(plan, device="cpu", seed=1) as session:
        step = session.capture()
        for sigma, next_sigma in stepgraph.sigma_pairs(4):
            noise = step(latents=latents, timestep=torch.full((1,), 1000 * sigma), rope=rope)
            assert isinstance(noise, Tensor)
            latents = latents + (next_sigma - sigma) * noise
        assert session.report.ok
        assert session.report.replays == 4
    assert torch.isfinite(latents).all()


def test_same_as_the_unsharded_model_by_position(plan: Plan) -> None:
    from stepgraph.kernels.unsharded import Unsharded

    inputs = random_inputs(plan, 3)
    with torch.no_grad(), Session(plan, device="auto", seed=2) as session:
        noise = session.capture()(*inputs.values())
    (want,) = Unsharded(schedule_of(plan), 2)(inputs)
    assert isinstance(noise, Tensor)
    torch.testing.assert_close(noise.double(), want, rtol=1e-4, atol=1e-5)


def test_outputs_are_the_callers_own_and_inputs_stay(plan: Plan) -> None:
    inputs = random_inputs(plan, 0)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    with torch.no_grad(), Session(plan, device="cpu") as session:
        step = session.capture()
        first = step(**inputs)
        assert isinstance(first, Tensor)
        kept = first.clone()
        step(**random_inputs(plan, 1))
        assert torch.equal(first, kept)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)


def bad(plan: Plan, name: str, tensor: Tensor | None) -> str:
    inputs: dict[str, Tensor] = random_inputs(plan, 0)
    if tensor is None:
        del inputs[name]
    else:
        inputs[name] = tensor
    with Session(plan, device="cpu") as session, pytest.raises(StepgraphError) as error:
        session.capture()(**inputs)
    assert [d.code for d in error.value.diagnostics] == ["E605"]
    return str(error.value)


def test_inputs_of_another_kind_are_refused(plan: Plan) -> None:
    """CASES 14: expected and got, nothing is cast."""
    text = bad(plan, "latents", torch.zeros(1, 10, 16))
    assert "[1, 9, 16], float32, cpu" in text
    assert "[1, 10, 16], float32, cpu" in text
    assert "float64" in bad(plan, "latents", torch.zeros(1, 9, 16, dtype=torch.float64))
    assert "meta" in bad(plan, "rope", torch.zeros(9, 2, device="meta"))
    assert "nothing" in bad(plan, "timestep", None)
    assert "guidance" in bad(plan, "guidance", torch.zeros(1))


def test_calls_with_too_much(plan: Plan) -> None:
    inputs = random_inputs(plan, 0)
    with Session(plan, device="cpu") as session:
        step = session.capture()
        for arguments, named in (((*inputs.values(), torch.zeros(1)), {}), ((inputs["latents"],), inputs)):
            with pytest.raises(StepgraphError, match="E605"):
                step(*arguments, **named)


def test_closed_sessions(plan: Plan) -> None:
    session = Session(plan, device="cpu")
    step = session.capture()
    session.close()
    session.close()
    for use in (lambda: step(**random_inputs(plan, 0)), session.capture, lambda: session.report):
        with pytest.raises(StepgraphError, match="E604"):
            use()


def test_cuda_is_told_to_be_missing(plan: Plan) -> None:
    with pytest.raises(CapabilityError, match="E601"):
        Session(plan, device="cuda")


def test_strided_inputs_are_refused(plan: Plan) -> None:
    wide = torch.zeros(1, 9, 32)
    text = bad(plan, "latents", wide[..., ::2])
    assert "[1, 9, 16], float32, cpu, contiguous" in text
    assert "[1, 9, 16], float32, cpu, strides [288, 32, 2]" in text
    assert "sparse" in bad(plan, "latents", torch.zeros(1, 9, 16).to_sparse())


def test_several_outputs() -> None:
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.schedule import read_schedule

    call = "  - call: {name: time, in: timestep, out: temb, shape: [batch, hidden]}\n"
    text = stepgraph.compile("quickstart").source.text.replace("outputs: [noise]", "outputs: [noise, temb]")
    text = text.replace("\nstep:\n", f"\nstep:\n{call}")
    plan = compile_schedule(read_schedule(text, "two.yaml"))
    with torch.no_grad(), Session(plan, device="cpu") as session:
        step: CapturedStep = session.capture()
        outputs = step(**random_inputs(plan, 0))
    assert isinstance(outputs, tuple)
    assert [tuple(output.shape) for output in outputs] == [(1, 96, 16), (1, 64)]


def test_a_deadlock_is_told_not_hung(plan: Plan) -> None:
    from stepgraph.planner.plan import Signal
    from stepgraph.runtime.mutate import with_program

    items = [i for i in plan.ranks[0].instructions if not (isinstance(i, Signal) and i.exchange == 0)]
    with (
        Session(with_program(plan, 0, items), device="cpu") as session,
        pytest.raises(StepgraphError, match="E401") as error,
    ):
        session.capture()(**random_inputs(plan, 0))
    assert "wait self_attention.send_k.handshake[0]" in str(error.value)


def test_a_stage_keeps_what_is_its_own(plan: Plan) -> None:
    """A stage may hand out a tensor that it keeps: the session poisons only its own memory."""
    kept: list[Tensor] = []

    def maker(plan: Plan, rank: int, run: Run) -> Stage:
        stage = MadeUpStages(0)(plan, rank, run)
        if not plan.ops[run.op].name.endswith("embed"):
            return stage

        def cached(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            kept.extend(stage(tensors))
            return kept[-1:]

        return cached

    with torch.no_grad(), Session(plan, device="cpu", stages=maker) as session:
        session.capture()(**random_inputs(plan, 0))
    assert kept
    assert all(tensor.isfinite().all() for tensor in kept)


def test_nan_in_any_step_of_any_rank_is_seen(plan: Plan) -> None:
    fine, wrong = (torch.zeros(2),), (torch.tensor([0.0, torch.nan]),)
    for seen in ([wrong, fine, fine], [fine, wrong, fine], [fine, fine, wrong]):
        assert math.isnan(largest_error(seen, [fine, (torch.ones(2),), fine]))
    assert largest_error([fine, fine], [fine, (torch.ones(2),)]) == 1.0


def embed_that_gives(results: Callable[[Sequence[Tensor]], object]) -> StageMaker:
    """Made-up stages, but what the embedding gives goes through ``results``."""

    def maker(plan: Plan, rank: int, run: Run) -> Stage:
        stage = MadeUpStages(0)(plan, rank, run)
        if not plan.ops[run.op].name.endswith("embed"):
            return stage
        return lambda tensors: results(stage(tensors))  # type: ignore[return-value]

    return maker


def fails(results: Sequence[Tensor]) -> object:
    raise KeyError("weight")


def wants_memory(results: Sequence[Tensor]) -> object:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")


@pytest.mark.parametrize(
    ("results", "told"),
    [
        (
            lambda made: [*made, *made],
            r"E610: the stage of step.embed on .* gives .*\n.*a list of 1 tensors\n.*2",
        ),
        (lambda made: made[0], r"E610: .* gives what its op does not make\n.*a list of 1 tensors\n.*a Tensor"),
        (lambda made: None, "E610: .* gives what its op does not make\n.*a list of 1 tensors\n.*a NoneType"),
        (lambda made: [made[0].double()], r"E610: .* gives .*\n.*float32, cpu\n.*float64, cpu"),
        (lambda made: [made[0][:, :-1]], r"E610: .* gives .*\n.* 1 x \d+ x 16 elements, float32"),
        (lambda made: [made[0].numpy()], r"E610: .* gives .*\n.*elements, float32\n.*a ndarray"),
        (fails, "E610: the stage of step.embed on line .* can't be run\n.*KeyError: 'weight'"),
        (wants_memory, "E606: no memory for the stage of step.embed on line .*\n.*CUDA out of memory"),
    ],
)
def test_what_stages_give_is_checked(plan: Plan, results: Callable[[Sequence[Tensor]], object], told: str) -> None:
    with Session(plan, device="cpu", stages=embed_that_gives(results)) as session, pytest.raises(StepgraphError) as got:
        session.capture()(**random_inputs(plan, 0))
    assert re.search(told, str(got.value)), str(got.value)


def test_strided_results_are_as_good(plan: Plan) -> None:
    inputs = random_inputs(plan, 0)

    def transposed(made: Sequence[Tensor]) -> Sequence[Tensor]:
        return [made[0].transpose(1, 2).contiguous().transpose(1, 2)]

    with Session(plan, device="cpu", stages=embed_that_gives(transposed)) as session:
        got = session.capture()(**inputs)
    with Session(plan, device="cpu", stages=MadeUpStages(0)) as session:
        want = session.capture()(**inputs)
    assert isinstance(got, Tensor)
    assert isinstance(want, Tensor)
    assert torch.equal(got, want)


def test_a_stage_that_cannot_be_made_is_named(plan: Plan) -> None:
    def maker(plan: Plan, rank: int, run: Run) -> Stage:
        raise KeyError("transformer_blocks.7")

    with pytest.raises(StepgraphError, match=r"E610: the stage of step.embed on line .* can't be made"):
        Session(plan, device="cpu", stages=maker)


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.5, "1", True])
def test_seeds_out_of_range(plan: Plan, seed: object) -> None:
    with pytest.raises(StepgraphError, match="E605: seed is not what a session takes"):
        Session(plan, device="cpu", seed=seed)  # type: ignore[arg-type]


def test_the_largest_seed(plan: Plan) -> None:
    with Session(plan, device="cpu", seed=(1 << 63) - 1) as session:
        session.capture()(**random_inputs(plan, (1 << 63) - 1))


def test_arguments_of_another_kind(plan: Plan) -> None:
    with pytest.raises(StepgraphError, match="E605: plan is not what a session takes"):
        Session("quickstart", device="cpu")  # type: ignore[arg-type]
    with pytest.raises(CapabilityError, match="E601: no device 'tpu'"):
        Session(plan, device="tpu")  # type: ignore[arg-type]
    with Session(plan, device="cpu") as session:
        with pytest.raises(StepgraphError, match="E605: outputs is not what a session takes"):
            session.capture(outputs="vieww")  # type: ignore[arg-type]
        with pytest.raises(CapabilityError, match="E606: only cuda captures"):
            _ = session.facts


@pytest.mark.parametrize("value", [3.0, None, [1.0]])
def test_inputs_that_are_no_tensors(plan: Plan, value: object) -> None:
    inputs: dict[str, object] = {**random_inputs(plan, 0), "timestep": value}
    with Session(plan, device="cpu") as session, pytest.raises(StepgraphError) as error:
        session.capture()(**inputs)  # type: ignore[arg-type]
    assert "E605: the input 'timestep'" in str(error.value)
