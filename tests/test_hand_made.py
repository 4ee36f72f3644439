"""Plans written by hand, each with a hazard that is known from the field, and the least repair of each."""

from collections.abc import Callable

import pytest

from stepgraph.planner.plan import Plan, Protocol

from support.hand_made import Draft, Moving, Rank
from support.random_plans import opinions

COMPUTE, COPY = 0, 1


def layer(rank: Rank, moving: Moving, make: int, use: int) -> None:
    """Make a tensor, send it to the group, read what came: copies and handshake on their own stream."""
    source = rank.make(COMPUTE, make)
    rank.after(COPY, COMPUTE)
    rank.send(COPY, moving, source)
    rank.handshake(COPY, moving.exchange)
    rank.after(COMPUTE, COPY)
    rank.make(COMPUTE, use, [rank.whole(moving.target)])


def stale_flags(repaired: bool) -> Plan:
    """CASES 1: nothing resets the words, so that from the second replay on a wait is satisfied before its peer has
    written, and the stage behind it reads what the last replay sent."""
    draft = Draft((1, 1))
    moving, make, use = draft.move("move", draft.target("t")), draft.op("call", "make"), draft.op("call", "use")
    closing = draft.exchange("closing")
    for rank in draft.ranks:
        source = rank.make(COMPUTE, make)
        rank.send(COMPUTE, moving, source)
        rank.signal(COMPUTE, moving.exchange)
        rank.wait(COMPUTE, moving.exchange)
        if repaired:
            rank.reset(COMPUTE, moving.exchange)
        rank.make(COMPUTE, use, [rank.whole(moving.target)])
        rank.handshake(COMPUTE, closing)
    return draft.plan()


def two_sets_of_flags_and_three_barriers(repaired: bool) -> Plan:
    """CASES 2: two sets of flags are used in turn by an odd number of barriers. The last one of a replay and the first
    one of the next use the same set, and nothing lies between: the signal is lost, and its wait never ends."""
    draft = Draft((1, 1))
    make = draft.op("call", "make")
    barriers = [draft.exchange(f"barrier {number}") for number in range(4 if repaired else 3)]
    for number in barriers:
        draft.slots[number] = draft.slots[number % 2]
    for rank in draft.ranks:
        rank.make(COMPUTE, make)
        for number in barriers:
            rank.handshake(COMPUTE, number)
    return draft.plan()


def wait_for_one_of_a_growing_epoch(repaired: bool) -> Plan:
    """CASES 3: the peer counts epochs, and the wait is for a word that equals 1. No exchange has both: it takes one
    that signals and another one that waits for the same words. The second replay's epoch is missed for ever."""
    draft = Draft((1, 1))
    make = draft.op("call", "make")
    epochs = draft.exchange("epochs", protocol=Protocol.KERNEL)
    ones = epochs if repaired else draft.exchange("ones")
    draft.slots[ones] = draft.slots[epochs]
    for rank in draft.ranks:
        rank.make(COMPUTE, make)
        rank.signal(COMPUTE, epochs)
        rank.wait(COMPUTE, ones)
    return draft.plan()


def overwritten_while_a_peer_reads(repaired: bool) -> Plan:
    """CASES 4: two layers gather K and V into one target, and nothing orders the second layer's send behind the peer's
    attention over the first layer's. Two targets in turn do: the second handshake lies between."""
    draft = Draft((1, 1))
    targets = [draft.target("kv 0"), draft.target("kv 1")] if repaired else [draft.target("kv 0")] * 2
    movings = [draft.move(f"gather {number}", target) for number, target in enumerate(targets)]
    stages, closing = [(draft.op("call", "make"), draft.op("call", "use")) for _ in movings], draft.exchange("closing")
    for rank in draft.ranks:
        for moving, (make, use) in zip(movings, stages, strict=True):
            layer(rank, moving, make, use)
        rank.handshake(COMPUTE, closing)
    return draft.plan()


def read_behind_the_last_exchange(repaired: bool) -> Plan:
    """CASES 5: within a replay all is ordered; but the target is read behind the last exchange, and a peer that is a
    replay ahead sends over it. Read in front of the closing handshake, it is safe."""
    draft = Draft((1, 1))
    moving, make, use = draft.move("move", draft.target("t")), draft.op("call", "make"), draft.op("call", "use")
    closing = draft.exchange("closing")
    for rank in draft.ranks:
        source = rank.make(COMPUTE, make)
        rank.send(COMPUTE, moving, source)
        rank.handshake(COMPUTE, moving.exchange)
        if not repaired:
            rank.handshake(COMPUTE, closing)
        rank.make(COMPUTE, use, [rank.whole(moving.target)])
        if repaired:
            rank.handshake(COMPUTE, closing)
    return draft.plan()


def two_streams_without_order(repaired: bool) -> Plan:
    """CASES 6: two handshakes on two streams that nothing orders. A queue of the hardware may run the streams one after
    another, and in another order on each rank; then each waits for the handshake that the other has not reached."""
    draft = Draft((1, 1))
    make, one, two = draft.op("call", "make"), draft.exchange("one"), draft.exchange("two")
    closing = draft.exchange("closing")
    for rank in draft.ranks:
        rank.make(COMPUTE, make)
        rank.after(COPY, COMPUTE)
        rank.handshake(COMPUTE, one)
        if repaired:
            rank.after(COPY, COMPUTE)
        rank.handshake(COPY, two)
        rank.after(COMPUTE, COPY)
        rank.handshake(COMPUTE, closing)
    return draft.plan()


def barriers_that_share_words(repaired: bool) -> Plan:
    """CASES 7: two barriers, one behind the other, use the same words: the second signal may come before the first
    one's reset, and is lost. A third one behind them, with words of its own, does not help."""
    draft = Draft((1, 1))
    make = draft.op("call", "make")
    barriers = [draft.exchange(f"barrier {number}") for number in range(3)]
    if not repaired:
        draft.slots[1] = draft.slots[0]
    for rank in draft.ranks:
        rank.make(COMPUTE, make)
        for number in barriers:
            rank.handshake(COMPUTE, number)
    return draft.plan()


def writers_that_share_a_word(repaired: bool) -> Plan:
    """CASES 7: two peers signal into the same word of a rank, as if a barrier had one word and not one an edge. The
    rank goes on when the first of them has come, and reads what the other one has yet to send."""
    draft = Draft((1, 1, 1))
    moving, make, use = draft.move("move", draft.target("t")), draft.op("call", "make"), draft.op("call", "use")
    closing = [draft.exchange("closing"), draft.exchange("another")]
    if not repaired:
        draft.one_word.add(moving.exchange)
    for rank in draft.ranks:
        layer(rank, moving, make, use)
        for number in closing:
            rank.handshake(COMPUTE, number)
    return draft.plan()


def one_barrier(repaired: bool) -> Plan:
    """A step with one barrier and nothing else: the next replay's signal may come before this replay's reset."""
    draft = Draft((1, 1))
    make, barriers = draft.op("call", "make"), [draft.exchange("barrier")]
    barriers += [draft.exchange("closing")] if repaired else []
    for rank in draft.ranks:
        rank.make(COMPUTE, make)
        for number in barriers:
            rank.handshake(COMPUTE, number)
    return draft.plan()


def one_exchange(repaired: bool) -> Plan:
    """A step with one exchange and nothing else: as with one barrier; and what the next replay sends comes over this
    one's, which may not have been read yet."""
    draft = Draft((1, 1))
    moving, make, use = draft.move("move", draft.target("t")), draft.op("call", "make"), draft.op("call", "use")
    closing = [draft.exchange("closing")] if repaired else []
    for rank in draft.ranks:
        layer(rank, moving, make, use)
        for number in closing:
            rank.handshake(COMPUTE, number)
    return draft.plan()


def opposite_orders(repaired: bool) -> Plan:
    """A pair of ranks enters the exchange of the pair and that of all three in opposite orders: each waits in the one
    that the other has not reached."""
    draft = Draft((1, 1, 1), groups=((0, 1), (0, 1, 2)))
    make, pair, everybody = draft.op("call", "make"), draft.exchange("pair", 0), draft.exchange("all", 1)
    closing = draft.exchange("closing", 1)
    orders = [(pair, everybody), (pair, everybody) if repaired else (everybody, pair), (everybody,)]
    for rank, order in zip(draft.ranks, orders, strict=True):
        rank.make(COMPUTE, make)
        for number in (*order, closing):
            rank.handshake(COMPUTE, number)
    return draft.plan()


def opposite_orders_on_two_streams(repaired: bool) -> Plan:
    """The same on a stream for each exchange: where streams run side by side all goes well; where a queue of the
    hardware runs them in the order of issue, one rank is in the exchange of the pair, and the other in that of all."""
    draft = Draft((1, 1, 1), groups=((0, 1), (0, 1, 2)))
    make, pair, everybody = draft.op("call", "make"), draft.exchange("pair", 0), draft.exchange("all", 1)
    closing = draft.exchange("closing", 1)
    orders = [(pair, everybody), (pair, everybody) if repaired else (everybody, pair), (everybody,)]
    for rank, order in zip(draft.ranks, orders, strict=True):
        rank.make(COMPUTE, make)
        rank.after(COPY, COMPUTE)
        for number in order:
            stream = COMPUTE if number == pair else COPY
            if repaired:
                rank.after(stream, COPY + COMPUTE - stream)
            rank.handshake(stream, number)
        rank.after(COMPUTE, COPY)
        rank.handshake(COMPUTE, closing)
    return draft.plan()


def ring_of_pairs(repaired: bool) -> Plan:
    """Three pairs of three ranks, entered in a circle. No two ranks share two exchanges, so that none has them in
    another order than a peer; and yet each rank waits in a pair whose other member waits in the next one."""
    draft = Draft((1, 1, 1), groups=((0, 1), (1, 2), (0, 2), (0, 1, 2)))
    make, closing = draft.op("call", "make"), draft.exchange("closing", 3)
    one, two, three = (draft.exchange(f"pair {number}", number) for number in range(3))
    orders = [(one, three), (two, one), (three, two)] if not repaired else [(one, three), (one, two), (two, three)]
    for rank, order in zip(draft.ranks, orders, strict=True):
        rank.make(COMPUTE, make)
        for number in (*order, closing):
            rank.handshake(COMPUTE, number)
    return draft.plan()


def two_sums_through_one_target(repaired: bool) -> Plan:
    """Tensor parallel 2 and Ulysses 2: two all-reduces by copies, one behind the other, bring their partial sums into
    one target. The exchange between them is of the other axis: it does not tell that the peer has added the first."""
    draft = Draft((1, 1, 1, 1), groups=((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)))
    targets = [draft.target("sums 0"), draft.target("sums 1")] if repaired else [draft.target("sums 0")] * 2
    stages = [(draft.op("call", "partial"), draft.op("call", "sum")) for _ in targets]
    between = draft.op("barrier", "ulysses")
    closing = draft.exchange("closing", 4)
    reduces = [draft.op("all_reduce", f"reduce {number}") for number in range(2)]
    exchange = {(op, group): draft.exchange(draft.ops[op].name, group, op=op) for op in reduces for group in (0, 1)}
    exchange |= {(between, group): draft.exchange("ulysses", group, op=between) for group in (2, 3)}
    for rank in draft.ranks:
        tensor, ulysses = rank.rank // 2, 2 + rank.rank % 2
        for op, target, (make, use) in zip(reduces, targets, stages, strict=True):
            layer(rank, Moving(op, exchange[op, tensor], target), make, use)
            if op == reduces[0]:
                rank.handshake(COMPUTE, exchange[between, ulysses])
        rank.handshake(COMPUTE, closing)
    return draft.plan()


# A send over what a peer still reads may also come before that is read (E306); a rank that goes on too early races with
# the sends that it has not waited for (E301), and may read what no send of the replay has brought (E307).
HAZARDS: dict[Callable[[bool], Plan], set[str]] = {
    stale_flags: {"E404"},
    two_sets_of_flags_and_three_barriers: {"E405"},
    wait_for_one_of_a_growing_epoch: {"E401", "E406"},
    overwritten_while_a_peer_reads: {"E301", "E306"},
    read_behind_the_last_exchange: {"E303"},
    two_streams_without_order: {"E402"},
    barriers_that_share_words: {"E405"},
    writers_that_share_a_word: {"E404", "E301", "E307"},
    one_barrier: {"E405"},
    one_exchange: {"E303", "E405"},
    opposite_orders: {"E401"},
    opposite_orders_on_two_streams: {"E402", "E403"},
    ring_of_pairs: {"E401"},
    two_sums_through_one_target: {"E301", "E306"},
}


@pytest.mark.parametrize("hazard", HAZARDS)
def test_hazard_is_refused_and_goes_wrong(hazard: Callable[[bool], Plan]) -> None:
    found = opinions(hazard(False), seeds=40, states=2_000)
    assert found.codes == HAZARDS[hazard], found
    assert found.unsafe


@pytest.mark.parametrize("hazard", HAZARDS)
def test_repaired_plan_is_proven_and_goes_right(hazard: Callable[[bool], Plan]) -> None:
    found = opinions(hazard(True), seeds=40, states=2_000)
    assert found.codes == set()
    assert not found.unsafe, found


def test_a_step_may_end_with_a_collective() -> None:
    """It takes two moments, its start and its finish, and is joined at its finish like any other last instruction."""
    draft = Draft((1, 1), streams=("compute",))
    make, moving = draft.op("call", "make"), draft.move("move", draft.target("t"), protocol=None)
    for rank in draft.ranks:
        rank.collective(COMPUTE, moving, rank.make(COMPUTE, make))
    found = opinions(draft.plan(), seeds=10, states=2_000)
    assert found.codes == set()
    assert found.safe
