"""The plan file: canonical, hashed, and refused when it is not whole. CASES 32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stepgraph
from stepgraph.planner.diagnostics import PlanError
from stepgraph.planner.plan import dumps, load_plan, loads, plan_hash


@pytest.fixture(scope="module")
def text() -> str:
    return dumps(stepgraph.compile("quickstart"))


def test_round_trip(text: str) -> None:
    assert dumps(loads(text)) == text


def test_text_is_canonical(text: str) -> None:
    document = json.loads(text)
    assert list(document) == ["format", "version", "sha256", "plan"]
    assert document["sha256"] == plan_hash(loads(text))
    assert text.count("\n") == 1


def changed(text: str, change: Callable[[Any], None], rehash: bool = False) -> str:
    document = json.loads(text)
    change(document)
    if rehash:
        import hashlib

        body = json.dumps(document["plan"], separators=(",", ":"), ensure_ascii=False)
        document["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps(document)


def refuse(text: str, code: str) -> None:
    with pytest.raises(PlanError) as error:
        loads(text)
    assert [d.code for d in error.value.diagnostics] == [code]
    assert error.value.diagnostics[0].hint


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_cut_off(text: str, cut: int) -> None:
    refuse(text[:cut], "E150")


@pytest.mark.parametrize("other", ["[]", "null", "{}", '{"format":"else"}', "[" * 100_000, "\x00", "NaN", "1" * 5000])
def test_other_documents(other: str) -> None:
    refuse(other, "E150")


def test_other_version(text: str) -> None:
    refuse(text.replace('"version":1', '"version":2', 1), "E151")


def edit_offset(document: Any) -> None:
    document["plan"]["targets"][0]["offset"] += 256


def test_edited(text: str) -> None:
    refuse(changed(text, edit_offset), "E152")


def test_edited_where_everything_still_fits(text: str) -> None:
    def swap(document: Any) -> None:
        items = document["plan"]["ranks"][0]["instructions"]
        items[3], items[4] = items[4], items[3]

    refuse(changed(text, swap), "E152")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["plan"].update(extra=1),
        lambda d: d["plan"].pop("mesh"),
        lambda d: d["plan"].update(arena_bytes="big"),
        lambda d: d["plan"].update(arena_bytes=1.5),
        lambda d: d["plan"]["ranks"][0]["instructions"][0].update(do="exec"),
        lambda d: d["plan"]["ranks"][0]["instructions"][0].pop("stream"),
        lambda d: d.update(plan=None),
        lambda d: d.update(plan=[[]]),
    ],
)
def test_schema(text: str, change: Callable[[Any], None]) -> None:
    refuse(changed(text, change, rehash=True), "E153")


def instruction(document: Any, do: str) -> Any:
    return next(i for i in document["plan"]["ranks"][1]["instructions"] if i["do"] == do)


def view_of_target(document: Any) -> int:
    return next(n for n, v in enumerate(document["plan"]["ranks"][1]["views"]) if v["buffer"] == 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: instruction(d, "run").update(stream=2),
        lambda d: instruction(d, "run").update(op=10_000),
        lambda d: instruction(d, "run").update(inputs=[-1]),
        lambda d: instruction(d, "send").update(peer=4),
        lambda d: instruction(d, "send").update(target=5),
        lambda d: instruction(d, "send")["region"].update(row=90),
        lambda d: instruction(d, "send")["source_region"].update(cols=33),
        lambda d: instruction(d, "signal")["flags"][0].update(slot=10_000),
        lambda d: instruction(d, "drop").update(buffer=0),
        lambda d: instruction(d, "load").update(batch=1),
        lambda d: instruction(d, "run").update(outputs=[view_of_target(d)]),
        lambda d: d["plan"]["ranks"][1]["views"][instruction(d, "load")["view"]].update(buffer=0),
        lambda d: instruction(d, "store").update(output=1),
        lambda d: d["plan"]["targets"][0].update(offset=1),
        lambda d: d["plan"]["targets"][0].update(offset=1 << 40),
        lambda d: d["plan"]["ranks"][0]["buffers"][0].update(rows=1 << 40),
        lambda d: d["plan"]["ranks"][0]["views"][0].update(shape=[3, 3]),
        lambda d: d["plan"]["groups"][0].append(0),
        lambda d: d["plan"]["ranks"].pop(),
        lambda d: d["plan"]["exchanges"][0].update(group=-1),
    ],
)
def test_references(text: str, change: Callable[[Any], None]) -> None:
    refuse(changed(text, change, rehash=True), "E154")


def test_files(tmp_path: Path, text: str) -> None:
    whole, binary = tmp_path / "a.plan", tmp_path / "b.plan"
    whole.write_text(text)
    binary.write_bytes(b"\xff\xfe\x00")
    assert dumps(load_plan(whole)) == text
    for path in (binary, tmp_path, tmp_path / "missing.plan"):
        with pytest.raises(PlanError, match="E150"):
            load_plan(path)
