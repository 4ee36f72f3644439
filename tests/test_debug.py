"""The debug switch and the dump directory, at their highest level."""

import logging
from pathlib import Path

import pytest

import stepgraph
from stepgraph.planner.compile import PASSES
from stepgraph.planner.plan import load_plan
from stepgraph.tools.cli import run


def test_dump_directory_holds_a_numbered_file_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dump"
    monkeypatch.setenv("STEPGRAPH_DUMP", str(folder))
    plan = stepgraph.compile("quickstart")
    names = [f"{number:02}_{step.name}.txt" for number, step in enumerate(PASSES, 1)]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert "self_attention.qkv[1]" in (folder / "01_expand.txt").read_text()
    assert "joins" in (folder / "02_order.txt").read_text()
    assert "arena" in (folder / "03_allocate.txt").read_text()
    assert load_plan(folder / "04_lower.txt") == plan


def test_debug_switch_logs_every_pass(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="stepgraph"):
        assert run(["check", "quickstart"]) == 0
        stepgraph.compile("quickstart")
    for step in PASSES:
        assert any(record.message.startswith(f"{step.name}: ") for record in caplog.records)
