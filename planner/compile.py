"""The pipeline: from a schedule to a plan, level by level, each pass followed by the rules of the level it made."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepgraph.planner.dump import dump_level
from stepgraph.planner.expand import expand
from stepgraph.planner.lower import lower
from stepgraph.planner.memory import MemoryPlan, allocate, verify_memory
from stepgraph.planner.opgraph import verify_opgraph
from stepgraph.planner.plan import Plan
from stepgraph.planner.plan_check import check_plan
from stepgraph.planner.schedule import Schedule
from stepgraph.planner.streams import order, verify_streams

log = logging.getLogger("stepgraph")


def verify_plan(plan: Plan) -> None:
    """Our own rules of the artifact: every reference leads somewhere. Races and deadlocks are proven apart."""
    problem = check_plan(plan)
    assert problem is None, problem


@dataclass(frozen=True, slots=True)
class Pass:
    """A pure function from one level to the next, and the rules of the level that it makes."""

    name: str
    run: Callable[[Any], Any]
    verify: Callable[[Any], None]


PASSES = (
    Pass("expand", expand, verify_opgraph),
    Pass("order", order, verify_streams),
    Pass("allocate", allocate, verify_memory),
    Pass("lower", lower, verify_plan),
)


def check_schedule(schedule: Schedule) -> MemoryPlan:
    """The levels up to memory, which find everything that is wrong with a schedule; no plan is written out.

    Raises:
        ScheduleError: every E2xx of the schedule, or every E301, or E305.
    """
    return allocate(order(expand(schedule)))


def compile_schedule(schedule: Schedule) -> Plan:
    """The plan of a schedule. ``STEPGRAPH_DUMP=DIR`` writes a numbered file a pass.

    Raises:
        ScheduleError: every E2xx of the schedule, or every E301, or E305.
    """
    level: Any = schedule
    folder = os.environ.get("STEPGRAPH_DUMP")
    for number, step in enumerate(PASSES, 1):
        started = time.perf_counter()
        level = step.run(level)
        made = time.perf_counter()
        step.verify(level)
        log.debug(
            "%s: %.1f ms, verified in %.1f ms", step.name, 1e3 * (made - started), 1e3 * (time.perf_counter() - made)
        )
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{number:02}_{step.name}.txt").write_text(dump_level(level))
    assert isinstance(level, Plan)
    return level
