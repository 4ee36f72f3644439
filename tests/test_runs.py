"""Shipped schedules on the cpu device: right in every interleaving, for any number of ranks, in every protocol."""

from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from stepgraph.kernels.stages import MadeUpStages
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.inputs import random_inputs
from stepgraph.runtime.session import Session
from stepgraph.runtime.simulate import simulate

from support.sizes import SHIPPED, small_plan


@pytest.mark.parametrize("name", SHIPPED)
def test_interleavings_give_the_same_bits(name: str) -> None:
    same_bits(name, 15)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHIPPED)
def test_many_interleavings_give_the_same_bits(name: str) -> None:
    same_bits(name, 50)


def same_bits(name: str, seeds: int) -> None:
    plan = small_plan(name)
    stages = MadeUpStages(0)
    inputs = [random_inputs(plan, number) for number in range(3)]
    first: list[tuple[Tensor, ...]] | None = None
    for seed in range(seeds):
        seen: list[list[tuple[Tensor, ...]]] = [[] for _ in plan.ranks]

        def loop(rank: int, seen: list[list[tuple[Tensor, ...]]] = seen) -> Generator[
            dict[str, Tensor], tuple[Tensor, ...], None
        ]:  # fmt: skip
            for step in inputs:
                seen[rank].append((yield step))

        with torch.no_grad(), Session(plan, device="cpu", seed=seed, stages=stages) as session:
            session.drive(loop)
            assert session.report.ok, (seed, session.report.races[:1], session.report.faults[:1])
            assert session.report.movements_checked > 0
        first = first or seen[0]
        for outputs in seen:  # every rank has the same output, in every interleaving
            assert all(torch.equal(a, b) for one, two in zip(first, outputs, strict=True)
                       for a, b in zip(one, two, strict=True))  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SHIPPED)
def test_agrees_with_the_unsharded_model(name: str, ranks: int) -> None:
    more = {"mesh__ulysses": str(ranks)}
    if ("tp2" in name or "chunks" in name) and ranks == 8:
        more["model__heads"] = "18"  # nine a tensor rank; two chunks a rank
    plan = small_plan(name, **more)
    report = simulate(plan, steps=3, seed=ranks)
    assert report.ok, report
    assert prove(plan).ok


@pytest.mark.parametrize("handshake", ["copy", "kernel"])
@pytest.mark.parametrize("name", ["quickstart", "flux_1024_u4", "minimax_h3_tp2_u2"])
def test_every_handshake(name: str, handshake: str) -> None:
    plan = small_plan(name, defaults__handshake=handshake, defaults__gather__via="copy")
    assert {e.protocol.value for e in plan.exchanges if e.protocol} == {handshake}
    assert simulate(plan, steps=3, seed=1).ok
    assert prove(plan).ok


@pytest.mark.parametrize("via", ["copy", "nccl"])
@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "nccl_baseline_u4"])
def test_every_exchange_by_copies_and_by_collectives(name: str, via: str) -> None:
    kinds = ["gather", "all_gather", "all_reduce"]
    plan = small_plan(name, **{f"defaults__{kind}__via": via for kind in kinds})
    kinds_found = {exchange.kind.value for exchange in plan.exchanges}
    assert kinds_found == ({"handshake"} if via == "copy" else {"handshake", "collective"})
    assert simulate(plan, steps=2, seed=2).ok
    assert prove(plan).ok


@pytest.mark.parametrize("seq", [1, 2, 3, 5, 7, 8])
def test_sequences_from_one_token_up(seq: int) -> None:
    """CASES 26: ranks without a token take part in every exchange all the same."""
    plan = small_plan("uneven_u4", shape__seq=str(seq))
    report = simulate(plan, steps=2, seed=seq)
    assert report.ok, report
    assert prove(plan).ok


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(4, 4, 4), (5, 5, 4), (12, 3, 2), (12, 3, 4), (8, 2, 8), (9, 3, 3)]
)
def test_grouped_queries(heads: int, kv_heads: int, ranks: int) -> None:
    """CASES 26: heads that don't divide, and fewer kv heads than ranks."""
    plan = small_plan("quickstart", model__heads=str(heads), model__kv_heads=str(kv_heads), mesh__ulysses=str(ranks))
    report = simulate(plan, steps=2, seed=0)
    assert report.ok, report
    assert prove(plan).ok


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", ["quickstart", "flux_1024_u4", "wan_14b_u4"])
def test_batches(name: str, batch: int) -> None:
    plan = small_plan(name, shape__batch=str(batch))
    assert simulate(plan, steps=2, seed=batch).ok
    assert prove(plan).ok


def test_cross_attention_exchanges_nothing() -> None:
    """CASES 24: K and V of the text are replicated; only q, k, v and o of self-attention are exchanged."""
    plan = small_plan("wan_14b_u4")
    moved = {plan.ops[exchange.op].name for exchange in plan.exchanges}
    assert moved == {"wan.send_k.handshake", "wan.gather.handshake", "step.all_gather.handshake"}
    assert simulate(plan, steps=2, seed=3).ok


@pytest.mark.parametrize("mesh", ["{ulysses: 2, tensor: 2}", "{tensor: 2, ulysses: 2}", "{tensor: 2, ulysses: 3}"])
def test_groups_of_any_mesh(mesh: str) -> None:
    """CASES 35: groups need not be consecutive ranks."""
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.schedule import read_schedule

    from support.sizes import small_schedule

    tree = small_schedule("minimax_h3_tp2_u2").tree
    text = tree.text.replace("{ulysses: 2, tensor: 2}", mesh)
    plan = compile_schedule(read_schedule(text, "mesh.yaml", tree.overrides))
    assert simulate(plan, steps=2, seed=0).ok
    assert prove(plan).ok


GUIDED = """
version: 1
name: guided
model: {layers: 1, hidden: 16, heads: 4, head_dim: 4, ffn: 8, dtype: float32}
mesh: MESH
shape: {batch: 2, seq: 7}
inputs:
  latents: {shape: [batch, seq, 6]}
  text: {shape: [batch, 5], placement: PLACEMENT}
  guidance: {shape: [batch]}
outputs: [noise]
step:
  - call: {name: model, in: [latents, text], out: noise, shape: [batch, seq, 6]}
  - guide: {in: GUIDE, scale: guidance, out: noise}
"""


@pytest.mark.parametrize("via", ["copy", "nccl"])
def test_guidance_over_a_mesh_axis(via: str) -> None:
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.schedule import read_schedule

    text = (
        GUIDED.replace("MESH", "{cfg: 2, ulysses: 2}")
        .replace("PLACEMENT", "cfg")
        .replace("GUIDE", f"noise, via: {via}")
    )
    plan = compile_schedule(read_schedule(text, "guided.yaml"))
    assert plan.inputs[1].shape == (2, 2, 5)
    report = simulate(plan, steps=3, seed=0)
    assert report.ok, report
    assert prove(plan).ok


def test_guidance_of_two_tensors() -> None:
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.schedule import read_schedule

    text = GUIDED.replace("MESH", "{ulysses: 2}").replace("PLACEMENT", "replicated").replace("GUIDE", "[noise, other]")
    text = text.replace(
        "  - guide", "  - call: {name: second, in: [latents, guidance], out: other, like: noise}\n  - guide"
    )
    plan = compile_schedule(read_schedule(text, "guided.yaml"))
    assert simulate(plan, steps=2, seed=0).ok


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", SHIPPED)
def test_ops_on_any_of_several_streams(name: str, seed: int) -> None:
    """Compute streams may be many: kinds are put on random streams, and every plan is proven and runs clean."""
    import random

    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.ops import OP_KINDS
    from stepgraph.planner.schedule import read_schedule

    from support.sizes import small_schedule

    tree = small_schedule(name).tree
    streams = "streams: {compute: {}, copy: {}, second: {}, third: {}}"
    text = "\n".join(streams if line.startswith("streams:") else line for line in tree.text.splitlines())
    pick = random.Random(f"{name}{seed}")
    chosen = tuple(
        (f"defaults.{kind}.stream", pick.choice(["compute", "copy", "second", "third"]))
        for kind in OP_KINDS
        if pick.random() < 0.5
    )
    plan = compile_schedule(read_schedule(text, f"{name}.yaml", (*tree.overrides, *chosen)))
    proof = prove(plan)
    assert proof.ok, [finding.render() for finding in proof.findings]
    assert simulate(plan, steps=2, seed=seed).ok


@pytest.mark.parametrize("via", ["copy", "nccl"])
def test_exchange_of_an_input_of_another_dtype(via: str) -> None:
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.schedule import read_schedule

    from support.sizes import small_schedule

    tree = small_schedule("quickstart", model__dtype="bfloat16").tree
    text = tree.text.replace("rope: {shape: [seq, head_dim]}", "rope: {shape: [seq, head_dim], dtype: float32}")
    text = text.replace("  - shard: [x, rope]", f"  - shard: [x, rope]\n  - all_gather: {{in: rope, via: {via}}}")
    plan = compile_schedule(read_schedule(text, "wide.yaml", tree.overrides))
    assert prove(plan).ok
    assert simulate(plan, steps=2, seed=0).ok
