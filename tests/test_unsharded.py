"""The unsharded interpreter against a model written out by hand."""

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.kernels.unsharded import Unsharded
from stepgraph.kernels.weights import MadeUpWeights
from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.schedule import load_schedule, read_schedule, schedule_path
from stepgraph.runtime.simulate import simulate

from support.sizes import small_schedule

D = torch.float64


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=D)


def test_quickstart_by_hand() -> None:
    model = Unsharded(load_schedule(schedule_path("quickstart")), seed=5)
    w = MadeUpWeights(5)
    latents, timestep, rope = randn(1, 96, 16), randn(1), randn(96, 16)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)

    def turn(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., :8], x[..., 8:]) * torch.complex(rope[:, :8], rope[:, 8:])[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    embed = [
        w.matrix("step.embed", None, "weight0.0", (16, 64), D),
        w.matrix("step.embed", None, "weight0.1", (1, 64), D),
    ]
    x = functional.silu(torch.asinh(latents) @ embed[0] + torch.asinh(timestep.reshape(1, 1, 1)) @ embed[1])
    for layer in range(2):
        block = "self_attention"
        h = norm(x, w.scale(f"{block}.norm", layer, "weight", 64, D))
        q, k, v = (
            (h @ w.matrix(f"{block}.qkv", layer, f"weight{i}", (64, 128), D)).unflatten(2, (8, 16)) for i in range(3)
        )
        q = turn(norm(q, w.scale(f"{block}.norm_rope", layer, "weight0", 16, D)))
        k = turn(norm(k, w.scale(f"{block}.norm_rope", layer, "weight1", 16, D)))
        o = torch.einsum("bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, k) / 4).softmax(-1), v)
        x = x + o.flatten(2) @ w.matrix(f"{block}.out_proj", layer, "weight0", (128, 64), D)
        h = norm(x, w.scale(f"{block}.norm2", layer, "weight", 64, D))
        up, down = (
            w.matrix(f"{block}.mlp", layer, "up", (64, 128), D),
            w.matrix(f"{block}.mlp", layer, "down", (128, 64), D),
        )
        x = x + functional.gelu(h @ up) @ down
    want = functional.silu(torch.asinh(x) @ w.matrix("step.head", None, "weight0.0", (64, 16), D))
    (got,) = model({"latents": latents, "timestep": timestep, "rope": rope})
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_unnamed_repeats_have_weights_of_their_own() -> None:
    model = Unsharded(small_schedule("flux_1024_u4"), seed=0)
    names = set(model.names.values())
    assert {"dual.norm", "dual.norm_2", "dual.modulate", "dual.modulate_2", "single.norm"} <= names


def test_interpreter_uses_no_plan() -> None:
    import stepgraph.kernels.unsharded as module

    passes = {"expand", "opgraph", "streams", "memory", "lower", "plan", "compile", "values", "shares"}
    imported = {value.__module__.rpartition(".")[2] for value in vars(module).values() if hasattr(value, "__module__")}
    assert not imported & passes


MADE_TABLES = """
version: 1
name: made-tables
model: {layers: 1, hidden: 16, heads: 4, head_dim: 4, ffn: 8, dtype: float32}
mesh: {ulysses: 2}
shape: {batch: 2, seq: 7}
inputs:
  latents: {shape: [batch, seq, 6]}
  timestep: {shape: [batch, seq]}
  positions: {shape: [seq]}
  scale: {shape: [heads, head_dim]}
outputs: [noise]
step:
  - call: {name: table, in: [positions, scale], out: rope, shape: [seq, head_dim]}
  - call: {name: embed, in: [latents, timestep, rope], out: x, shape: [batch, seq, hidden]}
  - call: {name: pooled, in: timestep, out: temb, shape: [batch, 3, hidden]}
  - shard: [x, rope]
  - linear: {name: qk, in: x, out: {q: heads, k: kv_heads, v: kv_heads}}
  - rope: {in: [q, k], rope: rope}
  - send: {in: [q, k, v], barrier: true}
  - attention: {in: [q, k, v], out: o}
  - gather: o
  - call: {name: head, in: [o, temb], out: noise, shape: [batch, seq, 6]}
  - all_gather: noise
"""


def test_tensors_without_batch_rows_or_features() -> None:
    """Tables that a stage makes, a timestep a token, plain numbers a token: whatever the mesh, the same numbers."""
    for batch in ("1", "2"):
        overrides = (("shape.batch", batch),)
        report = simulate(compile_schedule(read_schedule(MADE_TABLES, "tables.yaml", overrides)), steps=2, seed=0)
        assert report.ok, report
