"""The weights of bound stages: whose they are, and that a captured step still reads where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from stepgraph.planner.diagnostics import Diagnostic, StepgraphError


@runtime_checkable
class HasParameters(Protocol):
    """A stage maker that tells its weights, as ``torch.nn.Module`` does."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...


class ParameterError(StepgraphError):
    """A weight is not where it was when the step was captured (E609)."""


class ParameterWatch:
    """Remembers the address of every parameter of a stage maker; of one that tells none, nothing."""

    def __init__(self, stages: object) -> None:
        self.stages = stages if isinstance(stages, HasParameters) else None
        self.addresses = self._now()

    def _now(self) -> Mapping[str, int]:
        if self.stages is None:
            return {}
        return {name: parameter.data_ptr() for name, parameter in self.stages.named_parameters()}

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
