"""Blocks with a stream of image tokens and one of text tokens, which attend to each other: FLUX and Qwen-Image. Both
are written with the block ``dual`` and the suffixes ``img`` and ``txt``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stepgraph.runtime.adapters.arithmetic import rotate_pairs
from stepgraph.runtime.adapters.binding import StageFunction

Part = Callable[[Any], Any]
"""A module of a block."""


def modulated(block: Any, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``shift`` and ``scale`` are (batch, hidden)."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def gated(block: Any, x: Tensor, added: Tensor, gate: Tensor) -> Tensor:
    """``gate`` is (batch, hidden)."""
    return x + gate.unsqueeze(1) * added


def gated_and_clipped(block: Any, x: Tensor, added: Tensor, gate: Tensor) -> Tensor:
    result = gated(block, x, added, gate)
    return result.clip(-65504, 65504) if result.dtype is torch.float16 else result


def dual_stages(
    suffix: str, modulation: Part, norm1: Part, norm2: Part, mlp: Part, last: StageFunction
) -> Mapping[str, StageFunction]:
    """The stages of one stream of a ``dual`` block whose attention is ``block.attn``; ``last`` is its last residual."""
    image = suffix == "img"
    names = ("to_q", "to_k", "to_v", "norm_q", "norm_k")
    added = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
    to_q, to_k, to_v, norm_q, norm_k = names if image else added

    def projected(part: str) -> StageFunction:
        return lambda block, h: getattr(block.attn, part)(h)

    def prepared(part: str) -> StageFunction:
        return lambda block, x, rope: rotate_pairs(getattr(block.attn, part)(x), rope)

    def out(block: Any, o: Tensor) -> Tensor:
        projection = block.attn.to_out[0] if image else block.attn.to_add_out
        result: Tensor = projection(o.flatten(2))
        return result

    stages: dict[str, StageFunction] = {
        "mod": lambda block, temb: modulation(block)(temb),
        "norm": lambda block, x: norm1(block)(x),
        "modulate": modulated,
        "to_v": projected(to_v),
        "to_q": projected(to_q),
        "q_norm": prepared(norm_q),
        "to_k": projected(to_k),
        "k_norm": prepared(norm_k),
        "out": out,
        "residual": gated,
        "norm_2": lambda block, x: norm2(block)(x),
        "modulate_2": modulated,
        "mlp": lambda block, h: mlp(block)(h),
        "residual_2": last,
    }
    return {f"dual.{name}.{suffix}": function for name, function in stages.items()}
