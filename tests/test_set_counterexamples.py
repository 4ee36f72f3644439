"""Counterexamples to plan sets: the word of versions, and the turns in it, under which a run really goes wrong.

Every test edits the file of a set by hand, and runs the very command that `verify` prints.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepgraph.planner.compile import compile_set
from stepgraph.planner.plan_set import PlanSet, dumps
from stepgraph.planner.schedule import read_schedule
from stepgraph.tools.cli import run

STEP = """    step:
      - shard: {in: latents, out: x}
      - linear: {name: qkv, in: x, out: {q: heads, k: kv_heads, v: kv_heads}}
      - send: v
      - send: q
      - send: {in: k, barrier: true}
      - attention: {in: [q, k, v], out: o}
      - gather: o
      - linear: {name: out, in: o, out: x}
      - all_gather: {in: x, out: noise}
"""
THREE = f"""version: 1
name: three
model: {{layers: 1, hidden: 8, heads: 2, head_dim: 4, ffn: 8, dtype: float32}}
mesh: {{ulysses: 2}}
shape: {{batch: 1, seq: 6, cache: 6}}
inputs:
  latents: {{shape: [batch, seq, hidden]}}
outputs: [noise]
state:
  kcache: {{shape: [batch, cache, kv_heads, head_dim], placement: head}}
  vcache: {{shape: [batch, cache, kv_heads, head_dim], placement: head}}
defaults: {{gather: {{via: copy}}, all_gather: {{via: copy}}}}
variants:
  full:
{STEP}
  other:
    after: [full, other]
{STEP}
  third:
    after: [other]
{STEP}
"""
WITHOUT_STATE = THREE[: THREE.index("state:")] + THREE[THREE.index("defaults:") :]
KEEPING = (
    STEP.replace("send: v\n", "send: {in: v, into: vcache, at: 0}\n")
    .replace("{in: k, barrier: true}", "{in: k, into: kcache, at: 0, barrier: true}")
    .replace("[q, k, v], out", "[q, kcache, vcache], out")
)
LOOKING = "".join(line for line in KEEPING.splitlines(True) if "into:" not in line).replace(
    "send: q", "send: {in: q, barrier: true}"
).replace("out: {q: heads, k: kv_heads, v: kv_heads}", "out: {q: heads}")  # fmt: skip
WITH_STATE = THREE.replace(STEP, KEEPING, 1)[::-1].replace(STEP[::-1], LOOKING[::-1], 1)[::-1]
"""The first one writes the caches, the last one reads them."""
BUCKETS = WITHOUT_STATE + "buckets:\n  small: {seq: 6}\n  large: {seq: 10}\n"
Document = dict[str, Any]


def a_set(text: str = WITHOUT_STATE, handshake: str = "memop") -> PlanSet:
    return compile_set(read_schedule(text, "three.yaml", (("defaults.handshake", handshake),)))


def plan_of(document: Document, version: str) -> Document:
    names = [p["source"]["variant"] + p["source"]["bucket"] for p in document["set"]["plans"]]
    found: Document = document["set"]["plans"][names.index(version)]
    return found


def opened(plan: Document) -> None:
    """Without the closing handshake."""
    last = len(plan["exchanges"]) - 1
    for rank in plan["ranks"]:
        rank["instructions"] = [item for item in rank["instructions"] if item.get("exchange") != last]
    plan["exchanges"].pop()


def target(plan: Document, word: str) -> Document:
    found: Document = next(t for t in plan["targets"] if word in t["name"])
    return found


def all_open(document: Document) -> int:
    """Every plan without its closing, and with its last target in a place of its own, which makes it sound alone, and
    the set too; gives the first byte behind that place."""
    end = document["set"]["plans"][0]["arena_bytes"]
    widest = max(target(plan, "all_gather")["nbytes"] for plan in document["set"]["plans"])
    widest += -widest % 256
    for plan in document["set"]["plans"]:
        opened(plan)
        target(plan, "all_gather")["offset"] = end
        plan["arena_bytes"] = end + 3 * widest
    return int(end + widest)


def first_sent(document: Document, later: str) -> None:
    """A plan sends first to where the others have what they read last, and has that elsewhere."""
    end, plan = all_open(document), plan_of(document, later)
    target(plan, "send_v")["offset"] = target(plan, "all_gather")["offset"]
    target(plan, "all_gather")["offset"] = end


def shared_words(document: Document, earlier: str, later: str) -> None:
    """The first handshake of a plan has the words of the last one of another."""
    all_open(document)
    one, two = plan_of(document, earlier), plan_of(document, later)
    last = max(item["exchange"] for item in one["ranks"][0]["instructions"] if item["do"] == "signal")
    first = min(item["exchange"] for item in two["ranks"][0]["instructions"] if item["do"] == "signal")
    for rank, program in enumerate(two["ranks"]):
        words = [
            item for item in one["ranks"][rank]["instructions"] if item.get("exchange") == last and "flags" in item
        ]
        for item in program["instructions"]:
            if item.get("exchange") == first and "flags" in item:
                item["flags"] = next(word["flags"] for word in words if word["do"] == item["do"])


def on_a_state(document: Document, later: str) -> None:
    """A plan sends to where the set has a state."""
    target(plan_of(document, later), "send_q")["offset"] = target(plan_of(document, "full"), "kcache")["offset"]


def shown(
    plans: PlanSet, edit: Callable[[Document], None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> Document:
    """What the printed command tells of an edited set, with the word it has walked through."""
    document = json.loads(dumps(plans))
    edit(document)
    file, order = folder / "a set's file.plan", folder / "its order.json"
    file.write_text(json.dumps(document))
    assert run(["verify", str(file), "--edited", "--counterexample", str(order), "--format", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["counterexample"] == str(order)
    command = shlex.split(told["to_see_it"])
    assert command[0] == "stepgraph"
    assert run([*command[1:], "--format", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    codes = {found["code"] for found in told["findings"]}
    return {**report, "word": json.loads(order.read_text())["word"], "codes": codes, "command": command}


def is_wrong(report: Document) -> bool:
    """Wrong data, or a deadlock."""
    if "diagnostics" in report:
        return bool(report["diagnostics"][0]["code"] == "E401")
    error = report["max_abs_error"]
    return error is None or error > report["tolerance"] or "data movement is not exact" in report["findings"]


@pytest.mark.parametrize(
    ("later", "word"),
    [("other", ["full", "other"]), ("third", ["full", "other", "third"])],
    ids=["from the beginning", "behind what a request begins with"],
)
@pytest.mark.parametrize("handshake", ["memop", "kernel"])
def test_a_target_over_what_another_version_still_reads(
    later: str, word: list[str], handshake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = shown(a_set(handshake=handshake), lambda d: first_sent(d, later), tmp_path, capsys)
    assert report["codes"] == {"E303"}
    assert report["word"] == word
    assert report["steps"] == len(word)
    assert report["taken"] == dict.fromkeys(word, 1)
    assert is_wrong(report)
    assert any("race on" in found for found in report["findings"])


def test_versions_of_several_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(a_set(BUCKETS), lambda d: first_sent(d, "otherlarge"), tmp_path, capsys)
    assert report["word"][-1] == "other/large"
    assert report["word"].index("full/large") < len(report["word"]) - 1
    assert is_wrong(report)


def test_flag_words_that_two_versions_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(a_set(), lambda d: shared_words(d, "other", "third"), tmp_path, capsys)
    assert report["codes"] == {"E405"}
    assert report["word"] == ["full", "other", "third"]
    assert is_wrong(report) or any("signal" in found or "flag" in found for found in report["findings"])


def test_words_that_count_the_epochs_of_two_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(a_set(handshake="kernel"), lambda d: shared_words(d, "other", "third"), tmp_path, capsys)
    assert report["codes"] == {"E404"}
    assert report["word"] == ["full", "other", "third"]
    assert is_wrong(report)


def test_a_version_that_sends_over_a_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(a_set(WITH_STATE), lambda d: on_a_state(d, "other"), tmp_path, capsys)
    assert report["codes"] == {"E306"}
    assert report["word"] == ["full", "other", "third"]
    assert is_wrong(report)
    assert any("overwritten" in found for found in report["findings"])


def test_what_is_wrong_with_a_version_alone_is_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lost(document: Document) -> None:
        items = plan_of(document, "otherlarge")["ranks"][1]["instructions"]
        del items[[n for n, item in enumerate(items) if item["do"] == "wait_event"][3]]

    report = shown(a_set(BUCKETS), lost, tmp_path, capsys)
    assert report["word"] == []
    assert report["command"][-4:] == ["--variant", "other", "--bucket", "large"]
    assert report["races"]
    assert not report["movement_exact"] or report["max_abs_error"] is None
    assert report["ok"] is False


def test_what_a_session_has_to_run_before() -> None:
    plans = a_set(BUCKETS)
    assert plans.walk_to(["full/small", "other/small"]) == ()
    assert plans.walk_to(["third/small", "full/small"]) == ("full/small", "other/small")
    assert plans.walk_to(["other/large", "third/small"]) == ("full/large", "full/small", "other/small")
    assert plans.walk_to(["full/small", "third/small"]) is None  # which comes behind others only
    assert plans.walk_to(["full/small", "other/large", "third/small"]) is None


def test_files_that_do_not_fit_a_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(dumps(a_set()))
    first_sent(document, "other")
    file, order = tmp_path / "set.plan", tmp_path / "order.json"
    file.write_text(json.dumps(document))
    told = [str(file), "--edited"]
    assert run(["verify", *told, "--counterexample", str(order)]) == 1
    whole = json.loads(order.read_text())
    follow = ["run", *told, "--device", "cpu", "--interleave", str(order)]
    assert run([*follow, "--steps", "2"]) == 2
    capsys.readouterr()
    for change, code, words in (
        ({"word": ["full", "no"]}, 3, "E613: the interleaving does not say which versions run"),
        ({"word": []}, 3, "E613: the interleaving does not say which versions run"),
        ({"plan": "0" * 64}, 3, "E613: the interleaving belongs to another plan"),
        ({"word": ["full", "third"]}, 1, "E614"),
        ({"word": ["full"]}, 3, "E613: rank"),
    ):
        order.write_text(json.dumps({**whole, **change}))
        assert run(follow) in (code, 3), change
        assert words in capsys.readouterr().err
    order.write_text(json.dumps(whole))
    assert run([*follow, "--variant", "full"]) == 3
    assert "belongs to another plan" in capsys.readouterr().err
