"""The verifier and the interleaving device judge the same plans independently, and agree."""

import pytest

import stepgraph
from stepgraph.planner.verify.proof import prove

from support.mutate import PLANTED, fault_of
from support.sizes import SHIPPED, small_plan

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


@pytest.mark.parametrize("via", ["copy", "nccl"])
@pytest.mark.parametrize("name", SHIPPED)
def test_no_event_can_be_spared(name: str, via: str) -> None:
    """Events are minimal: without any one of them, on any rank, a plan is refused."""
    plan = small_plan(name, **{f"defaults__{kind}__via": via for kind in ("gather", "all_gather", "all_reduce")})
    for rank in range(plan.world_size):
        for what, mutant in PLANTED["event"](plan, rank):
            assert not prove(mutant).ok, what


@pytest.mark.parametrize("handshake", ["memop", "copy", "kernel"])
def test_the_sound_plan_is_accepted_and_never_caught(handshake: str) -> None:
    plan = stepgraph.compile("quickstart", {**TINY, "defaults.handshake": handshake})
    assert prove(plan).ok
    assert [fault_of(plan, seed) for seed in range(20)] == [None] * 20
