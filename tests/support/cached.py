"""A residual cache for Wan, written anew, and a loop that takes it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from support.parity import own
from support.tiny import Call

VARIANTS = ("full", "cached", "cached", "full", "cached")
"""Of the steps of a loop."""


def cached_calls(call: Call) -> Iterator[tuple[str, str, Call]]:
    """Variant, branch of guidance and arguments of each call: two a step, with texts of one length, and fresh times."""
    text = call["encoder_hidden_states"]
    assert isinstance(text, Tensor)
    other = torch.randn(text.shape, generator=torch.Generator().manual_seed(8)).to(text)
    for number, variant in enumerate(VARIANTS):
        times = torch.tensor([900.0, 400.0], device=text.device) - 90 * number
        for branch, embeds in (("cond", text), ("uncond", other)):
            yield variant, branch, {**call, "timestep": times, "encoder_hidden_states": embeds}


class Cached:
    """The model's own forward with a residual cache for the layers in between, written anew."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.added: dict[str, Tensor] = {}

    def __call__(self, branch: str, variant: str, call: Call) -> Tensor:
        model, blocks = self.model, self.model.blocks
        seen: list[Tensor] = []
        hooks = [blocks[number].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
                 for number in (1, len(blocks) - 1)]  # fmt: skip
        if variant == "full":
            got = own(model, call)
            self.added[branch] = seen[1] - seen[0]
        else:
            blocks[1].forward = lambda x, *more: x + self.added[branch]
            got = own(model, call)
            del blocks[1].forward
        for hook in hooks:
            hook.remove()
        return got
