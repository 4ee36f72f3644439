"""The loop's sigmas and update are those of diffusers' flow-match Euler scheduler."""

import pytest
import torch

import stepgraph
from stepgraph.planner.plan import Plan
from stepgraph.runtime.denoise import denoise, euler, latents_name, sigma_pairs, sigmas
from stepgraph.runtime.simulate import simulate


def test_sigmas_of_four_steps() -> None:
    assert sigmas(4) == pytest.approx([1.0, 0.667, 0.334, 0.001, 0.0], abs=1e-12)
    assert sigma_pairs(1) == [(1.0, 0.0)]


@pytest.mark.parametrize("steps", [1, 2, 8, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sigmas_against_diffusers(steps: int, shift: float) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    torch.testing.assert_close(torch.tensor(sigmas(steps, shift)), scheduler.sigmas, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        1000 * torch.tensor(sigmas(steps, shift)[:-1]), scheduler.timesteps, rtol=1e-6, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_against_diffusers(dtype: torch.dtype) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(8)
    latents, noise = torch.randn(2, 5, 3).to(dtype), torch.randn(2, 5, 3).to(dtype)
    for index, timestep in enumerate(scheduler.timesteps):
        (want,) = scheduler.step(noise, timestep, latents, return_dict=False)
        got = euler(latents, noise, float(scheduler.sigmas[index]), float(scheduler.sigmas[index + 1]))
        assert torch.equal(got, want)
        latents, noise = want, torch.randn(2, 5, 3).to(dtype)


def plan_without_latents() -> Plan:
    text = stepgraph.compile("quickstart").source.text
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.schedule import read_schedule

    return compile_schedule(
        read_schedule(
            text.replace("out: noise, shape: [batch, seq, 16]", "out: noise, shape: [batch, seq, 8]"), "odd.yaml"
        )
    )


def test_a_plan_without_latents_has_new_data_in_every_step() -> None:
    plan = plan_without_latents()
    assert latents_name(plan) is None
    report = simulate(plan, steps=3, seed=0)
    assert report is not None
    assert report.ok
    given = {"latents": torch.arange(6.0).view(2, 3), "timestep": torch.zeros(1)}
    loop = denoise(plan, given, sigma_pairs(3), [])
    steps = [next(loop), *(loop.send((torch.zeros(1),)) for _ in range(2))]
    assert [step["latents"].flatten().tolist()[0] for step in steps] == [0, 5, 4]
    assert [float(step["timestep"]) for step in steps] == pytest.approx([1000, 500.5, 1])
