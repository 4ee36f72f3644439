"""A denoising loop for Wan, whose transformer runs as one stepgraph plan on all ranks.

python examples/wan_loop.py                                        # tiny random weights, 4 ranks in this process
torchrun --nproc-per-node 4 examples/wan_loop.py --weights PATH    # real ones: the pipeline's folder `transformer`
"""

import argparse

import torch
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel

import stepgraph
from stepgraph.runtime.launch import join_group, launched, leave_group


def tiny_model() -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=20,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
    )


def denoise(model: torch.nn.Module, steps: int, guidance: float, frames: int, height: int, width: int) -> torch.Tensor:
    """Latents from noise, with classifier-free guidance in two calls a step. Sizes are those of the latents."""
    config, device, dtype = model.config, model.device, model.dtype
    generator = torch.Generator().manual_seed(0)  # the same noise and texts on every rank

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    latents = random(1, config.in_channels, frames, height, width)
    text, nothing = random(1, 64, config.text_dim).to(dtype), random(1, 64, config.text_dim).to(dtype)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.set_timesteps(steps, device=device)
    for time in scheduler.timesteps:
        given = {"hidden_states": latents.to(dtype), "timestep": time.expand(1), "return_dict": False}
        cond, uncond = (model(**given, encoder_hidden_states=embeds)[0] for embeds in (text, nothing))
        noise = uncond + guidance * (cond - uncond)
        latents = scheduler.step(noise.float(), time, latents, return_dict=False)[0]
    return latents


@torch.no_grad()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--weights", help="a folder that WanTransformer3DModel.from_pretrained reads")
    options.add_argument("--ranks", type=int, default=4, help="on cpu: how many ranks run in this process")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--size", type=int, nargs=3, default=(3, 12, 20), help="frames, height and width of latents")
    chosen = options.parse_args()
    if launched():
        join_group()
    device = "cuda" if launched() and torch.cuda.is_available() else "cpu"
    read = WanTransformer3DModel.from_pretrained
    model = (read(chosen.weights, torch_dtype=torch.bfloat16) if chosen.weights else tiny_model()).to(device)
    ranks, settings = None if launched() else chosen.ranks, stepgraph.settings_of(model)
    sharded = stepgraph.wrap(model, "wan_14b_u4", ranks=ranks, device=device, overrides=settings)
    latents, own = (denoise(one, chosen.steps, 4.0, *chosen.size) for one in (sharded, model))
    print(f"latents {list(latents.shape)}, {(latents - own).abs().max() / own.abs().max():.1e} from the model's own")
    sharded.close()
    if launched():
        leave_group()


if __name__ == "__main__":
    main()
