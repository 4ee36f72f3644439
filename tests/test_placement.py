"""Placement: against brute force, against the orderings of the stream plan, and as small as the bound."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.planner.diagnostics import ScheduleError
from stepgraph.planner.expand import expand
from stepgraph.planner.memory import MemoryPlan, allocate
from stepgraph.planner.opgraph import Action
from stepgraph.planner.packing import Hand, Packing, pack
from stepgraph.planner.placement import Block, Problem, Verdict, peak
from stepgraph.planner.placement_search import refutes, search
from stepgraph.planner.plan import ALIGNMENT
from stepgraph.planner.schedule import load_schedule
from stepgraph.planner.streams import order
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.mutate import seen_by_running

from support.sizes import SHIPPED, small_plan

PLANS = Path(__file__).parents[1] / "plans"
MANY = 10**6


def allocated(name: str, *overrides: tuple[str, str]) -> MemoryPlan:
    return allocate(order(expand(load_schedule(PLANS / f"{name}.yaml", overrides))))


def meet(problem: Problem, one: Block, two: Block) -> bool:
    cells = [{cell % problem.cells for cell in range(block.start, block.end)} for block in (one, two)]
    return bool(cells[0] & cells[1])


def lowest(problem: Problem, sequence: Sequence[int]) -> int:
    """The arena of blocks that are placed one after another, each on top of all those below it that it meets."""
    ends: dict[int, int] = {}
    for number in sequence:
        block = problem.blocks[number]
        below = (end for other, end in ends.items() if meet(problem, problem.blocks[other], block))
        ends[number] = max(below, default=0) + block.size
    return max(ends.values(), default=0)


def smallest(problem: Problem) -> int:
    """Some order is that of the offsets in a smallest arena."""
    return min(lowest(problem, sequence) for sequence in itertools.permutations(range(len(problem.blocks))))


def check(problem: Problem, packing: Packing) -> None:
    """Every block is placed once, and blocks that meet lie apart."""
    at = {number: offset for hand, offset in zip(packing.hands, packing.offsets, strict=True) for number in hand.blocks}
    assert sorted(number for hand in packing.hands for number in hand.blocks) == list(range(len(problem.blocks)))
    for hand in packing.hands:
        assert len({(problem.blocks[n].family, problem.blocks[n].size) for n in hand.blocks}) == 1
    for one, two in itertools.combinations(range(len(problem.blocks)), 2):
        first, second = problem.blocks[one], problem.blocks[two]
        if meet(problem, first, second):
            assert at[one] + first.size <= at[two] or at[two] + second.size <= at[one]
    assert packing.size == max((at[n] + block.size for n, block in enumerate(problem.blocks)), default=0)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    cells = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    blocks = []
    for _ in range(draw(st.integers(0, 6))):
        family = draw(st.integers(0, len(sizes) - 1))
        start = draw(st.integers(-1, cells - 1))
        blocks.append(Block(sizes[family], start, start + draw(st.integers(1, cells)), family))
    return Problem(tuple(blocks), cells)


def singles(problem: Problem, free: bool = True) -> list[Hand]:
    return [Hand((number,), free) for number in range(len(problem.blocks))]


@settings(max_examples=300, deadline=None)
@given(problems())
def test_bound_and_size_are_the_optimum(problem: Problem) -> None:
    packing = pack(problem, singles(problem), MANY)
    check(problem, packing)
    assert packing.bound == smallest(problem) == packing.size


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(0, 40), st.booleans())
def test_few_tries_leave_the_bound_low_and_the_placement_whole(problem: Problem, tries: int, free: bool) -> None:
    packing = pack(problem, singles(problem, free), tries)
    check(problem, packing)
    assert peak(problem) <= packing.bound <= smallest(problem) <= packing.size


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(0, 60))
def test_search_tells_what_fits(problem: Problem, capacity: int) -> None:
    answer = search(problem, capacity, MANY)
    assert answer.verdict is (Verdict.FITS if smallest(problem) <= capacity else Verdict.TOO_SMALL)
    assert search(problem, capacity, answer.tried).verdict is answer.verdict
    if answer.tried:
        assert search(problem, capacity, answer.tried - 1).verdict is Verdict.OPEN
    assert refutes(problem, capacity, MANY) is (answer.verdict is Verdict.TOO_SMALL)
    assert not refutes(problem, capacity, 0) or not answer.tried


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(2, 8), st.data())
def test_layers_left_out_of_a_refutation_change_nothing(layer: Problem, layers: int, data: st.DataObject) -> None:
    """The same blocks in every layer, and a few that are in one only: where nothing is left out is the reference."""
    cells = layer.cells * layers
    blocks = [
        Block(block.size, block.start + first, block.end + first, block.family)
        for first in range(0, cells, layer.cells)
        for block in layer.blocks[:4]
    ]
    for _ in range(data.draw(st.integers(0, 2))):
        start = data.draw(st.integers(0, cells - 1))
        blocks.append(Block(data.draw(st.integers(1, 9)), start, start + data.draw(st.integers(1, cells)), 9))
    problem = Problem(tuple(blocks), cells)
    for capacity in range(peak(problem), peak(problem) + 3):
        verdict = search(problem, capacity, 2000).verdict
        if verdict is not Verdict.OPEN:
            assert refutes(problem, capacity, 20_000) is (verdict is Verdict.TOO_SMALL)


def ring(layers: int, size: int, last: int) -> Problem:
    """q, k, v and o of layers that fill every cell, and one more target between the last o and the first q, k, v."""
    blocks = [Block(size, 2 * layer - 1, 2 * layer + 1, family) for layer in range(layers) for family in range(3)]
    blocks += [Block(size, 2 * layer, 2 * layer + 2, 3) for layer in range(layers)]
    return Problem((*blocks, Block(last, 2 * layers - 1, 2 * layers + 1, 4)), 2 * layers + 1)


@pytest.mark.parametrize("layers", [2, 3, 10, 60])
@pytest.mark.parametrize("last", [1, 3, 7])
def test_an_odd_ring_needs_more_than_its_peak(layers: int, last: int) -> None:
    """The o's of neighbours take the same quarter of a full arena, so that the first q, k, v and the last o leave no
    room: the one between them needs all its bytes besides."""
    problem = ring(layers, 7, last)
    packing = pack(problem, singles(problem))
    assert peak(problem) == 28
    assert packing.bound == packing.size == 28 + last


@pytest.mark.parametrize("via", [None, "copy"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_plans_have_the_smallest_arena(name: str, ranks: int, via: str | None) -> None:
    ulysses = ranks // 2 if "tp2" in name else ranks
    overrides = [("mesh.ulysses", str(ulysses)), *([("defaults.gather.via", via)] if via else [])]
    if name == "uneven_u4" and ranks == 8:
        with pytest.raises(ScheduleError, match="E205"):
            allocated(name, *overrides)
        return
    plan = allocated(name, *overrides)
    assert plan.arena_bytes == plan.lower_bound
    top = max((target.offset + target.nbytes for target in plan.targets), default=0)
    assert top <= plan.arena_bytes < top + ALIGNMENT


@pytest.mark.parametrize(("name", "ranks"), [("quickstart", 4), ("uneven_u4", 4), ("flux_1024_u4", 8)])
def test_targets_that_share_bytes_have_an_exchange_between_them(name: str, ranks: int) -> None:
    """All accesses of one precede some exchange that precedes all accesses of the other, and again over the wrap."""
    plan = allocated(name, ("mesh.ulysses", str(ranks)))
    streams, graph = plan.streams, plan.streams.graph
    used: dict[int, set[int]] = {memory: set() for memory in plan.target_of}
    for index, node in enumerate(graph.nodes):
        for value in {*(value for _, value in node.inputs), *node.outputs}:
            if graph.values[value].memory in used and node.action is not Action.HANDSHAKE:
                used[graph.values[value].memory].add(index)
    exchanges = [index for index, node in enumerate(graph.nodes) if node.action.is_exchange]
    before = {m: {e for e in exchanges if all(streams.before(e, n) and e != n for n in used[m])} for m in used}
    after = {m: {e for e in exchanges if all(streams.before(n, e) and e != n for n in used[m])} for m in used}
    shared = 0
    for one, two in itertools.combinations(used, 2):
        first, second = (plan.targets[plan.target_of[memory]] for memory in (one, two))
        if first.offset < second.offset + second.nbytes and second.offset < first.offset + first.nbytes:
            shared += 1
            early, late = (one, two) if after[one] & before[two] else (two, one)
            assert after[early] & before[late]
            assert after[late] or before[early]
    assert shared


def test_the_bound_holds_for_an_arena_in_which_axes_share() -> None:
    """The planner gives every axis a range of its own; one moved by hand is proven, and no arena is below the bound."""
    settings = {"model__layers": "1", "shape__seq": "8", "defaults__all_reduce__via": "copy"}
    plan = small_plan("minimax_h3_tp2_u2", **settings)
    last = max(range(len(plan.targets)), key=lambda number: plan.targets[number].offset)
    assert "reduce" in plan.targets[last].name
    smaller = []
    for offset in range(0, plan.targets[last].offset, ALIGNMENT):
        targets = (*plan.targets[:last], replace(plan.targets[last], offset=offset), *plan.targets[last + 1 :])
        end = max(target.offset + -(-target.nbytes // ALIGNMENT) * ALIGNMENT for target in targets)
        if end < plan.arena_bytes and prove(moved := replace(plan, targets=targets, arena_bytes=end)).ok:
            smaller.append(moved)
    assert smaller
    assert plan.arena_lower_bound <= min(found.arena_bytes for found in smaller) < plan.arena_bytes
    assert {seen_by_running(smaller[0], seed) for seed in range(4)} == {None}
