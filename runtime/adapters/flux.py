"""FLUX.1: diffusers' FluxTransformer2DModel, with or without distilled guidance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Sequential

from stepgraph.runtime.adapters.arithmetic import attend, joint, rotate_pairs, rotation_table
from stepgraph.runtime.adapters.binding import Binding, Settings, StageFunction
from stepgraph.runtime.adapters.dual_stream import dual_stages, gated, gated_and_clipped, modulated
from stepgraph.runtime.adapters.family import Arguments, Config, Family, config_of, dtype_name, refuse, token_lengths


def _embed_time(model: Any, timestep: Tensor, guidance: Tensor, pooled: Tensor) -> Tensor:
    thousands = [1000 * number.to(pooled.dtype) for number in (timestep, guidance)]
    numbers = thousands if config_of(model)["guidance_embeds"] else thousands[:1]
    result: Tensor = model.time_text_embed(*numbers, pooled)
    return result


def _silu_then_linear(norm: Any) -> Module:
    return Sequential(norm.silu, norm.linear)


STAGES: Mapping[str, StageFunction] = {
    "step.embed_img": lambda model, latents: model.x_embedder(latents),
    "step.embed_txt": lambda model, text: model.context_embedder(text),
    "step.embed_time": _embed_time,
    **dual_stages(
        "img",
        modulation=lambda block: _silu_then_linear(block.norm1),
        norm1=lambda block: block.norm1.norm,
        norm2=lambda block: block.norm2,
        mlp=lambda block: block.ff,
        last=gated,
    ),
    **dual_stages(
        "txt",
        modulation=lambda block: _silu_then_linear(block.norm1_context),
        norm1=lambda block: block.norm1_context.norm,
        norm2=lambda block: block.norm2_context,
        mlp=lambda block: block.ff_context,
        last=gated_and_clipped,
    ),
    "dual.attention": lambda block, *tensors: joint(block.attn.processor, tensors),
    "single.mod": lambda block, temb: block.norm.linear(block.norm.silu(temb)),
    "single.norm": lambda block, x: block.norm.norm(x),
    "single.modulate": modulated,
    "single.to_v": lambda block, h: block.attn.to_v(h),
    "single.to_q": lambda block, h: block.attn.to_q(h),
    "single.q_norm": lambda block, q, rope: rotate_pairs(block.attn.norm_q(q), rope),
    "single.to_k": lambda block, h: block.attn.to_k(h),
    "single.k_norm": lambda block, k, rope: rotate_pairs(block.attn.norm_k(k), rope),
    "single.to_mlp": lambda block, h: block.proj_mlp(h),
    "single.gelu": lambda block, m: block.act_mlp(m),
    "single.attention": lambda block, q, k, v: attend(block.attn.processor, q, k, v),
    "single.out": lambda block, o, m: block.proj_out(torch.cat([o.flatten(2), m], dim=2)),
    "single.residual": gated_and_clipped,
    "step.head": lambda model, x, temb: model.proj_out(model.norm_out(x, temb)),
}


def settings(config: Config) -> Settings:
    heads, head_dim, channels = config["num_attention_heads"], config["attention_head_dim"], config["in_channels"]
    return {
        "model.layers": config["num_layers"] + config["num_single_layers"],
        "model.hidden": heads * head_dim,
        "model.heads": heads,
        "model.head_dim": head_dim,
        "model.ffn": 4 * heads * head_dim,
        "sizes.dual_layers": config["num_layers"],
        "sizes.single_layers": config["num_single_layers"],
        "sizes.patch_in": channels,
        "sizes.patch_out": config["patch_size"] ** 2 * (config["out_channels"] or channels),
        "sizes.text_dim": config["joint_attention_dim"],
        "sizes.pooled_dim": config["pooled_projection_dim"],
    }


def refuses(config: Config) -> Iterable[str]:
    if not config["num_layers"] or not config["num_single_layers"]:
        yield "the module lacks dual-stream or single-stream blocks"


def _ids(arguments: Arguments, name: str) -> Tensor:
    """(rows, axes); with a batch, which diffusers deprecates, those of its first sample, as the model takes them."""
    found = arguments.given.get(name)
    return arguments.tensor(name, 3)[0] if isinstance(found, Tensor) and found.dim() == 3 else arguments.tensor(name, 2)


def inputs(model: Any, arguments: Arguments) -> Mapping[str, Tensor]:
    latents = arguments.tensor("hidden_states", 3)
    if config_of(model)["guidance_embeds"]:
        guidance = arguments.per_sample("guidance", latents.shape[0])
    elif arguments.given["guidance"] is None:
        guidance = latents.new_zeros(latents.shape[0], dtype=torch.float32)  # the module embeds none
    else:
        raise refuse("guidance", "nothing: the module was made without guidance_embeds", "a guidance")
    text_ids = _ids(arguments, "txt_ids")
    cos, sin = model.pos_embed(torch.cat([text_ids, _ids(arguments, "img_ids")]))  # (rows, head_dim), each angle twice
    table = rotation_table(cos[:, 0::2], sin[:, 0::2])
    return {
        "latents": latents.contiguous(),
        "text": arguments.batched("encoder_hidden_states", 3, len(latents)),
        "pooled": arguments.batched("pooled_projections", 2, len(latents)),
        "timestep": arguments.per_sample("timestep", latents.shape[0]),
        "guidance": guidance,
        "rope_img": table[len(text_ids) :],
        "rope_txt": table[: len(text_ids)],
    }


FAMILY = Family(
    binding=Binding(
        name="flux",
        blocks={
            "dual": lambda model: model.transformer_blocks,
            "single": lambda model: model.single_transformer_blocks,
        },
        stages=STAGES,
        sizes=lambda model: {**settings(config_of(model)), "model.dtype": dtype_name(model.x_embedder.weight)},
    ),
    schedule="flux_1024_u4",
    settings=settings,
    takes=frozenset(
        {
            "hidden_states",
            "encoder_hidden_states",
            "pooled_projections",
            "timestep",
            "img_ids",
            "txt_ids",
            "guidance",
        }
    ),
    processors=frozenset({"FluxAttnProcessor"}),
    rewritten=frozenset(
        {
            "FluxTransformer2DModel",
            "FluxTransformerBlock",
            "FluxSingleTransformerBlock",
            "FluxAttention",
            "AdaLayerNormZero",
            "AdaLayerNormZeroSingle",
            "Dropout",
        }
    ),
    refuses=refuses,
    lengths=token_lengths("img"),
    inputs=inputs,
    output=lambda model, arguments, noise: noise,
)
