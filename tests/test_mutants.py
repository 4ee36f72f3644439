"""The verifier is tried: plans with one random change are judged by it and by running them, and the two agree."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from stepgraph.planner.plan import Plan, Send
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.mutate import KINDS, meant_by, mutants, seen_by_running, verdicts
from stepgraph.tools import cli

from support.sizes import SHIPPED, small_plan

SIZES = {"model__layers": "1", "model__hidden": "8", "model__head_dim": "2", "model__heads": "4", "model__ffn": "8"}
VARIANTS: dict[str, dict[str, str]] = {
    "two layers, kernel": {"model__layers": "2", "mesh__ulysses": "2", "defaults__handshake": "kernel"},
    "two layers, memop": {"model__layers": "2", "mesh__ulysses": "2", "defaults__handshake": "memop"},
    "copies": {"defaults__gather__via": "copy", "defaults__all_reduce__via": "copy", "defaults__handshake": "copy"},
    "collectives": {"defaults__gather__via": "nccl", "defaults__all_reduce__via": "nccl"},
}


def plan_of(name: str, variant: str) -> Plan:
    more = dict(VARIANTS[variant])
    if "qwen" in name:  # whose last block's text is not read
        more["model__layers"] = "2"
    if "tp2" in name or "chunks" in name:  # in a group of one nothing waits; a rank has a head for each chunk
        more["mesh__ulysses"] = "2"
    return small_plan(name, **{**SIZES, **more})


def agree(plan: Plan, count: int, seed: int) -> Counter[str]:
    found = list(verdicts(plan, count, seed))
    wrong = [
        (v.outcome, v.mutant.what, v.codes, v.seen) for v in found if v.outcome not in ("killed", "safe", "by rule")
    ]
    assert not wrong, "\n".join(map(str, wrong))
    return Counter(verdict.outcome for verdict in found)


@pytest.mark.parametrize("variant", ["two layers, kernel", "copies"])
@pytest.mark.parametrize("name", ["quickstart", "minimax_h3_tp2_u2"])
def test_verifier_and_runs_agree(name: str, variant: str) -> None:
    outcomes = agree(plan_of(name, variant), 3 * len(KINDS), seed=1)
    assert outcomes["killed"] > 20
    assert outcomes["safe"] > 0
    assert outcomes["by rule"] <= 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("name", SHIPPED)
def test_verifier_and_runs_agree_on_many(name: str, variant: str) -> None:
    outcomes = agree(plan_of(name, variant), 100, seed=2)
    print(f"\n{name}, {variant}: {dict(outcomes)}")
    assert outcomes["killed"] > 40
    assert outcomes["by rule"] <= 8


def test_mutants_are_those_of_their_seed() -> None:
    plan = plan_of("quickstart", "two layers, memop")
    one, two, other = ([mutant.plan for mutant in mutants(plan, 30, seed)] for seed in (4, 4, 5))
    assert one == two != other
    assert all(changed != plan for changed in one)


@pytest.mark.parametrize("taken", ["kcache[1]", "vcache[0]"])
def test_a_state_in_place_of_another_is_seen(taken: str) -> None:
    """Every rank sends keys into another layer's or another state, and reads them there before that is written: what
    other versions of the step find in the states is not what they mean."""
    plan = plan_of("lingbot_world_v2_u4", "two layers, kernel")
    buffers = {state.name: state.buffer for state in plan.states}
    old, new = buffers["kcache[0]"], buffers[taken]
    first = {number for number, op in enumerate(plan.ops) if op.layer == 0}
    ranks = []
    for program in plan.ranks:
        items = [
            replace(item, target=new) if isinstance(item, Send) and item.target == old and item.op in first else item
            for item in program.instructions
        ]
        views = tuple(replace(view, buffer=new) if view.buffer == old else view for view in program.views)
        ranks.append(replace(program, instructions=tuple(items), views=views))
    edited = replace(plan, ranks=tuple(ranks))
    codes = {(finding.code, finding.expected, finding.got) for finding in prove(edited).findings}
    assert {(code, "kcache[0]", taken) for code in ("E306", "E307")} <= codes
    assert seen_by_running(edited, 0, meant_by(plan)) == "read wrong"


@pytest.mark.parametrize(("moved", "over"), [("vcache[0]", "vcache[1]"), ("step.all_gather:noise.0", "kcache[1]")])
def test_what_lies_in_a_state_is_seen(moved: str, over: str) -> None:
    """Also where no step of this plan reads those bytes again before they are written."""
    plan = plan_of("lingbot_world_v2_u4", "two layers, memop")
    place = {target.name: target for target in plan.targets}
    last_rows = place[over].offset + place[over].nbytes - 16
    offset = place[over].offset if moved.startswith("vcache") else last_rows
    targets = tuple(replace(one, offset=offset) if one.name == moved else one for one in plan.targets)
    edited = replace(plan, targets=targets, arena_bytes=plan.arena_bytes + 4096)
    told = {finding.message: finding.code for finding in prove(edited).findings}
    later, earlier = sorted((moved, over), key=list(place).index, reverse=True)
    assert told[f"{later} lies where the step leaves the state {earlier}"] == "E306"
    assert seen_by_running(edited, 0, meant_by(plan)) is not None


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--set=model.layers=1,shape.seq=5,model.hidden=8,model.head_dim=2,model.ffn=8,mesh.ulysses=2"
    assert cli.run(["verify", "quickstart", "--mutate", "23", "--seed", "3", "--format", "json", small]) == 0
    data = json.loads(capsys.readouterr().out)["mutants"]
    safe = sum(kind.get("safe", 0) for kind in data["by_kind"].values())
    assert data["total"] == 23 == data["unsafe"] + safe + data["by_rule"]
    assert data["unsafe"] == data["killed"] > 5
    assert data["missed"] == data["false_alarms"] == 0
    assert cli.run(["verify", "quickstart", "--mutate", "5", small]) == 0
    told = capsys.readouterr().out
    assert "unsafe mutants killed, 0 false alarms" in told
    assert "drop an event" in told
