"""Every kind of mistake gets the exact diagnostics that stand beside it, and never a traceback."""

from pathlib import Path

import pytest

from stepgraph.planner.compile import compile_schedule
from stepgraph.planner.diagnostics import ScheduleError
from stepgraph.planner.schedule import load_schedule

FOLDER = Path(__file__).parent / "bad_schedules"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_diagnostics(name: str) -> None:
    with pytest.raises(ScheduleError) as error:
        compile_schedule(load_schedule(FOLDER / f"{name}.yaml"))
    assert str(error.value) + "\n" == (FOLDER / f"{name}.txt").read_text()


def test_each_schedule_has_its_text() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {path.stem for path in FOLDER.glob("*.yaml")}
    assert len(list(FOLDER.glob("*.yaml"))) >= 30
