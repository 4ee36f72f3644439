"""States over the versions of a plan set: what one leaves another finds, over variants, buckets and requests."""

from collections.abc import Generator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stepgraph.kernels.unsharded import Unsharded
from stepgraph.planner.compile import check_schedules, compile_set
from stepgraph.planner.diagnostics import ScheduleError
from stepgraph.planner.plan import Reset, Run, Signal, Wait
from stepgraph.planner.plan_check import check_plan
from stepgraph.planner.plan_set import PlanSet, dumps, loads
from stepgraph.planner.schedule import Schedule, read_schedule
from stepgraph.planner.verify.proof import prove
from stepgraph.planner.verify.succession import prove_set
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.mutate import with_program
from stepgraph.runtime.session import Session, StepOf
from stepgraph.runtime.walk import walk_order

CHUNKS = """version: 1
name: chunks
model: {layers: 2, hidden: 12, heads: 6, head_dim: 4, ffn: 8, dtype: float64}
mesh: {ulysses: 2}
shape: {batch: 1, seq: 5, cache: 16, kv: 5, past: 0}
inputs:
  latents: {shape: [batch, seq, 6]}
outputs: [noise]
state:
  kcache: {shape: [batch, cache, kv_heads, head_dim], placement: head, per: layer}
  vcache: {shape: [batch, cache, kv_heads, head_dim], placement: head, per: layer}
  middle: {shape: [batch, seq, hidden], placement: sequence}
  steps: {shape: [batch, seq, hidden], placement: sequence}
defaults: {gather: {via: copy}}
blocks:
  layer:
    - linear: {name: qkv, in: x, out: {q: heads, k: kv_heads, v: kv_heads}}
    - send: {in: v, into: vcache, at: past}
    - send: q
    - send: {in: k, into: kcache, at: past, barrier: true}
    - attention: {in: [q, kcache, vcache], keys: kv, out: o}
    - gather: o
    - linear: {name: out_proj, in: o, out: a}
    - residual: {in: [x, a], out: x}
variants:
  full:
    step:
      - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
      - shard: x
      - residual: {name: add_steps, in: [x, steps], out: steps}
      - layers: layer
      - keep: {in: x, into: middle}
      - call: {name: head, in: x, out: noise, shape: [batch, seq, 6]}
      - all_gather: noise
  cached:
    after: [full, cached]
    step:
      - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
      - shard: x
      - residual: {in: [x, middle], out: x}
      - call: {name: head, in: x, out: noise, shape: [batch, seq, 6]}
      - all_gather: noise
  look:
    outputs: [seen]
    step:
      - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
      - shard: x
      - layers: [{block: peek, repeat: 2}]
      - residual: {in: [x, steps], out: x}
      - call: {name: head, in: x, out: seen, shape: [batch, seq, 6]}
      - all_gather: seen
buckets:
  first: {kv: 5, past: 0}
  second: {kv: 10, past: 5}
  third: {kv: 15, past: 10}
""".replace(
    "variants:",
    """  peek:
    - linear: {name: q_of_x, in: x, out: {q: heads}}
    - send: {in: q, barrier: true}
    - attention: {in: [q, kcache, vcache], keys: kv, out: o}
    - gather: o
    - linear: {name: out_proj, in: o, out: a}
    - residual: {in: [x, a], out: x}
variants:""",
)


def schedule(text: str = CHUNKS, **settings: str) -> Schedule:
    return read_schedule(text, "chunks.yaml", tuple((key.replace("__", "."), v) for key, v in settings.items()))


def unsharded(source: Schedule, steps: Sequence[tuple[str, str]], inputs: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """One model of each version, over the same states."""
    models = {version.version: Unsharded(version, 7) for version in source.versions()}
    states = next(iter(models.values())).states
    for model in models.values():
        model.states = states
    return [models["/".join(step)](given)[0] for step, given in zip(steps, inputs, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_versions_share_what_they_leave(ranks: int, seed: int) -> None:
    source = schedule(mesh__ulysses=str(ranks))
    plans = compile_set(source)
    steps = walk_order(plans, 30, seed)
    inputs = [random_inputs(plans.plan(*step), number) for number, step in enumerate(steps)]
    want = unsharded(source, steps, inputs)
    seen: list[list[Tensor]] = [[] for _ in range(ranks)]

    def loop(rank: int) -> Generator[StepOf, tuple[Tensor, ...], None]:
        for step, given in zip(steps, inputs, strict=True):
            (output,) = yield StepOf(given, *step)
            seen[rank].append(output)

    with torch.no_grad(), Session(plans, device="cpu", seed=7) as session:
        session.drive(loop)
        assert session.report.ok, (session.report.races[:1], session.report.faults[:1])
    for outputs in seen:
        for number, (got, exact) in enumerate(zip(outputs, want, strict=True)):
            torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12, msg=f"step {number}, {steps[number]}")


def test_states_lie_at_one_place_in_every_version() -> None:
    plans = compile_set(schedule())
    proof = prove_set(plans.versions(), plans.follows())
    assert proof.ok, proof.findings[:2]
    assert loads(dumps(plans)) == plans
    for name in ("kcache[0]", "kcache[1]", "vcache[0]", "vcache[1]"):
        places = [
            (plan.targets[state.buffer].offset, plan.targets[state.buffer].nbytes)
            for plan in plans.plans for state in plan.states if state.name == name
        ]  # fmt: skip
        assert len(places) == 6  # the plans of two variants
        assert len(set(places)) == 1
    end = 4 * 16 * 3 * 4 * 8  # four caches of 16 rows and, on a rank, 3 heads
    for plan in plans.plans:
        states = plan.state_buffers
        assert all(t.offset >= end for number, t in enumerate(plan.targets) if number not in states)
    assert plans.arena_bytes == plans.plans[0].arena_lower_bound


IDLE = """version: 1
name: idle
model: {layers: 1, hidden: 12, heads: 6, head_dim: 4, ffn: 8, dtype: float64}
mesh: {ulysses: 2}
shape: {seq: 5}
inputs:
  latents: {shape: [batch, seq, 6]}
outputs: [latents]
state:
  kcache: {shape: [batch, seq, heads, head_dim], placement: head}
  copied: {shape: [batch, seq, heads, head_dim], placement: head}
variants:
  full:
    outputs: []
    step:
      - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
      - shard: x
      - linear: {in: x, out: {k: heads}}
      - send: {in: k, into: kcache, barrier: true}
      - residual: {in: [kcache, copied], out: copied}
  idle:
    outputs: []
    step:
      - keep: {in: kcache, into: copied}
"""


def race_seen(plans: PlanSet) -> bool:
    """Whether some interleaving of both versions, one after the other, shows a race."""
    inputs = random_inputs(plans.plans[0], 0)

    def loop(rank: int) -> Generator[StepOf, tuple[Tensor, ...], None]:
        for number in range(6):
            _ = yield StepOf({}, "idle") if number % 2 else StepOf(inputs, "full")

    for seed in range(12):
        with torch.no_grad(), Session(plans, device="cpu", seed=seed) as session:
            session.drive(loop)
            if session.report.races:
                return True
            assert session.report.ok
    return False


def test_a_version_that_only_reads_what_peers_write_is_closed() -> None:
    """Without an exchange of its own, a rank that is ahead would send into a state that another still reads."""
    plans = compile_set(schedule(IDLE))
    idle = plans.plan("idle")
    assert [exchange.name for exchange in idle.exchanges] == ["step.closing_ulysses", "step.closing_ulysses_2"]
    assert prove_set(plans.versions(), plans.follows()).ok
    assert not race_seen(plans)
    open_end = idle
    for rank, program in enumerate(idle.ranks):
        kept = [item for item in program.instructions if not isinstance(item, Signal | Wait | Reset)]
        open_end = with_program(open_end, rank, kept)
    opened = replace(plans, plans=(plans.plans[0], replace(open_end, exchanges=())))
    proof = prove_set(opened.versions(), opened.follows())
    assert {found.code for found in proof.findings} == {"E303"}
    assert race_seen(opened)


def test_what_would_overwrite_a_state_of_another_version_is_refused() -> None:
    plans = compile_set(schedule())
    cached = plans.plan("cached", "first")
    moved = replace(cached, targets=tuple(replace(target, offset=0) for target in cached.targets))
    found = replace(plans, plans=tuple(moved if plan is cached else plan for plan in plans.plans))
    proof = prove_set(found.versions(), found.follows())
    assert {finding.code for finding in proof.successions} == {"E306"}


def test_a_state_that_no_version_writes_is_refused() -> None:
    """As under another name than the one in which it is left: it stays zero."""
    plans = compile_set(schedule())
    cached = plans.plan("cached", "second")
    states = tuple(replace(state, name=f"other_{state.name}") for state in cached.states)
    renamed = replace(cached, states=states)
    found = replace(plans, plans=tuple(renamed if plan is cached else plan for plan in plans.plans))
    proof = prove_set(found.versions(), found.follows())
    assert [finding.code for finding in proof.findings if "no version writes it" in finding.message] == ["E307"]
    told = next(finding for finding in proof.findings if "no version writes it" in finding.message)
    assert "cached/second reads the state other_middle" in told.message
    assert "rank 0, stream" in told.got
    assert told.place is not None
    assert "residual: {in: [x, middle], out: x}" in told.place.text


@pytest.mark.parametrize(
    ("version", "op", "field", "code", "message"),
    [
        ("look", "peek.attention", "inputs", "E307", "rank 1 reads kcache[0] in peek.attention[0]"),
        ("full", "step.keep", "outputs", "E306", "rank 1 writes steps in step.keep"),
    ],
)
def test_a_state_that_is_taken_for_another(version: str, op: str, field: str, code: str, message: str) -> None:
    """Nothing in a step tells who has left what is in a state; its name does."""
    plan = compile_set(schedule()).plan(version, "first")
    program = plan.ranks[1]
    number = next(n for n, i in enumerate(program.instructions) if isinstance(i, Run) and plan.ops[i.op].name == op)
    item = program.instructions[number]
    assert isinstance(item, Run)
    if field == "inputs":
        changed = replace(item, inputs=(item.inputs[0], item.inputs[1], item.inputs[1]))
    else:
        (made,) = (program.views[view] for view in item.outputs)
        steps = next(state.buffer for state in plan.states if state.name == "steps")
        program = replace(program, views=(*program.views, replace(made, buffer=steps)))
        changed = replace(item, outputs=(len(program.views) - 1,))
    ranks = (plan.ranks[0], replace(program, instructions=(*program.instructions[:number], changed,
                                                            *program.instructions[number + 1 :])))  # fmt: skip
    edited = replace(plan, ranks=ranks)
    assert check_plan(edited) is None
    told = [finding for finding in prove(edited).findings if finding.message.startswith(message)]
    assert [finding.code for finding in told] == [code]
    assert told[0].place is not None


def codes(text: str) -> list[str]:
    """What compiling tells, and checking tells alike."""
    with pytest.raises(ScheduleError) as error:
        compile_set(schedule(text))
    with pytest.raises(ScheduleError) as checked:
        check_schedules(schedule(text))
    assert checked.value.diagnostics == error.value.diagnostics
    return [found.code for found in error.value.diagnostics]


def test_a_state_whose_shape_varies_is_one_of_each_bucket() -> None:
    plans = compile_set(schedule(CHUNKS.replace("{shape: [batch, cache,", "{shape: [batch, kv,")))
    names = {state.name for plan in plans.plans for state in plan.states}
    each = [(cache, layer, bucket) for cache in "kv" for layer in (0, 1) for bucket in ("first", "second", "third")]
    caches = {f"{cache}cache[{layer}]@{bucket}" for cache, layer, bucket in each}
    assert names == caches | {"middle", "steps"}
    assert loads(dumps(plans)) == plans


def test_a_state_lies_at_one_place() -> None:
    plans = compile_set(schedule())
    plan = plans.plans[0]
    moved = replace(plan.targets[0], offset=plan.targets[1].offset)
    other = replace(plans, plans=(replace(plan, targets=(moved, *plan.targets[1:])), *plans.plans[1:]))
    with pytest.raises(Exception, match="has two shapes or places"):
        loads(dumps(other))


def test_a_state_is_read_by_a_version_and_written_by_one() -> None:
    assert codes(CHUNKS.replace("      - keep: {in: x, into: middle}\n", "")) == ["E202"]
    assert codes(CHUNKS.replace("in: [x, middle]", "in: [x, x]")) == ["E202"]


def test_bucket_sizes_that_are_none() -> None:
    assert codes_of_parsing(CHUNKS.replace("first: {kv: 5", "first: {seq: 0, kv: 5")) == ["E103"]
    assert codes_of_parsing(CHUNKS.replace("first: {kv: 5", "first: {kvv: 5")) == ["E214"]


def codes_of_parsing(text: str) -> list[str]:
    with pytest.raises(ScheduleError) as error:
        schedule(text)
    return [found.code for found in error.value.diagnostics]
