"""The smallest arena that blocks are found to fit, and the size below which none exists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepgraph.planner.placement import Answer, Problem, Verdict, chain_sums, first_fit, peak
from stepgraph.planner.placement_search import refutes, search

TRIES = 20_000
"""How many offsets of single blocks the searches of one arena may try."""


@dataclass(frozen=True, slots=True)
class Hand:
    """Blocks of one family at one offset."""

    blocks: tuple[int, ...]
    free: bool
    """Whether its family may be dealt to other hands."""


@dataclass(frozen=True, slots=True)
class Packing:
    hands: tuple[Hand, ...]
    offsets: tuple[int, ...]
    """Of each hand."""
    size: int
    bound: int
    """No placement of the single blocks is smaller, however they are dealt."""


def _fit(problem: Problem, hands: Sequence[Hand]) -> Packing:
    """First fit, large hands before small ones, the early or the late before others of their size."""
    sizes = [problem.blocks[hand.blocks[0]].size for hand in hands]
    early = sorted(range(len(hands)), key=lambda hand: (-sizes[hand], hand))
    late = sorted(range(len(hands)), key=lambda hand: (-sizes[hand], -hand))
    fits = [first_fit(problem, [hand.blocks for hand in hands], order) for order in (early, late)]
    packings = [
        Packing(tuple(hands), offsets, max(map(sum, zip(offsets, sizes, strict=True)), default=0), peak(problem))
        for offsets in fits
    ]
    return min(packings, key=lambda packing: packing.size)


def _without_last(hands: Sequence[Hand], which: int) -> list[Hand]:
    """The hands, with the last block of one apart."""
    *rest, last = hands[which].blocks
    return [*hands[:which], Hand(tuple(rest), True), Hand((last,), True), *hands[which + 1 :]]


def _dealt(problem: Problem, offsets: Sequence[int]) -> Packing:
    """The blocks of a family that lie at one offset make a hand."""
    dealt: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (block, offset) in enumerate(zip(problem.blocks, offsets, strict=True)):
        dealt[block.family, offset].append(number)
    hands = tuple(Hand(tuple(blocks), True) for blocks in dealt.values())
    size = max(offset + block.size for block, offset in zip(problem.blocks, offsets, strict=True))
    return Packing(hands, tuple(offset for _, offset in dealt), size, peak(problem))


def pack(problem: Problem, hands: Sequence[Hand], tries: int = TRIES) -> Packing:
    """A small arena for hands of blocks, which may be dealt anew where they are free.

    First fit goes first; then the last block of a hand, which meets others than those before it, may lie apart. What
    is left between that and the most that is in use at once is halved again and again: a size is refuted, or a search
    finds a placement of the single blocks or proves that there is none. The bound stands on proofs alone: where the
    tries run out it stays below the size.
    """
    best = _fit(problem, hands)
    while best.size > best.bound:
        choices = [
            _fit(problem, _without_last(best.hands, which))
            for which, hand in enumerate(best.hands)
            if hand.free and len(hand.blocks) > 1
        ]
        better = min(choices, key=lambda choice: choice.size, default=best)
        if better.size >= best.size:
            break
        best = better
    sums = chain_sums([block.size for block in problem.blocks], best.size)
    if best.size == best.bound or sums is None:
        return best
    sizes = [size for size in sums if best.bound <= size < best.size]
    least = best.size  # of those that are known to do
    while sizes:
        middle = (len(sizes) - 1) // 2
        small = refutes(problem, sizes[middle], tries // 4)
        answer = Answer(Verdict.TOO_SMALL) if small else search(problem, sizes[middle], tries)
        tries -= answer.tried
        if answer.verdict is Verdict.OPEN:
            break
        if answer.verdict is Verdict.TOO_SMALL:
            del sizes[: middle + 1]
            continue
        least = sizes[middle]
        del sizes[middle:]
        if all(hand.free for hand in hands):
            best = _dealt(problem, answer.offsets)
    return replace(best, bound=sizes[0] if sizes else least)
