"""The weights of bound stages: whose they are, and that a captured step still reads where they are."""

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


class ParameterError(StepgraphError):
    """A weight is not where it was when the step was captured (E609)."""


class ParameterWatch:
    """Remembers the address of every parameter and buffer of a stage maker; of one that tells none, nothing."""

    def __init__(self, stages: object) -> None:
        self.parameters = stages if isinstance(stages, HasParameters) else None
        self.buffers = stages if isinstance(stages, HasBuffers) else None
        self.addresses = self._now()

    def _now(self) -> Mapping[str, int]:
        parameters = self.parameters.named_parameters() if self.parameters is not None else ()
        buffers = self.buffers.named_buffers() if self.buffers is not None else ()
        return {name: tensor.data_ptr() for name, tensor in chain(parameters, buffers)}

    def check(self) -> None:
        """Raises ParameterError E609 that names the parameters that are gone, or somewhere else, by name."""
        now = self._now()
        if now == self.addresses:
            return
        names = [name for name, address in self.addresses.items() if now.get(name) != address]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            got = "it is gone" if names[0] not in now else f"another address, {now[names[0]]:#x}"
            raise ParameterError(
                [
                    Diagnostic(
                        "E609",
                        f"the parameter '{names[0]}'{more} is not what the step was captured with",
                        None,
                        f"its storage at {self.addresses[names[0]]:#x}",
                        got,
                        "change weights in place (copy_), or open a new session after they were swapped or offloaded",
                    )
                ]
            )
