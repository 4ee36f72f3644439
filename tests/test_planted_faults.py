"""The verifier and the interleaving device judge the same plans independently, and agree."""

import pytest

import stepgraph
from stepgraph.planner.verify.proof import prove

from support.mutate import PLANTED, fault_of

TINY = {"shape.seq": 9, "model.hidden": 16, "model.head_dim": 2, "model.ffn": 8}
SEEDS = 200


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("kind", sorted(PLANTED))
def test_planted_faults_are_caught_by_both(kind: str, rank: int) -> None:
    """Each is refused by the verifier and caught in one of 200 interleavings, or accepted and caught in none."""
    plan = stepgraph.compile("quickstart", TINY)
    planted = 0
    for name, mutant in PLANTED[kind](plan, rank):
        planted += 1
        refused = not prove(mutant).ok
        caught = next((seed for seed in range(SEEDS) if fault_of(mutant, seed)), None)
        assert refused == (caught is not None), f"{name}: refused {refused}, caught by seed {caught}"
    assert planted > 0


def test_no_event_of_the_quickstart_can_be_spared() -> None:
    plan = stepgraph.compile("quickstart", TINY)
    for rank in range(4):
        for name, mutant in PLANTED["event"](plan, rank):
            assert not prove(mutant).ok, name


@pytest.mark.parametrize("handshake", ["memop", "copy", "kernel"])
def test_the_sound_plan_is_accepted_and_never_caught(handshake: str) -> None:
    plan = stepgraph.compile("quickstart", {**TINY, "defaults.handshake": handshake})
    assert prove(plan).ok
    assert [fault_of(plan, seed) for seed in range(20)] == [None] * 20
