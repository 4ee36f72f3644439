"""Arithmetic that several families share."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor


def rotation_table(cos: Tensor, sin: Tensor) -> Tensor:
    """Cosines, then sines, (..., rows, 2 x pairs), from (..., rows, pairs)."""
    return torch.cat([cos, sin], dim=-1).float().contiguous()


def rotate_pairs(x: Tensor, table: Tensor) -> Tensor:
    """Rotates pairs of neighbours in each head of ``x``, (batch, rows, heads, head_dim), in float32, by a table as
    ``rotation_table`` makes: (rows, head_dim), or (batch, rows, heads * head_dim) with angles of its own a head."""
    cos, sin = table.chunk(2, dim=-1)
    if table.dim() == 2:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    else:
        cos, sin = (half.unflatten(-1, (x.shape[2], -1)) for half in (cos, sin))
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def attend(processor: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention by the backend that diffusers has set for a processor; all (batch, rows, heads, head_dim)."""
    result = dispatch_attention_fn(
        q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, backend=processor._attention_backend
    )
    assert isinstance(result, Tensor)
    return result.to(q.dtype)


def joint(processor: Any, tensors: tuple[Tensor, ...], mask: Tensor | None = None) -> Tensor:
    """Attention over several sequences: their q, then their k, then their v."""
    parts = len(tensors) // 3
    q, k, v = (torch.cat(tensors[first : first + parts], dim=1) for first in range(0, 3 * parts, parts))
    return attend(processor, q, k, v, mask)
