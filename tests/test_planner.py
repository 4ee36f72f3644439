"""The passes: shares, expansion, events, lifetimes, placement, and that the same input gives the same bytes."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import ScheduleError
from stepgraph.planner.expand import expand
from stepgraph.planner.memory import allocate
from stepgraph.planner.plan import DType, Plan, Record, Region, Reset, Run, Send, Signal, Wait, WaitEvent, dumps, loads
from stepgraph.planner.schedule import Schedule, load_schedule, read_schedule
from stepgraph.planner.shares import balanced, head_shares
from stepgraph.planner.streams import StreamPlan, order
from stepgraph.planner.timeline import estimate

from support.sizes import SHIPPED, small_schedule

PLANS = Path(__file__).parents[1] / "plans"
SMALL = (("model.layers", "2"), ("model.hidden", "64"), ("model.head_dim", "16"), ("model.ffn", "128"))


def shipped(name: str, *overrides: tuple[str, str]) -> Schedule:
    return load_schedule(PLANS / f"{name}.yaml", overrides)


@given(st.integers(0, 200), st.integers(1, 16))
def test_balanced_shares_cover_all_and_differ_by_one(total: int, parts: int) -> None:
    shares = balanced(total, parts)
    assert [index for first, count in shares for index in range(first, first + count)] == list(range(total))
    counts = [count for _, count in shares]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 16))
def test_head_shares_keep_every_group_with_its_kv_head(kv_heads: int, group: int, parts: int) -> None:
    heads = kv_heads * group
    sharers = -(-parts // kv_heads)
    if heads < parts or (kv_heads < parts and group < sharers):
        return  # refused by E205
    shares = head_shares(heads, kv_heads, parts)
    assert [head for (first, count), _ in shares for head in range(first, first + count)] == list(range(heads))
    for (first, count), (kv_first, kv_count) in shares:
        assert count > 0
        assert {head // group for head in range(first, first + count)} == set(range(kv_first, kv_first + kv_count))
        assert count % kv_count == 0


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_schedules_compile_at_true_size(name: str) -> None:
    plan = compile_schedule(shipped(name))
    assert loads(dumps(plan)) == plan


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", [name for name in SHIPPED if "tp2" not in name])
def test_shipped_schedules_compile_for_any_ranks(name: str, ranks: int) -> None:
    schedule = shipped(name, ("mesh.ulysses", str(ranks)))
    if schedule.model.heads < ranks:
        with pytest.raises(ScheduleError, match="E205"):
            compile_schedule(schedule)
        return
    assert compile_schedule(schedule).world_size == ranks


def test_same_bytes_in_any_process() -> None:
    script = (
        "import hashlib; from pathlib import Path; from stepgraph.planner.schedule import load_schedule;"
        "from stepgraph.planner.compile import compile_schedule; from stepgraph.planner.plan import dumps;"
        f"p = compile_schedule(load_schedule(Path({str(PLANS / 'flux_1024_u4.yaml')!r}), (('mesh.ulysses', '8'),)));"
        "print(hashlib.sha256(dumps(p).encode()).hexdigest())"
    )
    seen = set()
    for seed in ("0", "1", "12345"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        seen.add(subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True).stdout)
    assert len(seen) == 1


def test_planner_imports_neither_torch_nor_runtime() -> None:
    script = (
        "import sys, pkgutil, importlib, stepgraph.planner as p\n"
        "names = [m.name for m in pkgutil.walk_packages(p.__path__, 'stepgraph.planner.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'networkx', 'click', 'rich')"
        " or m.startswith(('stepgraph.runtime', 'stepgraph.kernels', 'stepgraph.tools'))]\n"
        "assert len(names) > 15, names\n"
        "assert not bad, bad\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], env=env, check=True)


def needed(plan: StreamPlan) -> set[tuple[int, int]]:
    """Every pair that the events and streams order, by brute force over paths."""
    after: list[set[int]] = []
    last: dict[int, int] = {}
    for index, sources in enumerate(plan.waits):
        before = set(sources)
        if plan.stream[index] in last:
            before.add(last[plan.stream[index]])
        after.append(before.union(*(after[source] for source in before)) if before else set())
        last[plan.stream[index]] = index
    return {(source, index) for index, sources in enumerate(after) for source in sources}


@pytest.mark.parametrize("name", SHIPPED)
def test_no_event_can_be_spared(name: str) -> None:
    """The events are the transitive reduction: without any one of them its own pair is unordered."""
    plan = order(expand(shipped(name, *SMALL[:1])))
    for index, sources in enumerate(plan.waits):
        for source in sources:
            others = [s for s in sources if s != source]
            previous = [i for i in range(index) if plan.stream[i] == plan.stream[index]][-1:]
            assert not any(plan.before(source, other) for other in [*others, *previous])


def test_clocks_are_reachability() -> None:
    plan = order(expand(shipped("quickstart")))
    pairs = needed(plan)
    for first, second in itertools.permutations(range(len(plan.waits)), 2):
        assert plan.before(first, second) == ((first, second) in pairs)


def test_sends_start_with_the_next_rank_and_end_with_the_own() -> None:
    plan = compile_schedule(shipped("quickstart"))
    for rank, program in enumerate(plan.ranks):
        sends = [i for i in program.instructions if isinstance(i, Send) and i.op == 6]
        assert [send.peer for send in sends] == [(rank + step) % 4 for step in (1, 2, 3, 4)]
    first_peers = [next(i.peer for i in p.instructions if isinstance(i, Send)) for p in plan.ranks]
    assert sorted(first_peers) == [0, 1, 2, 3]


def rectangle(region: Region) -> set[tuple[int, int]]:
    return set(itertools.product(range(region.row, region.row + region.rows),
                                 range(region.col, region.col + region.cols)))  # fmt: skip


@pytest.mark.parametrize("name", ["quickstart", "uneven_u4"])
def test_sends_tile_every_target(name: str) -> None:
    """Each element of a target is written by exactly one rank of each exchange."""
    plan = compile_schedule(shipped(name, ("model.head_dim", "2"), ("model.hidden", "16")))
    for owner, program in enumerate(plan.ranks):
        written: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for sender in plan.ranks:
            for item in sender.instructions:
                if isinstance(item, Send) and item.peer == owner:
                    written.setdefault((item.op, item.target), []).extend(rectangle(item.region))
        for (_, target), cells in written.items():
            buffer = program.buffers[target]
            assert len(cells) == len(set(cells)) == buffer.rows * buffer.cols


@pytest.mark.parametrize("name", SHIPPED)
def test_every_event_is_recorded_once_and_then_waited_for_once(name: str) -> None:
    plan = compile_schedule(shipped(name, *SMALL[:1]))
    for program in plan.ranks:
        records = [i.event for i in program.instructions if isinstance(i, Record)]
        waits = [i.event for i in program.instructions if isinstance(i, WaitEvent)]
        assert sorted(records) == sorted(waits) == sorted(set(records))


def test_handshakes_pair_over_the_group() -> None:
    plan = compile_schedule(shipped("uneven_u4"))
    signals = {(r, i.exchange, f.peer, f.slot) for r, p in enumerate(plan.ranks) for i in p.instructions
               if isinstance(i, Signal) for f in i.flags}  # fmt: skip
    waits = {(f.peer, i.exchange, r, f.slot) for r, p in enumerate(plan.ranks) for i in p.instructions
             if isinstance(i, Wait) for f in i.flags}  # fmt: skip
    assert signals == waits
    assert len(signals) == 4 * 3 * sum(exchange.protocol is not None for exchange in plan.exchanges)
    words = [(owner, slot) for _, _, owner, slot in signals]
    assert len(words) == len(set(words))


def test_groups_come_from_the_mesh() -> None:
    """CASES 35: with ulysses written first the ranks of its group are not consecutive."""
    strided = compile_schedule(shipped("minimax_h3_tp2_u2", *SMALL))
    consecutive = compile_schedule(
        read_schedule(
            shipped("minimax_h3_tp2_u2").tree.text.replace("{ulysses: 2, tensor: 2}", "{tensor: 2, ulysses: 2}"),
            "swapped.yaml",
            SMALL,
        )
    )

    def sends(plan: Plan) -> set[tuple[int, ...]]:
        found = [exchange.group for exchange in plan.exchanges if exchange.name.startswith("self_attention.send")]
        return {plan.groups[group] for group in found}

    assert sends(strided) == {(0, 2), (1, 3)}
    assert sends(consecutive) == {(0, 1), (2, 3)}


def test_all_gathered_keys_alternate_between_two_targets() -> None:
    """With one exchange a layer, nothing orders a layer's send after the last layer's reads: two targets take turns."""
    text = (Path(__file__).parent / "bad_schedules" / "unsafe_buffers.yaml").read_text().replace(", buffers: 1", "")
    plan = allocate(order(expand(read_schedule(text, "auto.yaml", (("model.layers", "5"),)))))
    assert [name for name in (target.name for target in plan.targets) if ":k" in name] == [
        "attn.all_gather:k.0",
        "attn.all_gather:k.1",
    ]


def test_one_exchange_a_step_is_closed() -> None:
    """FACTS: one barrier a replay and nothing else deadlocks, so the planner adds a closing handshake."""
    text = shipped("quickstart").tree.text
    start, end = text.index("\nblocks:") + 1, text.index("\nstep:") + 1
    text = (
        text[:start]
        + "blocks: {}\n\n"
        + text[end:].replace("  - layers: self_attention\n", "").replace("[x, rope]", "x")
    )
    plan = compile_schedule(read_schedule(text.replace("  rope: {shape: [seq, head_dim]}\n", ""), "one.yaml"))
    assert [exchange.name for exchange in plan.exchanges] == ["step.all_gather.handshake", "step.closing_ulysses"]


def test_kernel_handshakes_reset_nothing() -> None:
    plan = compile_schedule(shipped("quickstart", ("defaults.handshake", "kernel")))
    assert not any(isinstance(i, Reset) for p in plan.ranks for i in p.instructions)


def test_chosen_buffers_are_kept() -> None:
    text = shipped("quickstart").tree.text.replace("- gather: o", "- gather: {in: o, buffers: 2}")
    plan = compile_schedule(read_schedule(text, "two.yaml"))
    assert sum(target.name.startswith("self_attention.gather") for target in plan.targets) == 2


@pytest.mark.parametrize("name", SHIPPED)
def test_estimate_covers_every_stage(name: str) -> None:
    plan = compile_schedule(shipped(name))
    timeline = estimate(plan)
    runs = sum(isinstance(i, Run) for i in plan.ranks[0].instructions)
    assert sum(isinstance(plan.ranks[0].instructions[s.instruction], Run) for s in timeline.spans) == runs
    assert timeline.compute_seconds <= timeline.step_seconds
    assert timeline.step_seconds <= (timeline.compute_seconds + timeline.communication_seconds) * (1 + 1e-9)
    assert timeline.spans[timeline.critical[-1]].end == timeline.step_seconds


def test_sending_v_first_is_predicted_to_beat_the_serial_baseline() -> None:
    first, serial = (
        estimate(compile_schedule(shipped("minimax_h3_u4"))),
        estimate(compile_schedule(shipped("nccl_baseline_u4"))),
    )
    assert first.exposed_seconds < serial.exposed_seconds


def test_a_concat_of_tables_keeps_their_dtype() -> None:
    """In a bfloat16 model a joint table of angles stays float32, as the two that it joins."""
    plan = compile_schedule(small_schedule("flux_1024_u4"))
    buffers = {buffer.name: buffer.dtype for buffer in plan.ranks[0].buffers}
    assert {buffers["rope_img"], buffers["rope_txt"], buffers["rope"]} == {DType.FLOAT32}
    assert buffers["x"] is DType.BFLOAT16


def test_sizes_of_the_authors_own() -> None:
    """For shapes and repeats; set like any other; a name that is taken, or that nobody gave, is refused."""
    text = shipped("flux_1024_u4").tree.text
    schedule = small_schedule("flux_1024_u4", sizes__dual_layers="3", sizes__single_layers="1")
    layers = {op.layer: op.name.split(".")[0] for op in compile_schedule(schedule).ops if op.layer is not None}
    assert [layers[number] for number in range(4)] == ["dual", "dual", "dual", "single"]
    with pytest.raises(ScheduleError, match="E211: 'hidden' is already the name of a size"):
        expand(read_schedule(text.replace("text_dim: 4096", "hidden: 4096"), "s.yaml"))
    with pytest.raises(ScheduleError, match="E211: 'img' is already the name of a size"):
        expand(read_schedule(text.replace("text_dim: 4096", "img: 4096, text_dim: 4096"), "s.yaml"))
    with pytest.raises(ScheduleError, match=r"E211: no size is called 'dual_layer'(.|\n)*did you mean 'dual_layers'"):
        read_schedule(text.replace("repeat: dual_layers", "repeat: dual_layer"), "s.yaml")
