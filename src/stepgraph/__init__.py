"""stepgraph: schedules of diffusion transformers, compiled to proven multi-GPU plans and replayed.

``compile`` and ``load`` give a plan; ``Session`` runs one inside a denoising loop; ``bind`` makes its stages of a
user's module, and ``wrap`` puts a plan in the place of a pipeline's model. Importing the package imports no torch; the
first use of what runs does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import Plan

if TYPE_CHECKING:
    from stepgraph.runtime.adapters.binding import Binding
    from stepgraph.runtime.adapters.family import settings_of
    from stepgraph.runtime.denoise import sigma_pairs
    from stepgraph.runtime.session import Session
    from stepgraph.runtime.wrap import bind, wrap

__all__ = [
    "Binding",
    "Plan",
    "Session",
    "StepgraphError",
    "bind",
    "compile",
    "load",
    "settings_of",
    "sigma_pairs",
    "wrap",
]

_FILES = {
    "Binding": "adapters.binding",
    "Session": "session",
    "bind": "wrap",
    "settings_of": "adapters.family",
    "sigma_pairs": "denoise",
    "wrap": "wrap",
}
"""Where in ``runtime`` each of what imports torch stands."""


def compile(schedule: str | Path, overrides: Mapping[str, str | int | float | bool] | None = None) -> Plan:
    """The plan of a schedule: a path, or the name of a shipped one. ``overrides`` sets values by dotted path.

    Raises:
        StepgraphError: everything that is wrong with the schedule, with its places.
    """
    from stepgraph.planner.compile import compile_schedule
    from stepgraph.planner.schedule import load_schedule, schedule_path

    settings = tuple((path, _written(value)) for path, value in (overrides or {}).items())
    return compile_schedule(load_schedule(schedule_path(str(schedule)), settings))


def _written(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def load(path: str | Path) -> Plan:
    """A plan from its file. Raises PlanError for one that was cut off, edited, or made for another version."""
    from stepgraph.planner.plan import load_plan

    return load_plan(Path(path))


def __getattr__(name: str) -> object:
    if name not in _FILES:
        raise AttributeError(f"module 'stepgraph' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"stepgraph.runtime.{_FILES[name]}"), name)
