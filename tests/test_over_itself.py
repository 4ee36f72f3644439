"""Instructions that write where they read: what nothing orders is refused, and what is read first is fine."""

from dataclasses import replace

import pytest

from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.plan import ALIGNMENT, Collective, Drop, Plan, Region, Run
from stepgraph.planner.plan_check import check_plan
from stepgraph.planner.schedule import read_schedule
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.mutate import meant_by, seen_by_running, with_program

from support.sizes import small_plan

THERE_AND_BACK = """
version: 1
name: there_and_back
model: {layers: 1, hidden: 8, heads: 4, head_dim: 2, ffn: 8, dtype: float32}
mesh: {ulysses: RANKS}
shape: {batch: 1, seq: 32}
inputs:
  latents: {shape: [batch, seq, 8]}
outputs: [noise]
streams: {compute: {}, copy: {}}
defaults: {gather: {via: copy}, all_gather: {via: copy}}
blocks:
  block:
    - linear: {name: qkv, in: x, out: {q: heads, k: heads, v: heads}}
    - send: v
    - send: q
    - send: {in: k, barrier: true}
    - attention: {in: [q, k, v], out: o}
    - gather: {name: first, in: o}
    - send: {name: again, in: o, barrier: true}
    - gather: {name: second, in: o}
    - send: {name: once_more, in: o, barrier: true}
    - gather: {name: last, in: o, via: nccl}
    - linear: {name: out, in: o, out: a}
    - residual: {in: [x, a], out: x}
step:
  - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
  - shard: x
  - layers: block
  - call: {name: head, in: x, out: noise, shape: [batch, seq, 8]}
  - all_gather: noise
"""


def plan_of(ranks: int) -> Plan:
    return compile_schedule(read_schedule(THERE_AND_BACK.replace("RANKS", str(ranks)), "there.yaml"))


def target(plan: Plan, op: str) -> int:
    return next(n for n, found in enumerate(plan.targets) if found.name.startswith(f"block.{op}:"))


def placed(plan: Plan, one: int, offset: int) -> Plan:
    """The plan with a target at another offset, in a larger arena."""
    moved = replace(plan.targets[one], offset=offset)
    targets = (*plan.targets[:one], moved, *plan.targets[one + 1 :])
    plan = replace(plan, targets=targets, arena_bytes=max(plan.arena_bytes, offset + moved.nbytes))
    assert check_plan(plan) is None
    return plan


def codes(plan: Plan) -> set[str]:
    return {finding.code for finding in prove(plan).findings}


@pytest.mark.parametrize("shift", [0, ALIGNMENT])
def test_a_copy_to_oneself_that_meets_its_source(shift: int) -> None:
    plan = plan_of(1)
    assert codes(plan) == set()
    source = plan.targets[target(plan, "first")]
    over = placed(plan, target(plan, "again"), source.offset + shift)
    (finding,) = prove(over).findings
    assert finding.code == "E306"
    assert finding.message == "block.again[0] writes over what it reads on rank 0"
    assert seen_by_running(over, 0) == "over itself"
    beside = placed(plan, target(plan, "again"), plan.arena_bytes)
    assert codes(beside) == set()
    assert seen_by_running(beside, 0) is None


def test_a_stage_that_changes_what_else_it_reads() -> None:
    """`norm_rope` of q and k, where both are in part the same."""
    plan = small_plan("quickstart", model__layers="1", mesh__ulysses="2")
    program = plan.ranks[0]
    found = [item for item in program.instructions if isinstance(item, Run) and set(item.inputs) & set(item.outputs)]
    stage = found[0]
    q, k = (program.views[number] for number in stage.outputs)
    assert q.buffer == k.buffer
    views = (*program.views, replace(k, region=replace(k.region, col=q.region.col + 1)))
    items = list(program.instructions)
    items[items.index(stage)] = replace(
        stage,
        inputs=tuple(len(views) - 1 if number == stage.outputs[1] else number for number in stage.inputs),
        outputs=(stage.outputs[0], len(views) - 1),
    )
    over = replace(plan, ranks=(replace(program, views=views, instructions=tuple(items)), *plan.ranks[1:]))
    assert check_plan(over) is None
    told = [finding.message for finding in prove(over).findings if finding.code == "E306"]
    assert "self_attention.norm_rope[0] writes over what it reads on rank 0" in told
    assert seen_by_running(over, 0) == "over itself"


def test_a_collective_reads_before_it_writes() -> None:
    """What is gathered comes to where it was given from: all of it is read first, on every device."""
    plan = plan_of(2)
    into = target(plan, "first")
    safe = placed(placed(plan, target(plan, "once_more"), plan.arena_bytes), into, plan.arena_bytes)
    for rank, program in enumerate(safe.ranks):
        (gather,) = (item for item in program.instructions if isinstance(item, Collective))
        local = program.views[gather.incoming[0].view].buffer
        views = [replace(view, buffer=into) if view.buffer == local else view for view in program.views]
        kept = [i for i in program.instructions if not (isinstance(i, Drop) and i.buffer == local)]
        ranks = [*safe.ranks]
        ranks[rank] = replace(program, views=tuple(views))
        safe = with_program(replace(safe, ranks=tuple(ranks)), rank, kept)
    assert check_plan(safe) is None
    box = safe.ranks[0].buffers[into]
    assert any(view.buffer == into and view.region == Region(0, box.rows, 0, box.cols) for view in safe.ranks[0].views)
    assert codes(safe) == set()
    meant = meant_by(plan)
    assert meant is not None
    assert {seen_by_running(safe, seed, meant) for seed in range(4)} == {None}
