"""CASES 31: YAML says one thing and parsers another. The author's meaning or an error with a place, in bounded time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.planner.diagnostics import ScheduleError
from stepgraph.planner.schedule import read_schedule
from stepgraph.planner.source import MAX_BYTES, parse_overrides, read, read_file, resolve

QUICKSTART = (Path(__file__).parents[1] / "plans" / "quickstart.yaml").read_text()


def refused(text: str, overrides: tuple[tuple[str, str], ...] = ()) -> list[tuple[str, int, int]]:
    with pytest.raises(ScheduleError) as error:
        read(text, "x.yaml", overrides)
    return [(d.code, d.place.line, d.place.column) if d.place else (d.code, 0, 0) for d in error.value.diagnostics]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-3", -3),
        ("+4", 4),
        ("1.5", 1.5),
        ("1e-3", 1e-3),
        ("2E4", 2e4),
        (".5", 0.5),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("y", "y"),
        ("n", "n"),
        ("Y", "Y"),
        ("seq", "seq"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("v1.2.3", "v1.2.3"),
        ("nope", "nope"),
        ("online", "online"),
        ("nullable", "nullable"),
    ],
)
def test_plain_scalars_mean_one_thing(text: str, value: object) -> None:
    found, surprise = resolve(text)
    assert (found, surprise) == (value, None)
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "No",
        "ON",
        "off",
        "True",
        "FALSE",
        "Null",
        "NULL",
        "1:30",
        "190:20:30",
        "010",
        "-07",
        "0o10",
        "0x1F",
        "0b11",
        "1_000",
        "1_0.5",
        "2026-01-01",
        "2026-01-01T10:00:00",
        ".inf",
        "-.INF",
        ".nan",
        "007",
    ],
)
@pytest.mark.parametrize("where", ["value", "key", "list"])
def test_surprises_are_refused(text: str, where: str) -> None:
    written = {"value": f"a: {text}\n", "key": f"{text}: 1\n", "list": f"a: [b, {text}]\n"}[where]
    column = {"value": 4, "key": 1, "list": 8}[where]
    assert refused(written)[0] == ("E106", 1, column)


@pytest.mark.parametrize("text", ["'no'", '"1:30"', "'010'"])
def test_quoted_scalars_are_names(text: str) -> None:
    assert read(f"a: {text}\n", "x.yaml").data == {"a": text[1:-1]}


def test_all_problems_at_once_in_the_order_of_the_file() -> None:
    text = "b: no\na: 1\nc: &x 5\na: 2\nd: *x\ne: {f: 010, f: 2}\n"
    assert refused(text) == [
        ("E106", 1, 4),
        ("E107", 3, 4),
        ("E105", 4, 1),
        ("E107", 5, 4),
        ("E106", 6, 8),
        ("E105", 6, 13),
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a: 1\n---\nb: 2\n", "E107"),
        ("<<: {a: 1}\n", "E107"),
        ("a: !!int 3\n", "E107"),
        ("a: !x 3\n", "E107"),
        ("[1, 2]\n", "E103"),
        ("", "E103"),
        ("# nothing\n", "E103"),
        ("just text\n", "E103"),
        ("? [a]\n: 1\n", "E103"),
        ("{1: 2}\n", "E103"),
        ("a: [1\n", "E101"),
        ("a: 'x\n", "E101"),
        ("\ta: 1\n", "E101"),
        ("a: 1\n  b: 2\n", "E101"),
        ("a: \x00\n", "E100"),
        ("a: \x07\n", "E100"),
        ("%YAML 9.9\n---\na: 1\n", "E101"),
        ("a: @x\n", "E101"),
    ],
)
def test_other_features_and_faults(text: str, code: str) -> None:
    assert refused(text)[0][0] == code


def test_marks_lead_to_keys_and_values() -> None:
    tree = read("a: {b: [1, twice]}\n", "x.yaml")
    place = tree.place(("a", "b", 1))
    assert (place.line, place.column, place.length, place.text) == (1, 12, 5, "a: {b: [1, twice]}")
    assert tree.key_place(("a", "b")).column == 5
    assert tree.place(("a", "missing", 3)).column == 4  # the nearest ancestor


@pytest.mark.parametrize(
    "make",
    [
        "'[' * 100_000",
        "'{a: ' * 100_000",
        "'- ' * 100_000",
        "'a: [' + '1,' * 300_000 + ']'",
        "'x' * (1 << 21)",
        "'\\n'.join(f'k{i}: 1' for i in range(100_000))",
        "'a: ' + '\"' * 500_000",
    ],
)
def test_hostile_texts_end_soon(make: str) -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from stepgraph.planner.source import read\nfrom stepgraph.planner.diagnostics import ScheduleError\n"
        f"try: read({make}, 'x.yaml')\nexcept ScheduleError as e: print(e.diagnostics[0].code)\n"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() in {"E108", "E101"}, done.stderr


def test_a_file_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as stream:
        stream.truncate(1 << 30)
    started = time.process_time()
    with pytest.raises(ScheduleError, match="E108"):
        read_file(path)
    assert time.process_time() - started < 5  # a sparse file of zeros would take longer to parse


def test_files_that_are_none(tmp_path: Path) -> None:
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"a: \xff\n")
    for path in (binary, tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(ScheduleError, match="E100"):
            read_file(path)
    assert MAX_BYTES == 1 << 20


def test_settings() -> None:
    assert parse_overrides(("model.layers=2,shape.seq=96", "mesh.ulysses=8")) == (
        ("model.layers", "2"), ("shape.seq", "96"), ("mesh.ulysses", "8"),
    )  # fmt: skip
    schedule = read_schedule(QUICKSTART, "q.yaml", (("model.layers", "5"), ("defaults.gather.via", "nccl")))
    assert schedule.model.layers == 5


@pytest.mark.parametrize("option", ["model.layers", "=3", "a..b=3", "a=", "a=1,,b=2", ""])
def test_settings_that_are_none(option: str) -> None:
    with pytest.raises(ScheduleError, match="E109"):
        parse_overrides((option,))


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        ("modle.layers", "2", "E109"),
        ("model.layers.x", "2", "E109"),
        ("model.layers", "no", "E106"),
        ("model.layers", "two", "E103"),
        ("model.layer", "2", "E102"),
        ("outputs.x", "2", "E109"),
        ("shape.seq", "0", "E103"),
    ],
)
def test_settings_that_do_not_fit_point_at_the_option(path: str, value: str, code: str) -> None:
    with pytest.raises(ScheduleError) as error:
        read_schedule(QUICKSTART, "q.yaml", ((path, value),))
    (found,) = error.value.diagnostics
    assert found.code == code
    assert found.place is not None
    assert (found.place.file, found.place.text) == ("--set", f"{path}={value}")


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_any_text_gives_a_tree_or_diagnostics(text: str) -> None:
    try:
        tree = read(text, "x.yaml")
    except ScheduleError as error:
        for diagnostic in error.diagnostics:
            assert diagnostic.code.startswith("E10")
            assert diagnostic.render()
    else:
        assert isinstance(tree.data, dict)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_edit_of_a_schedule_gives_a_schedule_or_diagnostics(data: st.DataObject) -> None:
    """Never a traceback, whatever a slip of the hand does."""
    from stepgraph.planner.compile import check_schedule

    start = data.draw(st.integers(0, len(QUICKSTART) - 1))
    length = data.draw(st.integers(0, 12))
    put = data.draw(
        st.sampled_from(["", " ", "\n", ":", "x", "q", "0", "[", "}", ", ", "- send: q\n", "null", "seq", "-1"])
    )
    text = QUICKSTART[:start] + put + QUICKSTART[start + length :]
    try:
        check_schedule(read_schedule(text, "x.yaml"))
    except ScheduleError as error:
        told = [diagnostic.render() for diagnostic in error.diagnostics]
    else:
        told = ["fine"]
    assert all(told)
