"""States, which outlive a step: a cached residual, a KV cache that steps fill in parts; sharded and unsharded agree."""

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_mutants import agree
from torch import Tensor
from torch.nn import functional

from stepgraph.kernels.unsharded import Unsharded
from stepgraph.kernels.weights import MadeUpWeights
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import ScheduleError
from stepgraph.planner.plan import Drop, Plan, Record, Run, State, WaitEvent, dumps, loads
from stepgraph.planner.plan_check import check_plan
from stepgraph.planner.schedule import read_schedule
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.compare import compare
from stepgraph.runtime.cpu import World
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.mutate import KINDS, seen_by_running, with_program
from stepgraph.runtime.session import Session
from stepgraph.runtime.simulate import simulate
from stepgraph.tools import cli

D = torch.float64

RESIDUAL = """version: 1
name: residual-cache
model: {layers: 2, hidden: 12, heads: 5, head_dim: 4, ffn: 8, dtype: float64}
mesh: {ulysses: 4}
shape: {batch: 2, seq: 11}
inputs:
  latents: {shape: [batch, seq, 6]}
outputs: [noise]
state:
  kept: {shape: [batch, seq, hidden], placement: sequence}
blocks:
  mlp:
    - mlp: {in: x, out: m}
    - residual: {in: [x, m], out: x}
step:
  - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
  - shard: x
  - residual: {in: [x, kept], out: x}
  - layers: mlp
  - keep: {in: x, into: kept}
  - call: {name: head, in: x, out: noise, shape: [batch, seq, 6]}
  - all_gather: noise
"""

CACHE = """version: 1
name: kv-cache
model: {layers: 2, hidden: 12, heads: 6, head_dim: 4, ffn: 8, dtype: float64}
mesh: {ulysses: 4}
shape: {batch: 2, seq: 9, kv: 20, past: 7}
inputs:
  latents: {shape: [batch, seq, 6]}
outputs: [noise]
state:
  kcache: {shape: [batch, kv, kv_heads, head_dim], placement: head, per: layer}
  vcache: {shape: [batch, kv, kv_heads, head_dim], placement: head, per: layer}
defaults: {gather: {via: copy}}
blocks:
  layer:
    - linear: {name: qkv, in: x, out: {q: heads, k: kv_heads, v: kv_heads}}
    - send: {in: v, into: vcache, at: past}
    - send: q
    - send: {in: k, into: kcache, at: past, barrier: true}
    - attention: {in: [q, kcache, vcache], out: o}
    - gather: o
    - linear: {name: out_proj, in: o, out: a}
    - residual: {in: [x, a], out: x}
step:
  - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
  - shard: x
  - layers: layer
  - call: {name: head, in: x, out: noise, shape: [batch, seq, 6]}
  - all_gather: noise
"""


def plan_of(text: str, **settings: str) -> Plan:
    overrides = tuple((key.replace("__", "."), value) for key, value in settings.items())
    return compile_schedule(read_schedule(text, "state.yaml", overrides))


def run(plan: Plan, inputs: Sequence[dict[str, Tensor]], seed: int) -> list[list[Tensor]]:
    """The outputs of every rank and step on the cpu device, which has seen nothing wrong."""
    seen: list[list[Tensor]] = [[] for _ in plan.ranks]

    def loop(rank: int) -> Generator[dict[str, Tensor], tuple[Tensor, ...], None]:
        for step in inputs:
            (output,) = yield step
            seen[rank].append(output)

    with torch.no_grad(), Session(plan, device="cpu", seed=seed) as session:
        session.drive(loop)
        assert session.report.ok, (session.report.races[:1], session.report.faults[:1], session.report)
    return seen


def by_hand_residual(inputs: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    w, kept, outputs = MadeUpWeights(3), torch.zeros(()), []
    for step in inputs:
        x = functional.silu(torch.asinh(step["latents"]) @ w.matrix("step.embed", None, "weight0.0", (6, 12), D)) + kept
        for layer in range(2):
            up = w.matrix("mlp.mlp", layer, "up", (12, 8), D)
            down = w.matrix("mlp.mlp", layer, "down", (8, 12), D)
            x = x + functional.gelu(x @ up) @ down
        kept = x
        outputs.append(functional.silu(torch.asinh(x) @ w.matrix("step.head", None, "weight0.0", (12, 6), D)))
    return outputs


def by_hand_cache(inputs: Sequence[dict[str, Tensor]], kv: int, past: int) -> list[Tensor]:
    w, outputs = MadeUpWeights(3), []
    caches = [[torch.zeros(2, kv, 6, 4, dtype=D) for _ in "kv"] for _ in range(2)]
    for step in inputs:
        x = functional.silu(torch.asinh(step["latents"]) @ w.matrix("step.embed", None, "weight0.0", (6, 12), D))
        for layer, (keys, values) in enumerate(caches):
            q, k, v = (
                (x @ w.matrix("layer.qkv", layer, f"weight{i}", (12, 24), D)).unflatten(2, (6, 4)) for i in range(3)
            )
            keys[:, past : past + k.shape[1]] = k
            values[:, past : past + v.shape[1]] = v
            scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / 2
            o = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)
            x = x + o.flatten(2) @ w.matrix("layer.out_proj", layer, "weight0", (24, 12), D)
        outputs.append(functional.silu(torch.asinh(x) @ w.matrix("step.head", None, "weight0.0", (12, 6), D)))
    return outputs


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seq", [8, 9, 3])
@pytest.mark.parametrize("text", [RESIDUAL, CACHE])
def test_steps_equal_a_model_written_by_hand(text: str, seq: int, ranks: int) -> None:
    plan = plan_of(text, mesh__ulysses=str(ranks), shape__seq=str(seq))
    inputs = [random_inputs(plan, number) for number in range(4)]
    want = by_hand_residual(inputs) if text is RESIDUAL else by_hand_cache(inputs, 20, 7)
    model = Unsharded(read_schedule(text, "state.yaml", (("shape.seq", str(seq)),)), 3)
    for number, step in enumerate(inputs):
        torch.testing.assert_close(model(step)[0], want[number], rtol=1e-10, atol=1e-12)
    for outputs in run(plan, inputs, seed=3):
        for got, exact in zip(outputs, want, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)
    assert prove(plan).ok, prove(plan).findings[:2]
    assert simulate(plan, steps=3, seed=ranks).ok


SMALL = {"mesh__ulysses": "2", "model__layers": "1", "model__hidden": "4", "model__head_dim": "2", "model__heads": "2"}
SMALL |= {"model__dtype": "float32", "shape__seq": "3", "shape__batch": "1"}


@pytest.mark.parametrize("kv", ["5", "3"])
def test_verifier_and_runs_agree_on_mutants(kv: str) -> None:
    plan = plan_of(CACHE, **SMALL, shape__kv=kv, shape__past=str(int(kv) - 3))
    outcomes = agree(plan, 4 * len(KINDS), seed=int(kv))
    assert outcomes["killed"] > 30
    outcomes = agree(plan_of(RESIDUAL, **SMALL), 2 * len(KINDS), seed=1)
    assert outcomes["killed"] > 10


def test_state_has_bytes_of_its_own_all_the_time() -> None:
    plan = plan_of(CACHE)
    assert [state.name for state in plan.states] == ["kcache[0]", "kcache[1]", "vcache[0]", "vcache[1]"]
    states = [plan.targets[state.buffer] for state in plan.states]
    assert all(
        one.offset + one.nbytes <= two.offset or two.offset + two.nbytes <= one.offset
        for one in states for two in plan.targets if one is not two
    )  # fmt: skip
    alone = plan.arena_lower_bound - sum(-(-state.nbytes // 256) * 256 for state in states)
    assert alone > 0  # q, o and noise
    assert plan.arena_bytes == plan.arena_lower_bound


def test_local_states_lie_behind_the_targets_and_are_not_dropped() -> None:
    plan = plan_of(RESIDUAL)
    (state,) = plan.states
    assert (state.name, state.buffer) == ("kept", len(plan.targets))
    dropped = {item.buffer for program in plan.ranks for item in program.instructions if isinstance(item, Drop)}
    assert dropped
    assert state.buffer not in dropped


@pytest.mark.parametrize("text", [RESIDUAL, CACHE])
def test_reset_starts_anew(text: str) -> None:
    plan = plan_of(text, shape__seq="6")
    first, second = (random_inputs(plan, number) for number in range(2))
    with torch.no_grad(), Session(plan, device="cpu", seed=0) as session:
        step = session.capture()
        fresh = step(**second)
        session.reset_state()
        before = step(**first)
        stale = step(**second)
        session.reset_state()
        again, same = step(**first), step(**second)
        assert session.report.ok
    assert isinstance(before, Tensor)
    assert isinstance(again, Tensor)
    assert torch.equal(before, again)
    assert torch.equal(stale, same)
    assert torch.equal(fresh, stale) is (text is CACHE)  # whose rows are all sent again


def test_rows_of_another_chunk_stay() -> None:
    """Two plans over one cache, chunk by chunk, would read what the first has left: here one plan leaves the rows that
    it does not send as they are."""
    plan = plan_of(CACHE, shape__seq="6", shape__kv="6", shape__past="0", model__layers="1")
    with torch.no_grad(), Session(plan, device="cpu", seed=0) as session:
        session.capture()(**random_inputs(plan, 0))
        backend = session.backend
        assert isinstance(backend, World)
        rows = [memory.tensors[plan.states[0].buffer].clone() for memory in backend.memories[0]]
    wide = plan_of(CACHE, shape__seq="6", shape__kv="8", shape__past="1", model__layers="1")
    with torch.no_grad(), Session(wide, device="cpu", seed=0) as session:
        backend = session.backend
        assert isinstance(backend, World)
        for memory in backend.memories[0]:
            memory.tensors[wide.states[0].buffer][:, [0, 7]] = 3.0
        session.capture()(**random_inputs(plan, 0))
        for memory, own in zip(backend.memories[0], rows, strict=True):
            got = memory.tensors[wide.states[0].buffer]
            assert torch.equal(got[:, 1:7], own)
            assert (got[:, [0, 7]] == 3.0).all()


# What an author can get wrong


def told(text: str) -> list[str]:
    with pytest.raises(ScheduleError) as error:
        compile_schedule(read_schedule(text, "state.yaml"))
    return [found.code for found in error.value.diagnostics]


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


KCACHE = "kcache: {shape: [batch, kv, kv_heads, head_dim], placement: head, per: layer}"
CLOSING = "    - send: {in: k, into: kcache, at: past, barrier: true}\n"
MISTAKES: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "unknown state": ("E207", RESIDUAL, [("into: kept", "into: kep")]),
    "a send into an unknown state": ("E207", CACHE, [("into: kcache", "into: cache")]),
    "never written": ("E202", RESIDUAL, [("  - keep: {in: x, into: kept}\n", "")]),
    "never read": ("E202", RESIDUAL, [("  - residual: {in: [x, kept], out: x}\n", "")]),
    "a size that nothing uses": ("E202", RESIDUAL, [("seq: 11", "seq: 11, batc: 2")]),
    "a size of another name": ("E211", RESIDUAL, [("seq: 11", "seq: 11, heads: 2")]),
    "other shape": ("E204", RESIDUAL, [("kept: {shape: [batch, seq, hidden]", "kept: {shape: [batch, seq, ffn]"),
                                       ("[x, kept]", "[x, x]"), ("in: x, out: noise", "in: [x, kept], out: noise")]),
    "other placement": ("E203", RESIDUAL, [("placement: sequence", "placement: replicated")]),
    "no sequence": ("E203", RESIDUAL, [("kept: {shape: [batch, seq, hidden]", "kept: {shape: [batch, 11, hidden]")]),
    "no rows": ("E204", CACHE, [("kv: 20", "kv: 0")]),
    "an input's name": ("E213", RESIDUAL, [("  kept: {", "  latents: {"), ("into: kept", "into: latents")]),
    "beyond the rows": ("E204", CACHE, [("past: 7", "past: 12")]),
    "rows from no size": ("E211", CACHE, [("at: past", "at: pst")]),
    "other features": ("E204", CACHE, [("kv, kv_heads, head_dim]", "kv, kv_heads, ffn]")]),
    "other dtype": ("E204", CACHE, [(KCACHE, KCACHE.replace("head,", "head, dtype: float32,"))]),
    "sent into what is not by head": ("E203", CACHE, [("placement: head", "placement: replicated")]),
    "sent by a collective": ("E213", CACHE, [("at: past, barrier: true", "at: past, via: nccl"),
                                             ("- send: q", "- send: {in: q, barrier: true}")]),
    "two tensors into one": ("E208", CACHE, [("{in: k, into: kcache", "{in: [k, v], into: kcache")]),
    "a gather into a state": ("E213", CACHE, [("- gather: o", "- gather: {in: o, out: kcache}")]),
    "read before the barrier": ("E206", CACHE, [(CLOSING, CLOSING.replace(", barrier: true", "")),
                                                ("    - gather: o\n", "    - barrier: all\n    - gather: o\n")]),
    "read, and then sent into with nothing between": ("E301", CACHE, [
        ("[q, kcache, vcache]", "[q, keys, vcache]"),
        ("    - send: q\n", "    - send: q\n    - call: {name: old, in: kcache, out: keys, like: kcache}\n")]),
    "a layer's outside of layers": ("E213", CACHE, [("name: head, in: x", "name: head, in: [x, kcache]")]),
    "a part of the rank's own": ("E203", RESIDUAL, [("- shard: x\n", "- keep: {in: x, into: kept}\n  - shard: x\n"),
                                                    ("placement: sequence", "placement: replicated"), ]),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(what: str) -> None:
    code, text, pairs = MISTAKES[what]
    assert code in told(changed(text, *pairs)), told(changed(text, *pairs))


LATE_READER = """version: 1
name: late-reader
model: {layers: 1, hidden: 12, heads: 6, head_dim: 4, ffn: 8, dtype: float64}
mesh: {ulysses: 2}
shape: {seq: 9, kv: 20}
inputs:
  latents: {shape: [batch, seq, 6]}
outputs: [noise]
state:
  kcache: {shape: [batch, kv, heads, head_dim], placement: head}
  seen: {shape: [batch, kv, heads, head_dim], placement: head}
step:
  - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
  - shard: x
  - linear: {in: x, out: {k: heads}}
  - send: {in: k, into: kcache, at: 3, barrier: true}
  - call: {name: head, in: x, out: noise, shape: [batch, seq, 6]}
  - all_gather: noise
  - residual: {in: [seen, kcache], out: seen}
"""


def without_last_exchange(plan: Plan) -> Plan:
    last = len(plan.exchanges) - 1
    for rank, program in enumerate(plan.ranks):
        kept = [item for item in program.instructions if getattr(item, "exchange", None) != last]
        plan = with_program(plan, rank, kept)
    return replace(plan, exchanges=plan.exchanges[:last])


def codes(plan: Plan) -> set[str]:
    return {found.code for found in prove(plan).findings}


def test_what_reads_a_state_last_is_followed_by_an_exchange() -> None:
    """Else the next step of a rank that is ahead would send over what another one still reads."""
    plan = plan_of(LATE_READER)
    assert plan.exchanges[-1].name == "step.closing_ulysses"
    assert prove(plan).ok
    run(plan, [random_inputs(plan, number) for number in range(3)], seed=0)
    assert simulate(plan, steps=3, seed=0).ok
    open_end = without_last_exchange(plan)
    assert codes(open_end) == {"E303"}
    assert "race" in [seen_by_running(open_end, seed) for seed in range(12)]


def test_a_state_that_is_read_before_the_barrier_is_refused() -> None:
    plan = plan_of(CACHE, mesh__ulysses="2", model__layers="1")
    attention = next(number for number, op in enumerate(plan.ops) if op.kind == "attention")
    items = list(plan.ranks[0].instructions)
    at = next(number for number, item in enumerate(items) if isinstance(item, Run) and item.op == attention)
    lost = next(item for item in reversed(items[:at]) if isinstance(item, WaitEvent))
    kept = [item for item in items if not (isinstance(item, Record | WaitEvent) and item.event == lost.event)]
    assert "E301" in codes(with_program(plan, 0, kept))


def test_a_state_that_shares_bytes_is_refused() -> None:
    plan = plan_of(LATE_READER)
    state, other = (next(n for n, t in enumerate(plan.targets) if t.name.startswith(name)) for name in ("k", "step"))
    moved = replace(plan.targets[other], offset=plan.targets[state].offset)
    targets = [moved if number == other else target for number, target in enumerate(plan.targets)]
    assert "E306" in codes(replace(plan, targets=tuple(targets)))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, states=(replace(plan.states[0], buffer=len(plan.targets) + 2), *plan.states[1:])),
        lambda plan: replace(plan, states=(plan.states[0], plan.states[0])),
        lambda plan: replace(plan, states=(*plan.states, State("more", 10_000))),
        lambda plan: with_program(plan, 0, [*plan.ranks[0].instructions, Drop(0, plan.states[1].buffer)]),
    ],
)
def test_plans_whose_states_are_not_whole_are_refused(change: Callable[[Plan], Plan]) -> None:
    plan = plan_of(LATE_READER)
    assert check_plan(plan) is None
    assert "state" in (check_plan(change(plan)) or "")
    assert loads(dumps(plan)) == plan


# Over other meshes, and in other ways

TENSOR = [
    ("mesh: {ulysses: 4}", "mesh: {tensor: 2, ulysses: 2}"),
    ("v: kv_heads}}", "v: kv_heads}, split: column}"),
    ("in: o, out: a}", "in: o, out: a, split: row}\n    - all_reduce: {in: a, via: copy}"),
]
GUIDED = [
    ("mesh: {ulysses: 4}", "mesh: {cfg: 2, ulysses: 2}"),
    (
        "seq, 6]}\noutputs",
        "seq, 6]}\n  cond: {shape: [batch, seq, 6], placement: cfg}\n  scale: {shape: [batch]}\noutputs",
    ),
    ("name: embed, in: latents", "name: embed, in: [latents, cond]"),
    ("  - all_gather: noise", "  - all_gather: noise\n  - guide: {in: noise, scale: scale, out: noise}"),
]
WAYS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "a cache over tensor and ulysses": (CACHE, TENSOR),
    "caches of both branches": (CACHE, GUIDED),
    "a residual of each branch": (RESIDUAL, GUIDED),
    "fewer heads of k and v": (CACHE, [("heads: 6", "heads: 6, kv_heads: 2"), ("ulysses: 4", "ulysses: 2")]),
    "one cache for all layers": (CACHE, [(", per: layer", "")]),
    "fewer keys than rows": (CACHE, [("vcache], out", "vcache], keys: 16, out")]),
    "a kernel's handshakes": (CACHE, [("defaults: {", "defaults: {handshake: kernel, ")]),
    "two sends into one cache": (CACHE, [(
        "at: past, barrier: true}", "at: past}\n    - send: {name: again, in: v, into: kcache, at: 0, barrier: true}"),
        ("past: 7", "past: 10")]),
    "rotated where it lies": (CACHE, [("    - attention", "    - norm_rope: kcache\n    - attention")]),
    "read, changed and kept": (RESIDUAL, [
        ("keep: {in: x, into: kept}", "residual: {name: r, in: [kept, x], out: kept}")]),
    "written twice": (RESIDUAL, [("  - layers", "  - keep: {name: early, in: x, into: kept}\n  - layers")]),
    "made by a projection": (RESIDUAL, [("keep: {in: x, into: kept}", "linear: {in: x, out: kept}")]),
    "made by a call": (RESIDUAL, [("keep: {in: x, into: kept}", "call: {name: c, in: [x, kept], out: kept, like: x}")]),
    "in another dtype": (RESIDUAL, [("placement: sequence", "placement: sequence, dtype: float32")]),
    "whole on every rank, and an output": (RESIDUAL, [
        ("[noise]", "[noise, kept]"), ("seq, hidden], placement: sequence", "seq, 6]"), ("in: [x, kept]", "in: [x, x]"),
        ("  - keep: {in: x, into: kept}\n", ""),
        ("- all_gather: noise", "- all_gather: noise\n  - residual: {name: add, in: [noise, kept], out: kept}")]),
    "what an exchange has brought": (RESIDUAL, [
        ("seq, hidden], placement: sequence", "seq, 6]"), ("in: [x, kept]", "in: [x, x]"),
        ("  - keep: {in: x, into: kept}\n", ""), ("name: head, in: x", "name: head, in: [x, kept]"),
        ("- all_gather: noise", "- all_gather: {in: noise, via: copy}\n  - keep: {in: noise, into: kept}")]),
    "a rank's own rows of what is whole": (RESIDUAL, [
        ("- shard: x\n", "- keep: {name: own, in: x, into: kept}\n  - shard: x\n"),
        ("  - keep: {in: x, into: kept}\n", "")]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_using_states(way: str) -> None:
    text, pairs = WAYS[way]
    plan = plan_of(changed(text, *pairs))
    report = simulate(plan, steps=3, seed=1)
    assert report.ok, report
    assert prove(plan).ok, prove(plan).findings[:2]
    compared = compare(plan, 0)
    assert compared
    assert not any(row.differs for row in compared)


def test_commands_tell_of_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text(CACHE.replace("float64", "float32"))
    assert cli.run(["compile", str(file)]) == 0
    assert "state        4, 5.1 kB of rank 0" in capsys.readouterr().out
    assert cli.run(["show", str(file)]) == 0
    assert "send_k -> kcache[0] of rank 1" in capsys.readouterr().out
    assert cli.run(["memory", str(file), "--format", "json"]) == 0
    states = json.loads(capsys.readouterr().out)["states"]
    assert [(found["name"], found["nbytes"], found["sent_into"]) for found in states[:2]] == [
        ("kcache[0]", 2 * 20 * 2 * 4 * 4, True), ("kcache[1]", 2 * 20 * 2 * 4 * 4, True)
    ]  # fmt: skip
    assert cli.run(["explain", "state.per"]) == 0
    assert "every layer has one of its own" in capsys.readouterr().out
