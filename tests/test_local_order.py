"""What must hold by a rank's own streams and events, whatever other ranks do, and what closes a copy: changed plans get
their code. Orders that lead over another rank are none for a capture, or for hardware queues."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from test_dataflow import Items, changed, codes, seen

from stepgraph.planner.plan import (
    Collective,
    Exchange,
    Flag,
    Load,
    Plan,
    Protocol,
    Record,
    Reset,
    Send,
    Signal,
    Wait,
    WaitEvent,
)
from stepgraph.planner.plan_check import check_plan
from stepgraph.runtime.mutate import with_program

from support.sizes import small_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return small_plan("quickstart", mesh__ulysses="2", model__layers="2", shape__seq="5")


def last(items: Items, kind: type, stream: int | None = None, before: int | None = None) -> int:
    numbers = [n for n, i in enumerate(items[:before]) if isinstance(i, kind) and stream in (None, i.stream)]
    return numbers[-1]


def early_wait(items: Items) -> Items:
    """The last exchange is awaited on the origin, in front of the sends and the signal on the other stream."""
    at = last(items, Wait)
    wait, reset = items[at : at + 2]
    assert isinstance(reset, Reset)
    assert wait.stream == 1
    entering = last(items, WaitEvent, stream=1, before=at)
    moved = [replace(wait, stream=0), replace(reset, stream=0)]
    return [*items[:entering], *moved, *items[entering:at], *items[at + 2 :]]


def test_ranks_that_may_wait_before_they_signal(plan: Plan) -> None:
    """One rank may: its peer signals first. Two may not, where a queue runs the origin's stream first."""
    assert "E402" not in codes(changed(plan, early_wait))
    both = changed(plan, early_wait, range(2))
    assert codes(both) == {"E402", "E410"}
    assert "waits before signals" in seen(both, plan)


def test_a_kernel_handshake_counts_its_epoch_when_it_waits() -> None:
    plan = small_plan("quickstart", mesh__ulysses="2", model__layers="2", shape__seq="5", defaults__handshake="kernel")

    def split(items: Items) -> Items:
        at = last(items, Wait)
        entering = last(items, WaitEvent, stream=1, before=at)
        return [*items[:entering], replace(items[at], stream=0), *items[entering:at], *items[at + 1 :]]

    assert "E404" in codes(changed(plan, split))
    assert seen(changed(plan, split), plan) != {None}

    def twice(items: Items) -> Items:
        at = last(items, Signal)
        signal = items[at]
        assert isinstance(signal, Signal)
        return [*items[:at], replace(signal, flags=()), *items[at:]]

    assert codes(changed(plan, twice)) == {"E404"}


def unjoined(plan: Plan) -> Plan:
    """Rank 0's last signal is on a stream that no event joins: only its peer's next signal tells that it is done."""
    exchange, page = len(plan.exchanges), plan.flag_slots
    wide = replace(
        plan,
        exchanges=(
            *plan.exchanges,
            Exchange(plan.exchanges[-1].kind, 0, "another", plan.exchanges[-1].op, Protocol.MEMOP),
        ),
        flag_slots=page + 2,
    )
    for rank in range(2):
        items = [*wide.ranks[rank].instructions]
        at = last(items, Wait)
        wait, reset, record = items[at : at + 3]
        assert isinstance(record, Record)
        joined = next(n for n, i in enumerate(items) if isinstance(i, WaitEvent) and i.event == record.event)
        flag, own = Flag(1 - rank, page + rank), Flag(1 - rank, page + 1 - rank)
        tell, hear = Signal(0, exchange, (flag,)), [Wait(0, exchange, (own,)), Reset(0, exchange, (own,))]
        if rank == 0:
            moved = [replace(wait, stream=0), replace(reset, stream=0)]
            items = [*items[:at], *moved, hear[0], tell, hear[1], *items[joined + 1 :]]
        else:
            items = [*items[: joined + 1], tell, *hear, *items[joined + 1 :]]
        wide = with_program(wide, rank, items)
    assert check_plan(wide) is None
    return wide


def test_a_stream_that_only_a_peer_joins(plan: Plan) -> None:
    assert {"E402", "E409"} <= codes(unjoined(plan))
    assert seen(unjoined(plan), plan) <= {"not joined", "exchanges unordered"}


def to_exchange(by: int) -> Callable[[Items], Items]:
    """The copies that one handshake closes name the one before it, or behind it."""

    def change(items: Items) -> Items:
        first = min(i.exchange for i in items if isinstance(i, Send))
        return [
            replace(i, exchange=i.exchange + by) if isinstance(i, Send) and i.exchange == first + max(0, -by) else i
            for i in items
        ]

    return change


@pytest.mark.parametrize("by", [1, -1])
def test_copies_that_name_another_exchange(plan: Plan, by: int) -> None:
    """Stream memory operations bring them all the same; the process group would bring them at the exchange named."""
    assert codes(changed(plan, to_exchange(by), range(2))) <= {"E406", "E410"}
    assert "E410" in codes(changed(plan, to_exchange(by), range(2)))


def test_an_op_that_sends_over_its_own_copy(plan: Plan) -> None:
    def dup(items: Items) -> Items:
        at = next(n for n, i in enumerate(items) if isinstance(i, Send) and i.peer == 0)
        send = items[at]
        assert isinstance(send, Send)
        shifted = replace(send.source_region, col=send.source_region.col + 4)
        return [*items[: at + 1], replace(send, source_region=shifted), *items[at + 1 :]]

    over = changed(plan, dup)
    assert codes(over) == {"E306"}
    assert None not in seen(over, plan)
    again = changed(plan, lambda items: [j for i in items for j in ([i, i] if isinstance(i, Send) else [i])])
    assert codes(again) == set()
    assert seen(again, plan) == {None}


def test_sums_have_one_part_a_member() -> None:
    plan = small_plan("minimax_h3_tp2_u2", defaults__all_reduce__via="nccl")
    items = plan.ranks[1].instructions
    at = next(n for n, i in enumerate(items) if isinstance(i, Collective) and i.reduce)
    item = items[at]
    assert isinstance(item, Collective)

    def told(changed: Collective) -> str:
        return str(check_plan(with_program(plan, 1, [*items[:at], changed, *items[at + 1 :]])))

    name = plan.exchanges[item.exchange].name
    assert told(replace(item, reduce=False)) == f"whether {name} adds up"
    assert told(replace(item, incoming=item.incoming[:1])) == f"the parts of the sum {name}"
    assert "belongs to another op" in told(replace(item, op=item.op - 1))


def test_two_inputs_in_one_buffer(plan: Plan) -> None:
    items = [*plan.ranks[0].instructions]
    loads = [i for i in items if isinstance(i, Load)]
    twice = [loads[0], *items]
    assert "rank 0 loads two inputs into one buffer" in str(check_plan(with_program(plan, 0, twice)))


def test_copies_behind_the_wait_of_their_exchange(plan: Plan) -> None:
    """One rank waits first and then sends and signals: stream memory operations bring all; the process group takes
    along what is there at the wait."""

    def late(items: Items) -> Items:
        at, wait = last(items, Signal), last(items, Wait)
        signal = items[at]
        assert isinstance(signal, Signal)
        moved = [i for i in items if isinstance(i, Send) and i.exchange == signal.exchange and i.peer == 0] + [signal]
        rest = [i for i in items[: wait + 2] if i not in moved]
        return [*rest, *moved, *items[wait + 2 :]]

    assert codes(changed(plan, late)) == {"E410"}


def test_a_rank_waits_once_in_a_handshake() -> None:
    plan = small_plan("quickstart", mesh__ulysses="3", model__layers="1", shape__seq="6")

    def split(items: Items) -> Items:
        at = last(items, Wait)
        wait = items[at]
        assert isinstance(wait, Wait)
        assert len(wait.flags) == 2
        parts = [replace(wait, flags=(flag,)) for flag in wait.flags]
        return [*items[:at], *parts, *items[at + 1 :]]

    assert codes(changed(plan, split)) == {"E404"}


def with_collective(plan: Plan, change: Callable[[Collective], Collective], reduce: bool) -> Plan:
    """The first collective of every rank is another one."""
    for rank, program in enumerate(plan.ranks):
        items = program.instructions
        at = next(n for n, i in enumerate(items) if isinstance(i, Collective) and i.reduce is reduce)
        item = items[at]
        assert isinstance(item, Collective)
        plan = with_program(plan, rank, [*items[:at], change(item), *items[at + 1 :]])
    assert check_plan(plan) is None
    return plan


def test_parts_of_a_collective_that_meet() -> None:
    plan = small_plan("nccl_baseline_u4", mesh__ulysses="2", model__layers="1", model__heads="4", shape__seq="6")
    twice = with_collective(
        plan, lambda c: replace(c, outgoing=c.outgoing + c.outgoing[:2], incoming=c.incoming + c.incoming[:2]), False
    )
    assert "E306" in codes(twice)


def test_a_sum_in_place() -> None:
    """The tensor that it ends in is allocated by it, and would be gone as what it reads."""
    plan = small_plan("minimax_h3_tp2_u2", mesh__ulysses="1", defaults__all_reduce__via="nccl")
    in_place = with_collective(plan, lambda c: replace(c, incoming=c.outgoing), True)
    assert "E304" in codes(in_place)
    assert None not in seen(in_place, plan)


def test_copies_of_one_op_that_name_exchanges_of_several() -> None:
    """A copy to itself is closed by a handshake of a rank alone; the other rank, which is brought nothing, is told."""
    plan = small_plan("quickstart", mesh__ulysses="2", model__layers="2", shape__seq="5")
    alone = replace(plan, groups=(*plan.groups, (1,)))
    closing = replace(alone.exchanges[-1], group=len(plan.groups))
    alone = replace(alone, exchanges=(*alone.exchanges, closing))

    def split(items: Items) -> Items:
        first = next(i for i in items if isinstance(i, Send))
        return [
            replace(i, exchange=len(plan.exchanges)) if isinstance(i, Send) and i.op == first.op and i.peer == 1 else i
            for i in items
            if not (isinstance(i, Send) and i.op == first.op and i.peer == 0)
        ]

    assert {"E307", "E410"} <= codes(changed(alone, split))


def test_a_handshake_has_a_protocol(plan: Plan) -> None:
    without = replace(plan, exchanges=(replace(plan.exchanges[0], protocol=None), *plan.exchanges[1:]))
    assert "the protocol of" in str(check_plan(without))


def test_parts_of_a_collective_in_another_order() -> None:
    plan = small_plan("nccl_baseline_u4", mesh__ulysses="2", model__layers="1", model__heads="4", shape__seq="6")

    def by_peer(item: Collective) -> Collective:
        parts = (sorted(parts, key=lambda part: part.peer) for parts in (item.outgoing, item.incoming))
        return replace(item, **dict(zip(("outgoing", "incoming"), map(tuple, parts), strict=True)))

    assert codes(with_collective(plan, by_peer, False)) == set()
