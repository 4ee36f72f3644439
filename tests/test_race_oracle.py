"""The verifier's one walk over memory finds a race where there is one among all pairs of accesses, and nowhere else."""

import random
from dataclasses import replace

import pytest

from stepgraph.planner.plan import Plan, Record, Send, Target, Wait, WaitEvent
from stepgraph.planner.verify.counterexample import Unordered
from stepgraph.planner.verify.order import order_of
from stepgraph.planner.verify.races import races
from stepgraph.runtime.mutate import with_program

from support.all_pairs import has_race
from support.sizes import small_plan

SIZES = {
    "model__layers": "1",
    "model__hidden": "8",
    "model__head_dim": "2",
    "model__heads": "4",
    "model__ffn": "8",
    "mesh__ulysses": "2",
}


def plans() -> dict[str, Plan]:
    found = {
        f"{name}, {handshake}, {via}": small_plan(
            name, **SIZES, **rows, defaults__handshake=handshake, defaults__gather__via=via
        )
        for name, handshake, via, rows in (
            ("quickstart", "memop", "copy", {"shape__seq": "5"}),
            ("quickstart", "kernel", "copy", {"shape__seq": "5"}),
            ("minimax_h3_u4", "copy", "nccl", {"shape__seq": "5"}),
            ("lingbot_world_v2_u4", "memop", "copy", {"shape__seq__vid": "5", "shape__seq__txt": "3"}),
        )
    }
    found["all-reduce by copies"] = small_plan(
        "minimax_h3_tp2_u2", **{**SIZES, "mesh__ulysses": "1"}, shape__seq="5", defaults__all_reduce__via="copy"
    )
    return found


def mutant(plan: Plan, chance: random.Random) -> Plan:
    """One random change: an edge lost, a flag lost, a copy moved, two neighbours swapped, a target shifted."""
    rank = chance.randrange(plan.world_size)
    items = list(plan.ranks[rank].instructions)
    kind = chance.choice(["edge", "flag", "swap", "stream", "shift"])
    if kind == "edge":
        event = chance.choice([item.event for item in items if isinstance(item, Record)])
        items = [i for i in items if not (isinstance(i, Record | WaitEvent) and i.event == event)]
    elif kind == "flag":
        number = chance.choice([n for n, item in enumerate(items) if isinstance(item, Wait)])
        del items[number]
    elif kind == "swap":
        number = chance.randrange(len(items) - 1)
        items[number], items[number + 1] = items[number + 1], items[number]
    elif kind == "stream":
        number = chance.choice([n for n, item in enumerate(items) if isinstance(item, Send)])
        items[number] = replace(items[number], stream=chance.randrange(len(plan.streams)))
    else:
        number = chance.randrange(len(plan.targets))
        found: Target = plan.targets[number]
        offset = min(chance.randrange(0, plan.arena_bytes, 8), plan.arena_bytes - found.nbytes)
        return replace(
            plan, targets=(*plan.targets[:number], replace(found, offset=offset), *plan.targets[number + 1 :])
        )
    return with_program(plan, rank, items)


def verdicts(plan: Plan) -> tuple[bool, bool] | None:
    """(verifier, all pairs) on whether there is a race; None where the step does not finish."""
    order = order_of([plan, plan])
    if order.stuck:
        return None
    found, _ = races(order)
    return any(isinstance(finding, Unordered) for finding in found), has_race([plan, plan])


def judge(name: str, seeds: range) -> int:
    plan, raced = plans()[name], 0
    assert verdicts(plan) == (False, False)
    for seed in seeds:
        changed = mutant(plan, random.Random(seed))
        found = verdicts(changed)
        if found is not None:
            assert found[0] == found[1], f"{name}, seed {seed}: verifier {found[0]}, all pairs {found[1]}"
            raced += found[0]
    return raced


@pytest.mark.parametrize("name", sorted(plans()))
def test_races_are_those_of_all_pairs(name: str) -> None:
    assert judge(name, range(60)) > 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(plans()))
def test_races_are_those_of_all_pairs_many_times(name: str) -> None:
    assert judge(name, range(1000, 2000)) > 100
