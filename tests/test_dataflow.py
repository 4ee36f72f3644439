"""Ops are carried out once, in the order in which they need one another, and read what they mean to read: proofs of
changed plans, each held against a run in which every tensor tells who made it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from test_state_tensors import CACHE, RESIDUAL, plan_of

from stepgraph.planner.plan import Instruction, Load, Plan, Record, Region, Run, Send, Signal, Store, Wait, WaitEvent
from stepgraph.planner.plan_check import check_plan
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.mutate import meant_by, seen_by_running, with_program

from support.sizes import small_plan

Items = list[Instruction]
HEAD = "in: x, out: q, shape: [batch, seq, heads, head_dim]}\n  - norm_rope: {in: q, rope: rope}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return small_plan("quickstart", mesh__ulysses="2", model__layers="2", shape__seq="5")


def changed(plan: Plan, change: Callable[[Items], Items], ranks: Sequence[int] = (1,)) -> Plan:
    for rank in ranks:
        plan = with_program(plan, rank, change([*plan.ranks[rank].instructions]))
    assert check_plan(plan) is None
    return plan


def codes(plan: Plan) -> set[str]:
    return {finding.code for finding in prove(plan).findings}


def seen(plan: Plan, base: Plan) -> set[str | None]:
    meant = meant_by(base)
    assert meant is not None
    return {seen_by_running(plan, seed, meant) for seed in range(4)}


def stage(plan: Plan, kind: str, rank: int = 1) -> int:
    """The number of the first stage of a kind in a rank's program."""
    items = plan.ranks[rank].instructions
    return next(n for n, item in enumerate(items) if isinstance(item, Run) and plan.ops[item.op].kind == kind)


def test_operands_name_what_makes_them(plan: Plan) -> None:
    by_name = {(op.name.rpartition(".")[2], op.layer): op for op in plan.ops}
    attention = by_name["attention", 1]
    assert [[plan.ops[maker].label for maker in operand.made_by] for operand in attention.inputs] == [
        ["self_attention.send_q[1]"],
        ["self_attention.send_k[1]"],
        ["self_attention.send_v[1]"],
    ]
    (sent,) = by_name["send_q", 0].inputs
    assert [plan.ops[maker].kind for maker in sent.made_by] == ["norm_rope"]
    loads = [item for item in plan.ranks[0].instructions if isinstance(item, Load)]
    assert [plan.ops[item.op].outputs for item in loads] == [(entry.name,) for entry in plan.inputs]


def test_a_rank_that_skips_a_stage_in_place(plan: Plan) -> None:
    at = stage(plan, "norm_rope")
    without = changed(plan, lambda items: items[:at] + items[at + 1 :])
    assert codes(without) == {"E307"}
    assert seen(without, plan) == {"read wrong"}
    (found, *_) = prove(without).findings
    assert "is read before what is meant is written" in found.message
    assert "norm_rope" in found.expected
    assert "qkv" in found.got


def test_a_rank_that_does_a_stage_in_place_twice(plan: Plan) -> None:
    at = stage(plan, "norm_rope")
    twice = changed(plan, lambda items: [*items[:at], items[at], *items[at:]])
    assert codes(twice) == {"E306", "E308"}
    assert seen(twice, plan) == {"read wrong"}


def test_a_stage_in_place_behind_the_send_of_what_it_changes(plan: Plan) -> None:
    """Events order them, so there is no race; what is sent is what was there before."""

    def one_stream(items: Items) -> Items:
        return [replace(item, stream=0) for item in items]

    in_turn = changed(plan, one_stream, range(2))
    assert codes(in_turn) == set()
    at = stage(in_turn, "norm_rope")
    sends = [n for n, i in enumerate(in_turn.ranks[1].instructions) if isinstance(i, Send) and n > at]
    behind = next(n for n in sends if "send_q" in in_turn.ops[in_turn.ranks[1].instructions[n].op].name) + 1  # type: ignore[union-attr]
    late = changed(in_turn, lambda items: [*items[:at], *items[at + 1 : behind], items[at], *items[behind:]])
    assert codes(late) == {"E307"}
    assert None not in seen(late, in_turn)


def test_an_operand_taken_from_another_tensor(plan: Plan) -> None:
    """The attention of a rank takes k for q: all is there, and in order."""
    at = stage(plan, "attention")

    def swapped(items: Items) -> Items:
        run = items[at]
        assert isinstance(run, Run)
        return [*items[:at], replace(run, inputs=(run.inputs[1], run.inputs[0], run.inputs[2])), *items[at + 1 :]]

    other = changed(plan, swapped)
    assert codes(other) <= {"E306", "E307"}
    assert codes(other)
    assert seen(other, plan) == {"read wrong"}


def test_an_input_that_is_loaded_for_another() -> None:
    """Both have the same shape."""
    text = RESIDUAL.replace("outputs: [noise]", "  more: {shape: [batch, seq, 6]}\noutputs: [noise]")
    text = text.replace("in: latents, out: x", "in: [latents, more], out: x")
    plan = plan_of(text)
    assert codes(plan) == set()

    def other(items: Items) -> Items:
        first, second = items[:2]
        assert isinstance(first, Load)
        assert isinstance(second, Load)
        return [
            replace(first, op=second.op, input=second.input),
            replace(second, op=first.op, input=first.input),
            *items[2:],
        ]

    exchanged = changed(plan, other)
    assert codes(exchanged) == {"E306", "E307"}
    assert seen(exchanged, plan) == {"read wrong"}


def test_a_rank_that_does_not_keep_a_state() -> None:
    plan = plan_of(RESIDUAL)
    at = stage(plan, "keep")
    without = changed(plan, lambda items: items[:at] + items[at + 1 :])
    assert codes(without) == {"E308"}
    assert seen(without, plan) == {"read wrong"}
    assert "rank 1 leaves out" in prove(without).findings[0].message


def test_a_state_that_is_read_before_the_step_writes_it() -> None:
    """On one stream, so that all is ordered: the rank's own rows of this step are not there yet."""
    text = RESIDUAL.replace(
        "  - call: {name: head, in: x,",
        "  - residual: {name: again, in: [x, kept], out: x}\n  - call: {name: head, in: x,",
    )
    plan = plan_of(text)
    assert codes(plan) == set()
    at = stage(plan, "keep")
    again = next(
        n for n, i in enumerate(plan.ranks[1].instructions) if isinstance(i, Run) and "again" in plan.ops[i.op].name
    )
    assert again > at
    late = changed(plan, lambda items: [*items[:at], *items[at + 1 : again + 1], items[at], *items[again + 1 :]])
    assert "E307" in codes(late)
    assert "read wrong" in seen(late, plan)


def test_rows_of_a_state_that_are_sent_twice_and_never() -> None:
    """As many elements as are wanted come; two ranks send theirs to one place."""
    plan = plan_of(CACHE)
    (first, second) = [
        next(i for i in plan.ranks[sender].instructions if isinstance(i, Send) and i.peer == 3) for sender in (1, 2)
    ]
    assert first.op == second.op
    assert first.region.rows == second.region.rows

    def aimed(items: Items) -> Items:
        at = items.index(second)
        return [*items[:at], replace(second, region=first.region), *items[at + 1 :]]

    assert "E307" in codes(changed(plan, aimed, (2,)))
    row = first.region

    def halves(items: Items) -> Items:
        """A rank sends its first row twice, one after the other: no race, and its second one never."""
        at = items.index(first)
        upper = replace(
            first, region=Region(row.row, 1, row.col, row.cols), source_region=replace(first.source_region, rows=1)
        )
        return [*items[:at], *[upper] * row.rows, *items[at + 1 :]]

    assert row.rows > 1
    found = changed(plan, halves)
    assert codes(found) == {"E307"}
    assert seen(found, plan) != {None}


def test_a_rank_that_sends_nothing_into_a_state() -> None:
    """Its rows are those of the last step, or of none; a rank without rows has none to send."""
    plan = plan_of(CACHE)
    into = {number for number, op in enumerate(plan.ops) if op.kind == "send" and "vcache" in op.outputs}
    quiet = changed(plan, lambda items: [i for i in items if not (isinstance(i, Send) and i.op in into)])
    assert codes(quiet) == {"E307"}
    assert seen(quiet, plan) != {None}
    assert codes(plan_of(CACHE, shape__seq="3")) == set()


def test_ranks_that_send_some_of_their_rows_into_a_state() -> None:
    """All of them their first row, so that as many rows come as are sent."""
    plan = plan_of(CACHE, shape__seq="8")
    into = {number for number, op in enumerate(plan.ops) if op.kind == "send" and "vcache" in op.outputs}

    def first_row(items: Items) -> Items:
        def narrowed(send: Send) -> Send:
            laid = send.region
            into_half = Region(7 + (laid.row - 7) // 2, 1, laid.col, laid.cols)
            return replace(send, source_region=replace(send.source_region, rows=1), region=into_half)

        return [narrowed(i) if isinstance(i, Send) and i.op in into else i for i in items]

    assert "E307" in codes(changed(plan, first_row, range(4)))
    views = [
        tuple(
            replace(v, region=replace(v.region, rows=1), shape=(2, 1, *v.shape[2:]))
            if n in sources(plan, r, into)
            else v
            for n, v in enumerate(program.views)
        )
        for r, program in enumerate(plan.ranks)
    ]
    narrow = replace(plan, ranks=tuple(replace(p, views=v) for p, v in zip(plan.ranks, views, strict=True)))
    assert "E307" in codes(changed(narrow, first_row, range(4)))


def sources(plan: Plan, rank: int, ops: set[int]) -> set[int]:
    return {item.source for item in plan.ranks[rank].instructions if isinstance(item, Send) and item.op in ops}


def test_a_part_of_an_exchange_on_a_third_stream(plan: Plan) -> None:
    """The wait and the reset of the second exchange wait for nothing of the first: a queue that runs this stream first
    waits for ever."""
    streams = replace(plan, streams=(*plan.streams, "third"))

    def moved(items: Items) -> Items:
        numbers = [n for n, item in enumerate(items) if isinstance(item, Wait)]
        at = numbers[1]
        assert isinstance(items[at - 1], Signal)
        entering = next(i for i in items if isinstance(i, Record))
        found = [replace(item, stream=len(plan.streams)) for item in items[at : at + 2]]
        done = [Record(len(plan.streams), 90), WaitEvent(items[at].stream, 90)]
        fork = [Record(entering.stream, 91), WaitEvent(len(plan.streams), 91)]
        first = items.index(entering)
        return [*items[: first + 1], *fork, *items[first + 1 : at], *found, *done, *items[at + 2 :]]

    third = changed(streams, moved, range(2))
    assert codes(third) == {"E402", "E410"}


def test_an_output_that_is_changed_after_it_was_handed_out() -> None:
    """A step of one rank, whose output is the tensor itself."""
    text = (
        RESIDUAL.replace("ulysses: 4", "ulysses: 1")
        .replace("  - all_gather: noise\n", "")
        .replace("  - shard: x\n", "")
    )
    text = text.replace("outputs: [noise]", "outputs: [q]").replace("in: x, out: noise, shape: [batch, seq, 6]}", HEAD)
    text = text.replace("  latents: {", "  rope: {shape: [seq, head_dim]}\n  latents: {").replace(
        "placement: sequence", "placement: replicated"
    )
    plan = plan_of(text)
    assert codes(plan) == set()
    items = plan.ranks[0].instructions
    at, out = stage(plan, "norm_rope", 0), next(n for n, i in enumerate(items) if isinstance(i, Store))
    early = changed(plan, lambda items: [*items[:at], items[out], *items[at:out], *items[out + 1 :]], (0,))
    assert codes(early) == {"E306", "E307"}
    found, *_ = [one for one in prove(early).findings if one.code == "E306"]
    assert "changed after it was handed out" in found.message


def test_a_rank_that_does_not_hand_out_an_output(plan: Plan) -> None:
    items = [item for item in plan.ranks[1].instructions if not isinstance(item, Store)]
    assert "rank 1 hands out noise 0 times" in str(check_plan(with_program(plan, 1, items)))
    assert "rank 0 hands out noise 0 times" in str(check_plan(with_program(plan, 0, [])))
