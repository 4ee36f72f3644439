"""A denoising loop for FLUX.1, whose transformer runs as one stepgraph plan on all ranks.

python examples/flux_loop.py                                        # tiny random weights, 4 ranks in this process
torchrun --nproc-per-node 4 examples/flux_loop.py --weights PATH    # real ones: the pipeline's folder `transformer`
"""

import argparse

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

import stepgraph
from stepgraph.runtime.launch import join_group, launched, leave_group


def tiny_model() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=6,
        joint_attention_dim=20,
        pooled_projection_dim=10,
        guidance_embeds=True,
        axes_dims_rope=(2, 4, 2),
    )


def denoise(model: torch.nn.Module, steps: int, height: int, width: int) -> torch.Tensor:
    """Latents from noise, with distilled guidance; height and width are in packed latents, 16 pixels each."""
    config, device, dtype = model.config, model.device, model.dtype
    generator = torch.Generator().manual_seed(0)  # the same noise and texts on every rank

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    latents = random(1, height * width, config.in_channels)
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    given = {
        "encoder_hidden_states": random(1, 32, config.joint_attention_dim),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], dim=1).to(device, dtype),
        "txt_ids": torch.zeros(32, 3, device=device, dtype=dtype),
        "guidance": torch.full((1,), 3.5, device=device) if config.guidance_embeds else None,
    }
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps, device=device)
    for time in scheduler.timesteps:
        noise = model(latents, timestep=time.expand(1).to(dtype) / 1000, return_dict=False, **given)[0]
        latents = scheduler.step(noise, time, latents, return_dict=False)[0]
    return latents


@torch.no_grad()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--weights", help="a folder that FluxTransformer2DModel.from_pretrained reads")
    options.add_argument("--ranks", type=int, default=4, help="on cpu: how many ranks run in this process")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--size", type=int, nargs=2, default=(5, 7), help="height and width of packed latents")
    chosen = options.parse_args()
    if launched():
        join_group()
    device = "cuda" if launched() and torch.cuda.is_available() else "cpu"
    read = FluxTransformer2DModel.from_pretrained
    model = (read(chosen.weights, torch_dtype=torch.bfloat16) if chosen.weights else tiny_model()).to(device)
    ranks, settings = None if launched() else chosen.ranks, stepgraph.settings_of(model)
    sharded = stepgraph.wrap(model, "flux_1024_u4", ranks=ranks, device=device, overrides=settings)
    latents, own = (denoise(one, chosen.steps, *chosen.size) for one in (sharded, model))
    print(f"latents {list(latents.shape)}, {(latents - own).abs().max() / own.abs().max():.1e} from the model's own")
    sharded.close()
    if launched():
        leave_group()


if __name__ == "__main__":
    main()
