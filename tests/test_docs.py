"""What README and docs say is true: commands run, schedules compile, the lists are whole."""

import re
import shlex
from pathlib import Path

import pytest

from stepgraph.tools.cli import run

from support.sizes import SETS, SHIPPED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_commands_of_the_readme(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith("stepgraph ")]
    assert len(lines) >= 5
    for line in lines:
        assert run(shlex.split(line)[1:]) == 0, line
        assert capsys.readouterr().out


def test_commands_in_the_text_of_the_readme(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"`stepgraph ([^`]+)`", README)
    assert lines
    for line in lines:
        assert run(shlex.split(line)) == 0, line


def test_python_of_the_readme() -> None:
    (code,) = blocks(README, "python")
    names: dict[str, object] = {}
    exec(code, names)  # the README's own text
    assert tuple(names["latents"].shape) == (1, 96, 16)  # type: ignore[attr-defined]


def test_python_of_the_page_on_variants() -> None:
    (code,) = blocks((ROOT / "docs" / "variants.md").read_text(), "python")
    names: dict[str, object] = {}
    exec(code, names)  # the page's own text
    assert tuple(names["latents"].shape) == (1, 24, 64)  # type: ignore[attr-defined]


def test_yaml_of_the_readme_is_the_quickstarts() -> None:
    (block,) = blocks(README, "yaml")
    assert block in (ROOT / "plans" / "quickstart.yaml").read_text()


def test_every_shipped_schedule_is_listed_and_says_what_it_is() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", README, re.M)) == {*SHIPPED, *SETS}
    for name in (*SHIPPED, *SETS):
        assert (ROOT / "plans" / f"{name}.yaml").read_text().startswith("# ")


def test_schedules_of_the_docs_compile(tmp_path: Path) -> None:
    found = 0
    for path in sorted((ROOT / "docs").glob("*.md")):
        for block in blocks(path.read_text(), "yaml"):
            example = tmp_path / f"{path.stem}{found}.yaml"
            example.write_text(block)
            assert run(["run", str(example), "--steps", "1"]) == 0
            found += 1
    assert found


def test_commands_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    lines = [line for text in texts for block in blocks(text, "sh") for line in block.splitlines()]
    assert any(line.startswith("stepgraph verify quickstart --mutate") for line in lines)
    for line in [line for line in lines if line.startswith("stepgraph ")]:
        assert run(shlex.split(line)[1:]) == 0, line


def test_every_code_is_listed() -> None:
    from stepgraph.planner.manual import CODES

    rows = dict(re.findall(r"^\| (E\d+) \| (.*) \|$", (ROOT / "docs" / "diagnostics.md").read_text(), re.M))
    assert rows == {code: entry.title for code, entry in CODES.items()}


def test_links_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
