"""The verifier against its oracles on random plans: compiled ones, hand-made ones, and both with several changes."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from stepgraph.runtime.mutate import RULES

from support.random_plans import FAMILIES, Drawn, on_one_queue, opinions
from support.states import search

QUEUES = 3
"""Orders of a rank's streams, where one queue runs them."""


def outcomes_of(family: str, count: int, states: int) -> Counter[tuple[str, str]]:
    """Judge some plans of a family. A proven one goes right in every order that was tried, also on hardware that runs a
    rank's streams one behind another; one that goes right in every order there is, is proven, or breaks but a rule of
    the protocol."""
    outcomes: Counter[tuple[str, str]] = Counter()

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(FAMILIES[family])
    def judge(drawn: Drawn) -> None:
        plan, replays = drawn.plan, 3 if "hand-made" in family else 2
        found = opinions(plan, seeds=8, states=states, replays=replays, base=drawn.base)
        assert not found.unsafe or found.codes, f"missed: {found}"
        assert not found.safe or found.codes <= RULES, f"false alarm: {found}"
        if not found.codes:
            for number in range(QUEUES):
                queued = search(on_one_queue(plan, random.Random(number)), limit=states // 5)
                assert not queued.wrong, f"missed on one queue: {queued}"
        shown = "unsafe" if found.unsafe else "safe" if found.safe else "undecided"
        outcomes["refused" if found.codes else "proven", shown] += 1

    judge()
    return outcomes


def test_verifier_and_oracles_agree_on_random_plans() -> None:
    counts = {
        "compiled": 8,
        "compiled, edited": 14,
        "with state": 6,
        "with state, edited": 12,
        "hand-made": 20,
        "hand-made, edited": 20,
    }
    found = sum((outcomes_of(family, count, states=1_000) for family, count in counts.items()), Counter())
    assert found.total() >= 60
    assert found["proven", "safe"] >= 12
    assert found["refused", "unsafe"] >= 24
    assert found["proven", "undecided"] + found["refused", "undecided"] <= 12


SAFE = {
    "compiled": 0.6,
    "compiled, edited": 0.02,
    "with state": 0.5,
    "with state, edited": 0.02,
    "hand-made": 0.2,
    "hand-made, edited": 0.08,
}
"""The least share of plans that go right in every order there is."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_verifier_and_oracles_agree_on_many_random_plans(family: str) -> None:
    found = outcomes_of(family, 500, states=4_000)
    print(f"\n{family}: {dict(found)}")
    assert found.total() == 500
    assert found["proven", "safe"] >= SAFE[family] * 500
    assert found["refused", "unsafe"] >= 200 or family in ("compiled", "with state")
    assert found["refused", "undecided"] <= 10
    assert found["refused", "safe"] <= 15
