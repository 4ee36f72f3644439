"""The arithmetic of every op kind, as plain torch: what any fast kernel is checked against.

Tensors are (batch, rows, features) or (batch, rows, heads, head_dim) unless a function says otherwise. Every function
works in the dtype that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-6
"""Of RMS norm."""


def rms_norm(x: Tensor, weight: Tensor, over: str) -> Tensor:
    """x / rms(x) * weight over the last dimension, or, with over="hidden" and heads, over (heads, head_dim)."""
    dims = (-2, -1) if over == "hidden" and x.dim() == 4 else (-1,)
    wide = x.double() if x.dtype is torch.float64 else x.float()
    scale = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + EPSILON)
    return (wide * scale).to(x.dtype) * (weight.unflatten(0, x.shape[-2:]) if len(dims) == 2 else weight)


def over_rows(table: Tensor, x: Tensor) -> Tensor:
    """A (batch, features) tensor seen as (batch, 1, features), so that it joins every row of ``x``."""
    return table.unsqueeze(1) if table.dim() == x.dim() - 1 else table


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + over_rows(scale, x)) + over_rows(shift, x)


def residual(x: Tensor, added: Tensor, gate: Tensor | None) -> Tensor:
    return x + added if gate is None else x + over_rows(gate, x) * added


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """``up`` is (hidden, ffn), ``down`` (ffn, hidden)."""
    return functional.gelu(x @ up) @ down


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates the halves of each head by ``table``, (rows, head_dim): cosines, then sines."""
    cos, sin = (half.unsqueeze(-2) for half in table.chunk(2, dim=-1))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v; each head of k and v serves as many heads of q as there are. ``mask``, (batch,
    keys) of bool, is true where a key is attended to; where it is nowhere true, the result is 0."""
    group = q.shape[2] // k.shape[2]
    queries, keys, values = q.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    if mask is None:
        return functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)
    some = mask.any(-1).reshape(-1, 1, 1, 1)
    # Kernels differ in what they make of a row without keys: such a row attends to all, and is thrown away.
    attended = functional.scaled_dot_product_attention(queries, keys, values, mask[:, None, None] | ~some)
    return torch.where(some, attended, 0).transpose(1, 2)


def joined_mask(pattern: str, masks: Sequence[Tensor]) -> Tensor:
    """The mask of all keys, (batch, keys) of bool, from those of their parts: ``pattern`` tells in the keys' order
    either `mask`, for the next of ``masks``, or how many keys without a mask follow. 0 is false, all else is true."""
    given = iter(masks)
    batch = masks[0].shape[0]
    parts = [
        next(given) != 0 if part == "mask" else torch.ones((batch, int(part)), dtype=torch.bool, device=masks[0].device)
        for part in pattern.split()
    ]
    return torch.cat(parts, dim=1)


def guide(cond: Tensor, uncond: Tensor, scale: Tensor) -> Tensor:
    """Classifier-free guidance; ``scale`` is (batch)."""
    return uncond + scale.reshape(-1, *[1] * (cond.dim() - 1)) * (cond - uncond)


def sum_blocks(stacked: Tensor, blocks: int) -> Tensor:
    """Adds ``blocks`` blocks of rows of (batch, blocks * rows, features), in order, in float32, rounded once."""
    wide = stacked.double() if stacked.dtype is torch.float64 else stacked.float()
    parts = wide.unflatten(1, (blocks, stacked.shape[1] // blocks)).unbind(1)
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(stacked.dtype)


def mix(inputs: Sequence[Tensor], weights: Sequence[Tensor], batch: int, rows: int) -> Tensor:
    """The made-up stage of a ``call``. Every row of the result, (batch, rows, width), is made from the same row of each
    input, or, where an input has other rows, from their mean; the same goes for batches. A weight is a number where an
    input is as wide as the result, else (features in, features out). asinh tames a timestep of hundreds and still tells
    it from the next."""
    terms = []
    for tensor, weight in zip(inputs, weights, strict=True):
        found = tensor if tensor.shape[0] == batch else tensor.mean(0, keepdim=True)
        found = torch.asinh(found if found.shape[1] == rows else found.mean(1, keepdim=True))
        terms.append(found * weight if weight.dim() == 0 else found @ weight)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return functional.silu(total).expand(batch, rows, -1).contiguous()
