"""stepgraph: schedules of diffusion transformers, compiled to proven multi-GPU plans and replayed.

``compile`` and ``load`` give a plan; ``Session`` runs one inside a denoising loop; ``bind`` makes its stages of a
user's module, and ``wrap`` puts a plan in the place of a pipeline's model. Importing the package imports no torch; the
first use of what runs does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stepgraph.planner.buckets import match
from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import Plan
from stepgraph.planner.plan_set import PlanSet

if TYPE_CHECKING:
    from stepgraph.planner.schedule import Schedule
    from stepgraph.runtime.adapters.binding import Binding
    from stepgraph.runtime.adapters.family import settings_of
    from stepgraph.runtime.denoise import sigma_pairs
    from stepgraph.runtime.session import Session
    from stepgraph.runtime.wrap import bind, wrap

__all__ = [
    "Binding",
    "Plan",
    "PlanSet",
    "Session",
    "StepgraphError",
    "bind",
    "compile",
    "compile_set",
    "load",
    "load_set",
    "match",
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
Overrides = Mapping[str, str | int | float | bool]


def compile(schedule: str | Path, overrides: Overrides | None = None) -> Plan:
    """The plan of a schedule: a path, or the name of a shipped one. ``overrides`` sets values by dotted path. One with
    variants or buckets is for ``compile_set``.

    Raises:
        StepgraphError: everything that is wrong with the schedule, with its places.
    """
    from stepgraph.planner.compile import compile_schedule

    return compile_schedule(_schedule(schedule, overrides))


def compile_set(schedule: str | Path, overrides: Overrides | None = None) -> PlanSet:
    """The plans of all variants and buckets of a schedule, in one arena.

    Raises:
        StepgraphError: everything that is wrong with the schedule, with its places.
    """
    from stepgraph.planner.compile import compile_set as compile_versions

    return compile_versions(_schedule(schedule, overrides))


def _schedule(schedule: str | Path, overrides: Overrides | None) -> Schedule:
    from stepgraph.planner.schedule import load_schedule, schedule_path

    settings = tuple((path, _written(value)) for path, value in (overrides or {}).items())
    return load_schedule(schedule_path(str(schedule)), settings)


def _written(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def load(path: str | Path) -> Plan:
    """A plan from its file. Raises PlanError for one that was cut off, edited, or made for another version."""
    from stepgraph.planner.plan import load_plan

    return load_plan(Path(path))


def load_set(path: str | Path) -> PlanSet:
    """A plan set from its file; a plan alone is a set of one. Raises PlanError as ``load`` does."""
    from stepgraph.planner.plan_set import load_plan_set

    return load_plan_set(Path(path))


def __getattr__(name: str) -> object:
    if name not in _FILES:
        raise AttributeError(f"module 'stepgraph' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"stepgraph.runtime.{_FILES[name]}"), name)
