"""What a step has read of a module's layers for good when it was made; weights are read by every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module

SWITCHES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
"""Attributes by which peft tells which adapters a layer adds, and how much of each: plain numbers and names."""


def has_hooks(part: Module) -> bool:
    """Whether a call of ``part`` does more than its class's forward, or something else."""
    own = vars(part)
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own)


def drops(part: Module) -> bool:
    """Whether a call of ``part`` drops numbers at random."""
    return part.training and bool(vars(part).get("p"))


def layer_facts(model: Module) -> Iterable[tuple[str, Mapping[str, object]]]:
    """Of every layer, by name. Every step of a session asks."""
    for name, part in model.named_modules():
        yield name, _facts(part)


def _facts(part: Module) -> Mapping[str, object]:
    own = vars(part)  # reading what is not there through a module is slow
    facts: dict[str, object] = {"layer": part}
    if has_hooks(part):
        facts["hooks"] = (*part._forward_hooks, *part._forward_pre_hooks, own.get("forward"))
    processor = own.get("processor")
    if processor is not None:
        facts["attention processor"] = processor
        facts["attention backend"] = getattr(processor, "_attention_backend", None)
    if drops(part):
        facts["dropout"] = own["p"]
    if "merged_adapters" in own:
        facts["adapters"] = {name: _copied(getattr(part, name, None)) for name in SWITCHES}
    return facts


def _copied(value: Any) -> object:
    return dict(value) if isinstance(value, Mapping) else tuple(value) if isinstance(value, list) else value
