"""Tiny models of diffusers' own classes with random weights, and calls of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

import stepgraph

Call = dict[str, object]
"""The arguments of a model's forward."""


@dataclass(frozen=True)
class Tiny:
    """A family of models at a small size."""

    schedule: str
    model: Callable[[], Module]
    call: Callable[[bool], Call]
    """Arguments of forward; with True of lengths that no number of ranks divides."""
    blocks: tuple[str, ...]
    """Attributes of the model that hold its layers, in the order of the schedule's layers."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Settings of the schedule that its config does not tell."""

    def settings(self, model: Module) -> Mapping[str, int | str]:
        """What gives the schedule the model's sizes."""
        return {**stepgraph.settings_of(model), **self.sizes}

    def made(self, seed: int = 0) -> Module:
        """Every parameter random, also those that are made zero or one."""
        torch.manual_seed(seed)
        model = self.model().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model


def in_dtype(model: Module, dtype: torch.dtype) -> Module:
    """The model in a dtype as ``from_pretrained`` reads it: what its class says stays float32."""
    kept: list[str] = getattr(model, "_keep_in_fp32_modules", None) or []
    for name, parameter in model.named_parameters():
        if not set(kept) & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return model


def with_dtype(call: Call, dtype: torch.dtype) -> Call:
    """A call as pipelines make it for a model in ``dtype``: what is no timestep, guidance or position is in it."""
    kept = ("timestep", "guidance", "img_ids", "txt_ids")
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and name not in kept else value
        for name, value in call.items()
    }


def moved_to(call: Call, device: torch.device) -> Call:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}


def denoised(model: Module, call: Call, steps: int) -> tuple[list[Tensor], Tensor]:
    """The outputs of every step of a loop of diffusers' flow-match Euler scheduler, and the last latents."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    call, latents = dict(call), call["hidden_states"]
    assert isinstance(latents, Tensor)
    timestep = call["timestep"]
    assert isinstance(timestep, Tensor)
    divisor = 1.0 if timestep.max() > 1 else 1000.0
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps, device=latents.device)
    seen = []
    for time in scheduler.timesteps:
        given = {**call, "hidden_states": latents, "timestep": time.expand(timestep.shape) / divisor}
        with torch.no_grad():
            (noise,) = model(**given, return_dict=False)
        seen.append(noise)
        # Where the model gives fewer channels than it takes, the others are a condition and stay.
        stays = latents[:, noise.shape[1] :]
        stepped = scheduler.step(noise, time, latents[:, : noise.shape[1]], return_dict=False)[0]
        latents = torch.cat([stepped.to(latents.dtype), stays], dim=1)
    return seen, latents


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _wan(layers: int = 2) -> Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=6,
        out_channels=4,
        text_dim=20,
        freq_dim=16,
        ffn_dim=40,
        num_layers=layers,
        rope_max_seq_len=32,
    )


def _wan_call(uneven: bool) -> Call:
    return {
        "hidden_states": _normal(1, 2, 6, 3, 6, 10) if uneven else _normal(1, 2, 6, 2, 8, 8),
        "timestep": torch.tensor([731.0, 2.0]),
        "encoder_hidden_states": _normal(2, 2, 7 if uneven else 8, 20),
    }


def _flux(guidance: bool = True) -> Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=12,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=6,
        joint_attention_dim=20,
        pooled_projection_dim=10,
        guidance_embeds=guidance,
        axes_dims_rope=(2, 4, 2),
    )


def _flux_call(uneven: bool) -> Call:
    height, width, text = (3, 7, 5) if uneven else (4, 4, 8)
    rows = torch.arange(height).repeat_interleave(width)
    ids = torch.stack([torch.zeros(height * width), rows, torch.arange(width).repeat(height)], dim=1)
    return {
        "hidden_states": _normal(1, 2, height * width, 12),
        "encoder_hidden_states": _normal(2, 2, text, 20),
        "pooled_projections": _normal(3, 2, 10),
        "timestep": torch.tensor([0.731, 0.02]),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3),
        "guidance": torch.tensor([3.5, 1.0]),
    }


def _schnell_call(uneven: bool) -> Call:
    return {**_flux_call(uneven), "guidance": None}


def _qwen_image() -> Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=20,
        axes_dims_rope=(4, 6, 6),
    )


def _qwen_image_call(uneven: bool) -> Call:
    height, width, text = (3, 7, 5) if uneven else (4, 4, 8)
    return {
        "hidden_states": _normal(1, 2, height * width, 16),
        "encoder_hidden_states": _normal(2, 2, text, 20),
        "timestep": torch.tensor([0.731, 0.02]),
        "img_shapes": [[(1, height, width)]] * 2,
    }


def _masked_call(uneven: bool) -> Call:
    """Of one prompt a part counts, of the other the first two tokens."""
    call = _qwen_image_call(uneven)
    mask = torch.ones(2, 5 if uneven else 8)
    mask[0, 1], mask[1, 2:] = 0, 0
    return {**call, "encoder_hidden_states_mask": mask}


def _ltx_video() -> Module:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=10,
        out_channels=10,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=20,
    )


def _ltx_video_call(uneven: bool) -> Call:
    frames, height, width, text = (3, 3, 5, 7) if uneven else (2, 4, 4, 8)
    mask = torch.ones(2, text)
    mask[1, 3:] = 0
    return {
        "hidden_states": _normal(1, 2, frames * height * width, 10),
        "encoder_hidden_states": _normal(2, 2, text, 20),
        "timestep": torch.tensor([731.0, 20.0]),
        "encoder_attention_mask": mask,
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def _per_token_call(uneven: bool) -> Call:
    """The first frame is known: its timesteps are 0, as in image to video."""
    call = _wan_call(uneven)
    frames, patches = (3, 15) if uneven else (2, 16)
    times = torch.tensor([731.0, 20.0]).unsqueeze(1).repeat(1, frames * patches)
    times[:, :patches] = 0
    return {**call, "timestep": times}


FAMILIES = {
    "wan": Tiny("wan_14b_u4", _wan, _wan_call, ("blocks",)),
    "wan cached": Tiny(
        "wan_14b_cached_u4",
        partial(_wan, layers=3),
        _wan_call,
        ("blocks",),
        {"sizes.ends": 1, "sizes.middle": 1, "sizes.last": 2},
    ),
    "wan per token": Tiny("wan_ti2v_5b_u4", _wan, _per_token_call, ("blocks",)),
    "flux": Tiny("flux_1024_u4", _flux, _flux_call, ("transformer_blocks", "single_transformer_blocks")),
    "flux schnell": Tiny(
        "flux_1024_u4",
        partial(_flux, guidance=False),
        _schnell_call,
        ("transformer_blocks", "single_transformer_blocks"),
    ),
    "ltx_video": Tiny("ltx_video_u4", _ltx_video, _ltx_video_call, ("transformer_blocks",)),
    "qwen_image": Tiny("qwen_image_u4", _qwen_image, _qwen_image_call, ("transformer_blocks",)),
    "qwen_image masked": Tiny("qwen_image_masked_u4", _qwen_image, _masked_call, ("transformer_blocks",)),
}
