"""Wan: diffusers' WanTransformer3DModel, text to video, and image to video where the image is in the latents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from torch import Tensor
from torch.nn import Conv3d, functional

from stepgraph.runtime.adapters.arithmetic import attend, rotate_pairs, rotation_table
from stepgraph.runtime.adapters.binding import Binding, Settings, StageFunction
from stepgraph.runtime.adapters.family import Arguments, Config, Family, config_of, dtype_name, refuse
from stepgraph.runtime.adapters.layers import has_hooks


def _modulation(block: Any, mod: Tensor, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shift, scale and gate, number ``shift`` and following of the six, in float32: each (batch, 1, hidden), or, with a
    modulation for every token, (batch, rows, 6, hidden), each (batch, rows, hidden)."""
    six = block.scale_shift_table + mod.float()
    parts = (six[..., number, :] for number in range(shift, shift + 3))
    first, second, third = parts if mod.dim() == 4 else (part.unsqueeze(1) for part in parts)
    return first, second, third


def _modulated(block: Any, norm: Any, x: Tensor, mod: Tensor, first: int) -> Tensor:
    shift, scale, _ = _modulation(block, mod, first)
    result: Tensor = (norm(x.float()) * (1 + scale) + shift).type_as(x)
    return result


def _gated(block: Any, x: Tensor, added: Tensor, mod: Tensor, first: int) -> Tensor:
    _, _, gate = _modulation(block, mod, first)
    return (x.float() + added.float() * gate).type_as(x)


def _embed(model: Any, patches: Tensor) -> Tensor:
    """The model's convolution, whose windows are the patches: one product of matrices where it is a plain one."""
    conv = model.patch_embedding
    if type(conv) is Conv3d and not has_hooks(conv):
        return functional.linear(patches, conv.weight.flatten(1), conv.bias)
    windows = patches.reshape(-1, config_of(model)["in_channels"], *config_of(model)["patch_size"])
    result: Tensor = conv(windows)
    return result


def _embed_time(model: Any, timestep: Tensor) -> tuple[Tensor, Tensor]:
    """``timestep`` is (batch), or (batch, rows)."""
    embedder = model.condition_embedder
    waves = embedder.timesteps_proj(timestep.flatten()).unflatten(0, timestep.shape)
    wide = waves.to(next(embedder.time_embedder.parameters()).dtype)
    temb = embedder.time_embedder(wide).to(embedder.time_proj.weight.dtype)
    return temb, embedder.time_proj(embedder.act_fn(temb))


def _head(model: Any, x: Tensor, temb: Tensor) -> Tensor:
    """``temb`` is (batch, hidden), or (batch, rows, hidden)."""
    both = model.scale_shift_table + (temb.unsqueeze(1) if temb.dim() == 2 else temb.unsqueeze(2))
    shift, scale = both.chunk(2, dim=1) if temb.dim() == 2 else both.unbind(2)
    result: Tensor = model.proj_out((model.norm_out(x.float()) * (1 + scale) + shift).type_as(x))
    return result


STAGES: Mapping[str, StageFunction] = {
    "step.embed": _embed,
    "step.embed_time": _embed_time,
    "step.embed_text": lambda model, text: model.condition_embedder.text_embedder(text),
    "wan.norm1": lambda block, x, mod: _modulated(block, block.norm1, x, mod, 0),
    "wan.to_v": lambda block, h: block.attn1.to_v(h),
    "wan.to_q": lambda block, h: block.attn1.to_q(h),
    "wan.q_norm": lambda block, q, rope: rotate_pairs(block.attn1.norm_q(q.flatten(2)).view_as(q), rope),
    "wan.to_k": lambda block, h: block.attn1.to_k(h),
    "wan.k_norm": lambda block, k, rope: rotate_pairs(block.attn1.norm_k(k.flatten(2)).view_as(k), rope),
    "wan.cross_k": lambda block, ctx: block.attn2.to_k(ctx),
    "wan.cross_k_norm": lambda block, ck: block.attn2.norm_k(ck.flatten(2)),
    "wan.cross_v": lambda block, ctx: block.attn2.to_v(ctx),
    "wan.self_attention": lambda block, q, k, v: attend(block.attn1.processor, q, k, v),
    "wan.out": lambda block, o: block.attn1.to_out[0](o.flatten(2)),
    "wan.gate1": lambda block, x, a, mod: _gated(block, x, a, mod, 0),
    "wan.norm2": lambda block, x: block.norm2(x.float()).type_as(x),
    "wan.cross_q": lambda block, h: block.attn2.to_q(h),
    "wan.cross_q_norm": lambda block, cq: block.attn2.norm_q(cq.flatten(2)),
    "wan.cross_attention": lambda block, cq, ck, cv: attend(block.attn2.processor, cq, ck, cv),
    "wan.cross_out": lambda block, co: block.attn2.to_out[0](co.flatten(2)),
    "wan.cross_residual": lambda block, x, a: x + a,
    "wan.norm3": lambda block, x, mod: _modulated(block, block.norm3, x, mod, 3),
    "wan.mlp": lambda block, h: block.ffn(h),
    "wan.gate2": lambda block, x, m, mod: _gated(block, x, m, mod, 3),
    "step.head": _head,
    "step.difference": lambda model, x, before: x - before,
    "step.add_again": lambda model, x, added: x + added,
}
CACHE = frozenset({"step.difference", "step.add_again"})
"""Stages of schedules with a residual cache."""


def settings(config: Config) -> Settings:
    heads, head_dim, patch = config["num_attention_heads"], config["attention_head_dim"], prod(config["patch_size"])
    return {
        "model.layers": config["num_layers"],
        "model.hidden": heads * head_dim,
        "model.heads": heads,
        "model.head_dim": head_dim,
        "model.ffn": config["ffn_dim"],
        "sizes.patch_in": patch * config["in_channels"],
        "sizes.patch_out": patch * (config["out_channels"] or config["in_channels"]),
        "sizes.text_dim": config["text_dim"],
    }


def refuses(config: Config) -> Iterable[str]:
    if config["image_dim"] is not None or config["added_kv_proj_dim"] is not None:
        yield "the module attends to an image encoder's tokens (image_dim, added_kv_proj_dim)"


def _patches(model: Any, arguments: Arguments) -> tuple[int, int, int]:
    """How many patches a call's latents have in time, height and width."""
    latents = arguments.tensor("hidden_states", 5)
    patch, sizes = config_of(model)["patch_size"], latents.shape[2:]
    if any(size % length for size, length in zip(sizes, patch, strict=True)):
        raise refuse("hidden_states", f"frames, height and width that are multiples of {list(patch)}", str(list(sizes)))
    frames, height, width = (size // length for size, length in zip(sizes, patch, strict=True))
    return frames, height, width


def lengths(model: Any, arguments: Arguments) -> Settings:
    text = arguments.tensor("encoder_hidden_states", 3)
    batch = arguments.tensor("hidden_states", 5).shape[0]
    return {"batch": batch, "seq.vid": prod(_patches(model, arguments)), "seq.txt": text.shape[1]}


def inputs(model: Any, arguments: Arguments) -> Mapping[str, Tensor]:
    latents = arguments.tensor("hidden_states", 5)
    cut = latents
    for dim, length in zip((2, 4, 6), config_of(model)["patch_size"], strict=True):
        cut = cut.unflatten(dim, (-1, length))
    timestep = arguments.given["timestep"]
    per_token = isinstance(timestep, Tensor) and timestep.dim() == 2
    cos, sin = (half.flatten(0, 2) for half in model.rope(latents))  # (rows, head_dim), each angle twice
    return {
        "latents": cut.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3).contiguous(),
        "timestep": arguments.tensor("timestep", 2).float().contiguous()
        if per_token
        else arguments.per_sample("timestep", latents.shape[0]),
        "text": arguments.batched("encoder_hidden_states", 3, len(latents)),
        "rope": rotation_table(cos[..., 0::2], sin[..., 1::2]),
    }


def output(model: Any, arguments: Arguments, noise: Tensor) -> Tensor:
    frames, height, width = _patches(model, arguments)
    cut = noise.reshape(noise.shape[0], frames, height, width, *config_of(model)["patch_size"], -1)
    return cut.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


FAMILY = Family(
    binding=Binding(
        name="wan",
        blocks={"wan": lambda model: model.blocks},
        stages=STAGES,
        sizes=lambda model: {
            **settings(config_of(model)),
            "model.dtype": dtype_name(model.condition_embedder.time_proj.weight),
        },
        optional=CACHE,
    ),
    schedule="wan_14b_u4",
    settings=settings,
    takes=frozenset({"hidden_states", "timestep", "encoder_hidden_states"}),
    processors=frozenset({"WanAttnProcessor"}),
    rewritten=frozenset(
        {
            "WanTransformer3DModel",
            "WanTransformerBlock",
            "WanAttention",
            "WanTimeTextImageEmbedding",
            "Dropout",
        }
    ),
    refuses=refuses,
    lengths=lengths,
    inputs=inputs,
    output=output,
)
