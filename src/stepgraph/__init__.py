"""stepgraph: schedules of diffusion transformers, compiled to proven multi-GPU plans and replayed.

``compile`` and ``load`` give a plan; ``Session`` runs one inside a denoising loop. Importing the package imports no
torch; the first use of ``Session`` or ``sigma_pairs`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import Plan

if TYPE_CHECKING:
    from stepgraph.runtime.denoise import sigma_pairs
    from stepgraph.runtime.session import Session

__all__ = ["Plan", "Session", "StepgraphError", "compile", "load", "sigma_pairs"]


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
    if name == "Session":
        from stepgraph.runtime.session import Session

        return Session
    if name == "sigma_pairs":
        from stepgraph.runtime.denoise import sigma_pairs

        return sigma_pairs
    raise AttributeError(f"module 'stepgraph' has no attribute '{name}'")
