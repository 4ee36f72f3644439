"""Both branches of guidance of a real model: in one step (batch, sequential, parallel), or in two with a cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module

import stepgraph

pytest.importorskip("diffusers")

from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import Plan
from stepgraph.planner.schedule import read_schedule, schedule_path

from support.cached import VARIANTS, Cached, cached_calls
from support.parity import own, wrapped
from support.tiny import FAMILIES, Call, Tiny, in_dtype, with_dtype

STEPS = 6


def guided(schedule: str, mode: str) -> str:
    """A shipped schedule whose step joins both branches; the guidance goes by another name than FLUX's own."""
    text = schedule_path(schedule).read_text()
    whole = "text: {shape: [batch, txt, text_dim]"
    if f"{whole}, placement: sequence}}" in text:  # what differs by branch is loaded whole
        text = text.replace(f"{whole}, placement: sequence}}", f"{whole}}}").replace(
            "step:\n", "step:\n  - shard: text\n"
        )
    text = text.replace(f"{whole}}}", f"{whole}, placement: cfg}}")
    text = text.replace("inputs:\n", "inputs:\n  strength: {shape: [batch], dtype: float32}\n")
    text = text.replace(
        "  - all_gather: noise", "  - guide: {in: noise, scale: strength, out: noise}\n  - all_gather: noise"
    )
    mesh = "{cfg: 2, ulysses: 2}" if mode == "parallel" else "{ulysses: 2}"
    return text.replace("mesh: {ulysses: 4}", f"mesh: {mesh}\ncfg: {mode}")


def guided_plan(tiny: Tiny, model: Module, call: Call, mode: str) -> Plan:
    lengths = wrapped(tiny, model, 2).prepare((), call).lengths
    settings = {**tiny.settings(model), **{f"shape.{name}": size for name, size in lengths.items()}}
    overrides = tuple((path, str(value)) for path, value in settings.items())
    return compile_schedule(read_schedule(guided(tiny.schedule, mode), "guided.yaml", overrides))


def scheduler(name: str) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    found = FlowMatchEulerDiscreteScheduler(shift=3.0) if name == "euler" else UniPCMultistepScheduler(**flow)
    found.set_timesteps(STEPS)
    return found


def other_text(call: Call) -> Tensor:
    text = call["encoder_hidden_states"]
    assert isinstance(text, Tensor)
    return torch.randn(text.shape, generator=torch.Generator().manual_seed(8)).to(text.dtype)


SCALES = torch.tensor([4.0, 1.5])
"""Of each sample."""


@pytest.mark.parametrize("solver", ["euler", "unipc"])
@pytest.mark.parametrize("mode", ["batch", "sequential", "parallel"])
@pytest.mark.parametrize("name", ["wan", "flux", "ltx_video", "qwen_image"])
def test_guidance_in_one_step_is_that_of_two_calls(name: str, mode: str, solver: str) -> None:
    """CASES 12: a whole loop of a real scheduler; timesteps and guidance are tensors of every step."""
    tiny = FAMILIES[name]
    model, call = tiny.made(), tiny.call(True)
    if name == "ltx_video":
        call["encoder_attention_mask"] = None
    plan, helper, none = guided_plan(tiny, model, call, mode), wrapped(tiny, model, 2), other_text(call)
    latents, found = (call["hidden_states"].clone() for _ in range(2))  # type: ignore[attr-defined]
    strength = SCALES.view(-1, *[1] * (latents.dim() - 1))
    ours, theirs = scheduler(solver), scheduler(solver)
    divisor = 1.0 if call["timestep"].max() > 1 else 1000.0  # type: ignore[attr-defined]
    with torch.no_grad(), stepgraph.Session(plan, device="cpu", stages=stepgraph.bind(model, plan)) as session:
        step = session.capture()
        for time in theirs.timesteps:
            now = {**call, "timestep": time.expand(2) / divisor}
            cond, uncond = (own(model, {**now, "hidden_states": latents, "encoder_hidden_states": text})
                            for text in (call["encoder_hidden_states"], none))  # fmt: skip
            noise = uncond + strength * (cond - uncond)
            latents = advanced(theirs, noise, time, latents)
            prepared = helper.prepare((), {**now, "hidden_states": found})
            inputs = {**prepared.inputs, "strength": SCALES}
            inputs["text"] = torch.stack([inputs["text"], none])
            inputs = {entry.name: inputs[entry.name] for entry in plan.inputs}
            noise = helper.family.output(model, prepared.arguments, step(**inputs))  # type: ignore[arg-type]
            found = advanced(ours, noise, time, found)
        assert session.report.ok
        assert session.report.replays == STEPS
    torch.testing.assert_close(found, latents, rtol=1e-4, atol=1e-4 * float(latents.abs().max()))


def advanced(solver: Any, noise: Tensor, time: Tensor, latents: Tensor) -> Tensor:
    """The next latents; channels that the model does not give stay."""
    dim = 1 if latents.dim() == 5 else 2
    moved, stays = latents.split([noise.shape[dim], latents.shape[dim] - noise.shape[dim]], dim)
    stepped: Tensor = solver.step(noise, time, moved, return_dict=False)[0]
    return torch.cat([stepped, stays], dim)


def test_a_wrapped_model_is_for_one_branch(tmp_path: Path) -> None:
    tiny = FAMILIES["wan"]
    file = tmp_path / "guided.yaml"
    file.write_text(guided(tiny.schedule, "batch"))
    with pytest.raises(StepgraphError, match=r"E620.*joins both branches of guidance"):
        stepgraph.wrap(tiny.made(), file, device="cpu", overrides=tiny.settings(tiny.made()))


# A residual cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_cached_step_adds_what_the_last_full_one_did(ranks: int, dtype: torch.dtype) -> None:
    """Variants of an adapter's schedule; each branch of guidance has a cache of its own."""
    tiny = FAMILIES["wan cached"]
    model = in_dtype(tiny.made(), dtype)
    sharded, reference = wrapped(tiny, model, ranks), Cached(model)
    for variant, branch, call in cached_calls(with_dtype(tiny.call(True), dtype)):
        sharded.variant = variant
        with sharded.cache_context(branch):
            got = sharded(**call).sample
        want, plain = reference(branch, variant, call), own(model, call)
        slack = 1e-5 if dtype is torch.float32 else 2**-6
        assert (got - want).abs().max() <= slack * want.abs().max(), (variant, branch)
        if dtype is torch.float32:
            assert ((got - plain).abs().max() > 1e-3 * plain.abs().max()) == (variant == "cached")
    assert len(sharded.sessions) == 2
    assert all(session.report.ok for session in sharded.sessions.values())
    assert all(session.report.replays == len(VARIANTS) for session in sharded.sessions.values())


def test_a_cached_step_needs_a_full_one_before_it() -> None:
    sharded = wrapped(FAMILIES["wan cached"], FAMILIES["wan cached"].made(), 2)
    sharded.variant = "cached"
    with pytest.raises(StepgraphError, match=r"E614: the variant 'cached' may not come here"):
        sharded(**FAMILIES["wan cached"].call(True))
    sharded.variant = "full"
    with sharded.cache_context("cond"):
        sharded(**FAMILIES["wan cached"].call(True))
    sharded.variant = "cached"
    with sharded.cache_context("uncond"), pytest.raises(StepgraphError, match="E614"):
        sharded(**FAMILIES["wan cached"].call(True))


class Stand(torch.nn.Module):
    """Takes a model's place in a pipeline, with the residual cache that was written anew."""

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.reference, self.variant, self.branch = Cached(model), "full", ""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["reference"].model, name)

    @contextmanager
    def cache_context(self, name: str, **more: object) -> Iterator[None]:
        self.branch = name
        yield

    def forward(self, **call: object) -> tuple[Tensor]:
        call.pop("return_dict")
        return (self.reference(self.branch, self.variant, call),)


def test_a_residual_cache_in_a_pipeline() -> None:
    """`callback_on_step_end` chooses the variant of the next step; the pipeline tells the branch of each call."""
    pytest.importorskip("transformers")
    from diffusers import WanPipeline, WanTransformer3DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "text_dim": 20, "freq_dim": 16, "ffn_dim": 40}
    model = WanTransformer3DModel(**sizes, in_channels=4, out_channels=4, num_layers=3).eval()
    settings = {**stepgraph.settings_of(model), **FAMILIES["wan cached"].sizes}
    sharded = stepgraph.wrap(model, "wan_14b_cached_u4", ranks=2, device="cpu", overrides=settings)
    seen: list[str] = []

    def next_variant(pipe: Any, step: int, time: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(pipe.transformer.variant or "full")
        pipe.transformer.variant = "full" if step % 3 == 2 else "cached"
        return given

    def latents_of(stand_in: Any, always_full: bool = False) -> Tensor:
        pipe = WanPipeline(
            tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler("unipc"), transformer=model
        )  # fmt: skip
        pipe.transformer = stand_in
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(3)
        texts = torch.randn(2, 9, 20, generator=generator)
        (latents,) = pipe(
            prompt_embeds=texts[:1], negative_prompt_embeds=texts[1:], height=32, width=48, num_frames=5,
            guidance_scale=4.0, num_inference_steps=STEPS, generator=generator, output_type="latent",
            return_dict=False, callback_on_step_end=None if always_full else next_variant,
        )  # fmt: skip
        assert isinstance(latents, Tensor)
        return latents

    want, got, plain = latents_of(Stand(model)), latents_of(sharded), latents_of(model, always_full=True)
    assert seen == ["full", "cached", "cached", "full", "cached", "cached"] * 2
    assert [dict(key)["context"] for key in sharded.sessions] == ["cond", "uncond"]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))
    assert (got - plain).abs().max() > 0.001 * plain.abs().max()
    sharded.variant = "cached"  # as a callback may leave it: the next request has nothing to add again
    with pytest.raises(StepgraphError, match=r"E614[\s\S]*the beginning of a request"):
        latents_of(sharded)
    sharded.variant = ""
    torch.testing.assert_close(latents_of(sharded), got)
