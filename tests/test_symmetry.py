"""Where a rotation of the ranks maps a plan onto itself, one rank decides for all; and nowhere else."""

from collections import Counter
from dataclasses import replace

import pytest

from stepgraph.planner.plan import Plan, Record, Region, Run, Send, Wait, WaitEvent
from stepgraph.planner.verify import proof
from stepgraph.planner.verify.proof import prove
from stepgraph.planner.verify.symmetry import Reduction, reduction_of
from stepgraph.runtime.mutate import mutants, with_program

from support.sizes import small_plan

EVEN = {"model__heads": "8", "model__layers": "2", "shape__seq": "16"}
TENSOR = {**EVEN, "mesh__ulysses": "2"}


def even(name: str = "quickstart", **more: str) -> Plan:
    if name == "flux_1024_u4":  # targets of two kinds of layers share bytes
        return small_plan(name, model__heads="8", shape__seq__img="16", shape__seq__txt="8", **more)
    return small_plan(name, **{**(TENSOR if "tp2" in name else EVEN), **more})


def whole(plan: Plan) -> Reduction:
    """Every rank."""
    return Reduction(frozenset(range(plan.world_size)), frozenset())


def in_full(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The codes of a proof that looks at every rank."""
    with monkeypatch.context() as patched:
        patched.setattr(proof, "reduction_of", whole)
        found = prove(plan)
    assert found.ranks == tuple(range(plan.world_size))
    return {finding.code for finding in found.findings}


@pytest.mark.parametrize("via", ["copy", "nccl"])
@pytest.mark.parametrize("name", ["quickstart", "minimax_h3_u4", "nccl_baseline_u4"])
def test_even_shares_are_alike(name: str, via: str) -> None:
    plan = even(name, defaults__gather__via=via)
    assert prove(plan).ranks == (0,)
    assert prove(plan).ok


def test_every_axis_is_rotated_on_its_own() -> None:
    """Two ranks of a tensor group are alike, and so are two of a Ulysses group: all four."""
    assert prove(even("minimax_h3_tp2_u2")).ranks == (0,)
    uneven = even("minimax_h3_tp2_u2", shape__seq="17")
    assert prove(uneven).ranks == (0, 2)  # the longer share, and the shorter one
    assert prove(uneven).ok


@pytest.mark.parametrize("more", [{"shape__seq": "17"}, {"model__heads": "9"}], ids=["sequence", "heads"])
def test_uneven_shares_are_not(more: dict[str, str]) -> None:
    assert prove(even(**more)).ranks == (0, 1, 2, 3)


def test_targets_that_share_bytes_are_looked_at_everywhere() -> None:
    plan = even("flux_1024_u4")
    found = reduction_of(plan)
    shared = {
        number
        for number, one in enumerate(plan.targets)
        for two in plan.targets
        if one is not two and one.offset < two.offset + two.nbytes and two.offset < one.offset + one.nbytes
    }
    assert shared
    assert found.everywhere == shared
    assert found.ranks == {0}


def fault_on(plan: Plan, rank: int, kind: type) -> Plan:
    """One rank does without one of its instructions, of the second layer."""
    items = list(plan.ranks[rank].instructions)
    numbers = [number for number, item in enumerate(items) if isinstance(item, kind)]
    del items[numbers[len(numbers) // 2]]
    return with_program(plan, rank, items)


@pytest.mark.parametrize("kind", [Wait, WaitEvent, Record, Send])
def test_a_fault_on_rank_3_only(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fault_on(even(), 3, kind)
    found = prove(plan)
    assert found.ranks == (0, 1, 2, 3)
    assert {finding.code for finding in found.findings} == in_full(plan, monkeypatch) != set()


def test_a_region_that_is_elsewhere_on_rank_3_only() -> None:
    """All else is alike: the instructions, their peers and words, and the sizes of what is sent."""
    plan = even()
    items = list(plan.ranks[3].instructions)
    number = next(n for n, item in enumerate(items) if isinstance(item, Send) and item.peer == 0)
    item = items[number]
    assert isinstance(item, Send)
    region = Region((item.region.row + 1) % 13, item.region.rows, item.region.col, item.region.cols)
    items[number] = replace(item, region=region)
    changed = with_program(plan, 3, items)
    assert prove(changed).ranks == (0, 1, 2, 3)
    assert not prove(changed).ok


def test_a_view_that_is_smaller_on_rank_3_only() -> None:
    """What is written there is less than what is read, though the same regions meet."""
    plan = even()
    program = plan.ranks[3]
    item = next(item for item in program.instructions if isinstance(item, Run) and plan.ops[item.op].kind == "norm")
    (number,) = item.outputs
    readers = {v for i in program.instructions if isinstance(i, Run) for v in i.inputs}
    view = program.views[number]
    smaller = replace(view, region=replace(view.region, rows=view.region.rows - 1), shape=())
    views = list(program.views)
    views[number] = replace(view, region=smaller.region)
    if number in readers:  # reads see the whole as before
        views.append(view)
        items = [
            replace(i, inputs=tuple(len(views) - 1 if v == number else v for v in i.inputs))
            if isinstance(i, Run)
            else i
            for i in program.instructions
        ]
    ranks = list(plan.ranks)
    ranks[3] = replace(program, views=tuple(views), instructions=tuple(items))
    changed = replace(plan, ranks=tuple(ranks))
    assert prove(changed).ranks == (0, 1, 2, 3)
    assert "E307" in {finding.code for finding in prove(changed).findings}


def test_a_word_that_is_another_one_on_rank_3_only() -> None:
    plan = even()
    items = list(plan.ranks[3].instructions)
    number = next(n for n, item in enumerate(items) if isinstance(item, Wait))
    item = items[number]
    assert isinstance(item, Wait)
    one, two, *more = item.flags
    items[number] = replace(item, flags=(replace(one, slot=two.slot), replace(two, slot=one.slot), *more))
    changed = with_program(plan, 3, items)
    assert prove(changed).ranks == (0, 1, 2, 3)
    assert not prove(changed).ok


def everywhere_without(plan: Plan, kind: type, which: int) -> Plan:
    """Every rank does without the same one of its instructions."""
    for rank in range(plan.world_size):
        items = list(plan.ranks[rank].instructions)
        del items[[number for number, item in enumerate(items) if isinstance(item, kind)][which]]
        plan = with_program(plan, rank, items)
    return plan


@pytest.mark.parametrize("kind", [Wait, WaitEvent, Send])
def test_a_fault_of_all_ranks_is_found_at_one(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, reduced = even(), 0
    for which in range(4):
        changed = everywhere_without(plan, kind, which)
        found = prove(changed)
        reduced += found.ranks == (0,)
        assert {finding.code for finding in found.findings} == in_full(changed, monkeypatch) != set()
    assert reduced == 4


def compare(plan: Plan, count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, bool]]:
    """Prove mutants twice; gives (ranks looked at, whether it is refused)."""
    seen: Counter[tuple[int, bool]] = Counter()
    for mutant in mutants(plan, count, seed):
        found = prove(mutant.plan)
        codes = {finding.code for finding in found.findings}
        assert codes == in_full(mutant.plan, monkeypatch), mutant.what
        seen[len(found.ranks), bool(codes)] += 1
    return seen


@pytest.mark.parametrize("name", ["flux_1024_u4", "quickstart", "minimax_h3_u4", "minimax_h3_tp2_u2"])
def test_reduced_and_full_proofs_agree_on_mutants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compare(even(name), 57, 6, monkeypatch)
    assert seen[4, True] > 20  # a change of one rank makes it unlike the others
    assert seen[1, True] + seen[1, False] > 2  # one of all ranks does not


@pytest.mark.exhaustive
@pytest.mark.parametrize("via", ["copy", "nccl"])
@pytest.mark.parametrize("name", ["flux_1024_u4", "quickstart", "minimax_h3_u4", "minimax_h3_tp2_u2"])
def test_reduced_and_full_proofs_agree_on_many_mutants(name: str, via: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {f"defaults__{kind}__via": via for kind in ("gather", "all_reduce")}
    seen = compare(even(name, **ways), 570, 7, monkeypatch)
    print(f"\n{name}, {via}: {dict(seen)}")
    assert seen[4, True] > 200
