"""The denoising loop: flow-match Euler sigmas and update, and one host loop around any device's step."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from stepgraph.planner.plan import Plan

TRAIN_TIMESTEPS = 1000


def sigmas(steps: int, shift: float = 1.0) -> list[float]:
    """Noise levels from 1 down to 0, ``steps`` + 1 of them, as the flow-match Euler scheduler of diffusers has them:
    evenly spaced between the shifted levels of the first and the last training timestep, then shifted, where the shift
    of sigma is shift * sigma / (1 + (shift - 1) * sigma)."""

    def shifted(sigma: float) -> float:
        return shift * sigma / (1 + (shift - 1) * sigma)

    last = shifted(1 / TRAIN_TIMESTEPS)
    spaced = [1 - (1 - last) * index / (steps - 1) for index in range(steps)] if steps > 1 else [1.0]
    return [*map(shifted, spaced), 0.0]


def sigma_pairs(steps: int, shift: float = 1.0) -> list[tuple[float, float]]:
    """(sigma, next sigma) of each step."""
    levels = sigmas(steps, shift)
    return list(pairwise(levels))


def euler(latents: Tensor, noise: Tensor, sigma: float, next_sigma: float) -> Tensor:
    """The flow-match Euler update: latents + (next_sigma - sigma) * noise. As in diffusers, the step is a float32
    number, the product has the noise's dtype, and the sum is made in float32 and rounded to the latents' dtype."""
    wide = latents if latents.dtype is torch.float64 else latents.float()
    step = torch.tensor(next_sigma, dtype=torch.float32) - torch.tensor(sigma, dtype=torch.float32)
    return (wide + (step * noise).to(wide.dtype)).to(latents.dtype)


def latents_name(plan: Plan) -> str | None:
    """The input that the loop updates: the first of the first output's shape; None where there is none."""
    return next((entry.name for entry in plan.inputs if entry.shape == plan.outputs[0].shape), None)


def denoise(
    plan: Plan, given: Mapping[str, Tensor], levels: Sequence[tuple[float, float]], seen: list[tuple[Tensor, ...]]
) -> Generator[Mapping[str, Tensor], tuple[Tensor, ...], None]:
    """A host loop: yields each step's inputs, and is sent its outputs, which ``seen`` collects. An input called
    ``timestep`` becomes 1000 * sigma at each step. The latents are updated; where a plan has none, all other inputs
    move on by an element, so that every step has new data."""
    name, inputs = latents_name(plan), dict(given)
    for sigma, next_sigma in levels:
        if "timestep" in inputs:
            inputs["timestep"] = torch.full_like(inputs["timestep"], sigma * TRAIN_TIMESTEPS)
        outputs = yield inputs
        seen.append(outputs)
        if name is not None:
            inputs[name] = euler(inputs[name], outputs[0], sigma, next_sigma)
        else:
            inputs = {key: tensor.flatten().roll(1).view(tensor.shape) for key, tensor in inputs.items()}
