"""Names of dtypes, as plans write them."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
