"""Qwen-Image: diffusers' QwenImageTransformer2DModel, with or without a mask of its text."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from torch import Tensor

from stepgraph.runtime.adapters.arithmetic import joint, rotation_table
from stepgraph.runtime.adapters.binding import Binding, Settings, StageFunction
from stepgraph.runtime.adapters.dual_stream import dual_stages, gated_and_clipped
from stepgraph.runtime.adapters.family import Arguments, Config, Family, config_of, dtype_name, token_lengths


def _embed_time(model: Any, timestep: Tensor) -> Tensor:
    like = model.img_in.weight  # of which the embedding takes the dtype
    result: Tensor = model.time_text_embed(timestep.to(like.dtype), like)
    return result


def _attention(block: Any, *tensors: Tensor) -> Tensor:
    """Joint attention over text, then image; behind q, k and v a mask of the text, where the schedule has one."""
    masked = len(tensors) == 7
    mask = torch.nn.functional.pad(tensors[6], (0, tensors[3].shape[1]), value=True) if masked else None
    return joint(block.attn.processor, tensors[:6], None if mask is None else mask[:, None, None])


STAGES: Mapping[str, StageFunction] = {
    "step.embed_img": lambda model, latents: model.img_in(latents),
    "step.embed_txt": lambda model, text: model.txt_in(model.txt_norm(text)),
    "step.embed_time": _embed_time,
    **dual_stages(
        "img",
        modulation=lambda block: block.img_mod,
        norm1=lambda block: block.img_norm1,
        norm2=lambda block: block.img_norm2,
        mlp=lambda block: block.img_mlp,
        last=gated_and_clipped,
    ),
    **dual_stages(
        "txt",
        modulation=lambda block: block.txt_mod,
        norm1=lambda block: block.txt_norm1,
        norm2=lambda block: block.txt_norm2,
        mlp=lambda block: block.txt_mlp,
        last=gated_and_clipped,
    ),
    "dual.attention": _attention,
    "step.head": lambda model, x, temb: model.proj_out(model.norm_out(x, temb)),
}


def settings(config: Config) -> Settings:
    heads, head_dim, channels = config["num_attention_heads"], config["attention_head_dim"], config["in_channels"]
    return {
        "model.layers": config["num_layers"],
        "model.hidden": heads * head_dim,
        "model.heads": heads,
        "model.head_dim": head_dim,
        "model.ffn": 4 * heads * head_dim,
        "sizes.patch_in": channels,
        "sizes.patch_out": config["patch_size"] ** 2 * (config["out_channels"] or channels),
        "sizes.text_dim": config["joint_attention_dim"],
    }


def refuses(config: Config) -> Iterable[str]:
    if "max_txt_seq_len" not in inspect.signature(QwenEmbedRope.forward).parameters:
        yield "this version of diffusers ignores text masks of Qwen-Image and makes its angles another way; take 0.37"
    for name in ("zero_cond_t", "use_additional_t_cond"):
        if config.get(name):
            yield f"the module is made with {name}"


def inputs(model: Any, arguments: Arguments) -> Mapping[str, Tensor]:
    latents = arguments.tensor("hidden_states", 3)
    text = arguments.batched("encoder_hidden_states", 3, len(latents))
    angles = model.pos_embed(arguments.given["img_shapes"], max_txt_seq_len=text.shape[1], device=latents.device)
    mask = arguments.optional("encoder_hidden_states_mask", 2, len(latents))
    rope_img, rope_txt = (rotation_table(turn.real, turn.imag) for turn in angles)
    return {
        "latents": latents.contiguous(),
        "text": text,
        "text_mask": torch.ones_like(text[..., 0], dtype=torch.bool) if mask is None else mask.bool().contiguous(),
        "timestep": arguments.per_sample("timestep", latents.shape[0]),
        "rope_img": rope_img,
        "rope_txt": rope_txt,
    }


FAMILY = Family(
    binding=Binding(
        name="qwen_image",
        blocks={"dual": lambda model: model.transformer_blocks},
        stages=STAGES,
        sizes=lambda model: {**settings(config_of(model)), "model.dtype": dtype_name(model.img_in.weight)},
    ),
    schedule="qwen_image_u4",
    settings=settings,
    takes=frozenset({"hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep", "img_shapes"}),
    processors=frozenset({"QwenDoubleStreamAttnProcessor2_0"}),
    rewritten=frozenset(
        {
            "QwenImageTransformer2DModel",
            "QwenImageTransformerBlock",
            "Attention",
            "Dropout",
        }
    ),
    refuses=refuses,
    lengths=token_lengths("img"),
    inputs=inputs,
    output=lambda model, arguments, noise: noise,
    optional={"text_mask": "encoder_hidden_states_mask"},
)
