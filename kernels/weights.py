"""Made-up weights: the same for every rank, dtype and process, from a seed and the weight's name alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class MadeUpWeights:
    """Weights of a model that nobody trained, drawn on first use and kept."""

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    drawn_there: bool = False
    """Draw on ``device``: much faster on a GPU, and other numbers than on the cpu."""
    _kept: dict[tuple[str, int | None, str, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    def matrix(self, op: str, layer: int | None, part: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """(features in, features out), of standard deviation 1 / sqrt(features in)."""
        return self._get(op, layer, part, shape, dtype, 1 / math.sqrt(shape[0]), 0.0)

    def scale(self, op: str, layer: int | None, part: str, size: int, dtype: torch.dtype) -> Tensor:
        """(size), near 1: the weight of a norm."""
        return self._get(op, layer, part, (size,), dtype, 0.1, 1.0)

    def number(self, op: str, layer: int | None, part: str, dtype: torch.dtype) -> Tensor:
        """A single number near 1."""
        return self._get(op, layer, part, (), dtype, 0.1, 1.0)

    def named(self) -> list[tuple[str, Tensor]]:
        """What has been drawn so far, by name."""
        return [
            (f"{op}{'' if layer is None else f'[{layer}]'}.{part}", tensor)
            for (op, layer, part, _), tensor in self._kept.items()
        ]

    def _get(
        self,
        op: str,
        layer: int | None,
        part: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        deviation: float,
        mean: float,
    ) -> Tensor:
        key = (op, layer, part, dtype)
        if key not in self._kept:
            digest = hashlib.sha256(f"{self.seed}/{op}/{layer}/{part}".encode()).digest()
            where = self.device if self.drawn_there else torch.device("cpu")
            generator = torch.Generator(where).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device=where) * deviation + mean
            # Rounded to bfloat16 first, so that a model in any dtype has the same weights exactly.
            self._kept[key] = drawn.bfloat16().to(self.device, dtype)
        assert self._kept[key].shape == shape, f"{op}.{part} has two shapes"
        return self._kept[key]
