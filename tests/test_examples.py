"""The examples run, and are short."""

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")


EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def run(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> float:
    """The relative distance of its latents from the model's own loop."""
    monkeypatch.setattr(sys, "argv", [path.name, "--steps", "3", *options])
    runpy.run_path(str(path), run_name="__main__")
    found = re.search(r"latents \[.*\], (\S+) from the model's own", capsys.readouterr().out)
    assert found
    return float(found[1])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_equals_the_models_own_loop(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(path.read_text().splitlines()) < 80
    assert run(path, monkeypatch, capsys, "--ranks", "3") < 1e-5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_reads_weights(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bfloat16, whose relative rounding is 2**-8."""
    pytest.importorskip("accelerate")  # diffusers needs it to read a model of two dtypes, as Wan is
    names = runpy.run_path(str(path))
    names["tiny_model"]().save_pretrained(tmp_path)
    assert run(path, monkeypatch, capsys, "--weights", str(tmp_path)) < 4 * 2**-8


def test_examples_are_there() -> None:
    assert [path.stem for path in EXAMPLES] == ["flux_loop", "wan_loop"]
