"""Denoising loops of diffusers around a wrapped model: its schedulers, its pipelines."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module

pytest.importorskip("diffusers")

from support.parity import wrapped
from support.tiny import FAMILIES, Tiny, denoised, in_dtype, with_dtype

STEPS = 4


def schedulers() -> dict[str, Callable[[], Any]]:
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return {
        "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
        "unipc": lambda: UniPCMultistepScheduler(**flow),
    }


def loop(model: Module, scheduler: Any, guidance: float = 4.0) -> Tensor:
    """A user's own loop: two calls a step, of a text and of a shorter one."""
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(1, 6, 2, 6, 6, generator=generator)
    text, none = torch.randn(1, 9, 20, generator=generator), torch.randn(1, 5, 20, generator=generator)
    scheduler.set_timesteps(STEPS)
    condition = torch.randn(1, 2, 2, 6, 6, generator=generator)
    for time in scheduler.timesteps:
        given = {"hidden_states": latents, "timestep": time.expand(1), "return_dict": False}
        cond, uncond = (model(**given, encoder_hidden_states=embeds)[0] for embeds in (text, none))
        noise = uncond + guidance * (cond - uncond)
        moved = scheduler.step(noise, time, latents[:, :4], return_dict=False)[0]
        latents = torch.cat([moved, condition], dim=1)  # as image to video has it: channels that stay
    return latents


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
def test_schedulers_of_diffusers(scheduler: str) -> None:
    """CASES 12: timesteps, whole numbers or not, are read by every step, and two sessions serve the two texts."""
    tiny, make = FAMILIES["wan"], schedulers()[scheduler]
    model = tiny.made()
    with torch.no_grad():
        want = loop(model, make())
    sharded = wrapped(tiny, model, ranks=2)
    got = loop(sharded, make())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert [session.report.replays for session in sharded.sessions.values()] == [STEPS, STEPS]
    assert all(session.report.ok for session in sharded.sessions.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_steps_in_bfloat16(name: str) -> None:
    """The last latents of a sharded loop are as near to those of a float64 loop as the model's own loop comes."""
    tiny = FAMILIES[name]
    model, call = in_dtype(tiny.made(), torch.bfloat16), with_dtype(tiny.call(True), torch.bfloat16)
    sharded = wrapped(tiny, model, ranks=2)
    _, got = denoised(sharded, call, 20)
    _, mine = denoised(model, call, 20)
    (session,) = sharded.sessions.values()
    assert session.report.ok
    assert session.report.replays == 20
    _, exact = denoised(model.double(), with_dtype(call, torch.float64), 20)
    error = (mine.double() - exact).abs().max()
    assert error > 0
    assert (got.double() - exact).abs().max() <= 2 * error


@pytest.mark.parametrize("name", FAMILIES)
def test_no_stage_draws_random_numbers(name: str) -> None:
    """CASES 15: noise is the loop's; what a step computes draws none that a replay could freeze."""
    tiny = FAMILIES[name]
    model = tiny.made().train()
    sharded = wrapped(tiny, model, ranks=2)
    before = torch.get_rng_state()
    first, second = (sharded(**tiny.call(True)).sample for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


# Pipelines


def wan_pipeline(model: Module, stand_in: Module, per_token: bool = False) -> Tensor:
    from diffusers import WanPipeline

    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=schedulers()["unipc"](), transformer=model,
        expand_timesteps=per_token,
    )  # fmt: skip
    return run(
        pipe, stand_in, prompt_embeds=normal(1, 9, 20), negative_prompt_embeds=normal(1, 9, 20), height=32,
        width=48, num_frames=5, guidance_scale=4.0,
    )  # fmt: skip


def flux_pipeline(model: Module, stand_in: Module) -> Tensor:
    from diffusers import FluxPipeline

    pipe = FluxPipeline(
        scheduler=schedulers()["euler"](), vae=None, text_encoder=None, tokenizer=None, text_encoder_2=None,
        tokenizer_2=None, transformer=model,
    )  # fmt: skip
    return run(pipe, stand_in, prompt_embeds=normal(1, 7, 20), pooled_prompt_embeds=normal(1, 10), height=48, width=80)


def ltx_pipeline(model: Module, stand_in: Module) -> Tensor:
    from diffusers import LTXPipeline

    pipe = LTXPipeline(
        scheduler=schedulers()["euler"](), vae=None, text_encoder=None, tokenizer=None, transformer=model
    )
    mask = torch.ones(1, 9)
    mask[:, 6:] = 0
    return run(
        pipe, stand_in, prompt_embeds=normal(1, 9, 20), prompt_attention_mask=mask,
        negative_prompt_embeds=normal(1, 9, 20), negative_prompt_attention_mask=mask, height=96, width=160,
        num_frames=17, guidance_scale=3.0,
    )  # fmt: skip


def qwen_pipeline(model: Module, stand_in: Module) -> Tensor:
    from diffusers import QwenImagePipeline

    pipe = QwenImagePipeline(
        scheduler=schedulers()["euler"](), vae=None, text_encoder=None, tokenizer=None, transformer=model
    )
    return run(
        pipe, stand_in, prompt_embeds=normal(1, 7, 20), negative_prompt_embeds=normal(1, 5, 20),
        true_cfg_scale=4.0, height=48, width=80,
    )  # fmt: skip


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def run(pipe: Any, stand_in: Module, **arguments: object) -> Tensor:
    pipe.transformer = stand_in
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    (latents,) = pipe(
        **arguments, num_inference_steps=STEPS, generator=generator, output_type="latent", return_dict=False
    )
    assert isinstance(latents, Tensor)
    return latents


def channels(name: str) -> Tiny:
    """The tiny model of a family; Wan's with as many channels out as in, as its pipeline needs."""
    from dataclasses import replace

    from diffusers import WanTransformer3DModel

    if not name.startswith("wan"):
        return FAMILIES[name]
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "text_dim": 20, "freq_dim": 16, "ffn_dim": 40}
    return replace(
        FAMILIES[name], model=lambda: WanTransformer3DModel(**sizes, in_channels=4, out_channels=4, num_layers=2)
    )


PIPELINES = {
    "wan": wan_pipeline,
    "wan per token": partial(wan_pipeline, per_token=True),
    "flux": flux_pipeline,
    "ltx_video": ltx_pipeline,
    "qwen_image": qwen_pipeline,
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_of_diffusers_with_a_wrapped_model(name: str) -> None:
    """`pipe.transformer = wrap(...)`; the pipeline's own call, with its own guidance: latents are those of the model's
    own forward."""
    pytest.importorskip("transformers")
    tiny = channels(name)
    model = tiny.made()
    want = PIPELINES[name](model, model)
    sharded = wrapped(tiny, model, ranks=3)
    got = PIPELINES[name](model, sharded)
    assert sum(session.report.replays for session in sharded.sessions.values()) >= STEPS
    assert all(session.report.ok for session in sharded.sessions.values())
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))
