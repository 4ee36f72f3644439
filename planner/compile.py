"""The pipeline: from a schedule to a plan, level by level, each pass followed by the rules of the level it made."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stepgraph.planner.diagnostics import Diagnostic, ScheduleError
from stepgraph.planner.dump import dump_level
from stepgraph.planner.expand import expand
from stepgraph.planner.lower import lower
from stepgraph.planner.memory import MemoryPlan, allocate, verify_memory
from stepgraph.planner.opgraph import OpGraph, verify_opgraph
from stepgraph.planner.plan import Plan
from stepgraph.planner.plan_check import check_plan
from stepgraph.planner.plan_set import BucketSizes, PlanSet, VariantRule, share_memory
from stepgraph.planner.schedule import Schedule
from stepgraph.planner.streams import order, verify_streams

log = logging.getLogger("stepgraph")
Level = TypeVar("Level")


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
    """The levels up to memory, which find everything that is wrong with one version of a schedule; no plan is written
    out.

    Raises:
        ScheduleError: every E2xx of the schedule, or every E301, or E305.
    """
    return allocate(order(expand(schedule)))


def check_schedules(schedule: Schedule) -> list[MemoryPlan]:
    """``check_schedule`` of every version.

    Raises:
        ScheduleError: everything that is wrong with any version, each thing once; E202 for an input that none reads.
    """
    levels = _of_versions(schedule, check_schedule)
    _all_read(schedule, {name for level in levels for name, _ in level.streams.graph.schedule.inputs})
    _check_states(schedule, [level.streams.graph for level in levels])
    return levels


def _of_versions(schedule: Schedule, make: Callable[[Schedule], Level]) -> list[Level]:
    """What ``make`` makes of every version; what is wrong with several of them is told once."""
    made: list[Level] = []
    problems: dict[tuple[str, str], Diagnostic] = {}
    for version in schedule.versions():
        try:
            made.append(make(version))
        except ScheduleError as error:
            for found in error.diagnostics:
                problems.setdefault((found.code, str(found.place)), found)
    if problems:
        raise ScheduleError(list(problems.values()))
    return made


def _all_read(schedule: Schedule, read: set[str]) -> None:
    unread = [name for name, _ in schedule.inputs if name not in read]
    if unread:
        place, hint = schedule.tree.key_place(("inputs", unread[0])), "take it out of `inputs`"
        problem = f"the input '{unread[0]}' is never read"
        raise ScheduleError([Diagnostic("E202", problem, place, "a variant that reads it", "none", hint)])


def _check_states(schedule: Schedule, versions: Sequence[OpGraph]) -> None:
    """A state is read by some version and written by some."""
    used: dict[str, set[str]] = {"read": set(), "written": set()}
    for graph in versions:
        for node in graph.nodes:
            for what, values in (("read", [value for _, value in node.inputs]), ("written", node.outputs)):
                touched = (graph.memories[graph.values[value].memory] for value in values)
                used[what] |= {memory.name for memory in touched if memory.state}
    for name in schedule.state:
        for what, names in used.items():
            if name not in names:
                place, problem = schedule.tree.key_place(("state", name)), f"the state '{name}' is never {what}"
                hint = "take it out of `state`" if what == "read" else "it is zero for ever"
                raise ScheduleError([Diagnostic("E202", problem, place, "", "", hint)])


def compile_schedule(schedule: Schedule) -> Plan:
    """The plan of a schedule without variants and buckets. ``STEPGRAPH_DUMP=DIR`` writes a numbered file a pass.

    Raises:
        ScheduleError: every E2xx of the schedule, E215 where it has versions, every E301, or E305.
    """
    if schedule.variants or schedule.buckets:
        names = ", ".join(version.version for version in schedule.versions())
        hint = "choose one with --variant and --bucket, or compile all of them to a plan set"
        problem = "the schedule has several versions of its step"
        raise ScheduleError([Diagnostic("E215", problem, None, "one version", names, hint)])
    return _run(schedule)[1]


def _run(schedule: Schedule) -> tuple[OpGraph, Plan]:
    """All passes over one version: the first level that they make, and the last."""
    levels: list[Any] = [schedule]
    folder = os.environ.get("STEPGRAPH_DUMP")
    if folder and schedule.in_set:
        folder = str(Path(folder) / schedule.version.replace("/", "."))
    for number, step in enumerate(PASSES, 1):
        started = time.perf_counter()
        level = step.run(levels[-1])
        made = time.perf_counter()
        step.verify(level)
        log.debug(
            "%s: %.1f ms, verified in %.1f ms", step.name, 1e3 * (made - started), 1e3 * (time.perf_counter() - made)
        )
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{number:02}_{step.name}.txt").write_text(dump_level(level))
        levels.append(level)
    graph, plan = levels[1], levels[-1]
    assert isinstance(graph, OpGraph)
    assert isinstance(plan, Plan)
    return graph, plan


def compile_set(schedule: Schedule, progress: Callable[[str], None] = lambda _: None) -> PlanSet:
    """The plans of all versions of a schedule, in one arena and with one page of flags.

    Raises:
        ScheduleError: everything that is wrong with any version, each thing once; E202 for an input that none reads.
    """

    def compiled(version: Schedule) -> tuple[OpGraph, Plan]:
        progress(f"compiling {version.version or schedule.name}")
        return _run(version)

    graphs, plans = zip(*_of_versions(schedule, compiled), strict=True)
    _all_read(schedule, {entry.name for plan in plans for entry in plan.inputs})
    _check_states(schedule, graphs)
    return PlanSet(
        schedule.name,
        tuple(VariantRule(variant.name, variant.after) for variant in schedule.variants),
        tuple(_bucket_sizes(schedule)),
        share_memory(plans),
    )


def _bucket_sizes(schedule: Schedule) -> Iterator[BucketSizes]:
    for version in schedule.versions()[: len(schedule.buckets)]:
        yield BucketSizes(version.bucket, (("batch", version.batch), *version.segments, *version.more_sizes))
