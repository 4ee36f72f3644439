"""Every rule of the verifier has a plan that breaks it, and gets that code and no other."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import stepgraph
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.plan import (
    Collective,
    Drop,
    Instruction,
    Load,
    Plan,
    Record,
    Region,
    Reset,
    Run,
    Send,
    Signal,
    Target,
    Wait,
    WaitEvent,
)
from stepgraph.planner.schedule import read_schedule
from stepgraph.planner.verify.findings import CODES
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.mutate import KINDS, mutants, with_program

from support.mutate import PLANTED, fault_of
from support.sizes import SHIPPED, small_plan

TINY = {"shape.seq": 9, "model.hidden": 16, "model.head_dim": 2, "model.ffn": 8}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return stepgraph.compile("quickstart", TINY)


def codes(plan: Plan) -> set[str]:
    return {finding.code for finding in prove(plan).findings}


def items_of(plan: Plan, rank: int = 0) -> list[Instruction]:
    return list(plan.ranks[rank].instructions)


def everywhere(plan: Plan, change: Callable[[list[Instruction]], list[Instruction]]) -> Plan:
    for rank in range(plan.world_size):
        plan = with_program(plan, rank, change(items_of(plan, rank)))
    return plan


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_plans_are_proven(name: str) -> None:
    proof = prove(small_plan(name))
    assert proof.ok, [finding.render() for finding in proof.findings]
    assert proof.assumptions
    assert proof.accesses > 0


def test_every_code_is_in_the_manual() -> None:
    from stepgraph.planner.manual import CODES as MANUAL

    assert set(CODES) <= set(MANUAL)


def test_race_on_a_target_within_a_replay(plan: Plan) -> None:
    """The k send of one rank goes out behind its signal: the peers may read before it lands."""
    for _, mutant in PLANTED["swap"](plan, 0):
        assert codes(mutant) <= {"E301", "E303", "E410"}
    assert any("E301" in codes(mutant) for _, mutant in PLANTED["swap"](plan, 0))


def test_race_on_local_memory(plan: Plan) -> None:
    """Without the event between the projection and the send of v, the send may read what is not there yet."""
    name, mutant = next(PLANTED["event"](plan, 0))
    assert codes(mutant) >= {"E302"}, name


def alone(text: str, name: str) -> Plan:
    return compile_schedule(read_schedule(text, name))


KV = (Path(__file__).parent / "bad_schedules" / "unsafe_buffers.yaml").read_text().replace(", buffers: 1", "")


def merged(plan: Plan, one: str, two: str) -> Plan:
    """The same plan with two targets at one offset."""
    by_name = {target.name: target for target in plan.targets}
    moved = [replace(t, offset=by_name[one].offset) if t.name == two else t for t in plan.targets]
    return replace(plan, targets=tuple(moved))


def test_single_buffers_are_refused_where_no_exchange_lies_between() -> None:
    """CASES 4: nothing orders the next layer's send after this layer's attention."""
    plan = alone(KV, "kv.yaml")
    assert prove(plan).ok
    for tensor in ("k", "v"):
        single = merged(plan, f"attn.all_gather:{tensor}.0", f"attn.all_gather:{tensor}.1")
        assert "E301" in codes(single)
        assert any(fault_of(single, seed) for seed in range(20))


def test_single_buffers_are_accepted_with_a_gather() -> None:
    """TeleFuser's scheme: the gather after attention is an exchange of all ranks."""
    plan = stepgraph.compile("quickstart")
    assert [target.name for target in plan.targets if "send" in target.name] == [
        "self_attention.send_v:v.0",
        "self_attention.send_q:q.0",
        "self_attention.send_k:k.0",
    ]
    assert prove(plan).ok


ONE = """
version: 1
name: one
model: {layers: 1, hidden: 8, heads: 2, head_dim: 4, ffn: 8, dtype: float32}
mesh: {ulysses: 2}
shape: {seq: 6}
inputs: {latents: {shape: [batch, seq, 8]}}
outputs: [noise]
step:
  - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
  - shard: x
  - all_gather: x
  - call: {name: head, in: x, out: noise, shape: [batch, seq, 8]}
"""


def without_closing(plan: Plan) -> Plan:
    """The same plan without the handshake that the planner closes the step with."""
    closing = next(n for n, e in enumerate(plan.exchanges) if "closing" in e.name)
    assert closing == len(plan.exchanges) - 1

    def without(items: list[Instruction]) -> list[Instruction]:
        return [i for i in items if not (isinstance(i, Signal | Wait | Reset) and i.exchange == closing)]

    return replace(everywhere(plan, without), exchanges=plan.exchanges[:closing])


def test_one_barrier_a_replay_and_nothing_else() -> None:
    """CASES 5 and FACTS: the target is overwritten and the flag written again only across the wrap."""
    plan = alone(ONE, "one.yaml")
    assert prove(plan).ok
    open_ended = without_closing(plan)
    assert codes(open_ended) == {"E303", "E405"}
    faults = {fault_of(open_ended, seed) for seed in range(50)} - {None}
    assert faults


def test_targets_that_meet_in_bytes() -> None:
    plan = stepgraph.compile("quickstart")
    v, q = plan.targets[0], plan.targets[1]
    moved = replace(plan, targets=(v, replace(q, offset=v.offset), *plan.targets[2:]))
    assert codes(moved) == {"E306"}  # each rank overwrites its own v with q, in order
    assert any(fault_of(moved, seed) for seed in range(5))


def test_targets_of_other_pitches_meet_by_their_bytes_only() -> None:
    """Rectangles of two overlaid targets may lie between each other's rows."""
    plan = stepgraph.compile("uneven_u4")
    v, q = plan.targets[0], plan.targets[1]
    assert codes(replace(plan, targets=(v, replace(q, offset=v.offset), *plan.targets[2:]))) == {"E306"}
    apart = Target(q.name, plan.arena_bytes, q.nbytes)
    assert prove(replace(plan, targets=(v, apart, *plan.targets[2:]), arena_bytes=plan.arena_bytes + q.nbytes)).ok


def test_drop_before_the_last_use(plan: Plan) -> None:
    items = items_of(plan)
    at = next(n for n, i in enumerate(items) if isinstance(i, Drop))
    user = max(n for n, i in enumerate(items[:at]) if isinstance(i, Run))
    assert codes(with_program(plan, 0, [*items[:user], items[at], *items[user:at], *items[at + 1 :]])) == {"E304"}


def test_drop_while_another_stream_still_reads(plan: Plan) -> None:
    """The fused projection is dropped on its own stream before that has waited for the copies out of it."""
    items = items_of(plan)
    sends = [n for n, i in enumerate(items) if isinstance(i, Send)]
    qkv = plan.ranks[0].views[items[sends[0]].source].buffer  # type: ignore[union-attr]
    drop = next(n for n, i in enumerate(items) if isinstance(i, Drop) and i.buffer == qkv)
    rope = next(n for n, i in enumerate(items) if isinstance(i, Run) and plan.ops[i.op].kind == "norm_rope")
    early = [*items[: rope + 1], items[drop], *items[rope + 1 : drop], *items[drop + 1 :]]
    assert "E304" in codes(with_program(plan, 0, early))


def test_drop_twice_or_of_what_is_not_there_or_elsewhere(plan: Plan) -> None:
    """Also of a tensor without elements, whose bytes nobody touches. Runs see each of them too."""
    empty = stepgraph.compile("quickstart", TINY | {"shape.seq": 3})
    for whole, rank in ((plan, 0), (empty, 3)):
        items = items_of(whole, rank)
        at = next(n for n, i in enumerate(items) if isinstance(i, Drop) and i.stream == 0)
        drop = items[at]
        assert isinstance(drop, Drop)
        assert (whole.ranks[rank].buffers[drop.buffer].rows == 0) == (whole is empty)
        maker = next(
            n for n, i in enumerate(items) if isinstance(i, Run | Load) and drop.buffer in made(whole, rank, i)
        )
        twice = [*items[:at], drop, *items[at:]]
        elsewhere = [*items[:at], Record(0, 10_000), WaitEvent(1, 10_000), replace(drop, stream=1), *items[at + 1 :]]
        early = [*items[:maker], drop, *items[maker:at], *items[at + 1 :]]
        used = [*items[: maker + 1], drop, *items[maker + 1 : at], *items[at + 1 :]]
        for wrong in (twice, elsewhere, early, used):
            changed = with_program(whole, rank, wrong)
            assert codes(changed) == {"E304"}
            assert any(fault_of(changed, seed) for seed in range(3))


def made(plan: Plan, rank: int, item: Run | Load) -> tuple[int, ...]:
    program = plan.ranks[rank]
    return (program.views[item.view].buffer,) if isinstance(item, Load) else program.made_by(item)


def test_deadlock_of_a_wait_that_nothing_satisfies(plan: Plan) -> None:
    items = [i for i in items_of(plan) if not (isinstance(i, Signal) and i.exchange == 0)]
    assert codes(with_program(plan, 0, items)) == {"E401", "E406"}


def test_deadlock_of_a_circle_between_streams(plan: Plan) -> None:
    items = items_of(plan)
    wait = next(n for n, i in enumerate(items) if isinstance(i, WaitEvent) and i.stream == 0)
    send = next(n for n, i in enumerate(items) if isinstance(i, Send))
    circle = [*items[:send], WaitEvent(1, 10_000), *items[send:], Record(0, 10_000)]
    assert wait > send
    assert codes(with_program(plan, 0, circle)) == {"E401", "E407"}


def test_exchanges_on_two_streams_without_order() -> None:
    """CASES 6: two handshakes that nothing orders deadlock once hardware queues serialise the streams."""
    text = KV.replace("blocks:", "streams: {compute: {}, copy: {}, other: {}}\nblocks:").replace(
        "- all_gather: {in: [k, v]}", "- all_gather: {in: k}\n    - all_gather: {name: second, in: v, stream: other}"
    )
    plan = alone(text, "two_streams.yaml")
    assert prove(plan).ok
    refused = set()
    for rank in range(2):
        for _, mutant in PLANTED["event"](plan, rank):
            refused |= codes(mutant)
    assert "E402" in refused


def swap_exchanges(plan: Plan, rank: int, one: int, two: int) -> Plan:
    items = items_of(plan, rank)
    changed: list[Instruction] = []
    for item in items:
        if isinstance(item, Signal | Wait | Reset | Collective) and item.exchange in (one, two):
            changed.append(replace(item, exchange=two if item.exchange == one else one))
        else:
            changed.append(item)
    return with_program(plan, rank, changed)


def test_exchanges_in_other_orders_on_two_ranks() -> None:
    plan = small_plan("nccl_baseline_u4")
    gathers = [n for n, e in enumerate(plan.exchanges) if ".gather" in e.name]
    assert codes(swap_exchanges(plan, 0, *gathers[:2])) >= {"E401"}


def sharing(plan: Plan, exchange: int) -> Plan:
    """The plan with the words of the first handshake for another one too."""
    base = 4 * exchange  # a slot a member

    def shared(items: list[Instruction]) -> list[Instruction]:
        return [
            replace(i, flags=tuple(replace(f, slot=f.slot - base) for f in i.flags))
            if isinstance(i, Signal | Wait | Reset) and i.exchange == exchange
            else i
            for i in items
        ]  # fmt: skip

    return everywhere(plan, shared)


def test_words_that_two_handshakes_share(plan: Plan) -> None:
    """CASES 7: the next handshake may write a word before it is reset; the one after that knows of the reset."""
    assert codes(sharing(plan, 1)) == {"E405"}
    assert any(fault_of(sharing(plan, 1), seed) for seed in range(20))
    assert codes(sharing(plan, 2)) == set()
    assert [fault_of(sharing(plan, 2), seed) for seed in range(20)] == [None] * 20
    epochs = stepgraph.compile("quickstart", {**TINY, "defaults.handshake": "kernel"})
    assert codes(sharing(epochs, 2)) == {"E404"}  # each handshake counts epochs of its own


def test_reset_before_the_wait(plan: Plan) -> None:
    items = items_of(plan)
    at = next(n for n, i in enumerate(items) if isinstance(i, Reset))
    assert isinstance(items[at - 1], Wait)
    assert codes(with_program(plan, 0, [*items[: at - 1], items[at], items[at - 1], *items[at + 1 :]])) == {"E404"}


def test_missing_reset_is_not_one_to_one(plan: Plan) -> None:
    """CASES 1: from the second replay on the wait would be satisfied by a stale flag."""
    for name, mutant in PLANTED["reset"](plan, 2):
        assert codes(mutant) == {"E404"}, name


def test_a_rank_that_stays_away(plan: Plan) -> None:
    """CASES: a rank with an empty share takes part all the same."""

    def drop_part(items: list[Instruction]) -> list[Instruction]:
        return [i for i in items if not (isinstance(i, Signal | Wait | Reset) and i.exchange == 2)]

    assert "E406" in codes(with_program(plan, 3, drop_part(items_of(plan, 3))))


def test_event_recorded_twice_and_waited_for_too_early(plan: Plan) -> None:
    items = items_of(plan)
    at = next(n for n, i in enumerate(items) if isinstance(i, Record))
    assert codes(with_program(plan, 0, [*items[:at], items[at], *items[at:]])) == {"E407"}
    assert isinstance(items[at + 1], WaitEvent)
    early = [*items[:at], items[at + 1], items[at], *items[at + 2 :]]
    assert "E407" in codes(with_program(plan, 0, early))


def test_stream_that_has_not_entered_the_capture(plan: Plan) -> None:
    items = items_of(plan)
    assert "E408" in codes(with_program(plan, 0, [Drop(1, 20), *items]))


def test_stream_that_is_not_joined(plan: Plan) -> None:
    """CASES 8."""
    items = items_of(plan)
    assert codes(with_program(plan, 0, [*items, Record(1, 10_000)])) == {"E409"}


def test_epochs_need_no_reset_and_may_not_have_one() -> None:
    plan = stepgraph.compile("quickstart", {**TINY, "defaults.handshake": "kernel"})
    assert prove(plan).ok
    items = items_of(plan)
    at = next(n for n, i in enumerate(items) if isinstance(i, Wait))
    wait = items[at]
    assert isinstance(wait, Wait)
    reset = Reset(wait.stream, wait.exchange, wait.flags)
    assert codes(with_program(plan, 0, [*items[: at + 1], reset, *items[at + 1 :]])) == {"E404"}


def test_a_finding_tells_both_accesses_and_the_line(plan: Plan) -> None:
    _, mutant = list(PLANTED["event"](plan, 0))[1]
    text = prove(mutant).findings[0].render()
    for word in ("quickstart.yaml:", "rank 0", "stream copy", "stream compute", "line ", "hint"):
        assert word in text, text


def test_regions_that_touch_do_not_race(plan: Plan) -> None:
    """v is sent while q and k are changed in place: columns of one buffer that lie side by side."""
    program = plan.ranks[0]
    send = next(i for i in program.instructions if isinstance(i, Send))
    rope = next(i for i in program.instructions if isinstance(i, Run) and plan.ops[i.op].kind == "norm_rope")
    changed = {program.views[view].buffer for view in rope.outputs}
    assert program.views[send.source].buffer in changed
    assert send.source_region != Region(0, 0, 0, 0)
    assert prove(plan).ok


def test_a_send_that_nobody_makes() -> None:
    """E308; and its target is read all the same: E307, on every rank that reads it."""
    plan = stepgraph.compile("quickstart", TINY)
    (q, *_) = [number for number, op in enumerate(plan.ops) if op.kind == "send" and op.name.endswith("send_q")]
    without = everywhere(plan, lambda items: [i for i in items if not (isinstance(i, Send) and i.op == q)])
    assert codes(without) == {"E307", "E308"}
    one_part = [i for i in items_of(plan, 1) if not (isinstance(i, Send) and i.op == q and i.peer == 2)]
    found = prove(with_program(plan, 1, one_part)).findings
    assert {finding.code for finding in found} == {"E307"}
    assert all("of rank 2" in finding.message for finding in found)
    assert any("is read before it is written" in finding.message for finding in found)
    assert any("does not fill" in finding.message for finding in found)


@pytest.mark.parametrize("name", ["quickstart", "minimax_h3_tp2_u2"])
def test_every_refusal_tells_its_line_and_a_hint(name: str) -> None:
    told = Counter[str]()
    for mutant in mutants(small_plan(name, mesh__ulysses="2", model__layers="1"), 8 * len(KINDS), seed=5):
        for found in prove(mutant.plan).findings:
            told[found.code] += 1
            assert found.place is not None, (mutant.what, found)
            assert found.place.text.strip(), (mutant.what, found)
            assert found.hint, (mutant.what, found)
            assert "rank" in found.render() or found.code in ("E308", "E407"), (mutant.what, found)
    assert len(told) > 10
