"""How near a wrapped model is to its own forward, in roundings of that forward."""

import copy
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import stepgraph
from stepgraph.runtime.wrap import Wrapped

from support.tiny import Call, Tiny, in_dtype, with_dtype

ROUNDINGS = {torch.float32: 4.0, torch.bfloat16: 1.5}
"""How many times as far from float64 as the model's own forward a sharded one may be."""


def wrapped(tiny: Tiny, model: Module, ranks: int, **more: Any) -> Wrapped:
    settings = tiny.settings(model)
    return stepgraph.wrap(model, tiny.schedule, ranks=ranks, device="cpu", overrides=settings, **more)


def own(model: Module, call: Call) -> Tensor:
    """What the model's own forward gives."""
    with torch.no_grad():
        (sample,) = model(**call, return_dict=False)
    assert isinstance(sample, Tensor)
    return sample


def exact(model: Module, call: Call) -> Tensor:
    """As ``own``, in float64."""
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in call.items()
    }
    return own(copy.deepcopy(model).double(), wide)


def roundings(model: Module, call: Call, got: Tensor) -> float:
    """The largest distance of ``got`` from the model's forward in float64, over that of the model's own forward."""
    want, mine = exact(model, call), own(model, call)
    assert got.dtype is mine.dtype
    error = (mine - want).abs().max()
    assert 0 < error < (1e-4 if mine.dtype is torch.float32 else 0.1) * want.abs().max()
    return float((got - want).abs().max() / error)


def diffusers_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("diffusers").split(".")[:2])


def measured(tiny: Tiny, dtype: torch.dtype, ranks: int, uneven: bool) -> float:
    """``roundings`` of a sharded step, which no race or fault has touched."""
    model, call = in_dtype(tiny.made(), dtype), with_dtype(tiny.call(uneven), dtype)
    sharded = wrapped(tiny, model, ranks, seed=ranks)
    got = sharded(**call).sample
    (session,) = sharded.sessions.values()
    assert session.report.ok, session.report
    assert (session.report.movements_checked > 0) == (ranks > 1)
    again = sharded(**call, return_dict=False)
    assert isinstance(again, tuple)
    assert torch.equal(again[0], got)
    if ranks == 1 and dtype is torch.bfloat16 and diffusers_version() >= (0, 42):
        assert torch.equal(got, own(model, call))  # earlier ones multiply other layouts, and round in another way
    sharded.close()
    return roundings(model, call, got)
