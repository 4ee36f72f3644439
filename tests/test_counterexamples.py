"""Counterexamples of the verifier, replayed on the cpu device: each really corrupts data, or hangs.

Except that exchanges which nothing orders (E402) are told as such.
"""

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from stepgraph.planner.diagnostics import StepgraphError
from stepgraph.planner.plan import Drop, Plan, WaitEvent, dumps
from stepgraph.planner.verify.proof import prove
from stepgraph.runtime.interleave import Interleaving, interleaving_of, load_interleaving
from stepgraph.runtime.interleave import dumps as interleaving_text
from stepgraph.runtime.mutate import mutants, with_program
from stepgraph.runtime.simulate import simulate
from stepgraph.tools import cli

from support.sizes import SHIPPED, small_plan

SIZES = {"model__hidden": "16", "model__head_dim": "2", "model__ffn": "8", "model__dtype": "float32"}
STEPS = 3


def shown(plan: Plan, interleaving: Interleaving) -> str:
    """What a run shows that follows an interleaving."""
    try:
        report = simulate(plan, STEPS, 0, "cpu", interleaving=interleaving)
    except StepgraphError as error:
        return error.diagnostics[0].code
    assert report is not None
    wrong = not report.movement_exact or not report.max_abs_error <= report.tolerance  # NaN is wrong too
    return "wrong data" if wrong else "fault" if report.faults else "race" if report.races else "nothing"


def plan_of(name: str, via: str = "copy") -> Plan:
    ulysses = "1" if "tp2" in name else "2"
    ways = {"defaults__gather__via": via, "defaults__all_reduce__via": via}
    return small_plan(name, mesh__ulysses=ulysses, **ways, **SIZES)


def all_shown(plan: Plan, count: int, seed: int) -> Counter[tuple[str, str]]:
    seen: Counter[tuple[str, str]] = Counter()
    for mutant in mutants(plan, count, seed):
        for found in prove(mutant.plan).counterexamples:
            outcome = shown(mutant.plan, interleaving_of(mutant.plan, found))
            # Exchanges without an order are a danger to the group's library, not to data.
            right = ("wrong data", "E401", "fault") if found.finding.code == "E402" else ("wrong data", "E401")
            if mutant.what.startswith("repeat a stage"):
                right = (*right, "race")  # what is written while it is read is the same again, from the same operands
            assert outcome in right, (mutant.what, found.finding.diagnostic.message, outcome)
            seen[found.finding.code, outcome] += 1
    return seen


@pytest.mark.parametrize(("name", "via"), [("quickstart", "copy"), ("minimax_h3_u4", "nccl")])
def test_every_missing_order_corrupts_data_when_it_is_not_kept(name: str, via: str) -> None:
    seen = all_shown(plan_of(name, via), 19, 3)
    assert sum(seen.values()) >= 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("via", ["copy", "nccl"])
@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "nccl_baseline_u4"])  # of one stream
def test_counterexamples_of_every_shipped_schedule(name: str, via: str) -> None:
    seen = all_shown(plan_of(name, via), 95, 4)
    assert {"E302", "E304"} <= {code for code, _ in seen}
    print(name, via, dict(seen))


def without_one_edge(plan: Plan) -> Plan:
    """A plan where a stream of rank 1 does not wait for an event."""
    items = plan.ranks[1].instructions
    number = [n for n, item in enumerate(items) if isinstance(item, WaitEvent)][3]
    return with_program(plan, 1, items[:number] + items[number + 1 :])


def test_a_drop_on_another_stream_is_shown_by_who_reads_after_it() -> None:
    """It may come before the tensor is made too, and then nobody notices."""
    plan, seen = plan_of("quickstart"), Counter[str]()
    items = plan.ranks[1].instructions
    for number, item in enumerate(items):
        if isinstance(item, Drop):
            other = replace(item, stream=1 - item.stream)
            moved = with_program(plan, 1, [*items[:number], other, *items[number + 1 :]])
            proof = prove(moved)
            assert {finding.code for finding in proof.findings} >= {"E304"}
            for found in proof.counterexamples[:1]:
                seen[shown(moved, interleaving_of(moved, found))] += 1
    assert set(seen) == {"wrong data"}
    assert seen["wrong data"] > 5


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, file = tmp_path / "broken.plan", tmp_path / "order.json"
    plan.write_text(dumps(without_one_edge(plan_of("quickstart"))))
    assert cli.run(["verify", str(plan), "--counterexample", str(file)]) == 1
    told = capsys.readouterr().out
    assert f"stepgraph run {plan} --device cpu --steps" in told
    command = told.split("to see it: stepgraph ")[1].split()
    assert cli.run([*command, "--format", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert report["races"]
    assert not report["movement_exact"] or not report["max_abs_error"] <= report["tolerance"]
    assert cli.run(["verify", "quickstart", "--counterexample", str(file), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["counterexample"] is None


def test_a_plan_edited_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "edited.plan"
    whole = plan_of("quickstart")
    document = json.loads(dumps(whole))
    items = document["plan"]["ranks"][1]["instructions"]
    del items[next(n for n, item in enumerate(items) if item["do"] == "wait")]
    plan.write_text(json.dumps(document))
    assert cli.run(["verify", str(plan)]) == 1
    assert "E152" in capsys.readouterr().err
    assert cli.run(["verify", str(plan), "--edited", "--format", "json"]) == 1
    codes = {found["code"] for found in json.loads(capsys.readouterr().out)["findings"]}
    assert "E404" in codes


def test_the_printed_command_is_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the options that the reader gave, and quoted for a shell."""
    document = json.loads(dumps(without_one_edge(plan_of("quickstart"))))
    plan, file = tmp_path / "my plan's.plan", tmp_path / "an order.json"
    plan.write_text(json.dumps({**document, "sha256": "0" * 64}))
    assert cli.run(["verify", str(plan), "--edited", "--counterexample", str(file)]) == 1
    told = capsys.readouterr()
    line = next(line for line in told.out.splitlines() if "to see it: " in line)
    script = f'stepgraph() {{ {shlex.quote(sys.executable)} -m stepgraph.tools.cli "$@"; }}; {line.split(": ", 1)[1]}'
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "race on" in done.stderr
    assert "DISAGREES" in done.stdout or "NOT EXACT" in done.stdout


def test_a_missing_order_is_told_before_what_follows_from_it() -> None:
    """An event that brings what is read: it may be read before it is written, since nothing orders the two."""
    for found in mutants(plan_of("quickstart"), 60, 5):
        findings = prove(found.plan).findings
        codes = [finding.code for finding in findings]
        if found.kind == "drop an event" and "E307" in codes and {"E301", "E302", "E303"} & set(codes):
            assert codes.index("E307") > max(n for n, code in enumerate(codes) if code in ("E301", "E302", "E303"))
            assert "mend the missing order first" in findings[codes.index("E307")].hint
            break
    else:
        pytest.fail("no mutant has both")


def test_two_targets_that_share_bytes_are_both_named() -> None:
    plan = plan_of("quickstart")
    places = [replace(target, offset=0) for target in plan.targets[:2]]
    found = prove(replace(plan, targets=(*places, *plan.targets[2:])))
    raced = [f for f in found.findings if f.code in ("E301", "E303") and "which share bytes" in f.message]
    for finding in raced:
        named = [target.name for target in plan.targets if f"{target.name} of rank" in finding.message]
        assert len(named) == 2
        assert all(f" of {name} of rank " in finding.expected for name in named)
    assert raced


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    plan = without_one_edge(plan_of("quickstart"))
    found = interleaving_of(plan, prove(plan).counterexamples[0])
    whole = json.loads(interleaving_text(found))

    def told(document: object) -> str:
        file = tmp_path / "order.json"
        file.write_text(document if isinstance(document, str) else json.dumps(document))
        with pytest.raises(StepgraphError) as error:
            load_interleaving(file, plan)
        return str(error.value)

    assert "E613: the file is no interleaving" in told("")
    assert "E613: the file is no interleaving" in told([1])
    assert "at turns.0.rank" in told({**whole, "turns": [{"rank": "0", "stream": "copy", "count": 1}]})
    assert "belongs to another plan" in told({**whole, "plan": "0" * 64})
    assert "turn 0 of the interleaving does not fit" in told(
        {**whole, "turns": [{"rank": 9, "stream": "copy", "count": 1}]}
    )
    with pytest.raises(StepgraphError, match="E613"):
        load_interleaving(tmp_path / "none.json", plan)


def test_turns_that_cannot_be_taken() -> None:
    plan = plan_of("quickstart")
    waits = Interleaving("", "", (), "E301", "", "", 1, prove(without_one_edge(plan)).counterexamples[0].turns)
    assert shown(plan, waits) == "E613"
