"""Tiny models of diffusers' own classes with random weights, and calls of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

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

    def made(self, seed: int = 0) -> Module:
        """Every parameter random, also those that are made zero or one."""
        torch.manual_seed(seed)
        model = self.model().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _wan() -> Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=6,
        out_channels=4,
        text_dim=20,
        freq_dim=16,
        ffn_dim=40,
        num_layers=2,
        rope_max_seq_len=32,
    )


def _wan_call(uneven: bool) -> Call:
    return {
        "hidden_states": _normal(1, 2, 6, 3, 6, 10) if uneven else _normal(1, 2, 6, 2, 8, 8),
        "timestep": torch.tensor([731.0, 2.0]),
        "encoder_hidden_states": _normal(2, 2, 7 if uneven else 8, 20),
    }


FAMILIES = {
    "wan": Tiny("wan_14b_u4", _wan, _wan_call, ("blocks",)),
}
