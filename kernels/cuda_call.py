"""Calls into CUDA through cuda.bindings."""

from __future__ import annotations

from typing import Any


def checked(result: tuple[Any, ...]) -> Any:
    """What a CUDA call gives besides its status. Raises RuntimeError where that is an error."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else values
