"""The cpu device itself: what it orders, what it refuses, and what it says when a step is left unfinished."""

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import stepgraph
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import CapabilityError, StepgraphError
from stepgraph.planner.plan import Plan
from stepgraph.planner.schedule import read_schedule
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Session
from stepgraph.runtime.simulate import simulate

from support.mutate import fault_of
from support.sizes import small_plan, small_schedule

TINY = {"shape.seq": 9, "model.hidden": 16, "model.head_dim": 2, "model.ffn": 8}
Loop = Generator[dict[str, Tensor], tuple[Tensor, ...], None]

GATHERED_TARGET = """
version: 1
name: gathered-target
model: {layers: 4, hidden: 16, heads: 4, head_dim: 4, ffn: 8, dtype: float32}
mesh: {ulysses: 3}
shape: {batch: 1, seq: 9}
inputs:
  latents: {shape: [batch, seq, 6]}
outputs: [noise]
blocks:
  block:
    - linear: {name: v, in: x, out: {v: heads}}
    - send: {in: v, barrier: true}
    - gather: {in: v, via: nccl}
    - linear: {name: o, in: v, out: x}
step:
  - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
  - shard: x
  - layers: block
  - call: {name: head, in: x, out: noise, shape: [batch, seq, 6]}
  - all_gather: noise
"""


def test_a_member_that_has_finished_does_not_know_that_the_others_have() -> None:
    """A collective's start comes before every finish; its reads last until its own. The next send into the target
    that it reads is a race, unless another exchange lies between."""
    plan = compile_schedule(read_schedule(GATHERED_TARGET, "gathered_target.yaml"))
    assert prove(plan).ok
    assert fault_of(plan, 0) is None
    first = next(target for target in plan.targets if "send" in target.name)
    shared = tuple(replace(t, offset=first.offset) if "send" in t.name else t for t in plan.targets)
    unsafe = replace(plan, targets=shared)
    assert not prove(unsafe).ok
    assert any("race on" in (fault_of(unsafe, seed) or "") for seed in range(20))


@pytest.mark.parametrize("name", ["latents", "timestep", "rope"])
def test_inputs_of_a_wider_dtype_than_the_model(name: str) -> None:
    base = small_schedule("quickstart").tree
    line = next(line for line in base.text.splitlines() if line.strip().startswith(f"{name}: {{shape"))
    text = base.text.replace("dtype: float32}", "dtype: bfloat16}").replace(line, line[:-1] + ", dtype: float32}")
    plan = compile_schedule(read_schedule(text, "wide.yaml", base.overrides))
    assert {entry.name: entry.dtype.value for entry in plan.inputs}[name] == "float32"
    report = simulate(plan, steps=3, seed=0)
    assert report.ok, report


@pytest.mark.parametrize("ulysses", [2, 3])
def test_partial_sums_of_ranks_without_tokens(ulysses: int) -> None:
    """CASES 26: an all_reduce by copies where a rank's share is empty."""
    more = {"shape__seq": "1", "mesh__ulysses": str(ulysses), "defaults__all_reduce__via": "copy"}
    assert simulate(small_plan("minimax_h3_tp2_u2", **more), steps=2, seed=0).ok


def with_text(shard: bool) -> str:
    """A head that also sees a text, whole or each rank's own rows of it."""
    text = GATHERED_TARGET.replace("seq: 9}", "seq: {seq: 9, txt: 4}}")
    text = text.replace("outputs:", "  text: {shape: [batch, txt, 5]}\noutputs:")
    head = "  - call: {name: head, in: x,"
    assert head in text
    return text.replace(head, ("  - shard: text\n" if shard else "") + head.replace("in: x,", "in: [x, text],"))


def test_a_replicated_operand_of_another_sequence_stays_whole() -> None:
    plan = compile_schedule(read_schedule(with_text(shard=False), "text.yaml"))
    report = simulate(plan, steps=2, seed=0)
    assert report.ok, report


def test_no_stage_is_made_up_from_a_part_of_other_rows() -> None:
    """The mean over a rank's own rows of a text is not the mean over the text: refused rather than wrong."""
    text = with_text(shard=True)
    plan = compile_schedule(read_schedule(text, "text.yaml"))
    with pytest.raises(CapabilityError, match=r"E602[^$]*step.head[^$]*text"):
        Session(plan, device="cpu")
    whole = compile_schedule(read_schedule(text, "text.yaml", (("mesh.ulysses", "1"),)))
    assert simulate(whole, steps=2, seed=0).ok


def test_a_timestep_changes_the_output() -> None:
    """Else a step that is stuck with an old timestep (CASES 12) would go unseen."""
    plan = stepgraph.compile("quickstart", TINY)
    inputs = random_inputs(plan, 0)
    with torch.no_grad(), Session(plan, device="cpu") as session:
        step = session.capture()
        early, late = (step(**{**inputs, "timestep": torch.full((1,), time)}) for time in (900.0, 800.0))
    assert isinstance(early, Tensor)
    assert isinstance(late, Tensor)
    assert (early - late).abs().max() > 1e-3


@pytest.fixture
def plan() -> Plan:
    return stepgraph.compile("quickstart", TINY)


def test_a_step_left_unfinished_ends_the_session(plan: Plan) -> None:
    """One rank is refused its inputs while others are in the middle of the replay."""
    good = random_inputs(plan, 0)

    def loop(rank: int) -> Loop:
        yield good
        yield good if rank != 1 else {"latents": good["latents"]}

    with torch.no_grad(), Session(plan, device="cpu", seed=3) as session:
        with pytest.raises(StepgraphError, match="E605"):
            session.drive(loop)
        with pytest.raises(StepgraphError, match="E604"):
            session.capture()(**good)


def test_refused_inputs_leave_the_session_whole(plan: Plan) -> None:
    good = random_inputs(plan, 0)
    with torch.no_grad(), Session(plan, device="cpu") as session:
        step = session.capture()
        with pytest.raises(StepgraphError, match="E605"):
            step(latents=good["latents"])
        step(**good)
        assert session.report.ok
        assert session.report.replays == 1


def test_ranks_that_take_different_numbers_of_steps(plan: Plan) -> None:
    """The deadlock says which rank waits, and for which handshake."""
    good = random_inputs(plan, 0)

    def loop(rank: int) -> Loop:
        for _ in range(2 + (rank == 2)):
            _ = yield good

    with torch.no_grad(), Session(plan, device="cpu") as session:
        with pytest.raises(StepgraphError, match=r"E401[^$]*rank 2 in replay 2[^$]*self_attention.send_k"):
            session.drive(loop)
        assert [fault.kind for fault in session.report.faults] == ["deadlock"]
        assert session.report.replays == 2
