"""LTX-Video: diffusers' LTXVideoTransformer3DModel, with one timestep a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgraph.runtime.adapters.arithmetic import attend, rotate_pairs, rotation_table
from stepgraph.runtime.adapters.binding import Binding, Settings, StageFunction
from stepgraph.runtime.adapters.dual_stream import modulated
from stepgraph.runtime.adapters.family import Arguments, Config, Family, config_of, dtype_name, token_lengths


def _embed_time(model: Any, timestep: Tensor) -> Sequence[Tensor]:
    embedded: Sequence[Tensor] = model.time_embed(
        timestep, batch_size=timestep.shape[0], hidden_dtype=model.proj_in.weight.dtype
    )
    return embedded


def _modulation(block: Any, mod: Tensor) -> Sequence[Tensor]:
    """Shift, scale and gate of the attention, then of the MLP, each (batch, hidden)."""
    six: Tensor = block.scale_shift_table + mod
    return six.unbind(1)


def _cross_attention(block: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attend(block.attn2.processor, q, k, v, ((1 - mask) * -10000.0)[:, None, None])


def _head(model: Any, x: Tensor, temb: Tensor) -> Tensor:
    shift, scale = (model.scale_shift_table + temb.unsqueeze(1)).unbind(1)
    result: Tensor = model.proj_out(modulated(model, model.norm_out(x), shift, scale))
    return result


STAGES: Mapping[str, StageFunction] = {
    "step.embed": lambda model, latents: model.proj_in(latents),
    "step.embed_time": _embed_time,
    "step.embed_text": lambda model, text: model.caption_projection(text),
    "ltx.mod": _modulation,
    "ltx.norm1": lambda block, x: block.norm1(x),
    "ltx.modulate1": modulated,
    "ltx.to_v": lambda block, h: block.attn1.to_v(h),
    "ltx.to_q": lambda block, h: block.attn1.to_q(h),
    "ltx.q_norm": lambda block, q, rope: rotate_pairs(block.attn1.norm_q(q.flatten(2)).view_as(q), rope),
    "ltx.to_k": lambda block, h: block.attn1.to_k(h),
    "ltx.k_norm": lambda block, k, rope: rotate_pairs(block.attn1.norm_k(k.flatten(2)).view_as(k), rope),
    "ltx.cross_k": lambda block, ctx: block.attn2.to_k(ctx),
    "ltx.cross_k_norm": lambda block, ck: block.attn2.norm_k(ck.flatten(2)),
    "ltx.cross_v": lambda block, ctx: block.attn2.to_v(ctx),
    "ltx.self_attention": lambda block, q, k, v: attend(block.attn1.processor, q, k, v),
    "ltx.out": lambda block, o: block.attn1.to_out[0](o.flatten(2)),
    "ltx.residual1": lambda block, x, a, gate: x + a * gate.unsqueeze(1),
    "ltx.cross_q": lambda block, x: block.attn2.to_q(x),
    "ltx.cross_q_norm": lambda block, cq: block.attn2.norm_q(cq.flatten(2)),
    "ltx.cross_attention": _cross_attention,
    "ltx.cross_out": lambda block, co: block.attn2.to_out[0](co.flatten(2)),
    "ltx.cross_residual": lambda block, x, a: x + a,
    "ltx.norm2": lambda block, x: block.norm2(x),
    "ltx.modulate2": modulated,
    "ltx.mlp": lambda block, h: block.ff(h),
    "ltx.residual2": lambda block, x, m, gate: x + m * gate.unsqueeze(1),
    "step.head": _head,
}


def settings(config: Config) -> Settings:
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    return {
        "model.layers": config["num_layers"],
        "model.hidden": heads * head_dim,
        "model.heads": heads,
        "model.head_dim": head_dim,
        "model.ffn": 4 * heads * head_dim,
        "sizes.patch_in": config["in_channels"],
        "sizes.patch_out": config["out_channels"] or config["in_channels"],
        "sizes.text_dim": config["caption_channels"],
    }


def refuses(config: Config) -> Iterable[str]:
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    if config["cross_attention_dim"] != hidden:
        yield f"cross_attention_dim is {config['cross_attention_dim']}, not the {hidden} features of a token"


def inputs(model: Any, arguments: Arguments) -> Mapping[str, Tensor]:
    latents = arguments.tensor("hidden_states", 3)
    text = arguments.batched("encoder_hidden_states", 3, len(latents))
    mask = arguments.optional("encoder_attention_mask", 2, len(latents))
    where = ("num_frames", "height", "width", "rope_interpolation_scale", "video_coords")
    cos, sin = model.rope(latents, *(arguments.given[name] for name in where))  # (batch, rows, hidden), angles twice
    return {
        "latents": latents.contiguous(),
        "timestep": arguments.per_sample("timestep", latents.shape[0]),
        "text": text,
        "text_mask": torch.ones_like(text[..., 0]) if mask is None else mask.to(latents.dtype).contiguous(),
        "rope": rotation_table(cos[..., 0::2], sin[..., 0::2]),
    }


FAMILY = Family(
    binding=Binding(
        name="ltx_video",
        blocks={"ltx": lambda model: model.transformer_blocks},
        stages=STAGES,
        sizes=lambda model: {**settings(config_of(model)), "model.dtype": dtype_name(model.proj_in.weight)},
    ),
    schedule="ltx_video_u4",
    settings=settings,
    takes=frozenset(
        {
            "hidden_states",
            "encoder_hidden_states",
            "timestep",
            "encoder_attention_mask",
            "num_frames",
            "height",
            "width",
            "rope_interpolation_scale",
            "video_coords",
        }
    ),
    processors=frozenset({"LTXVideoAttnProcessor"}),
    rewritten=frozenset(
        {
            "LTXVideoTransformer3DModel",
            "LTXVideoTransformerBlock",
            "LTXAttention",
            "Dropout",
        }
    ),
    refuses=refuses,
    lengths=token_lengths("vid"),
    inputs=inputs,
    output=lambda model, arguments, noise: noise,
)
