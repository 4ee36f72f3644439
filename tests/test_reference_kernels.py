"""The reference arithmetic against torch's own functions and against loops, in float64 on random data."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.kernels import reference
from stepgraph.kernels.weights import MadeUpWeights


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_rms_norm_over_features() -> None:
    x, weight = randn(2, 5, 12), randn(12)
    torch.testing.assert_close(reference.rms_norm(x, weight, "hidden"), functional.rms_norm(x, (12,), weight, 1e-6))


def test_rms_norm_over_heads_and_over_all_heads() -> None:
    x, head, hidden = randn(2, 5, 3, 4), randn(4), randn(12)
    torch.testing.assert_close(reference.rms_norm(x, head, "head"), functional.rms_norm(x, (4,), head, 1e-6))
    want = functional.rms_norm(x.flatten(2), (12,), hidden, 1e-6).unflatten(2, (3, 4))
    torch.testing.assert_close(reference.rms_norm(x, hidden, "hidden"), want)


def test_rotation_is_complex_multiplication() -> None:
    x, table = randn(2, 5, 3, 8), randn(5, 8)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(table[:, :4], table[:, 4:])[:, None]
    torch.testing.assert_close(reference.rotate(x, table), torch.cat([turned.real, turned.imag], dim=-1))


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_attention_by_loops(kv_heads: int) -> None:
    q, k, v = randn(2, 4, 6, 8), randn(2, 7, kv_heads, 8), randn(2, 7, kv_heads, 8)
    want = torch.empty_like(q)
    for head in range(6):
        group = head // (6 // kv_heads)
        scores = q[:, :, head] @ k[:, :, group].transpose(1, 2) / math.sqrt(8)
        want[:, :, head] = scores.softmax(-1) @ v[:, :, group]
    torch.testing.assert_close(reference.attention(q, k, v), want)


@pytest.mark.parametrize("shape", [(2, 12), (2, 1, 12), (2, 5, 12)])
def test_modulation_joins_rows(shape: tuple[int, ...]) -> None:
    x, shift, scale, gate = randn(2, 5, 12), randn(*shape), randn(*shape), randn(*shape)
    wide = [t.reshape(2, -1, 12).expand(2, 5, 12) for t in (shift, scale, gate)]
    torch.testing.assert_close(reference.modulate(x, shift, scale), x + x * wide[1] + wide[0])
    torch.testing.assert_close(reference.residual(x, x, gate), x + wide[2] * x)
    assert torch.equal(reference.residual(x, x, None), 2 * x)


def test_mlp() -> None:
    x, up, down = randn(2, 5, 6), randn(6, 9), randn(9, 6)
    hidden = x @ up
    gelu = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    torch.testing.assert_close(reference.mlp(x, up, down), gelu @ down)


def test_blocks_are_added_in_order_and_rounded_once() -> None:
    stacked = torch.randn(2, 3 * 5, 4).bfloat16()
    one, two, three = (stacked[:, 5 * i : 5 * i + 5].float() for i in range(3))
    assert torch.equal(reference.sum_blocks(stacked, 3), (one + two + three).bfloat16())


def test_guidance() -> None:
    cond, uncond, scale = randn(2, 5, 3), randn(2, 5, 3), randn(2)
    want = torch.stack([uncond[b] + scale[b] * (cond[b] - uncond[b]) for b in range(2)])
    torch.testing.assert_close(reference.guide(cond, uncond, scale), want)


def test_made_up_stage_commutes_with_cutting_rows() -> None:
    rows, whole = randn(2, 6, 4), randn(2, 1, 3)
    weights = [randn(4, 8), randn(3, 8)]
    full = reference.mix([rows, whole], weights, 2, 6)
    parts = [reference.mix([part, whole], weights, 2, part.shape[1]) for part in rows.split([4, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full)


def test_weights_are_the_same_anywhere() -> None:
    """Independent of order, process and dtype up to the rounding that all dtypes share; and tied to the seed."""
    one, two = MadeUpWeights(3), MadeUpWeights(3)
    two.matrix("block.other", 0, "weight0", (4, 4), torch.float32)
    first = one.matrix("block.op", 1, "weight0", (4, 6), torch.float32)
    assert torch.equal(first, two.matrix("block.op", 1, "weight0", (4, 6), torch.float32))
    assert torch.equal(first.double(), one.matrix("block.op", 1, "weight0", (4, 6), torch.float64))
    assert torch.equal(first.bfloat16(), one.matrix("block.op", 1, "weight0", (4, 6), torch.bfloat16))
    assert not torch.equal(first, MadeUpWeights(4).matrix("block.op", 1, "weight0", (4, 6), torch.float32))
    assert not torch.equal(first, one.matrix("block.op", 2, "weight0", (4, 6), torch.float32))
