"""Plans that were edited by hand, in good faith or not: every command takes them, and none ends in an error of ours."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepgraph.planner.compile import compile_set
from stepgraph.planner.plan import dumps
from stepgraph.planner.plan_set import dumps as set_text
from stepgraph.planner.schedule import load_schedule
from stepgraph.runtime.cpu_memory import RankBlock, RankMemory, bytes_of_rank
from stepgraph.runtime.room import host_bytes
from stepgraph.tools.cli import run

from support.sizes import small_plan

SIZES = {"model__layers": "1", "model__hidden": "16", "model__head_dim": "2", "model__ffn": "8", "mesh__ulysses": "2"}
COMMANDS: dict[str, list[str]] = {
    "verify": [],
    "show": ["--all"],
    "memory": [],
    "run": ["--device", "cpu", "--steps", "2"],
    "compare": ["--device", "cpu"],
    "diff": [],
}
INTERNAL = 101
VALUES: list[object] = [-1, 0, 1, 3, 1 << 20, 1 << 40, 1 << 49, 1 << 62, 1 << 70, 1.5, True, None, "", "abc", [], {}]
Leaf = tuple[Any, Any]
"""(a list or an object, an index or a key)."""


def text_of(name: str) -> str:
    if name == "set":
        return set_text(compile_set(load_schedule(Path(__file__).parent / "data" / "variants.yaml")))
    return dumps(small_plan(name, **SIZES))


def leaves(document: Any) -> dict[str, list[Leaf]]:
    """What can be changed, by the path without indices."""
    found: dict[str, list[Leaf]] = {}

    def visit(here: Any, path: str) -> None:
        for key, value in here.items() if isinstance(here, dict) else enumerate(here):
            name = f"{path}.{key}" if isinstance(here, dict) else f"{path}[]"
            found.setdefault(name, []).append((here, key))
            if isinstance(value, dict | list):
                visit(value, name)

    visit(document["plan"] if "plan" in document else document["set"], "")
    return found


def changed(document: Any, chance: random.Random) -> tuple[Any, str]:
    """The document with one value replaced, by what stands elsewhere in such a place or by something odd."""
    document = copy.deepcopy(document)
    by_path = leaves(document)
    path = chance.choice(sorted(by_path))
    here, key = chance.choice(by_path[path])
    there, other = chance.choice(by_path[path])
    choices = [copy.deepcopy(there[other]), copy.deepcopy(there[other]), chance.choice(VALUES)]
    if isinstance(here[key], int) and not isinstance(here[key], bool):
        choices += [here[key] + 1, here[key] - 1, chance.choice(VALUES[:9])]
    if isinstance(here[key], list) and here[key]:
        number = chance.randrange(len(here[key]))
        choices += [here[key][:number] + here[key][number + 1 :], [*here[key], here[key][number]]]
    here[key] = chance.choice(choices)
    return document, f"{path} {key}: {json.dumps(here[key])[:60]}"


def internal_errors(name: str, count: int, seed: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What has ended in an internal error; every other end is fine."""
    chance, found, taken = random.Random(seed), list[str](), 0
    whole, file = json.loads(text_of(name)), folder / "edited.plan"
    other = folder / "whole.plan"
    other.write_text(json.dumps(whole))
    for _ in range(count):
        document, what = changed(whole, chance)
        file.write_text(json.dumps(document))
        for command, options in COMMANDS.items():
            files = [str(file), str(other)] if command == "diff" else [str(file)]
            code = run([command, *files, "--edited", *options])
            told = capsys.readouterr()
            assert code in (0, 1, 2, 3, INTERNAL)
            if code == INTERNAL:
                found.append(f"{command}: {what}: {told.err.splitlines()[-2]}")
            elif command == "show":
                taken += code == 0
    assert taken > count / 16, "most changes are refused when the file is read"
    return found


def edit(tmp_path: Path, name: str, change: Callable[[Any], object]) -> str:
    document, file = json.loads(text_of(name)), tmp_path / "edited.plan"
    change(document["plan"])
    file.write_text(json.dumps(document))
    return str(file)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_an_edited_plan(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = edit(tmp_path, "quickstart", lambda plan: plan.update(name="edited"))
    given = [command, *([file] if command == "diff" else []), file, *COMMANDS[command]]
    assert run(given) == 1
    assert "with --edited" in capsys.readouterr().err
    assert run([*given, "--edited"]) == 0
    json.loads(output(capsys, *given, "--edited", "--format", "json"))


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert run(list(arguments)) == code
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [("at", "abc"), ("at", "-1"), ("at", "9" * 30), ("chunk", "2/2"), ("chunk", "1"), ("heads", "1,x"), ("ffn", "٣")],
)
def test_options_that_are_no_numbers(name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(plan: Any) -> None:
        op = plan["ops"][5]
        op["options"] = [*(pair for pair in op["options"] if pair[0] != name), [name, value]]

    file = edit(tmp_path, "quickstart", change)
    for command in ("verify", "show", "run"):
        assert run([command, file, "--edited"]) == 1
        assert f"the option {name} of" in capsys.readouterr().err


def test_a_plan_that_no_memory_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is allocated: with what each rank wants, and what there is."""
    file = edit(tmp_path, "quickstart", lambda plan: plan.update(arena_bytes=1 << 49))
    report = json.loads(output(capsys, "run", file, "--edited", "--device", "cpu", "--format", "json", code=3))
    found = report["diagnostics"][0]
    assert found["code"] == "E606"
    assert f"at most {host_bytes()} bytes" in found["expected"]
    total, parts = found["got"].split(": ")
    assert int(total) == sum(int(part.split()[2]) for part in parts.split(", "))
    assert int(parts.split()[2]) > 1 << 49
    assert "--set" in found["hint"]


def test_what_a_rank_takes_is_what_is_allocated() -> None:
    plan = small_plan("quickstart", **SIZES)
    chains = len(plan.streams) * plan.world_size
    block = RankBlock([plan], 1, chains)
    memory = RankMemory(plan, 1, chains, block, 0)
    shadows = [block.shadow, *memory.shadows[len(plan.targets) :]]
    words = sum(part.nbytes for s in shadows for part in (s.writer, s.written, s.reads, s.holds))
    local = sum(buffer.nbytes for buffer in plan.ranks[1].buffers[len(plan.targets) :])
    assert bytes_of_rank([plan], 1, chains) == block.arena.numel() + 8 * len(block.flags) + words + local


def test_a_schedule_that_is_not_the_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def other_size(plan: Any) -> None:
        plan["source"]["overrides"] = [["model.head_dim", "4"]]

    file = edit(tmp_path, "quickstart", other_size)
    for command in ("run", "compare"):
        assert run([command, file, "--edited", "--device", "cpu"]) == 1
        assert "E156: quickstart does not fit the schedule that it carries" in capsys.readouterr().err


def test_copies_that_make_no_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies that go to a target of another shape are wrong data for a run, and no error of ours."""

    def sent_to(plan: Any, op: int, to: int) -> None:
        for rank in plan["ranks"]:
            for item in rank["instructions"]:
                if item["do"] == "send" and item["op"] == op:
                    item["target"] = to

    whole = dumps(small_plan("quickstart", **{**SIZES, "model__hidden": "8", "model__heads": "4"}))
    plan, file, ran = json.loads(whole)["plan"], tmp_path / "edited.plan", 0
    for op in sorted({item["op"] for item in plan["ranks"][0]["instructions"] if item["do"] == "send"}):
        for to in range(len(plan["targets"])):
            document = json.loads(whole)
            sent_to(document["plan"], op, to)
            file.write_text(json.dumps(document))
            if run(["verify", str(file), "--edited"]) == 1 and "E154" not in capsys.readouterr().err:
                assert run(["run", str(file), "--edited", "--device", "cpu", "--steps", "2"]) == 1
                assert "internal error" not in capsys.readouterr().err
                ran += 1
    assert ran > 5


def test_an_exchange_of_a_group_without_the_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def other_group(plan: Any) -> None:
        plan["exchanges"][0]["group"] = 2  # along the tensor axis

    file = edit(tmp_path, "minimax_h3_tp2_u2", other_group)
    assert run(["verify", file, "--edited"]) == 1
    assert run(["run", file, "--edited", "--device", "cpu", "--steps", "1"]) == 1
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["quickstart", "set"])
def test_no_command_ends_in_an_internal_error(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert internal_errors(name, 8 if name == "set" else 30, 1, tmp_path, capsys) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["quickstart", "lingbot_world_v2_u4", "minimax_h3_tp2_u2", "flux_1024_u4", "set"])
def test_no_command_ends_in_an_internal_error_often(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert internal_errors(name, 1000, 2, tmp_path, capsys) == []
