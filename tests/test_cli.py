"""The command: exit codes, what goes where, JSON beside every table, and no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepgraph.tools.cli import SUBCOMMANDS, run

from support.sizes import SHIPPED

TINY = "model.layers=1,model.hidden=16,model.head_dim=2,model.ffn=8,shape.seq=9"
BAD = Path(__file__).parent / "bad_schedules"


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.run([sys.executable, "-m", "stepgraph.tools.cli", *arguments], env=where, capture_output=True,
                          text=True, check=False, timeout=120)  # fmt: skip


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run(list(arguments)) == code
    return capsys.readouterr().out


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "check", "quickstart") == "quickstart: fine (2 layers, 38 ops, 4 ranks)\n"
    assert json.loads(output(capsys, "check", "quickstart", "--format", "json"))["ok"] is True


def test_check_is_quick() -> None:
    """A schedule of 50 layers, in process time; the bound is the promise, with room for a slow machine."""
    script = (
        "import time, sys; from stepgraph.tools.cli import run; code = run(['check', 'minimax_h3_u4'])\n"
        "heavy = {'torch', 'networkx', 'rich', 'numpy'} & {m.split('.')[0] for m in sys.modules}\n"
        "print(code, sorted(heavy))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_compile_show_verify_run_and_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan, other = str(tmp_path / "a.plan"), str(tmp_path / "b.plan")
    text = output(capsys, "compile", "quickstart", "--set", TINY, "-o", plan)
    for word in ("ops", "streams", "events", "before reduction", "handshakes", "copies", "lower bound", "proof",
                 "free of races", "hash", "assuming"):  # fmt: skip
        assert word in text
    facts = json.loads(output(capsys, "compile", "quickstart", "-o", other, "--format", "json"))
    assert facts["proven"] is True
    assert facts["events"] < facts["dependencies"]
    assert facts["arena_bytes"] >= facts["arena_lower_bound"] > 0
    assert facts["assumptions"]

    table = output(capsys, "show", plan, "--rank", "1")
    assert "compute" in table
    assert "send_v -> rank 2" in table
    rows = json.loads(output(capsys, "show", plan, "--all", "--format", "json"))
    assert [row["instruction"] for row in rows] == list(range(len(rows)))

    assert "free of races" in output(capsys, "verify", plan)
    assert json.loads(output(capsys, "verify", plan, "--format", "json"))["ok"] is True

    report = json.loads(output(capsys, "run", plan, "--device", "cpu", "--steps", "3", "--format", "json"))
    assert report["ok"] is True
    assert (report["ranks"], report["steps"], report["races"], report["movement_exact"]) == (4, 3, 0, True)
    assert 0 < report["max_abs_error"] <= report["tolerance"]

    assert "same" in output(capsys, "diff", plan, plan)
    changed = json.loads(output(capsys, "diff", plan, other, "--format", "json", code=1))
    assert changed["changed"]["ops"]


def test_show_folds_alike_layers(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "show", "minimax_h3_u4")
    assert "more, alike" in text
    assert len(text.splitlines()) < 90


def test_run_prints_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "run", "quickstart", "--device", "cpu", "--steps", "2", "--set", TINY)
    for word in ("agrees", "exact", "races            0"):
        assert word in text


def test_run_of_an_unproven_plan_finds_its_races(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import stepgraph
    from stepgraph.planner.plan import dumps

    from support.mutate import PLANTED

    plan = stepgraph.compile("quickstart", {"shape.seq": 9})
    _, mutant = list(PLANTED["event"](plan, 1))[2]
    path = tmp_path / "raced.plan"
    path.write_text(dumps(mutant))
    assert run(["verify", str(path)]) == 1
    assert "E3" in capsys.readouterr().err
    report = json.loads(output(capsys, "run", str(path), "--device", "cpu", "--steps", "2", "--format", "json", code=1))
    assert report["races"] > 0
    assert report["ok"] is False


def test_findings_go_to_stderr_and_as_json_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(BAD / "several_errors.yaml")
    assert run(["check", path]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("several_errors.yaml:") == 4
    data = json.loads(output(capsys, "check", path, "--format=json", code=1))
    assert [d["code"] for d in data["diagnostics"]] == ["E104", "E102", "E103", "E102"]
    assert data["diagnostics"][1]["hint"] == "did you mean 'hidden'?"


@pytest.mark.parametrize("name", sorted(path.stem for path in BAD.glob("*.yaml")))
@pytest.mark.parametrize("what", ["check", "compile", "run", "show", "verify"])
def test_bad_schedules_exit_with_1(capsys: pytest.CaptureFixture[str], name: str, what: str) -> None:
    assert run([what, str(BAD / f"{name}.yaml")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert "internal" not in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "missing"],
        ["check", "missing.yaml"],
        ["check", "."],
        ["compile", "quickstart", "--set", "x"],
        ["nothing"],
        ["run", "quickstart", "--steps", "0"],
        ["run", "quickstart", "--device", "tpu"],
        ["explain", "E999"],
        ["show", "missing.plan"],
        ["show", "quickstart", "--rank", "4"],
        ["show", "quickstart", "--layer", "9"],
        ["diff", "quickstart"],
        ["check"],
        ["compile", "quickstart", "--set", TINY, "-o", "/nonexistent/x.plan"],
        ["init", "bad", "-o", "/nonexistent/x.yaml"],
    ],
)
def test_usage_and_files_exit_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err
    assert "Traceback" not in captured.err


def test_missing_capability_exits_with_3(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["run", "quickstart", "--device", "cuda", "--set", TINY]) == 3
    assert "E601" in capsys.readouterr().err


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run", "quickstart", "--solo"], 2, "for cuda, which is not there"),
        (["run", "quickstart", "--eager", "--device", "cpu"], 2, "for cuda, this run is on cpu"),
        (["run", "quickstart", "--solo", "--device", "cuda"], 3, "torch sees no GPU"),
        (["run", "minimax_h3_cached_u4", "--device", "cuda"], 3, "torch sees no GPU"),
        (["compare", "quickstart", "--device", "cuda"], 3, "torch sees no GPU"),
        (["run", "minimax_h3_tp2_u2", "--ranks", "3"], 2, "3 is no multiple of that"),
    ],
)
def test_what_needs_a_gpu_is_told(
    capsys: pytest.CaptureFixture[str], no_gpu: None, arguments: list[str], code: int, told: str
) -> None:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("subcommand", ["run", "compare"])
def test_torchrun_is_refused_where_one_process_does_it_all(
    capsys: pytest.CaptureFixture[str], no_gpu: None, monkeypatch: pytest.MonkeyPatch, subcommand: str
) -> None:
    """Else each of its processes would run all ranks, and tell the same."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert run([subcommand, "quickstart", "--set", TINY]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "all ranks run in one process on cpu, and torchrun has started 2" in captured.err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run([subcommand, "quickstart", "--set", TINY]) == 0


def test_doctor_where_cuda_cannot_be_called(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU, and no cuda-python."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a GPU")
    monkeypatch.setattr("stepgraph.runtime.transport.mapping.has_bindings", lambda: False)
    monkeypatch.setattr("stepgraph.tools.doctor.has_bindings", lambda: False)
    rows = {row["what"]: row for row in json.loads(output(capsys, "doctor", "--format", "json"))["findings"]}
    assert rows["transport ipc"]["means"] == "the package cuda-python is not installed"
    assert rows["cuda-python"]["found"] == rows["handshake memop, copy"]["found"] == "no"


def test_our_bugs_exit_with_101(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import stepgraph.planner.compile as module

    def broken(schedule: object) -> None:
        raise AssertionError("a value is made twice")

    monkeypatch.setattr(module, "compile_schedule", broken)
    monkeypatch.delenv("STEPGRAPH_DEBUG", raising=False)
    assert run(["compile", "quickstart"]) == 101
    captured = capsys.readouterr()
    assert "internal error: AssertionError: a value is made twice" in captured.err
    assert "Traceback" not in captured.err
    monkeypatch.setenv("STEPGRAPH_DEBUG", "1")
    assert run(["compile", "quickstart"]) == 101
    assert "Traceback" in capsys.readouterr().err


def test_init_writes_once_and_what_it_writes_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    output(capsys, "init", "mine", "-o", str(path))
    before = path.read_text()
    assert "name: mine" in before
    assert run(["init", "mine", "-o", str(path)]) == 2
    assert path.read_text() == before
    output(capsys, "init", "mine", "-o", str(path), "--force")
    output(capsys, "run", str(path), "--device", "cpu", "--steps", "1")
    assert run(["init", "not a name", "-o", str(tmp_path / "no.yaml")]) == 1
    assert not (tmp_path / "no.yaml").exists()


def test_schema_accepts_every_shipped_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from stepgraph.planner.schedule import schedule_path
    from stepgraph.planner.source import read_file

    schema = json.loads(output(capsys, "schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name in SHIPPED:
        validator.validate(read_file(schedule_path(name)).data)
    for name in (
        "unknown_key",
        "unknown_kind",
        "unknown_field",
        "missing_key",
        "wrong_type",
        "wrong_choice",
        "scalar_op",
    ):
        assert not validator.is_valid(read_file(BAD / f"{name}.yaml").data), name


def test_explain_knows_every_code_kind_and_field(capsys: pytest.CaptureFixture[str]) -> None:
    from stepgraph.planner.manual import CODES
    from stepgraph.planner.ops import OP_KINDS

    everything = json.loads(output(capsys, "explain", "--format", "json"))
    for code in CODES:
        assert code in output(capsys, "explain", code)
    for kind, model in OP_KINDS.items():
        text = output(capsys, "explain", kind)
        for name, info in model.model_fields.items():
            field = info.alias or name
            assert field in text
            assert everything[f"{kind}.{field}"]
    assert "mesh" in everything


def test_every_code_that_is_told_is_in_the_manual() -> None:
    import re

    from stepgraph.planner.manual import CODES

    root = Path(__file__).parents[1]
    used: set[str] = set()
    for folder in ("planner", "runtime", "kernels", "tools"):
        for path in (root / folder).rglob("*.py"):
            used |= set(re.findall(r'"(E\d{3})"', path.read_text()))
    assert used == set(CODES)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch" in output(capsys, "doctor")
    assert json.loads(output(capsys, "doctor", "--format", "json"))["ok"] is True


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--help")
    for name in SUBCOMMANDS:
        assert name in text
        assert output(capsys, name, "--help")


def test_as_a_process() -> None:
    done = command("run", "quickstart", "--device", "cpu", "--steps", "1", "--set", TINY, NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert command("check", str(BAD / "tab.yaml")).returncode == 1


def test_broken_pipe_is_quiet() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = f"{sys.executable} -m stepgraph.tools.cli show quickstart --all --format json | head -n 1"
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "[\n"
    assert done.stderr == ""


def test_bench_of_the_proof(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(output(capsys, "bench", "proof", "--layers", "1,2", "--ranks", "2", "--format", "json"))
    assert [(row["layers"], row["ranks"]) for row in data["rows"]] == [(1, 8), (2, 8), (1, 2)]
    assert all(row["seconds"] > 0 for row in data["rows"])
    assert "us an instruction" in output(capsys, "bench", "proof", "--layers", "1", "--ranks", "2")
    assert run(["bench", "proof", "--layers", "many"]) == 2


def test_memory_map(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import xml.etree.ElementTree as ET

    svg = tmp_path / "arena.svg"
    data = json.loads(output(capsys, "memory", "flux_1024_u4", "--svg", str(svg), "--format", "json"))
    assert data["arena_bytes"] == max(target["offset"] + target["nbytes"] for target in data["targets"])
    spans = [(t, use) for t in data["targets"] for use in t["uses"]]
    assert len(spans) > 57 * 4  # every layer fills q, k, v and o
    for one, first in spans:  # what shares bytes is never in use at once, within a step
        for two, second in spans:
            if one["name"] < two["name"]:
                apart = one["offset"] + one["nbytes"] <= two["offset"] or two["offset"] + two["nbytes"] <= one["offset"]
                in_turn = first["last_op"] < second["first_op"] or second["last_op"] < first["first_op"]
                assert apart or in_turn, (one["name"], two["name"])
    drawn = ET.parse(svg).getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) == 1 + len(spans)
    text = output(capsys, "memory", "quickstart")
    assert "self_attention.send_v:v.0" in text
    assert "equal to the lower bound" in text
    assert run(["memory", "quickstart", "--rank", "4"]) == 2


def test_memory_map_of_chunks_and_of_an_edited_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Chunks fill the target of their gather one after another, in one use; and an arena may be below a stale bound."""
    sizes = "model.layers=1,model.heads=12,model.kv_heads=12,model.head_dim=2,model.hidden=24,model.ffn=8,shape.seq=8"
    text = (Path(__file__).parent.parent / "plans" / "minimax_h3_u4_chunks.yaml").read_text(encoding="utf-8")
    schedule = tmp_path / "chunks.yaml"
    schedule.write_text(text.replace("heads: 2}", "heads: 3}"), encoding="utf-8")
    data = json.loads(output(capsys, "memory", str(schedule), "--set", sizes, "--format", "json"))
    (gathered,) = (target for target in data["targets"] if "gather:o" in target["name"])
    (use,) = gathered["uses"]
    assert use["from"].endswith("gather")
    assert not use["to"].endswith("gather")
    assert use["last_op"] - use["first_op"] > 3
    plan = tmp_path / "edited.plan"
    output(capsys, "compile", str(schedule), "--set", sizes, "-o", str(plan))
    document = json.loads(plan.read_text(encoding="utf-8"))
    arena = document["plan"]["arena_bytes"]
    for bound, told in (
        (arena, "equal to the"),
        (arena + 1, "below the"),
        (arena // 2, "100.0 % over the"),
        (0, "over the"),
    ):
        document["plan"]["arena_lower_bound"] = bound
        plan.write_text(json.dumps(document), encoding="utf-8")
        assert f"arena {arena} bytes, {told} lower bound of {bound}\n" in output(
            capsys, "memory", str(plan), "--edited"
        )
