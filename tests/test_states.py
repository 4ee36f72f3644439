"""The verifier against a search through all interleavings of tiny plans, which knows the machine, not our rules."""

import pytest

from stepgraph.planner.plan import Plan
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.mutate import mutants

from support.sizes import small_plan
from support.states import search

SIZES = {"model__layers": "1", "model__hidden": "8", "model__head_dim": "2", "model__heads": "4", "model__ffn": "8"}
PLANS: dict[str, tuple[str, dict[str, str]]] = {
    "memop": ("quickstart", {"mesh__ulysses": "2", "shape__seq": "4"}),
    "two layers, epochs": (
        "quickstart",
        {"mesh__ulysses": "2", "shape__seq": "4", "model__layers": "2", "defaults__handshake": "kernel"},
    ),
    "flags as copies": (
        "minimax_h3_u4",
        {"mesh__ulysses": "2", "shape__seq": "5", "defaults__gather__via": "copy", "defaults__handshake": "copy"},
    ),
    "sums": ("minimax_h3_tp2_u2", {"mesh__ulysses": "1", "shape__seq": "3", "defaults__all_reduce__via": "copy"}),
    "collectives": (
        "minimax_h3_tp2_u2",
        {"mesh__ulysses": "2", "mesh__tensor": "1", "shape__seq": "5", "defaults__gather__via": "nccl"},
    ),
    "three ranks": ("quickstart", {"mesh__ulysses": "3", "shape__seq": "5"}),
}
ORDER = {"E301", "E302", "E303", "E401", "E405"}
"""Codes that say: in some order of things this goes wrong. The others refuse what goes wrong in every order, or on
machines that serialise streams or capture, which the search does not model."""


def plan_of(name: str) -> Plan:
    schedule, more = PLANS[name]
    return small_plan(schedule, **{**SIZES, **more})


@pytest.mark.parametrize("replays", [2, 3])
@pytest.mark.parametrize("name", sorted(PLANS))
def test_sound_plans_go_right_in_every_order(name: str, replays: int) -> None:
    found = search(plan_of(name), replays, limit=60_000)
    assert found.exhausted
    assert found.states > 50
    assert not found.wrong


def compare(name: str, count: int, seed: int) -> tuple[int, int]:
    """(mutants that the search went through to the end, those that go wrong in some order)."""
    exhausted = wrong = 0
    for mutant in mutants(plan_of(name), count, seed):
        codes = {finding.code for finding in prove(mutant.plan).findings}
        found = search(mutant.plan)
        exhausted += found.exhausted
        wrong += bool(found.wrong)
        assert codes or not found.wrong, f"missed: {mutant.what}: {found.wrong}"
        assert found.wrong or not found.exhausted or not codes & ORDER, f"false alarm: {mutant.what}: {codes}"
    return exhausted, wrong


@pytest.mark.parametrize("name", sorted(set(PLANS) - {"three ranks"}))
def test_mutants_go_wrong_where_the_verifier_says_so(name: str) -> None:
    exhausted, wrong = compare(name, 57, seed=11)
    assert exhausted == 57
    assert wrong > 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(PLANS))
def test_many_mutants_go_wrong_where_the_verifier_says_so(name: str) -> None:
    exhausted, wrong = compare(name, 400, seed=12)
    print(f"\n{name}: {exhausted} of 400 mutants searched to the end, {wrong} go wrong in some order")
    assert wrong > 150
