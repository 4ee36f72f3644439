"""Classifier-free guidance in one batch, one branch after the other, or on ranks of its own: one result."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from stepgraph.kernels.stages import MadeUpStages
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import ScheduleError
from stepgraph.planner.plan import Plan, Run
from stepgraph.planner.schedule import read_schedule
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.compare import compare
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.mutate import KINDS, verdicts
from stepgraph.runtime.session import Session
from stepgraph.runtime.simulate import simulate

MODES = ("batch", "sequential", "parallel")
GUIDED = """
version: 1
name: guided
model: {layers: 2, hidden: 16, heads: 4, head_dim: 4, ffn: 8, dtype: float64}
mesh: {MESH}
shape: {batch: 2, seq: {img: 7, txt: 4}}
inputs:
  latents: {shape: [batch, img, 6]}
  timestep: {shape: [batch]}
  rope: {shape: [img, head_dim]}
  text: {shape: [batch, txt, 5], placement: cfg}
  txt_mask: {shape: [batch, txt], dtype: bool, placement: cfg}
  guidance: {shape: [batch]}
outputs: [noise]
cfg: MODE
blocks:
  block:
    - call: {name: mod, in: temb, out: [shift, scale], shape: [batch, 1, hidden]}
    - modulate: {in: x, shift: shift, scale: scale, out: h}
    - linear: {name: qkv, in: h, out: {q: heads, k: kv_heads, v: kv_heads}}
    - send: v
    - norm_rope: {in: [q, k], rope: rope}
    - send: {in: [q, k], barrier: true}
    - attention: {in: [q, k, v], out: o}
    - gather: o
    - linear: {name: out, in: o, out: a}
    - residual: {in: [x, a], out: x}
    - linear: {name: cross_q, in: x, out: {q: heads}}
    - linear: {name: cross_kv, in: ctx, out: {k: heads, v: heads}}
    - attention: {name: cross, in: [q, k, v], mask: txt_mask, out: o}
    - linear: {name: cross_out, in: o, out: a}
    - residual: {name: residual2, in: [x, a], out: x}
step:
  - call: {name: embed, in: latents, out: x, shape: [batch, img, hidden]}
  - call: {name: embed_time, in: timestep, out: temb, shape: [batch, hidden]}
  - call: {name: embed_text, in: text, out: ctx, shape: [batch, txt, hidden]}
  - shard: [x, rope]
  - layers: block
  - call: {name: head, in: x, out: noise, shape: [batch, img, 6]}
  - guide: {in: noise, scale: guidance, out: noise}
  - call: {name: behind, in: [noise, latents], out: noise, shape: [batch, img, 6], placement: sequence}
  - all_gather: noise
"""


def plan_of(mode: str, ulysses: int, text: str = GUIDED) -> Plan:
    mesh = f"cfg: 2, ulysses: {ulysses}" if mode == "parallel" else f"ulysses: {ulysses}"
    return compile_schedule(read_schedule(text.replace("MESH", mesh).replace("MODE", mode), "guided.yaml"))


def outputs_of(plan: Plan, inputs: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad(), Session(plan, device="cpu", stages=MadeUpStages(0)) as session:
        found = session.capture()(**inputs)
    return found if isinstance(found, Tensor) else found[0]


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_all_three_give_the_same(ulysses: int) -> None:
    found = {}
    for mode in MODES:
        plan = plan_of(mode, ulysses)
        assert plan.inputs == plan_of("batch", 1).inputs  # the caller sees no difference
        report = simulate(plan, steps=2, seed=ulysses)
        assert report is not None
        assert report.ok, (mode, report)
        assert report.max_abs_error < 1e-12
        assert prove(plan).ok
        found[mode] = outputs_of(plan, random_inputs(plan, 3))
    for mode in MODES[1:]:
        torch.testing.assert_close(found["batch"], found[mode], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["text", "txt_mask"])
def test_both_branches_are_seen(name: str) -> None:
    """Each branch's own input changes the result, the first as the conditioned one."""
    for mode in MODES:
        plan = plan_of(mode, 1)
        inputs = random_inputs(plan, 0)
        inputs["txt_mask"][:] = True
        first = outputs_of(plan, inputs)
        for branch in range(2):
            other = {key: tensor.clone() for key, tensor in inputs.items()}
            other[name][branch, :, :2] = 0
            assert not torch.allclose(outputs_of(plan, other), first)
        unguided = {**inputs, "guidance": torch.zeros_like(inputs["guidance"])}
        other = {**unguided, name: unguided[name].clone()}
        other[name][0, :, :2] = 0  # uncond + 0 * (cond - uncond)
        torch.testing.assert_close(outputs_of(plan, unguided), outputs_of(plan, other))


@pytest.mark.parametrize("mode", MODES)
def test_every_op_agrees(mode: str) -> None:
    rows = compare(plan_of(mode, 2), seed=1)
    assert rows
    assert not [row for row in rows if row.differs]


@pytest.mark.parametrize("handshake", ["copy", "kernel"])
@pytest.mark.parametrize("mode", MODES)
def test_every_handshake(mode: str, handshake: str) -> None:
    plan = plan_of(mode, 2, GUIDED.replace("cfg: MODE", f"cfg: MODE\ndefaults: {{handshake: {handshake}}}"))
    report = simulate(plan, steps=3, seed=1)
    assert report is not None
    assert report.ok
    assert prove(plan).ok


def test_what_a_step_does() -> None:
    """Sequential: everything twice, the layers' numbers again, so that weights are shared; batch: once."""
    names = {mode: [plan_of(mode, 2).ops[i.op] for i in plan_of(mode, 2).ranks[0].instructions if isinstance(i, Run)]
             for mode in MODES}  # fmt: skip
    once = [(op.name, op.layer) for op in names["parallel"]]
    behind = once[once.index(("step.guide", None)) :]
    branch = once[: -len(behind)]
    assert [(op.name, op.layer) for op in names["sequential"]] == branch + branch + behind
    parts = [dict(op.options).get("branch") for op in names["sequential"]]
    assert parts[: len(branch)] == ["cond"] * len(branch)
    assert parts[len(branch) : 2 * len(branch)] == ["uncond"] * len(branch)
    batched = [(op.name, op.layer) for op in names["batch"]]
    repeats = [("step.repeat_latents", None), ("step.repeat_timestep", None)]
    assert [entry for entry in batched if entry not in repeats] == once
    exchanges = [exchange.name for exchange in plan_of("sequential", 2).exchanges]
    assert "block.send_q_k.handshake[1] cond" in exchanges
    assert len(set(exchanges)) == len(exchanges)


def test_two_guides() -> None:
    """A model with two outputs: both are guided, and what lies between the guides belongs to the branches."""
    text = GUIDED.replace("outputs: [noise]", "outputs: [noise, sound]").replace(
        "  - guide: {in: noise, scale: guidance, out: noise}\n",
        "  - guide: {in: noise, scale: guidance, out: noise}\n"
        "  - call: {name: sound_head, in: x, out: sound, shape: [batch, img, 3]}\n"
        "  - guide: {name: guide_sound, in: sound, scale: guidance, out: sound}\n"
        "  - all_gather: {name: s, in: sound}\n",
    )
    for mode in MODES:
        report = simulate(plan_of(mode, 2, text), steps=2, seed=0)
        assert report is not None
        assert report.ok, (mode, report)


def test_no_setting_means_ranks_of_their_own() -> None:
    text = GUIDED.replace("cfg: MODE\n", "")
    assert plan_of("parallel", 2, text).ranks == plan_of("parallel", 2).ranks


def refusal(mode: str, text: str, mesh: str = "ulysses: 2") -> str:
    with pytest.raises(ScheduleError) as error:
        compile_schedule(read_schedule(text.replace("MESH", mesh).replace("MODE", mode), "guided.yaml"))
    found = str(error.value)
    assert "E216" in found
    return found


def test_a_mode_and_a_mesh_that_differ() -> None:
    assert "an axis cfg of 2 in `mesh`" in refusal("parallel", GUIDED)
    for mode in ("batch", "sequential"):
        assert "cfg: parallel, or a mesh without cfg" in refusal(mode, GUIDED, "cfg: 2, ulysses: 2")


@pytest.mark.parametrize("mode", ["batch", "sequential"])
def test_refusals(mode: str) -> None:
    guide = "  - guide: {in: noise, scale: guidance, out: noise}\n"
    without = GUIDED.replace(guide, "").replace("[noise, latents]", "[noise, latents, guidance]")
    assert "two branches and no guide" in refusal(mode, without)
    behind = GUIDED.replace("[noise, latents]", "[noise, temb]")
    assert "'temb' is of one branch" in refusal(mode, behind)
    before = GUIDED.replace(guide, guide + "  - call: {name: more, in: noise, out: y, like: x}\n"
                            "  - guide: {name: again, in: y, scale: guidance, out: y}\n")  # fmt: skip
    assert "'noise' has been guided" in refusal(mode, before)
    scaled = GUIDED.replace("scale: guidance", "scale: temb")
    assert "the scale of a guide is not of one branch" in refusal(mode, scaled)
    nested = GUIDED.replace("    - gather: o\n", "    - gather: o\n    - guide: {in: o, scale: guidance, out: o}\n")
    assert "a guide stands in a block" in refusal(mode, nested)
    output = GUIDED.replace("outputs: [noise]", "outputs: [noise, temb]")
    assert "'temb' is of one branch" in refusal(mode, output)


def test_two_branches_of_an_input_and_one_of_the_schedule() -> None:
    assert "an input has two branches, the schedule one" in refusal("batch", GUIDED.replace("cfg: MODE\n", ""))


def test_a_batch_does_not_mix_the_branches() -> None:
    """A table made of a timestep has no batch: in one batch it would be made of both branches."""
    text = GUIDED.replace("in: temb, out: [shift", "in: [temb, table], out: [shift").replace(
        "  - shard:", "  - call: {name: table, in: temb, out: table, shape: [3, head_dim]}\n  - shard:"
    )
    assert "made from both branches" in refusal("batch", text)
    report = simulate(plan_of("sequential", 2, text), steps=1, seed=0)
    assert report is not None
    assert report.ok
    bare = GUIDED.replace("text: {shape: [batch, txt, 5]", "text: {shape: [txt, 5]")
    assert "can't hold both branches" in refusal("batch", bare)


STATEFUL = GUIDED.replace(
    "cfg: MODE", "state:\n  last: {shape: [batch, img, hidden], placement: sequence}\ncfg: MODE"
).replace(
    "    - residual: {name: residual2, in: [x, a], out: x}\n",
    "    - residual: {name: residual2, in: [x, a], out: x}\n"
    "    - residual: {name: residual3, in: [x, last], out: x}\n    - keep: {in: a, into: last}\n",
)


@pytest.mark.parametrize("mode", ["batch", "parallel"])
def test_each_branch_has_states_of_its_own(mode: str) -> None:
    report = simulate(plan_of(mode, 2, STATEFUL), steps=3, seed=0)
    assert report is not None
    assert report.ok, report
    assert report.max_abs_error < 1e-12


def test_states_that_do_not_go_with_guidance() -> None:
    assert "each branch would need a state 'last' of its own" in refusal("sequential", STATEFUL)
    per_step = STATEFUL.replace("hidden], placement: sequence}", "hidden], placement: sequence, per: step}")
    both = per_step.replace(
        "  - call: {name: behind, in: [noise, latents]",
        "  - shard: latents\n  - call: {name: behind, in: [noise, last]",
    )
    for mode in ("batch", "parallel"):
        assert "on both sides of the last guide" in refusal(mode, both)


@pytest.mark.parametrize("mode", MODES)
def test_mutants_are_judged_alike(mode: str) -> None:
    text = GUIDED.replace("layers: 2, hidden: 16, heads: 4, head_dim: 4", "layers: 1, hidden: 8, heads: 4, head_dim: 2")
    plan = plan_of(mode, 2, text.replace("float64", "float32").replace("batch: 2", "batch: 1"))
    found = list(verdicts(plan, 2 * len(KINDS), seed=1))
    assert {verdict.outcome for verdict in found} <= {"killed", "safe", "by rule"}
    assert sum(verdict.outcome == "killed" for verdict in found) > 10
