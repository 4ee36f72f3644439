"""The weights and layers of bound stages: whose they are, and that a step still uses those that it was made with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Protocol, runtime_checkable

from torch import Tensor

from stepgraph.planner.diagnostics import Diagnostic, StepgraphError


@runtime_checkable
class HasParameters(Protocol):
    """A stage maker that tells its weights, as ``torch.nn.Module`` does."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...


@runtime_checkable
class HasBuffers(Protocol):
    """A stage maker that tells its buffers, as ``torch.nn.Module`` does."""

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]: ...


@runtime_checkable
class Described(Protocol):
    """A stage maker that says what all ranks of a group must have alike."""

    def description(self) -> str: ...


@runtime_checkable
class HasLayers(Protocol):
    """A stage maker over layers: by name, what a captured step has read of each for good. Values are compared."""

    def named_layers(self) -> Iterable[tuple[str, Mapping[str, object]]]: ...


class ParameterError(StepgraphError):
    """A weight or a layer is not what the step was made with (E609)."""


class ParameterWatch:
    """Remembers the address of every parameter and buffer of a stage maker, and its layers; of one that tells none,
    nothing."""

    def __init__(self, stages: object) -> None:
        self.parameters = stages if isinstance(stages, HasParameters) else None
        self.buffers = stages if isinstance(stages, HasBuffers) else None
        self.layers = stages if isinstance(stages, HasLayers) else None
        self.addresses = self._addresses()
        self.facts = self._facts()

    def _addresses(self) -> Mapping[str, int]:
        parameters = self.parameters.named_parameters() if self.parameters is not None else ()
        buffers = self.buffers.named_buffers() if self.buffers is not None else ()
        return {name: tensor.data_ptr() for name, tensor in chain(parameters, buffers)}

    def _facts(self) -> Mapping[str, Mapping[str, object]]:
        return dict(self.layers.named_layers()) if self.layers is not None else {}

    def check(self) -> None:
        """Raises ParameterError E609 that names the parameters and layers that are gone, or others, by name."""
        now = self._addresses()
        names = [name for name, address in self.addresses.items() if now.get(name) != address]
        if names:
            got = "it is gone" if names[0] not in now else f"another address, {now[names[0]]:#x}"
            raise _changed(
                f"the parameter '{names[0]}'", len(names), f"its storage at {self.addresses[names[0]]:#x}", got
            )
        facts = self._facts()
        others = [name for name in {**self.facts, **facts} if facts.get(name) != self.facts.get(name)]
        if others:
            before, after = (found.get(others[0], {}) for found in (self.facts, facts))
            what = next(key for key in {**before, **after} if after.get(key) != before.get(key))
            raise _changed(f"the {what} of '{others[0]}'", len(others), "as it was then", "another")


def _changed(what: str, count: int, expected: str, got: str) -> ParameterError:
    them = f" and {count - 1} more are" if count > 1 else " is"
    hint = (
        "change weights in place (copy_); after layers or adapters were exchanged, or weights offloaded, open a new "
        "session: close() of a wrapped model lets the next call do so"
    )
    return ParameterError(
        [Diagnostic("E609", f"{what}{them} not what the step was made with", None, expected, got, hint)]
    )
