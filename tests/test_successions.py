"""Plans that follow one another on the same ranks, in one arena and one page of flags."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepgraph.planner.plan import Plan, Protocol
from stepgraph.planner.verify.succession import Follows, SetProof, prove_set

from support.hand_made import Draft
from support.random_sets import goes_wrong, placed, sets_by_hand, sets_of_schedules
from support.states import search_word

EVERY = {"a": ("a", "b"), "b": ("a", "b")}


def step(first_slot: int, closes: bool = False, protocol: Protocol = Protocol.MEMOP, late: bool = False) -> Plan:
    """Two exchanges in turn, through two targets. Followed by itself it is sound: what it reads last is sent again
    only behind the next replay's first exchange. Another plan may send there first. ``late``: the last read comes
    behind the closing handshake."""
    draft = Draft((1, 1), first_slot=first_slot)
    targets = [draft.target("even"), draft.target("odd")]
    movings = [draft.move(f"move {number}", target, protocol) for number, target in enumerate(targets)]
    makes, uses = ([draft.op("call", name) for _ in movings] for name in ("make", "use"))
    closing = draft.exchange("closing", protocol=protocol) if closes else None
    for rank in draft.ranks:
        for moving, make, use in zip(movings, makes, uses, strict=True):
            rank.send(0, moving, rank.make(0, make))
            rank.handshake(0, moving.exchange)
            if not late or moving is movings[0]:
                rank.make(0, use, [rank.whole(moving.target)])
        if closing is not None:
            rank.handshake(0, closing)
        if late:
            rank.make(0, uses[1], [rank.whole(movings[1].target)])
    return draft.plan()


def swapped(plan: Plan) -> Plan:
    """The plan with its two targets in each other's place."""
    return placed(plan, {0: plan.targets[1].offset, 1: plan.targets[0].offset})


def quiet(ranks: int = 2) -> Plan:
    """A step without exchanges."""
    draft = Draft((1,) * ranks)
    make = draft.op("call", "make")
    for rank in draft.ranks:
        rank.make(0, make)
    return draft.plan()


def codes(proof: SetProof) -> set[str]:
    return {found.code for found in proof.findings}


def judged(plans: dict[str, Plan], follows: Follows, length: int = 3) -> tuple[SetProof, tuple[str, ...] | None]:
    """The proof, and the shortest run that goes wrong by the judgement of all pairs; the search of states agrees."""
    proof, wrong = prove_set(plans, follows), goes_wrong(plans, follows, length)
    if wrong is not None:
        assert search_word([plans[name] for name in wrong]).wrong
    return proof, wrong


def test_plans_that_place_their_targets_alike_follow_one_another() -> None:
    plans = {"a": step(0), "b": step(100)}
    proof, wrong = judged(plans, EVERY)
    assert codes(proof) == set()
    assert wrong is None
    assert (proof.closed, proof.words) == (0, 2)
    assert search_word([*plans.values()]).exhausted
    assert not search_word([*plans.values()]).wrong


def test_what_a_plan_reads_last_is_where_the_next_one_sends_first() -> None:
    proof, wrong = judged({"a": step(0), "b": swapped(step(100))}, EVERY)
    assert codes(proof) == {"E303"}
    assert wrong == ("a", "b")
    messages = [found.message for found in proof.successions]
    assert [message.split(":")[0] for message in messages] == ["at the succession a -> b", "at the succession b -> a"]
    assert "between a and b" in messages[0]
    assert "use, line 1 (rank 0, stream compute" in proof.successions[0].expected
    assert "end a with a handshake of all its ranks" in (proof.successions[0].hint or "")


def test_only_what_is_allowed_is_looked_at() -> None:
    """b is first sent to where a reads last, and not the other way round."""
    plans = {"a": step(0), "b": swapped(step(100, closes=True))}
    assert codes(prove_set(plans, {"a": ("b",), "b": ("b",)})) == set()
    assert [f.message.split(":")[0] for f in prove_set(plans, EVERY).successions] == ["at the succession a -> b"]


def test_a_closed_plan_needs_no_words() -> None:
    plans = {"a": step(0, closes=True), "b": swapped(step(100, closes=True))}
    proof, wrong = judged(plans, EVERY)
    assert codes(proof) == set()
    assert wrong is None
    assert (proof.closed, proof.words) == (4, 0)


def test_a_read_behind_the_closing_handshake() -> None:
    """Then the plan is not closed, though it ends an exchange of all ranks; b sends before it has heard of the read."""
    plans = {"a": step(0, closes=True, late=True), "b": swapped(step(100))}
    proof, wrong = judged(plans, {"b": ("a",)})
    assert codes(proof) == {"E303"}
    assert wrong == ("a", "b")
    assert (proof.closed, proof.words) == (0, 1)


def test_a_plan_without_exchanges_between_two_others() -> None:
    """b never follows a directly; but a rank that is through with a goes through the quiet one, and on to b."""
    follows = {"quiet": ("a",), "b": ("quiet",)}
    plans = {"a": step(0), "quiet": quiet(), "b": swapped(step(100))}
    proof, wrong = judged(plans, follows)
    assert codes(proof) == {"E303"}
    assert wrong == ("a", "quiet", "b")
    assert proof.successions[0].message.startswith("at the succession a -> quiet -> b: ")
    assert proof.words == 3
    plans["a"] = step(0, closes=True)
    proof, wrong = judged(plans, follows)
    assert codes(proof) == set()
    assert wrong is None
    assert (proof.closed, proof.words) == (1, 1)


def test_several_plans_without_exchanges_in_a_row() -> None:
    follows = {"one": ("a", "two"), "two": ("one",), "b": ("two",)}
    plans = {"a": step(0), "one": quiet(), "two": quiet(), "b": swapped(step(100))}
    proof, wrong = judged(plans, follows, 4)
    assert [found.message.split(":")[0] for found in proof.successions] == ["at the succession a -> one -> two -> b"]
    assert wrong == ("a", "one", "two", "b")


def test_a_plan_with_exchanges_of_some_ranks_between_two_others() -> None:
    """The pair's exchange does not tell the third rank anything."""

    def trio(first_slot: int, first: bool, closes: bool) -> Plan:
        """Sends behind an exchange, or before anything else; closes, or reads behind its last exchange."""
        draft = Draft((1, 1, 1), first_slot=first_slot)
        moving, make, use = draft.move("move", draft.target("t")), draft.op("call", "make"), draft.op("call", "use")
        before = [] if first else [draft.exchange("before")]
        behind = [draft.exchange("closing")] if closes else []
        for rank in draft.ranks:
            source = rank.make(0, make)
            for number in before:
                rank.handshake(0, number)
            rank.send(0, moving, source)
            rank.handshake(0, moving.exchange)
            rank.make(0, use, [rank.whole(moving.target)])
            for number in behind:
                rank.handshake(0, number)
        return draft.plan()

    plans = {"a": trio(0, False, False), "pair": pair(), "b": trio(200, True, True)}
    proof, wrong = judged(plans, {"pair": ("a",), "b": ("pair",)})
    assert codes(proof) == {"E303"}
    assert wrong == ("a", "pair", "b")
    assert {found.message.split(":")[0] for found in proof.successions} == {"at the succession a -> pair -> b"}
    plans["a"] = trio(0, False, True)
    assert codes(prove_set(plans, {"pair": ("a",), "b": ("pair",)})) == set()


def pair() -> Plan:
    """Two exchanges of two of three ranks."""
    draft = Draft((1, 1, 1), groups=((0, 1),), first_slot=100)
    make, exchanges = draft.op("call", "make"), [draft.exchange(f"pair {number}") for number in range(2)]
    for rank in draft.ranks:
        rank.make(0, make)
        for number in exchanges if rank.rank < 2 else ():
            rank.handshake(0, number)
    return draft.plan()


def barriers(slots: list[int], protocol: Protocol = Protocol.MEMOP) -> Plan:
    """Handshakes one behind the other, with the words that start at these slots."""
    draft = Draft((1, 1))
    make = draft.op("call", "make")
    for number, slot in enumerate(slots):
        draft.exchange(f"barrier {number}", protocol=protocol)
        draft.slots[number] = slot
    for rank in draft.ranks:
        rank.make(0, make)
        for number in range(len(slots)):
            rank.handshake(0, number)
    return draft.plan()


def test_a_slot_that_two_plans_share() -> None:
    """What the last barrier of a resets, the first one of b writes; the second one of b writes it in time."""
    proof, wrong = judged({"a": barriers([0, 2]), "b": barriers([2, 4])}, {"b": ("a",)})
    assert codes(proof) == {"E405"}
    assert wrong == ("a", "b")
    proof, wrong = judged({"a": barriers([0, 2]), "b": barriers([4, 2])}, {"b": ("a",)})
    assert codes(proof) == set()
    assert wrong is None
    assert (proof.closed, proof.words) == (0, 1)


def test_a_slot_that_two_plans_share_through_a_third_one() -> None:
    plans = {"a": barriers([0, 2]), "quiet": quiet(), "b": barriers([2, 4])}
    proof, wrong = judged(plans, {"quiet": ("a",), "b": ("quiet",)})
    assert codes(proof) == {"E405"}
    assert wrong == ("a", "quiet", "b")
    plans["quiet"] = barriers([6, 8])
    assert codes(prove_set(plans, {"quiet": ("a",), "b": ("quiet",)})) == set()


def test_epochs_are_of_one_handshake() -> None:
    """Each plan counts its own replays: the other one's wait would be satisfied by epochs that are not its own."""
    plans = {"a": barriers([0, 2], Protocol.KERNEL), "b": barriers([0, 4], Protocol.KERNEL)}
    proof = prove_set(plans, {"a": ("a",), "b": ("b",)})
    assert codes(proof) == {"E404"}
    assert "a and b both use flag 1 of rank 0" in proof.findings[0].message
    assert (
        codes(prove_set({"a": barriers([0, 2], Protocol.KERNEL), "b": barriers([4, 6], Protocol.KERNEL)}, EVERY))
        == set()
    )


def test_what_is_wrong_with_one_plan_alone_is_told_once() -> None:
    proof = prove_set({"a": barriers([0]), "b": barriers([2, 4])}, EVERY)
    assert [found.code for found in proof.alone["a"].findings] == ["E405"]  # of rank 0; the other is like it
    assert proof.alone["b"].ok
    assert proof.successions == ()
    assert not proof.ok


def test_a_plan_that_is_not_there_is_no_plan_to_follow() -> None:
    plans = {"a": step(0), "b": step(100)}
    for follows in ({"b": ("a", "c")}, {"c": ("a",)}):
        with pytest.raises(ValueError, match="follows names c; the plans are a, b"):
            prove_set(plans, follows)


@dataclass
class Totals:
    outcomes: Counter[str]
    codes: Counter[str]


def outcomes_of(family: st.SearchStrategy[tuple[dict[str, Plan], Follows]], count: int, length: int) -> Totals:
    """Judge random sets by the verifier, and by all pairs in all runs of up to ``length`` plans."""
    totals = Totals(Counter(), Counter())

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(family)
    def judge(drawn: tuple[dict[str, Plan], Follows]) -> None:
        plans, follows = drawn
        proof, wrong = prove_set(plans, follows), goes_wrong(plans, follows, length)
        assert all(found.ok for found in proof.alone.values())
        found = codes(proof)
        assert wrong is None or found, f"missed: {wrong}"
        assert wrong is not None or found <= {"E404"}, f"false alarm: {[f.render() for f in proof.findings]}"
        words = "several words" if proof.words else "closed" if proof.closed else "alone"
        totals.outcomes["refused" if found else f"proven, {words}"] += 1
        totals.codes.update(found)

    judge()
    return totals


def test_random_sets_by_hand_are_judged_as_all_pairs_do() -> None:
    found = outcomes_of(sets_by_hand(), 150, 4)
    assert found.outcomes["refused"] > 10
    assert found.outcomes["proven, several words"] > 50
    assert found.codes["E303"] > 2
    assert found.codes["E405"] > 5


def test_random_sets_of_schedules_are_judged_as_all_pairs_do() -> None:
    found = outcomes_of(sets_of_schedules(), 32, 3)
    assert found.outcomes["refused"] > 1
    assert found.outcomes["proven, several words"] > 4


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "count", "length"),
    [(sets_by_hand(), 3000, 5), (sets_of_schedules(), 300, 3)],
    ids=["by hand", "schedules"],
)
def test_many_random_sets_are_judged_as_all_pairs_do(
    family: st.SearchStrategy[tuple[dict[str, Plan], Follows]], count: int, length: int
) -> None:
    found = outcomes_of(family, count, length)
    print(f"\n{dict(found.outcomes)} {dict(found.codes)}")
    assert found.outcomes["refused"] > count / 30
