"""States, which outlive a step: a cached residual, a KV cache that steps fill in parts; sharded and unsharded agree."""

from collections.abc import Generator, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.kernels.unsharded import Unsharded
from stepgraph.kernels.weights import MadeUpWeights
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.plan import Plan
from stepgraph.planner.schedule import read_schedule
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.session import Session, random_inputs
from stepgraph.runtime.simulate import simulate

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
            up, down = (
                w.matrix("mlp.mlp", layer, part, shape, D) for part, shape in (("up", (12, 8)), ("down", (8, 12)))
            )
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
