"""The table of docs/models.md is current: its rows and what the planner says; measured cells are within limits."""

import re

import pytest
import torch

pytest.importorskip("diffusers")

from stepgraph.runtime.adapters.family import FILES

from support.models_table import HEAD, PAGE, Row, families, page, planned
from support.parity import ROUNDINGS


def test_the_table_is_what_the_script_writes() -> None:
    text = PAGE.read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [(row[0].strip("`"), row[1].strip("`")) for row in rows] == list(families())
    found = [
        Row(kind, schedule, *planned(schedule), float(cells[-2]), float(cells[-1]))
        for cells, (kind, schedule) in zip(rows, families(), strict=True)
    ]
    assert text == page(found)
    for row in found:
        assert 0 < row.float32 <= ROUNDINGS[torch.float32]
        assert 0 < row.bfloat16 <= ROUNDINGS[torch.bfloat16]


def test_every_bound_class_has_a_tiny_model_and_stands_on_both_pages() -> None:
    assert {kind for kind, _ in families()} == set(FILES)
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", (PAGE.parent / "bindings.md").read_text(), re.M)
    assert listed == list(families())
    assert HEAD in PAGE.read_text()
