"""Heads in chunks: the same bits as without, sent and gathered while others are attended to (CASES 26)."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from stepgraph.kernels.stages import MadeUpStages
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import ScheduleError
from stepgraph.planner.plan import Collective, Plan, Run, Send, Wait
from stepgraph.planner.schedule import read_schedule
from stepgraph.planner.shares import head_shares, most_chunks
from stepgraph.planner.timeline import estimate
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.compare import compare
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.mutate import KINDS, verdicts
from stepgraph.runtime.session import Session
from stepgraph.runtime.simulate import simulate

from support.sizes import PLANS

CHUNKED = """
version: 1
name: chunked
model: {layers: 2, hidden: 16, heads: 9, head_dim: 4, ffn: 8, dtype: float32}
mesh: {ulysses: 4}
shape: {batch: 2, seq: 11}
inputs:
  latents: {shape: [batch, seq, 6]}
  rope: {shape: [seq, head_dim]}
outputs: [noise]
defaults: {gather: {via: copy}}
blocks:
  block:
    - norm: {in: x, out: h}
    - linear: {name: qkv, in: h, out: {q: heads, k: kv_heads, v: kv_heads, m: ffn}}
    - chunks: {heads: COUNT}
      do:
        - send: v
        - norm_rope: {in: [q, k], rope: rope}
        - send: q
        - send: {in: k, barrier: true}
        - call: {name: gelu, in: m, out: m, like: m}
        - attention: {in: [q, k, v], out: o}
        - gather: o
    - linear: {name: out, in: [o, m], out: a}
    - residual: {in: [x, a], out: x}
step:
  - call: {name: embed, in: latents, out: x, shape: [batch, seq, hidden]}
  - shard: [x, rope]
  - layers: block
  - call: {name: head, in: x, out: noise, shape: [batch, seq, 6]}
  - all_gather: noise
"""
JOINT = """
version: 1
name: joint-chunks
model: {layers: 2, hidden: 16, heads: 9, head_dim: 4, ffn: 8, dtype: float32}
mesh: {ulysses: 3}
shape: {batch: 1, seq: {img: 11, txt: 4}}
inputs:
  latents: {shape: [batch, img, 6]}
  text: {shape: [batch, txt, 5], placement: cfg}
  txt_mask: {shape: [batch, txt], dtype: bool, placement: cfg}
  guidance: {shape: [batch]}
outputs: [noise]
cfg: sequential
defaults: {gather: {via: copy}}
blocks:
  dual:
    - linear: {name: ctx, in: text, out: c}
    - each: [img, txt]
      do:
        - linear: {name: qkv, in: x, out: {q: heads, k: kv_heads, v: kv_heads}}
    - chunks: {heads: COUNT}
      do:
        - each: [img, txt]
          do:
            - send: [q, k, v]
        - barrier: all
        - attention: {in: [q, k, v], concat: [txt, img], mask: txt_mask, out: o}
        - each: [txt, img]
          do:
            - gather: o
            - linear: {name: out, in: o, out: a}
            - residual: {in: [x, a], out: x}
    - linear: {name: cross_q, in: x.img, out: {cq: heads}}
    - linear: {name: cross_kv, in: c, out: {ck: heads, cv: heads}}
    - attention: {name: cross, in: [cq, ck, cv], mask: txt_mask, out: co}
    - linear: {name: cross_out, in: co, out: x.img}
step:
  - call: {name: embed_img, in: latents, out: x.img, shape: [batch, img, hidden]}
  - call: {name: embed_txt, in: text, out: x.txt, shape: [batch, txt, hidden]}
  - shard: [x.img, x.txt]
  - layers: dual
  - concat: {in: [x.txt, x.img], out: x}
  - split: {in: x, out: [x.txt, x.img]}
  - all_gather: {in: [x.img, x.txt], out: [whole, told]}
  - call: {name: head, in: [whole, told], out: noise, shape: [batch, img, 6]}
  - guide: {in: noise, scale: guidance, out: noise}
"""


def plan_of(count: int, text: str = CHUNKED, **settings: str) -> Plan:
    overrides = tuple((key.replace("__", "."), value) for key, value in settings.items())
    return compile_schedule(read_schedule(text.replace("COUNT", str(count)), "chunks.yaml", overrides))


def outputs_of(plan: Plan, inputs: Mapping[str, Tensor], seed: int = 0) -> Sequence[Tensor]:
    with torch.no_grad(), Session(plan, device="cpu", seed=seed, stages=MadeUpStages(0)) as session:
        found = session.capture()(**inputs)
        assert session.report.ok
    return (found,) if isinstance(found, Tensor) else found


VIAS = {"copies": {}, "collectives": {"defaults__gather__via": "nccl"},
        "only collectives": {"defaults__gather__via": "nccl", "defaults__send__via": "nccl"}}  # fmt: skip


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize("ulysses", ["1", "2", "4"])
def test_the_same_bits_as_without(ulysses: str, via: str) -> None:
    text = CHUNKED.replace(", barrier: true", "") if via == "only collectives" else CHUNKED
    whole = plan_of(1, text, mesh__ulysses=ulysses, **VIAS[via])
    assert not any(dict(op.options).get("chunk") for op in whole.ops)
    inputs = random_inputs(whole, 0)
    want = outputs_of(whole, inputs)
    for count in (2,) if ulysses == "4" else (2, 3, 4):
        plan = plan_of(count, text, mesh__ulysses=ulysses, **VIAS[via])
        assert all(map(torch.equal, want, outputs_of(plan, inputs, seed=count)))
        report = simulate(plan, steps=2, seed=count)
        assert report is not None
        assert report.ok, report
        assert prove(plan).ok


@pytest.mark.parametrize("count", [1, 2, 3])
def test_joint_attention_with_masks_and_guidance(count: int) -> None:
    """Everything at once: each, concat, a mask, a branch after the other."""
    text = JOINT.replace("float32", "float64")
    for via in ("copy", "nccl"):
        plan = plan_of(count, text, defaults__gather__via=via)
        report = simulate(plan, steps=2, seed=count)
        assert report is not None
        assert report.ok, report
        assert report.max_abs_error < 1e-12
        assert prove(plan).ok
        rows = compare(plan, seed=1)
        assert rows
        assert not [row for row in rows if row.differs]


@pytest.mark.parametrize("handshake", ["copy", "kernel"])
def test_every_handshake(handshake: str) -> None:
    plan = plan_of(2, defaults__handshake=handshake)
    report = simulate(plan, steps=3, seed=1)
    assert report is not None
    assert report.ok
    assert prove(plan).ok


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(8, 2, 4), (6, 3, 4), (8, 1, 8), (12, 3, 2), (16, 4, 3), (8, 1, 4), (10, 5, 2)]
)
@pytest.mark.parametrize("via", ["copy", "nccl"])
def test_grouped_queries(heads: int, kv_heads: int, ranks: int, count: int, via: str) -> None:
    """With fewer kv heads than ranks, ranks share them, and so do chunks."""
    shares = head_shares(heads, kv_heads, ranks)
    most = min(most_chunks(q, kv) for (_, q), (_, kv) in shares)
    settings = {"model__heads": str(heads), "model__kv_heads": str(kv_heads), "mesh__ulysses": str(ranks)}
    settings |= {"model__dtype": "float64", "defaults__gather__via": via}
    if count > most:
        with pytest.raises(ScheduleError, match="more chunks than a rank has heads"):
            plan_of(count, **settings)
        return
    plan = plan_of(count, **settings)
    report = simulate(plan, steps=2, seed=0)
    assert report is not None
    assert report.ok, report
    assert report.max_abs_error < 1e-12
    assert prove(plan).ok
    rows = compare(plan_of(count, **{**settings, "model__dtype": "float32"}), seed=1)
    assert rows
    assert not [row for row in rows if row.differs]


@pytest.mark.parametrize("heads", range(1, 13))
def test_every_chunk_has_a_head(heads: int) -> None:
    for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
        for count in range(1, most_chunks(heads, kv_heads) + 1):
            parts = head_shares(heads, kv_heads, count)
            assert [head for (first, n), _ in parts for head in range(first, first + n)] == list(range(heads))
            assert all(q and kv for (_, q), (_, kv) in parts)
        assert most_chunks(heads, kv_heads) >= kv_heads


def test_the_order_of_issue() -> None:
    """Send i + 1, attention i, gather i - 1; what stands before is sent there, and other ops are done once."""
    plan = plan_of(3, mesh__ulysses="3")
    seen: list[str] = []
    for item in plan.ranks[0].instructions:
        if not isinstance(item, Send | Run | Wait):
            continue
        op = plan.ops[plan.exchanges[item.exchange].op if isinstance(item, Wait) else item.op]
        if op.layer == 1:
            chunk = dict(op.options).get("chunk", "")[:1]
            words = f"{op.name.removeprefix('block.')} {chunk}".strip()
            seen += [words] if words not in seen[-1:] else []
    pipeline = [
        "send_v 0", "send_v 1", "send_v 2", "norm_rope",
        "send_q 0", "send_k 0", "send_k.handshake 0", "send_q 1", "send_k 1", "send_k.handshake 1",
        "gelu", "attention 0", "send_q 2", "send_k 2", "send_k.handshake 2",
        "attention 1", "gather 0", "gather.handshake 0", "attention 2", "gather 1", "gather.handshake 1",
        "gather 2", "gather.handshake 2",
    ]  # fmt: skip
    assert seen[seen.index("send_v 0") : seen.index("out")] == pipeline
    names = [exchange.name for exchange in plan.exchanges]
    assert len(set(names)) == len(names)


def h3(count: int, via: str) -> Plan:
    """MiniMax H3 at its true size, three layers of it, with its exchanges in chunks."""
    text = (PLANS / "minimax_h3_u4.yaml").read_text()
    head, first, rest = text.partition("    - send: v\n")
    body, last, tail = rest.partition("    - gather: o\n")
    inner = "".join(f"    {line}\n" for line in (first + body + last).splitlines())
    text = f"{head}    - chunks: {{heads: {count}}}\n      do:\n{inner}{tail}"
    return compile_schedule(read_schedule(text, "h3.yaml", (("model.layers", "3"), ("defaults.gather.via", via))))


@pytest.mark.parametrize("via", ["copy", "nccl"])
def test_exposed_communication_gets_smaller(via: str) -> None:
    whole, two = h3(1, via), h3(2, via)
    assert prove(two).ok
    before, after = estimate(whole), estimate(two)
    assert after.exposed_seconds < (0.7 if via == "copy" else 0.9) * before.exposed_seconds
    assert after.step_seconds < before.step_seconds
    assert after.communication_seconds > before.communication_seconds  # what there is more of is hidden


@pytest.mark.parametrize("via", ["copy", "nccl"])
def test_mutants_are_judged_alike(via: str) -> None:
    small = {"model__layers": "1", "model__hidden": "8", "model__head_dim": "2", "model__heads": "4", "shape__seq": "5"}
    plan = plan_of(2, mesh__ulysses="2", defaults__gather__via=via, **small)
    found = list(verdicts(plan, 3 * len(KINDS), seed=1))
    assert {verdict.outcome for verdict in found} - {"by rule"} == {"killed", "safe"}
    assert sum(verdict.outcome == "killed" for verdict in found) > 20


def test_collectives_of_chunks() -> None:
    plan = plan_of(2, mesh__ulysses="2", defaults__gather__via="nccl")
    gathers = [i for i in plan.ranks[0].instructions if isinstance(i, Collective) and plan.ops[i.op].kind == "gather"]
    assert len(gathers) == 2 * 2
    assert [op.name for op in plan.ops if op.kind == "join"] == ["block.gather.join"] * 2


def refusal(text: str, count: int = 2, **settings: str) -> str:
    with pytest.raises(ScheduleError) as error:
        plan_of(count, text, **settings)
    return str(error.value)


def test_refusals() -> None:
    assert "E217" in (told := refusal(CHUNKED, 3))  # nine heads on four ranks: one rank has three, the others two
    assert "more chunks than a rank has heads" in told
    assert "2 at most" in told
    early = CHUNKED.replace(
        "        - attention", "        - norm: {name: n, in: q, over: head, out: q}\n        - attention"
    )
    assert "'q' is in chunks" in refusal(early)
    outside = CHUNKED.replace("        - send: v\n", "").replace("    - chunks", "    - send: v\n    - chunks")
    assert "E206" in refusal(outside) or "E217" in refusal(outside)
    for left_out in ("        - gather: o\n", "        - attention: {in: [q, k, v], out: o}\n"):
        assert "chunks are a run from send to gather" in refusal(CHUNKED.replace(left_out, ""))
    unclosed = CHUNKED.replace(", barrier: true", "")
    assert "chunks are a run from send to gather" in refusal(unclosed)
    nested = CHUNKED.replace("        - gather: o\n", "        - gather: o\n        - layers: block\n")
    assert "chunks hold ops" in refusal(nested)
    assert "E103" in refusal(CHUNKED, 0)


def test_what_is_in_chunks_is_whole_behind_them() -> None:
    """The names that were cut mean nothing there, but for what was gathered."""
    after = CHUNKED.replace("in: [o, m], out: a", "in: [o, m, q], out: a")
    assert "'q' is in chunks" in refusal(after)
    assert "E203" in refusal(after, 1)


def test_a_state_is_not_cut() -> None:
    text = CHUNKED.replace(
        "outputs:", "state:\n  cache: {shape: [batch, seq, kv_heads, head_dim], placement: head}\noutputs:"
    )
    text = text.replace("- send: v\n", "- send: {in: v, into: cache}\n").replace("[q, k, v]", "[q, k, cache]")
    assert "a state is not cut into chunks" in refusal(text)


def test_fewer_heads_than_ranks_are_told() -> None:
    with pytest.raises(ScheduleError, match="E205: heads are fewer than ranks"):
        plan_of(2, model__heads="3", mesh__ulysses="4")
